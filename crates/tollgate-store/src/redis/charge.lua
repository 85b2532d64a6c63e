-- Charges all parts or none: reads the state of each, asks the twins, and writes. Nothing is written before all was read.
--
-- charge, peek: KEYS are the parts'; for each part ten arguments follow the operation: strategy, shadow, cost, price_us,
-- price_rest and the limit's five numbers; a cost that can never fit is -1. hold: the last of KEYS is the hold's, and after the
-- parts come the holder, the time to live in us, and the question as its caller would have it back; hold-part is the same for a
-- charge of which other parts are held elsewhere. `look` has a function for
-- each strategy of this script: it reads a part's state and asks its twin, answers whether it is allowed, and gives the part what was
-- found, the instant that the charge would count from (at_us), write(), which makes it, and adopt() where a charge that is not made
-- writes the state by its own numbers all the same.
--
-- The answer is a list: now, whether the charge passed, and for each part what its twin found: two numbers of a bucket, eight of a
-- counter, three of others. A hold that is there already answers HELD, the question that it was made with, and the answer that it
-- was given, its numbers with commas.

local count = #KEYS
local hold_key, ttl_us, question = nil, 0, nil
if operation == 'hold' or operation == 'hold-part' then
  hold_key, count = KEYS[count], count - 1
  local last = 2 + 10 * count
  holder, ttl_us, question = ARGV[last + 1], ARGV[last + 2] + 0, ARGV[last + 3]
  local hold = read_hold(hold_key)
  if hold and now_us < hold.end_us then return answer_held(hold) end
end

local answer, parts, passed = {now_us, 1}, {}, true
for index = 1, count do
  local at = 10 * index - 7
  local part = {key = KEYS[index], cost = ARGV[at + 2] + 0}
  part.allowed = look[ARGV[at] + 0](part, at)
  if not part.allowed and ARGV[at + 1] == '0' then passed = false end
  parts[index] = part
  for _, number in ipairs(part.found) do answer[#answer + 1] = number end
end
if not passed then answer[2] = 0 end
if operation == 'peek' then return answer end

if hold_key and passed then
  -- Before the parts, so that where there is no room for it nothing is charged.
  local charged, numbers = {}, {}
  for index = 1, count do
    local part, at = parts[index], 10 * index - 7
    if part.allowed then
      part.strategy, part.numbers = ARGV[at], table.concat(ARGV, ' ', at + 5, at + 9)
      charged[#charged + 1] = part
      if part.lease_us and part.lease_us > ttl_us then ttl_us = part.lease_us end
    end
  end
  for index, number in ipairs(answer) do numbers[index] = format('%d', number) end
  -- Where nothing was charged there is nothing to settle; a part of a hold is kept all the same, for whoever sends it again.
  if #charged > 0 or operation == 'hold-part' then
    write_hold(hold_key, {
      settled = 0, end_us = now_us + ttl_us, ttl_us = ttl_us, holder = holder, answer = table.concat(numbers, ','),
      parts = charged, question = question
    })
  end
end

for index = 1, count do
  local part = parts[index]
  if passed and part.allowed then
    part.write()
  elseif part.adopt then
    part.adopt()
  elseif call('PTTL', part.key) == -1 then
    -- A key that lost its expiry gets it back, even from a charge that is refused.
    call('PEXPIREAT', part.key, expire_ms(part.key, part.fresh_at_us, part.slack_us))
  end
end
return answer
