-- A sliding window as text-books have it: a member of a sorted set for each call, by its time.
-- KEYS[1] the key; ARGV: limit, window in seconds, a name of the call that no other has. Answers 1 if allowed.

local window_us = tonumber(ARGV[2]) * 1000000
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now_us - window_us)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now_us, ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
