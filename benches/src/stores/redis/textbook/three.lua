-- Three limits of one key in one script, as a user would join the text-book scripts: looked at first, then charged.
-- KEYS: a bucket, a fixed window, a sliding window counter; ARGV: limit, window in seconds, rate a second, burst. Answers 1 if allowed.

local limit, window, rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000

local arrival = math.max(tonumber(redis.call('GET', KEYS[1])) or now, now) + 1 / rate
if arrival - now > burst / rate then return 0 end

local count = tonumber(redis.call('GET', KEYS[2])) or 0
if count + 1 > limit then return 0 end

local current = math.floor(now / window)
local counts = redis.call('HMGET', KEYS[3], current, current - 1)
local used = (tonumber(counts[1]) or 0) + (tonumber(counts[2]) or 0) * (1 - now / window + current)
if used + 1 > limit then return 0 end

redis.call('SET', KEYS[1], string.format('%.6f', arrival), 'PX', math.ceil((arrival - now) * 1000))
if redis.call('INCR', KEYS[2]) == 1 then redis.call('EXPIRE', KEYS[2], window) end
redis.call('HINCRBY', KEYS[3], current, 1)
redis.call('EXPIRE', KEYS[3], 2 * window)
return 1
