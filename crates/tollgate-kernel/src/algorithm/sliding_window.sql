-- Sliding window: twin of sliding_window.rs; see there for the rule.
--
-- State: a log of what was charged when, of which this function gets what it needs: total, the sum of all costs in the log,
-- those that have run out included; newest_us, the time of the newest entry, 0 if there is none; gone, what the entries that
-- have run out come to; enough_us, the time of the first entry that leaves room once it is gone. The store computes
-- these. The limit: limit and window_us. A cost that can never fit is returned as -1. Every number stays below 2^54; no division.

-- Now, but not before the newest entry: time never goes back for a key.
create or replace function {prefix}sliding_window_now(newest_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select greatest(now_us, newest_us)
$$;

-- What has to go before a cost fits: 0 where it fits now, or never can.
create or replace function {prefix}sliding_window_wanted(
    total bigint, gone bigint, "limit" bigint, cost bigint)
returns bigint immutable language sql as $$
  select case when cost > 0 and cost <= "limit" then greatest(total - gone + cost - "limit", 0) else 0 end
$$;

-- Answers allowed, what is used before, the wait until the cost would fit, and the time until the newest entry runs out.
create or replace function {prefix}sliding_window_charge(
    total bigint, newest_us bigint, gone bigint, enough_us bigint,
    "limit" bigint, window_us bigint, cost bigint, now_us bigint)
returns table (allowed boolean, used bigint, wait_us bigint, last_us bigint)
rows 1 immutable language sql as $$
  select cost > 0 and cost <= "limit" - (total - gone), total - gone,
         greatest(coalesce(enough_us + window_us - now_us, 0), 0),
         case when newest_us = 0 then 0 else greatest(newest_us + window_us - now_us, 0) end
$$;

-- How long the log keeps entries once it was charged by a window: as long as the longest window that it was charged by.
create or replace function {prefix}sliding_window_keep(keep_us bigint, window_us bigint)
returns bigint immutable language sql as $$
  select greatest(keep_us, window_us)
$$;

-- How many entries a log may keep before the oldest are merged.
create or replace function {prefix}sliding_window_most("limit" bigint)
returns bigint immutable language sql as $$
  select "limit" + 64
$$;

-- How much of a debt is taken.
create or replace function {prefix}sliding_window_debit(total bigint, amount bigint)
returns bigint immutable language sql as $$
  select greatest(least(amount, 9007199254740991 - total), 0)
$$;
