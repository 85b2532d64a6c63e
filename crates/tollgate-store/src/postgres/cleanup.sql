-- Forgetting what says nothing any more. What a live caller holds is skipped, so nobody waits for the cleanup.

-- Looks at a batch of states that are due: those whose instant has passed are forgotten with their logs and leases, the others
-- are looked at again when theirs has. Then forgets a batch of held charges whose time is up. Answers how many were looked at,
-- and how many of each were forgotten.
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
