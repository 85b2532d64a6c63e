-- The tables, version 2: what is needed to keep counting when the numbers of a limit change, and logs in chunks. Rows of version
-- 1 can still be read. Functions of version 1 are dropped: a running program of version 1 would write states in its own format,
-- so its charges fail until it is upgraded too.
do $$
declare
  obsolete regprocedure;
begin
  for obsolete in
    select p.oid from pg_proc as p
    where pg_function_is_visible(p.oid) and p.proname = any (array[
      '{prefix}charge', '{prefix}peek', '{prefix}look', '{prefix}make_states', '{prefix}write_state', '{prefix}write_execution',
      '{prefix}write_lease', '{prefix}give_back', '{prefix}debit', '{prefix}refund_state', '{prefix}release_lease',
      '{prefix}renew_lease', '{prefix}token_bucket_charge', '{prefix}token_bucket_give_back', '{prefix}token_bucket_debit',
      '{prefix}leaky_bucket_charge', '{prefix}fixed_window_current', '{prefix}fixed_window_charge',
      '{prefix}fixed_window_charged_at', '{prefix}fixed_window_give_back', '{prefix}fixed_window_debit',
      '{prefix}sliding_window_charge', '{prefix}sliding_window_debit', '{prefix}sliding_window_refund',
      '{prefix}sliding_window_counter_rolled', '{prefix}sliding_window_counter_charge',
      '{prefix}sliding_window_counter_charged_at', '{prefix}sliding_window_counter_give_back',
      '{prefix}sliding_window_counter_refund', '{prefix}sliding_window_counter_debit', '{prefix}concurrency_now',
      '{prefix}concurrency_acquire'])
  loop
    execute 'drop function ' || obsolete;
  end loop;
end
$$;

drop type {prefix}said;

-- More fields of the state, as in the strategy's twin:
--   token_bucket, leaky_bucket   d under_c, e under_p, f under_burst; extra: wider_us, wider_rest, changed_at_us, changed_c, changed_p
--   fixed_window                 d start_us
--   sliding_window               c how many entries, d the oldest entry's time, e first_us of the newest chunk; tail_us is keep_us
--   sliding_window_counter       d the newer window_us; extra: the older window_us, start_us, prev, cur
--   concurrency                  d an instant before which no lease ends
-- Null if a row was last written by version 1, and if a field is not used. A log is empty if c is 0. Rarely used fields are in
-- one array, so that other states do not pay for them.
alter table {prefix}state
  add column d bigint, add column e bigint, add column f bigint, add column extra bigint[];

-- The log of a sliding window, up to 64 entries in a row, in the order of time: the instant of each entry, and the running sums,
-- so that a binary search finds the sum of the entries before an instant. first_us names the row and never changes, even if that
-- entry is gone. Entries before the oldest that the state names are gone too; a row is deleted when all its entries are gone.
create table {prefix}execution_1 as
  select numbered.key, min(numbered.at_us) as first_us, max(numbered.at_us) as last_us, sum(numbered.cost)::bigint as total,
         array_agg(numbered.at_us order by numbered.at_us) as at_us, array_agg(numbered.sum order by numbered.at_us) as sums
  from (select chunked.*, (sum(chunked.cost) over (partition by chunked.key, chunked.chunk order by chunked.at_us))::bigint as sum
        from (select e.key, e.at_us, e.cost, (row_number() over (partition by e.key order by e.at_us) - 1) / 64 as chunk
              from {prefix}execution as e) as chunked) as numbered
  group by numbered.key, numbered.chunk;

-- In place, so that privileges on the table stay.
truncate {prefix}execution;
alter table {prefix}execution rename column at_us to first_us;
alter table {prefix}execution rename column cost to last_us;
alter table {prefix}execution
  add column total bigint not null, add column at_us bigint[] not null, add column sums bigint[] not null,
  set (fillfactor = 50);
insert into {prefix}execution (key, first_us, last_us, total, at_us, sums)
  select o.key, o.first_us, o.last_us, o.total, o.at_us, o.sums from {prefix}execution_1 as o;
drop table {prefix}execution_1;
update {prefix}state as s set c = log.entries, d = log.oldest_us, e = log.chunk_us
from (select e.key, sum(cardinality(e.at_us)) as entries, min(e.first_us) as oldest_us, max(e.first_us) as chunk_us
      from {prefix}execution as e group by e.key) as log
where s.key = log.key;

-- Held charges with the new parameters (a bucket's burst instead of the time to fill it, and a debt of at most a day), with the
-- end of each lease as the instant of its charge, and readings of eight numbers.
update {prefix}hold as h set
  parameters = coalesce((
    select array_agg(case
      when h.strategies[part] > 2 or i <= 2 then h.parameters[5 * part - 5 + i]
      when i = 3 then div(h.parameters[5 * part - 2]::numeric * h.parameters[5 * part - 4] + h.parameters[5 * part - 1],
                          h.parameters[5 * part - 3])
      when i = 4 then 86400000000
      else 0 end::bigint order by part, i)
    from generate_series(1, cardinality(h.keys)) as part, generate_series(1, 5) as i), '{}'),
  readings = coalesce((
    select array_agg(case when i <= 3 then h.readings[3 * part - 3 + i] else 0 end order by part, i)
    from generate_series(1, cardinality(h.readings) / 3) as part, generate_series(1, 8) as i), '{}');
update {prefix}hold as h set charged_at_us = ends.charged_at_us
from (select p.id, array_agg(case when p.strategy = 6 then coalesce(lease.end_us, 0) else p.charged_at_us end order by p.part)
               as charged_at_us
      from (select held.id, part.key, part.strategy, part.charged_at_us, part.part
            from {prefix}hold as held,
                 unnest(held.keys, held.strategies, held.charged_at_us)
                   with ordinality as part (key, strategy, charged_at_us, part)) as p
      left join (select l.key, l.holder, max(l.end_us) as end_us from {prefix}lease as l group by l.key, l.holder) as lease
        on lease.key = p.key and lease.holder = p.id
      group by p.id) as ends
where ends.id = h.id and 6 = any (h.strategies);
