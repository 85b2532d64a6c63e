-- Sliding window counter: twin of sliding_window_counter.rs; see there for the rule.
--
-- State: two tables of counts, newer by the length of window that was charged last and older by another: window_us, start_us of
-- the current window, what was charged in the one before it (prev) and in it (cur). A window_us of zero is no counts. The
-- limit: limit and window_us. A cost that can never fit is -1.

-- The counts of a window as of now: its start, what was charged in the one before it and in it, and the time into it.
local function sliding_window_counter_at(window_us, start_us, prev, cur, now_us)
  if now_us < start_us then now_us = start_us end
  local into_us = math.fmod(now_us, window_us)
  local passed_us = now_us - into_us - start_us
  if passed_us >= 2 * window_us then
    prev, cur = 0, 0
  elseif passed_us >= window_us then
    prev, cur = cur, 0
  end
  return now_us - into_us, prev, cur, into_us
end

-- What counts so far into a window, rounded up to whole units. A cost is whole, so it fits beside the true estimate iff it fits
-- beside this.
local function sliding_window_counter_used(window_us, prev, cur, into_us)
  local sliding, rest = product_over(prev, window_us - into_us, window_us)
  if rest > 0 then sliding = sliding + 1 end
  return sliding + cur
end

-- Whether a charge fits where nothing counts but the counts of its own window: answers allowed, and these counts after it.
local function sliding_window_counter_fit(start_us, prev, cur, limit, window_us, cost, now_us)
  local into_us = now_us - start_us
  -- Mostly the window of the last charge is still the current one: windows begin at multiples of their length.
  if into_us < 0 or into_us >= window_us then
    start_us, prev, cur, into_us = sliding_window_counter_at(window_us, start_us, prev, cur, now_us)
  end
  local used = cur
  if prev > 0 then used = sliding_window_counter_used(window_us, prev, cur, into_us) end
  local allowed = cost > 0 and cost <= limit - used
  if allowed then cur = cur + cost end
  return allowed, start_us, prev, cur
end
