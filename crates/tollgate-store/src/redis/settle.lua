-- Settles, cancels or renews a held charge, or forgets a key.
--
-- KEYS[1] is the hold's, or the key to forget; on a cluster the keys of its parts follow, because a script there must name what
-- it touches. Arguments after the operation: actual: the true cost; each: pairs of a limit's name and its true cost; cancel,
-- renew, forget: none. undo is a cancel that leaves no hold behind, as if there had been no charge. answer and query look.
--
-- Answers DONE, ALREADY or UNKNOWN; DIFFERENT with the names and costs that one number cannot settle; NAMES with the limits
-- there are, where one was named that is not; and for forget, whether something was there.

if operation == 'forget' then return call('DEL', KEYS[1]) end

local hold = read_hold(KEYS[1])
if not hold or now_us >= hold.end_us then return {'UNKNOWN'} end

-- The answer that the charge was given, for who sends it again in other words.
if operation == 'answer' then return {'HELD', hold.question, hold.answer} end

-- For whoever must look at several holds before settling any: what was charged, as name, cost and whether it is a lease.
if operation == 'query' then
  local answer = {hold.settled == 1 and 'ALREADY' or 'OPEN'}
  for _, part in ipairs(hold.parts) do
    answer[#answer + 1] = part.name
    answer[#answer + 1] = string.format('%.0f', part.cost)
    answer[#answer + 1] = part.strategy == 6 and 'lease' or 'count'
  end
  return answer
end

if hold.settled == 1 then return {'ALREADY'} end

-- A server without memory is told to go on, since nothing here is new.
expire(KEYS[1], hold.end_us, 0)

local function keep()
  set(KEYS[1], cmsgpack.pack(hold), hold.end_us, 0)
end

-- A lease of this hold: its leases' table, the instant to go by, and its member and end if it is still there.
local function lease_of(part)
  local lease_us = part[2] + 0
  local leases = read_leases(part.key)
  local at_us = concurrency_now(leases, lease_us, now_us)
  local member = string.format('%s:%.0f', hold.holder, part.cost)
  local end_us = leases.length > 0 and call('ZSCORE', part.key, member)
  if end_us and end_us + 0 > at_us then return leases, at_us, member, lease_us end
end

local function release(part)
  local leases, _, member = lease_of(part)
  if not leases then return false end
  if leases.length == 1 then
    call('DEL', part.key)
  else
    call('ZREM', part.key, member)
    call('ZADD', part.key, -1 - leases.held + part.cost, '=')
    expire(part.key, (leases.lease(leases.length)), part[2] + 0)
  end
  return true
end

if operation == 'renew' then
  -- All are looked at before any is renewed.
  for _, part in ipairs(hold.parts) do
    if part.strategy == 6 and not lease_of(part) then return {'UNKNOWN'} end
  end
  for _, part in ipairs(hold.parts) do
    if part.strategy == 6 then
      local leases, at_us, member, lease_us = lease_of(part)
      call('ZREM', part.key, member)
      call('ZADD', part.key, -1 - leases.held + part.cost, '=')
      leases = read_leases(part.key)
      local ended, held = concurrency_ended(leases, at_us)
      write_leases(part.key, ended, held, hold.holder, part.cost, at_us, lease_us)
    end
  end
  hold.end_us = now_us + hold.ttl_us
  keep()
  return {'DONE'}
end

-- What a part truly cost: nothing said is as reserved.
local actuals = {}
if operation == 'actual' then
  local first
  for _, part in ipairs(hold.parts) do
    if part.strategy ~= 6 then
      first = first or part.cost
      if part.cost ~= first then
        local answer = {'DIFFERENT'}
        for _, other in ipairs(hold.parts) do
          answer[#answer + 1] = string.format('%s %.0f', other.name, other.cost)
        end
        return answer
      end
    end
  end
elseif operation == 'each' then
  local known, answer = {}, {'NAMES', ''}
  for _, part in ipairs(hold.parts) do
    known[part.name] = true
    answer[#answer + 1] = part.name
  end
  for at = 3, #ARGV, 2 do
    if not known[ARGV[at]] then
      answer[2] = ARGV[at]
      return answer
    end
    actuals[ARGV[at]] = actuals[ARGV[at]] or ARGV[at + 1] + 0
  end
end

local function actual_of(part)
  if operation == 'actual' then return ARGV[3] + 0 end
  if operation == 'cancel' or operation == 'undo' then return 0 end
  return actuals[part.name] or part.cost
end

-- For each strategy: gives an amount back (below zero), or takes it anyway.
local correct = {}

correct[1] = function(part, more)
  local c, p, span_us, most_us = part[1] + 0, part[2] + 0, part[3] + 0, part[5] + 0
  local full_us, full_rest = read_bucket(part.key)
  if more > 0 then
    full_us, full_rest = token_bucket_debit(full_us, full_rest, c, p, most_us, more, now_us)
  else
    full_us, full_rest = token_bucket_give_back(full_us, full_rest, c, p, -more, now_us)
  end
  if token_bucket_fresh_at(full_us, full_rest) <= now_us then
    call('DEL', part.key)
  else
    write_bucket(part.key, full_us, full_rest, span_us)
  end
end

correct[2] = correct[1]

correct[3] = function(part, more)
  local window_us, align = part[2] + 0, part[3] + 0
  local end_us, count = read_window(part.key)
  if more > 0 then
    end_us, count = fixed_window_debit(end_us, count, window_us, align, more, now_us)
  else
    end_us, count = fixed_window_give_back(end_us, count, window_us, -more, part.at_us, now_us)
  end
  if operation == 'undo' and count == 0 and part.at_us == end_us - window_us then
    -- The window was opened by what is undone, so it was never open.
    call('DEL', part.key)
  elseif end_us > now_us then
    write_window(part.key, end_us, count, window_us)
  end
end

correct[4] = function(part, more)
  local window_us = part[2] + 0
  local log = read_log(part.key)
  if more > 0 then
    local at_us = sliding_window_now(log, now_us)
    local gone, used = sliding_window_gone(log, window_us, at_us)
    local debt = math.min(more, MOST_COUNT - used)
    if debt > 0 then write_log(part.key, log, gone, used, at_us, debt, window_us) end
    return
  end
  local index, cost = sliding_window_find(log, part.at_us)
  if not index then return end
  local returned = math.min(-more, cost)
  if returned == cost and log.length == 1 then
    call('DEL', part.key)
    return
  end
  local newest_us = log.entry(log.length)
  call('LSET', part.key, 0, log.total - returned)
  if returned == cost then
    call('LSET', part.key, 2 * index - 1, '-')
    call('LSET', part.key, 2 * index, '-')
    call('LREM', part.key, 2, '-')
  else
    call('LSET', part.key, 2 * index, cost - returned)
  end
  expire(part.key, newest_us + window_us, window_us)
end

correct[5] = function(part, more)
  local window_us = part[2] + 0
  local start_us, prev, cur = read_counter(part.key)
  if more > 0 then
    start_us, prev, cur = sliding_window_counter_debit(start_us, prev, cur, window_us, more, now_us)
  else
    start_us, prev, cur =
      sliding_window_counter_give_back(start_us, prev, cur, window_us, -more, part.at_us, now_us)
  end
  if prev == 0 and cur == 0 then
    call('DEL', part.key)
  else
    write_counter(part.key, start_us, prev, cur, window_us)
  end
end

-- All are looked at before any is corrected, because a script that finds something foreign half-way is not undone.
local read = {read_bucket, read_bucket, read_window, read_log, read_counter, read_leases}
for _, part in ipairs(hold.parts) do
  if part.strategy == 6 or actual_of(part) ~= part.cost then read[part.strategy](part.key) end
end

local found = #hold.parts == 0
for _, part in ipairs(hold.parts) do
  if part.strategy == 6 then
    found = release(part) or found
  else
    found = true
    local more = actual_of(part) - part.cost
    if more ~= 0 then correct[part.strategy](part, more) end
  end
end
hold.settled = 1
if operation == 'undo' then call('DEL', KEYS[1]) else keep() end
if found then return {'DONE'} end
return {'UNKNOWN'}
