-- Gives back part of the current count, whichever caller was charged: the newest charge first, and never more than there is.
--
-- KEYS are the keys of the parts, of any strategy but leases. Seven arguments for each follow the operation: strategy, amount and
-- the limit's five numbers. A repeated key is refunded twice, one after the other. Answers DONE.

local WIDTH = 7
no_sooner = true

-- For each strategy: writes the state without the amount.
local refund = {}

refund[1] = function(key, amount, c, p, burst, _, keeps_instant)
  local state = read_bucket(key)
  if state.full_us == 0 then return end
  write_bucket(key, token_bucket_give_back(state, c, p, burst, keeps_instant, amount, now_us, amount, now_us), keeps_instant)
end

refund[2] = refund[1]

refund[3] = function(key, amount, _, window_us)
  local end_us, count, start_us = read_window(key, window_us)
  if end_us <= now_us then return end
  end_us, count = fixed_window_give_back(end_us, count, start_us, amount, math.max(now_us, start_us), now_us)
  write_window(key, end_us, count, start_us)
end

refund[4] = function(key, amount)
  local log = read_log(key)
  if log.length == 0 then return end
  entries_reduce_newest(log, amount)
  write_log(key, log)
end

refund[5] = function(key, amount, _, window_us)
  local newer, older = read_counter(key, window_us)
  if newer.window_us == 0 then return end
  newer, older = sliding_window_counter_refund(newer, older, amount, now_us)
  write_counter(key, newer, older)
end

-- All keys are read before any is changed, because a script that fails half-way is not rolled back.
local read = {read_bucket, read_bucket, read_window, read_log, read_counter}
for index, key in ipairs(KEYS) do
  local at = 3 + WIDTH * (index - 1)
  read[ARGV[at] + 0](key, ARGV[at + 3] + 0)
end

for index, key in ipairs(KEYS) do
  local at = 3 + WIDTH * (index - 1)
  local one, two, three, four, five = unpack(ARGV, at + 2, at + 6)
  refund[ARGV[at] + 0](key, ARGV[at + 1] + 0, one + 0, two + 0, three + 0, four + 0, five + 0)
end
return {'DONE'}
