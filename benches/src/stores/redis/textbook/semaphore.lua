-- A semaphore as text-books have it: a member of a sorted set for each lease, by its end. It is released by ZREM.
-- KEYS[1] the key; ARGV: limit, lease in seconds, a name of the lease that no other has. Answers 1 if allowed.

local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now_us)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now_us + tonumber(ARGV[2]) * 1000000, ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
