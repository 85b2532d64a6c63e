-- Entries, second part: twin of what entries.rs does inside of what is kept.

-- Where the entry of an instant is, of whomever or of one: the block's index and number, its text, its sum, the record's place in
-- the text and its cost; or nothing.
local function entries_find(entries, instant, whose)
  local width = entries.width
  for index = entries_block_of(entries, instant), entries.blocks do
    local _, sum, _, number = entries_row(entries, index)
    local text = entries_text(entries, number)
    for at = entries_until(text, width, instant - 1) * width + 1, #text, width do
      local found, cost = unpack_struct(RECORD, text, at)
      if found > instant then return nil end
      if not whose or sub(text, at + 14, at + 29) == whose then return index, number, text, sum, at, cost end
    end
  end
end

-- Takes an amount off the cost of the entry of an instant, and drops the entry if nothing is left of it. Answers how much.
local function entries_reduce(entries, instant, amount, whose)
  local index, number, text, sum, at, cost = entries_find(entries, instant, whose)
  if not index then return 0 end
  local taken, left = math.min(amount, cost), ''
  if taken < cost then
    left = pack_struct(RECORD, instant, cost - taken) .. sub(text, at + 14, at + entries.width - 1)
  else
    entries.length = entries.length - 1
  end
  entries_put(entries, index, 1, number, sub(text, 1, at - 1) .. left .. sub(text, at + entries.width), sum - taken)
  entries.total = entries.total - taken
  return taken
end

-- Takes an amount off the newest entries.
local function entries_reduce_newest(entries, amount)
  local blocks, before = entries.blocks, entries.blocks
  local sum, count, number, _
  -- Whole blocks first.
  while blocks > 0 do
    _, sum, count, number = entries_row(entries, blocks)
    if sum > amount then break end
    blocks, amount = blocks - 1, amount - sum
    entries.texts[number], entries.changed[number] = nil, nil
    entries.dropped[#entries.dropped + 1] = number
    entries.total, entries.length = entries.total - sum, entries.length - count
  end
  if blocks < before then entries.rows, entries.blocks = sub(entries.rows, 1, ROW_BYTES * blocks), blocks end
  if blocks == 0 or amount == 0 then return end
  local text, width = entries_text(entries, number), entries.width
  local kept, left = #text, amount
  while left > 0 do
    local instant, cost = unpack_struct(RECORD, text, kept - width + 1)
    if cost > left then
      text = sub(text, 1, kept - width) .. pack_struct(RECORD, instant, cost - left) .. sub(text, kept - width + 15, kept)
      kept, left = #text, 0
    else
      kept, left = kept - width, left - cost
      entries.length = entries.length - 1
    end
  end
  entries.total = entries.total - amount
  entries_put(entries, blocks, 1, number, sub(text, 1, kept), sum - amount)
end

-- Merges the oldest entry into the one after it, if that is not later than an instant. Answers whether it was.
local function entries_merge_oldest_until(entries, instant)
  if entries.length < 2 then return false end
  local _, sum, count, number = entries_row(entries, 1)
  local text, width = entries_text(entries, number), entries.width
  local _, cost = unpack_struct(RECORD, text, 1)
  local index = 1
  if count == 1 then
    index = 2
    _, sum, _, number = entries_row(entries, 2)
    text = entries_text(entries, number)
  else
    sum = sum - cost
    text = sub(text, width + 1)
  end
  local second, second_cost = unpack_struct(RECORD, text, 1)
  if second > instant then return false end
  text = pack_struct(RECORD, second, second_cost + cost) .. sub(text, 15)
  entries_put(entries, index, 1, number, text, sum + cost)
  if index == 2 then
    local _, _, _, first = entries_row(entries, 1)
    entries_put(entries, 1, 1, first, '', 0)
  end
  entries.length = entries.length - 1
  return true
end
