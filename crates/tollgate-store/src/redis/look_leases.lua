-- What charge.lua asks of a concurrency limit. Leases of a single block that have room for one more, which ends last, are charged
-- here; others_of_leases() defines what knows all leases, and refuses. See concurrency.lua, entries_kept.lua.

local function look_leases_other(part)
  local others, lease_us = others_of_leases(), part.two
  local leases, allowed = others.read(part.key), nil
  allowed, part[1], part[2], part[3] = others.peek(leases, part.one, part.cost, now_us)
  part.leases, part.at_us = leases, now_us + lease_us
  part.fresh_at_us, part.slack_us = now_us + part[3], lease_us
  return allowed
end

look[6] = function(part)
  local value, read, end_us = redis.pcall('GET', part.key), struct.unpack, now_us + part.two
  local size, total, from, last_us = 16, 0, 17, 0
  part.is_new = not value
  if value then
    size = type(value) == 'string' and #value or 0
    -- With room for one more in the block, at least one record, and nothing broken.
    if size < 46 or size > 3826 or size % 30 ~= 16 or string.sub(value, 1, 2) ~= '\2h' then return look_leases_other(part) end
    total, last_us = read('>I7', value, 10), read('>I7', value, size - 29)
    if last_us > end_us then return look_leases_other(part) end
    while from < size do
      local ended_us, gone = read('>I7I7', value, from)
      if ended_us > now_us then break end
      from, total = from + 30, total - gone
    end
  end
  if part.cost <= 0 or part.cost > part.one - total then return look_leases_other(part) end
  part[1], part[2], part[3] = total, 0, math.max(last_us - now_us, 0)
  part.leases, part.records, part.at_us = nil, value and string.sub(value, from) or '', end_us
  part.fresh_at_us, part.slack_us = last_us, part.two
  return true
end

make[6] = function(part)
  if part.leases then return others_of_leases().take(part.key, part.leases, holder, part.cost, part.at_us) end
  local one, two, three, four = 0, 0, 0, 0
  if holder ~= '' then
    local function digits(from) return tonumber(string.sub(holder, from, from + 7), 16) end
    one, two, three, four = digits(1), digits(9), digits(17), digits(25)
  end
  local head = pack('>c2I7I7', '\2h', 0, part[1] + part.cost)
  local record = pack('>I7I7I4I4I4I4', part.at_us, part.cost, one, two, three, four)
  set(part.key, head .. part.records .. record, part.at_us, part.two)
end
