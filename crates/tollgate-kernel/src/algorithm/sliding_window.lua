-- Sliding window: twin of sliding_window.rs; see there for the rule.
--
-- State: a log, which is entries (entries.lua) with keep_us, the longest window that it was charged by. The limit: limit and
-- window_us. A cost that can never fit is -1.

-- The newest time in the log, or now_us, whichever is later: time never goes back for a key.
local function sliding_window_not_before_newest(log, now_us)
  return math.max(now_us, entries_last(log) or 0)
end

-- Answers allowed, what is used before, the wait until the cost would fit, the time until the newest entry runs out, and the
-- instant that the charge counts from.
local function sliding_window_peek(log, limit, window_us, cost, now_us)
  local newest_us = entries_last(log)
  if not newest_us then return cost > 0, 0, 0, 0, now_us end
  now_us = math.max(now_us, newest_us)
  local used = log.total - entries_sum_until(log, now_us - window_us)
  local allowed, wait_us = cost > 0 and cost <= limit - used, 0
  if cost > 0 and not allowed then
    -- What is gone and what must go besides; a sum with the cost may not be exact.
    wait_us = math.max(entries_first_to_sum(log, log.total - (limit - cost)) + window_us - now_us, 0)
  end
  return allowed, used, wait_us, math.max(newest_us + window_us - now_us, 0), now_us
end

-- Keeps what a window may count, and drops what no window counts any more that the log was charged by.
local function sliding_window_keep_for(log, window_us, now_us)
  log.keep_us = math.max(log.keep_us, window_us)
  entries_drop_until(log, now_us - log.keep_us)
  if log.length == 0 then log.keep_us = window_us end
end

local function sliding_window_push(log, at_us, cost)
  if entries_last(log) == at_us then return entries_add_to_last(log, cost) end
  entries_insert(log, at_us, cost, '')
end

-- Enters a charge that fits. merge_oldest_until makes room where other versions of the limit left too much.
local function sliding_window_take(log, limit, window_us, cost, now_us, merge_oldest_until)
  sliding_window_keep_for(log, window_us, now_us)
  sliding_window_push(log, now_us, cost)
  for _ = 1, 2 do
    if log.length <= limit + 64 or now_us < window_us then return end
    if not merge_oldest_until(log, now_us - window_us) then return end
  end
end

local function sliding_window_debit(log, window_us, amount, now_us)
  now_us = sliding_window_not_before_newest(log, now_us)
  sliding_window_keep_for(log, window_us, now_us)
  local debt = math.min(amount, 9007199254740991 - log.total)
  if debt > 0 then sliding_window_push(log, now_us, debt) end
end

-- When the log says no more than a fresh one.
local function sliding_window_fresh_at(log)
  return (entries_last(log) or 0) + log.keep_us
end
