-- The place of a hold on a cluster: a hold is known by its id alone, and this value says in which slots its parts are.
--
-- KEYS[1] is the place. get returns its value, or nothing. claim does the same, and if there is none, writes ARGV[3] with a time
-- to live of ARGV[4] us. set always writes.

local place = call('GET', KEYS[1])
if operation == 'get' or (operation == 'claim' and place) then return place end
call('SET', KEYS[1], ARGV[3], 'PXAT', math.floor((now_us + ARGV[4]) / 1000) + 1 + shift_ms)
return false
