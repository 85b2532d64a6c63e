-- Jobs that wake soon are found in the framework's own table, by its index. A sleep that is prolonged then changes no index of this one, and its
-- row stays on its page if there is room.
drop index {prefix}job_waiting_until;
alter table {prefix}job_waiting set (fillfactor = 70);
