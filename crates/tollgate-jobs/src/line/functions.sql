create or replace function {prefix}job_now_us() returns bigint language sql volatile as
$$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $$;

-- What stands before a job at each key. Places whose slot passed more than p_grace ago do not count: nobody takes them.
create or replace function {prefix}job_look(
  p_job text, p_keys uuid[], p_closed uuid[], p_grace bigint,
  out now_us bigint, out closed_us bigint, out closed uuid[], out since_us bigint, out slot_us bigint, out until_us bigint, out delays integer, out ahead bigint[]
) language plpgsql volatile as $$
declare
  v_key uuid;
  v_before bigint;
  v_last bigint;
  v_place bigint;
  v_units bigint;
  v_ahead bigint;
begin
  now_us := {prefix}job_now_us();
  select max(c.until_us), array_agg(c.key) into closed_us, closed from {prefix}job_closed c where c.key = any(p_closed) and c.until_us > now_us;
  select w.since_us, w.slot_us, w.until_us, w.delays into since_us, slot_us, until_us, delays
    from {prefix}job_waiting w where w.job = p_job;
  ahead := '{}';
  foreach v_key in array p_keys loop
    select l.place, l.units into v_place, v_units from {prefix}job_line l where l.job = p_job and l.key = v_key;
    select l.place - l.units into v_before from {prefix}job_line l
      where l.key = v_key and l.slot_us > now_us - p_grace order by l.place limit 1;
    v_last := null;
    if v_place is null then
      select l.place into v_last from {prefix}job_line l where l.key = v_key order by l.place desc limit 1;
    end if;
    v_ahead := greatest(coalesce(v_last, v_place - v_units, 0) - coalesce(v_before, coalesce(v_last, v_place - v_units, 0)), 0);
    -- Places that were left between two others are counted by the difference; where the line is short, they are not.
    if v_ahead between 1 and 1000 then
      select coalesce(sum(l.units), 0) into v_ahead from {prefix}job_line l
        where l.key = v_key and l.place < coalesce(v_place, v_last + 1) and l.slot_us > now_us - p_grace;
    end if;
    ahead := ahead || v_ahead;
  end loop;
end $$;

-- Takes a place in the lines that are marked and that the job does not stand in yet, and looks: the place that it had (p_places),
-- if nobody has it, else the last.
create or replace function {prefix}job_stand(
  p_job text, p_queue text, p_type text, p_keys uuid[], p_labels text[], p_units bigint[], p_stands boolean[],
  p_places bigint[], p_since_us bigint, p_delays integer, p_closed uuid[], p_grace bigint,
  out now_us bigint, out closed_us bigint, out closed uuid[], out since_us bigint, out slot_us bigint, out until_us bigint, out delays integer, out ahead bigint[]
) language plpgsql volatile as $$
declare
  v_key uuid;
  v_last bigint;
begin
  for v_key in select distinct k from unnest(p_keys, p_stands, p_places) as t(k, stands, place)
      where stands or place is not null order by k loop
    perform pg_advisory_xact_lock(hashtextextended('{prefix}job_line ' || v_key::text, 0));
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

-- Writes when a job expects its turn, and until when it sleeps.
create or replace function {prefix}job_slot(p_job text, p_slot_us bigint, p_until_us bigint, p_binding text) returns void
language sql volatile as $$
  update {prefix}job_line set slot_us = p_slot_us where job = p_job;
  update {prefix}job_waiting set slot_us = p_slot_us, until_us = p_until_us, delays = delays + 1, binding = p_binding
    where job = p_job;
$$;

-- Takes a job out of all lines while it is charged, and answers what it had: who is charged already must not be ahead of others.
create or replace function {prefix}job_take(p_job text, p_keys uuid[], out places bigint[], out since_us bigint, out delays integer)
language plpgsql volatile as $$
begin
  select array_agg(l.place order by k.number) into places
    from unnest(p_keys) with ordinality as k(key, number) left join {prefix}job_line l on l.key = k.key and l.job = p_job;
  delete from {prefix}job_line where job = p_job;
  delete from {prefix}job_waiting w where w.job = p_job returning w.since_us, w.delays into since_us, delays;
end $$;

create or replace function {prefix}job_leave(p_job text) returns void language sql volatile as $$
  delete from {prefix}job_line where job = p_job;
  delete from {prefix}job_waiting where job = p_job;
$$;

-- The first jobs of these lines.
create or replace function {prefix}job_next(p_keys uuid[], p_count integer) returns setof text language sql stable as $$
  select distinct n.job from unnest(p_keys) as k(key)
    cross join lateral (select l.job from {prefix}job_line l where l.key = k.key order by l.place limit p_count) as n
$$;

-- The jobs that sleep, in the order of their slots, behind one of them.
create or replace function {prefix}job_sleepers(p_slot_us bigint, p_job text, p_count integer)
returns table (job text, slot_us bigint) language sql volatile as $$
  select w.job, w.slot_us from {prefix}job_waiting w
    where (w.slot_us, w.job) > (p_slot_us, p_job) and w.until_us > {prefix}job_now_us() order by w.slot_us, w.job limit p_count
$$;

-- Forgets a batch of jobs whose slot passed long ago and that nobody came for, and keys that are open again. Answers how many rows.
create or replace function {prefix}job_cleanup(p_keep_us bigint, p_batch integer) returns bigint language sql volatile as $$
  with gone as (
    delete from {prefix}job_waiting where job in (
      select w.job from {prefix}job_waiting w where w.slot_us < {prefix}job_now_us() - p_keep_us order by w.slot_us limit p_batch)
    returning job
  ), places as (
    delete from {prefix}job_line l using gone where l.job = gone.job returning 1
  ), opened as (
    delete from {prefix}job_closed where until_us < {prefix}job_now_us() returning 1
  )
  select (select count(*) from gone) + (select count(*) from places) + (select count(*) from opened)
$$;
