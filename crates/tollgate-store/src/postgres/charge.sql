-- Charges by a function: every charge that is more than one statement (see upsert/ and several/): held charges, long logs and
-- leases, and several limits of which one has a state under other numbers. It reads the state, calls the twins and writes the
-- state; there is no limiter arithmetic here. The entries of logs and leases are in entries.sql.
--
-- The order of locks is the same everywhere, so there is no deadlock: the held charge, then existing states by key, then new
-- states by key. Every function takes the time of a test's clock, or null for the server's, and the instant after which nothing
-- may change; a call that is late once it has its locks raises TG001 and changes nothing. Parts are passed as arrays with one
-- entry for each part, and five parameters for each part. Strategies have the numbers of statement.rs: 1 token_bucket, 2
-- leaky_bucket, 3 fixed_window, 4 sliding_window, 5 sliding_window_counter, 6 concurrency.

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

-- For a statement that meets a row which it did not lock, because another call inserted it after the statement began.
create or replace function {prefix}made_just_now() returns boolean volatile language plpgsql as $$
begin
  raise exception 'a key was made just now' using errcode = 'serialization_failure';
end
$$;

-- The state of a key that was never charged.
create or replace function {prefix}fresh(part_key uuid) returns {prefix}state immutable language sql as $$
  select row(part_key, '', 0, 0, 0, false, 0, 0, 0, null, null, null, null, null, null, null)::{prefix}state
$$;

-- The outcome of one limit for one part of a charge: whether it fits, the eight numbers of the reading, the next state, and the
-- instant from which the charge would count; for a lease, its end. log_take changes a log, and leases are inserted, once the
-- whole charge is known to pass.
create or replace function {prefix}look(
    seen {prefix}state, strategy smallint, parameters bigint[], cost bigint, now_us bigint,
    out allowed boolean, out reading bigint[], out next_state {prefix}state, out charged_at_us bigint)
stable language plpgsql as $$
#variable_conflict use_variable
declare
  price bigint;
  gone bigint;
  wanted bigint;
  enough_us bigint;
  x bigint;
  y bigint;
  z bigint := 0;
begin
  next_state := seen;
  charged_at_us := now_us;
  if strategy = 1 or strategy = 2 then
    -- A cost that can fit is at most a full bucket, so its price is at most 2^62.
    price := case when cost <= parameters[3] then cost * parameters[2] else -parameters[1] end;
    if strategy = 1 then
      select bucket.* into allowed, x, y, next_state.a, next_state.b, next_state.extra
      from {prefix}token_bucket_charge(
        seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra,
        parameters[1], parameters[2], parameters[3], parameters[5],
        price / parameters[1], price % parameters[1], now_us) as bucket;
    else
      select bucket.* into allowed, x, y, next_state.a, next_state.b, next_state.extra
      from {prefix}leaky_bucket_charge(
        seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra,
        parameters[1], parameters[2], parameters[3], parameters[5],
        price / parameters[1], price % parameters[1], now_us) as bucket;
    end if;
    next_state.d := parameters[1];
    next_state.e := parameters[2];
    next_state.f := parameters[3];
    reading := array[x, y, 0, 0, 0, 0, 0, 0];
    return;
  end if;
  if cost > parameters[1] then
    cost := -1;
  end if;
  if strategy = 3 then
    reading := array[seen.a, seen.b, greatest(coalesce(seen.d, seen.a - parameters[2]), 0), 0, 0, 0, 0, 0];
    select fixed.* into allowed, next_state.a, next_state.b, next_state.d
    from {prefix}fixed_window_charge(
      seen.a, seen.b, seen.d, parameters[1], parameters[2], parameters[3], cost, now_us) as fixed;
    charged_at_us := {prefix}fixed_window_charged_at(next_state.a, next_state.d, parameters[2], now_us);
  elsif strategy = 5 then
    reading := array[seen.a, seen.b, seen.c, coalesce(seen.d, 0),
                     coalesce(seen.extra[1], 0), coalesce(seen.extra[2], 0), coalesce(seen.extra[3], 0), coalesce(seen.extra[4], 0)];
    select counter.* into allowed, next_state.d, next_state.a, next_state.b, next_state.c, next_state.extra
    from {prefix}sliding_window_counter_charge(
      seen.d, seen.a, seen.b, seen.c, seen.extra, parameters[1], parameters[2], cost, now_us) as counter;
    charged_at_us := {prefix}sliding_window_counter_charged_at(next_state.a, next_state.extra, now_us);
  elsif strategy = 4 then
    charged_at_us := {prefix}sliding_window_now(seen.a, now_us);
    gone := 0;
    if seen.c > 0 and seen.d <= charged_at_us - parameters[2] then
      gone := {prefix}entries_sum_until(seen, charged_at_us - parameters[2]);
    end if;
    wanted := {prefix}sliding_window_wanted(seen.b, gone, parameters[1], cost);
    if wanted > 0 then
      enough_us := {prefix}entries_first_to_sum(seen, gone + wanted);
    end if;
    select log.* into allowed, x, y, z
    from {prefix}sliding_window_charge(
      seen.b, seen.a, gone, enough_us, parameters[1], parameters[2], cost, charged_at_us) as log;
    reading := array[x, y, z, 0, 0, 0, 0, 0];
  else
    charged_at_us := {prefix}concurrency_end(parameters[2], now_us);
    gone := 0;
    if seen.c > 0 and seen.d <= now_us then
      gone := {prefix}entries_sum_until(seen, now_us);
    end if;
    wanted := {prefix}concurrency_wanted(seen.b, gone, parameters[1], cost);
    if wanted > 0 then
      enough_us := {prefix}entries_first_to_sum(seen, gone + wanted);
    end if;
    select leases.* into allowed, x, y, z
    from {prefix}concurrency_acquire(seen.b, seen.a, gone, enough_us, parameters[1], cost, now_us) as leases;
    reading := array[x, y, z, 0, 0, 0, 0, 0];
  end if;
end
$$;

-- Answers as charge would, and changes nothing. It sees all tables as of one instant.
create or replace function {prefix}peek(
    part_keys uuid[], part_strategies smallint[], part_parameters bigint[], part_costs bigint[], part_shadows boolean[],
    clock_us bigint,
    out passed boolean, out decided_us bigint, out server_us bigint, out readings bigint[])
stable language plpgsql as $$
declare
  part integer;
  seen {prefix}state;
  outcome record;
begin
  passed := true;
  readings := '{}';
  select greatest(coalesce(clock_us, {prefix}now_us()), max(s.at_us)) into decided_us
  from {prefix}state as s where s.key = any (part_keys);
  for part in 1 .. cardinality(part_keys) loop
    select s.* into seen from {prefix}state as s where s.key = part_keys[part];
    if seen.key is null then
      seen := {prefix}fresh(part_keys[part]);
    end if;
    outcome := {prefix}look(
      seen, part_strategies[part], part_parameters[5 * part - 4 : 5 * part], part_costs[part], decided_us);
    passed := passed and (outcome.allowed or part_shadows[part]);
    readings := readings || outcome.reading;
  end loop;
  server_us := {prefix}now_us();
end
$$;

-- Charges all parts or none. If the charge is held already, the answer is its stored request and readings.
create or replace function {prefix}charge(
    part_keys uuid[], part_limits text[], part_strategies smallint[], part_parameters bigint[], part_costs bigint[],
    part_shadows boolean[],
    hold_id uuid, hold_ttl_us bigint, hold_asked bigint[], clock_us bigint, not_after timestamptz,
    out passed boolean, out decided_us bigint, out server_us bigint, out readings bigint[], out asked_before bigint[])
volatile language plpgsql as $$
declare
  parts constant integer := cardinality(part_keys);
  part integer;
  parameters bigint[];
  fits boolean[] := '{}';
  never boolean := false;
  held {prefix}hold;
  made uuid[];
  seen {prefix}state;
  states {prefix}state[] := array_fill(null::{prefix}state, array[parts]);
  found_states integer := 0;
  outcome record;
  allows boolean[] := '{}';
  nexts {prefix}state[] := '{}';
  charged integer[] := '{}';
  charged_at bigint[] := '{}';
  ttl_us bigint := hold_ttl_us;
begin
  if hold_id is not null then
    select h.* into held from {prefix}hold as h where h.id = hold_id for update;
    if coalesce(clock_us, {prefix}now_us()) < held.end_us then
      passed := true;
      decided_us := held.at_us;
      readings := held.readings;
      -- With other keys it is another charge: its request is left out of the answer.
      asked_before := case when held.keys <@ part_keys then held.asked else '{}'::bigint[] end;
      server_us := {prefix}now_us();
      return;
    end if;
  end if;

  for part in 1 .. parts loop
    -- A cost can fit if it is at most the burst of a bucket, or the limit of any other strategy.
    fits[part] := part_costs[part] <= part_parameters[5 * part - case when part_strategies[part] <= 2 then 2 else 4 end];
    never := never or not (fits[part] or part_shadows[part]);
  end loop;
  -- A charge that can never pass inserts nothing. Mostly all states exist. Existing states are locked first, then missing ones
  -- are inserted, both in the order of keys, as in several/charge.sql.
  if parts = 1 then
    select s.* into seen from {prefix}state as s where s.key = part_keys[1] for update;
    if seen.key is null and not never then
      made := {prefix}make_states(part_keys, part_limits, fits);
      select s.* into seen from {prefix}state as s where s.key = part_keys[1] for update;
    end if;
    states[1] := seen;
    decided_us := seen.at_us;
  else
    for seen in select s.* from {prefix}state as s where s.key = any (part_keys) order by s.key for update loop
      states[array_position(part_keys, seen.key)] := seen;
      decided_us := greatest(decided_us, seen.at_us);
      found_states := found_states + 1;
    end loop;
    if found_states < parts and not never then
      made := {prefix}make_states(part_keys, part_limits, fits);
      for part in 1 .. coalesce(cardinality(made), 0) loop
        states[array_position(part_keys, made[part])] := {prefix}fresh(made[part]);
      end loop;
    end if;
  end if;
  perform {prefix}refuse_if_late(not_after);
  decided_us := greatest(coalesce(clock_us, {prefix}now_us()), decided_us);

  passed := true;
  readings := '{}';
  for part in 1 .. parts loop
    seen := states[part];
    if seen.key is null then
      if fits[part] and not never then
        raise exception 'a key was made or forgotten just now' using errcode = 'serialization_failure';
      end if;
      seen := {prefix}fresh(part_keys[part]);
    end if;
    outcome := {prefix}look(
      seen, part_strategies[part], part_parameters[5 * part - 4 : 5 * part], part_costs[part], decided_us);
    passed := passed and (outcome.allowed or part_shadows[part]);
    readings := readings || outcome.reading;
    states[part] := seen;
    nexts[part] := outcome.next_state;
    allows[part] := outcome.allowed;
    charged_at[part] := outcome.charged_at_us;
  end loop;

  if not passed then
    -- The charge may have been denied because of itself: sent before, and finished only now. Then it gets the earlier answer.
    if exists (select from {prefix}hold as h where h.id = hold_id and h.end_us > decided_us) then
      raise exception 'the same charge was held just now' using errcode = 'serialization_failure';
    end if;
    delete from {prefix}state as s where s.key = any (made);
    for part in 1 .. parts loop
      if part_keys[part] = any (made) is not true then
        perform {prefix}adopt(states[part], part_strategies[part], part_parameters[5 * part - 4 : 5 * part], decided_us);
      end if;
    end loop;
    server_us := {prefix}now_us();
    return;
  end if;

  for part in 1 .. parts loop
    seen := nexts[part];
    parameters := part_parameters[5 * part - 4 : 5 * part];
    if not allows[part] then
      perform {prefix}adopt(states[part], part_strategies[part], parameters, decided_us);
      continue;
    end if;
    if part_strategies[part] = 4 then
      seen := {prefix}log_take(seen, parameters[1], parameters[2], part_costs[part], charged_at[part]);
    elsif part_strategies[part] = 6 then
      if seen.c > 0 and seen.d <= decided_us then
        seen := {prefix}entries_drop_until(seen, decided_us);
      end if;
      seen := {prefix}leases_insert(
        seen, charged_at[part], coalesce(hold_id, '00000000-0000-0000-0000-000000000000'), part_costs[part]);
      -- A hold lives at least as long as its leases.
      ttl_us := greatest(ttl_us, parameters[2]);
    end if;
    perform {prefix}write_state(seen, part_strategies[part], decided_us);
    charged := charged || part;
  end loop;

  -- If nothing was charged there is nothing to settle, and no hold is stored.
  if hold_id is not null and cardinality(charged) > 0 then
    -- The stored request has seven numbers for each charge of the call (see codec.rs). The sixth is the shadow flag, plus 2 if its part was
    -- charged; the seventh is the number of the part. So a settlement knows the charges of each charged part.
    for part in 1 .. cardinality(hold_asked) / 7 loop
      if hold_asked[7 * part] + 1 = any (charged) then
        hold_asked[7 * part - 1] := hold_asked[7 * part - 1] + 2;
      end if;
    end loop;
    if cardinality(charged) < parts then
      -- Shadow limits may have denied: the hold has only the parts that were charged.
      select array_agg(part_keys[c.part] order by c.n), array_agg(part_limits[c.part] order by c.n),
             array_agg(part_strategies[c.part] order by c.n),
             (select array_agg(part_parameters[5 * d.part - 5 + i] order by d.n, i)
              from unnest(charged) with ordinality as d (part, n), generate_series(1, 5) as i),
             array_agg(part_costs[c.part] order by c.n), array_agg(charged_at[c.part] order by c.n)
      into part_keys, part_limits, part_strategies, part_parameters, part_costs, charged_at
      from unnest(charged) with ordinality as c (part, n);
    end if;
    -- A reservation is on disk before it is acknowledged. A denied or repeated one needs no flush: another call sees a held
    -- charge only after its commit has reached the disk.
    perform set_config('synchronous_commit', 'on', true);
    insert into {prefix}hold as h (
      id, keys, limit_names, strategies, parameters, costs, charged_at_us, asked, readings, at_us, ttl_us, end_us, settled)
    values (hold_id, part_keys, part_limits, part_strategies, part_parameters, part_costs, charged_at,
            hold_asked, readings, decided_us, ttl_us, decided_us + ttl_us, false)
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

-- Inserts the missing states of parts that can fit, in the order of keys, after the existing states were locked. Returns which it
-- inserted. (Like all functions here that touch tables it is plpgsql, which caches its plans; a function in plain SQL would be
-- planned at each call.)
create or replace function {prefix}make_states(part_keys uuid[], part_limits text[], part_fits boolean[])
returns uuid[] volatile language plpgsql as $$
declare
  made uuid[];
begin
  with new as (
    insert into {prefix}state (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us)
    select part.key, part.limit_name, 0, 0, 0, false, 0, 0, 0
    from unnest(part_keys, part_limits, part_fits) as part (key, limit_name, fits)
    where part.fits and not exists (select from {prefix}state as s where s.key = part.key)
    order by part.key
    on conflict (key) do nothing
    returning key)
  select array_agg(new.key) into made from new;
  return made;
end
$$;

-- Writes a state. The state equals no state once everything in it has expired, by the numbers that it was written under.
create or replace function {prefix}write_state(next_state {prefix}state, strategy smallint, now_us bigint)
returns void volatile language plpgsql as $$
begin
  if strategy <= 2 then
    next_state.tail_us := {prefix}token_bucket_tail_us(
      next_state.a, next_state.d, next_state.e, next_state.f, next_state.extra);
  elsif strategy = 5 then
    next_state.tail_us := greatest(2 * next_state.d, next_state.extra[2] + 2 * next_state.extra[1] - next_state.a);
  elsif strategy <> 4 then
    next_state.tail_us := 0;
  end if;
  update {prefix}state as s
  set a = next_state.a, b = next_state.b, c = next_state.c, d = next_state.d, e = next_state.e, f = next_state.f,
      extra = next_state.extra, log_us = next_state.log_us, log_sums = next_state.log_sums, holders = next_state.holders,
      admitted = true, at_us = now_us, tail_us = next_state.tail_us
  where s.key = next_state.key;
end
$$;

-- Converts a state that was written under other numbers, if necessary: a bucket to its new numbers, and a log to its new
-- retention time. A charge does so for each of its limits that is not charged.
create or replace function {prefix}adopt(seen {prefix}state, strategy smallint, parameters bigint[], now_us bigint)
returns void volatile language plpgsql as $$
declare
  adopted bigint[];
begin
  if strategy <= 2 and seen.d is not null
      and (seen.d <> parameters[1] or seen.e <> parameters[2] or seen.f <> parameters[3]) then
    adopted := {prefix}token_bucket_adopted(
      seen.a, seen.b, seen.d, seen.e, seen.f, seen.extra,
      parameters[1], parameters[2], parameters[3], parameters[5], now_us);
    seen.a := adopted[1];
    seen.b := adopted[2];
    seen.extra := {prefix}token_bucket_extra(adopted);
    seen.d := parameters[1];
    seen.e := parameters[2];
    seen.f := parameters[3];
    perform {prefix}write_state(seen, strategy, now_us);
  elsif strategy = 4 and seen.c > 0 and parameters[2] > seen.tail_us then
    seen.tail_us := {prefix}sliding_window_keep(seen.tail_us, parameters[2]);
    perform {prefix}write_state(seen, strategy, now_us);
  end if;
end
$$;

-- Forgets all charges of a key; false if it has none.
create or replace function {prefix}forget(
    part_key uuid, not_after timestamptz, out forgotten boolean, out server_us bigint)
volatile language plpgsql as $$
begin
  delete from {prefix}state as s where s.key = part_key;
  forgotten := found;
  delete from {prefix}execution as e where e.key = part_key;
  perform {prefix}refuse_if_late(not_after);
  server_us := {prefix}now_us();
end
$$;
