-- One row for each job that waits, whatever it waits for.
create table {prefix}job_waiting (
  job text primary key,
  queue text not null,
  job_type text not null,
  since_us bigint not null,
  slot_us bigint not null,
  until_us bigint not null,
  delays integer not null,
  binding text not null
);
create index {prefix}job_waiting_slot on {prefix}job_waiting (slot_us);

-- One row for each line that a job stands in. A place is the sum of all units up to and with it, so that what is ahead of a job is
-- a difference of two places and not a count.
create table {prefix}job_line (
  key uuid not null,
  place bigint not null,
  job text not null,
  label text not null,
  units bigint not null,
  slot_us bigint not null,
  primary key (key, place)
);
create unique index {prefix}job_line_job on {prefix}job_line (job, key);
create index {prefix}job_line_label on {prefix}job_line (label, slot_us);

-- Keys that are closed until a time.
create table {prefix}job_closed (
  key uuid primary key,
  label text not null,
  until_us bigint not null,
  reason text not null
);
