-- Concurrency: twin of concurrency.rs; see there for the rule.
--
-- State: the leases, of which this file is told what it needs: total, the sum of all costs, those that have ended included;
-- newest_us, the end of the newest lease, 0 if there is none; ended, what the leases that have ended come to; enough_us, the
-- end of the first lease that leaves room once it has ended. Whoever keeps the leases finds these. The limit: limit and
-- lease_us. A cost that can never fit is told as -1. Every number stays below 2^54; no division.

-- Now, but not before the newest lease began: the end of a new lease is then the latest of all.
create or replace function {prefix}concurrency_now(newest_us bigint, lease_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select greatest(now_us, newest_us - lease_us)
$$;

-- Answers allowed, what is held before, the wait until the cost would fit, the time until the last lease ends, and the total
-- and the newest end of the next state, in which the leases that have ended are no more.
create or replace function {prefix}concurrency_acquire(
    total bigint, newest_us bigint, ended bigint, enough_us bigint,
    "limit" bigint, lease_us bigint, cost bigint, now_us bigint)
returns table (allowed boolean, held bigint, wait_us bigint, last_us bigint, next_total bigint, next_newest_us bigint)
rows 1 immutable language sql as $$
  select cost > 0 and cost <= "limit" - (total - ended), total - ended,
         greatest(coalesce(enough_us - now_us, 0), 0),
         greatest(newest_us - now_us, 0),
         total - ended + cost, now_us + lease_us
$$;
