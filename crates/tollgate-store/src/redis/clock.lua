-- What every script begins with: the time, and whether it is too late.
--
-- The server's own clock decides. ARGV[1] is the deadline by that clock: a call that starts after it changes nothing, because
-- its caller has long since been answered otherwise. Tests pass in a clock: the deadline is then followed by the time to go by
-- and by what to add to every expiry in ms, so that nothing runs out by the server's clock while the test's stands still.
--
-- A server that is out of memory (maxmemory, noeviction) refuses the first command of a script that may need some, and none after
-- a write. So a state that is there already is written all the same, since it takes next to no more: with an expiry first.

local call = redis.call
local time = call('TIME')
local now_us, shift_ms = time[1] * 1000000 + time[2], 0
local not_after_us = tonumber(ARGV[1])
if not not_after_us then
  local deadline, now, shift = string.match(ARGV[1], '^(%d+):(%d+):(%d+)$')
  if now_us <= deadline + 0 then now_us, shift_ms, not_after_us = now + 0, shift + 0, now + 0 end
end
if not not_after_us or now_us > not_after_us then return {ok = 'LATE'} end

local operation, holder = ARGV[2], ''
