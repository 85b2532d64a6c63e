//! Reads ahead in a queue, so that the jobs of one key that has to wait are not claimed one by one in front of all others.
//!
//! When a job was put off, others of its key are likely to be due behind it. They are read in pages, in the order in which apalis fetches,
//! and put off together (`gate/bulk.rs`): one page is one transaction, in which the rows of those that have to wait are locked, so that
//! workers pass over them to what may run. Jobs that would wake within some seconds only because they may not sleep longer are put off
//! again on the way.
//! One process reads ahead in a queue at a time. Should any of it fail, jobs are claimed one by one, as without it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use sqlx::Row;
use sqlx::postgres::types::PgHstore;
use sqlx::postgres::{PgConnection, PgRow};
use uuid::Uuid;

use super::layer::{JobArgs, plan_of};
use super::response::delayed_result;
use crate::gate::{JobGate, PutOff, Sleep};
use crate::line::Line;
use crate::plan::Plan;

/// How many jobs a page has. While it is written, jobs of its lines that were claimed before wait for it, and are then behind it. Between
/// two pages workers claim some more, one by one, so that few large pages are done sooner than many small ones.
const PAGE: i64 = 10_000;

/// How many bytes of arguments a page has: somebody may push large ones.
const PAGE_BYTES: i64 = 16 * 1024 * 1024;

/// In how many lines the jobs of a page may stand, unless the first of them stands in more: each is locked while the page is written.
const PAGE_LINES: usize = 256;

/// How many pages are read at most in one go.
const PAGES: usize = 100;

/// How long the first page waits: those that were claimed together with the job that was put off take their places first.
const SETTLE: Duration = Duration::from_millis(10);

/// The pause after a go that found nothing to put off; it doubles up to the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// How far ahead sleepers are put off again: as many at once as one go puts off, and not sooner than they must.
const HORIZON: Duration = Duration::from_secs(5);

/// From how many jobs on polls pause while those of a page that have to wait are locked: what is claimed meanwhile is put off one by one,
/// which takes longer than all of the page.
const LARGE: usize = 1_000;

/// How long polls pause at most for one page.
const PAUSE: Duration = Duration::from_secs(1);

/// Which queues are being read ahead in by this process, and which are left alone until when.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadAhead {
    queues: Arc<Mutex<HashMap<String, Queue>>>,
    /// Until when polls pause, for each page that asks for it.
    pauses: Arc<Mutex<Vec<Instant>>>,
}

/// Polls pause until this is dropped, or for as long as they may.
struct PollPause {
    read_ahead: ReadAhead,
    until: Instant,
}

impl Drop for PollPause {
    fn drop(&mut self) {
        let mut pauses = self.read_ahead.pauses.lock();
        if let Some(index) = pauses.iter().position(|until| *until == self.until) {
            pauses.swap_remove(index);
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    is_busy: bool,
    /// Not before then, and the pause after the next go that finds nothing.
    after: Instant,
    pause: Duration,
}

impl ReadAhead {
    /// Whether polls pause now.
    pub(super) fn pauses_polls(&self) -> bool {
        let now = Instant::now();
        self.pauses.lock().iter().any(|until| *until > now)
    }

    fn pause_polls(&self) -> PollPause {
        let until = Instant::now() + PAUSE;
        self.pauses.lock().push(until);
        PollPause { read_ahead: self.clone(), until }
    }

    /// Whether it is this caller who reads now.
    fn begin(&self, queue: &str) -> bool {
        let now = Instant::now();
        let mut queues = self.queues.lock();
        match queues.get_mut(queue) {
            Some(state) if state.is_busy || state.after > now => false,
            Some(state) => {
                state.is_busy = true;
                true
            }
            None => {
                queues.insert(queue.to_owned(), Queue { is_busy: true, after: now, pause: PAUSES.0 });
                true
            }
        }
    }

    fn end(&self, queue: &str, has_put_off: bool) {
        if let Some(state) = self.queues.lock().get_mut(queue) {
            state.is_busy = false;
            state.after = Instant::now() + if has_put_off { Duration::ZERO } else { state.pause };
            state.pause = if has_put_off { PAUSES.0 } else { (state.pause * 2).min(PAUSES.1) };
        }
    }
}

/// Ends the go, also if its task is cancelled.
struct Go {
    gate: JobGate,
    queue: String,
    has_put_off: bool,
}

impl Drop for Go {
    fn drop(&mut self) {
        self.gate.read_ahead().end(&self.queue, self.has_put_off);
    }
}

/// Reads ahead in the background, unless somebody does.
pub(super) fn read_ahead<Args: JobArgs + DeserializeOwned>(gate: &JobGate, queue: &str) {
    if !gate.read_ahead().begin(queue) {
        return;
    }
    let mut go = Go { gate: gate.clone(), queue: queue.to_owned(), has_put_off: false };
    tokio::spawn(async move {
        tokio::time::sleep(SETTLE).await;
        let mut place = Cursor::Start;
        for _ in 0..PAGES {
            match page::<Args>(&go.gate, &go.queue, place).await {
                Ok(page) => {
                    go.has_put_off |= page.put_off > 0;
                    match page.next {
                        Some(next) => place = next,
                        None => return,
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "jobs that wait cannot be put off together; they are claimed one by one");
                    return;
                }
            }
        }
    });
}

/// Where a page begins.
enum Cursor {
    Start,
    /// Behind this job, in the order in which apalis fetches.
    Behind {
        priority: i32,
        run_at_us: i64,
        id: String,
    },
    /// Nothing is due any more: those that would wake soon, behind this one, in the order in which they do.
    Soon {
        until_us: i64,
        id: String,
    },
}

impl Cursor {
    fn soon() -> Cursor {
        Cursor::Soon { until_us: 0, id: String::new() }
    }
}

struct Page {
    put_off: usize,
    /// Where the next begins; `None` at the end.
    next: Option<Cursor>,
}

async fn page<Args: JobArgs + DeserializeOwned>(
    gate: &JobGate,
    queue: &str,
    place: Cursor,
) -> Result<Page, sqlx::Error> {
    let line = gate.line();
    let version = gate.version();
    let mut transaction = line.pool.begin().await?;
    // What a crash of the database would lose is put off again.
    let lock = "select pg_try_advisory_xact_lock(hashtextextended('{prefix}job_ahead ' || $1, 0)),
        set_config('synchronous_commit', 'off', true)";
    let (is_ours, _): (bool, String) =
        sqlx::query_as(line.sql(lock)).bind(queue).fetch_one(&mut *transaction).await?;
    if !is_ours {
        return Ok(Page { put_off: 0, next: None });
    }
    let sleep = if matches!(place, Cursor::Soon { .. }) { Sleep::GoesOn } else { Sleep::IsOver };
    let found = find(line, &mut transaction, queue, place).await?;
    let is_large = sleep == Sleep::IsOver && found.len() >= LARGE;
    let pause = is_large.then(|| gate.read_ahead().pause_polls());
    let count = in_budget(found.iter().map(|(.., bytes)| *bytes));
    let ids: Vec<&str> = found[..count].iter().map(|(id, ..)| id.as_str()).collect();
    let read = "select j.id, j.job, j.metadata from unnest($1::text[]) with ordinality as u(id, number) join apalis.jobs j on j.id = u.id
        order by u.number";
    let rows = match ids.is_empty() {
        true => Vec::new(),
        false => sqlx::query(read).bind(&ids).fetch_all(&mut *transaction).await?,
    };
    let mut plans: Vec<Option<Plan>> = rows.iter().map(|row| plan::<Args>(gate, queue, row)).collect();
    let lines = plans.iter().map(|plan| plan.as_ref().map(Plan::lines).unwrap_or_default());
    plans.truncate(in_few_lines(lines));
    let count = plans.len();
    let is_last = count == found.len() && i64::try_from(count).is_ok_and(|count| count < PAGE);
    let next = match (found[..count].last().filter(|_| !is_last), sleep) {
        (Some((id, _, until_us, _)), Sleep::GoesOn) => {
            Some(Cursor::Soon { until_us: *until_us, id: id.clone() })
        }
        (None, Sleep::GoesOn) => None,
        (Some((id, priority, run_at_us, _)), Sleep::IsOver) => {
            Some(Cursor::Behind { priority: *priority, run_at_us: *run_at_us, id: id.clone() })
        }
        (None, Sleep::IsOver) => Some(Cursor::soon()),
    };
    let plans = plans.into_iter().flatten().collect();
    let plans = lock_those_that_wait(gate, &mut transaction, plans, sleep).await?;
    // Workers pass over those that are locked.
    drop(pause);
    if plans.is_empty() {
        return Ok(Page { put_off: 0, next });
    }
    let Some(put_off) = gate.put_off_many(&mut transaction, &plans, sleep).await? else {
        return Ok(Page { put_off: 0, next: None });
    };
    if put_off.is_empty() {
        return Ok(Page { put_off: 0, next });
    }
    let ids: Vec<String> = put_off.iter().map(|one| plans[one.index].job.clone()).collect();
    let untils: Vec<i64> =
        put_off.iter().map(|one| i64::try_from(one.until_us).unwrap_or(i64::MAX)).collect();
    let results: Vec<serde_json::Value> =
        put_off.iter().map(|PutOff { limit, until_us, .. }| delayed_result(limit, *until_us)).collect();
    let text =
        "update apalis.jobs j set run_at = timestamptz 'epoch' + u.until_us * interval '1 microsecond',
          last_result = case when j.status = 'Pending' then u.result else j.last_result end,
          lock_by = case when j.status = 'Pending' then null else j.lock_by end,
          lock_at = case when j.status = 'Pending' then null else j.lock_at end
        from unnest($1::text[], $2::bigint[], $3::jsonb[]) as u(id, until_us, result) where j.id = u.id";
    sqlx::query(text).bind(&ids).bind(untils).bind(results).execute(&mut *transaction).await?;
    transaction.commit().await?;
    gate.call_if_changed(version, &ids).await;
    Ok(Page { put_off: put_off.len(), next })
}

/// The next jobs that are due, or that would wake soon, each with its priority, its time and its size. They are not locked: that would keep
/// workers from those that may run.
async fn find(
    line: &Line,
    connection: &mut PgConnection,
    queue: &str,
    place: Cursor,
) -> Result<Vec<(String, i32, i64, i32)>, sqlx::Error> {
    let due = "select id, priority, (extract(epoch from run_at) * 1000000)::bigint, octet_length(job) + coalesce(pg_column_size(metadata), 0)
        from apalis.jobs
        where job_type = $1 and (status = 'Pending' or (status = 'Failed' and attempts < max_attempts)) and run_at < now()
          and ($2 is null or priority < $2 or (priority = $2 and (run_at, id) > (timestamptz 'epoch' + $3 * interval '1 microsecond', $4)))
        order by priority desc, run_at, id limit $5";
    let soon = "select j.id, j.priority, w.until_us, octet_length(j.job) + coalesce(pg_column_size(j.metadata), 0)
        from {prefix}job_waiting w join apalis.jobs j on j.id = w.job
        where w.queue = $1 and w.until_us between {prefix}job_now_us() and {prefix}job_now_us() + $2 and w.slot_us > w.until_us + 1000000
          and (w.until_us, w.job) > ($4, $5) and j.status = 'Pending' and j.job_type = $1 and j.run_at > now()
        order by w.until_us, w.job limit $3";
    let (priority, run_at_us, id) = match place {
        Cursor::Soon { until_us, id } => {
            let horizon = i64::try_from(HORIZON.as_micros()).unwrap_or(i64::MAX);
            let query = sqlx::query_as(line.sql(soon)).bind(queue).bind(horizon).bind(PAGE);
            return query.bind(until_us).bind(id).fetch_all(connection).await;
        }
        Cursor::Start => (None, None, None),
        Cursor::Behind { priority, run_at_us, id } => (Some(priority), Some(run_at_us), Some(id)),
    };
    let query = sqlx::query_as(line.sql(due)).bind(queue).bind(priority).bind(run_at_us).bind(id);
    query.bind(PAGE).fetch_all(connection).await
}

/// Locks the rows of those of these jobs that will have to wait, as far as nobody else has them: no worker claims what is being put off, and
/// all others are left to workers, who pass over what is locked.
async fn lock_those_that_wait(
    gate: &JobGate,
    connection: &mut PgConnection,
    mut plans: Vec<Plan>,
    sleep: Sleep,
) -> Result<Vec<Plan>, sqlx::Error> {
    if sleep == Sleep::IsOver && !plans.is_empty() {
        let mut waits = gate.have_to_wait(&mut *connection, &plans).await?.into_iter();
        plans.retain(|_| waits.next() == Some(true));
    }
    if plans.is_empty() {
        return Ok(plans);
    }
    let ids: Vec<&str> = plans.iter().map(|plan| plan.job.as_str()).collect();
    let lock = "select id from apalis.jobs where id = any($1) and (run_at < now()) = $2
          and (status = 'Pending' or (status = 'Failed' and attempts < max_attempts)) for update skip locked";
    let locked = sqlx::query_scalar(lock).bind(ids).bind(sleep == Sleep::IsOver);
    let locked: HashSet<String> = locked.fetch_all(&mut *connection).await?.into_iter().collect();
    plans.retain(|plan| locked.contains(&plan.job));
    Ok(plans)
}

/// How many jobs of these sizes are read at once: at least one.
fn in_budget(sizes: impl Iterator<Item = i32>) -> usize {
    let mut left = PAGE_BYTES;
    let fits = sizes.enumerate().take_while(|(index, bytes)| {
        left = left.saturating_sub(i64::from(*bytes));
        *index == 0 || left > 0
    });
    fits.count()
}

/// How many jobs that stand in these lines are put off at once: at least one.
fn in_few_lines(lines: impl Iterator<Item = Vec<Uuid>>) -> usize {
    let mut all = HashSet::new();
    let fits = lines.enumerate().take_while(|(index, lines)| {
        all.extend(lines.iter().copied());
        *index == 0 || all.len() <= PAGE_LINES
    });
    fits.count()
}

/// What a job is to be charged; `None` if it meets no policy, or cannot be read: then it is left to who claims it.
fn plan<Args: JobArgs + DeserializeOwned>(gate: &JobGate, queue: &str, row: &PgRow) -> Option<Plan> {
    let id: String = row.try_get(0).ok()?;
    let args: Args = serde_json::from_slice(row.try_get::<&[u8], _>(1).ok()?).ok()?;
    let metadata: Option<PgHstore> = row.try_get(2).ok()?;
    let metadata = |name: &str| metadata.as_ref()?.get(name)?.clone();
    plan_of(gate, &id, queue, &args, &metadata)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_pause_until_the_last_page_has_locked_its_jobs() {
        let read_ahead = ReadAhead::default();
        assert!(!read_ahead.pauses_polls());
        let (one, other) = (read_ahead.pause_polls(), read_ahead.pause_polls());
        drop(one);
        assert!(read_ahead.pauses_polls());
        drop(other);
        assert!(!read_ahead.pauses_polls());
        // One that hangs does not stop a worker.
        read_ahead.pauses.lock().push(Instant::now());
        assert!(!read_ahead.pauses_polls());
    }

    #[test]
    fn a_page_has_one_job_at_least_and_few_large_ones() {
        assert_eq!(in_budget([].into_iter()), 0);
        assert_eq!(in_budget([i32::MAX, 1].into_iter()), 1);
        assert_eq!(in_budget([100_000; 1_000].into_iter()), 167);
        assert_eq!(in_budget([200; 1_000].into_iter()), 1_000);
    }

    #[test]
    fn a_page_has_one_job_at_least_and_few_lines() {
        let line = |number: u128| Uuid::from_u128(number);
        assert_eq!(in_few_lines([].into_iter()), 0);
        assert_eq!(in_few_lines((0..1_000).map(|_| vec![line(1), line(2)])), 1_000, "all stand in the same");
        assert_eq!(in_few_lines((0..1_000).map(|number| vec![line(number)])), 256);
        assert_eq!(in_few_lines((1..1_000).map(|number| vec![line(0), line(number)])), 255);
        assert_eq!(in_few_lines((0..10).map(|_| (0..1_000).map(line).collect())), 1);
        assert_eq!(
            in_few_lines((0..1_000).map(|_| Vec::new())),
            1_000,
            "what meets no policy stands in none"
        );
    }
}
