-- Sliding window counter: a string, number:prev:cur:window_us, where number counts the windows before the current one since 1970;
-- and the same again for the other length, while that counts. Format 1 was start_us:prev:cur.

local NONE = {window_us = 0, start_us = 0, prev = 0, cur = 0}

-- Counts that do not say how long their window is are of the reader's.
local function read_counter(key, window_us)
  local value = call('GET', key)
  if not value then return NONE, NONE end
  local number, prev, cur, length_us, more = string.match(value, '^(%d+):(%d+):(%d+):?(%d*)(:?[%d:]*)$')
  if not number then not_ours() end
  if length_us == '' then
    return {window_us = window_us, start_us = number + 0, prev = prev + 0, cur = cur + 0}, NONE
  end
  local newer = {window_us = length_us + 0, start_us = number * length_us, prev = prev + 0, cur = cur + 0}
  if newer.window_us == 0 then not_ours() end
  if more == '' then return newer, NONE end
  number, prev, cur, length_us = string.match(more, '^:(%d+):(%d+):(%d+):(%d+)$')
  if not number or length_us + 0 == 0 then not_ours() end
  return newer, {window_us = length_us + 0, start_us = number * length_us, prev = prev + 0, cur = cur + 0}
end

local function write_counter(key, newer, older)
  local fresh_at_us = sliding_window_counter_fresh_at(newer)
  local value = format('%d:%d:%d:%d', newer.start_us / newer.window_us, newer.prev, newer.cur, newer.window_us)
  if older.window_us > 0 then
    fresh_at_us = math.max(fresh_at_us, sliding_window_counter_fresh_at(older))
    value = value .. format(':%d:%d:%d:%d', older.start_us / older.window_us, older.prev, older.cur, older.window_us)
  end
  -- It stays for up to two windows as it is, so there is no slack.
  set(key, value, math.max(fresh_at_us, now_us) - 1, 0)
end
