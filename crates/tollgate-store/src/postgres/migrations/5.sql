-- The tables, version 5: few leases are in their state (see short_leases.sql). Leases of version 4 stay in chunks until they are
-- few and one more is taken. No function that a program calls changes, so a running program of version 4 keeps working; see
-- docs/storage.md.
drop function if exists {prefix}short_log_give_back({prefix}state, bigint, bigint);

-- concurrency: log_us has the ends of its leases, log_sums the running sums as in a log, and holders the holder of each, or null
-- if no lease has one.
alter table {prefix}state add column holders uuid[];
