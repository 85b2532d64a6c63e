-- Concurrency: twin of concurrency.rs; see there for the rule.
--
-- State: the leases, of which this function gets what it needs: total, the sum of all costs, those that have ended included;
-- newest_us, the latest end of a lease, 0 if there is none; ended, what the leases that have ended come to; enough_us, the
-- end of the first lease that leaves room once it has ended. The store computes these. The limit: limit and
-- lease_us. A cost that can never fit is returned as -1. Every number stays below 2^54; no division.

-- When a lease ends that begins now.
create or replace function {prefix}concurrency_end(lease_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select now_us + lease_us
$$;

-- What has to end before a cost fits: 0 where it fits now, or never can.
create or replace function {prefix}concurrency_wanted(total bigint, ended bigint, "limit" bigint, cost bigint)
returns bigint immutable language sql as $$
  select case when cost > 0 and cost <= "limit" then greatest(total - ended + cost - "limit", 0) else 0 end
$$;

-- Answers allowed, what is held before, the wait until the cost would fit, and the time until the last lease ends.
create or replace function {prefix}concurrency_acquire(
    total bigint, newest_us bigint, ended bigint, enough_us bigint, "limit" bigint, cost bigint, now_us bigint)
returns table (allowed boolean, held bigint, wait_us bigint, last_us bigint)
rows 1 immutable language sql as $$
  select cost > 0 and cost <= "limit" - (total - ended), total - ended,
         greatest(coalesce(enough_us - now_us, 0), 0),
         greatest(newest_us - now_us, 0)
$$;

-- The end of a lease that is renewed: a full lease from now, and never less than it had.
create or replace function {prefix}concurrency_renew(end_us bigint, lease_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select greatest({prefix}concurrency_end(lease_us, now_us), end_us)
$$;
