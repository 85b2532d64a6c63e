-- The tables, version 3: leases are in chunks with running sums, in the table of the logs. No function that a program calls
-- changes, so a running program of version 2 keeps working; see docs/storage.md.

-- Every call locks states before it touches leases, so after this no call is in progress.
lock table {prefix}state in access exclusive mode;

do $$
declare
  obsolete regprocedure;
begin
  for obsolete in
    select p.oid from pg_proc as p
    where pg_function_is_visible(p.oid) and p.proname = any (array[
      '{prefix}log_sum_until', '{prefix}log_first_to_sum', '{prefix}log_drop_until', '{prefix}log_give_back', '{prefix}log_join',
      '{prefix}leases_ended', '{prefix}leases_drop_ended', '{prefix}leases_first_to_sum', '{prefix}leases_take'])
  loop
    execute 'drop function ' || obsolete;
  end loop;
end
$$;

-- A chunk of a log has up to 64 entries, and no holders. A chunk of leases has up to 32, ordered by end (at_us) and holder, and
-- is named by both: many leases may end at one instant.
alter table {prefix}execution
  add column first_holder uuid not null default '00000000-0000-0000-0000-000000000000',
  add column holders uuid[],
  drop constraint {prefix}execution_pkey,
  add primary key (key, first_us, first_holder);

-- Concurrency: c is the number of leases, d the end of the first, as in a log. There are leases if c is not 0.
insert into {prefix}execution (key, first_us, first_holder, last_us, total, at_us, holders, sums)
  select n.key, min(n.end_us), (array_agg(n.holder order by n.place))[1], max(n.end_us), sum(n.cost)::bigint,
         array_agg(n.end_us order by n.place), array_agg(n.holder order by n.place), array_agg(n.sum order by n.place)
  from (select p.*, (sum(p.cost) over (partition by p.key, p.place / 32 order by p.place))::bigint as sum
        from (select l.*, row_number() over (partition by l.key order by l.end_us, l.holder) - 1 as place
              from {prefix}lease as l join {prefix}state as s on s.key = l.key) as p) as n
  group by n.key, n.place / 32;
update {prefix}state as s set a = held.last_us, b = held.total, c = held.leases, d = held.first_us
from (select l.key, min(l.end_us) as first_us, max(l.end_us) as last_us, sum(l.cost)::bigint as total, count(*) as leases
      from {prefix}lease as l group by l.key) as held
where s.key = held.key;

drop table {prefix}lease;
