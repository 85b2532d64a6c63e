-- Sliding window counter, second part: twin of what sliding_window_counter.rs does when the length of the window was changed.

-- The counts as of now, and the time into the current window.
local function sliding_window_counter_rolled(counts, now_us)
  if counts.window_us == 0 then return counts, 0 end
  local start_us, prev, cur, into_us =
    sliding_window_counter_at(counts.window_us, counts.start_us, counts.prev, counts.cur, now_us)
  return {window_us = counts.window_us, start_us = start_us, prev = prev, cur = cur}, into_us
end

local function sliding_window_counter_estimate(counts, now_us)
  if counts.window_us == 0 then return 0 end
  local rolled, into_us = sliding_window_counter_rolled(counts, now_us)
  return sliding_window_counter_used(rolled.window_us, rolled.prev, rolled.cur, into_us)
end

local function sliding_window_counter_is_fresh(counts, now_us)
  local rolled = sliding_window_counter_rolled(counts, now_us)
  return rolled.prev == 0 and rolled.cur == 0 and now_us >= counts.start_us
end

-- The state with the counts of this window first, rolled to now_us.
local function sliding_window_counter_adopted(newer, older, window_us, now_us)
  now_us = math.max(now_us, newer.start_us, older.start_us)
  if newer.window_us ~= window_us then
    if older.window_us == window_us or sliding_window_counter_is_fresh(newer, now_us) then
      newer, older = older, newer
    end
    if newer.window_us ~= window_us then
      -- Neither is this window's: the newer becomes the other one, and what the older counts becomes its own.
      local folded = 0
      if not (newer.window_us == 0 or sliding_window_counter_is_fresh(newer, now_us)) then
        folded = sliding_window_counter_estimate(older, now_us)
        older = newer
      end
      newer = sliding_window_counter_rolled({window_us = window_us, start_us = 0, prev = 0, cur = 0}, now_us)
      newer.cur = math.min(folded, 9007199254740991)
    end
  end
  if older.window_us > 0 and sliding_window_counter_is_fresh(older, now_us) then
    older = {window_us = 0, start_us = 0, prev = 0, cur = 0}
  end
  return sliding_window_counter_rolled(newer, now_us), older
end

-- Answers allowed and the next state.
local function sliding_window_counter_charge(newer, older, limit, window_us, cost, now_us)
  newer, older = sliding_window_counter_adopted(newer, older, window_us, now_us)
  now_us = math.max(now_us, newer.start_us, older.start_us)
  local used = sliding_window_counter_estimate(newer, now_us)
  if older.window_us > 0 then used = used + sliding_window_counter_estimate(older, now_us) end
  local allowed = cost > 0 and cost <= limit - used
  if allowed then newer.cur = newer.cur + cost end
  return allowed, newer, older
end

-- The instant that a charge just admitted counts from.
local function sliding_window_counter_charged_at(newer, older, now_us)
  return math.max(now_us, newer.start_us, older.start_us)
end

-- When the counts say no more than none would.
local function sliding_window_counter_fresh_at(counts)
  if counts.cur > 0 then return counts.start_us + 2 * counts.window_us end
  if counts.prev > 0 then return counts.start_us + counts.window_us end
  return counts.start_us
end
