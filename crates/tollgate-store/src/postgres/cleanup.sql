-- Deletes expired rows. Rows that a caller has locked are skipped, so the cleanup delays no call.

-- Checks a batch of states that are due: expired states are deleted with their logs and leases; the others are checked again at
-- their new time. Then deletes a batch of expired holds. Returns how many states were checked, and how many rows of each kind
-- were deleted.
create or replace function {prefix}cleanup(
    batch integer, clock_us bigint,
    out looked bigint, out states bigint, out executions bigint, out leases bigint, out holds bigint)
volatile language plpgsql as $$
declare
  now_us constant bigint := coalesce(clock_us, {prefix}now_us());
  due uuid[];
  idle uuid[];
begin
  select array_agg(d.key), array_agg(d.key) filter (where d.expires_us <= now_us) into due, idle
  from (select s.key, s.a + s.tail_us as expires_us from {prefix}state as s where s.sweep_us <= now_us
        order by s.sweep_us limit batch for update skip locked) as d;
  looked := coalesce(cardinality(due), 0);
  delete from {prefix}state as s where s.key = any (idle);
  get diagnostics states = row_count;
  with deleted as (
    delete from {prefix}execution as e where e.key = any (idle) returning e.holders is null as is_log)
  select count(*) filter (where d.is_log), count(*) filter (where not d.is_log) into executions, leases from deleted as d;
  update {prefix}state as s set sweep_us = s.a + s.tail_us where s.key = any (due);
  with old as (
    select h.id from {prefix}hold as h where h.end_us <= now_us order by h.end_us limit batch for update skip locked)
  delete from {prefix}hold as h using old where h.id = old.id;
  get diagnostics holds = row_count;
  looked := greatest(looked, holds);
end
$$;
