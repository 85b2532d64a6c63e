-- A charge on one bucket, or the same on many, each by itself: one statement, decided on the locked row.
-- $1 key or keys  $2 limit name  $3 c  $4 span_us  $5 span_rest  $6 price_us  $7 price_rest  $8 a test's clock  $9 not after
-- A row that comes back was decided upon; one that does not was too late, and nothing of it changed. A price that can never
-- fit does not come here, so a new key is always admitted: its bucket is what the price leaves of a full one. Each `offset 0`
-- keeps the planner from writing the expressions within once for every column, which would cost more than the whole update.
insert into {prefix}state as s (key, limit_name, a, b, c, admitted, at_us, tail_us, sweep_us)
select charged.key, $2::text, now_us + $6::bigint, $7::bigint, 0, true, now_us, 1, now_us + $6::bigint
from {charged}, (select coalesce($8::bigint, {prefix}now_us()) as now_us offset 0) as clock
where clock_timestamp() <= $9::timestamptz
on conflict (key) do update set (a, b, admitted, at_us) = (
  select case when allowed then after_us else s.a end, case when allowed then after_rest else s.b end, allowed, now_us
  from (select greatest(excluded.at_us, s.at_us) as now_us offset 0) as clock,
       lateral (
         select allowed, after_us, after_rest
         from {prefix}{strategy}_charge(
           s.a, s.b, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::bigint, now_us) offset 0) as said)
where clock_timestamp() <= $9::timestamptz
returning s.key, s.admitted, s.at_us,
  {prefix}token_bucket_before_us(s.a, s.b, $6::bigint, $7::bigint, s.admitted, s.at_us),
  {prefix}token_bucket_before_rest(s.b, $3::bigint, $7::bigint, s.admitted),
  0::bigint
