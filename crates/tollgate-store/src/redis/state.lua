-- How the state of each strategy is read from Redis and written to it. No arithmetic of limits: the twins have that.
--
--   buckets          a string, full_us, or full_us:full_rest where there is a rest
--   fixed window     a string, end_us:count
--   sliding counter  a string, start_us:prev:cur
--   sliding window   a list: the total, and then the time and cost of each entry, oldest first
--   concurrency      a sorted set: each lease by its end, holder:cost; and `=`, whose score is -1 less the sum of all costs
--
-- Every write sets the key's expiry anew: the instant at which the state says no more than none would, and a little longer, so
-- that a clock that is set back a little still finds it.

-- What is kept under a key is not ours, or of a version that we do not know.
local function not_ours()
  error('TOLLGATE_STATE', 0)
end

-- A held charge as it was kept, if there is one.
local function read_hold(key)
  local kept = call('GET', key)
  if not kept then return nil end
  local is_sound, hold = pcall(cmsgpack.unpack, kept)
  if not is_sound or type(hold) ~= 'table' or not hold.end_us or not hold.parts then not_ours() end
  return hold
end

local function expire_ms(fresh_at_us, slack_us)
  local until_us = fresh_at_us + math.min(slack_us, 1000000)
  return (until_us - until_us % 1000) / 1000 + 1 + shift_ms
end

local function set(key, value, fresh_at_us, slack_us)
  call('SET', key, value, 'PXAT', expire_ms(fresh_at_us, slack_us))
end

local function expire(key, fresh_at_us, slack_us)
  call('PEXPIREAT', key, expire_ms(fresh_at_us, slack_us))
end

local function read_bucket(key)
  local state = call('GET', key)
  if not state then return 0, 0 end
  local full_us = tonumber(state)
  if full_us then return full_us, 0 end
  local us, rest = string.match(state, '^(%d+):(%d+)$')
  if not us then not_ours() end
  return us + 0, rest + 0
end

local function write_bucket(key, full_us, full_rest, span_us)
  local value = full_us
  if full_rest > 0 then value = string.format('%.0f:%.0f', full_us, full_rest) end
  set(key, value, token_bucket_fresh_at(full_us, full_rest), span_us)
end

local function read_window(key)
  local state = call('GET', key)
  if not state then return 0, 0 end
  local end_us, count = string.match(state, '^(%d+):(%d+)$')
  if not end_us then not_ours() end
  return end_us + 0, count + 0
end

local function write_window(key, end_us, count, window_us)
  set(key, string.format('%.0f:%.0f', end_us, count), end_us, window_us)
end

local function read_counter(key)
  local state = call('GET', key)
  if not state then return 0, 0, 0 end
  local start_us, prev, cur = string.match(state, '^(%d+):(%d+):(%d+)$')
  if not start_us then not_ours() end
  return start_us + 0, prev + 0, cur + 0
end

local function write_counter(key, start_us, prev, cur, window_us)
  -- It stays for up to two windows as it is, so there is no slack.
  local fresh_at_us = sliding_window_counter_fresh_at(start_us, prev, cur, window_us)
  set(key, string.format('%.0f:%.0f:%.0f', start_us, prev, cur), fresh_at_us - 1, 0)
end

-- Entries are fetched in runs of this many, so that the server is not asked for each.
local RUN = 32

-- Entries as the twins want them: fetch(first, last) gets pairs of time and cost from the server.
local function entries_by(length, fetch)
  local runs = {}
  return function(index)
    local run = math.floor((index - 1) / RUN)
    if not runs[run] then runs[run] = fetch(run * RUN + 1, math.min((run + 1) * RUN, length)) end
    local at = 2 * (index - run * RUN)
    return runs[run][at - 1] + 0, runs[run][at] + 0
  end
end

local function read_log(key)
  local length = call('LLEN', key)
  if length == 0 then return {total = 0, length = 0} end
  local total = tonumber((call('LINDEX', key, 0)))
  if not total or length % 2 == 0 then not_ours() end
  local log = {total = total, length = (length - 1) / 2}
  log.entry = entries_by(log.length, function(first, last)
    return call('LRANGE', key, 2 * first - 1, 2 * last)
  end)
  return log
end

-- Drops what has run out and adds an entry, or adds to the newest if that is of the same instant.
local function write_log(key, log, gone, used, at_us, cost, window_us)
  if log.length == 0 then
    call('RPUSH', key, cost, at_us, cost)
  else
    local newest_us, newest_cost = log.entry(log.length)
    if gone > 0 then
      call('LTRIM', key, 2 * gone + 1, -1)
      call('LPUSH', key, used + cost)
    else
      call('LSET', key, 0, used + cost)
    end
    if gone < log.length and newest_us == at_us then
      call('LSET', key, -1, newest_cost + cost)
    else
      call('RPUSH', key, at_us, cost)
    end
  end
  expire(key, at_us + window_us, window_us)
end

-- What the lease of a member holds.
local function cost_of(member)
  local cost = tonumber((string.match(member, ':(%d+)$')))
  if not cost then not_ours() end
  return cost
end

local function read_leases(key)
  local length = call('ZCARD', key) - 1
  if length < 0 then return {held = 0, length = 0} end
  local sum = call('ZSCORE', key, '=')
  if not sum then not_ours() end
  local leases = {held = -1 - sum, length = length}
  leases.lease = entries_by(length, function(first, last)
    -- Rank 0 is the sum: its score alone is below zero.
    local found, pairs_of = call('ZRANGE', key, first, last, 'WITHSCORES'), {}
    for at = 1, #found, 2 do
      pairs_of[at], pairs_of[at + 1] = found[at + 1], cost_of(found[at])
    end
    return pairs_of
  end)
  return leases
end

-- Drops the leases that have ended and adds one. What nobody holds by name is named by its end.
local function write_leases(key, ended, held, holder, cost, begin_us, lease_us)
  local end_us = begin_us + lease_us
  if ended > 0 then call('ZREMRANGEBYRANK', key, 1, ended) end
  local name = holder
  if name == '' then
    name = string.format('@%.0f', end_us)
    for _, member in ipairs(call('ZRANGEBYSCORE', key, end_us, end_us)) do
      if string.sub(member, 1, #name + 1) == name .. ':' then
        call('ZREM', key, member)
        held, cost = held - cost_of(member), cost + cost_of(member)
      end
    end
  end
  call('ZADD', key, -1 - held - cost, '=', end_us, string.format('%s:%.0f', name, cost))
  expire(key, end_us, lease_us)
end
