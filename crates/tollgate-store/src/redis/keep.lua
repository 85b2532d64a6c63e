-- Functions for keys that all scripts use: when a key expires, and the error for a value that was not written by us.
--
-- Every write renews the expiry of the key: the instant at which the state equals no state, and a little longer, for a clock that
-- is set back a little. A settlement never sets an earlier expiry than the current one (no_sooner).

local format, no_sooner = string.format, false

-- How many blocks of logs and leases this call has read, and after how many it leaves its remaining charges or settlements to
-- another call, because the server runs nothing else meanwhile.
local work, MOST_WORK = 0, 1000

-- How many of a limit's numbers a hold stores, by strategy; the others are zeros.
local HELD_NUMBERS = {5, 5, 3, 2, 2, 2}

-- The value of a key was not written by us, or has an unknown version.
local function not_ours()
  error('TOLLGATE_STATE', 0)
end

-- A stored decimal number. One with more digits than any of our numbers was not written by us.
local function whole(digits)
  local number = digits + 0
  if number > 9007199254740991 then not_ours() end
  return number
end

local function expire_ms(key, fresh_at_us, slack_us)
  local until_us = fresh_at_us + (slack_us < 1000000 and slack_us or 1000000)
  local ms = (until_us - until_us % 1000) / 1000 + 1 + shift_ms
  if no_sooner then
    local left_ms = call('PTTL', key)
    if left_ms > 0 then ms = math.max(ms, time[1] * 1000 + math.floor(time[2] / 1000) + left_ms) end
  end
  return format('%d', ms)
end

-- Without memory, Redis refuses commands that may need more, but only until the script has written something. So the first write
-- shows whether there is room for new keys: true, false, or nil before the first write.
local has_room = nil

-- For use before a first write that is never refused. Sets nothing, because the key exists.
local function look_for_room(key)
  if has_room ~= nil then return end
  local reply = redis.pcall('SET', key, '', 'NX')
  has_room = not (type(reply) == 'table' and reply.err and string.find(reply.err, 'OOM', 1, true))
end

-- An existing key must still be charged without memory, so its expiry is written first; a new key is refused.
local function set_until(key, value, expires_ms)
  local reply = redis.pcall('SET', key, value, 'PXAT', expires_ms)
  if not reply.err then
    if has_room == nil then has_room = true end
    return
  end
  if string.find(reply.err, 'OOM', 1, true) then
    has_room = false
    if call('PTTL', key) ~= -2 then call('PEXPIREAT', key, expires_ms) end
  end
  -- If nothing was written, this repeats the error.
  call('SET', key, value, 'PXAT', expires_ms)
end

local function set(key, value, fresh_at_us, slack_us)
  set_until(key, value, expire_ms(key, fresh_at_us, slack_us))
end
