-- A fixed window as text-books have it: INCR, and EXPIRE with the first.
-- KEYS[1] the key; ARGV: limit, window in seconds. Answers 1 if allowed. Refused calls count too.

local count = redis.call('INCR', KEYS[1])
if count == 1 then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
if count > tonumber(ARGV[1]) then return 0 end
return 1
