-- The common charge of a sliding window, in as few steps as it takes: one key whose log is a single block, kept for as long as this
-- window is, and a cost that fits. Everything else goes on to charge.lua. See sliding_window.lua, entries_kept.lua.

if operation == 'charge' and #KEYS == 1 then
  local key, cost, limit, window_us = KEYS[1], ARGV[5] + 0, ARGV[8] + 0, ARGV[9] + 0
  local value, read = redis.pcall('GET', key), struct.unpack
  local size, total, from, keep_us, newest_us = 16, 0, 17, window_us, 0
  if value then
    size = type(value) == 'string' and #value or 0
    -- With room for one more in the block, at least one record, and nothing broken.
    if size < 30 or size > 1794 or size % 14 ~= 2 or string.sub(value, 1, 2) ~= '\2l' then
      keep_us = 0
    else
      keep_us, total = read('>I7I7', value, 3)
      newest_us = read('>I7', value, size - 13)
      while from < size do
        local at_us, gone = read('>I7I7', value, from)
        if at_us + window_us > now_us then break end
        from, total = from + 14, total - gone
      end
    end
  end
  if keep_us == window_us and newest_us < now_us and cost > 0 and cost <= limit - total then
    local head = struct.pack('>c2I7I7', '\2l', window_us, total + cost)
    local record = struct.pack('>I7I7', now_us, cost)
    local until_us = now_us + window_us + math.min(window_us, 1000000)
    local written = redis.pcall(
      'SET', key, head .. (value and string.sub(value, from) or '') .. record,
      'PXAT', string.format('%d', until_us / 1000 + 1 + shift_ms)
    )
    if not written.err then return {now_us, 1, total, 0, math.max(newest_us + window_us - now_us, 0)} end
  end
end
