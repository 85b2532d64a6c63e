-- The tables, version 1. A later version is a separate file in this folder; see docs/storage.md for every field.

-- The state of a key under a limit. a, b and c are the fields of the strategy's twin, an instant first:
--   token_bucket, leaky_bucket   a full_us, b full_rest
--   fixed_window                 a end_us, b count
--   sliding_window               a newest_us, b total; the log is in {prefix}execution
--   sliding_window_counter       a start_us, b prev, c cur
--   concurrency                  a newest_us, b total; the leases are in {prefix}lease
-- At a + tail_us the state equals no state: the rest of a full bucket is less than 1 us, an ended window or lease does not count
-- (0), the newest entry of a log counts for one window, that of a counter for two. admitted says whether the last caller was
-- charged, and at_us is the time of that decision; no later charge is decided with an earlier time.
--
-- Pages are left half empty, so that the next version of a row fits on the same page and no index changes. For this, sweep_us,
-- when the cleanup next checks the row, is the only indexed column beside the key, and charges do not change it: if the cleanup
-- finds the row still needed, it moves it on.
create table {prefix}state (
  key uuid primary key,
  limit_name text not null,
  a bigint not null,
  b bigint not null,
  c bigint not null,
  admitted boolean not null,
  at_us bigint not null,
  tail_us bigint not null,
  sweep_us bigint not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

create index {prefix}state_sweep on {prefix}state (sweep_us);

-- The tracked executions: the log of every sliding window. They are deleted with the state of their key, or when they have
-- expired and the key is charged again.
create table {prefix}execution (
  key uuid not null,
  at_us bigint not null,
  cost bigint not null,
  primary key (key, at_us)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- The leases of concurrency limits. A holder is the id of a held charge, or zero for a charge without one.
create table {prefix}lease (
  key uuid not null,
  end_us bigint not null,
  holder uuid not null,
  cost bigint not null,
  primary key (key, end_us, holder)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Held charges. The arrays have one entry for each charged part (parameters have five); asked and readings are the request and
-- the values found, so that a repeated charge gets the same answer.
create table {prefix}hold (
  id uuid primary key,
  keys uuid[] not null,
  limit_names text[] not null,
  strategies smallint[] not null,
  parameters bigint[] not null,
  costs bigint[] not null,
  charged_at_us bigint[] not null,
  asked bigint[] not null,
  readings bigint[] not null,
  at_us bigint not null,
  ttl_us bigint not null,
  end_us bigint not null,
  settled boolean not null
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

create index {prefix}hold_end on {prefix}hold (end_us);

-- The outcome of one limit for one part of a charge; see look in charge.sql.
create type {prefix}said as (
  allowed boolean,
  x bigint,
  y bigint,
  z bigint,
  next_a bigint,
  next_b bigint,
  next_c bigint,
  next_tail_us bigint,
  charged_at_us bigint
);

-- One row with the id of the server's current life. The table is not logged, so PostgreSQL empties it after a crash and on a
-- standby that is promoted, and keeps it through an orderly restart: a process that finds another id than before knows that
-- charges of the last moments may be lost.
create unlogged table {prefix}life (
  one boolean primary key default true check (one),
  id uuid not null
);
