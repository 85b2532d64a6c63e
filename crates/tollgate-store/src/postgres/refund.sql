-- Refunds of plain charges. Locks and arithmetic are as in charge.sql.

-- Gives each part its amount back, one after the other, from the current count, whichever caller was charged. No part is a lease.
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
    -- A key without a locked state was not remembered. The state is read again for each part, because an earlier part may have
    -- the same key.
    continue when part_keys[part] <> all (locked);
    select s.* into seen from {prefix}state as s where s.key = part_keys[part];
    perform {prefix}refund_state(
      seen, part_strategies[part], part_parameters[5 * part - 4 : 5 * part], part_amounts[part], now_us);
  end loop;
  server_us := {prefix}now_us();
end
$$;

-- Gives back an amount of the current count: the newest charge first, and never more than there is.
create or replace function {prefix}refund_state(
    seen {prefix}state, strategy smallint, parameters bigint[], amount bigint, now_us bigint)
returns void volatile language plpgsql as $$
#variable_conflict use_variable
begin
  if strategy = 5 then
    seen := {prefix}with_counts(seen, {prefix}sliding_window_counter_refund(
      {prefix}newer_counts(seen, parameters[2]), {prefix}older_counts(seen), amount, now_us));
    perform {prefix}write_state(seen, strategy, now_us);
  elsif strategy = 4 then
    perform {prefix}write_state({prefix}log_refund(seen, amount), strategy, now_us);
  elsif strategy = 3 then
    perform {prefix}give_back(
      seen, strategy, parameters, amount, {prefix}fixed_window_charged_at(seen.a, seen.d, parameters[2], now_us), amount, now_us);
  else
    perform {prefix}give_back(seen, strategy, parameters, amount, now_us, amount, now_us);
  end if;
end
$$;
