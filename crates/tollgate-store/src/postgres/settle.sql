-- What becomes of a held charge: it is corrected, released or renewed. Locks and arithmetic are as in charge.sql.

-- Corrects a held charge, once. The kind is cancel, actual, each or renew. Verdicts: done, already, unknown; differ, where one
-- actual amount was given for limits that reserved different ones; unnamed, where an amount was given for a limit that the
-- charge does not hold. With the last two come the limits and what they reserved.
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
  seen {prefix}state;
  states {prefix}state[];
  is_found boolean;
begin
  perform set_config('synchronous_commit', 'on', true);
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
  end if;

  -- What each part truly cost; no limit holds more than the largest count, so more than that says no more. A lease has no cost
  -- but itself.
  for part in 1 .. parts loop
    real_cost := case
      when kind = 'renew' or held.strategies[part] = 6 then held.costs[part]
      when kind = 'cancel' then 0
      when kind = 'actual' then one_actual
      else coalesce(actuals[array_position(actual_names, held.limit_names[part])], held.costs[part]) end;
    real_costs[part] := least(real_cost, 9007199254740991);
  end loop;

  perform {prefix}make_states(held.keys, held.limit_names, (
    -- Only a debt needs a state where there is none.
    select array_agg(case when r.cost > h.cost then 0 else -1 end order by r.n)
    from unnest(real_costs) with ordinality as r (cost, n) join unnest(held.costs) with ordinality as h (cost, n) using (n)));
  states := array_fill(null::{prefix}state, array[greatest(parts, 1)]);
  for seen in select s.* from {prefix}state as s where s.key = any (held.keys) order by s.key for update loop
    states[array_position(held.keys, seen.key)] := seen;
    now_us := greatest(now_us, seen.at_us);
  end loop;
  perform {prefix}refuse_if_late(not_after);
  now_us := greatest(now_us, coalesce(clock_us, {prefix}now_us()));

  if kind = 'renew' then
    for part in 1 .. parts loop
      continue when held.strategies[part] <> 6;
      if not {prefix}renew_lease(states[part], hold_id, held.parameters[5 * part - 3], now_us) then
        -- A lease that has run out is lost, and then so is the hold on it.
        verdict := 'unknown';
        return;
      end if;
    end loop;
    update {prefix}hold as h set end_us = now_us + h.ttl_us where h.id = hold_id;
    verdict := 'done';
    server_us := {prefix}now_us();
    return;
  end if;

  is_found := parts = 0;
  for part in 1 .. parts loop
    if held.strategies[part] = 6 then
      is_found := {prefix}release_lease(states[part], hold_id, held.parameters[5 * part - 3], now_us) or is_found;
      continue;
    end if;
    is_found := true;
    if real_costs[part] < held.costs[part] then
      perform {prefix}give_back(
        states[part], held.strategies[part], held.parameters[5 * part - 4 : 5 * part],
        held.costs[part] - real_costs[part], held.charged_at_us[part], now_us);
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

-- Returns an amount into the state it was taken from. Of a key that is no longer remembered there is nothing to give back.
create or replace function {prefix}give_back(
    seen {prefix}state, strategy smallint, parameters bigint[], amount bigint, charged_at_us bigint, now_us bigint)
returns void volatile language plpgsql as $$
#variable_conflict use_variable
declare
  next_a bigint := seen.a;
  next_b bigint := seen.b;
  next_c bigint := seen.c;
  entry bigint;
begin
  if seen.key is null then
    return;
  elsif strategy = 1 or strategy = 2 then
    select bucket.* into next_a, next_b
    from {prefix}token_bucket_give_back(seen.a, seen.b, parameters[1], parameters[2], amount, now_us) as bucket;
  elsif strategy = 3 then
    select fixed.* into next_a, next_b
    from {prefix}fixed_window_give_back(seen.a, seen.b, parameters[2], amount, charged_at_us, now_us) as fixed;
  elsif strategy = 5 then
    select counter.* into next_a, next_b, next_c
    from {prefix}sliding_window_counter_give_back(
      seen.a, seen.b, seen.c, parameters[2], amount, charged_at_us, now_us) as counter;
  elsif strategy = 4 then
    select e.cost into entry from {prefix}execution as e where e.key = seen.key and e.at_us = charged_at_us;
    if entry is null then
      return;
    elsif entry <= amount then
      delete from {prefix}execution as e where e.key = seen.key and e.at_us = charged_at_us;
      select coalesce(max(e.at_us), 0) into next_a from {prefix}execution as e where e.key = seen.key;
    else
      update {prefix}execution as e set cost = e.cost - amount where e.key = seen.key and e.at_us = charged_at_us;
    end if;
    next_b := seen.b - least(amount, entry);
  end if;
  perform {prefix}write_state(seen.key, next_a, next_b, next_c, now_us, seen.tail_us);
end
$$;

-- Takes an amount whether it fits or not.
create or replace function {prefix}debit(
    seen {prefix}state, strategy smallint, parameters bigint[], amount bigint, now_us bigint)
returns void volatile language plpgsql as $$
#variable_conflict use_variable
declare
  next_a bigint := seen.a;
  next_b bigint := seen.b;
  next_c bigint := seen.c;
  next_tail_us bigint;
  gone bigint;
  taken bigint;
  charged_at_us bigint;
begin
  if strategy = 1 or strategy = 2 then
    select bucket.* into next_a, next_b
    from {prefix}token_bucket_debit(seen.a, seen.b, parameters[1], parameters[2], parameters[5], amount, now_us) as bucket;
    next_tail_us := 1;
  elsif strategy = 3 then
    select fixed.* into next_a, next_b
    from {prefix}fixed_window_debit(seen.a, seen.b, parameters[2], parameters[3], amount, now_us) as fixed;
    next_tail_us := 0;
  elsif strategy = 5 then
    select counter.* into next_a, next_b, next_c
    from {prefix}sliding_window_counter_debit(seen.a, seen.b, seen.c, parameters[2], amount, now_us) as counter;
    next_tail_us := 2 * parameters[2];
  elsif strategy = 4 then
    charged_at_us := {prefix}sliding_window_now(seen.a, now_us);
    select coalesce(sum(e.cost), 0)::bigint into gone
    from {prefix}execution as e where e.key = seen.key and e.at_us <= charged_at_us - parameters[2];
    taken := {prefix}sliding_window_debit(seen.b, gone, amount);
    if taken <= 0 then
      return;
    end if;
    perform {prefix}write_execution(seen.key, charged_at_us - parameters[2], charged_at_us, taken);
    next_a := charged_at_us;
    next_b := seen.b - gone + taken;
    next_tail_us := parameters[2];
  end if;
  perform {prefix}write_state(seen.key, next_a, next_b, next_c, now_us, next_tail_us);
end
$$;

-- Ends the lease of a holder; false when it had none, or it had run out.
create or replace function {prefix}release_lease(seen {prefix}state, lease_holder uuid, lease_us bigint, now_us bigint)
returns boolean volatile language plpgsql as $$
#variable_conflict use_variable
declare
  from_us constant bigint := {prefix}concurrency_now(seen.a, lease_us, now_us);
  released bigint;
  newest_us bigint;
begin
  delete from {prefix}lease as l where l.key = seen.key and l.holder = lease_holder and l.end_us > from_us
  returning l.cost into released;
  if released is null then
    return false;
  end if;
  select coalesce(max(l.end_us), 0) into newest_us from {prefix}lease as l where l.key = seen.key;
  perform {prefix}write_state(seen.key, newest_us, seen.b - released, 0, now_us, 0);
  return true;
end
$$;

-- Extends the lease of a holder to a full lease from now; false when it had none, or it had run out.
create or replace function {prefix}renew_lease(seen {prefix}state, lease_holder uuid, lease_us bigint, now_us bigint)
returns boolean volatile language plpgsql as $$
#variable_conflict use_variable
declare
  from_us constant bigint := {prefix}concurrency_now(seen.a, lease_us, now_us);
  renewed bigint;
  ended bigint;
begin
  delete from {prefix}lease as l where l.key = seen.key and l.holder = lease_holder and l.end_us > from_us
  returning l.cost into renewed;
  if renewed is null then
    return false;
  end if;
  select coalesce(sum(l.cost), 0)::bigint into ended from {prefix}lease as l where l.key = seen.key and l.end_us <= from_us;
  perform {prefix}write_lease(seen.key, from_us, from_us + lease_us, lease_holder, renewed);
  perform {prefix}write_state(seen.key, from_us + lease_us, seen.b - ended, 0, now_us, 0);
  return true;
end
$$;
