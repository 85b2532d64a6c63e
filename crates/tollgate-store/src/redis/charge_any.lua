-- A charge of any number of parts, in whatever state they are: what charge.lua leaves. Reads the state of each part, asks the twins,
-- and writes; nothing is written before all was read.
--
-- `quick` makes for each strategy a function that looks at the state of a part as quick/ does, and `look_any` has one for all other
-- states. They answer whether the part is allowed, and note in the part what was found (part[1] and on), the instant that the charge
-- would count from, what is answered of the part (answer), until when the state says something (fresh_at_us, slack_us), how it is written (make), and how it is written
-- by the limit's own numbers although nothing is charged (adopt), if it has to be.

local parts, found = {}, {}
for index = 1, width do
  local at = 10 * index - 6
  local strategy = ARGV[at] + 0
  parts[index] = {
    strategy = strategy, shadow = ARGV[at + 1] == '1', cost = ARGV[at + 2] + 0, at = at, price_us = ARGV[at + 3] + 0,
    price_rest = ARGV[at + 4] + 0, one = ARGV[at + 5] + 0, two = ARGV[at + 6] + 0, three = ARGV[at + 7] + 0, five = ARGV[at + 9] + 0,
    count = strategy < 3 and 2 or strategy == 5 and 8 or 3, look = quick[strategy](at)
  }
end

-- A key that lost its expiry gets it back, even from a charge that is refused.
local function mend_expiry(key, fresh_at_us, slack_us)
  if call('PTTL', key) ~= -1 then return end
  look_for_room(key)
  call('PEXPIREAT', key, expire_ms(key, fresh_at_us, slack_us))
end

-- Nothing of a charge is written where there is no room for a key that it begins.
local function ask_for_room()
  local begins, known = is_hold, nil
  for index = 1, width do
    local part = parts[index]
    if part.is_new then begins = begins or part.allowed else known = part.key end
  end
  if not begins then return end
  -- A hold is written first, or a new key where all are new: that is refused by itself.
  if known and not is_hold then look_for_room(known) end
  if has_room == false then error('TOLLGATE_FULL', 0) end
end

-- Before the parts, so that where there is no room for it nothing is charged.
local function hold_all(hold_key, count)
  local texts, lasts_us, is_any = {''}, ttl_us, operation == 'hold-part'
  for index = 1, width do
    local part = parts[index]
    if part.allowed then
      if part.strategy == 6 and part.two > lasts_us then lasts_us = part.two end
      is_any = true
    end
    texts[index + 1] =
      hold_part(part.at, part.allowed) .. pack_hold(part.counts_from_us - now_us, sub(part.key, name_at))
  end
  -- Where nothing was charged there is nothing to settle; a part of a hold is kept all the same, for a caller that sends it again.
  if not is_any then return end
  texts[1] = hold_head(lasts_us)
  for index = 1, count do texts[width + 1 + index] = pack_hold(found[index]) end
  call('SET', hold_key, table.concat(texts), 'PXAT', hold_ms(lasts_us))
end

-- The answer, and whether the charge passed.
local function charge_any(before)
  local passed, at, texts = true, 0, {}
  if is_hold then
    local value = call('GET', keys[before + stride])
    if value then
      local holds = others_of_hold()
      local hold = holds.parse(value)
      if now_us < hold.end_us then return holds.answer(hold), false end
    end
  end
  for index = 1, width do
    local part = parts[index]
    part.key, part.adopt = keys[before + index], nil
    part.allowed = part.look(part)
    if not (part.allowed or part.shadow) then passed = false end
    for number = 1, part.count do
      at = at + 1
      found[at] = part[number]
    end
    texts[index] = part.answer
  end
  local answer = (passed and '\1' or '\0') .. table.concat(texts, '', 1, width)
  if operation == 'peek' then return answer, false end
  if passed then ask_for_room() end
  if is_hold and passed then hold_all(keys[before + stride], at) end
  for index = 1, width do
    local part = parts[index]
    if passed and part.allowed then
      part.make()
    elseif part.adopt then
      part.adopt()
    else
      mend_expiry(part.key, part.fresh_at_us, part.slack_us)
    end
  end
  return answer, passed
end
