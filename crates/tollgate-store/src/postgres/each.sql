-- Concurrent calls in one transaction: many charges of the same limits, each all or none, and many settlements. They share a
-- commit, and so the wait for the disk.
--
-- A row that another transaction has locked delays only the calls that need it: such a call has null as its answer, and is sent
-- again alone, to wait for the lock. lock_ms is how long this call may wait for any lock. Everything else is as in charge.sql and
-- settle.sql, which run each call on rows that are locked already: held charges in the order of their ids, then states in the
-- order of their keys.

-- Locks existing states in the order of keys, and returns them. Rows that another transaction has locked are skipped or waited
-- for.
create or replace function {prefix}lock_states(state_keys uuid[], skips_locked boolean)
returns uuid[] volatile language plpgsql as $$
begin
  if skips_locked then
    return array(select s.key from {prefix}state as s where s.key = any (state_keys) order by s.key for update skip locked);
  end if;
  return array(select s.key from {prefix}state as s where s.key = any (state_keys) order by s.key for update);
end
$$;

-- Keys, costs and shadows have one entry for each limit of each charge, charge after charge; the requests have seven numbers for
-- each of these. Ids and times to live are null for charges without a hold.
create or replace function {prefix}charge_each(
    charged_keys uuid[], part_limits text[], part_strategies smallint[], part_parameters bigint[], charged_costs bigint[],
    charged_shadows boolean[],
    hold_ids uuid[], hold_ttls_us bigint[], hold_asked bigint[], clock_us bigint, skips_locked boolean, lock_ms integer,
    not_after timestamptz)
returns table (passed boolean, decided_us bigint, server_us bigint, readings bigint[], asked_before bigint[])
volatile language plpgsql as $$
declare
  parts constant integer := cardinality(part_limits);
  charges constant integer := cardinality(charged_keys) / parts;
  most bigint[] := '{}';
  first integer;
  last integer;
  distinct_keys integer;
  ours uuid[];
  made uuid[];
  known uuid[];
begin
  perform set_config('lock_timeout', lock_ms::text, true);
  -- Charges that are held already get their earlier answer. They are locked first, as everywhere; mostly there are none.
  if hold_ids is not null then
    known := array(select h.id from {prefix}hold as h where h.id = any (hold_ids) order by h.id);
    if cardinality(known) > 0 and skips_locked then
      ours := array(select h.id from {prefix}hold as h where h.id = any (known) order by h.id for update skip locked);
      known := array(select k from unnest(known) as k where k <> all (ours));
    elsif cardinality(known) > 0 then
      perform from {prefix}hold as h where h.id = any (known) order by h.id for update;
      known := '{}';
    end if;
  end if;
  ours := {prefix}lock_states(charged_keys, skips_locked);
  select count(distinct k) into distinct_keys from unnest(charged_keys) as k;
  if cardinality(ours) < distinct_keys then
    -- A cost can fit if it is at most the burst of a bucket, or the limit of any other strategy.
    for part in 1 .. parts loop
      most[part] := part_parameters[5 * part - case when part_strategies[part] <= 2 then 2 else 4 end];
    end loop;
    made := {prefix}make_states(
      array_agg(new.key order by new.key), array_agg(new.limit_name order by new.key), array_agg(true))
    from (select distinct c.key, part_limits[(c.place - 1) % parts + 1] as limit_name
          from unnest(charged_keys, charged_costs) with ordinality as c (key, cost, place)
          where c.key <> all (ours) and c.cost <= most[(c.place - 1) % parts + 1]) as new;
    ours := ours || made;
  end if;
  for charge in 1 .. charges loop
    first := (charge - 1) * parts + 1;
    last := charge * parts;
    if (cardinality(ours) < distinct_keys
        and exists (select from {prefix}state as s where s.key = any (charged_keys[first : last]) and s.key <> all (ours)))
        or hold_ids[charge] = any (known) then
      passed := null;
    else
      select c.* into passed, decided_us, server_us, readings, asked_before
      from {prefix}charge(
        charged_keys[first : last], part_limits, part_strategies, part_parameters, charged_costs[first : last],
        charged_shadows[first : last],
        hold_ids[charge], hold_ttls_us[charge], hold_asked[7 * first - 6 : 7 * last], clock_us, not_after) as c;
    end if;
    return next;
  end loop;
  -- Deletes the states that were inserted for charges that did not pass.
  if cardinality(made) > 0 then
    delete from {prefix}state as s where s.key = any (made) and not s.admitted;
  end if;
end
$$;

-- Settlements of different charges, each separately. names_counts and actuals_counts are the number of names and of amounts of
-- each.
create or replace function {prefix}settle_each(
    hold_ids uuid[], kinds text[], one_actuals bigint[], actual_names text[], names_counts integer[], actuals bigint[],
    actuals_counts integer[], clock_us bigint, skips_locked boolean, lock_ms integer,
    not_after timestamptz)
returns table (verdict text, server_us bigint, held_names text[], held_costs bigint[])
volatile language plpgsql as $$
declare
  names_before integer := 0;
  actuals_before integer := 0;
  ours uuid[];
  state_keys uuid[] := '{}';
  other_holds uuid[];
  other_states uuid[];
begin
  perform set_config('lock_timeout', lock_ms::text, true);
  if skips_locked then
    ours := array(select h.id from {prefix}hold as h where h.id = any (hold_ids) order by h.id for update skip locked);
  else
    ours := array(select h.id from {prefix}hold as h where h.id = any (hold_ids) order by h.id for update);
  end if;
  if cardinality(ours) < cardinality(hold_ids) then
    other_holds := array(select h.id from {prefix}hold as h where h.id = any (hold_ids) and h.id <> all (ours));
  end if;
  state_keys := array(select distinct k from {prefix}hold as h, unnest(h.keys) as k where h.id = any (ours));
  ours := {prefix}lock_states(state_keys, skips_locked);
  if cardinality(ours) < cardinality(state_keys) then
    other_states := array(select s.key from {prefix}state as s where s.key = any (state_keys) and s.key <> all (ours));
  end if;
  for place in 1 .. cardinality(hold_ids) loop
    if hold_ids[place] = any (other_holds) or (cardinality(other_states) > 0
        and exists (select from {prefix}hold as h where h.id = hold_ids[place] and h.keys && other_states)) then
      verdict := null;
    else
      select s.* into verdict, server_us, held_names, held_costs
      from {prefix}settle(
        hold_ids[place], kinds[place], one_actuals[place],
        coalesce(actual_names[names_before + 1 : names_before + names_counts[place]], '{}'),
        coalesce(actuals[actuals_before + 1 : actuals_before + actuals_counts[place]], '{}'), clock_us, not_after) as s;
    end if;
    names_before := names_before + names_counts[place];
    actuals_before := actuals_before + actuals_counts[place];
    return next;
  end loop;
end
$$;
