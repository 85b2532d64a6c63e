-- The start of every script: the time, and whether the call is late.
--
-- The server's own clock decides. ARGV[1] is the deadline by that clock and the latest server time that the caller has seen. A
-- call that starts after its deadline changes nothing, because its caller has already got another answer. If the clock stepped
-- back, the time stands still until the clock has caught up, so that nothing is granted or taken away; if it stepped back by more
-- than ten seconds, it was set on purpose, and the new time is used. Tests pass in a clock: ARGV[1] then also has the time to use
-- and what to add to every expiry in ms, so that nothing expires by the server's clock while the test's clock stands still.
--
-- A server that is out of memory (maxmemory, noeviction) refuses the first command of a script that may need memory, but no
-- command after a write. So the state of an existing key can still be written, since it needs hardly more memory: its expiry is
-- written first.

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
