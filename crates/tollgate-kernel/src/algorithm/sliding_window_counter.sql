-- Sliding window counter: twin of sliding_window_counter.rs; see there for the rule.
--
-- State: start_us of the current window, what was charged in the one before it (prev) and in it (cur). The limit: limit and
-- window_us. A cost that can never fit is told as -1. Products of a count and a span may pass 2^63, so they are numeric, and
-- nothing is divided but time by windows, which rounds down.

-- The counters as of now, and the time into the current window.
create or replace function {prefix}sliding_window_counter_rolled(
    start_us bigint, prev bigint, cur bigint, window_us bigint, now_us bigint)
returns table (rolled_start_us bigint, rolled_prev bigint, rolled_cur bigint, into_us bigint)
rows 1 immutable language sql as $$
  select into_window.began_us,
         case when passed.us >= 2 * window_us then 0 when passed.us >= window_us then cur else prev end,
         case when passed.us >= window_us then 0 else cur end,
         into_window.us
  from
    (select greatest(now_us, start_us) % window_us, greatest(now_us, start_us) - greatest(now_us, start_us) % window_us)
      as into_window (us, began_us),
    lateral (select into_window.began_us - start_us) as passed (us)
$$;

-- Answers allowed and the next state.
create or replace function {prefix}sliding_window_counter_charge(
    start_us bigint, prev bigint, cur bigint, "limit" bigint, window_us bigint, cost bigint, now_us bigint)
returns table (allowed boolean, next_start_us bigint, next_prev bigint, next_cur bigint)
rows 1 immutable language sql as $$
  select cost > 0
           and rolled_prev::numeric * (window_us - into_us) + (rolled_cur + cost)::numeric * window_us <= "limit"::numeric * window_us,
         rolled_start_us, rolled_prev, rolled_cur + cost
  from {prefix}sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
$$;

-- The instant that a charge just admitted counts from.
create or replace function {prefix}sliding_window_counter_charged_at(start_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select greatest(now_us, start_us)
$$;

-- Into the window that it was taken from, or nowhere.
create or replace function {prefix}sliding_window_counter_give_back(
    start_us bigint, prev bigint, cur bigint, window_us bigint, amount bigint, charged_at_us bigint, now_us bigint)
returns table (next_start_us bigint, next_prev bigint, next_cur bigint)
rows 1 immutable language sql as $$
  select rolled_start_us,
         case when charged_in.us + window_us = rolled_start_us then greatest(rolled_prev - amount, 0) else rolled_prev end,
         case when charged_in.us = rolled_start_us then greatest(rolled_cur - amount, 0) else rolled_cur end
  from {prefix}sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us),
       (select charged_at_us - charged_at_us % window_us) as charged_in (us)
$$;

-- What this window counts goes first, then what the last one did.
create or replace function {prefix}sliding_window_counter_refund(
    start_us bigint, prev bigint, cur bigint, window_us bigint, amount bigint, now_us bigint)
returns table (next_start_us bigint, next_prev bigint, next_cur bigint)
rows 1 immutable language sql as $$
  select rolled_start_us, greatest(rolled_prev - greatest(amount - rolled_cur, 0), 0), greatest(rolled_cur - amount, 0)
  from {prefix}sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
$$;

create or replace function {prefix}sliding_window_counter_debit(
    start_us bigint, prev bigint, cur bigint, window_us bigint, amount bigint, now_us bigint)
returns table (next_start_us bigint, next_prev bigint, next_cur bigint)
rows 1 immutable language sql as $$
  select rolled_start_us, rolled_prev, least(rolled_cur + amount, 9007199254740991)
  from {prefix}sliding_window_counter_rolled(start_us, prev, cur, window_us, now_us)
$$;
