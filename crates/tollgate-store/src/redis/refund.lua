-- Gives back what counts now, whoever was charged it: the newest first, and never more than there is.
--
-- KEYS are the parts', of any strategy but leases; for each seven arguments follow the operation: strategy, amount and the
-- limit's five numbers. A key that is named twice is refunded twice, one after the other. Answers DONE.

local WIDTH = 7

-- For each strategy: what is left is written, and what says nothing any more goes.
local refund = {}

refund[1] = function(key, amount, c, p, span_us)
  local full_us, full_rest = read_bucket(key)
  if token_bucket_fresh_at(full_us, full_rest) <= now_us then return end
  full_us, full_rest = token_bucket_give_back(full_us, full_rest, c, p, amount, now_us)
  if token_bucket_fresh_at(full_us, full_rest) <= now_us then
    call('DEL', key)
  else
    write_bucket(key, full_us, full_rest, span_us)
  end
end

refund[2] = refund[1]

refund[3] = function(key, amount, _, window_us)
  local end_us, count = read_window(key)
  if end_us <= now_us then return end
  local at_us = fixed_window_charged_at(end_us, window_us, now_us)
  end_us, count = fixed_window_give_back(end_us, count, window_us, amount, at_us, now_us)
  write_window(key, end_us, count, window_us)
end

refund[4] = function(key, amount, _, window_us)
  local log = read_log(key)
  local kept, rest, returned = sliding_window_refund(log, amount)
  if returned == 0 then return end
  if rest > 0 then kept = kept + 1 end
  if kept == 0 then
    call('DEL', key)
    return
  end
  call('LTRIM', key, 0, 2 * kept)
  call('LSET', key, 0, log.total - returned)
  if rest > 0 then call('LSET', key, -1, rest) end
  local newest_us = log.entry(kept)
  expire(key, newest_us + window_us, window_us)
end

refund[5] = function(key, amount, _, window_us)
  local start_us, prev, cur = read_counter(key)
  if prev == 0 and cur == 0 then return end
  start_us, prev, cur = sliding_window_counter_refund(start_us, prev, cur, window_us, amount, now_us)
  if prev == 0 and cur == 0 then
    call('DEL', key)
  else
    write_counter(key, start_us, prev, cur, window_us)
  end
end

-- All are looked at before any is changed, because a script that finds something foreign half-way is not undone.
local read = {read_bucket, read_bucket, read_window, read_log, read_counter}
for index, key in ipairs(KEYS) do read[ARGV[3 + WIDTH * (index - 1)] + 0](key) end

for index, key in ipairs(KEYS) do
  local at = 3 + WIDTH * (index - 1)
  refund[ARGV[at] + 0](key, ARGV[at + 1] + 0, ARGV[at + 2] + 0, ARGV[at + 3] + 0, ARGV[at + 4] + 0)
end
return {'DONE'}
