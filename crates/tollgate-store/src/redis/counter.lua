-- The stored state of a sliding window counter, a string: the byte 2, `c`, and window_us, start_us, the count of the previous
-- window and of the current one, seven bytes each; then the same four numbers for the other window length, while its counts
-- matter. Before, it was number:prev:cur:window_us in decimal, twice with two lengths, where number counts windows since 1970;
-- and start_us:prev:cur in format 1.

local NONE = {window_us = 0, start_us = 0, prev = 0, cur = 0}

local function read_counts(value, at)
  local window_us, start_us, prev, cur = struct.unpack('>I7I7I7I7', value, at)
  if window_us == 0 then not_ours() end
  return {window_us = window_us, start_us = start_us, prev = prev, cur = cur}
end

-- Counts without a window length have that of the reader.
local function read_counter(key, window_us)
  local value = call('GET', key)
  if not value then return NONE, NONE end
  if string.sub(value, 1, 2) == '\2c' then
    if #value ~= 30 and #value ~= 58 then not_ours() end
    return read_counts(value, 3), #value == 58 and read_counts(value, 31) or NONE
  end
  local number, prev, cur, length_us, more = string.match(value, '^(%d+):(%d+):(%d+):?(%d*)(:?[%d:]*)$')
  if not number then not_ours() end
  if length_us == '' then
    return {window_us = window_us, start_us = whole(number), prev = whole(prev), cur = whole(cur)}, NONE
  end
  local function counts()
    if length_us + 0 == 0 then not_ours() end
    return {window_us = whole(length_us), start_us = whole(number * length_us), prev = whole(prev), cur = whole(cur)}
  end
  local newer = counts()
  if more == '' then return newer, NONE end
  number, prev, cur, length_us = string.match(more, '^:(%d+):(%d+):(%d+):(%d+)$')
  if not number then not_ours() end
  return newer, counts()
end

local function write_counter(key, newer, older)
  local fresh_at_us = sliding_window_counter_fresh_at(newer)
  local value = struct.pack('>c2I7I7I7I7', '\2c', newer.window_us, newer.start_us, newer.prev, newer.cur)
  if older.window_us > 0 then
    fresh_at_us = math.max(fresh_at_us, sliding_window_counter_fresh_at(older))
    value = value .. struct.pack('>I7I7I7I7', older.window_us, older.start_us, older.prev, older.cur)
  end
  -- A state already stays for up to two windows, so it needs no slack.
  set(key, value, math.max(fresh_at_us, now_us) - 1, 0)
end
