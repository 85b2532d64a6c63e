-- Charges all parts or none: reads the state of each, asks the twins, and writes. Nothing is written before all was read.
--
-- charge, peek: KEYS are the parts'; for each part eleven arguments follow the operation: strategy, shadow, name, cost,
-- price_us, price_rest and the limit's five numbers. hold: the last of KEYS is the hold's, and after the parts come the holder,
-- the time to live in us, and the question as its caller would have it back.
--
-- The answer is a list: now, whether the charge passed, and three numbers for each part: what the twin found. A hold that is
-- there already answers HELD, the question that it was made with, and the answer that it was given.

local WIDTH = 11
local count = #KEYS
local hold_key, holder, ttl_us, question = nil, '', 0, nil
if operation == 'hold' then
  hold_key, count = KEYS[count], count - 1
  local last = 2 + WIDTH * count
  holder, ttl_us, question = ARGV[last + 1], ARGV[last + 2] + 0, ARGV[last + 3]
  local hold = read_hold(hold_key)
  if hold and now_us < hold.end_us then return {'HELD', hold.question, hold.answer} end
end

-- For each strategy: reads a part's state and asks its twin. Gives the part allowed, what was found (one, two, three), the
-- instant that the charge would count from (at_us), and write(), which makes it.
local look = {}

look[1] = function(part)
  local c, span_us, span_rest = part[7] + 0, part[9] + 0, part[10] + 0
  local full_us, full_rest = read_bucket(part.key)
  local allowed, missing_us, missing_rest, after_us, after_rest =
    token_bucket_charge(full_us, full_rest, c, span_us, span_rest, part.price_us, part[6] + 0, now_us)
  part.one, part.two, part.three, part.at_us = missing_us, missing_rest, 0, now_us
  part.write = function() write_bucket(part.key, after_us, after_rest, span_us) end
  return allowed, token_bucket_fresh_at(full_us, full_rest), span_us
end

-- The leaky bucket's twin is the token bucket's; see leaky_bucket.lua.
look[2] = look[1]

look[3] = function(part)
  local limit, window_us, align = part[7] + 0, part[8] + 0, part[9] + 0
  local end_us, found = read_window(part.key)
  local allowed, after_us, after = fixed_window_charge(end_us, found, limit, window_us, align, part.price_us, now_us)
  part.one, part.two, part.three = end_us, found, 0
  part.at_us = fixed_window_charged_at(after_us, window_us, now_us)
  part.write = function() write_window(part.key, after_us, after, window_us) end
  return allowed, end_us, window_us
end

look[4] = function(part)
  local limit, window_us = part[7] + 0, part[8] + 0
  local log = read_log(part.key)
  local allowed, used, wait_us, last_us, gone, at_us =
    sliding_window_charge(log, limit, window_us, part.price_us, now_us)
  part.one, part.two, part.three, part.at_us = used, wait_us, last_us, at_us
  part.write = function() write_log(part.key, log, gone, used, at_us, part.price_us, window_us) end
  return allowed, at_us + last_us, window_us
end

look[5] = function(part)
  local limit, window_us = part[7] + 0, part[8] + 0
  local start_us, prev, cur = read_counter(part.key)
  local allowed, after_us, after_prev, after_cur =
    sliding_window_counter_charge(start_us, prev, cur, limit, window_us, part.price_us, now_us)
  part.one, part.two, part.three, part.at_us = start_us, prev, cur, math.max(now_us, start_us)
  part.write = function() write_counter(part.key, after_us, after_prev, after_cur, window_us) end
  return allowed, sliding_window_counter_fresh_at(start_us, prev, cur, window_us) - 1, 0
end

look[6] = function(part)
  local limit, lease_us = part[7] + 0, part[8] + 0
  local leases = read_leases(part.key)
  local allowed, in_use, wait_us, last_us, ended, begin_us =
    concurrency_acquire(leases, limit, lease_us, part.price_us, now_us)
  part.one, part.two, part.three, part.at_us = in_use, wait_us, last_us, begin_us
  part.lease_us = lease_us
  part.write = function() write_leases(part.key, ended, in_use, holder, part.price_us, begin_us, lease_us) end
  return allowed, begin_us + last_us, lease_us
end

local parts, passed = {}, 1
for index = 1, count do
  local part = {unpack(ARGV, 3 + WIDTH * (index - 1), 2 + WIDTH * index)}
  part.key, part.price_us = KEYS[index], part[5] + 0
  part.allowed, part.fresh_at_us, part.slack_us = look[part[1] + 0](part)
  if not part.allowed and part[2] == '0' then passed = 0 end
  parts[index] = part
end

local answer = {now_us, passed}
for index, part in ipairs(parts) do
  local at = 3 * index
  answer[at], answer[at + 1], answer[at + 2] = part.one, part.two, part.three
end
if operation == 'peek' then return answer end

-- Whether all the states that a charge writes are there already.
local function all_known()
  for _, part in ipairs(parts) do
    if passed == 1 and part.allowed and call('PTTL', part.key) == -2 then return false end
  end
  return not hold_key
end

local function write_all()
  local charged = {}
  for _, part in ipairs(parts) do
    if passed == 1 and part.allowed then
      part.write()
      ttl_us = math.max(ttl_us, part.lease_us or 0)
      charged[#charged + 1] = {
        key = part.key, strategy = part[1] + 0, name = part[3], cost = part[4] + 0, at_us = part.at_us,
        part[7], part[8], part[9], part[10], part[11]
      }
    elseif call('PTTL', part.key) == -1 then
      -- A key that lost its expiry gets it back, even from a charge that is refused.
      expire(part.key, part.fresh_at_us, part.slack_us)
    end
  end
  if hold_key and passed == 1 then
    local hold = {
      question = question, answer = answer, parts = charged, holder = holder,
      ttl_us = ttl_us, end_us = now_us + ttl_us, settled = 0
    }
    set(hold_key, cmsgpack.pack(hold), hold.end_us, 0)
  end
end

local is_written, failed = pcall(write_all)
if not is_written then
  -- A server without memory has refused the first write, so nothing was written yet.
  if not is_full(failed) or not all_known() then error(failed, 0) end
  for _, part in ipairs(parts) do
    if part.allowed then
      begin_writing(part.key, expire_ms(math.max(part.fresh_at_us, now_us), 1000000) - shift_ms)
      break
    end
  end
  write_all()
end
return answer
