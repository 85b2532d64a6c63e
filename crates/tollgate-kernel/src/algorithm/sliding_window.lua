-- Sliding window: twin of sliding_window.rs; see there for the rule.
--
-- State: a log of what was charged when, oldest first, each entry later than the one before. Here a log is a table: total, the
-- sum of all costs in it, those that have run out included; length; and entry(index), which answers at_us and cost, the oldest
-- at 1. Whoever keeps the log makes the table. The limit: limit and window_us. A cost that can never fit is told as -1.

-- Now, but not before the newest entry: time never goes back for a key.
local function sliding_window_now(log, now_us)
  if log.length == 0 then return now_us end
  return math.max(now_us, (log.entry(log.length)))
end

-- How many entries have run out, and what the others come to.
local function sliding_window_gone(log, window_us, now_us)
  local gone, used = 0, log.total
  while gone < log.length do
    local at_us, cost = log.entry(gone + 1)
    if at_us + window_us > now_us then break end
    gone, used = gone + 1, used - cost
  end
  return gone, used
end

-- Answers allowed, what is used before, the wait until the cost would fit, the time until the newest entry runs out, how many
-- entries have run out, and the instant that the charge counts from.
local function sliding_window_charge(log, limit, window_us, cost, now_us)
  now_us = sliding_window_now(log, now_us)
  local gone, used = sliding_window_gone(log, window_us, now_us)
  local allowed = cost > 0 and cost <= limit - used
  local wait_us, last_us = 0, 0
  if cost > 0 and not allowed then
    local left, index, at_us, entry_cost = used, gone, now_us, 0
    while cost > limit - left and index < log.length do
      index = index + 1
      at_us, entry_cost = log.entry(index)
      left = left - entry_cost
    end
    wait_us = at_us + window_us - now_us
  end
  if log.length > 0 then last_us = math.max(log.entry(log.length) + window_us - now_us, 0) end
  return allowed, used, wait_us, last_us, gone, now_us
end

-- The entry that was charged at an instant, or nothing.
local function sliding_window_find(log, charged_at_us)
  local low, high = 1, log.length
  while low <= high do
    local middle = math.floor((low + high) / 2)
    local at_us, cost = log.entry(middle)
    if at_us == charged_at_us then return middle, cost end
    if at_us < charged_at_us then low = middle + 1 else high = middle - 1 end
  end
end

-- The newest charges are undone first. Answers how many entries, counted from the oldest, stay as they are, what is left of the
-- one after them, and what was returned.
local function sliding_window_refund(log, amount)
  local kept, rest, returned = log.length, 0, 0
  while kept > 0 and returned < amount do
    local _, cost = log.entry(kept)
    local part = math.min(amount - returned, cost)
    kept, rest, returned = kept - 1, cost - part, returned + part
  end
  return kept, rest, returned
end
