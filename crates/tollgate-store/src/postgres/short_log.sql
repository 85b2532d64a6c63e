-- Short logs: logs whose entries are stored in the state, so that a charge is one row. See entries.sql for longer ones.
--
-- log_us has the instants in increasing order, and log_sums the running sums, which include a constant for dropped entries. The
-- sum of the entries up to a position is log_sums[position] less that constant, which is the last running sum less the total of
-- the log. Entries are dropped from the front by removing them and subtracting from the total. Both arrays are null if the log is
-- empty or in chunks. The limiter arithmetic is in the twin; these functions compute the inputs of the twin.

-- The sum of the entries up to and including an instant.
create or replace function {prefix}short_log_sum_until(log_us bigint[], log_sums bigint[], total bigint, until_us bigint)
returns bigint immutable language sql as $$
  select coalesce(log_sums[nullif(width_bucket(until_us, log_us), 0)] - log_sums[cardinality(log_sums)] + total, 0)
$$;

-- The instant of the first entry at which the running sum, from the oldest on, reaches an amount of at most the total.
create or replace function {prefix}short_log_first_to_sum(log_us bigint[], log_sums bigint[], total bigint, wanted bigint)
returns bigint immutable language sql as $$
  select log_us[width_bucket(log_sums[cardinality(log_sums)] - total + wanted - 1, log_sums) + 1]
$$;

-- A charge on a short or empty log: the next state, and whether it is allowed. See log_take in entries.sql.
create or replace function {prefix}short_log_charge(
    newest_us bigint, total bigint, entries bigint, oldest_us bigint, keep_us bigint, log_us bigint[], log_sums bigint[],
    "limit" bigint, window_us bigint, cost bigint, now_us bigint,
    out next_newest_us bigint, out next_total bigint, out next_entries bigint, out next_oldest_us bigint,
    out next_keep_us bigint, out next_us bigint[], out next_sums bigint[], out allowed boolean)
immutable language plpgsql as $$
declare
  at_us constant bigint := greatest(now_us, newest_us);
  gone bigint := 0;
  place integer := 0;
  dropped integer := 0;
begin
  next_newest_us := newest_us;
  next_total := total;
  next_entries := entries;
  next_oldest_us := oldest_us;
  next_keep_us := case when entries > 0 then {prefix}sliding_window_keep(keep_us, window_us) else window_us end;
  next_us := log_us;
  next_sums := log_sums;
  if entries > 0 and oldest_us <= at_us - window_us then
    place := width_bucket(at_us - window_us, log_us);
    gone := log_sums[place] - log_sums[cardinality(log_sums)] + total;
  end if;
  allowed := c.allowed from {prefix}sliding_window_charge(total, newest_us, gone, null, "limit", window_us, cost, at_us) as c;
  if not allowed then
    return;
  end if;
  if place > 0 then
    dropped := case when next_keep_us = window_us then place else width_bucket(at_us - next_keep_us, log_us) end;
  end if;
  if entries = 0 or dropped = entries then
    next_us := array[at_us];
    next_sums := array[cost];
    next_total := cost;
    next_entries := 1;
    next_oldest_us := at_us;
    next_keep_us := window_us;
  else
    if dropped > 0 then
      next_total := next_sums[cardinality(next_sums)] - next_sums[dropped];
      next_us := next_us[dropped + 1 :];
      next_sums := next_sums[dropped + 1 :];
    end if;
    if newest_us = at_us then
      next_sums[cardinality(next_sums)] := next_sums[cardinality(next_sums)] + cost;
    else
      next_us := next_us || at_us;
      next_sums := next_sums || (next_sums[cardinality(next_sums)] + cost);
    end if;
    next_total := next_total + cost;
    -- Entries outside the own window that are too many to keep are merged into later ones: their running sums go, and the total
    -- stays.
    for turn in 1 .. 2 loop
      exit when cardinality(next_us) <= {prefix}sliding_window_most("limit") or next_us[2] > at_us - window_us;
      next_us := next_us[2 :];
      next_sums := next_sums[2 :];
    end loop;
    next_entries := cardinality(next_us);
    next_oldest_us := next_us[1];
    if next_sums[next_entries] > 1152921504606846976 then
      next_sums := {prefix}short_log_rebased(next_sums, next_total);
    end if;
  end if;
  next_newest_us := at_us;
end
$$;

-- The running sums without the dropped entries.
create or replace function {prefix}short_log_rebased(log_sums bigint[], total bigint)
returns bigint[] immutable language sql as $$
  select array(select u.s - log_sums[cardinality(log_sums)] + total from unnest(log_sums) with ordinality as u (s, n) order by u.n)
$$;

-- The reading of a charge, from the state that it left: what was used before, how long to wait, and how long the newest entry
-- counts. For an admitted charge the last two do not matter.
create or replace function {prefix}short_log_reading(
    newest_us bigint, total bigint, log_us bigint[], log_sums bigint[],
    "limit" bigint, window_us bigint, cost bigint, admitted boolean, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  gone constant bigint := {prefix}short_log_sum_until(log_us, log_sums, total, now_us - window_us);
  wanted bigint;
  enough_us bigint;
begin
  if admitted then
    return array[total - gone - cost, 0, 0];
  end if;
  wanted := {prefix}sliding_window_wanted(total, gone, "limit", cost);
  if wanted > 0 then
    enough_us := {prefix}short_log_first_to_sum(log_us, log_sums, total, gone + wanted);
  end if;
  return (select array[c.used, c.wait_us, c.last_us]
          from {prefix}sliding_window_charge(total, newest_us, gone, enough_us, "limit", window_us, cost, now_us) as c);
end
$$;
