-- Leaky bucket: twin of leaky_bucket.rs; see there for the rule.
--
-- State and arithmetic are the token bucket's, read the other way round: what is missing there is what lies in this one. The
-- delay of an admitted charge is what was missing before it, and is worked out from that by leaky_bucket.rs. So this file has
-- one function only, and what else a bucket is asked is asked of token_bucket.sql.

create or replace function {prefix}leaky_bucket_charge(
    full_us bigint, full_rest bigint, c bigint, span_us bigint, span_rest bigint,
    price_us bigint, price_rest bigint, now_us bigint)
returns table (allowed boolean, missing_us bigint, missing_rest bigint, after_us bigint, after_rest bigint)
rows 1 immutable language sql as $$
  select * from {prefix}token_bucket_charge(full_us, full_rest, c, span_us, span_rest, price_us, price_rest, now_us)
$$;
