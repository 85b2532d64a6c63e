-- Fixed window: twin of fixed_window.rs; see there for the rule.
--
-- State: end_us of the open window, the count in it, and start_us; an end that has passed means that none is open. The limit:
-- limit, window_us, and align, 0 where windows begin at the first charge and 1 where they begin at multiples of the window since
-- 1970. A cost that can never fit is -1.

-- The window that a charge at now_us would count in: the open one, or a new one with nothing in it.
local function fixed_window_current(end_us, count, start_us, window_us, align, now_us)
  if now_us < end_us then return end_us, count, start_us end
  start_us = now_us
  if align == 1 then start_us = now_us - math.fmod(now_us, window_us) end
  return start_us + window_us, 0, start_us
end

-- Answers allowed and the next state.
local function fixed_window_charge(end_us, count, start_us, limit, window_us, align, cost, now_us)
  if now_us >= end_us then
    end_us, count, start_us = fixed_window_current(end_us, count, start_us, window_us, align, now_us)
  end
  local allowed = cost > 0 and cost <= limit - count
  return allowed, end_us, count + cost, start_us
end

-- Into the window that it was taken from, or nowhere.
local function fixed_window_give_back(end_us, count, start_us, amount, charged_at_us, now_us)
  if now_us < end_us and start_us <= charged_at_us and charged_at_us < end_us then
    count = math.max(count - amount, 0)
  end
  return end_us, count, start_us
end

local function fixed_window_debit(end_us, count, start_us, window_us, align, amount, now_us)
  end_us, count, start_us = fixed_window_current(end_us, count, start_us, window_us, align, now_us)
  return end_us, count + math.min(amount, 9007199254740991 - count), start_us
end
