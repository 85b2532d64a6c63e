-- Fixed window: twin of fixed_window.rs; see there for the rule.
--
-- State: end_us of the open window, the count in it and its start_us; an end that has passed means that none is open. A start that
-- was not kept is null, and then taken as one window before the end. The limit: limit, window_us, and align, 0 where windows begin
-- at the first charge and 1 where they begin at multiples of the window since 1970. A cost that can never fit is returned as -1. Every
-- number stays below 2^54; no division.

-- The window that a charge at now_us would count in: the open one, or a new one with nothing in it.
create or replace function {prefix}fixed_window_current(
    end_us bigint, count bigint, start_us bigint, window_us bigint, align bigint, now_us bigint)
returns table (open_end_us bigint, open_count bigint, open_start_us bigint)
rows 1 immutable language sql as $$
  select case when now_us < end_us then end_us
              when align = 1 then now_us - now_us % window_us + window_us
              else now_us + window_us end,
         case when now_us < end_us then count else 0 end,
         case when now_us < end_us then coalesce(start_us, end_us - window_us)
              when align = 1 then now_us - now_us % window_us
              else now_us end
$$;

-- Answers allowed and the next state.
create or replace function {prefix}fixed_window_charge(
    end_us bigint, count bigint, start_us bigint, "limit" bigint, window_us bigint, align bigint, cost bigint, now_us bigint)
returns table (allowed boolean, next_end_us bigint, next_count bigint, next_start_us bigint)
rows 1 immutable language sql as $$
  select cost > 0 and cost <= "limit" - open_count, open_end_us, open_count + cost, open_start_us
  from {prefix}fixed_window_current(end_us, count, start_us, window_us, align, now_us)
$$;

-- The instant that a charge just admitted counts from.
create or replace function {prefix}fixed_window_charged_at(end_us bigint, start_us bigint, window_us bigint, now_us bigint)
returns bigint immutable language sql as $$
  select greatest(now_us, coalesce(start_us, end_us - window_us))
$$;

-- Into the window that it was taken from, or nowhere.
create or replace function {prefix}fixed_window_give_back(
    end_us bigint, count bigint, start_us bigint, window_us bigint, taken_at_us bigint, amount bigint, now_us bigint)
returns bigint immutable language sql as $$
  select case when now_us < end_us and coalesce(start_us, end_us - window_us) <= taken_at_us and taken_at_us < end_us
              then greatest(count - amount, 0) else count end
$$;

create or replace function {prefix}fixed_window_debit(
    end_us bigint, count bigint, start_us bigint, window_us bigint, align bigint, amount bigint, now_us bigint)
returns table (next_end_us bigint, next_count bigint, next_start_us bigint)
rows 1 immutable language sql as $$
  select open_end_us, least(open_count + amount, 9007199254740991), open_start_us
  from {prefix}fixed_window_current(end_us, count, start_us, window_us, align, now_us)
$$;
