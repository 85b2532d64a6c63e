-- Sliding window counter: twin of sliding_window_counter.rs; see there for the rule.
--
-- State: two sets of counts, newer and older, each as window_us, start_us of the current window, what was charged in the one before
-- it (prev) and in it (cur). A window of 0 means that there are none, as does null for all of the older; that of the newer may be
-- null, and is then that of the reader of the state. The limit: limit and window_us. A cost that can never fit is returned as -1. Products of a count and a span may pass
-- 2^63, so they are numeric. An estimate of the older counts rounds up.

-- The counts as of now, and the time into the current window.
create or replace function {prefix}sliding_window_counter_rolled(
    window_us bigint, start_us bigint, prev bigint, cur bigint, now_us bigint)
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

-- The same of one set of counts in one array: window_us, start_us, prev, cur.
create or replace function {prefix}sliding_window_counter_rolled(counts bigint[], now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  into_us bigint;
  start_us bigint;
  passed_us bigint;
begin
  if counts[1] = 0 then
    return counts;
  end if;
  into_us := greatest(now_us, counts[2]) % counts[1];
  start_us := greatest(now_us, counts[2]) - into_us;
  passed_us := start_us - counts[2];
  return array[counts[1], start_us,
    case when passed_us >= 2 * counts[1] then 0 when passed_us >= counts[1] then counts[4] else counts[3] end,
    case when passed_us >= counts[1] then 0 else counts[4] end];
end
$$;

-- What counts now, rounded up to whole units.
create or replace function {prefix}sliding_window_counter_estimate(counts bigint[], now_us bigint)
returns bigint immutable language plpgsql as $$
declare
  rolled constant bigint[] := {prefix}sliding_window_counter_rolled(counts, now_us);
begin
  if counts[1] = 0 then
    return 0;
  end if;
  return div(rolled[3]::numeric * (rolled[1] - (greatest(now_us, rolled[2]) - rolled[2])) + rolled[1] - 1, rolled[1]) + rolled[4];
end
$$;

-- Whether nothing counts now or later.
create or replace function {prefix}sliding_window_counter_is_fresh(counts bigint[], now_us bigint)
returns boolean immutable language plpgsql as $$
declare
  rolled constant bigint[] := {prefix}sliding_window_counter_rolled(counts, now_us);
begin
  return rolled[3] = 0 and rolled[4] = 0 and now_us >= counts[2];
end
$$;

-- The state with the counts of this window first, rolled to now: both sets of counts, and what the older ones come to.
create or replace function {prefix}sliding_window_counter_adopted(
    newer bigint[], older bigint[], window_us bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  at_us constant bigint := greatest(now_us, newer[2], older[2]);
  none constant bigint[] := array[0, 0, 0, 0]::bigint[];
  swapped bigint[];
  folded bigint;
begin
  if newer[1] <> window_us then
    if older[1] = window_us or {prefix}sliding_window_counter_is_fresh(newer, at_us) then
      swapped := newer;
      newer := older;
      older := swapped;
    end if;
    if newer[1] <> window_us then
      -- Neither is this window's: the newer becomes the other one, and what the older counts becomes its own.
      folded := 0;
      if newer[1] <> 0 and not {prefix}sliding_window_counter_is_fresh(newer, at_us) then
        folded := {prefix}sliding_window_counter_estimate(older, at_us);
        older := newer;
      end if;
      newer := {prefix}sliding_window_counter_rolled(array[window_us, 0, 0, 0], at_us);
      newer[4] := least(folded, 9007199254740991);
    end if;
  end if;
  if {prefix}sliding_window_counter_is_fresh(older, at_us) then
    older := none;
  end if;
  return {prefix}sliding_window_counter_rolled(newer, at_us) || older
    || {prefix}sliding_window_counter_estimate(older, at_us);
end
$$;

-- The charge of counts of more than one length: allowed (0 or 1) and the next state, which is the same as before where it is not.
create or replace function {prefix}sliding_window_counter_charge_changed(
    newer bigint[], older bigint[], "limit" bigint, window_us bigint, cost bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  adopted bigint[] := {prefix}sliding_window_counter_adopted(newer, older, window_us, now_us);
  into_us constant bigint := greatest(now_us, newer[2], older[2]) - adopted[2];
begin
  if cost > 0 and adopted[3]::numeric * (window_us - into_us) + (adopted[4] + adopted[9] + cost)::numeric * window_us
                  <= "limit"::numeric * window_us then
    adopted[4] := adopted[4] + cost;
    return 1::bigint || case when adopted[5] = 0 then adopted[1 : 4] else adopted[1 : 8] end;
  end if;
  return 0::bigint || newer || older;
end
$$;

-- Answers allowed and the next state, which is the same as before where it is not allowed.
create or replace function {prefix}sliding_window_counter_charge(
    newer_window_us bigint, newer_start_us bigint, newer_prev bigint, newer_cur bigint, older bigint[],
    "limit" bigint, window_us bigint, cost bigint, now_us bigint)
returns table (allowed boolean,
               next_window_us bigint, next_start_us bigint, next_prev bigint, next_cur bigint, next_older bigint[])
rows 1 immutable language sql as $$
  -- Counts of one length, as nearly all are, are decided here; others by a function of their own, whose text costs nobody else.
  select fit.allowed,
         case when fit.other is not null then fit.other[2] when fit.allowed then window_us else newer_window_us end,
         case when fit.other is not null then fit.other[3] when fit.allowed then fit.rolled_start_us else newer_start_us end,
         case when fit.other is not null then fit.other[4] when fit.allowed then fit.rolled_prev else newer_prev end,
         case when fit.other is not null then fit.other[5] when fit.allowed then fit.rolled_cur + cost else newer_cur end,
         nullif(fit.other[6 : 9], '{}')
  from
    (select state.*,
            case when state.other is not null then state.other[1] = 1
                 else cost > 0 and rolled_prev::numeric * (window_us - into_us) + (rolled_cur + cost)::numeric * window_us
                                   <= "limit"::numeric * window_us end as allowed
     from
       (select rolled.*,
               case when older is null and coalesce(newer_window_us, window_us) = window_us then null
                    else {prefix}sliding_window_counter_charge_changed(
                      array[newer_window_us, newer_start_us, newer_prev, newer_cur], coalesce(older, '{0, 0, 0, 0}'),
                      "limit", window_us, cost, now_us) end as other
        from {prefix}sliding_window_counter_rolled(window_us, newer_start_us, newer_prev, newer_cur, now_us) as rolled
        offset 0) as state
     offset 0) as fit
$$;

-- The instant that a charge just admitted counts from.
create or replace function {prefix}sliding_window_counter_charged_at(
    newer_start_us bigint, older bigint[], now_us bigint)
returns bigint immutable language sql as $$
  select greatest(now_us, newer_start_us, older[2])
$$;

-- Into the counts of the length that it was charged by, if its window still counts.
create or replace function {prefix}sliding_window_counter_give_back(
    newer bigint[], older bigint[], window_us bigint, taken_at_us bigint, amount bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  is_newer constant boolean := newer[1] = window_us;
  charged_in_us constant bigint := taken_at_us - taken_at_us % window_us;
  counts bigint[];
begin
  if not is_newer and older[1] <> window_us then
    return newer || older;
  end if;
  counts := {prefix}sliding_window_counter_rolled(case when is_newer then newer else older end, now_us);
  if charged_in_us = counts[2] then
    counts[4] := greatest(counts[4] - amount, 0);
  elsif charged_in_us + window_us = counts[2] then
    counts[3] := greatest(counts[3] - amount, 0);
  end if;
  return case when is_newer then counts || older else newer || counts end;
end
$$;

-- What the current window counts goes first, then what the last one did, then the older counts.
create or replace function {prefix}sliding_window_counter_refund(
    newer bigint[], older bigint[], amount bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  counts bigint[];
  pair bigint[] := '{}';
  rest bigint := amount;
  of_prev bigint;
begin
  for turn in 1 .. 2 loop
    counts := {prefix}sliding_window_counter_rolled(case when turn = 1 then newer else older end, now_us);
    of_prev := greatest(rest - counts[4], 0);
    pair := pair || array[counts[1], counts[2], greatest(counts[3] - of_prev, 0), greatest(counts[4] - rest, 0)];
    rest := greatest(of_prev - counts[3], 0);
  end loop;
  return pair;
end
$$;

create or replace function {prefix}sliding_window_counter_debit(
    newer bigint[], older bigint[], window_us bigint, amount bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  adopted bigint[];
  is_older boolean;
  counts bigint[];
begin
  if newer[1] = 0 then
    adopted := {prefix}sliding_window_counter_adopted(newer, older, window_us, now_us);
    newer := adopted[1 : 4];
    older := adopted[5 : 8];
  end if;
  is_older := older[1] = window_us and newer[1] <> window_us;
  counts := {prefix}sliding_window_counter_rolled(case when is_older then older else newer end, now_us);
  counts[4] := least(counts[4] + amount, 9007199254740991);
  return case when is_older then newer || counts else counts || older end;
end
$$;
