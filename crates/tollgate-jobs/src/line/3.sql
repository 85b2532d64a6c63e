-- What became of jobs, by minute and label; the label of all jobs together is empty. Workers add to it every few seconds.
create table {prefix}job_history (
  minute bigint not null,
  label text not null,
  started bigint not null,
  delayed bigint not null,
  rejected bigint not null,
  skipped bigint not null,
  primary key (minute, label)
);
