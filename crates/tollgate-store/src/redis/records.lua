-- The records of one kind.
--
-- KEYS[1] is a hash from id to 'end in us, 0 for never', a colon and the payload; the empty id has the revision. KEYS[2] is a
-- sorted set of the ids that end, by their end. Both keys expire once all their records have ended.
--
-- read returns the time and the revision, and the whole hash unless ARGV[3] is the revision. put stores ARGV[3] (id), ARGV[4]
-- (payload) and ARGV[5] (end, 0 for never), if there are fewer than ARGV[6] others; if not, it removes the one that ends first if
-- ARGV[7] is 1, and answers FULL if it is not. remove returns how many it removed.

local records, ends = KEYS[1], KEYS[2]
local function whole(number) return string.format('%.0f', number) end
local now, revision = whole(now_us), call('HGET', records, '') or '0'

if operation == 'read' then
  if revision == ARGV[3] then return {now, revision} end
  return {now, revision, call('HGETALL', records)}
end

local id = ARGV[3]

local function drop(one)
  call('ZREM', ends, one)
  return call('HDEL', records, one)
end

local function changed()
  call('HSET', records, '', whole(math.max(now_us, revision + 1)))
  local count = call('HLEN', records) - 1
  if count > 0 and call('ZCARD', ends) < count then
    call('PERSIST', records)
    call('PERSIST', ends)
    return
  end
  local last = call('ZRANGE', ends, -1, -1, 'WITHSCORES')[2] or now
  local at_ms = whole(math.floor(math.max(last + 0, now_us) / 1000) + 1000 + shift_ms)
  call('PEXPIREAT', records, at_ms)
  call('PEXPIREAT', ends, at_ms)
end

if operation == 'remove' then
  local ended = call('ZSCORE', ends, id)
  local removed = drop(id)
  if removed > 0 then changed() end
  if ended and ended + 0 <= now_us then return {now, '0'} end
  return {now, whole(removed)}
end

for _, ended in ipairs(call('ZRANGEBYSCORE', ends, '-inf', now)) do drop(ended) end
local others = call('HLEN', records) - call('HEXISTS', records, '')
if others >= ARGV[6] + 0 and call('HEXISTS', records, id) == 0 then
  local first = call('ZRANGE', ends, 0, 0)[1]
  if ARGV[7] ~= '1' or not first then return {now, 'FULL'} end
  drop(first)
end
call('HSET', records, id, ARGV[5] .. ':' .. ARGV[4])
if ARGV[5] == '0' then call('ZREM', ends, id) else call('ZADD', ends, ARGV[5], id) end
changed()
return {now, 'KEPT'}
