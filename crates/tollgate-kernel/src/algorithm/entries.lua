-- Costs in the order of an instant, with sums by the block: twin of entries.rs, for the log of a sliding window and for leases.
--
-- A block is a string of records of `width` bytes: the instant and the cost, seven bytes each, and sixteen more that say whose it
-- is where that matters. Entries are a table: width, total and length of all, how many blocks there are, and for each of these a
-- row: the instant of its last record, its sum, how many records it has, and the number under which texts[number] or
-- fetch(number) has its text. Rows are one string, because most are only skipped. changed[number] says that a text is new.
--
-- Whatever is asked, whole blocks are skipped by their rows, from the nearer end, and one or two are read. A block takes 128 records,
-- and more where there are more than 64 blocks, so the steps grow with the square root of the entries: some 300 for 30,000.

local RECORD, ROW, ROW_BYTES = '>I7I7', '>I7I7I3I4', 21
local unpack_struct, pack_struct, sub = struct.unpack, struct.pack, string.sub

local function entries_row(entries, index)
  return unpack_struct(ROW, entries.rows, ROW_BYTES * (index - 1) + 1)
end

local function entries_text(entries, number)
  local text = entries.texts[number]
  if not text then
    text = entries.fetch(number)
    entries.texts[number] = text
  end
  return text
end

-- The number of records in a block that are not later than an instant.
local function entries_until(text, width, instant)
  local low, high = 0, #text / width
  -- Mostly none or a few at the front.
  if high == 0 or unpack_struct('>I7', text, 1) > instant then return 0 end
  if unpack_struct('>I7', text, (high - 1) * width + 1) <= instant then return high end
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if unpack_struct('>I7', text, middle * width + 1) <= instant then low = middle else high = middle end
  end
  return high
end

-- What the first so many records of a block come to.
local function entries_sum(text, width, count)
  local sum = 0
  for at = 1, count * width, width do
    local _, cost = unpack_struct(RECORD, text, at)
    sum = sum + cost
  end
  return sum
end

-- The instant of the last entry, or nil.
local function entries_last(entries)
  if entries.blocks == 0 then return nil end
  return (entries_row(entries, entries.blocks))
end

-- The first block whose last record is at an instant or later; one more than there are where none is.
local function entries_block_of(entries, instant)
  local low, high = 1, entries.blocks + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if entries_row(entries, middle) < instant then low = middle + 1 else high = middle end
  end
  return low
end

-- What the blocks from one to another come to.
local function entries_sum_of(entries, first, last)
  local sum = 0
  for index = first, last do
    local _, block_sum = entries_row(entries, index)
    sum = sum + block_sum
  end
  return sum
end

-- What the entries up to and with an instant come to.
local function entries_sum_until(entries, instant)
  local blocks, index, sum = entries.blocks, 1, 0
  if blocks == 0 then return 0 end
  -- Mostly nothing, or a few of the first block.
  if entries_row(entries, 1) <= instant then
    index = entries_block_of(entries, instant + 1)
    if 2 * index <= blocks then
      sum = entries_sum_of(entries, 1, index - 1)
    else
      sum = entries.total - entries_sum_of(entries, index, blocks)
    end
    if index > blocks then return sum end
  end
  local _, _, _, number = entries_row(entries, index)
  local text = entries_text(entries, number)
  return sum + entries_sum(text, entries.width, entries_until(text, entries.width, instant))
end

-- The instant of the first entry with which the entries from the oldest on come to at least a sum.
local function entries_first_to_sum(entries, sum)
  local total, index, block_sum, number = entries.total, 0, nil, nil
  if sum > total then return nil end
  if 2 * sum <= total then
    while true do
      index = index + 1
      local _
      _, block_sum, _, number = entries_row(entries, index)
      if block_sum >= sum then break end
      sum = sum - block_sum
    end
  else
    -- What comes after it.
    local rest = total - sum
    index = entries.blocks
    while true do
      local _
      _, block_sum, _, number = entries_row(entries, index)
      if block_sum > rest then break end
      index, rest = index - 1, rest - block_sum
    end
    sum = block_sum - rest
  end
  local text, width = entries_text(entries, number), entries.width
  for at = 1, #text, width do
    local instant, cost = unpack_struct(RECORD, text, at)
    sum = sum - cost
    if sum <= 0 then return instant end
  end
end

-- Puts a block where another is, or before it, or at the end; a block without a text goes.
local function entries_put(entries, index, replaced, number, text, sum)
  local rows, width = entries.rows, entries.width
  local before = sub(rows, 1, ROW_BYTES * (index - 1))
  local after = sub(rows, ROW_BYTES * (index - 1 + replaced) + 1)
  if text == '' then
    entries.texts[number], entries.changed[number] = nil, nil
    entries.dropped[#entries.dropped + 1] = number
    entries.rows, entries.blocks = before .. after, entries.blocks - replaced
    return
  end
  local count = #text / width
  local last_us = unpack_struct('>I7', text, #text - width + 1)
  entries.texts[number], entries.changed[number] = text, true
  entries.rows = before .. pack_struct(ROW, last_us, sum, count, number) .. after
  entries.blocks = entries.blocks + 1 - replaced
end

-- Drops the entries up to and with an instant.
local function entries_drop_until(entries, instant)
  local whole, blocks = 0, entries.blocks
  while whole < blocks do
    local last_us, sum, count, number = entries_row(entries, whole + 1)
    if last_us > instant then break end
    whole = whole + 1
    entries.texts[number], entries.changed[number] = nil, nil
    entries.dropped[#entries.dropped + 1] = number
    entries.total, entries.length = entries.total - sum, entries.length - count
  end
  if whole > 0 then
    entries.rows, entries.blocks = sub(entries.rows, ROW_BYTES * whole + 1), blocks - whole
  end
  if whole < blocks then
    local _, sum, _, number = entries_row(entries, 1)
    local text, width = entries_text(entries, number), entries.width
    local gone = entries_until(text, width, instant)
    if gone > 0 then
      local gone_sum = entries_sum(text, width, gone)
      entries_put(entries, 1, 1, number, sub(text, gone * width + 1), sum - gone_sum)
      entries.total, entries.length = entries.total - gone_sum, entries.length - gone
    end
  end
end

local function entries_add_block(entries, index, text, sum)
  local number = entries.next_number
  entries.next_number = number + 1
  entries_put(entries, index, 0, number, text, sum)
end

-- Adds an entry behind all that are not later. `whose` is sixteen bytes, or none where the width has no room for them.
local function entries_insert(entries, instant, cost, whose)
  local record = pack_struct(RECORD, instant, cost) .. whose
  local blocks, width = entries.blocks, entries.width
  entries.total, entries.length = entries.total + cost, entries.length + 1
  if blocks == 0 then return entries_add_block(entries, 1, record, cost) end
  local most = math.max(128, 2 * blocks)
  local last_us, sum, count, number = entries_row(entries, blocks)
  if last_us <= instant then
    -- At the very end a full block is left as it is, so that blocks are full where entries come in order.
    if count >= most then return entries_add_block(entries, blocks + 1, record, cost) end
    return entries_put(entries, blocks, 1, number, entries_text(entries, number) .. record, sum + cost)
  end
  local index = entries_block_of(entries, instant + 1)
  last_us, sum, count, number = entries_row(entries, index)
  local text = entries_text(entries, number)
  local place = entries_until(text, width, instant) * width
  text, sum = sub(text, 1, place) .. record .. sub(text, place + 1), sum + cost
  if count < 2 * most then return entries_put(entries, index, 1, number, text, sum) end
  local first = sub(text, 1, most * width)
  local first_sum = entries_sum(first, width, most)
  entries_put(entries, index, 1, number, first, first_sum)
  entries_add_block(entries, index + 1, sub(text, most * width + 1), sum - first_sum)
end

-- Adds to the cost of the last entry.
local function entries_add_to_last(entries, cost)
  local _, sum, _, number = entries_row(entries, entries.blocks)
  local text, width = entries_text(entries, number), entries.width
  local at = #text - width + 1
  local instant, before = unpack_struct(RECORD, text, at)
  text = sub(text, 1, at - 1) .. pack_struct(RECORD, instant, before + cost) .. sub(text, at + 14)
  entries_put(entries, entries.blocks, 1, number, text, sum + cost)
  entries.total = entries.total + cost
end
