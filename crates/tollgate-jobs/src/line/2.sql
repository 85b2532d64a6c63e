-- Jobs that sleep as long as they may, by when they wake.
create index {prefix}job_waiting_until on {prefix}job_waiting (queue, until_us);
