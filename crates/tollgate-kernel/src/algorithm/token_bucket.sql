-- Token bucket: twin of token_bucket.rs; see there for the rule.
--
-- State: full_us and full_rest, the instant at which the bucket is full, as whole us and a rest in units of 1/c us; zero is a
-- full bucket. The limit: c tokens every p us, span_us and span_rest to fill it, most_us the longest that a debt may take to
-- fill. A price is a cost in the same units; one that can never fit is told as price_us = -1. All sums stay below 2^63; the
-- products of an amount and p may pass it, so they are numeric, and dividing them by c rounds down and keeps the rest.

-- Answers allowed, what is missing before (us and rest), and the next state.
create or replace function {prefix}token_bucket_charge(
    full_us bigint, full_rest bigint, c bigint, span_us bigint, span_rest bigint,
    price_us bigint, price_rest bigint, now_us bigint)
returns table (allowed boolean, missing_us bigint, missing_rest bigint, after_us bigint, after_rest bigint)
rows 1 immutable language sql as $$
  -- Each `offset 0` has the planner work out what is within once, and not once for every mention.
  select price_us >= 0 and (after.us - now_us < span_us or after.us - now_us = span_us and after.rest <= span_rest),
         after.full_us - now_us, after.full_rest, after.us, after.rest
  from
    (select filled.us as full_us, filled.rest as full_rest,
            filled.us + price_us + case when filled.rest + price_rest >= c then 1 else 0 end as us,
            filled.rest + price_rest - case when filled.rest + price_rest >= c then c else 0 end as rest
     from
       -- A rest that was kept under another rate says less than a microsecond; it is taken as most of one.
       (select greatest(full_us, now_us) as us, case when full_us < now_us then 0 else least(full_rest, c - 1) end as rest
        offset 0) as filled
     offset 0) as after
$$;

-- What was missing before a charge of a price that left the state so: the whole us of it.
create or replace function {prefix}token_bucket_before_us(
    full_us bigint, full_rest bigint, price_us bigint, price_rest bigint, allowed boolean, now_us bigint)
returns bigint immutable language sql as $$
  select full_us - now_us - case when allowed then price_us + case when full_rest < price_rest then 1 else 0 end else 0 end
$$;

-- And the rest of it.
create or replace function {prefix}token_bucket_before_rest(
    full_rest bigint, c bigint, price_rest bigint, allowed boolean)
returns bigint immutable language sql as $$
  select full_rest - case when allowed then price_rest - case when full_rest < price_rest then c else 0 end else 0 end
$$;

-- Tokens go back into the bucket, up to full.
create or replace function {prefix}token_bucket_give_back(
    full_us bigint, full_rest bigint, c bigint, p bigint, amount bigint, now_us bigint)
returns table (next_us bigint, next_rest bigint)
rows 1 immutable language sql as $$
  select case when full_us < now_us then full_us when lower.us < now_us then now_us else lower.us::bigint end,
         case when full_us < now_us then full_rest when lower.us < now_us then 0 else lower.rest::bigint end
  from
    (select div(amount::numeric * p, c), mod(amount::numeric * p, c)) as returned (us, rest),
    lateral (select full_us - returned.us - case when full_rest < returned.rest then 1 else 0 end,
                    full_rest - returned.rest + case when full_rest < returned.rest then c else 0 end) as lower (us, rest)
$$;

-- Takes an amount whether it fits or not; a debt is bounded by most_us.
create or replace function {prefix}token_bucket_debit(
    full_us bigint, full_rest bigint, c bigint, p bigint, most_us bigint, amount bigint, now_us bigint)
returns table (next_us bigint, next_rest bigint)
rows 1 immutable language sql as $$
  select case when most_us <= missing.us and after.us >= most_us then greatest(full_us, now_us)
              when after.us >= most_us then now_us + most_us
              else now_us + after.us::bigint end,
         case when most_us <= missing.us and after.us >= most_us then missing.rest
              when after.us >= most_us then 0
              else after.rest::bigint end
  from
    (select div(amount::numeric * p, c), mod(amount::numeric * p, c)) as price (us, rest),
    lateral (select greatest(full_us - now_us, 0), case when full_us < now_us then 0 else full_rest end) as missing (us, rest),
    lateral (select missing.us + price.us, missing.rest + price.rest) as uncarried (us, rest),
    lateral (select uncarried.us + case when uncarried.rest >= c then 1 else 0 end,
                    uncarried.rest - case when uncarried.rest >= c then c else 0 end) as after (us, rest)
$$;
