-- Charges of several limits each, without a hold, with each state in one row: one statement. Each charge is all or none.
-- One element for each limit of each charge, in all arrays: $1 keys  $2 numbers of the charges  $3 limit names  $4 strategies
-- $5, $6, $7 the first three parameters  $8 price_us or cost  $9 price_rest  $10 shadows; then  $11 how long to wait for a lock, in ms
-- $12 a test's clock  $13 not after
-- No key occurs twice. All rows are locked in the order of keys, then the charges are decided on the locked rows, then new rows
-- are inserted in the order of keys. charge.sql uses the same order, so there is no deadlock.
--
-- A returned charge was decided; it has a row for each of its limits. A charge that is not returned changed nothing, and must go
-- to the function: it was late, or one of its states is not simple. A simple state is one that a denied charge does not change: a
-- bucket under the numbers of the charge, or a log in the state with a retention time that is long enough for the window.
with locked as materialized (
  select s.*
  from (select set_config('lock_timeout', $11::integer::text, true) offset 0) as lock_timeout, {prefix}state as s
  where s.key = any ($1::uuid[]) order by s.key for update of s),
-- Evaluated once, after all locks.
clock as materialized (
  select coalesce($12::bigint, {prefix}now_us()) as now_us, clock_timestamp() <= $13::timestamptz as is_in_time
  from (select count(*) from locked) as all_locked),
seen as materialized (
  select asked.*, s.key is null as is_new, coalesce(s.a, 0) as a, coalesce(s.b, 0) as b, coalesce(s.c, 0) as c, s.d, s.e, s.f, s.extra,
         coalesce(s.tail_us, 0) as tail_us, s.log_us, s.log_sums,
         greatest(clock.now_us, max(s.at_us) over charges) as now_us,
         clock.is_in_time and bool_and(case
           when s.key is null then true
           when asked.strategy <= 2 then
             (s.d = asked.n1 and s.e = asked.n2 and s.f = asked.n3 and s.extra is null) is true
           when asked.strategy = 4 then s.c = 0 or s.log_us is not null and asked.n2 <= s.tail_us
           else true end) over charges as is_simple
  from clock, unnest(
         $1::uuid[], $2::integer[], $3::text[], $4::smallint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[],
         $10::boolean[]) with ordinality
         as asked (key, charge, limit_name, strategy, n1, n2, n3, price_us, price_rest, is_shadow, place)
       left join locked as s on s.key = asked.key
  window charges as (partition by asked.charge)),
outcomes as ({outcomes}),
decided as materialized (
  select o.*, bool_and(o.allowed or o.is_shadow) over (partition by o.charge) as passed from outcomes as o),
written as (
  insert into {prefix}state as s (
    key, limit_name, a, b, c, d, e, f, extra, log_us, log_sums, admitted, at_us, tail_us, sweep_us)
  select d.key, d.limit_name, d.next_a, d.next_b, d.next_c, d.next_d, d.next_e, d.next_f, d.next_extra, d.next_log_us, d.next_log_sums,
         d.is_new, d.now_us, d.next_tail_us, d.next_a + d.next_tail_us
  from decided as d where d.passed and d.allowed order by d.key
  -- A row that was expected to be new was inserted by another call just now, and is not locked.
  on conflict (key) do update set
    a = excluded.a, b = excluded.b, c = excluded.c, d = excluded.d, e = excluded.e, f = excluded.f, extra = excluded.extra,
    log_us = excluded.log_us, log_sums = excluded.log_sums, at_us = excluded.at_us, tail_us = excluded.tail_us,
    admitted = case when excluded.admitted then {prefix}made_just_now() else true end)
select d.place, d.charge, d.passed, d.now_us, d.reading from decided as d
