-- Fast path of a log in a single block with room for one more, and with the retention time of this window. any_log.lua charges all
-- others. The arithmetic is that of sliding_window.lua.

--- constants
local limit_N, window_us_N = ARGV[at_N + 5] + 0, ARGV[at_N + 6] + 0
local ms_N = format('%d', (now_us + window_us_N + (window_us_N < 1000000 and window_us_N or 1000000)) / 1000 + 1 + shift_ms)

--- look
local size_N, total_N, from_N, newest_us_N = 16, 0, 17, 0
if value_N then
  size_N = #value_N
  -- The block has room for one more and at least one record, and its length is valid.
  if size_N < 30 or size_N > 1794 or size_N % 14 ~= 2 or sub(value_N, 1, 2) ~= '\2l' then break end
  local keep_us
  keep_us, total_N = read('>I7I7', value_N, 3)
  newest_us_N = read('>I7', value_N, size_N - 13)
  if keep_us ~= window_us_N or newest_us_N >= now_us then break end
  local at_us, gone = read('>I7I7', value_N, 17)
  while at_us + window_us_N <= now_us do
    from_N, total_N = from_N + 14, total_N - gone
    if from_N >= size_N then break end
    at_us, gone = read('>I7I7', value_N, from_N)
  end
end
local allowed_N, wait_us_N = cost_N > 0 and cost_N <= limit_N - total_N, 0
if cost_N > 0 and not allowed_N then
  -- Until enough of the oldest entries have run out.
  local at, over = from_N, total_N - (limit_N - cost_N)
  repeat
    local at_us, charged = read('>I7I7', value_N, at)
    at, over, wait_us_N = at + 14, over - charged, at_us + window_us_N - now_us
  until over <= 0 or at >= size_N
end
local last_us_N = newest_us_N + window_us_N - now_us
if last_us_N < 0 then last_us_N = 0 end
local counts_from_us_N, fresh_at_us_N, slack_us_N = now_us, newest_us_N + window_us_N, window_us_N

--- found
total_N, wait_us_N, last_us_N

--- answer
pack('>I7I7I7', total_N, wait_us_N, last_us_N)

--- make
local new_N
if value_N then
  new_N = pack('>c2I7I7', '\2l', window_us_N, total_N + cost_N) .. sub(value_N, from_N) .. pack('>I7I7', now_us, cost_N)
else
  new_N = pack('>c2I7I7I7I7', '\2l', window_us_N, cost_N, now_us, cost_N)
end
