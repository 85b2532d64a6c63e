-- Records: what servers share beside counters. There are few of each kind.

-- The revision of a kind and all its records, or no records if the caller knows this revision.
create or replace function {prefix}read_records(
    record_kind text, known bigint, clock_us bigint,
    out at_us bigint, out revision bigint, out ids text[], out payloads text[], out ends bigint[])
stable language plpgsql as $$
begin
  at_us := coalesce(clock_us, {prefix}now_us());
  select r.revision into revision from {prefix}record_revision as r where r.kind = record_kind;
  revision := coalesce(revision, 0);
  if revision = known then return; end if;
  select coalesce(array_agg(r.id), '{}'), coalesce(array_agg(r.payload), '{}'), coalesce(array_agg(coalesce(r.ends_us, 0)), '{}')
  into ids, payloads, ends
  from {prefix}record as r where r.kind = record_kind;
end
$$;

-- Stores a record if there are fewer than `most` others of its kind. If not, removes the one that ends first if the kind makes
-- room, or rejects the record if it does not.
create or replace function {prefix}put_record(
    record_kind text, record_id text, record_payload text, record_ends_us bigint, most integer, makes_room boolean, durable boolean,
    clock_us bigint, not_after timestamptz, out at_us bigint, out is_kept boolean)
volatile language plpgsql as $$
begin
  if durable then perform set_config('synchronous_commit', 'on', true); end if;
  at_us := coalesce(clock_us, {prefix}now_us());
  insert into {prefix}record_revision as r (kind, revision) values (record_kind, at_us)
    on conflict (kind) do update set revision = greatest(r.revision + 1, excluded.revision);
  perform {prefix}refuse_if_late(not_after);
  delete from {prefix}record as r where r.kind = record_kind and r.ends_us <= at_us;
  is_kept := true;
  if not exists (select from {prefix}record as r where r.kind = record_kind and r.id = record_id)
     and (select count(*) from {prefix}record as r where r.kind = record_kind) >= most then
    if makes_room then
      delete from {prefix}record as r where r.kind = record_kind and r.id = (
        select o.id from {prefix}record as o where o.kind = record_kind and o.ends_us is not null order by o.ends_us limit 1);
      is_kept := found;
    else
      is_kept := false;
    end if;
  end if;
  if is_kept then
    insert into {prefix}record as r (kind, id, payload, ends_us) values (record_kind, record_id, record_payload, record_ends_us)
      on conflict (kind, id) do update set payload = excluded.payload, ends_us = excluded.ends_us;
  end if;
end
$$;

create or replace function {prefix}remove_record(
    record_kind text, record_id text, clock_us bigint, not_after timestamptz, out at_us bigint, out removed boolean)
volatile language plpgsql as $$
declare
  ended_us bigint;
begin
  perform set_config('synchronous_commit', 'on', true);
  at_us := coalesce(clock_us, {prefix}now_us());
  update {prefix}record_revision as r set revision = greatest(r.revision + 1, at_us) where r.kind = record_kind;
  perform {prefix}refuse_if_late(not_after);
  delete from {prefix}record as r where r.kind = record_kind and r.id = record_id returning coalesce(r.ends_us, at_us + 1) into ended_us;
  removed := found and ended_us > at_us;
end
$$;
