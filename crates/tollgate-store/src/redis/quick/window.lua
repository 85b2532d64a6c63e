-- Fast path of a fixed window in the newest format. any_window.lua charges all others.

--- constants
local limit_N, window_us_N, align_N = ARGV[at_N + 5] + 0, ARGV[at_N + 6] + 0, ARGV[at_N + 7] + 0
local late_us_N = (window_us_N < 1000000 and window_us_N or 1000000) + 1000 + 1000 * shift_ms

--- look
local end_us_N, count_N, start_us_N = 0, 0, 0
if value_N then
  if #value_N ~= 23 then break end
  local kind
  kind, end_us_N, count_N, start_us_N = read('>c2I7I7I7', value_N)
  if kind ~= '\2w' then break end
end
local allowed_N, after_us_N, after_N, after_start_us_N =
  fixed_window_charge(end_us_N, count_N, start_us_N, limit_N, window_us_N, align_N, cost_N, now_us)
local counts_from_us_N = after_start_us_N > now_us and after_start_us_N or now_us
local fresh_at_us_N, slack_us_N = end_us_N, end_us_N - start_us_N

--- found
end_us_N, count_N, start_us_N

--- answer
(value_N or NO_WINDOW)

--- change
-- The window is still open: only its count changes, in place. The expiry was written with the window, and only somebody else can have
-- changed it since. To ask for it costs as much as the change itself, so only the first charge of a call asks whether the key expires
-- late enough.
if value_N and after_us_N == end_us_N then
  local left_ms = charge == 1 and each('PTTL', key_N)
  if charge > 1 or type(left_ms) == 'number' and left_ms + next_ms > (after_us_N + late_us_N) / 1000 then
    is_changed = type(each('SETRANGE', key_N, '9', pack('>I7', after_N))) == 'number'
  end
end

--- make
local new_N = pack('>c2I7I7I7', '\2w', after_us_N, after_N, after_start_us_N)
local ms_N = format('%d', (after_us_N + late_us_N) / 1000)
