-- Settles a held charge: corrects, releases or renews it. Locks and arithmetic are as in charge.sql.

-- Corrects a held charge, once. The kind is cancel, actual, positions (an amount for each charge of the call, in order), each (an
-- amount for each named limit; the others keep their reserved cost; without names, leases are released and nothing is corrected)
-- or renew. The result is done, already or unknown; differ, if one actual amount was given for limits with different reserved
-- costs; unnamed, if an amount was given for a limit that is not in the hold; count, if the number of amounts is not the number
-- of charges. differ and unnamed come with the limits and their reserved costs, count with the number of charges.
create or replace function {prefix}settle(
    hold_id uuid, kind text, one_actual bigint, actual_names text[], actuals bigint[], clock_us bigint, not_after timestamptz,
    out verdict text, out server_us bigint, out held_names text[], out held_costs bigint[])
volatile language plpgsql as $$
declare
  held {prefix}hold;
  parts integer;
  part integer;
  now_us bigint;
  real_cost bigint;
  real_costs bigint[] := '{}';
  is_debt boolean[] := '{}';
  charge_count integer;
  numbers bigint[];
  sums bigint[] := '{}';
  old_costs bigint[] := '{}';
  seen {prefix}state;
  states {prefix}state[];
  made uuid[];
  is_found boolean;
begin
  select h.* into held from {prefix}hold as h where h.id = hold_id for update;
  now_us := coalesce(clock_us, {prefix}now_us());
  server_us := {prefix}now_us();
  if held.id is null or now_us >= held.end_us then
    verdict := 'unknown';
    return;
  elsif held.settled then
    verdict := 'already';
    return;
  end if;
  held_names := held.limit_names;
  held_costs := held.costs;
  parts := cardinality(held.keys);
  if kind = 'actual' and (
      select count(distinct p.cost) > 1 from unnest(held.costs, held.strategies) as p (cost, strategy) where p.strategy <> 6) then
    verdict := 'differ';
    return;
  elsif kind = 'each' and exists (select from unnest(actual_names) as n (name) where n.name <> all (held.limit_names)) then
    verdict := 'unnamed';
    return;
  elsif kind = 'positions' then
    charge_count := cardinality(held.asked) / 7;
    if cardinality(actuals) <> charge_count then
      verdict := 'count';
      held_costs := array[charge_count];
      return;
    end if;
    -- The sum of the charges of each part, and the parts that were charged, in order.
    for part in 1 .. charge_count loop
      sums[held.asked[7 * part] + 1] := least(coalesce(sums[held.asked[7 * part] + 1], 0) + actuals[part], 9007199254740991);
    end loop;
    select array_agg(charged.number order by charged.number) into numbers
    from (select distinct held.asked[7 * i] + 1 as number
          from generate_series(1, charge_count) as i where held.asked[7 * i - 1] >= 2) as charged;
    -- Older holds do not say which parts were charged, and do not contain the parts that a shadow limit denied. A part is matched
    -- by the same numbers and cost: if several match, the dearest, so that never more is given back than was charged; if none
    -- matches, the reserved cost.
    if numbers is null and parts < cardinality(sums) then
      for part in 1 .. parts loop
        old_costs[part] := (
          select coalesce(max(sums[held.asked[7 * i] + 1]), held.costs[part])
          from generate_series(1, charge_count) as i
          where held.asked[7 * i - 6] = held.strategies[part] and held.asked[7 * i - 2] = held.costs[part]
            and case when held.strategies[part] <= 2 then held.asked[7 * i - 3] = held.parameters[5 * part - 2]
                     else held.asked[7 * i - 5 : 7 * i - 4] = held.parameters[5 * part - 4 : 5 * part - 3] end);
      end loop;
    end if;
  end if;

  -- The actual cost of each part, capped at the largest count, which no limit exceeds. A lease is not corrected.
  for part in 1 .. parts loop
    real_cost := case
      when kind = 'renew' or held.strategies[part] = 6 then held.costs[part]
      when kind = 'cancel' then 0
      when kind = 'actual' then one_actual
      when kind = 'positions' then coalesce(old_costs[part], sums[coalesce(numbers[part], part)], held.costs[part])
      else coalesce(actuals[array_position(actual_names, held.limit_names[part])], held.costs[part]) end;
    real_costs[part] := least(real_cost, 9007199254740991);
    is_debt[part] := real_costs[part] > held.costs[part];
  end loop;

  states := array_fill(null::{prefix}state, array[greatest(parts, 1)]);
  for seen in select s.* from {prefix}state as s where s.key = any (held.keys) order by s.key for update loop
    states[array_position(held.keys, seen.key)] := seen;
    now_us := greatest(now_us, seen.at_us);
  end loop;
  -- Only a debt needs a state if there is none.
  if true = any (is_debt) then
    made := {prefix}make_states(held.keys, held.limit_names, is_debt);
    for part in 1 .. coalesce(cardinality(made), 0) loop
      states[array_position(held.keys, made[part])] := {prefix}fresh(made[part]);
    end loop;
  end if;
  perform {prefix}refuse_if_late(not_after);
  now_us := greatest(now_us, coalesce(clock_us, {prefix}now_us()));
  -- Changes start here; they must be on disk before they are acknowledged.
  perform set_config('synchronous_commit', 'on', true);

  if kind = 'renew' then
    -- If a lease has expired, the whole hold is unknown.
    verdict := 'unknown';
    for part in 1 .. parts loop
      if held.strategies[part] = 6 and held.charged_at_us[part] <= now_us then
        return;
      end if;
    end loop;
    for part in 1 .. parts loop
      continue when held.strategies[part] <> 6;
      held.charged_at_us[part] := {prefix}renew_lease(
        states[part], hold_id, held.charged_at_us[part], held.parameters[5 * part - 3], now_us);
      if held.charged_at_us[part] is null then
        return;
      end if;
    end loop;
    update {prefix}hold as h set end_us = now_us + h.ttl_us, charged_at_us = held.charged_at_us where h.id = hold_id;
    verdict := 'done';
    server_us := {prefix}now_us();
    return;
  end if;

  is_found := parts = 0;
  for part in 1 .. parts loop
    if held.strategies[part] = 6 then
      is_found := {prefix}release_lease(states[part], hold_id, held.charged_at_us[part], now_us) or is_found;
      continue;
    end if;
    is_found := true;
    if real_costs[part] < held.costs[part] then
      perform {prefix}give_back(
        states[part], held.strategies[part], held.parameters[5 * part - 4 : 5 * part],
        held.costs[part], held.charged_at_us[part], held.costs[part] - real_costs[part], now_us);
    elsif real_costs[part] > held.costs[part] then
      if states[part] is null then
        raise exception 'a key was forgotten just now' using errcode = 'serialization_failure';
      end if;
      perform {prefix}debit(
        states[part], held.strategies[part], held.parameters[5 * part - 4 : 5 * part],
        real_costs[part] - held.costs[part], now_us);
    end if;
  end loop;
  update {prefix}hold as h set settled = true where h.id = hold_id;
  verdict := case when is_found then 'done' else 'unknown' end;
  server_us := {prefix}now_us();
end
$$;

-- Both sets of counts of a sliding window counter, in the form of its twin.
create or replace function {prefix}newer_counts(seen {prefix}state, window_us bigint) returns bigint[] immutable language sql as $$
  select array[case when seen.a = 0 then 0 else coalesce(seen.d, window_us) end, seen.a, seen.b, seen.c]
$$;

create or replace function {prefix}older_counts(seen {prefix}state) returns bigint[] immutable language sql as $$
  select coalesce(seen.extra, '{0, 0, 0, 0}')
$$;

create or replace function {prefix}with_counts(seen {prefix}state, counts bigint[])
returns {prefix}state immutable language plpgsql as $$
begin
  seen.d := counts[1];
  seen.a := counts[2];
  seen.b := counts[3];
  seen.c := counts[4];
  seen.extra := case when counts[5] = 0 then null else counts[5 : 8] end;
  return seen;
end
$$;

-- Gives back an amount of a charge to the state that it was taken from. The state stays under its current numbers. A key that is
-- no longer remembered gets nothing back.
create or replace function {prefix}give_back(
    seen {prefix}state, strategy smallint, parameters bigint[],
    taken_cost bigint, taken_at_us bigint, amount bigint, now_us bigint)
returns void volatile language plpgsql as $$
#variable_conflict use_variable
begin
  if seen.key is null then
    return;
  elsif strategy = 1 or strategy = 2 then
    select bucket.* into seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra
    from {prefix}token_bucket_give_back(
      seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra,
      parameters[1], parameters[2], parameters[3], parameters[5],
      taken_cost, taken_at_us, amount, now_us) as bucket;
  elsif strategy = 3 then
    seen.b := {prefix}fixed_window_give_back(seen.a, seen.b, seen.d, parameters[2], taken_at_us, amount, now_us);
  elsif strategy = 5 then
    seen := {prefix}with_counts(seen, {prefix}sliding_window_counter_give_back(
      {prefix}newer_counts(seen, parameters[2]), {prefix}older_counts(seen), parameters[2], taken_at_us, amount, now_us));
  elsif strategy = 4 then
    seen := {prefix}entries_give_back(seen, taken_at_us, '00000000-0000-0000-0000-000000000000', amount);
  end if;
  perform {prefix}write_state(seen, strategy, now_us);
end
$$;

-- Takes an amount whether it fits or not.
create or replace function {prefix}debit(
    seen {prefix}state, strategy smallint, parameters bigint[], amount bigint, now_us bigint)
returns void volatile language plpgsql as $$
#variable_conflict use_variable
begin
  if strategy = 1 or strategy = 2 then
    select bucket.* into seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra
    from {prefix}token_bucket_debit(
      seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra,
      parameters[1], parameters[2], parameters[3], parameters[4],
      parameters[5], amount, now_us) as bucket;
  elsif strategy = 3 then
    select fixed.* into seen.a, seen.b, seen.d
    from {prefix}fixed_window_debit(seen.a, seen.b, seen.d, parameters[2], parameters[3], amount, now_us) as fixed;
  elsif strategy = 5 then
    seen := {prefix}with_counts(seen, {prefix}sliding_window_counter_debit(
      {prefix}newer_counts(seen, parameters[2]), {prefix}older_counts(seen), parameters[2], amount, now_us));
  elsif strategy = 4 then
    seen := {prefix}log_debit(seen, parameters[2], amount, {prefix}sliding_window_now(seen.a, now_us));
  end if;
  perform {prefix}write_state(seen, strategy, now_us);
end
$$;

-- Ends the lease of a holder with this end; false if there is none, or it has expired.
create or replace function {prefix}release_lease(seen {prefix}state, lease_holder uuid, lease_end_us bigint, now_us bigint)
returns boolean volatile language plpgsql as $$
#variable_conflict use_variable
declare
  before bigint := seen.b;
begin
  if seen.key is null or lease_end_us <= now_us then
    return false;
  end if;
  seen := {prefix}entries_give_back(seen, lease_end_us, lease_holder, before);
  if seen.b = before then
    return false;
  end if;
  perform {prefix}write_state(seen, 6::smallint, now_us);
  return true;
end
$$;

-- Extends the lease of a holder with this end to a full lease from now, and never to less than it had. Returns the new end; null
-- if there is no such lease, or it has expired.
create or replace function {prefix}renew_lease(
    seen {prefix}state, lease_holder uuid, lease_end_us bigint, lease_us bigint, now_us bigint)
returns bigint volatile language plpgsql as $$
#variable_conflict use_variable
declare
  before bigint := seen.b;
  renewed bigint;
begin
  if seen.key is null or lease_end_us <= now_us then
    return null;
  end if;
  seen := {prefix}entries_give_back(seen, lease_end_us, lease_holder, before);
  renewed := before - seen.b;
  if renewed = 0 then
    return null;
  end if;
  if seen.c > 0 and seen.d <= now_us then
    seen := {prefix}entries_drop_until(seen, now_us);
  end if;
  lease_end_us := {prefix}concurrency_renew(lease_end_us, lease_us, now_us);
  seen := {prefix}leases_insert(seen, lease_end_us, lease_holder, renewed);
  perform {prefix}write_state(seen, 6::smallint, now_us);
  return lease_end_us;
end
$$;
