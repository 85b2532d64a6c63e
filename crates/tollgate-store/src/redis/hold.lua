-- The stored format of a hold (a held charge): MessagePack values, one after the other. Six values first: 0, or 1 if it is
-- settled; the instant of the charge; its time to live in us; the instant of the last renewal, from which the time to live
-- counts, or 0; the request, or an empty string if the parts contain the same; and the number of parts. Then for each part: its
-- strategy, plus 8 in shadow mode, plus 16 if it was not charged; its cost; numbers of the limit (HELD_NUMBERS); from when it
-- counts, relative to the charge (of a lease: its end); and its key without the prefix of all parts. Then the numbers of the
-- answer. The holder is in the name of the hold.

-- Reads this many values of a hold from a position; also returns the next position. All values are numbers except one string.
local function hold_values(value, count, at, text_at)
  local values = {pcall(cmsgpack.unpack_limit, value, count, at)}
  if not values[1] or #values ~= count + 2 then not_ours() end
  local next_at = values[2]
  table.remove(values, 1)
  table.remove(values, 1)
  for index = 1, count do
    if type(values[index]) ~= (index == text_at and 'string' or 'number') then not_ours() end
  end
  return values, next_at
end

-- Parses a stored hold: `all` are its parts, and `parts` those that were charged.
local function parse_hold(value)
  local head, at = hold_values(value, 6, 0, 5)
  local hold = {
    settled = head[1], charged_us = head[2], ttl_us = head[3], from_us = head[4], request = head[5], all = {}, parts = {}
  }
  if hold.settled ~= 0 and hold.settled ~= 1 then not_ours() end
  hold.end_us = (hold.from_us > 0 and hold.from_us or hold.charged_us) + hold.ttl_us
  for number = 1, head[6] do
    local first, rest
    first, at = hold_values(value, 2, at)
    local code, count = first[1], HELD_NUMBERS[first[1] % 8] or not_ours()
    rest, at = hold_values(value, count + 2, at, count + 2)
    local part = {
      code = code, strategy = code % 8, cost = first[2], numbers = {unpack(rest, 1, count)},
      at_us = hold.charged_us + rest[count + 1], name = rest[count + 2], number = number
    }
    hold.all[number] = part
    if code < 16 then hold.parts[#hold.parts + 1] = part end
  end
  hold.found = at == -1 and '' or string.sub(value, at + 1)
  return hold
end

local function write_hold(key, hold)
  local texts = {cmsgpack.pack(hold.settled, hold.charged_us, hold.ttl_us, hold.from_us, hold.request, #hold.all)}
  for index, part in ipairs(hold.all) do
    texts[index + 1] = cmsgpack.pack(part.code, part.cost, unpack(part.numbers))
      .. cmsgpack.pack(part.at_us - hold.charged_us, part.name)
  end
  texts[#texts + 1] = hold.found
  call('SET', key, table.concat(texts), 'PXAT', format('%d', math.floor(hold.end_us / 1000) + 1 + shift_ms))
end

-- The name of the limit, which is part of the name of the key.
local function name_of(part)
  return string.match(part.name, '^[^}]*}:%a:([^:]+)') or ''
end

-- The request of a hold: a line for each charge with shadow mode, cost, number of the key, name of the limit, its strategy and
-- three numbers.
local function request_of(hold)
  if hold.request ~= '' then return hold.request end
  local lines = {}
  for index, part in ipairs(hold.all) do
    local one, two, three = unpack(part.numbers)
    lines[index] = format(
      '%d %d %d %s %d %d %d %d\n', part.code % 16 >= 8 and 1 or 0, part.cost, index - 1, name_of(part), part.strategy, one, two,
      three or 0
    )
  end
  return table.concat(lines)
end

-- The answer for a caller that sends a held charge again: the request of the hold, and the answer that was given.
local function answer_held(hold)
  local numbers, at, next_number = {format('%d', hold.charged_us), '1'}, 0, nil
  while at ~= -1 and hold.found ~= '' do
    at, next_number = cmsgpack.unpack_limit(hold.found, 1, at)
    numbers[#numbers + 1] = format('%d', next_number)
  end
  return {'HELD', request_of(hold), table.concat(numbers, ',')}
end
