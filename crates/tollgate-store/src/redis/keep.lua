-- What the scripts have in common about keys: when one runs out, and what to say of one that is not ours.
--
-- Every write sets the key's expiry anew: the instant at which the state says no more than none would, and a little longer, so
-- that a clock that is set back a little still finds it. A settlement never sets an earlier one than there is (no_sooner).

local format, no_sooner = string.format, false

-- How many blocks of logs and leases this call has met, and after how many it leaves the rest of its charges or settlements to
-- another call: the server serves nobody else meanwhile.
local work, MOST_WORK = 0, 1000

-- How many of a limit's numbers a hold keeps, by strategy; the others are zeros.
local HELD_NUMBERS = {5, 5, 3, 2, 2, 2}

-- What is kept under a key is not ours, or of a version that we do not know.
local function not_ours()
  error('TOLLGATE_STATE', 0)
end

-- A whole number that is kept in decimals: more digits than a number of ours has were written by somebody else.
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

-- Out of memory Redis refuses what may take more of it, but only until the script has written something. So the first write tells
-- whether there is room for new keys: true, false, or nil before it.
local has_room = nil

-- Before a first write that is never refused. Sets nothing, because the key is there.
local function look_for_room(key)
  if has_room ~= nil then return end
  local reply = redis.pcall('SET', key, '', 'NX')
  has_room = not (type(reply) == 'table' and reply.err and string.find(reply.err, 'OOM', 1, true))
end

-- A key that is there is counted on, so out of memory its expiry is written first; a new one is refused.
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
  -- Where nothing was written, this says again what is wrong.
  call('SET', key, value, 'PXAT', expires_ms)
end

local function set(key, value, fresh_at_us, slack_us)
  set_until(key, value, expire_ms(key, fresh_at_us, slack_us))
end
