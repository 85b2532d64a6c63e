-- A sliding window counter as text-books have it: counts of this window and the last in a hash, weighed with fractions.
-- KEYS[1] the key; ARGV: limit, window in seconds. Answers 1 if allowed.

local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local current = math.floor(now / window)
local counts = redis.call('HMGET', KEYS[1], current, current - 1)
local used = (tonumber(counts[1]) or 0) + (tonumber(counts[2]) or 0) * (1 - now / window + current)
if used + 1 > limit then return 0 end
redis.call('HINCRBY', KEYS[1], current, 1)
redis.call('EXPIRE', KEYS[1], 2 * window)
return 1
