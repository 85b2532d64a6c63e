-- Sliding window counter: twin of sliding_window_counter.rs; see there for the rule.
--
-- State: start_us of the current window, what was charged in the one before it (prev) and in it (cur). The limit: limit and
-- window_us. A cost that can never fit is told as -1.

-- The counters as of now, and the time into the current window.
local function sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
  now_us = math.max(now_us, start_us)
  local into_us = math.fmod(now_us, window_us)
  local passed_us = now_us - into_us - start_us
  if passed_us >= 2 * window_us then
    prev, cur = 0, 0
  elseif passed_us >= window_us then
    prev, cur = cur, 0
  end
  return now_us - into_us, prev, cur, into_us
end

-- Answers allowed and the next state.
local function sliding_window_counter_charge(start_us, prev, cur, limit, window_us, cost, now_us)
  local into_us
  start_us, prev, cur, into_us = sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
  -- The part of the previous window that still counts, rounded up: a cost is whole, so it fits the estimate iff it fits this.
  local counts, rest = product_over(prev, window_us - into_us, window_us)
  if rest > 0 then counts = counts + 1 end
  local allowed = cost > 0 and cost <= limit - cur - counts
  return allowed, start_us, prev, cur + cost
end

-- Into the window that it was taken from, or nowhere.
local function sliding_window_counter_give_back(start_us, prev, cur, window_us, amount, charged_at_us, now_us)
  start_us, prev, cur = sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
  local charged_in_us = charged_at_us - math.fmod(charged_at_us, window_us)
  if charged_in_us == start_us then
    cur = math.max(cur - amount, 0)
  elseif charged_in_us + window_us == start_us then
    prev = math.max(prev - amount, 0)
  end
  return start_us, prev, cur
end

-- What this window counts goes first, then what the last one did.
local function sliding_window_counter_refund(start_us, prev, cur, window_us, amount, now_us)
  start_us, prev, cur = sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
  local of_prev = math.max(amount - cur, 0)
  return start_us, math.max(prev - of_prev, 0), math.max(cur - amount, 0)
end

local function sliding_window_counter_debit(start_us, prev, cur, window_us, amount, now_us)
  start_us, prev, cur = sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
  return start_us, prev, cur + math.min(amount, MOST_COUNT - cur)
end

-- When the state says no more than a fresh one.
local function sliding_window_counter_fresh_at(start_us, prev, cur, window_us)
  if cur > 0 then return start_us + 2 * window_us end
  if prev > 0 then return start_us + window_us end
  return start_us
end
