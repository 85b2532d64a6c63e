-- The last jobs that were held up, for people who look; the older ones are removed as new ones come.
create table {prefix}job_lately (
  id bigint generated always as identity primary key,
  at_us bigint not null,
  job_type text not null,
  label text not null,
  behavior text not null,
  wait_us bigint not null
);
