-- What was charged and need not have been. Locks and arithmetic are as in charge.sql.

-- Gives each part its amount back, one after the other, of what counts now, whoever was charged it. No part is a lease.
create or replace function {prefix}refund(
    part_keys uuid[], part_strategies smallint[], part_parameters bigint[], part_amounts bigint[],
    clock_us bigint, not_after timestamptz, out server_us bigint)
volatile language plpgsql as $$
declare
  part integer;
  seen {prefix}state;
  locked uuid[] := '{}';
  now_us bigint;
begin
  for seen in select s.* from {prefix}state as s where s.key = any (part_keys) order by s.key for update loop
    locked := locked || seen.key;
    now_us := greatest(now_us, seen.at_us);
  end loop;
  perform {prefix}refuse_if_late(not_after);
  now_us := greatest(now_us, coalesce(clock_us, {prefix}now_us()));
  for part in 1 .. cardinality(part_keys) loop
    -- What is not locked was not remembered. The rest is read anew, because a part before it may be of the same key.
    continue when part_keys[part] <> all (locked);
    select s.* into seen from {prefix}state as s where s.key = part_keys[part];
    perform {prefix}refund_state(
      seen, part_strategies[part], part_parameters[5 * part - 4 : 5 * part], part_amounts[part], now_us);
  end loop;
  server_us := {prefix}now_us();
end
$$;

-- Returns an amount of what counts now: the newest first, and never more than there is.
create or replace function {prefix}refund_state(
    seen {prefix}state, strategy smallint, parameters bigint[], amount bigint, now_us bigint)
returns void volatile language plpgsql as $$
#variable_conflict use_variable
declare
  charged_at_us bigint := now_us;
  next_a bigint;
  next_b bigint;
  next_c bigint;
  entry record;
  rest bigint;
  left_over bigint := amount;
begin
  if strategy = 5 then
    select counter.* into next_a, next_b, next_c
    from {prefix}sliding_window_counter_refund(seen.a, seen.b, seen.c, parameters[2], amount, now_us) as counter;
    perform {prefix}write_state(seen.key, next_a, next_b, next_c, now_us, 2 * parameters[2]);
  elsif strategy = 4 then
    next_a := 0;
    for entry in
      select e.at_us, e.cost from {prefix}execution as e where e.key = seen.key order by e.at_us desc
    loop
      next_a := entry.at_us;
      exit when left_over = 0;
      select log.* into rest, left_over from {prefix}sliding_window_refund(entry.cost, left_over) as log;
      if rest > 0 then
        update {prefix}execution as e set cost = rest where e.key = seen.key and e.at_us = entry.at_us;
        exit;
      end if;
      delete from {prefix}execution as e where e.key = seen.key and e.at_us = entry.at_us;
      next_a := 0;
    end loop;
    perform {prefix}write_state(seen.key, next_a, seen.b - (amount - left_over), 0, now_us, seen.tail_us);
  else
    if strategy = 3 then
      charged_at_us := {prefix}fixed_window_charged_at(seen.a, parameters[2], now_us);
    end if;
    perform {prefix}give_back(seen, strategy, parameters, amount, charged_at_us, now_us);
  end if;
end
$$;
