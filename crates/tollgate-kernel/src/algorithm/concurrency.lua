-- Concurrency: twin of concurrency.rs; see there for the rule.
--
-- State: the leases, soonest to end first. Here they are a table: held, the sum of all costs, those that have ended included;
-- length; and lease(index), which answers end_us and cost, the soonest to end at 1. Whoever keeps the leases makes the table.
-- The limit: limit and lease_us. A cost that can never fit is told as -1.

-- Now, but not before the newest lease began: the end of a new lease is then the latest of all.
local function concurrency_now(leases, lease_us, now_us)
  if leases.length == 0 then return now_us end
  return math.max(now_us, leases.lease(leases.length) - lease_us)
end

-- How many leases have ended, and what the others hold.
local function concurrency_ended(leases, now_us)
  local ended, held = 0, leases.held
  while ended < leases.length do
    local end_us, cost = leases.lease(ended + 1)
    if end_us > now_us then break end
    ended, held = ended + 1, held - cost
  end
  return ended, held
end

-- Answers allowed, what is held before, the wait until the cost would fit, the time until the last lease ends, how many leases
-- have ended, and the instant that a new lease would begin at.
local function concurrency_acquire(leases, limit, lease_us, cost, now_us)
  now_us = concurrency_now(leases, lease_us, now_us)
  local ended, held = concurrency_ended(leases, now_us)
  local allowed = cost > 0 and cost <= limit - held
  local wait_us, last_us = 0, 0
  if cost > 0 and not allowed then
    local left, index, end_us, lease_cost = held, ended, now_us, 0
    while cost > limit - left and index < leases.length do
      index = index + 1
      end_us, lease_cost = leases.lease(index)
      left = left - lease_cost
    end
    wait_us = end_us - now_us
  end
  if leases.length > ended then last_us = leases.lease(leases.length) - now_us end
  return allowed, held, wait_us, last_us, ended, now_us
end
