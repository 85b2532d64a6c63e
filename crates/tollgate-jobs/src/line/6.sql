-- A place in the line of a limit that is not what makes its job wait: it is kept, and holds up nobody behind it.
alter table {prefix}job_line add column parked boolean not null default false;
create index {prefix}job_line_counted on {prefix}job_line (key, place) where not parked;
create index {prefix}job_line_parked on {prefix}job_line (key, place) where parked;
