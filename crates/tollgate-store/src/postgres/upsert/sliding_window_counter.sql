-- A charge on one sliding window counter, or the same on many, each by itself; see bucket.sql.
-- $1 key or keys  $2 limit name  $3 limit  $4 window_us  $5 cost  $6 a test's clock  $7 not after
insert into {prefix}state as s (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us)
select charged.key, $2::text, rolled_start_us, 0, $5::bigint, true, now_us, 2 * $4::bigint, rolled_start_us + 2 * $4::bigint
from {charged}, (select coalesce($6::bigint, {prefix}now_us()) as now_us offset 0) as clock,
     lateral {prefix}sliding_window_counter_rolled(0, 0, 0, $4::bigint, now_us)
where $3::bigint > 0 and clock_timestamp() <= $7::timestamptz
on conflict (key) do update set (a, b, c, admitted, at_us, tail_us) = (
  select case when allowed then next_start_us else s.a end, case when allowed then next_prev else s.b end,
         case when allowed then next_cur else s.c end, allowed, now_us, 2 * $4::bigint
  from (select greatest(excluded.at_us, s.at_us) as now_us offset 0) as clock,
       lateral (
         select allowed, next_start_us, next_prev, next_cur
         from {prefix}sliding_window_counter_charge(
           s.a, s.b, s.c, $3::bigint, $4::bigint, $5::bigint, now_us) offset 0) as said)
where clock_timestamp() <= $7::timestamptz
returning s.key, s.admitted, s.at_us, s.a, s.b, s.c - case when s.admitted then $5::bigint else 0 end
