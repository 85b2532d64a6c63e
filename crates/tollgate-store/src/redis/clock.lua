-- What every script begins with: the time, and whether it is too late.
--
-- The server's own clock decides. ARGV[1] is the deadline by that clock, and the latest time that the caller has seen on this server.
-- A call that starts after its deadline changes nothing, because its caller has long since been answered otherwise. A clock that
-- stepped back stands still until it has caught up with what was seen, so that nothing is granted and nothing taken away; by more
-- than ten seconds it was set anew, and is believed. Tests pass in a clock: the time to go by follows, and what to add to every
-- expiry in ms, so that nothing runs out by the server's clock while the test's stands still.
--
-- A server that is out of memory (maxmemory, noeviction) refuses the first command of a script that may need some, and none after
-- a write. So a state that is there already is written all the same, since it takes next to no more: with an expiry first.

local call = redis.call
local time = call('TIME')
local server_us, shift_ms = time[1] * 1000000 + time[2], 0
local not_after_us, seen_us, test_us, test_shift_ms = string.match(ARGV[1], '^(%d+):(%d+):?(%d*):?(%d*)$')
if not not_after_us or server_us > not_after_us + 0 then return {ok = 'LATE'} end
if test_us ~= '' then server_us, shift_ms = test_us + 0, test_shift_ms + 0 end
local now_us = server_us
seen_us = seen_us + 0
if seen_us > now_us and seen_us - now_us <= 10000000 then now_us = seen_us end

local operation, holder = ARGV[2], ''
