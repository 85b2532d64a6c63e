-- Concurrency: twin of concurrency.rs; see there for the rule.
--
-- State: the leases, which are entries (entries.lua) by their end, each with sixteen bytes for its holder. The limit: limit and
-- lease_us. A cost that can never fit is -1.

-- Answers allowed, what is held before, the wait until the cost would fit, and the time until the last lease ends.
local function concurrency_peek(leases, limit, cost, now_us)
  local last_us = entries_last(leases)
  if not last_us then return cost > 0, 0, 0, 0 end
  local used = leases.total - entries_sum_until(leases, now_us)
  local allowed, wait_us = cost > 0 and cost <= limit - used, 0
  if cost > 0 and not allowed then
    -- What has ended and what must end besides; a sum with the cost may not be exact.
    wait_us = math.max(entries_first_to_sum(leases, leases.total - (limit - cost)) - now_us, 0)
  end
  return allowed, used, wait_us, math.max(last_us - now_us, 0)
end

local function concurrency_hold(leases, id, cost, end_us, now_us)
  entries_drop_until(leases, now_us)
  entries_insert(leases, end_us, cost, id)
end
