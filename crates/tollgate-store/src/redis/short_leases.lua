-- The common charge of a concurrency limit, in as few steps as it takes: one lease under a name, of a key whose leases are a single
-- block, that fits and ends last. Everything else goes on to charge.lua. See concurrency.lua, entries_kept.lua, hold.lua.

if operation == 'hold' and #KEYS == 2 then
  local key, cost, limit, lease_us = KEYS[1], ARGV[5] + 0, ARGV[8] + 0, ARGV[9] + 0
  local name, ttl_us = ARGV[13], math.max(ARGV[14] + 0, lease_us)
  local value, held, read, format, sub = redis.pcall('GET', key), redis.pcall('GET', KEYS[2]), struct.unpack, string.format, string.sub
  local size, total, from, last_us, end_us = 16, 0, 17, 0, now_us + lease_us
  if value then
    size = type(value) == 'string' and #value or 0
    if size < 46 or size > 3826 or size % 30 ~= 16 or sub(value, 1, 2) ~= '\2h' then
      total = limit
    else
      total, last_us = read('>I7', value, 10), read('>I7', value, size - 29)
      while from < size do
        local ended_us, gone = read('>I7I7', value, from)
        if ended_us > now_us then break end
        from, total = from + 30, total - gone
      end
    end
  end
  if not held and last_us <= end_us and cost > 0 and cost <= limit - total and #name == 32 then
    local used_us = math.max(last_us - now_us, 0)
    local hold = redis.pcall(
      'SET', KEYS[2],
      format(
        '\2 0 %d %d %s %d,1,%d,0,%d\n6 %d %d %s %s %s 0 0 0\n\n%s',
        now_us + ttl_us, ttl_us, name, now_us, total, used_us, cost, end_us, key, ARGV[8], ARGV[9], ARGV[15]
      ),
      'PXAT', format('%d', (now_us + ttl_us) / 1000 + 1 + shift_ms)
    )
    if not hold.err then
      local record = struct.pack(
        '>I7I7I4I4I4I4', end_us, cost, tonumber(sub(name, 1, 8), 16), tonumber(sub(name, 9, 16), 16),
        tonumber(sub(name, 17, 24), 16), tonumber(sub(name, 25, 32), 16)
      )
      local until_us = end_us + math.min(lease_us, 1000000)
      -- Never refused for want of memory, because the hold was written.
      call(
        'SET', key, struct.pack('>c2I7I7', '\2h', 0, total + cost) .. (value and sub(value, from) or '') .. record,
        'PXAT', format('%d', until_us / 1000 + 1 + shift_ms)
      )
      return {now_us, 1, total, 0, used_us}
    end
  end
end
