-- Logs and leases: what a state is made of where it has entries of its own. Twin of the kernel's entries.rs, on tables. All functions
-- here expect the state to be locked, or only look; those that change a log answer the state as it is to be written then.
--
-- A log is kept in chunks of up to 64 entries with the sums up to each, so that an entry is found by a binary search in its chunk, and
-- what lies before it is the sums of the chunks before: one small row for 64 entries. A charge touches the newest chunk and, when
-- something has run out, the oldest; only a look that has to sum or to wait reads the sums of chunks between. Leases are rows of their
-- own, found by their end. Functions that walk these rows until they have enough tell the planner to walk the index in its order,
-- whatever the statistics say of a table that has just been made: sorting first would read them all.

-- What the entries of a log up to and with an instant come to.
create or replace function {prefix}log_sum_until(seen {prefix}state, until_us bigint)
returns bigint stable language plpgsql as $$
begin
  if seen.c = 0 or seen.d > until_us then
    return 0;
  elsif seen.a <= until_us then
    return seen.b;
  end if;
  return (
    select sum(case when e.last_us <= until_us then e.total else coalesce(e.sums[width_bucket(until_us, e.at_us)], 0) end
               - case when e.first_us < seen.d then coalesce(e.sums[width_bucket(seen.d - 1, e.at_us)], 0) else 0 end)
    from {prefix}execution as e where e.key = seen.key and e.first_us <= until_us);
end
$$;

-- The time of the first entry with which the entries from the oldest on come to at least so much. It is looked for from the nearer end.
create or replace function {prefix}log_first_to_sum(seen {prefix}state, wanted bigint)
returns bigint stable language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
  chunk record;
  rest bigint;
begin
  if wanted > seen.b then
    return null;
  elsif wanted > seen.b / 2 then
    -- What comes after it may stay.
    rest := seen.b - wanted;
    for chunk in
      select e.first_us, e.total from {prefix}execution as e where e.key = seen.key order by e.first_us desc
    loop
      if chunk.total > rest then
        return (select e.at_us[width_bucket(e.total - rest - 1, e.sums) + 1]
                from {prefix}execution as e where e.key = seen.key and e.first_us = chunk.first_us);
      end if;
      rest := rest - chunk.total;
    end loop;
  else
    rest := wanted;
    for chunk in
      select e.first_us, e.total - case when e.first_us < seen.d then coalesce(e.sums[width_bucket(seen.d - 1, e.at_us)], 0) else 0 end
               as total
      from {prefix}execution as e where e.key = seen.key order by e.first_us
    loop
      if chunk.total >= rest then
        return (select e.at_us[width_bucket(e.total - chunk.total + rest - 1, e.sums) + 1]
                from {prefix}execution as e where e.key = seen.key and e.first_us = chunk.first_us);
      end if;
      rest := rest - chunk.total;
    end loop;
  end if;
  return null;
end
$$;

-- Drops the entries up to and with an instant. Each chunk is deleted once; of the oldest that stays only the state says what is gone.
create or replace function {prefix}log_drop_until(seen {prefix}state, until_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  oldest record;
  gone record;
begin
  if seen.c = 0 or seen.d > until_us then
    return seen;
  elsif seen.a <= until_us then
    delete from {prefix}execution as e where e.key = seen.key;
    seen.a := 0;
    seen.b := 0;
    seen.c := 0;
    return seen;
  end if;
  select e.last_us, e.before, coalesce(e.sums[e.before], 0) as sum_before,
         e.until, coalesce(e.sums[e.until], 0) as sum_until, e.at_us[e.until + 1] as next_us into oldest
  from (select x.*, width_bucket(seen.d - 1, x.at_us) as before, width_bucket(until_us, x.at_us) as until
        from {prefix}execution as x where x.key = seen.key order by x.first_us limit 1) as e;
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
          from {prefix}execution as x where x.key = seen.key order by x.first_us limit 1) as e;
  end if;
  seen.b := seen.b - oldest.sum_until;
  seen.c := seen.c - oldest.until;
  seen.d := oldest.next_us;
  return seen;
end
$$;

-- Keeps what a window may count, and drops what no window counts any more that the log was charged by.
create or replace function {prefix}log_keep_for(seen {prefix}state, window_us bigint, now_us bigint)
returns {prefix}state volatile language plpgsql as $$
begin
  seen.tail_us := {prefix}sliding_window_keep(seen.tail_us, window_us);
  if seen.c > 0 and seen.d <= now_us - seen.tail_us then
    seen := {prefix}log_drop_until(seen, now_us - seen.tail_us);
  end if;
  if seen.c = 0 then
    seen.tail_us := window_us;
  end if;
  return seen;
end
$$;

-- Adds an entry that is not before the newest.
create or replace function {prefix}log_push(seen {prefix}state, entry_us bigint, charged bigint)
returns {prefix}state volatile language plpgsql as $$
begin
  if seen.c > 0 and seen.a = entry_us then
    update {prefix}execution as e
    set total = e.total + charged, sums[cardinality(e.sums)] = e.total + charged
    where e.key = seen.key and e.first_us = seen.e;
    seen.b := seen.b + charged;
    return seen;
  end if;
  if seen.c > 0 then
    update {prefix}execution as e
    set last_us = entry_us, total = e.total + charged, at_us = e.at_us || entry_us, sums = e.sums || (e.total + charged)
    where e.key = seen.key and e.first_us = seen.e and cardinality(e.at_us) < 64;
  end if;
  if seen.c = 0 or not found then
    insert into {prefix}execution (key, first_us, last_us, total, at_us, sums)
    values (seen.key, entry_us, entry_us, charged, array[entry_us], array[charged]);
    seen.e := entry_us;
  end if;
  if seen.c = 0 then
    seen.d := entry_us;
  end if;
  seen.a := entry_us;
  seen.b := seen.b + charged;
  seen.c := seen.c + 1;
  return seen;
end
$$;

-- Merges the oldest entry into the one after it, if that is not later than an instant; answers the state as it was if not.
create or replace function {prefix}log_merge_oldest_until(seen {prefix}state, until_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  later record;
begin
  if seen.c < 2 or seen.d >= until_us then
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
    -- The sum up to the next entry stays, so what the oldest no longer has is the next one's.
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

-- Enters a charge that fits.
create or replace function {prefix}log_take(
    seen {prefix}state, most bigint, window_us bigint, charged bigint, now_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  entries bigint;
begin
  if seen.c > 0 and seen.d > now_us - {prefix}sliding_window_keep(seen.tail_us, window_us) then
    -- Nothing has run out.
    seen.tail_us := {prefix}sliding_window_keep(seen.tail_us, window_us);
  else
    seen := {prefix}log_keep_for(seen, window_us, now_us);
  end if;
  seen := {prefix}log_push(seen, now_us, charged);
  if seen.c <= {prefix}sliding_window_most(most) then
    return seen;
  end if;
  -- Each charge adds one entry, so two merged make room however many there are.
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
    seen := {prefix}log_push(seen, now_us, taken);
  end if;
  return seen;
end
$$;

-- Takes an amount off the entry of an instant, and drops the entry if nothing is left of it.
create or replace function {prefix}log_give_back(seen {prefix}state, entry_us bigint, amount bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  taken bigint;
begin
  if seen.c = 0 or entry_us < seen.d or entry_us > seen.a then
    return seen;
  end if;
  select e.first_us, e.place, e.at_us[e.place] as entry_us, cardinality(e.at_us) as entries,
         e.sums[e.place] - coalesce(e.sums[e.place - 1], 0) as cost,
         e.at_us[e.place - 1] as before_us, e.at_us[e.place + 1] as after_us into chunk
  from (select x.*, width_bucket(entry_us, x.at_us) as place
        from {prefix}execution as x where x.key = seen.key and x.first_us <= entry_us order by x.first_us desc limit 1) as e;
  if chunk.entry_us is distinct from entry_us then
    return seen;
  end if;
  taken := least(amount, chunk.cost);
  seen.b := seen.b - taken;
  if taken < chunk.cost then
    update {prefix}execution as e
    set total = e.total - taken,
        sums = e.sums[1 : chunk.place - 1]
          || array(select s - taken from unnest(e.sums[chunk.place :]) with ordinality as u (s, n) order by n)
    where e.key = seen.key and e.first_us = chunk.first_us;
    return seen;
  end if;
  seen.c := seen.c - 1;
  if seen.c = 0 then
    delete from {prefix}execution as e where e.key = seen.key;
    seen.a := 0;
    return seen;
  end if;
  -- What is before the oldest entry is gone already.
  if chunk.before_us < seen.d then
    chunk.before_us := null;
  end if;
  if chunk.before_us is null and chunk.after_us is null then
    delete from {prefix}execution as e where e.key = seen.key and e.first_us = chunk.first_us;
  else
    update {prefix}execution as e
    set total = e.total - taken,
        last_us = case when chunk.after_us is null then chunk.before_us else e.last_us end,
        at_us = e.at_us[1 : chunk.place - 1] || e.at_us[chunk.place + 1 :],
        sums = e.sums[1 : chunk.place - 1]
          || array(select s - taken from unnest(e.sums[chunk.place + 1 :]) with ordinality as u (s, n) order by n)
    where e.key = seen.key and e.first_us = chunk.first_us;
  end if;
  if entry_us = seen.d then
    seen.d := coalesce(chunk.after_us, (
      select e.at_us[1] from {prefix}execution as e
      where e.key = seen.key and e.first_us > chunk.first_us order by e.first_us limit 1));
  elsif entry_us = seen.a then
    seen.a := chunk.before_us;
    if chunk.before_us is null then
      select e.first_us, e.last_us into seen.e, seen.a
      from {prefix}execution as e where e.key = seen.key and e.first_us < chunk.first_us order by e.first_us desc limit 1;
    end if;
  end if;
  return {prefix}log_join(seen, chunk.first_us);
end
$$;

-- Joins a chunk that has become small with a neighbour, so that chunks stay few however many entries are given back: two that stand
-- side by side have more than 48 entries together, or both more than 16.
create or replace function {prefix}log_join(seen {prefix}state, chunk_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  entries integer;
  other record;
  left_us bigint;
  right_us bigint;
begin
  select cardinality(e.at_us) into entries from {prefix}execution as e where e.key = seen.key and e.first_us = chunk_us;
  if entries is null or entries > 16 then
    return seen;
  end if;
  select e.first_us, cardinality(e.at_us) as entries into other
  from {prefix}execution as e where e.key = seen.key and e.first_us > chunk_us order by e.first_us limit 1;
  if entries + other.entries <= 48 then
    left_us := chunk_us;
    right_us := other.first_us;
  else
    select e.first_us, cardinality(e.at_us) as entries into other
    from {prefix}execution as e where e.key = seen.key and e.first_us < chunk_us order by e.first_us desc limit 1;
    if other.first_us is null or entries + other.entries > 48 then
      return seen;
    end if;
    left_us := other.first_us;
    right_us := chunk_us;
  end if;
  update {prefix}execution as e
  set last_us = r.last_us, total = e.total + r.total, at_us = e.at_us || r.at_us,
      sums = e.sums || array(select e.total + s from unnest(r.sums) with ordinality as u (s, n) order by n)
  from {prefix}execution as r
  where e.key = seen.key and e.first_us = left_us and r.key = seen.key and r.first_us = right_us;
  delete from {prefix}execution as e where e.key = seen.key and e.first_us = right_us;
  if seen.e = right_us then
    seen.e := left_us;
  end if;
  return seen;
end
$$;

-- Takes an amount off the newest entries.
create or replace function {prefix}log_refund(seen {prefix}state, amount bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  chunk record;
  rest bigint := amount;
begin
  while rest > 0 and seen.c > 0 loop
    -- The last entry that stays, and what is then left of the sum up to it.
    select e.total - coalesce(e.sums[e.before], 0) as total, e.entries - e.before as entries,
           e.total - rest as sum, e.entries - e.place as dropped, e.place, e.at_us[e.place] as last_us into chunk
    from (select x.*, cardinality(x.at_us) as entries, width_bucket(seen.d - 1, x.at_us) as before,
                 width_bucket(x.total - rest - 1, x.sums) + 1 as place
          from {prefix}execution as x where x.key = seen.key and x.first_us = seen.e) as e;
    if chunk.total > rest then
      update {prefix}execution as e
      set total = chunk.sum, last_us = chunk.last_us, at_us = e.at_us[1 : chunk.place],
          sums = e.sums[1 : chunk.place - 1] || chunk.sum
      where e.key = seen.key and e.first_us = seen.e;
      seen.a := chunk.last_us;
      seen.b := seen.b - rest;
      seen.c := seen.c - chunk.dropped;
      return seen;
    end if;
    delete from {prefix}execution as e where e.key = seen.key and e.first_us = seen.e;
    seen.b := seen.b - chunk.total;
    seen.c := seen.c - chunk.entries;
    rest := rest - chunk.total;
    if seen.c = 0 then
      seen.a := 0;
    else
      select e.first_us, e.last_us into seen.e, seen.a
      from {prefix}execution as e where e.key = seen.key order by e.first_us desc limit 1;
    end if;
  end loop;
  return seen;
end
$$;

-- What is held by leases that have ended and are not deleted yet.
create or replace function {prefix}leases_ended(seen {prefix}state, now_us bigint)
returns bigint stable language plpgsql as $$
begin
  if seen.a <= now_us then
    return seen.b;
  end if;
  return (select coalesce(sum(l.cost), 0) from {prefix}lease as l where l.key = seen.key and l.end_us <= now_us);
end
$$;

-- Deletes leases that have ended, at most two hundred at a time, and notes when the next one ends. Each is deleted once.
create or replace function {prefix}leases_drop_ended(seen {prefix}state, now_us bigint)
returns {prefix}state volatile language plpgsql as $$
declare
  ended bigint;
begin
  if seen.b = 0 then
    seen.d := null;
    return seen;
  end if;
  with deleted as (
    delete from {prefix}lease as l
    where l.ctid = any (array(
      select x.ctid from {prefix}lease as x where x.key = seen.key and x.end_us <= now_us order by x.end_us limit 200))
    returning l.cost)
  select sum(d.cost) into ended from deleted as d;
  seen.b := seen.b - coalesce(ended, 0);
  select l.end_us into seen.d from {prefix}lease as l where l.key = seen.key order by l.end_us limit 1;
  update {prefix}state as s set b = seen.b, d = seen.d where s.key = seen.key;
  return seen;
end
$$;

-- The end of the first lease with which the leases that count, soonest first, come to at least so much. It is looked for from the
-- nearer end, and no further than it is.
create or replace function {prefix}leases_first_to_sum(seen {prefix}state, held bigint, wanted bigint, now_us bigint)
returns bigint stable language plpgsql
set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
  lease record;
  rest bigint;
begin
  if wanted > held then
    return null;
  elsif wanted > held / 2 then
    -- What ends after it may stay.
    rest := held - wanted;
    for lease in
      select l.end_us, l.cost from {prefix}lease as l where l.key = seen.key and l.end_us > now_us order by l.end_us desc
    loop
      rest := rest - lease.cost;
      exit when rest < 0;
    end loop;
  else
    rest := wanted;
    for lease in
      select l.end_us, l.cost from {prefix}lease as l where l.key = seen.key and l.end_us > now_us order by l.end_us
    loop
      rest := rest - lease.cost;
      exit when rest <= 0;
    end loop;
  end if;
  return lease.end_us;
end
$$;

create or replace function {prefix}leases_insert(
    seen {prefix}state, lease_end_us bigint, lease_holder uuid, charged bigint)
returns {prefix}state volatile language plpgsql as $$
begin
  insert into {prefix}lease as l (key, end_us, holder, cost) values (seen.key, lease_end_us, lease_holder, charged)
  on conflict (key, end_us, holder) do update set cost = l.cost + excluded.cost;
  seen.a := greatest(seen.a, lease_end_us);
  seen.b := seen.b + charged;
  seen.d := least(seen.d, lease_end_us);
  return seen;
end
$$;

-- Removes the lease of a holder that was given this end. Answers null where there is none.
create or replace function {prefix}leases_take(seen {prefix}state, lease_end_us bigint, lease_holder uuid)
returns bigint volatile language plpgsql as $$
declare
  taken bigint;
begin
  delete from {prefix}lease as l where l.key = seen.key and l.end_us = lease_end_us and l.holder = lease_holder
  returning l.cost into taken;
  return taken;
end
$$;
