-- Leaky bucket: twin of leaky_bucket.rs; see there for the rule.
--
-- State and arithmetic are the token bucket's, read the other way round: what is missing there is what lies in this one. The
-- delay of an admitted charge is what was missing before it, and is worked out from that by leaky_bucket.rs. So this file has
-- one function only, and what else a bucket is asked is asked of token_bucket.sql.

create or replace function {prefix}leaky_bucket_charge(
    full_us bigint, full_rest bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[],
    c bigint, p bigint, burst bigint, keeps_instant bigint, price_us bigint, price_rest bigint, now_us bigint)
returns table (allowed boolean, missing_us bigint, missing_rest bigint,
               next_us bigint, next_rest bigint, next_extra bigint[])
rows 1 immutable language sql as $$
  select * from {prefix}token_bucket_charge(
    full_us, full_rest, under_c, under_p, under_burst, extra,
    c, p, burst, keeps_instant, price_us, price_rest, now_us)
$$;
