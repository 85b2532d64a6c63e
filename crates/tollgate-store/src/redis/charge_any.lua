-- A charge of any number of parts, in any state: the general case of charge.lua. It reads the state of each part, calls the
-- twins, and writes; nothing is written before everything was read.
--
-- `quick` has, for each strategy, a function that makes the fast path of quick/ for a part, and `look_any` has a function for all
-- other states. They return whether the part is allowed, and set in the part: the values found (part[1] and on), the instant from
-- which the charge would count (counts_from_us), the answer for the part (answer), until when the state is needed (fresh_at_us,
-- slack_us), how to write the charged state (make), and, if necessary, how to write the state converted to the limit's numbers
-- although nothing is charged (adopt).

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

-- Restores the expiry of a key that lost it, even for a denied charge.
local function mend_expiry(key, fresh_at_us, slack_us)
  if call('PTTL', key) ~= -1 then return end
  look_for_room(key)
  call('PEXPIREAT', key, expire_ms(key, fresh_at_us, slack_us))
end

-- Fails before anything of a charge is written if there is no room for a key that it creates.
local function ask_for_room()
  local begins, known = is_hold, nil
  for index = 1, width do
    local part = parts[index]
    if part.is_new then begins = begins or part.allowed else known = part.key end
  end
  if not begins then return end
  -- A hold is the first write, or a new key if all keys are new: Redis refuses that write by itself.
  if known and not is_hold then look_for_room(known) end
  if has_room == false then error('TOLLGATE_FULL', 0) end
end

-- Written before the parts, so that nothing is charged if there is no room for it.
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
  -- If nothing was charged there is nothing to settle; a part of a hold is stored anyway, for a caller that sends it again.
  if not is_any then return end
  texts[1] = hold_head(lasts_us)
  for index = 1, count do texts[width + 1 + index] = pack_hold(found[index]) end
  call('SET', hold_key, table.concat(texts), 'PXAT', hold_ms(lasts_us))
end

-- Returns the answer, and whether the charge passed.
local function charge_any(before)
  local passed, at, texts = true, 0, {}
  if is_hold then
    local value = call('GET', keys[before + stride])
    if value then
      local holds = others_of_hold()
      local hold = holds.parse(value)
      if now_us < hold.end_us then
        -- With other keys it is another charge: its request is left out of the answer.
        local is_same = #hold.all == width
        for index = 1, width do is_same = is_same and hold.all[index].name == sub(keys[before + index], name_at) end
        return is_same and holds.answer(hold) or {'HELD', '', ''}, false
      end
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
