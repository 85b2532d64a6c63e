-- Fast path of a sliding window counter in the newest format, with counts of the limit's own window only. any_counter.lua charges
-- all others.

--- constants
local limit_N, window_us_N = ARGV[at_N + 5] + 0, ARGV[at_N + 6] + 0
-- A state already stays for up to two windows, so it needs no slack.
local late_us_N = 2 * window_us_N + 999 + 1000 * shift_ms

--- look
local length_us_N, start_us_N, prev_N, cur_N = 0, 0, 0, 0
if value_N then
  if #value_N ~= 30 then break end
  local kind
  kind, length_us_N, start_us_N, prev_N, cur_N = read('>c2I7I7I7I7', value_N)
  if kind ~= '\2c' or length_us_N ~= window_us_N then break end
end
local allowed_N, after_start_us_N, after_prev_N, after_cur_N =
  sliding_window_counter_fit(start_us_N, prev_N, cur_N, limit_N, window_us_N, cost_N, now_us)
local counts_from_us_N = now_us < start_us_N and start_us_N or now_us
local fresh_at_us_N, slack_us_N = start_us_N + 2 * window_us_N, 0

--- found
length_us_N, start_us_N, prev_N, cur_N, 0, 0, 0, 0

--- answer
(value_N or NO_COUNTS)

--- change
-- The same window as before: only its count changes, in place. The expiry was written with the window, and only somebody else can have
-- changed it since. To ask for it costs as much as the change itself, so only the first charge of a call asks whether the key expires
-- late enough.
if value_N and after_start_us_N == start_us_N then
  local left_ms = charge == 1 and each('PTTL', key_N)
  if charge > 1 or type(left_ms) == 'number' and left_ms + next_ms > (after_start_us_N + late_us_N) / 1000 then
    is_changed = type(each('SETRANGE', key_N, '23', pack('>I7', after_cur_N))) == 'number'
  end
end

--- make
local new_N = pack('>c2I7I7I7I7', '\2c', window_us_N, after_start_us_N, after_prev_N, after_cur_N)
local ms_N = format('%d', (after_start_us_N + late_us_N) / 1000)
