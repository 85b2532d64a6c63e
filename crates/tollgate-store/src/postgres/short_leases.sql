-- Few leases: leases that are stored in the state, so that a charge is one row. See entries.sql for more of them.
--
-- The form is that of a short log (short_log.sql): log_us has the ends in increasing order, and log_sums the running sums, which
-- include a constant for dropped leases. holders has the holder of each, and is null if none has one, as with charges without a
-- hold; leases with the same end are in the order of their holders. All three are null if there is no lease or they are in
-- chunks. The limiter arithmetic is in the twin; these functions compute the inputs of the twin.

-- How many leases a state may have: a row of this many is still stored inline, without compression.
create or replace function {prefix}short_leases_most(have_holders boolean) returns integer immutable language sql as $$
  select case when have_holders then 56 else 100 end
$$;

-- A charge on few leases or none: the next state, and whether it is allowed. No holder is null.
create or replace function {prefix}short_leases_charge(
    newest_us bigint, total bigint, leases bigint, first_us bigint, ends_us bigint[], sums bigint[], holders uuid[],
    "limit" bigint, lease_us bigint, cost bigint, holder uuid, now_us bigint,
    out next_newest_us bigint, out next_total bigint, out next_leases bigint, out next_first_us bigint,
    out next_ends_us bigint[], out next_sums bigint[], out next_holders uuid[], out allowed boolean)
immutable language plpgsql as $$
#variable_conflict use_variable
declare
  end_us constant bigint := {prefix}concurrency_end(lease_us, now_us);
  ended bigint := 0;
  place integer := 0;
begin
  next_newest_us := newest_us;
  next_total := total;
  next_leases := leases;
  next_first_us := first_us;
  next_ends_us := ends_us;
  next_sums := sums;
  next_holders := holders;
  if leases > 0 and first_us <= now_us then
    place := width_bucket(now_us, ends_us);
    ended := sums[place] - sums[leases] + total;
  end if;
  allowed := c.allowed from {prefix}concurrency_acquire(total, newest_us, ended, null, "limit", cost, now_us) as c;
  if not allowed then
    return;
  end if;
  next_total := total - ended + cost;
  if place = leases then
    next_ends_us := array[end_us];
    next_sums := array[cost];
    next_holders := case when holder is not null then array[holder] end;
    next_newest_us := end_us;
    next_leases := 1;
    next_first_us := end_us;
    return;
  elsif place > 0 then
    next_ends_us := ends_us[place + 1 :];
    next_sums := sums[place + 1 :];
    next_holders := holders[place + 1 :];
  end if;
  if end_us > newest_us and (holder is null) = (holders is null) then
    -- It ends after all others, as most do.
    next_ends_us := next_ends_us || end_us;
    next_sums := next_sums || (sums[leases] + cost);
    if holder is not null then
      next_holders := next_holders || holder;
    end if;
    next_newest_us := end_us;
  else
    select placed.* into next_ends_us, next_sums, next_holders
    from {prefix}short_leases_insert(
      next_ends_us, next_sums, next_holders, total - ended, end_us,
      coalesce(holder, '00000000-0000-0000-0000-000000000000'), cost) as placed;
    next_newest_us := greatest(newest_us, end_us);
  end if;
  next_leases := cardinality(next_ends_us);
  next_first_us := next_ends_us[1];
  if next_sums[next_leases] > 1152921504606846976 then
    next_sums := {prefix}short_log_rebased(next_sums, next_total);
  end if;
end
$$;

-- Inserts a lease at its position. No holder is zero here.
create or replace function {prefix}short_leases_insert(
    inout ends_us bigint[], inout sums bigint[], inout holders uuid[], total bigint, lease_end_us bigint, lease_holder uuid,
    cost bigint)
immutable language plpgsql as $$
declare
  nobody constant uuid := '00000000-0000-0000-0000-000000000000';
  leases constant integer := coalesce(cardinality(ends_us), 0);
  place integer;
begin
  if leases = 0 then
    ends_us := array[lease_end_us];
    sums := array[cost];
    holders := case when lease_holder <> nobody then array[lease_holder] end;
    return;
  elsif holders is null and lease_holder <> nobody then
    holders := array_fill(nobody, array[leases]);
  end if;
  place := {prefix}entries_place(ends_us, holders, lease_end_us, lease_holder);
  if ends_us[place] = lease_end_us and coalesce(holders[place], nobody) = lease_holder then
    sums := {prefix}entries_sums(sums, place, 0, cost);
    return;
  end if;
  sums := sums[1 : place] || {prefix}entries_sums(
    coalesce(sums[place], sums[leases] - total) || sums[place + 1 :], 1, 0, cost);
  ends_us := ends_us[1 : place] || lease_end_us || ends_us[place + 1 :];
  if holders is not null then
    holders := holders[1 : place] || lease_holder || holders[place + 1 :];
  end if;
end
$$;

-- The reading of a denied charge: what is held, how long to wait, and how long until the last lease ends.
create or replace function {prefix}short_leases_reading(
    newest_us bigint, total bigint, ends_us bigint[], sums bigint[], "limit" bigint, cost bigint, now_us bigint)
returns bigint[] immutable language plpgsql as $$
declare
  ended constant bigint := {prefix}short_log_sum_until(ends_us, sums, total, now_us);
  wanted constant bigint := {prefix}concurrency_wanted(total, ended, "limit", cost);
  enough_us bigint;
begin
  if wanted > 0 then
    enough_us := {prefix}short_log_first_to_sum(ends_us, sums, total, ended + wanted);
  end if;
  return (select array[c.held, c.wait_us, c.last_us]
          from {prefix}concurrency_acquire(total, newest_us, ended, enough_us, "limit", cost, now_us) as c);
end
$$;
