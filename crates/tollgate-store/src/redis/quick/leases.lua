-- Fast path of leases in a single block with room for one more, which ends last. any_leases.lua charges all others. The arithmetic is
-- that of concurrency.lua.

--- constants
local limit_N, lease_us_N = ARGV[at_N + 5] + 0, ARGV[at_N + 6] + 0
local ms_N = format('%d', (now_us + lease_us_N + (lease_us_N < 1000000 and lease_us_N or 1000000)) / 1000 + 1 + shift_ms)
if lease_us_N > lasts_us then lasts_us = lease_us_N end

--- look
local counts_from_us_N = now_us + lease_us_N
local size_N, total_N, from_N, last_us_N = 16, 0, 17, 0
if value_N then
  size_N = #value_N
  -- The block has room for one more and at least one record, and its length is valid.
  if size_N < 46 or size_N > 3826 or size_N % 30 ~= 16 or sub(value_N, 1, 2) ~= '\2h' then break end
  total_N, last_us_N = read('>I7', value_N, 10), read('>I7', value_N, size_N - 29)
  if last_us_N > counts_from_us_N then break end
  local ended_us, gone = read('>I7I7', value_N, 17)
  while ended_us <= now_us do
    from_N, total_N = from_N + 30, total_N - gone
    if from_N >= size_N then break end
    ended_us, gone = read('>I7I7', value_N, from_N)
  end
end
local allowed_N, wait_us_N = cost_N > 0 and cost_N <= limit_N - total_N, 0
if cost_N > 0 and not allowed_N then
  -- Until enough of the leases that end first have ended.
  local at, over = from_N, total_N - (limit_N - cost_N)
  repeat
    local end_us, held = read('>I7I7', value_N, at)
    at, over, wait_us_N = at + 30, over - held, end_us - now_us
  until over <= 0 or at >= size_N
end
-- A hold lasts as long as its leases, but for a lease that is denied in shadow mode.
if is_hold and not allowed_N and ARGV[at_N + 1] == '1' then break end
local left_us_N = last_us_N > now_us and last_us_N - now_us or 0
local fresh_at_us_N, slack_us_N = now_us + left_us_N, lease_us_N

--- found
total_N, wait_us_N, left_us_N

--- answer
pack('>I7I7I7', total_N, wait_us_N, left_us_N)

--- make
local new_N
if value_N then
  local record = pack('>I7I7c16', counts_from_us_N, cost_N, holder)
  new_N = pack('>c2I7I7', '\2h', 0, total_N + cost_N) .. sub(value_N, from_N) .. record
else
  new_N = pack('>c2I7I7I7I7c16', '\2h', 0, cost_N, counts_from_us_N, cost_N, holder)
end
