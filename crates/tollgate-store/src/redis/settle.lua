-- Settles, cancels or renews held charges, or forgets a key.
--
-- The first arguments after the operation are how many holds are settled, all alike, what the names of all parts begin with, and the sixteen bytes
-- of each holder. The first of KEYS are theirs, or the key to forget.
-- On a cluster the keys of the parts of the only hold follow, because a script there must name what it touches. Further arguments:
-- actual: the true cost; each: the true cost of each item of the question, in their order; pairs: of each part, in the order of the
-- keys of the charge; named: pairs of a limit's name and its true cost; release, where leases end and the rest stays as it is, cancel,
-- renew, forget: none. undo is a cancel that leaves no hold behind, as if there had been no charge. answer and query look.
--
-- The answer is a list with one for each hold, or for the first of them (settle_all.lua): DONE, ALREADY or UNKNOWN; or a list:
-- DIFFERENT with the names and costs that one number cannot settle; COUNT with how many items there are, where there are more or fewer costs; NAMES with the limits there are, where one was
-- named that is not; STATE where what is kept is not ours, FULL where there is no room, FAILED where a command was refused; and for
-- forget, whether something was there.

local function settle_one(hold_key)
  local value = call('GET', hold_key)
  local hold = value and parse_hold(value)
  if not hold or now_us >= hold.end_us then return 'UNKNOWN' end

  -- The answer that the charge was given, for who sends it again in other words.
  if operation == 'answer' then return answer_held(hold) end

  if hold.settled == 1 and operation ~= 'query' then return 'ALREADY' end

  no_sooner = true
  for _, part in ipairs(hold.parts) do part.key = names_start .. part.name end

  -- The leases of a part's key where its own is still among them.
  local function live_leases(part)
    local leases = read_leases(part.key)
    if part.at_us <= now_us or not entries_find(leases, part.at_us, holder) then return nil end
    return leases
  end

  -- For whoever must look at several holds before settling any: what was charged, as name, cost, and
  -- whether it is a count, a lease, or a lease that has ended.
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
    -- All are looked at before any is renewed.
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
            answer[#answer + 1] = format('%s %d', name_of(other), other.cost)
          end
          return answer
        end
      end
    end
  elseif operation == 'each' or operation == 'pairs' then
    -- Of which part each cost is: items of one key and one limit are one part, numbered in the order of first mention.
    local items, pairs_of, pair_count = 0, {}, 0
    if operation == 'pairs' then
      for at = amounts_at, #ARGV do actuals[at - amounts_at + 1] = ARGV[at] + 0 end
    else
      for key, name in string.gmatch(question_of(hold), '%d %d+ (%d+) (%S+)[^\n]*\n') do
        local pair = key .. ' ' .. name
        if not pairs_of[pair] then
          pair_count = pair_count + 1
          pairs_of[pair] = pair_count
        end
        local number, actual = pairs_of[pair], ARGV[amounts_at + items]
        items = items + 1
        if actual then actuals[number] = math.min((actuals[number] or 0) + actual, 9007199254740991) end
      end
      if #ARGV - amounts_at + 1 ~= items then return {'COUNT', format('%d', items)} end
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

  -- For each strategy: gives an amount back (below zero), or takes it anyway. The limit is the one that was charged.
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
      -- The window was opened by what is undone, so it was never open.
      call('DEL', part.key)
    elseif end_us > now_us then
      write_window(part.key, end_us, count, start_us)
    end
  end

  correct[4] = function(part, more, _, window_us)
    local log = read_log(part.key)
    -- A log of format 1 does not say for how long it is kept; the window that it was charged by counts on it.
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

  -- All are looked at before any is corrected, because a script that finds something foreign half-way is not undone.
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
