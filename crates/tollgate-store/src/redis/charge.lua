-- Charges: each of all its parts or of none. Reads the state of each part, asks the twins, and writes. Nothing of a charge is
-- written before all of it was read. Several charges that are alike go in one call, one after the other, each for itself.
--
-- charge, known, peek: the arguments after the operation are the number of parts in a charge, and for each of these ten: strategy,
-- shadow, cost, price_us, price_rest and the limit's five numbers; a cost that can never fit is -1. KEYS are the parts' keys, charge
-- after charge. known is a charge that begins no key under numbers that come with the call. hold: the parts' keys of each charge are
-- followed by the hold's, and the arguments of the parts by the time to live in us, the question as its caller would have it back,
-- and the holder of each charge; hold-part is the same for a charge of which other parts are held elsewhere.
--
-- `look` has a function for each strategy of this script: it reads the state under part.key and asks its twin. It answers whether
-- the part is allowed, and notes in the part what was found (part[1] and on), the instant that the charge would count from (at_us),
-- and until when the state says something (fresh_at_us, slack_us). `make` has one that writes what `look` found allowed, and `adopt`
-- one that writes the state by the limit's own numbers although nothing is charged, if part.is_other says so.
--
-- The answer is a list: now, and for each charge a string of numbers, seven bytes each: whether it passed, and what was found of each
-- part: two numbers of a bucket, eight of a counter, three of others. Or STATE where what is kept under a key is not ours, or FULL
-- where there is no room for a new key: nothing of such a charge is written. Or FAILED where a command was refused after an earlier
-- charge of the call was written; without one the error itself is the answer. A call that has met much answers for its first charges
-- alone, and nothing of the others was done. A hold that is there already answers a list: HELD,
-- the question that it was made with, and the answer that it was given, its numbers with commas.

local width = ARGV[3] + 0
local is_hold = operation == 'hold' or operation == 'hold-part'
local first_after, stride = 4 + 10 * width, is_hold and width + 1 or width
local ttl_us, question = 0, nil
if is_hold then ttl_us, question = ARGV[first_after] + 0, ARGV[first_after + 1] end

local parts, found, count = {}, {}, 1
for index = 1, width do
  local at = 10 * index - 6
  local strategy = ARGV[at] + 0
  parts[index] = {
    strategy = strategy, shadow = ARGV[at + 1] == '1', cost = ARGV[at + 2] + 0, at = at, price_us = ARGV[at + 3] + 0,
    price_rest = ARGV[at + 4] + 0, one = ARGV[at + 5] + 0, two = ARGV[at + 6] + 0, three = ARGV[at + 7] + 0, five = ARGV[at + 9] + 0,
    count = strategy < 3 and 2 or strategy == 5 and 8 or 3, look = look[strategy], make = make[strategy]
  }
  count = count + parts[index].count
end
local numbers = '>' .. string.rep('I7', count)

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
local function hold_all(hold_key)
  local text, lasts_us, is_any = '', ttl_us, operation == 'hold-part'
  for index = 1, width do
    local part = parts[index]
    if part.allowed then
      part.numbers = part.numbers or table.concat(ARGV, ' ', part.at + 5, part.at + 9)
      text = text .. format('%d %d %d %s %s %d\n', part.strategy, part.cost, part.at_us, part.key, part.numbers, index)
      if part.strategy == 6 and part.two > lasts_us then lasts_us = part.two end
      is_any = true
    end
  end
  -- Where nothing was charged there is nothing to settle; a part of a hold is kept all the same, for whoever sends it again.
  if not is_any then return end
  local answer = format('%d,' .. string.rep('%d,', count - 1) .. '%d', now_us, unpack(found, 1, count))
  local end_us = now_us + lasts_us
  text = format('\2 0 %d %d %s %s\n', end_us, lasts_us, holder, answer) .. text .. '\n' .. question
  call('SET', hold_key, text, 'PXAT', format('%d', (end_us - end_us % 1000) / 1000 + 1 + shift_ms))
end

local function charge_one(charge)
  local before, passed, at = stride * (charge - 1), true, 1
  if is_hold then
    holder = ARGV[first_after + 1 + charge]
    local value = call('GET', KEYS[before + stride])
    if value then
      local holds = others_of_hold()
      local hold = holds.parse(value)
      if now_us < hold.end_us then return holds.answer(hold) end
    end
  end
  for index = 1, width do
    local part = parts[index]
    part.key = KEYS[before + index]
    part.is_other = false
    part.allowed = part.look(part)
    if not (part.allowed or part.shadow) then passed = false end
    for number = 1, part.count do
      at = at + 1
      found[at] = part[number]
    end
  end
  found[1] = passed and 1 or 0
  local answer = pack(numbers, unpack(found, 1, count))
  if operation == 'peek' then return answer end
  if passed then ask_for_room() end
  if is_hold and passed then hold_all(KEYS[before + stride]) end
  for index = 1, width do
    local part = parts[index]
    if passed and part.allowed then
      part.make(part)
    elseif part.is_other then
      adopt[part.strategy](part)
    elseif call('PTTL', part.key) == -1 then
      -- A key that lost its expiry gets it back, even from a charge that is refused.
      look_for_room(part.key)
      call('PEXPIREAT', part.key, expire_ms(part.key, part.fresh_at_us, part.slack_us))
    end
  end
  return answer
end

local answers, has_written = {now_us}, false
for charge = 1, #KEYS / stride do
  local is_sound, answer = pcall(charge_one, charge)
  if not is_sound then
    local text = type(answer) == 'table' and answer.err or answer
    local function says(word) return string.find(text, word, 1, true) end
    if says('TOLLGATE_STATE') or says('WRONGTYPE') then
      answer = {ok = 'STATE'}
    elseif says('TOLLGATE_FULL') or says('OOM') then
      if says('OOM') then has_room = false end
      answer = {ok = 'FULL'}
    elseif has_written then
      answer = {ok = 'FAILED'}
    else
      error(answer, 0)
    end
  elseif found[1] == 1 and operation ~= 'peek' then
    has_written = true
  end
  answers[charge + 1] = answer
  if work > MOST_WORK then break end
end
return answers
