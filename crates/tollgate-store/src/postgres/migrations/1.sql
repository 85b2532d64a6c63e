-- The tables, version 1. A later version is a file of its own beside this one; see docs/storage.md for every field.

-- What is remembered of a key under a limit. a, b and c are the state in the words of the strategy's twin, an instant first:
--   token_bucket, leaky_bucket   a full_us, b full_rest
--   fixed_window                 a end_us, b count
--   sliding_window               a newest_us, b total; the log is in {prefix}execution
--   sliding_window_counter       a start_us, b prev, c cur
--   concurrency                  a newest_us, b total; the leases are in {prefix}lease
-- At a + tail_us the state says no more than a fresh one: a full bucket's rest is less than 1 us, an ended window or lease says
-- nothing (0), a log's newest entry counts for a window, a counter's for two. admitted and at_us tell the last caller whether
-- it was charged, and the time by which that was decided, before which no later charge is decided.
--
-- Pages are left half empty, so that the next version of a row finds room beside the last and no index is touched. For that
-- sweep_us, when the cleanup next looks at the row, is the only column but the key with an index, and charges leave it alone:
-- when the cleanup finds the row still alive, it moves it on.
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

-- The tracked executions: the log of every sliding window. They go with their key's state, or when they have run out and the
-- key is charged again.
create table {prefix}execution (
  key uuid not null,
  at_us bigint not null,
  cost bigint not null,
  primary key (key, at_us)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- The leases of concurrency limits. A holder is the name of a held charge, or zero for a charge without one.
create table {prefix}lease (
  key uuid not null,
  end_us bigint not null,
  holder uuid not null,
  cost bigint not null,
  primary key (key, end_us, holder)
) with (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_cost_delay = 0);

-- Held charges. The arrays have one entry for each part that was charged (parameters have five), and asked and readings say
-- what was asked and found, so that a charge that is sent again is answered as before.
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

-- What one limit says of one part of a charge; see look in charge.sql.
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

-- One row that names the life the server lives. The table is not logged, so PostgreSQL empties it after a crash and on a standby
-- that takes over, and keeps it through an orderly restart: whoever finds another name than before knows that the last moments
-- of what was charged may be lost.
create unlogged table {prefix}life (
  one boolean primary key default true check (one),
  id uuid not null
);
