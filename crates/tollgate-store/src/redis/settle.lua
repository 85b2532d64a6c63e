-- Settles, cancels or renews held charges, or forgets a key.
--
-- The first arguments after the operation are the number of holds, which are all settled in the same way, the prefix of all part
-- names, and the sixteen bytes of each holder. The first of KEYS are the keys of the holds, or the key to forget. On a cluster
-- there is one hold, and the keys of its parts follow, because a cluster requires a script to declare its keys. Further arguments
-- by operation. actual: the actual cost; each: the actual cost of each charge of the request, in order; pairs: of each part, in the
-- order of the keys; named: pairs of a limit's name and its actual cost; none for release (leases end and all other charges
-- stay), cancel, renew and forget. undo is a cancel that also removes the hold, as if it had never been charged. answer and query
-- only read.
--
-- The answer is a list with one element for each hold, or only for the first of them (settle_all.lua): DONE, ALREADY or UNKNOWN;
-- or a list: DIFFERENT with names and costs, if one amount cannot settle them; COUNT with the number of charges, if the number of
-- amounts differs; NAMES with the limits of the hold, if another limit was named; STATE if a value was not written by us, FULL if
-- there is no memory, FAILED if a command failed; and for forget, whether the key existed.

local function settle_one(hold_key)
  local value = call('GET', hold_key)
  local hold = value and parse_hold(value)
  if not hold or now_us >= hold.end_us then return 'UNKNOWN' end

  -- The answer of the first call, for a caller that sends the charge again with another request.
  if operation == 'answer' then return answer_held(hold) end

  if hold.settled == 1 and operation ~= 'query' then return 'ALREADY' end

  no_sooner = true
  for _, part in ipairs(hold.parts) do part.key = names_start .. part.name end

  -- The leases of a part's key, or nil if the lease of this part is not among them.
  local function live_leases(part)
    local leases = read_leases(part.key)
    if part.at_us <= now_us or not entries_find(leases, part.at_us, holder) then return nil end
    return leases
  end

  -- For a caller that must read several holds before it settles any: name, cost, and whether the part is a count, a lease, or an
  -- ended lease.
  if operation == 'query' then
    local answer = {hold.settled == 1 and 'ALREADY' or 'OPEN'}
    for _, part in ipairs(hold.parts) do
      answer[#answer + 1] = name_of(part)
      answer[#answer + 1] = format('%d', part.cost)
      answer[#answer + 1] = part.strategy ~= 6 and 'count' or live_leases(part) and 'lease' or 'ended'
    end
    return answer
  end

  if operation == 'renew' then
    -- All leases are checked before any is renewed.
    for _, part in ipairs(hold.parts) do
      if part.strategy == 6 and not live_leases(part) then return 'UNKNOWN' end
    end
    for _, part in ipairs(hold.parts) do
      if part.strategy == 6 then
        local leases = live_leases(part)
        entries_reduce(leases, part.at_us, part.cost, holder)
        part.at_us = math.max(part.at_us, now_us + part.numbers[2])
        concurrency_hold(leases, holder, part.cost, part.at_us, now_us)
        write_leases(part.key, leases)
      end
    end
    hold.from_us, hold.end_us = now_us, now_us + hold.ttl_us
    write_hold(hold_key, hold)
    return 'DONE'
  end

  -- The actual cost of the parts; a part without an entry keeps its reserved cost.
  local actuals = {}
  if operation == 'actual' then
    local first
    for _, part in ipairs(hold.parts) do
      if part.strategy ~= 6 then
        first = first or part.cost
        if part.cost ~= first then
          local answer = {'DIFFERENT'}
          for _, other in ipairs(hold.parts) do
            answer[#answer + 1] = format('%s %d', name_of(other), other.cost)
          end
          return answer
        end
      end
    end
  elseif operation == 'each' or operation == 'pairs' then
    -- Maps costs to parts: charges of one key and one limit are one part, numbered in the order of their first charge.
    local charges, pairs_of, pair_count = 0, {}, 0
    if operation == 'pairs' then
      for at = amounts_at, #ARGV do actuals[at - amounts_at + 1] = ARGV[at] + 0 end
    else
      for key, name in string.gmatch(request_of(hold), '%d %d+ (%d+) (%S+)[^\n]*\n') do
        local pair = key .. ' ' .. name
        if not pairs_of[pair] then
          pair_count = pair_count + 1
          pairs_of[pair] = pair_count
        end
        local number, actual = pairs_of[pair], ARGV[amounts_at + charges]
        charges = charges + 1
        if actual then actuals[number] = math.min((actuals[number] or 0) + actual, 9007199254740991) end
      end
      if #ARGV - amounts_at + 1 ~= charges then return {'COUNT', format('%d', charges)} end
    end
  elseif operation == 'named' then
    local known, answer = {}, {'NAMES', ''}
    for _, part in ipairs(hold.parts) do
      known[name_of(part)] = true
      answer[#answer + 1] = name_of(part)
    end
    for at = amounts_at, #ARGV, 2 do
      if not known[ARGV[at]] then
        answer[2] = ARGV[at]
        return answer
      end
      actuals[ARGV[at]] = actuals[ARGV[at]] or ARGV[at + 1] + 0
    end
  end

  local function actual_of(part)
    if operation == 'actual' then return ARGV[amounts_at] + 0 end
    if operation == 'cancel' or operation == 'undo' then return 0 end
    if operation == 'each' or operation == 'pairs' then return actuals[part.number] or part.cost end
    return actuals[name_of(part)] or part.cost
  end

  -- For each strategy: gives an amount back (below zero), or takes it even if it does not fit. The limit is the one that was
  -- charged.
  local correct = {}

  correct[1] = function(part, more, c, p, burst, debt_us, keeps_instant)
    local state = read_bucket(part.key)
    if more > 0 then
      state = token_bucket_debit(state, c, p, burst, keeps_instant, debt_us, more, now_us)
    elseif state.full_us > 0 then
      state = token_bucket_give_back(state, c, p, burst, keeps_instant, part.cost, part.at_us, -more, now_us)
    else
      return
    end
    write_bucket(part.key, state, keeps_instant)
  end

  correct[2] = correct[1]

  correct[3] = function(part, more, _, window_us, align)
    local end_us, count, start_us = read_window(part.key, window_us)
    if more > 0 then
      end_us, count, start_us = fixed_window_debit(end_us, count, start_us, window_us, align, more, now_us)
    else
      end_us, count, start_us = fixed_window_give_back(end_us, count, start_us, -more, part.at_us, now_us)
    end
    if operation == 'undo' and count == 0 and part.at_us == start_us then
      -- The undone charge opened the window, so the window is removed.
      call('DEL', part.key)
    elseif end_us > now_us then
      write_window(part.key, end_us, count, start_us)
    end
  end

  correct[4] = function(part, more, _, window_us)
    local log = read_log(part.key)
    -- A log of format 1 has no retention time; it must stay for the window that it was charged by.
    if log.keep_us == 0 then log.keep_us = window_us end
    if more > 0 then
      sliding_window_debit(log, window_us, more, now_us)
    elseif entries_reduce(log, part.at_us, -more) == 0 then
      return
    end
    write_log(part.key, log)
  end

  correct[5] = function(part, more, _, window_us)
    local newer, older = read_counter(part.key, window_us)
    if more > 0 then
      newer, older = sliding_window_counter_debit(newer, older, window_us, more, now_us)
    elseif newer.window_us > 0 then
      newer, older = sliding_window_counter_give_back(newer, older, window_us, -more, part.at_us, now_us)
    else
      return
    end
    write_counter(part.key, newer, older)
  end

  -- All keys are read before any is changed, because a script that fails half-way is not rolled back.
  local read = {read_bucket, read_bucket, read_window, read_log, read_counter, read_leases}
  for _, part in ipairs(hold.parts) do
    if part.strategy == 6 or actual_of(part) ~= part.cost then read[part.strategy](part.key, part.numbers[2]) end
  end

  local found = #hold.parts == 0
  for _, part in ipairs(hold.parts) do
    if part.strategy == 6 then
      local leases = live_leases(part)
      if leases then
        entries_reduce(leases, part.at_us, part.cost, holder)
        write_leases(part.key, leases)
        found = true
      end
    else
      found = true
      local more = actual_of(part) - part.cost
      if more ~= 0 then correct[part.strategy](part, more, unpack(part.numbers)) end
    end
  end
  hold.settled = 1
  if operation == 'undo' then call('DEL', hold_key) else write_hold(hold_key, hold) end
  return found and 'DONE' or 'UNKNOWN'
end
