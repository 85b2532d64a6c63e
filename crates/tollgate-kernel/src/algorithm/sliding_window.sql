-- Sliding window: twin of sliding_window.rs; see there for the rule.
--
-- State: a log of what was charged when, of which this file is told what it needs: total, the sum of all costs in the log,
-- those that have run out included; newest_us, the time of the newest entry, 0 if there is none; gone, what the entries that
-- have run out come to; enough_us, the time of the first entry that leaves room once it is gone. Whoever keeps the log finds
-- these. The limit: limit and window_us. A cost that can never fit is told as -1. Every number stays below 2^54; no division.

-- Now, but not before the newest entry: time never goes back for a key.
create or replace function {prefix}sliding_window_now(newest_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select greatest(now_us, newest_us)
$$;

-- Answers allowed, what is used before, the wait until the cost would fit, the time until the newest entry runs out, and the
-- total and the newest entry of the next state, in which the entries that have run out are no more.
create or replace function {prefix}sliding_window_charge(
    total bigint, newest_us bigint, gone bigint, enough_us bigint,
    "limit" bigint, window_us bigint, cost bigint, now_us bigint)
returns table (allowed boolean, used bigint, wait_us bigint, last_us bigint, next_total bigint, next_newest_us bigint)
rows 1 immutable language sql as $$
  select cost > 0 and cost <= "limit" - (total - gone), total - gone,
         greatest(coalesce(enough_us + window_us - now_us, 0), 0),
         case when newest_us = 0 then 0 else greatest(newest_us + window_us - now_us, 0) end,
         total - gone + cost, now_us
$$;

-- How much of a debt is taken.
create or replace function {prefix}sliding_window_debit(total bigint, gone bigint, amount bigint)
returns bigint immutable language sql as $$
  select least(amount, 9007199254740991 - (total - gone))
$$;

-- The newest charges are undone first: what is left of the newest entry, and of the amount for those before it.
create or replace function {prefix}sliding_window_refund(cost bigint, amount bigint)
returns table (next_cost bigint, next_amount bigint)
rows 1 immutable language sql as $$
  select greatest(cost - amount, 0), greatest(amount - cost, 0)
$$;
