-- GCRA as text-books have it: the time, the state and the arithmetic in seconds with fractions, four integers back.
-- KEYS[1] the key; ARGV: burst, rate per period, period in seconds, cost.
-- Answers: allowed, remaining, seconds until it may be tried again (-1 if allowed), seconds until all is as new.

local burst = tonumber(ARGV[1])
local rate = tonumber(ARGV[2])
local period = tonumber(ARGV[3])
local cost = tonumber(ARGV[4])

local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local emission_interval = period / rate
local tolerance = emission_interval * burst

local arrival = redis.call('GET', KEYS[1])
if arrival then
  arrival = math.max(tonumber(arrival), now)
else
  arrival = now
end

local next_arrival = arrival + emission_interval * cost
local room = now - (next_arrival - tolerance)
if room < 0 then
  return {0, 0, math.ceil(-room), math.ceil(arrival - now)}
end

local reset_after = next_arrival - now
redis.call('SET', KEYS[1], string.format('%.6f', next_arrival), 'PX', math.ceil(reset_after * 1000))
return {1, math.floor(room / emission_interval), -1, math.ceil(reset_after)}
