-- A charge on one sliding window with a short log, or the same charge on many, each separately; see bucket.sql and short_log.sql.
-- A log in chunks is not changed: then no row is returned, as for a late charge, and the function makes the charge.
-- Most charges append an entry to a log of one window. The statement does this itself, in the form of short_log_charge, because a
-- function in PL/pgSQL costs more than all the rest; the function makes the others: denied ones, and logs of several windows.
-- $1 key or keys  $2 limit name  $3 limit  $4 window_us  $5 cost  $6 a test's clock  $7 not after
insert into {prefix}state as s (key, limit_name, a, b, c, d, admitted, at_us, tail_us, sweep_us, log_us, log_sums)
select charged.key, $2::text, now_us, $5::bigint, 1, now_us, $3::bigint > 0, now_us, $4::bigint, now_us + $4::bigint,
       array[now_us], array[$5::bigint]
from {charged}, (select coalesce($6::bigint, {prefix}now_us()) as now_us offset 0) as clock
where clock_timestamp() <= $7::timestamptz
on conflict (key) do update set (a, b, c, d, tail_us, log_us, log_sums, admitted, at_us) = (
  select outcome.*, now_us
  from (select greatest(excluded.at_us, s.at_us) as now_us, {prefix}sliding_window_now(s.a, greatest(excluded.at_us, s.at_us)) as entry_us
        offset 0) as clock,
       -- How many entries have expired, and their sum.
       lateral (
         select case when s.d <= entry_us - $4::bigint then width_bucket(entry_us - $4::bigint, s.log_us) else 0 end as place
         offset 0) as expired,
       lateral (
         select case when place = 0 then 0 else s.log_sums[place] - s.log_sums[s.c] + s.b end as gone offset 0) as expired_sum,
       lateral {prefix}sliding_window_charge(s.b, s.a, gone, null, $3::bigint, $4::bigint, $5::bigint, entry_us) as fits,
       lateral (
         select fits.allowed and place < s.c and entry_us > s.a and s.tail_us = $4::bigint
                and s.log_sums[s.c] + $5::bigint <= 1152921504606846976 and s.c - place < {prefix}sliding_window_most($3::bigint)
                as is_append
         offset 0) as form,
       lateral (
         select entry_us, s.b - gone + $5::bigint, s.c - place + 1, s.log_us[place + 1], $4::bigint,
                case when place = 0 then s.log_us else s.log_us[place + 1 :] end || entry_us,
                case when place = 0 then s.log_sums else s.log_sums[place + 1 :] end || (s.log_sums[s.c] + $5::bigint), true
         where is_append
         union all
         select charge.*
         from {prefix}short_log_charge(
           s.a, s.b, s.c, s.d, s.tail_us, s.log_us, s.log_sums, $3::bigint, $4::bigint, $5::bigint, now_us) as charge
         where is_append is not true) as outcome)
where clock_timestamp() <= $7::timestamptz and (s.c = 0 or s.log_us is not null)
returning s.key, s.admitted, s.at_us,
  -- The log of an admitted charge may have older entries, if a version has a longer window.
  case when s.admitted
       then array[s.b - {prefix}short_log_sum_until(s.log_us, s.log_sums, s.b, s.at_us - $4::bigint) - $5::bigint, 0, 0]
       else {prefix}short_log_reading(s.a, s.b, s.log_us, s.log_sums, $3::bigint, $4::bigint, $5::bigint, false, s.at_us) end
