-- The common settlement of a lease, in as few steps as it takes: a hold of one lease, of a key whose leases are a single block of which
-- more than this one is left, or this one alone. Answers nothing of everything else. See entries_kept.lua, hold.lua.

local function settle_lease(hold_key)
  local value, sub = redis.pcall('GET', hold_key), string.sub
  local hold_end_us, name, cost, end_us, key = string.match(
    type(value) == 'string' and value or '', '^\2 0 (%d+) %d+ (%x+) [%d,]+\n6 (%d+) (%d+) (%S+) [%d ]+\n\n'
  )
  local leases = key and hold_end_us + 0 > now_us and end_us + 0 > now_us and #name == 32 and redis.pcall('GET', key)
  if type(leases) == 'string' and #leases >= 46 and #leases % 30 == 16 and sub(leases, 1, 2) == '\2h' then
    local record = struct.pack(
      '>I7I7I4I4I4I4', end_us + 0, cost + 0, tonumber(sub(name, 1, 8), 16), tonumber(sub(name, 9, 16), 16),
      tonumber(sub(name, 17, 24), 16), tonumber(sub(name, 25, 32), 16)
    )
    local at = string.find(leases, record, 17, true)
    -- What is found elsewhere than where a record begins is left to settle.lua, and so is a key that lost its expiry.
    if at and (at - 17) % 30 == 0 and (#leases == 46 or call('PTTL', key) > 0) then
      if #leases == 46 then
        call('DEL', key)
      else
        local total = struct.unpack('>I7', leases, 10) - cost
        local head = sub(leases, 1, 9) .. struct.pack('>I7', total)
        call('SET', key, head .. sub(leases, 17, at - 1) .. sub(leases, at + 30), 'KEEPTTL')
      end
      call(
        'SET', hold_key, '\2 1' .. sub(value, 4), 'PXAT',
        string.format('%d', math.floor(hold_end_us / 1000) + 1 + shift_ms)
      )
      return {'DONE'}
    end
  end
end
