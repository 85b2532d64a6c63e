-- A charge on one bucket, or the same charge on many, each separately: one statement, decided on the locked row.
-- $1 key or keys  $2 limit name  $3 c  $4 p  $5 burst  $6 keeps_instant  $7 price_us  $8 price_rest  $9 a test's clock  $10 not after
-- A returned row was decided; a row that is not returned was late and unchanged. A price that can never fit is not sent here, so
-- a new key is always admitted: its bucket is a full one less the price. Afterwards the state is under the numbers of this
-- charge, whether it was admitted or not. Each `offset 0` keeps the planner from repeating the inner expressions for every
-- column, which would cost more than the whole update.
insert into {prefix}state as s (key, limit_name, a, b, c, d, e, f, admitted, at_us, tail_us, sweep_us)
select charged.key, $2::text, now_us + $7::bigint, $8::bigint, 0, $3::bigint, $4::bigint, $5::bigint, true, now_us, 1,
       now_us + $7::bigint
from {charged}, (select coalesce($9::bigint, {prefix}now_us()) as now_us offset 0) as clock
where clock_timestamp() <= $10::timestamptz
on conflict (key) do update set d = excluded.d, e = excluded.e, f = excluded.f,
  (a, b, extra, admitted, at_us, tail_us) = (
  select next_us, next_rest, next_extra, allowed, now_us,
         case when next_extra is null then 1
              else {prefix}token_bucket_tail_us(next_us, excluded.d, excluded.e, excluded.f, next_extra) end
  from (select greatest(excluded.at_us, s.at_us) as now_us offset 0) as clock,
       lateral (
         select allowed, next_us, next_rest, next_extra
         from {prefix}{strategy}_charge(
           s.a, s.b, s.d, s.e, s.f, s.extra,
           $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::bigint, $8::bigint, now_us) offset 0) as outcome)
where clock_timestamp() <= $10::timestamptz
returning s.key, s.admitted, s.at_us,
  {prefix}token_bucket_before_us(s.a, s.b, $7::bigint, $8::bigint, s.admitted, s.at_us),
  {prefix}token_bucket_before_rest(s.b, $3::bigint, $8::bigint, s.admitted)
