-- A charge on one concurrency limit with few leases, or the same charge on many, each separately; see bucket.sql and
-- short_leases.sql. Leases in chunks, and those that are too many for the state, are not changed: then no row is returned, as for a
-- late charge, and the function makes the charge.
-- As in sliding_window.sql, the statement itself appends a lease that ends after all others, and short_leases_charge does the rest.
-- $1 key or keys  $2 limit name  $3 limit  $4 lease_us  $5 cost  $6 a test's clock  $7 not after
insert into {prefix}state as s (key, limit_name, a, b, c, d, admitted, at_us, tail_us, sweep_us, log_us, log_sums, holders)
select charged.key, $2::text, end_us, $5::bigint, 1, end_us, true, now_us, 0, end_us, array[end_us], array[$5::bigint], {holders}
from {charged}, (select coalesce($6::bigint, {prefix}now_us()) as now_us offset 0) as clock,
     lateral (select {prefix}concurrency_end($4::bigint, now_us) as end_us offset 0) as lease
where clock_timestamp() <= $7::timestamptz
on conflict (key) do update set (a, b, c, d, log_us, log_sums, holders, admitted, at_us) = (
  select outcome.*, now_us
  from (select greatest(excluded.at_us, s.at_us) as now_us, {prefix}concurrency_end($4::bigint, greatest(excluded.at_us, s.at_us)) as end_us
        offset 0) as clock,
       -- How many leases have ended, and their sum.
       lateral (select case when s.d <= now_us then width_bucket(now_us, s.log_us) else 0 end as place offset 0) as ended,
       lateral (
         select case when place = 0 then 0 else s.log_sums[place] - s.log_sums[s.c] + s.b end as gone offset 0) as ended_sum,
       lateral {prefix}concurrency_acquire(s.b, s.a, gone, null, $3::bigint, $5::bigint, now_us) as fits,
       lateral (
         select fits.allowed and place < s.c and end_us > s.a and (s.holders is null) = (excluded.holders is null)
                and s.log_sums[s.c] + $5::bigint <= 1152921504606846976 as is_append
         offset 0) as form,
       lateral (
         select end_us, s.b - gone + $5::bigint, s.c - place + 1, s.log_us[place + 1],
                case when place = 0 then s.log_us else s.log_us[place + 1 :] end || end_us,
                case when place = 0 then s.log_sums else s.log_sums[place + 1 :] end || (s.log_sums[s.c] + $5::bigint),
                case when place = 0 then s.holders else s.holders[place + 1 :] end || excluded.holders, true
         where is_append
         union all
         select charge.*
         from {prefix}short_leases_charge(
           s.a, s.b, s.c, s.d, s.log_us, s.log_sums, s.holders, $3::bigint, $4::bigint, $5::bigint, excluded.holders[1], now_us)
           as charge
         where is_append is not true) as outcome)
where clock_timestamp() <= $7::timestamptz and (s.c = 0 or s.log_us is not null)
  and least(s.c + 1, $3::bigint) <= {prefix}short_leases_most(coalesce(s.holders, excluded.holders) is not null)
returning s.key, s.admitted, s.at_us,
  case when s.admitted then array[s.b - $5::bigint, 0, s.a - s.at_us]
       else {prefix}short_leases_reading(s.a, s.b, s.log_us, s.log_sums, $3::bigint, $5::bigint, s.at_us) end
