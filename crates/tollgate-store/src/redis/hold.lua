-- A held charge, as it is kept: a string. First a line: the byte 2; 0 or 1 for settled, and 2 more where the answer is of format 1;
-- its end and its time to live in us; the holder; and the answer, numbers with commas. A line for each part that was charged:
-- strategy, cost, the instant that it counts from (the end, of a lease), its key, the limit's five numbers, and which part of the
-- charge it is (older ones do not say). An empty line, and the question. Format 1 was MessagePack.

local function write_hold(key, hold)
  local settled = hold.settled + (hold.has_old_answer and 2 or 0)
  local lines = {format('\2 %d %d %d %s %s', settled, hold.end_us, hold.ttl_us, hold.holder, hold.answer)}
  for index, part in ipairs(hold.parts) do
    lines[index + 1] = format('%s %d %d %s %s', part.strategy, part.cost, part.at_us, part.key, part.numbers)
  end
  local at = #lines
  lines[at + 1], lines[at + 2] = '', hold.question
  call('SET', key, table.concat(lines, '\n'), 'PXAT', format('%d', math.floor(hold.end_us / 1000) + 1 + shift_ms))
end

-- A hold of format 1, in the terms of this one.
local function convert_hold(value)
  local is_sound, hold = pcall(cmsgpack.unpack, value)
  if not is_sound or type(hold) ~= 'table' or not hold.end_us or not hold.parts then not_ours() end
  hold.is_old, hold.has_old_answer = true, true
  for index, number in ipairs(hold.answer) do hold.answer[index] = format('%d', number) end
  hold.answer = table.concat(hold.answer, ',')
  for index, part in ipairs(hold.parts) do
    local one, two, three, four, five = part[1] + 0, part[2] + 0, part[3] + 0, part[4] + 0, part[5] + 0
    if part.strategy < 3 then
      -- It was c, p, span_us, span_rest, most_us: the burst is what fills it in that time.
      local burst, rest = product_over(three, one, two)
      if rest + four >= two then burst = burst + 1 end
      three, four, five = burst, 86400000000, 0
    elseif part.strategy == 6 then
      part.at_us = part.at_us + two
    end
    part.numbers = format('%d %d %d %d %d', one, two, three, four, five)
    part.place = index
  end
  return hold
end

-- A held charge, from what is kept of it.
local function parse_hold(value)
  local settled, end_us, ttl_us, holder, answer, rest =
    string.match(value, '^\2 ([0-3]) (%d+) (%d+) (%x*) ([%d,]*)\n(.*)$')
  if not settled then return convert_hold(value) end
  local hold = {
    settled = settled % 2, has_old_answer = settled + 0 > 1, end_us = end_us + 0, ttl_us = ttl_us + 0, holder = holder,
    answer = answer, parts = {}
  }
  local from = 1
  while true do
    local stop = string.find(rest, '\n', from, true)
    if not stop then not_ours() end
    local line = string.sub(rest, from, stop - 1)
    from = stop + 1
    if line == '' then break end
    local strategy, cost, at_us, part_key, numbers = string.match(line, '^(%d) (%d+) (%d+) (%S+) (.*)$')
    if not strategy then not_ours() end
    local number = string.match(numbers, '^%d+ %d+ %d+ %d+ %d+ (%d+)')
    hold.parts[#hold.parts + 1] = {
      strategy = strategy + 0, cost = cost + 0, at_us = at_us + 0, key = part_key, numbers = numbers,
      number = number and number + 0, place = #hold.parts + 1
    }
  end
  hold.question = string.sub(rest, from)
  return hold
end

-- What whoever sends a held charge again is answered: the question that it was made with, and the answer that it was given.
local function answer_held(hold)
  return {hold.has_old_answer and 'HELD1' or 'HELD', hold.question, hold.answer}
end
