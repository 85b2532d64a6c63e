-- Token bucket: twin of token_bucket.rs; see there for the rule.
--
-- State: full_us and full_rest, the instant at which the bucket is full, as whole us and a rest in units of 1/c us, zero for a full
-- bucket; the numbers that this is written under: under_c, under_p and under_burst, null for those of the reader of the state; and
-- extra, null for nearly all: wider_us and wider_rest, when a bucket with a larger burst would be full, zero where that is the same,
-- and changed_at_us, changed_c and changed_p, the last change of numbers and the fastest rate before it, null where there is
-- none. The limit: c tokens
-- every p us, burst, debt_us the longest refill that a debt may take, and keeps_instant (0 or 1). A price is a cost in the units of
-- the limit; one that can never fit is price_us = -1. All sums stay below 2^63; a product of an amount and p, or of units under
-- other numbers, may pass it, so those are numeric.

-- So many tokens in other units: units * to_p / from_p.
create or replace function {prefix}token_bucket_carried(units numeric, from_p bigint, to_p bigint, rounds_up boolean)
returns numeric immutable language sql as $$
  select case when from_p = to_p then units
              when rounds_up then div(units * to_p + from_p - 1, from_p)
              else div(units * to_p, from_p) end
$$;

-- How long a full bucket takes to fill, rounded up.
create or replace function {prefix}token_bucket_time_to_fill(c bigint, p bigint, burst bigint)
returns bigint immutable language sql as $$
  select (burst * p + c - 1) / c
$$;

-- The third part of an adopted state on, as it is kept.
create or replace function {prefix}token_bucket_extra(adopted bigint[])
returns bigint[] immutable language sql as $$
  select case when adopted[3] = 0 and adopted[5] is null then null else adopted[3 : 7] end
$$;

-- The state as a bucket of these numbers writes it at now_us: full_us, full_rest, wider_us, wider_rest, changed_at_us, changed_c,
-- changed_p. Waits are bounded by 2^62 us, which only a change between the slowest and the fastest rate could pass.
create or replace function {prefix}token_bucket_adopted(
    full_us bigint, full_rest bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[],
    c bigint, p bigint, burst bigint, keeps_instant bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  most constant numeric := 4611686018427387904::numeric * c;
  wider_us constant bigint := coalesce(extra[1], 0);
  wider_rest constant bigint := coalesce(extra[2], 0);
  changed_at_us bigint := extra[3];
  changed_c bigint := extra[4];
  changed_p bigint := extra[5];
  is_over constant boolean := now_us - changed_at_us
    >= {prefix}token_bucket_time_to_fill(coalesce(under_c, c), coalesce(under_p, p), coalesce(under_burst, burst));
  missing numeric;
  total numeric;
  debt numeric;
  counted numeric;
  kept numeric;
begin
  if under_c is null then
    -- A rest that was kept under an unknown rate says less than a microsecond; it is taken as most of one.
    return array[full_us, least(full_rest, c - 1), wider_us, wider_rest, null, null, null];
  end if;
  if is_over then
    changed_at_us := null;
    changed_c := null;
    changed_p := null;
  end if;
  if under_c = c and under_p = p and under_burst = burst then
    return array[full_us, full_rest, wider_us, wider_rest, changed_at_us, changed_c, changed_p];
  elsif keeps_instant = 1 then
    kept := div(full_rest::numeric * c + under_c - 1, under_c);
    return array[full_us + div(kept, c), mod(kept, c), 0, 0, null, null, null]::bigint[];
  end if;
  if changed_c is null or changed_c::numeric * under_p <= under_c::numeric * changed_p then
    changed_c := under_c;
    changed_p := under_p;
  end if;
  missing := greatest((full_us - now_us)::numeric * under_c + full_rest, 0);
  total := greatest(missing, (wider_us - now_us)::numeric * under_c + wider_rest);
  debt := greatest(missing - under_burst::numeric * under_p, 0);
  counted := {prefix}token_bucket_carried(case when burst > under_burst then total else missing end, under_p, p, true);
  kept := least(counted, burst::numeric * p + {prefix}token_bucket_carried(debt, under_p, p, true), most);
  total := least({prefix}token_bucket_carried(total, under_p, p, true), most);
  return array[
    now_us + div(kept, c), mod(kept, c),
    case when total > kept then now_us + div(total, c) else 0 end, case when total > kept then mod(total, c) else 0 end,
    now_us, changed_c, changed_p]::bigint[];
end
$$;

-- The charge of a bucket whose state is not a single instant under the numbers of the limit: allowed (0 or 1), what is missing before
-- (us and rest), and the next state, under the numbers of the limit: charged, or only adopted.
create or replace function {prefix}token_bucket_charge_changed(
    full_us bigint, full_rest bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[],
    c bigint, p bigint, burst bigint, keeps_instant bigint, price_us bigint, price_rest bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  adopted bigint[] := {prefix}token_bucket_adopted(
    full_us, full_rest, under_c, under_p, under_burst, extra,
    c, p, burst, keeps_instant, now_us);
  filled_us constant bigint := greatest(adopted[1], now_us);
  filled_rest constant bigint := case when adopted[1] < now_us then 0 else adopted[2] end;
  after_us bigint := filled_us + price_us;
  after_rest bigint := filled_rest + price_rest;
  moved_us bigint;
  moved_rest bigint;
begin
  if after_rest >= c then
    after_us := after_us + 1;
    after_rest := after_rest - c;
  end if;
  if price_us < 0 or after_us - now_us > burst * p / c
      or after_us - now_us = burst * p / c and after_rest > burst * p % c then
    return array[0, filled_us - now_us, filled_rest, adopted[1], adopted[2]] || {prefix}token_bucket_extra(adopted);
  end if;
  -- The second instant moves with the first, and goes where it says no more than that.
  if adopted[3] > 0 then
    moved_us := greatest(adopted[3], now_us) + price_us;
    moved_rest := case when adopted[3] < now_us then 0 else adopted[4] end + price_rest;
    if moved_rest >= c then
      moved_us := moved_us + 1;
      moved_rest := moved_rest - c;
    end if;
    if (moved_us, moved_rest) > (after_us, after_rest) then
      adopted[3] := moved_us;
      adopted[4] := moved_rest;
    else
      adopted[3] := 0;
      adopted[4] := 0;
    end if;
  end if;
  return array[1, filled_us - now_us, filled_rest, after_us, after_rest] || {prefix}token_bucket_extra(adopted);
end
$$;

-- Answers allowed, what is missing before (us and rest), and the next state, under the numbers of the limit: charged, or only adopted.
create or replace function {prefix}token_bucket_charge(
    full_us bigint, full_rest bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[],
    c bigint, p bigint, burst bigint, keeps_instant bigint, price_us bigint, price_rest bigint, now_us bigint)
returns table (allowed boolean, missing_us bigint, missing_rest bigint,
               next_us bigint, next_rest bigint, next_extra bigint[])
rows 1 immutable language sql as $$
  -- Each `offset 0` has the planner work out what is within once, and not once for every mention. A state that is a single instant
  -- under the same numbers, as nearly all are, is decided here; any other by a function of its own, whose text costs nobody else.
  select fit.allowed,
         case when fit.other is null then fit.us - now_us else fit.other[2] end,
         case when fit.other is null then fit.rest else fit.other[3] end,
         case when fit.other is not null then fit.other[4] when fit.allowed then fit.after_us else full_us end,
         case when fit.other is not null then fit.other[5] when fit.allowed then fit.after_rest else full_rest end,
         nullif(fit.other[6 : 10], '{}')
  from
    (select after.*,
            case when other is not null then other[1] = 1
                 else price_us >= 0 and (after_us - now_us < burst * p / c
                                         or after_us - now_us = burst * p / c and after_rest <= burst * p % c) end as allowed
     from
       (select filled.*,
               filled.us + price_us + case when filled.rest + price_rest >= c then 1 else 0 end as after_us,
               filled.rest + price_rest - case when filled.rest + price_rest >= c then c else 0 end as after_rest
        from
          (select greatest(full_us, now_us) as us, case when full_us < now_us then 0 else full_rest end as rest,
                  case when under_c = c and under_p = p and under_burst = burst and extra is null then null
                       else {prefix}token_bucket_charge_changed(
                         full_us, full_rest, under_c, under_p, under_burst, extra,
                         c, p, burst, keeps_instant, price_us, price_rest, now_us) end as other
           offset 0) as filled
        offset 0) as after
     offset 0) as fit
$$;

-- How long after full_us the state says no more than none would.
create or replace function {prefix}token_bucket_tail_us(
    full_us bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[])
returns bigint immutable language plpgsql as $$
begin
  return 1 + greatest(
    extra[1] - full_us, extra[3] + {prefix}token_bucket_time_to_fill(under_c, under_p, under_burst) - full_us, 0);
end
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

-- What a charge took and has not refilled since, by one rate, in units of another; rounds down.
create or replace function {prefix}token_bucket_not_refilled(
    cost bigint, elapsed_us bigint, by_c bigint, by_p bigint, units_p bigint)
returns numeric immutable language sql as $$
  select {prefix}token_bucket_carried(
    greatest(cost::numeric * by_p - elapsed_us::numeric * by_c, 0), by_p, units_p, false)
$$;

-- What goes back of a charge of so much, in the units of the state: at most the amount, and what has not refilled since.
create or replace function {prefix}token_bucket_returned(
    cost bigint, amount bigint, elapsed_us bigint, units_c bigint, units_p bigint, c bigint, p bigint,
    taken_at_us bigint, adopted bigint[])
returns numeric immutable language sql as $$
  select least(
    amount::numeric * units_p,
    {prefix}token_bucket_not_refilled(cost, elapsed_us, units_c, units_p, units_p),
    {prefix}token_bucket_not_refilled(cost, elapsed_us, c, p, units_p),
    case when taken_at_us < adopted[5]
         then {prefix}token_bucket_not_refilled(cost, elapsed_us, adopted[6], adopted[7], units_p) end)
$$;

-- Tokens go back into the bucket, up to full, in the units that the state is written in: at most what has not refilled since the
-- charge, by the numbers of the charge, by those of the state and, if the charge is older than a change, by the fastest before it.
create or replace function {prefix}token_bucket_give_back(
    full_us bigint, full_rest bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[],
    c bigint, p bigint, burst bigint, keeps_instant bigint,
    taken_cost bigint, taken_at_us bigint, amount bigint, now_us bigint,
    out next_us bigint, out next_rest bigint, out next_c bigint, out next_p bigint, out next_burst bigint,
    out next_extra bigint[])
immutable language plpgsql as $$
declare
  elapsed_us constant bigint := greatest(now_us - taken_at_us, 0);
  adopted bigint[] := array[
    full_us, full_rest, coalesce(extra[1], 0), coalesce(extra[2], 0), extra[3], extra[4], extra[5]];
  units_c bigint := coalesce(under_c, c);
  units_p bigint := coalesce(under_p, p);
  is_wider boolean;
  full_at numeric;
  left_at numeric;
  wider_at numeric;
begin
  next_c := under_c;
  next_p := under_p;
  next_burst := under_burst;
  if keeps_instant = 1 then
    adopted := {prefix}token_bucket_adopted(
      full_us, full_rest, under_c, under_p, under_burst, extra,
      c, p, burst, keeps_instant, now_us);
    units_c := c;
    units_p := p;
    next_c := c;
    next_p := p;
    next_burst := burst;
  end if;
  -- Both instants in units from now on. The second counts all of the charge. The first has at most a burst of it, and none of it as
  -- long as other charges alone are enough to empty the bucket.
  wider_at := greatest((adopted[3] - now_us)::numeric * units_c + adopted[4], 0);
  is_wider := adopted[3] > 0 and wider_at > 0;
  wider_at := greatest(wider_at - {prefix}token_bucket_returned(
    taken_cost, amount, elapsed_us, units_c, units_p, c, p, taken_at_us, adopted), 0);
  full_at := (adopted[1] - now_us)::numeric * units_c + adopted[2];
  next_us := adopted[1];
  next_rest := adopted[2];
  if full_at > 0 then
    left_at := greatest(full_at - {prefix}token_bucket_returned(
      least(taken_cost, coalesce(next_burst, burst)), amount, elapsed_us, units_c, units_p, c, p, taken_at_us, adopted), 0);
    full_at := least(full_at, case when is_wider
      then greatest(left_at, least(wider_at, coalesce(next_burst, burst)::numeric * units_p)) else left_at end);
    next_us := now_us + div(full_at, units_c);
    next_rest := mod(full_at, units_c);
  end if;
  if adopted[3] > 0 then
    adopted[3] := case when wider_at > greatest(full_at, 0) then now_us + div(wider_at, units_c) else 0 end;
    adopted[4] := case when wider_at > greatest(full_at, 0) then mod(wider_at, units_c) else 0 end;
  end if;
  next_extra := {prefix}token_bucket_extra(adopted);
end
$$;

-- Takes an amount whether it fits or not, in the units that the state is written in; a debt is bounded by debt_us and 2^62 units.
create or replace function {prefix}token_bucket_debit(
    full_us bigint, full_rest bigint, under_c bigint, under_p bigint, under_burst bigint, extra bigint[],
    c bigint, p bigint, burst bigint, debt_us bigint, keeps_instant bigint, amount bigint, now_us bigint,
    out next_us bigint, out next_rest bigint, out next_c bigint, out next_p bigint, out next_burst bigint,
    out next_extra bigint[])
immutable language plpgsql as $$
declare
  adopted bigint[] := array[
    full_us, full_rest, coalesce(extra[1], 0), coalesce(extra[2], 0), extra[3], extra[4], extra[5]];
  is_wider boolean;
  price numeric;
  debt numeric;
  most numeric;
  full_at numeric;
  wider_at numeric;
begin
  next_c := under_c;
  next_p := under_p;
  next_burst := under_burst;
  if keeps_instant = 1 or under_c is null then
    adopted := {prefix}token_bucket_adopted(
      full_us, full_rest, under_c, under_p, under_burst, extra,
      c, p, burst, keeps_instant, now_us);
    next_c := c;
    next_p := p;
    next_burst := burst;
  end if;
  price := least(amount, 9007199254740991)::numeric * next_p;
  debt := least(debt_us, 4611686018427387904 / next_c)::numeric * next_c;
  most := next_burst::numeric * next_p + debt;
  -- Both instants in units from now on.
  full_at := (adopted[1] - now_us)::numeric * next_c + adopted[2];
  wider_at := (adopted[3] - now_us)::numeric * next_c + adopted[4];
  is_wider := adopted[3] > 0 and wider_at > 0 or burst > next_burst;
  wider_at := greatest(wider_at, full_at, 0);
  full_at := greatest(full_at, least(greatest(full_at, 0) + price, most));
  next_us := now_us + div(full_at, next_c);
  next_rest := mod(full_at, next_c);
  if is_wider and keeps_instant <> 1 then
    -- What a larger burst would miss is kept, up to sixteen times what this one may.
    most := least(16 * (greatest(burst, next_burst) + div(debt, next_p)), 9007199254740991) * next_p;
    wider_at := greatest(wider_at, least(wider_at + price, most));
    adopted[3] := case when wider_at > full_at then now_us + div(wider_at, next_c) else 0 end;
    adopted[4] := case when wider_at > full_at then mod(wider_at, next_c) else 0 end;
  end if;
  next_extra := {prefix}token_bucket_extra(adopted);
end
$$;
