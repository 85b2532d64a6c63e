-- The tables, version 4: a short log is in its state (see short_log.sql), and there are records, which servers share beside
-- counters. Logs of version 3 stay in chunks until they are empty, or short and charged again. No function that a program calls
-- changes, so a running program of version 3 keeps working; see docs/storage.md.
drop function if exists {prefix}log_push({prefix}state, bigint, bigint);

-- sliding_window: log_us has the times of its entries, log_sums the running sums including dropped entries; or null
alter table {prefix}state add column log_us bigint[], add column log_sums bigint[];

create table {prefix}record (
  kind text not null, id text not null, payload text not null, ends_us bigint, primary key (kind, id));

-- One row for each kind. Every change of a record locks it first, and a caller that knows its revision need not read the records.
create table {prefix}record_revision (kind text primary key, revision bigint not null);

-- A role with privileges on the states gets the same on records.
do $$
declare granted record;
begin
  for granted in
    select a.privilege_type as privilege, case a.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(a.grantee)) end as grantee
    from pg_class as c, aclexplode(c.relacl) as a
    where c.oid = '{prefix}state'::regclass and a.privilege_type in ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
  loop
    execute format('grant %s on {prefix}record, {prefix}record_revision to %s', granted.privilege, granted.grantee);
  end loop;
end $$;
