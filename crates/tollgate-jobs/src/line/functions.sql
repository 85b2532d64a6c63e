-- What is written here is about jobs that wait, whose own rows are written after it and flush it. A crash before that loses a place, and the
-- job comes again and takes one. So nobody waits for the disk, least of all with a line locked.
create or replace function {prefix}job_without_flush() returns text language sql volatile as
$$ select set_config('synchronous_commit', 'off', true) $$;

create or replace function {prefix}job_now_us() returns bigint language sql volatile as
$$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $$;

-- The units that go before a place of a line, or before one at its end. Places that are parked do not count, and those whose slot passed before
-- p_after_us do not either: nobody takes them.
create or replace function {prefix}job_units_before(p_key uuid, p_place bigint, p_units bigint, p_after_us bigint)
returns bigint language plpgsql volatile as $$
declare
  v_first bigint;
  v_end bigint := p_place - p_units;
  v_count bigint;
  v_sum bigint;
begin
  select l.place - l.units into v_first from {prefix}job_line l
    where l.key = p_key and not l.parked and l.slot_us > p_after_us order by l.place limit 1;
  if v_end is null then
    select l.place into v_end from {prefix}job_line l where l.key = p_key and not l.parked order by l.place desc limit 1;
  end if;
  if v_first is null or v_end <= v_first then
    return 0;
  end if;
  -- Places that were left between two others are counted by the difference; where the line is short, they are not. Parked ones never are.
  if v_end - v_first > 1000 and not exists (select from {prefix}job_line l where l.key = p_key and l.parked and l.place <= v_end) then
    return v_end - v_first;
  end if;
  select count(*), coalesce(sum(n.units), 0) into v_count, v_sum from (
    select l.units from {prefix}job_line l where l.key = p_key and not l.parked and l.slot_us > p_after_us and l.place <= v_end
    order by l.place limit 1001) as n;
  if v_count <= 1000 then
    return v_sum;
  end if;
  select coalesce(sum(l.units), 0) into v_sum from {prefix}job_line l
    where l.key = p_key and l.parked and l.place > v_first and l.place <= v_end;
  return greatest(v_end - v_first - v_sum, v_count);
end $$;

-- What stands before a job at each key.
create or replace function {prefix}job_look(
  p_job text, p_keys uuid[], p_closed uuid[], p_grace bigint,
  out now_us bigint, out closed_us bigint, out closed uuid[], out since_us bigint, out slot_us bigint, out until_us bigint, out delays integer, out ahead bigint[]
) language plpgsql volatile as $$
declare
  v_key uuid;
  v_place bigint;
  v_units bigint;
begin
  now_us := {prefix}job_now_us();
  select max(c.until_us), array_agg(c.key) into closed_us, closed from {prefix}job_closed c where c.key = any(p_closed) and c.until_us > now_us;
  select w.since_us, w.slot_us, w.until_us, w.delays into since_us, slot_us, until_us, delays
    from {prefix}job_waiting w where w.job = p_job;
  ahead := '{}';
  foreach v_key in array p_keys loop
    select l.place, l.units into v_place, v_units from {prefix}job_line l where l.job = p_job and l.key = v_key;
    ahead := ahead || {prefix}job_units_before(v_key, v_place, v_units, now_us - p_grace);
  end loop;
end $$;

-- Takes a place in the lines that are marked and that the job does not stand in yet, and looks: the place that it had (p_places),
-- if nobody has it, else the last. Unless p_waits, it answers no time where another transaction has one of the lines locked, and has done
-- nothing.
create or replace function {prefix}job_stand(
  p_job text, p_queue text, p_type text, p_keys uuid[], p_labels text[], p_units bigint[], p_stands boolean[],
  p_places bigint[], p_since_us bigint, p_delays integer, p_closed uuid[], p_grace bigint, p_waits boolean,
  out now_us bigint, out closed_us bigint, out closed uuid[], out since_us bigint, out slot_us bigint, out until_us bigint, out delays integer, out ahead bigint[]
) language plpgsql volatile as $$
declare
  v_key uuid;
  v_last bigint;
begin
  perform {prefix}job_without_flush();
  for v_key in select distinct k from unnest(p_keys, p_stands, p_places) as t(k, stands, place)
      where stands or place is not null order by k loop
    if p_waits then
      perform pg_advisory_xact_lock(hashtextextended('{prefix}job_line ' || v_key::text, 0));
    elsif not pg_try_advisory_xact_lock(hashtextextended('{prefix}job_line ' || v_key::text, 0)) then
      return;
    end if;
  end loop;
  now_us := {prefix}job_now_us();
  insert into {prefix}job_waiting (job, queue, job_type, since_us, slot_us, until_us, delays, binding)
    values (p_job, p_queue, p_type, coalesce(p_since_us, now_us), now_us, 0, coalesce(p_delays, 0), '')
    on conflict (job) do nothing;
  for i in 1 .. coalesce(array_length(p_keys, 1), 0) loop
    continue when not p_stands[i] and p_places[i] is null;
    continue when exists (select from {prefix}job_line l where l.job = p_job and l.key = p_keys[i]);
    if p_places[i] is not null then
      insert into {prefix}job_line (key, place, job, label, units, slot_us)
        values (p_keys[i], p_places[i], p_job, p_labels[i], p_units[i], now_us) on conflict do nothing;
      continue when found;
    end if;
    select l.place into v_last from {prefix}job_line l where l.key = p_keys[i] order by l.place desc limit 1;
    insert into {prefix}job_line (key, place, job, label, units, slot_us)
      values (p_keys[i], coalesce(v_last, 0) + p_units[i], p_job, p_labels[i], p_units[i], now_us);
  end loop;
  select l.* into now_us, closed_us, closed, since_us, slot_us, until_us, delays, ahead
    from {prefix}job_look(p_job, p_keys, p_closed, p_grace) as l;
end $$;

-- Writes when a job expects its turn, until when it sleeps, and in which lines its place is parked.
create or replace function {prefix}job_slot(p_job text, p_slot_us bigint, p_until_us bigint, p_binding text, p_parked uuid[]) returns void
language sql volatile as $$
  select {prefix}job_without_flush();
  update {prefix}job_line set slot_us = p_slot_us, parked = (key = any(p_parked)) where job = p_job;
  update {prefix}job_waiting set slot_us = p_slot_us, until_us = p_until_us, delays = delays + 1, binding = p_binding
    where job = p_job;
$$;

-- Takes a job out of all lines while it is charged, and answers what it had: who is charged already must not be ahead of others.
create or replace function {prefix}job_take(p_job text, p_keys uuid[], out places bigint[], out since_us bigint, out delays integer)
language plpgsql volatile as $$
begin
  perform {prefix}job_without_flush();
  select array_agg(l.place order by k.number) into places
    from unnest(p_keys) with ordinality as k(key, number) left join {prefix}job_line l on l.key = k.key and l.job = p_job;
  delete from {prefix}job_line where job = p_job;
  delete from {prefix}job_waiting w where w.job = p_job returning w.since_us, w.delays into since_us, delays;
end $$;

create or replace function {prefix}job_leave(p_job text) returns void language sql volatile as $$
  select {prefix}job_without_flush();
  delete from {prefix}job_line where job = p_job;
  delete from {prefix}job_waiting where job = p_job;
$$;

-- The first jobs of these lines whose places count.
create or replace function {prefix}job_next(p_keys uuid[], p_count integer) returns setof text language sql stable as $$
  select distinct n.job from unnest(p_keys) as k(key)
    cross join lateral (select l.job from {prefix}job_line l where l.key = k.key and not l.parked order by l.place limit p_count) as n
$$;

-- The jobs that wait, in the order of their slots, behind one of them. Which of them sleep, the framework knows.
create or replace function {prefix}job_sleepers(p_slot_us bigint, p_job text, p_count integer)
returns table (job text, slot_us bigint) language sql volatile as $$
  select w.job, w.slot_us from {prefix}job_waiting w
    where (w.slot_us, w.job) > (p_slot_us, p_job) order by w.slot_us, w.job limit p_count
$$;

-- The same of those that stand in these lines or under this label.
create or replace function {prefix}job_sleepers_of(p_slot_us bigint, p_job text, p_count integer, p_keys uuid[], p_label text)
returns table (job text, slot_us bigint) language sql volatile as $$
  select w.job, w.slot_us from (
      select l.job from {prefix}job_line l where l.label = p_label
      union select l.job from {prefix}job_line l where l.key = any(p_keys)) as s
    join {prefix}job_waiting w on w.job = s.job
    where (w.slot_us, w.job) > (p_slot_us, p_job) order by w.slot_us, w.job limit p_count
$$;

-- Forgets a batch of jobs whose slot passed long ago and that nobody came for, keys that are open again, and minutes that long ago. Answers
-- how many rows.
create or replace function {prefix}job_cleanup(p_keep_us bigint, p_batch integer) returns bigint language sql volatile as $$
  with gone as (
    delete from {prefix}job_waiting where job in (
      select w.job from {prefix}job_waiting w where w.slot_us < {prefix}job_now_us() - p_keep_us order by w.slot_us limit p_batch)
    returning job
  ), places as (
    delete from {prefix}job_line l using gone where l.job = gone.job returning 1
  ), opened as (
    delete from {prefix}job_closed where until_us < {prefix}job_now_us() returning 1
  ), minutes as (
    delete from {prefix}job_history where ctid = any(array(
      select h.ctid from {prefix}job_history h where h.minute < ({prefix}job_now_us() - p_keep_us) / 1000000 limit p_batch))
    returning 1
  )
  select (select count(*) from gone) + (select count(*) from places) + (select count(*) from opened) + (select count(*) from minutes)
$$;

-- Locks these lines, in the order in which job_stand does, and answers the time. Empty ones too: whether one is empty is known only to who
-- has locked it, because the first may be about to take a place in it.
create or replace function {prefix}job_lock_lines(p_keys uuid[]) returns bigint language plpgsql volatile as $$
declare
  v_key uuid;
begin
  for v_key in select distinct k from unnest(p_keys) as k order by k loop
    perform pg_advisory_xact_lock(hashtextextended('{prefix}job_line ' || v_key::text, 0));
  end loop;
  return {prefix}job_now_us();
end $$;

-- Locks those of these lines that no other transaction has locked, and answers which. Nobody waits, so the order is free.
create or replace function {prefix}job_try_lock_lines(p_keys uuid[]) returns setof uuid language sql volatile as $$
  select {prefix}job_without_flush();
  select k.key from (select distinct u as key from unnest(p_keys) as u) as k
    where pg_try_advisory_xact_lock(hashtextextended('{prefix}job_line ' || k.key::text, 0))
$$;

-- The end of each line: its last place, and what stands before a job that comes now, reckoned as job_look does.
create or replace function {prefix}job_line_ends(p_keys uuid[], p_grace bigint)
returns table (key uuid, last bigint, ahead bigint) language sql volatile as $$
  with ends as materialized (
    select k.key, (select l.place from {prefix}job_line l where l.key = k.key order by l.place desc limit 1) as last
    from unnest(p_keys) as k(key)
  )
  select e.key, e.last, {prefix}job_units_before(e.key, null, null, {prefix}job_now_us() - p_grace) from ends e where e.last is not null
$$;

-- Each of these jobs in each line that it stands in: its place, whether it is parked there, and what stands before it, reckoned in the same way.
drop function if exists {prefix}job_ahead_of(text[], bigint);
create function {prefix}job_ahead_of(p_jobs text[], p_grace bigint)
returns table (job text, key uuid, place bigint, parked boolean, ahead bigint) language sql volatile as $$
  with own as materialized (
    select l.job, l.key, l.place, l.units, l.parked from {prefix}job_line l where l.job = any(p_jobs)
  ), lines as materialized (
    select k.key, (select l.place - l.units from {prefix}job_line l
        where l.key = k.key and not l.parked and l.slot_us > {prefix}job_now_us() - p_grace order by l.place limit 1) as before,
      (select l.place from {prefix}job_line l where l.key = k.key and not l.parked order by l.place desc limit 1) as last,
      exists (select from {prefix}job_line l where l.key = k.key and l.parked) as has_parked
    from (select distinct o.key from own o) as k
  ), summed as materialized (
    select l.key, l.place, sum(l.units) filter (where not l.parked and l.slot_us > {prefix}job_now_us() - p_grace)
        over (partition by l.key order by l.place rows between unbounded preceding and 1 preceding) as ahead
    from {prefix}job_line l join (select o.key, max(o.place) as upto from own o group by o.key) m on m.key = l.key and l.place <= m.upto
    where l.key in (select s.key from lines s where s.last - s.before <= 1000 or s.has_parked)
  )
  select o.job, o.key, o.place, o.parked,
      coalesce(s.ahead, case when s.key is null then greatest(o.place - o.units - coalesce(n.before, o.place), 0) end, 0)::bigint
    from own o join lines n on n.key = o.key left join summed s on s.key = o.key and s.place = o.place
$$;

-- Puts many jobs off: when each expects its turn and until when it sleeps, the places of those that come anew, and which of all their places are
-- parked. The caller has locked the lines.
create or replace function {prefix}job_put_off(
  p_jobs text[], p_queues text[], p_types text[], p_slots_us bigint[], p_untils_us bigint[], p_bindings text[],
  p_place_jobs text[], p_keys uuid[], p_places bigint[], p_labels text[], p_units bigint[],
  p_parked_jobs text[], p_parked_keys uuid[]
) returns void language sql volatile as $$
  insert into {prefix}job_waiting as w (job, queue, job_type, since_us, slot_us, until_us, delays, binding)
    select u.job, u.queue, u.job_type, {prefix}job_now_us(), u.slot_us, u.until_us, 1, u.binding
    from unnest(p_jobs, p_queues, p_types, p_slots_us, p_untils_us, p_bindings) as u(job, queue, job_type, slot_us, until_us, binding)
    on conflict (job) do update set slot_us = excluded.slot_us, until_us = excluded.until_us, delays = w.delays + 1, binding = excluded.binding;
  with parked as materialized (
    select p.job, p.key from unnest(p_parked_jobs, p_parked_keys) as p(job, key)
  ), changed as materialized (
    select l.job, l.key, u.slot_us, p.job is not null as parked
    from unnest(p_jobs, p_slots_us) as u(job, slot_us) join {prefix}job_line l on l.job = u.job
      left join parked p on p.job = l.job and p.key = l.key
    where l.slot_us <> u.slot_us or l.parked <> (p.job is not null)
  )
  update {prefix}job_line l set slot_us = c.slot_us, parked = c.parked from changed c where l.job = c.job and l.key = c.key;
  insert into {prefix}job_line (key, place, job, label, units, slot_us, parked)
    select n.key, n.place, n.job, n.label, n.units, u.slot_us, p.job is not null
    from unnest(p_place_jobs, p_keys, p_places, p_labels, p_units) as n(job, key, place, label, units)
      join unnest(p_jobs, p_slots_us) as u(job, slot_us) on u.job = n.job
      left join unnest(p_parked_jobs, p_parked_keys) as p(job, key) on p.job = n.job and p.key = n.key
    on conflict do nothing;
$$;
