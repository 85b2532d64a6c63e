-- A charge on one sliding window counter, or the same charge on many, each separately; see bucket.sql.
-- $1 key or keys  $2 limit name  $3 limit  $4 window_us  $5 cost  $6 a test's clock  $7 not after
insert into {prefix}state as s (key, limit_name, a, b, c, d, admitted, at_us, tail_us, sweep_us)
select charged.key, $2::text, rolled_start_us, 0, $5::bigint, $4::bigint, true, now_us,
       2 * $4::bigint, rolled_start_us + 2 * $4::bigint
from {charged}, (select coalesce($6::bigint, {prefix}now_us()) as now_us offset 0) as clock,
     lateral {prefix}sliding_window_counter_rolled($4::bigint, 0::bigint, 0::bigint, 0::bigint, now_us)
where $3::bigint > 0 and clock_timestamp() <= $7::timestamptz
on conflict (key) do update set (a, b, c, d, extra, admitted, at_us, tail_us) = (
  select next_start_us, next_prev, next_cur, next_window_us, next_older, allowed, now_us,
         case when not allowed then s.tail_us
              else greatest(2 * $4::bigint, next_older[2] + 2 * next_older[1] - next_start_us) end
  from (select greatest(excluded.at_us, s.at_us) as now_us offset 0) as clock,
       lateral (
         select outcome.*
         from {prefix}sliding_window_counter_charge(
           s.d, s.a, s.b, s.c, s.extra, $3::bigint, $4::bigint, $5::bigint, now_us) as outcome offset 0) as outcome)
where clock_timestamp() <= $7::timestamptz
returning s.key, s.admitted, s.at_us, s.a, s.b, s.c - case when s.admitted then $5::bigint else 0 end,
  coalesce(s.d, 0), coalesce(s.extra[1], 0), coalesce(s.extra[2], 0), coalesce(s.extra[3], 0), coalesce(s.extra[4], 0)
