-- The stored state of entries (entries.lua): the log of a sliding window, and leases.
--
-- The entries of a single block are a string: a head of sixteen bytes (the byte 2, a letter for the kind, keep_us and total),
-- then the records. More entries are a hash: the field `d` has the head, the length and the next number in four bytes each, and
-- the rows; each block is a field named by its number. Format 1 was a list for a log and a sorted set for leases; such a key is
-- read whole, once.

local HEAD = '>c2I7I7'

local function entries_of(kind, width)
  return {
    kind = kind, width = width, keep_us = 0, total = 0, length = 0, blocks = 0, rows = '', next_number = 1,
    texts = {}, changed = {}, dropped = {}, is_hash = false
  }
end

-- Whether a key has another type, from the reply to a command; runs the command again to raise any other error.
local function is_other_type(reply, ...)
  if type(reply) ~= 'table' or not reply.err then return false end
  if not string.find(reply.err, 'WRONGTYPE', 1, true) then call(...) end
  return true
end

-- `convert` fills the entries from format 1, and returns whether the key had that format.
local function read_entries(key, kind, width, convert)
  local value, entries = redis.pcall('GET', key), entries_of(kind, width)
  if not value then return entries end
  if not is_other_type(value, 'GET', key) then
    local count = (#value - 16) / width
    if count < 1 or count % 1 > 0 or sub(value, 1, 2) ~= kind then not_ours() end
    local _, keep_us, total = unpack_struct(HEAD, value)
    local last_us = unpack_struct('>I7', value, #value - width + 1)
    entries.keep_us, entries.total, entries.length, entries.blocks, entries.next_number = keep_us, total, count, 1, 2
    entries.rows, entries.texts[1] = pack_struct(ROW, last_us, total, count, 1), sub(value, 17)
    return entries
  end
  local directory = redis.pcall('HGET', key, 'd')
  if is_other_type(directory, 'HGET', key, 'd') then
    if not convert(entries, key) then not_ours() end
    return entries
  end
  if not directory or #directory < 24 or sub(directory, 1, 2) ~= kind then not_ours() end
  local _
  _, entries.keep_us, entries.total, entries.length, entries.next_number = unpack_struct(HEAD .. 'I4I4', directory)
  entries.rows, entries.is_hash = sub(directory, 25), true
  entries.blocks = #entries.rows / ROW_BYTES
  work = work + entries.blocks
  entries.fetch = function(number) return call('HGET', key, number) or not_ours() end
  return entries
end

local function write_entries(key, entries, fresh_at_us, slack_us)
  if entries.blocks == 0 then
    call('DEL', key)
    return
  end
  local head = pack_struct(HEAD, entries.kind, entries.keep_us, entries.total)
  if entries.blocks == 1 then
    local _, _, _, number = entries_row(entries, 1)
    set(key, head .. entries_text(entries, number), fresh_at_us, slack_us)
    return
  end
  look_for_room(key)
  local expires_ms = expire_ms(key, fresh_at_us, slack_us)
  local words = {'HSET', key, 'd', head .. pack_struct('>I4I4', entries.length, entries.next_number) .. entries.rows}
  if entries.is_hash then
    -- First, because it is never refused for lack of memory, and neither is any command after it.
    call('PEXPIREAT', key, expires_ms)
    if #entries.dropped > 0 then call('HDEL', key, unpack(entries.dropped)) end
  else
    call('DEL', key)
    for number in pairs(entries.texts) do entries.changed[number] = true end
  end
  for number in pairs(entries.changed) do
    words[#words + 1], words[#words + 2] = number, entries.texts[number]
    if #words > 1000 then
      call(unpack(words))
      words = {'HSET', key}
    end
  end
  if #words > 2 then call(unpack(words)) end
  if not entries.is_hash then call('PEXPIREAT', key, expires_ms) end
end
