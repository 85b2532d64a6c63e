-- Where the parts of a hold are, on a cluster: a hold is known by its name alone, and its parts are wherever their slots are.
--
-- KEYS[1] is the hold's place. get answers it, or nothing. claim does the same, and writes ARGV[3], to last for ARGV[4] us, if
-- there is nothing; set writes it anyway.

local place = call('GET', KEYS[1])
if operation == 'get' or (operation == 'claim' and place) then return place end
call('SET', KEYS[1], ARGV[3], 'PXAT', math.floor((now_us + ARGV[4]) / 1000) + 1 + shift_ms)
return false
