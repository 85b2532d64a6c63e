-- What touches the tables, for every charge that is more than one statement (see upsert/): several limits at once, held
-- charges, logs and leases. It reads state, asks the twins and writes state, and does no arithmetic of limits itself.
--
-- The order of locks is the same everywhere: the held charge, then the states by key; so nobody waits in a ring. Every function
-- takes the time by a test's clock, or null for the server's, and the instant after which nothing may change any more; what
-- finds itself late once it has its locks raises TG001 and changes nothing. Parts are told as arrays with one entry each, and
-- five parameters each. Strategies are numbered as in statement.rs: 1 token_bucket, 2 leaky_bucket, 3 fixed_window,
-- 4 sliding_window, 5 sliding_window_counter, 6 concurrency.

-- The server's clock: whole microseconds since 1970.
create or replace function {prefix}now_us() returns bigint volatile language sql as $$
  select (extract(epoch from clock_timestamp()) * 1000000)::bigint
$$;

create or replace function {prefix}refuse_if_late(not_after timestamptz) returns void volatile language plpgsql as $$
begin
  if clock_timestamp() > not_after then
    raise exception 'the call came after its deadline' using errcode = 'TG001';
  end if;
end
$$;

-- What one limit says of one part of a charge: whether it fits, the three numbers that tell what was found, the next state, and
-- the instant that the charge would count from.
create or replace function {prefix}look(
    part_key uuid, strategy smallint, p1 bigint, p2 bigint, p3 bigint, p4 bigint,
    price_us bigint, price_rest bigint, state_a bigint, state_b bigint, state_c bigint, now_us bigint)
returns {prefix}said stable language plpgsql as $$
#variable_conflict use_variable
declare
  said {prefix}said;
  gone bigint;
  enough_us bigint;
begin
  said.next_c := 0;
  said.z := 0;
  said.charged_at_us := now_us;
  if strategy = 1 or strategy = 2 then
    if strategy = 1 then
      select bucket.* into said.allowed, said.x, said.y, said.next_a, said.next_b
      from {prefix}token_bucket_charge(state_a, state_b, p1, p3, p4, price_us, price_rest, now_us) as bucket;
    else
      select bucket.* into said.allowed, said.x, said.y, said.next_a, said.next_b
      from {prefix}leaky_bucket_charge(state_a, state_b, p1, p3, p4, price_us, price_rest, now_us) as bucket;
    end if;
    said.next_tail_us := 1;
  elsif strategy = 3 then
    said.x := state_a;
    said.y := state_b;
    select fixed.* into said.allowed, said.next_a, said.next_b
    from {prefix}fixed_window_charge(state_a, state_b, p1, p2, p3, price_us, now_us) as fixed;
    said.next_tail_us := 0;
    said.charged_at_us := {prefix}fixed_window_charged_at(said.next_a, p2, now_us);
  elsif strategy = 5 then
    said.x := state_a;
    said.y := state_b;
    said.z := state_c;
    select counter.* into said.allowed, said.next_a, said.next_b, said.next_c
    from {prefix}sliding_window_counter_charge(state_a, state_b, state_c, p1, p2, price_us, now_us) as counter;
    said.next_tail_us := 2 * p2;
    said.charged_at_us := {prefix}sliding_window_counter_charged_at(said.next_a, now_us);
  elsif strategy = 4 then
    said.charged_at_us := {prefix}sliding_window_now(state_a, now_us);
    select coalesce(sum(execution.cost), 0)::bigint into gone
    from {prefix}execution as execution where execution.key = part_key and execution.at_us <= said.charged_at_us - p2;
    if price_us > p1 - (state_b - gone) then
      select log.at_us into enough_us
      from (select execution.at_us, sum(execution.cost) over (order by execution.at_us) as run_out
            from {prefix}execution as execution where execution.key = part_key) as log
      where state_b - log.run_out + price_us <= p1 order by log.at_us limit 1;
    end if;
    select log.* into said.allowed, said.x, said.y, said.z, said.next_b, said.next_a
    from {prefix}sliding_window_charge(state_b, state_a, gone, enough_us, p1, p2, price_us, said.charged_at_us) as log;
    said.next_tail_us := p2;
  else
    said.charged_at_us := {prefix}concurrency_now(state_a, p2, now_us);
    select coalesce(sum(lease.cost), 0)::bigint into gone
    from {prefix}lease as lease where lease.key = part_key and lease.end_us <= said.charged_at_us;
    if price_us > p1 - (state_b - gone) then
      select leases.end_us into enough_us
      from (select lease.end_us, sum(lease.cost) over (order by lease.end_us) as over
            from {prefix}lease as lease where lease.key = part_key) as leases
      where state_b - leases.over + price_us <= p1 order by leases.end_us limit 1;
    end if;
    select leases.* into said.allowed, said.x, said.y, said.z, said.next_b, said.next_a
    from {prefix}concurrency_acquire(state_b, state_a, gone, enough_us, p1, p2, price_us, said.charged_at_us) as leases;
    said.next_tail_us := 0;
  end if;
  return said;
end
$$;

-- Answers as charge would, and changes nothing. It sees all tables as of one instant.
create or replace function {prefix}peek(
    part_keys uuid[], part_strategies smallint[], part_parameters bigint[], part_prices_us bigint[],
    part_prices_rest bigint[], part_shadows boolean[], clock_us bigint,
    out passed boolean, out decided_us bigint, out server_us bigint, out readings bigint[])
stable language plpgsql as $$
declare
  part integer;
  seen {prefix}state;
  said {prefix}said;
begin
  passed := true;
  readings := '{}';
  select greatest(coalesce(clock_us, {prefix}now_us()), max(s.at_us)) into decided_us
  from {prefix}state as s where s.key = any (part_keys);
  for part in 1 .. cardinality(part_keys) loop
    select s.* into seen from {prefix}state as s where s.key = part_keys[part];
    said := {prefix}look(
      part_keys[part], part_strategies[part], part_parameters[5 * part - 4], part_parameters[5 * part - 3],
      part_parameters[5 * part - 2], part_parameters[5 * part - 1], part_prices_us[part], part_prices_rest[part],
      coalesce(seen.a, 0), coalesce(seen.b, 0), coalesce(seen.c, 0), decided_us);
    passed := passed and (said.allowed or part_shadows[part]);
    readings := readings || array[said.x, said.y, said.z];
  end loop;
  server_us := {prefix}now_us();
end
$$;

-- Charges all parts or none. A charge that is held already is answered with what was asked and found then.
create or replace function {prefix}charge(
    part_keys uuid[], part_limits text[], part_strategies smallint[], part_parameters bigint[], part_prices_us bigint[],
    part_prices_rest bigint[], part_costs bigint[], part_shadows boolean[],
    hold_id uuid, hold_ttl_us bigint, hold_asked bigint[], clock_us bigint, not_after timestamptz,
    out passed boolean, out decided_us bigint, out server_us bigint, out readings bigint[], out asked_before bigint[])
volatile language plpgsql as $$
declare
  parts constant integer := cardinality(part_keys);
  part integer;
  held {prefix}hold;
  made uuid[];
  seen {prefix}state;
  states {prefix}state[] := array_fill(null::{prefix}state, array[parts]);
  locked integer := 0;
  said {prefix}said;
  says {prefix}said[] := '{}';
  charged integer[] := '{}';
  charged_at bigint[] := '{}';
  ttl_us bigint := hold_ttl_us;
begin
  if hold_id is not null then
    perform set_config('synchronous_commit', 'on', true);
    select h.* into held from {prefix}hold as h where h.id = hold_id for update;
    if coalesce(clock_us, {prefix}now_us()) < held.end_us then
      passed := true;
      decided_us := held.at_us;
      readings := held.readings;
      asked_before := held.asked;
      server_us := {prefix}now_us();
      return;
    end if;
  end if;

  -- What can never pass changes nothing, so it is only looked at.
  for part in 1 .. parts loop
    if part_prices_us[part] < 0 and not part_shadows[part] then
      select p.* into passed, decided_us, server_us, readings
      from {prefix}peek(part_keys, part_strategies, part_parameters, part_prices_us, part_prices_rest, part_shadows, clock_us)
        as p;
      return;
    end if;
  end loop;

  made := {prefix}make_states(part_keys, part_limits, part_prices_us);
  for seen in select s.* from {prefix}state as s where s.key = any (part_keys) order by s.key for update loop
    states[array_position(part_keys, seen.key)] := seen;
    decided_us := greatest(decided_us, seen.at_us);
    locked := locked + 1;
  end loop;
  perform {prefix}refuse_if_late(not_after);
  decided_us := greatest(coalesce(clock_us, {prefix}now_us()), decided_us);

  passed := true;
  readings := '{}';
  for part in 1 .. parts loop
    seen := states[part];
    if seen.key is null and part_prices_us[part] >= 0 then
      raise exception 'a key was forgotten just now' using errcode = 'serialization_failure';
    end if;
    said := {prefix}look(
      part_keys[part], part_strategies[part], part_parameters[5 * part - 4], part_parameters[5 * part - 3],
      part_parameters[5 * part - 2], part_parameters[5 * part - 1], part_prices_us[part], part_prices_rest[part],
      coalesce(seen.a, 0), coalesce(seen.b, 0), coalesce(seen.c, 0), decided_us);
    passed := passed and (said.allowed or part_shadows[part]);
    readings := readings || array[said.x, said.y, said.z];
    says[part] := said;
  end loop;

  if not passed then
    -- What took the room may be this very charge, sent before and finished only now: then it is answered as before.
    if exists (select from {prefix}hold as h where h.id = hold_id and h.end_us > decided_us) then
      raise exception 'the same charge was held just now' using errcode = 'serialization_failure';
    end if;
    delete from {prefix}state as s where s.key = any (made);
    server_us := {prefix}now_us();
    return;
  end if;

  for part in 1 .. parts loop
    said := says[part];
    continue when not said.allowed;
    perform {prefix}write_state(part_keys[part], said.next_a, said.next_b, said.next_c, decided_us, said.next_tail_us);
    if part_strategies[part] = 4 then
      perform {prefix}write_execution(
        part_keys[part], said.charged_at_us - part_parameters[5 * part - 3], said.charged_at_us, part_prices_us[part]);
    elsif part_strategies[part] = 6 then
      perform {prefix}write_lease(
        part_keys[part], said.charged_at_us, said.next_a, coalesce(hold_id, '00000000-0000-0000-0000-000000000000'),
        part_prices_us[part]);
      -- A lease is held at least as long as it lasts.
      ttl_us := greatest(ttl_us, part_parameters[5 * part - 3]);
    end if;
    charged := charged || part;
    charged_at := charged_at || said.charged_at_us;
  end loop;

  if hold_id is not null then
    insert into {prefix}hold as h (
      id, keys, limit_names, strategies, parameters, costs, charged_at_us, asked, readings, at_us, ttl_us, end_us, settled)
    select hold_id, coalesce(array_agg(part_keys[c.part] order by c.n), '{}'),
           coalesce(array_agg(part_limits[c.part] order by c.n), '{}'),
           coalesce(array_agg(part_strategies[c.part] order by c.n), '{}'),
           coalesce((select array_agg(part_parameters[5 * d.part - 5 + i] order by d.n, i)
                     from unnest(charged) with ordinality as d (part, n), generate_series(1, 5) as i), '{}'),
           coalesce(array_agg(part_costs[c.part] order by c.n), '{}'),
           charged_at, hold_asked, readings, decided_us, ttl_us, decided_us + ttl_us, false
    from unnest(charged) with ordinality as c (part, n)
    on conflict (id) do update set
      keys = excluded.keys, limit_names = excluded.limit_names, strategies = excluded.strategies,
      parameters = excluded.parameters, costs = excluded.costs, charged_at_us = excluded.charged_at_us,
      asked = excluded.asked, readings = excluded.readings, at_us = excluded.at_us, ttl_us = excluded.ttl_us,
      end_us = excluded.end_us, settled = false
    where h.end_us <= excluded.at_us;
    if not found then
      raise exception 'the same charge was held just now' using errcode = 'serialization_failure';
    end if;
  end if;
  server_us := {prefix}now_us();
end
$$;

-- Makes the missing states of parts that can fit, in the order of keys, before any is locked. Answers which it made. (Like all
-- functions here that touch tables it is plpgsql, which keeps its plans; a function in plain SQL would be planned at each call.)
create or replace function {prefix}make_states(part_keys uuid[], part_limits text[], part_prices_us bigint[])
returns uuid[] volatile language plpgsql as $$
declare
  made uuid[];
begin
  with new as (
    insert into {prefix}state (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us)
    select part.key, part.limit_name, 0, 0, 0, false, 0, 0, 0
    from unnest(part_keys, part_limits, part_prices_us) as part (key, limit_name, price_us)
    where part.price_us >= 0 and not exists (select from {prefix}state as s where s.key = part.key)
    order by part.key
    on conflict (key) do nothing
    returning key)
  select array_agg(new.key) into made from new;
  return made;
end
$$;

create or replace function {prefix}write_state(
    part_key uuid, next_a bigint, next_b bigint, next_c bigint, now_us bigint, next_tail_us bigint)
returns void volatile language plpgsql as $$
begin
  update {prefix}state as s
  set a = next_a, b = next_b, c = next_c, admitted = true, at_us = now_us, tail_us = next_tail_us
  where s.key = part_key;
end
$$;

-- Adds to the log, and drops from it what ran out by gone_us.
create or replace function {prefix}write_execution(part_key uuid, gone_us bigint, now_us bigint, charged bigint)
returns void volatile language plpgsql as $$
begin
  delete from {prefix}execution as e where e.key = part_key and e.at_us <= gone_us;
  insert into {prefix}execution as e (key, at_us, cost) values (part_key, now_us, charged)
  on conflict (key, at_us) do update set cost = e.cost + excluded.cost;
end
$$;

-- Adds a lease, and drops those that have ended by now_us.
create or replace function {prefix}write_lease(
    part_key uuid, now_us bigint, lease_end_us bigint, lease_holder uuid, charged bigint)
returns void volatile language plpgsql as $$
begin
  delete from {prefix}lease as l where l.key = part_key and l.end_us <= now_us;
  insert into {prefix}lease as l (key, end_us, holder, cost) values (part_key, lease_end_us, lease_holder, charged)
  on conflict (key, end_us, holder) do update set cost = l.cost + excluded.cost;
end
$$;

-- Forgets what a key was charged; false when nothing was remembered.
create or replace function {prefix}forget(
    part_key uuid, not_after timestamptz, out forgotten boolean, out server_us bigint)
volatile language plpgsql as $$
begin
  delete from {prefix}state as s where s.key = part_key;
  forgotten := found;
  delete from {prefix}execution as e where e.key = part_key;
  delete from {prefix}lease as l where l.key = part_key;
  perform {prefix}refuse_if_late(not_after);
  server_us := {prefix}now_us();
end
$$;
