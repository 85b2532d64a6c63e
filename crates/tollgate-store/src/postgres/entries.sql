-- The entries of logs and leases. Twin of the kernel's entries.rs, on tables. All functions here expect the state to be locked,
-- or only read; those that change entries return the state that is to be written.
--
-- An entry has an instant (of the charge, or the end of the lease) and a cost; a lease also has a holder. Entries are ordered by
-- instant and holder, in chunks of up to 64 (leases: 32) with the running sums. So an entry is found by a binary search in its
-- chunk, and the sum before it is the sum of the earlier chunks: one small row for 64 entries. A charge touches the newest chunk
-- and, if entries have expired, the oldest; only a read that has to sum or to compute a wait reads the sums of chunks between. A
-- short log and few leases are not in chunks but in their state: see short_log.sql and short_leases.sql. In a log each instant
-- has one entry, there is no holder, and the state names the newest chunk (e). Functions that read these rows until they have
-- enough make the planner use the order of the index, whatever the statistics of a new table say: a sort would read all rows.

-- How many entries of a chunk are not after an instant and holder.
create or replace function {prefix}entries_place(at_us bigint[], holders uuid[], entry_us bigint, holder uuid)
returns integer immutable language plpgsql as $$
declare
  place integer := width_bucket(entry_us, at_us);
begin
  while at_us[place] = entry_us and holders[place] > holder loop
    place := place - 1;
  end loop;
  return place;
end
$$;

-- The sum of the entries up to and including an instant.
create or replace function {prefix}entries_sum_until(seen {prefix}state, until_us bigint)
returns bigint stable language plpgsql as $$
begin
  if seen.c = 0 or seen.d > until_us then
    return 0;
  elsif seen.a <= until_us then
    return seen.b;
  elsif seen.log_us is not null then
    return {prefix}short_log_sum_until(seen.log_us, seen.log_sums, seen.b, until_us);
  end if;
  return (
    select sum(case when e.last_us <= until_us then e.total else coalesce(e.sums[width_bucket(until_us, e.at_us)], 0) end
               - case when e.first_us < seen.d then coalesce(e.sums[width_bucket(seen.d - 1, e.at_us)], 0) else 0 end)
    from {prefix}execution as e where e.key = seen.key and e.first_us <= until_us);
end
$$;

-- The time of the first entry at which the running sum, from the oldest on, reaches an amount. The search starts at the nearer
-- end.
create or replace function {prefix}entries_first_to_sum(seen {prefix}state, wanted bigint)
returns bigint stable language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
  chunk record;
  rest bigint;
begin
  if wanted > seen.b then
    return null;
  elsif seen.log_us is not null then
    return {prefix}short_log_first_to_sum(seen.log_us, seen.log_sums, seen.b, wanted);
  elsif wanted > seen.b / 2 then
    -- The entries after it may stay.
    rest := seen.b - wanted;
    for chunk in
      select e.first_us, e.first_holder, e.total
      from {prefix}execution as e where e.key = seen.key order by e.first_us desc, e.first_holder desc
    loop
      if chunk.total > rest then
        return (select e.at_us[width_bucket(e.total - rest - 1, e.sums) + 1]
                from {prefix}execution as e
                where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder);
      end if;
      rest := rest - chunk.total;
    end loop;
  else
    rest := wanted;
    for chunk in
      select e.first_us, e.first_holder,
             e.total - case when e.first_us < seen.d then coalesce(e.sums[width_bucket(seen.d - 1, e.at_us)], 0) else 0 end as total
      from {prefix}execution as e where e.key = seen.key order by e.first_us, e.first_holder
    loop
      if chunk.total >= rest then
        return (select e.at_us[width_bucket(e.total - chunk.total + rest - 1, e.sums) + 1]
                from {prefix}execution as e
                where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder);
      end if;
      rest := rest - chunk.total;
    end loop;
  end if;
  return null;
end
$$;

-- Drops all entries.
create or replace function {prefix}entries_none(seen {prefix}state)
returns {prefix}state volatile language plpgsql as $$
begin
  if seen.log_us is null then
    delete from {prefix}execution as e where e.key = seen.key;
  end if;
  seen.a := 0;
  seen.b := 0;
  seen.c := 0;
  seen.log_us := null;
  seen.log_sums := null;
  seen.holders := null;
  return seen;
end
$$;

-- Writes the entries of a short log as a chunk.
create or replace function {prefix}log_to_chunk(seen {prefix}state)
returns {prefix}state volatile language plpgsql as $$
begin
  insert into {prefix}execution (key, first_us, last_us, total, at_us, sums)
  values (seen.key, seen.log_us[1], seen.a, seen.b, seen.log_us, {prefix}short_log_rebased(seen.log_sums, seen.b));
  seen.e := seen.log_us[1];
  seen.log_us := null;
  seen.log_sums := null;
  return seen;
end
$$;

-- Moves the entries of a few chunks into the state.
create or replace function {prefix}log_from_chunks(seen {prefix}state)
returns {prefix}state volatile language plpgsql as $$
begin
  select array_agg(n.at_us order by n.at_us), array_agg(n.sum order by n.at_us) into seen.log_us, seen.log_sums
  from (select entry.at_us,
               (sum(e.sums[entry.place] - coalesce(e.sums[entry.place - 1], 0)) over (order by entry.at_us))::bigint as sum
        from {prefix}execution as e, unnest(e.at_us) with ordinality as entry (at_us, place)
        where e.key = seen.key and entry.at_us >= seen.d) as n;
  delete from {prefix}execution as e where e.key = seen.key;
  return seen;
end
$$;

-- Drops the entries up to and including an instant. Whole chunks are deleted; in the oldest remaining chunk only the state says
-- which entries are gone.
create or replace function {prefix}entries_drop_until(seen {prefix}state, until_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  oldest record;
  gone record;
  place integer;
begin
  if seen.c = 0 or seen.d > until_us then
    return seen;
  elsif seen.a <= until_us then
    return {prefix}entries_none(seen);
  elsif seen.log_us is not null then
    place := width_bucket(until_us, seen.log_us);
    seen.b := seen.log_sums[cardinality(seen.log_sums)] - seen.log_sums[place];
    seen.c := seen.c - place;
    seen.log_us := seen.log_us[place + 1 :];
    seen.log_sums := seen.log_sums[place + 1 :];
    seen.holders := seen.holders[place + 1 :];
    seen.d := seen.log_us[1];
    return seen;
  end if;
  select e.last_us, e.before, coalesce(e.sums[e.before], 0) as sum_before,
         e.until, coalesce(e.sums[e.until], 0) as sum_until, e.at_us[e.until + 1] as next_us into oldest
  from (select x.*, width_bucket(seen.d - 1, x.at_us) as before, width_bucket(until_us, x.at_us) as until
        from {prefix}execution as x where x.key = seen.key order by x.first_us, x.first_holder limit 1) as e;
  seen.b := seen.b + oldest.sum_before;
  seen.c := seen.c + oldest.before;
  if oldest.last_us <= until_us then
    with deleted as (
      delete from {prefix}execution as e where e.key = seen.key and e.first_us <= until_us and e.last_us <= until_us
      returning e.total, cardinality(e.at_us) as entries)
    select sum(d.total) as total, sum(d.entries) as entries into gone from deleted as d;
    seen.b := seen.b - gone.total;
    seen.c := seen.c - gone.entries;
    select e.until, coalesce(e.sums[e.until], 0) as sum_until, e.at_us[e.until + 1] as next_us into oldest
    from (select x.*, width_bucket(until_us, x.at_us) as until
          from {prefix}execution as x where x.key = seen.key order by x.first_us, x.first_holder limit 1) as e;
  end if;
  seen.b := seen.b - oldest.sum_until;
  seen.c := seen.c - oldest.until;
  seen.d := oldest.next_us;
  return seen;
end
$$;

-- Keeps the entries that a window may count, and drops those that no window of the log's charges counts any more.
create or replace function {prefix}log_keep_for(seen {prefix}state, window_us bigint, now_us bigint)
returns {prefix}state volatile language plpgsql as $$
begin
  seen.tail_us := {prefix}sliding_window_keep(seen.tail_us, window_us);
  if seen.c > 0 and seen.d <= now_us - seen.tail_us then
    seen := {prefix}entries_drop_until(seen, now_us - seen.tail_us);
  end if;
  if seen.c = 0 then
    seen.tail_us := window_us;
  end if;
  return seen;
end
$$;

-- Adds an entry that is not before the newest. A log with more than this many entries is no longer short.
create or replace function {prefix}log_push(seen {prefix}state, entry_us bigint, charged bigint, most_in_state integer)
returns {prefix}state volatile language plpgsql as $$
declare
  entries constant integer := coalesce(cardinality(seen.log_us), 0);
begin
  if seen.c = 0 then
    seen.log_us := array[entry_us];
    seen.log_sums := array[charged];
    seen.a := entry_us;
    seen.b := charged;
    seen.c := 1;
    seen.d := entry_us;
    return seen;
  elsif entries > 0 and (entries < most_in_state or seen.a = entry_us) then
    if seen.a = entry_us then
      seen.log_sums[entries] := seen.log_sums[entries] + charged;
    else
      seen.log_us := seen.log_us || entry_us;
      seen.log_sums := seen.log_sums || (seen.log_sums[entries] + charged);
      seen.c := seen.c + 1;
    end if;
    seen.a := entry_us;
    seen.b := seen.b + charged;
    if seen.log_sums[cardinality(seen.log_sums)] > 1152921504606846976 then
      seen.log_sums := {prefix}short_log_rebased(seen.log_sums, seen.b);
    end if;
    return seen;
  elsif entries > 0 then
    seen := {prefix}log_to_chunk(seen);
  end if;
  if seen.a = entry_us then
    update {prefix}execution as e
    set total = e.total + charged, sums[cardinality(e.sums)] = e.total + charged
    where e.key = seen.key and e.first_us = seen.e;
    seen.b := seen.b + charged;
    return seen;
  end if;
  update {prefix}execution as e
  set last_us = entry_us, total = e.total + charged, at_us = e.at_us || entry_us, sums = e.sums || (e.total + charged)
  where e.key = seen.key and e.first_us = seen.e and cardinality(e.at_us) < 64;
  if not found then
    insert into {prefix}execution (key, first_us, last_us, total, at_us, sums)
    values (seen.key, entry_us, entry_us, charged, array[entry_us], array[charged]);
    seen.e := entry_us;
  end if;
  seen.a := entry_us;
  seen.b := seen.b + charged;
  seen.c := seen.c + 1;
  return seen;
end
$$;

-- Merges the oldest entry into the next one, if that is not later than an instant; returns the state unchanged if it is.
create or replace function {prefix}log_merge_oldest_until(seen {prefix}state, until_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  later record;
begin
  if seen.c < 2 or seen.d >= until_us then
    return seen;
  elsif seen.log_us is not null then
    if seen.log_us[2] <= until_us then
      seen.log_us := seen.log_us[2 :];
      seen.log_sums := seen.log_sums[2 :];
      seen.c := seen.c - 1;
      seen.d := seen.log_us[1];
    end if;
    return seen;
  end if;
  select e.first_us, e.place, e.at_us[e.place + 1] as next_us,
         e.sums[e.place] - coalesce(e.sums[e.place - 1], 0) as cost into chunk
  from (select x.*, width_bucket(seen.d, x.at_us) as place
        from {prefix}execution as x where x.key = seen.key order by x.first_us limit 1) as e;
  if chunk.next_us is not null then
    if chunk.next_us > until_us then
      return seen;
    end if;
    -- The running sum of the next entry stays, so the next entry takes over what the oldest had.
    update {prefix}execution as e set sums[chunk.place] = coalesce(e.sums[chunk.place - 1], 0)
    where e.key = seen.key and e.first_us = chunk.first_us;
    seen.d := chunk.next_us;
  else
    select e.first_us, e.at_us[1] as next_us into later
    from {prefix}execution as e where e.key = seen.key and e.first_us > chunk.first_us order by e.first_us limit 1;
    if later.next_us > until_us then
      return seen;
    end if;
    delete from {prefix}execution as e where e.key = seen.key and e.first_us = chunk.first_us;
    update {prefix}execution as e
    set total = e.total + chunk.cost, sums = array(select s + chunk.cost from unnest(e.sums) with ordinality as u (s, n) order by n)
    where e.key = seen.key and e.first_us = later.first_us;
    seen.d := later.next_us;
  end if;
  seen.c := seen.c - 1;
  return seen;
end
$$;

-- Adds a charge that fits.
create or replace function {prefix}log_take(
    seen {prefix}state, most bigint, window_us bigint, charged bigint, now_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  entries bigint;
begin
  if seen.c > 0 and seen.d > now_us - {prefix}sliding_window_keep(seen.tail_us, window_us) then
    -- No entry has expired.
    seen.tail_us := {prefix}sliding_window_keep(seen.tail_us, window_us);
  else
    seen := {prefix}log_keep_for(seen, window_us, now_us);
  end if;
  if most <= 100 and seen.c between 1 and 64 and seen.log_us is null then
    seen := {prefix}log_from_chunks(seen);
  end if;
  seen := {prefix}log_push(seen, now_us, charged, case when most <= 100 then 164 else 64 end);
  if seen.c <= {prefix}sliding_window_most(most) then
    return seen;
  end if;
  -- Each charge adds one entry, so merging two makes room however many there are.
  for turn in 1 .. 2 loop
    exit when seen.c <= {prefix}sliding_window_most(most) or now_us < window_us;
    entries := seen.c;
    seen := {prefix}log_merge_oldest_until(seen, now_us - window_us);
    exit when seen.c = entries;
  end loop;
  return seen;
end
$$;

-- Takes an amount whether it fits or not.
create or replace function {prefix}log_debit(seen {prefix}state, window_us bigint, amount bigint, now_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  taken bigint;
begin
  seen := {prefix}log_keep_for(seen, window_us, now_us);
  taken := {prefix}sliding_window_debit(seen.b, amount);
  if taken > 0 then
    seen := {prefix}log_push(seen, now_us, taken, 164);
  end if;
  return seen;
end
$$;

-- Reduces the entry of an instant and holder by an amount, and drops the entry if nothing is left. In a log the holder is zero.
create or replace function {prefix}entries_give_back(seen {prefix}state, entry_us bigint, holder uuid, amount bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  taken bigint;
begin
  if seen.c = 0 or entry_us < seen.d or entry_us > seen.a then
    return seen;
  elsif seen.log_us is not null then
    return {prefix}short_log_give_back(seen, entry_us, holder, amount);
  elsif seen.c = 1 and amount >= seen.b then
    delete from {prefix}execution as e
    where e.key = seen.key and coalesce(e.holders[cardinality(e.holders)], '00000000-0000-0000-0000-000000000000') = holder;
    if found then
      seen.a := 0;
      seen.b := 0;
      seen.c := 0;
    end if;
    return seen;
  end if;
  select e.first_us, e.first_holder, e.place, e.at_us[e.place] as entry_us,
         coalesce(e.holders[e.place], '00000000-0000-0000-0000-000000000000') as holder, e.holders is null as is_log,
         e.sums[e.place] - coalesce(e.sums[e.place - 1], 0) as cost,
         e.at_us[e.place - 1] as before_us, e.at_us[e.place + 1] as after_us,
         cardinality(e.at_us) as entries, cardinality(e.at_us) - width_bucket(seen.d - 1, e.at_us) = seen.c as is_only into chunk
  from (select x.*, {prefix}entries_place(x.at_us, x.holders, entry_us, holder) as place
        from {prefix}execution as x where x.key = seen.key and (x.first_us, x.first_holder) <= (entry_us, holder)
        order by x.first_us desc, x.first_holder desc limit 1) as e;
  if chunk.entry_us is distinct from entry_us or chunk.holder <> holder then
    return seen;
  end if;
  taken := least(amount, chunk.cost);
  seen.b := seen.b - taken;
  if taken < chunk.cost then
    update {prefix}execution as e
    set total = e.total - taken, sums = {prefix}entries_sums(e.sums, chunk.place, 0, -taken)
    where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder;
    return seen;
  end if;
  seen.c := seen.c - 1;
  -- Entries before the oldest one are gone already.
  if chunk.before_us < seen.d then
    chunk.before_us := null;
  end if;
  if chunk.before_us is null and chunk.after_us is null then
    delete from {prefix}execution as e
    where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder;
  else
    update {prefix}execution as e
    set total = e.total - taken,
        last_us = case when chunk.after_us is null then chunk.before_us else e.last_us end,
        at_us = e.at_us[1 : chunk.place - 1] || e.at_us[chunk.place + 1 :],
        holders = e.holders[1 : chunk.place - 1] || e.holders[chunk.place + 1 :],
        sums = {prefix}entries_sums(e.sums, chunk.place, 1, -taken)
    where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder;
  end if;
  if chunk.is_only then
    seen.d := case when chunk.before_us is null then chunk.after_us else seen.d end;
    seen.a := case when chunk.after_us is null then chunk.before_us else seen.a end;
    return seen;
  end if;
  -- Leases with one end may be in several chunks.
  if entry_us = seen.d and chunk.before_us is null then
    select e.at_us[width_bucket(seen.d - 1, e.at_us) + 1] into seen.d
    from {prefix}execution as e where e.key = seen.key order by e.first_us, e.first_holder limit 1;
  elsif entry_us = seen.a and chunk.after_us is null then
    if chunk.is_log and chunk.before_us is not null then
      seen.a := chunk.before_us;
    else
      select case when chunk.is_log then e.first_us end, e.last_us into seen.e, seen.a
      from {prefix}execution as e where e.key = seen.key order by e.first_us desc, e.first_holder desc limit 1;
    end if;
  end if;
  if chunk.entries > (case when chunk.is_log then 17 else 9 end) then
    return seen;
  end if;
  return {prefix}entries_join(seen, chunk.first_us, chunk.first_holder);
end
$$;

-- The same for a short log, and for few leases.
create or replace function {prefix}short_log_give_back(seen {prefix}state, entry_us bigint, holder uuid, amount bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  place constant integer := {prefix}entries_place(seen.log_us, seen.holders, entry_us, holder);
  cost bigint;
  taken bigint;
begin
  if seen.log_us[place] is distinct from entry_us
      or coalesce(seen.holders[place], '00000000-0000-0000-0000-000000000000') <> holder then
    return seen;
  end if;
  cost := seen.log_sums[place] - coalesce(seen.log_sums[place - 1], seen.log_sums[cardinality(seen.log_sums)] - seen.b);
  taken := least(amount, cost);
  if taken = cost and seen.c = 1 then
    return {prefix}entries_none(seen);
  elsif taken = cost then
    seen.log_us := seen.log_us[1 : place - 1] || seen.log_us[place + 1 :];
    seen.log_sums := {prefix}entries_sums(seen.log_sums, place, 1, -taken);
    seen.holders := seen.holders[1 : place - 1] || seen.holders[place + 1 :];
    seen.c := seen.c - 1;
    seen.d := seen.log_us[1];
    seen.a := seen.log_us[cardinality(seen.log_us)];
  else
    seen.log_sums := {prefix}entries_sums(seen.log_sums, place, 0, -taken);
  end if;
  seen.b := seen.b - taken;
  return seen;
end
$$;

-- The running sums of a chunk without this many entries from a position on; the sums after them change by an amount.
create or replace function {prefix}entries_sums(sums bigint[], place integer, removed integer, more bigint)
returns bigint[] immutable language plpgsql as $$
begin
  if removed = 0 then
    null;
  elsif place = cardinality(sums) then
    return sums[1 : place - 1];
  else
    sums := sums[1 : place - 1] || sums[place + 1 :];
  end if;
  for i in place .. cardinality(sums) loop
    sums[i] := sums[i] + more;
  end loop;
  return sums;
end
$$;

-- Merges a small chunk with a neighbour, so that there are few chunks however many entries are given back: two neighbours
-- together have more than three quarters of a full chunk, or both have more than a quarter.
create or replace function {prefix}entries_join(seen {prefix}state, chunk_us bigint, chunk_holder uuid)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  other record;
  merged record;
  kept record;
begin
  select e.first_us, e.first_holder, cardinality(e.at_us) as entries, case when e.holders is null then 64 else 32 end as most into chunk
  from {prefix}execution as e where e.key = seen.key and e.first_us = chunk_us and e.first_holder = chunk_holder;
  if chunk.entries is null or chunk.entries > chunk.most / 4 then
    return seen;
  end if;
  select e.first_us, e.first_holder, cardinality(e.at_us) as entries into other
  from {prefix}execution as e where e.key = seen.key and (e.first_us, e.first_holder) > (chunk_us, chunk_holder)
  order by e.first_us, e.first_holder limit 1;
  if chunk.entries + other.entries <= chunk.most * 3 / 4 then
    kept := chunk;
    merged := other;
  else
    select e.first_us, e.first_holder, cardinality(e.at_us) as entries into other
    from {prefix}execution as e where e.key = seen.key and (e.first_us, e.first_holder) < (chunk_us, chunk_holder)
    order by e.first_us desc, e.first_holder desc limit 1;
    if other.first_us is null or chunk.entries + other.entries > chunk.most * 3 / 4 then
      return seen;
    end if;
    kept := other;
    merged := chunk;
  end if;
  update {prefix}execution as e
  set last_us = r.last_us, total = e.total + r.total, at_us = e.at_us || r.at_us, holders = e.holders || r.holders,
      sums = e.sums || {prefix}entries_sums(r.sums, 1, 0, e.total)
  from {prefix}execution as r
  where e.key = seen.key and e.first_us = kept.first_us and e.first_holder = kept.first_holder
    and r.key = seen.key and r.first_us = merged.first_us and r.first_holder = merged.first_holder;
  delete from {prefix}execution as e
  where e.key = seen.key and e.first_us = merged.first_us and e.first_holder = merged.first_holder;
  if seen.e = merged.first_us then
    seen.e := kept.first_us;
  end if;
  return seen;
end
$$;

-- Takes an amount off the newest entries. However many these are, one statement deletes the whole chunks.
create or replace function {prefix}log_refund(seen {prefix}state, amount bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  entry_us bigint;
  gone record;
  chunk record;
  place integer;
begin
  if amount >= seen.b then
    return {prefix}entries_none(seen);
  elsif amount <= 0 then
    return seen;
  end if;
  -- The last entry that stays.
  entry_us := {prefix}entries_first_to_sum(seen, seen.b - amount);
  if seen.log_us is not null then
    place := width_bucket(entry_us, seen.log_us);
    seen.log_us := seen.log_us[1 : place];
    seen.log_sums := seen.log_sums[1 : place - 1] || (seen.log_sums[cardinality(seen.log_sums)] - amount);
    seen.a := entry_us;
    seen.b := seen.b - amount;
    seen.c := place;
    return seen;
  end if;
  with deleted as (
    delete from {prefix}execution as e where e.key = seen.key and e.first_us > entry_us
    returning e.total, cardinality(e.at_us) as entries)
  select coalesce(sum(d.total), 0)::bigint as total, coalesce(sum(d.entries), 0) as entries into gone from deleted as d;
  select e.first_us, e.place, cardinality(e.at_us) - e.place as dropped, e.total - (amount - gone.total) as total into chunk
  from (select x.*, width_bucket(entry_us, x.at_us) as place
        from {prefix}execution as x where x.key = seen.key and x.first_us <= entry_us order by x.first_us desc limit 1) as e;
  update {prefix}execution as e
  set total = chunk.total, last_us = entry_us, at_us = e.at_us[1 : chunk.place],
      sums = e.sums[1 : chunk.place - 1] || chunk.total
  where e.key = seen.key and e.first_us = chunk.first_us;
  seen.a := entry_us;
  seen.b := seen.b - amount;
  seen.c := seen.c - gone.entries - chunk.dropped;
  seen.e := chunk.first_us;
  return seen;
end
$$;

-- Writes the leases of a state as chunks.
create or replace function {prefix}leases_to_chunks(seen {prefix}state)
returns {prefix}state volatile language plpgsql as $$
declare
  nobody constant uuid := '00000000-0000-0000-0000-000000000000';
  gone constant bigint := seen.log_sums[seen.c] - seen.b;
  until integer;
begin
  for place in 1 .. seen.c by 32 loop
    until := least(place + 31, seen.c);
    insert into {prefix}execution (key, first_us, first_holder, last_us, total, at_us, holders, sums)
    values (seen.key, seen.log_us[place], coalesce(seen.holders[place], nobody), seen.log_us[until],
            seen.log_sums[until] - coalesce(seen.log_sums[place - 1], gone), seen.log_us[place : until],
            coalesce(seen.holders[place : until], array_fill(nobody, array[until - place + 1])),
            {prefix}entries_sums(seen.log_sums[place : until], 1, 0, -coalesce(seen.log_sums[place - 1], gone)));
  end loop;
  seen.log_us := null;
  seen.log_sums := null;
  seen.holders := null;
  return seen;
end
$$;

-- Moves the leases of a few chunks into the state.
create or replace function {prefix}leases_from_chunks(seen {prefix}state)
returns {prefix}state volatile language plpgsql as $$
begin
  select array_agg(n.end_us order by n.place), array_agg(n.sum order by n.place),
         case when bool_or(n.holder <> '00000000-0000-0000-0000-000000000000') then array_agg(n.holder order by n.place) end
  into seen.log_us, seen.log_sums, seen.holders
  from (select lease.end_us, lease.holder, row_number() over held as place,
               (sum(e.sums[lease.place] - coalesce(e.sums[lease.place - 1], 0)) over held)::bigint as sum
        from {prefix}execution as e, unnest(e.at_us, e.holders) with ordinality as lease (end_us, holder, place)
        where e.key = seen.key and lease.end_us >= seen.d
        window held as (order by lease.end_us, lease.holder)) as n;
  delete from {prefix}execution as e where e.key = seen.key;
  return seen;
end
$$;

-- Inserts a lease at its position.
create or replace function {prefix}leases_insert(seen {prefix}state, lease_end_us bigint, lease_holder uuid, charged bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  is_new boolean := false;
begin
  if seen.c between 1 and 16 and seen.log_us is null then
    seen := {prefix}leases_from_chunks(seen);
  end if;
  if seen.c > 0 and seen.c >= {prefix}short_leases_most(
      seen.holders is not null or lease_holder <> '00000000-0000-0000-0000-000000000000') and seen.log_us is not null then
    seen := {prefix}leases_to_chunks(seen);
  elsif seen.c = 0 or seen.log_us is not null then
    select placed.* into seen.log_us, seen.log_sums, seen.holders
    from {prefix}short_leases_insert(
      seen.log_us, seen.log_sums, seen.holders, seen.b, lease_end_us, lease_holder, charged) as placed;
    seen.b := seen.b + charged;
    seen.c := cardinality(seen.log_us);
    seen.d := seen.log_us[1];
    seen.a := seen.log_us[seen.c];
    if seen.log_sums[seen.c] > 1152921504606846976 then
      seen.log_sums := {prefix}short_log_rebased(seen.log_sums, seen.b);
    end if;
    return seen;
  end if;
  if lease_end_us > seen.a then
    -- It ends after all others, as most do.
    update {prefix}execution as e
    set last_us = lease_end_us, total = e.total + charged, at_us = e.at_us || lease_end_us, holders = e.holders || lease_holder,
        sums = e.sums || (e.total + charged)
    where e.key = seen.key and cardinality(e.at_us) < 32 and (e.first_us, e.first_holder) = (
      select x.first_us, x.first_holder from {prefix}execution as x where x.key = seen.key
      order by x.first_us desc, x.first_holder desc limit 1);
    is_new := not found;
  else
    select e.first_us, e.first_holder, e.place, cardinality(e.at_us) as entries, width_bucket(seen.d - 1, e.at_us) as gone,
           e.at_us[e.place] = lease_end_us and e.holders[e.place] = lease_holder as is_known into chunk
    from (select x.*, {prefix}entries_place(x.at_us, x.holders, lease_end_us, lease_holder) as place
          from {prefix}execution as x where x.key = seen.key and (x.first_us, x.first_holder) <= (lease_end_us, lease_holder)
          order by x.first_us desc, x.first_holder desc limit 1) as e;
    if not found then
      -- It ends before all others, and the first chunk is renamed to it.
      update {prefix}execution as e set first_us = lease_end_us, first_holder = lease_holder
      where e.ctid = (select x.ctid from {prefix}execution as x where x.key = seen.key order by x.first_us, x.first_holder limit 1);
      return {prefix}leases_insert(seen, lease_end_us, lease_holder, charged);
    elsif chunk.is_known then
      update {prefix}execution as e
      set total = e.total + charged, sums = {prefix}entries_sums(e.sums, chunk.place, 0, charged)
      where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder;
      seen.b := seen.b + charged;
      return seen;
    elsif chunk.entries < 32 then
      update {prefix}execution as e
      set total = e.total + charged, last_us = greatest(e.last_us, lease_end_us),
          at_us = e.at_us[1 : chunk.place] || lease_end_us || e.at_us[chunk.place + 1 :],
          holders = e.holders[1 : chunk.place] || lease_holder || e.holders[chunk.place + 1 :],
          sums = e.sums[1 : chunk.place] || {prefix}entries_sums(
            coalesce(e.sums[chunk.place], 0) || e.sums[chunk.place + 1 :], 1, 0, charged)
      where e.key = seen.key and e.first_us = chunk.first_us and e.first_holder = chunk.first_holder;
    elsif chunk.place < chunk.entries then
      perform {prefix}leases_split(seen.key, chunk.first_us, chunk.first_holder, case when chunk.gone > 0 then chunk.gone else 16 end,
                                   chunk.gone = 0);
      return {prefix}leases_insert(seen, lease_end_us, lease_holder, charged);
    else
      -- An entry after a full chunk does not change that chunk.
      is_new := true;
    end if;
  end if;
  if is_new then
    insert into {prefix}execution (key, first_us, first_holder, last_us, total, at_us, holders, sums)
    values (seen.key, lease_end_us, lease_holder, lease_end_us, charged, array[lease_end_us], array[lease_holder], array[charged]);
  end if;
  seen.a := greatest(seen.a, lease_end_us);
  seen.b := seen.b + charged;
  seen.d := least(seen.d, lease_end_us);
  seen.c := seen.c + 1;
  return seen;
end
$$;

-- Splits a chunk after this many of its leases. The first of them become a new chunk, unless they are gone.
create or replace function {prefix}leases_split(
    chunk_key uuid, chunk_us bigint, chunk_holder uuid, leases integer, are_kept boolean)
returns void volatile language plpgsql as $$
declare
  chunk {prefix}execution;
begin
  delete from {prefix}execution as e where e.key = chunk_key and e.first_us = chunk_us and e.first_holder = chunk_holder
  returning e.* into chunk;
  if are_kept then
    insert into {prefix}execution (key, first_us, first_holder, last_us, total, at_us, holders, sums)
    values (chunk_key, chunk_us, chunk_holder, chunk.at_us[leases], chunk.sums[leases],
            chunk.at_us[1 : leases], chunk.holders[1 : leases], chunk.sums[1 : leases]);
  end if;
  insert into {prefix}execution (key, first_us, first_holder, last_us, total, at_us, holders, sums)
  values (chunk_key, chunk.at_us[leases + 1], chunk.holders[leases + 1], chunk.last_us, chunk.total - chunk.sums[leases],
          chunk.at_us[leases + 1 :], chunk.holders[leases + 1 :],
          {prefix}entries_sums(chunk.sums[leases + 1 :], 1, 0, -chunk.sums[leases]));
end
$$;
