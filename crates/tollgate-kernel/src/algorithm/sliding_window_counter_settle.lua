-- Sliding window counter, third part: twin of what sliding_window_counter.rs does when charges are settled.

-- Into the counts of the window that it was charged by, if those still count.
local function sliding_window_counter_give_back(newer, older, window_us, amount, charged_at_us, now_us)
  local function less(counts)
    local rolled = sliding_window_counter_rolled(counts, now_us)
    local charged_in_us = charged_at_us - math.fmod(charged_at_us, window_us)
    if charged_in_us == rolled.start_us then
      rolled.cur = math.max(rolled.cur - amount, 0)
    elseif charged_in_us + window_us == rolled.start_us then
      rolled.prev = math.max(rolled.prev - amount, 0)
    end
    return rolled
  end
  if newer.window_us == window_us then return less(newer), older end
  if older.window_us == window_us then return newer, less(older) end
  return newer, older
end

-- What the current window counts goes first, then what the last one did; then the same of the other length.
local function sliding_window_counter_refund(newer, older, amount, now_us)
  local function less(counts)
    if counts.window_us == 0 then return counts end
    local rolled = sliding_window_counter_rolled(counts, now_us)
    local of_prev = math.max(amount - rolled.cur, 0)
    rolled.cur = math.max(rolled.cur - amount, 0)
    amount = math.max(of_prev - rolled.prev, 0)
    rolled.prev = math.max(rolled.prev - of_prev, 0)
    return rolled
  end
  newer = less(newer)
  return newer, less(older)
end

local function sliding_window_counter_debit(newer, older, window_us, amount, now_us)
  if newer.window_us == 0 then newer, older = sliding_window_counter_adopted(newer, older, window_us, now_us) end
  local is_older = older.window_us == window_us and newer.window_us ~= window_us
  local counts = sliding_window_counter_rolled(is_older and older or newer, now_us)
  counts.cur = counts.cur + math.min(amount, 9007199254740991 - counts.cur)
  if is_older then return newer, counts end
  return counts, older
end
