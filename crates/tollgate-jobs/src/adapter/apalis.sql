-- Makes the ack of a delayed job its reschedule: one UPDATE, so that no worker sees it in between.
create or replace function {prefix}job_defer_on_ack() returns trigger language plpgsql as $$
declare
  answer jsonb := new.last_result -> 'Ok';
begin
  new.run_at := coalesce(
    timestamptz 'epoch' + (answer ->> 'until_us')::bigint * interval '1 microsecond',
    clock_timestamp() + (answer ->> 'wait_us')::bigint * interval '1 microsecond',
    clock_timestamp() + interval '1 second');
  new.attempts := old.attempts;
  new.lock_by := null;
  new.lock_at := null;
  new.done_at := null;
  return new;
end $$;

drop trigger if exists {prefix}job_defer on apalis.jobs;
create trigger {prefix}job_defer before update of status on apalis.jobs for each row
  when (new.status = 'Pending' and old.status in ('Queued', 'Running')
    and new.last_result -> 'Ok' ->> 'tollgate' = 'delayed' and new.last_result is distinct from old.last_result)
  execute function {prefix}job_defer_on_ack();
