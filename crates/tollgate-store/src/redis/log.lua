-- The stored state of a sliding window: entries of fourteen bytes, `l`.

-- Format 1: the total, then the time and the cost of each entry, oldest first.
local function convert_log(log, key)
  local found = redis.pcall('LRANGE', key, 0, -1)
  if is_other_type(found, 'LRANGE', key, 0, 0) then return false end
  if #found < 3 or #found % 2 == 0 then return false end
  for at = 2, #found, 2 do
    local at_us, cost = tonumber(found[at]), tonumber(found[at + 1])
    if not at_us or not cost then return false end
    entries_insert(log, at_us, cost, '')
  end
  -- Format 1 has no retention time; it is set to the reader's window when the log is charged.
  return true
end

local function read_log(key)
  return read_entries(key, '\2l', 14, convert_log)
end

local function write_log(key, log)
  write_entries(key, log, math.max(sliding_window_fresh_at(log), now_us), log.keep_us)
end

-- Adds a charge that fits, and writes the log.
local function take_log(key, log, limit, window_us, cost, at_us)
  sliding_window_take(log, limit, window_us, cost, at_us, entries_merge_oldest_until)
  write_log(key, log)
end
