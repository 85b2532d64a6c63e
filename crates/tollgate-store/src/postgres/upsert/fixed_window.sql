-- A charge on one fixed window, or the same charge on many, each separately; see bucket.sql.
-- $1 key or keys  $2 limit name  $3 limit  $4 window_us  $5 align  $6 cost  $7 a test's clock  $8 not after
insert into {prefix}state as s (key, limit_name, a, b, c, d, admitted, at_us, tail_us, sweep_us)
select charged.key, $2::text, open_end_us, $6::bigint, 0, open_start_us, true, now_us, 0, open_end_us
from {charged}, (select coalesce($7::bigint, {prefix}now_us()) as now_us offset 0) as clock,
     lateral {prefix}fixed_window_current(0, 0, 0, $4::bigint, $5::bigint, now_us)
where clock_timestamp() <= $8::timestamptz
on conflict (key) do update set (a, b, d, admitted, at_us) = (
  select case when allowed then next_end_us else s.a end, case when allowed then next_count else s.b end,
         case when allowed then next_start_us else s.d end, allowed, now_us
  from (select greatest(excluded.at_us, s.at_us) as now_us offset 0) as clock,
       lateral (
         select allowed, next_end_us, next_count, next_start_us
         from {prefix}fixed_window_charge(
           s.a, s.b, s.d, $3::bigint, $4::bigint, $5::bigint, $6::bigint, now_us) offset 0) as outcome)
where clock_timestamp() <= $8::timestamptz
returning s.key, s.admitted, s.at_us, s.a, s.b - case when s.admitted then $6::bigint else 0 end,
  greatest(coalesce(s.d, s.a - $4::bigint), 0)
