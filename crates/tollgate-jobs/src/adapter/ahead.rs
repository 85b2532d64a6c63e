//! Reads ahead in a queue, so that the jobs of one key that has to wait are not claimed one by one in front of all others.
//!
//! When a job was put off, others of its key are likely to be due behind it. They are read in pages, in the order in which apalis fetches,
//! and put off together (`gate/bulk.rs`): one page is one transaction, in which the rows of those that have to wait are locked, so that
//! workers pass over them to what may run. To lock a page takes a fraction of the time that it takes to write it, so the next one, and what is
//! pushed meanwhile, is locked while one is written. Jobs that would wake within some seconds only because they may not sleep longer are put off
//! again on the way.
//! One process reads ahead in a queue at a time. Should any of it fail, jobs are claimed one by one, as without it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use sqlx::postgres::types::PgHstore;
use sqlx::postgres::{PgConnection, PgPool, PgRow, Postgres};
use sqlx::{Row, Transaction};
use tokio::task::JoinHandle;

use super::layer::{JobArgs, plan_of};
use super::response::delayed_result;
use crate::gate::{JobGate, PutOff, Sleep, WeakGate, in_few_lines};
use crate::line::Line;
use crate::plan::Plan;
use crate::read_ahead::ANALYZE_EVERY;

/// How many jobs a page has. While it is written, jobs of its lines that were claimed before wait for it, and are then behind it. Between
/// two pages workers claim some more, one by one, so that few large pages are done sooner than many small ones.
const PAGE: i64 = 10_000;

/// How many bytes of arguments a page has: somebody may push large ones.
const PAGE_BYTES: i64 = 16 * 1024 * 1024;

/// How many pages are read at most in one go.
const PAGES: usize = 100;

/// How often it is looked for new jobs while a page is written.
const LOOK_EVERY: Duration = Duration::from_millis(25);

/// How long others of a page's keys are expected to have to wait while it is locked and written, and after. A look at a line that is being
/// written passes over all that is not there yet.
const WRITTEN_WITHIN: Duration = Duration::from_secs(10);
const EXPECTED: Duration = Duration::from_secs(1);

/// How many connections a pool must have for a page to be locked while another is written.
const MANY_CONNECTIONS: u32 = 6;

/// How long the first page waits: those that were claimed together with the job that was put off take their places first.
const SETTLE: Duration = Duration::from_millis(10);

/// How far ahead sleepers are put off again. Those that were put off together with the default `max_delay` wake within 15 s (`turn.rs`), so
/// that one go has all of them: until the first of the next one, none is claimed in vain.
const HORIZON: Duration = Duration::from_secs(20);

/// How often it is tried to renew them.
const ANALYZE_ATTEMPTS: u32 = 4;

/// Ends the go, also if its task is cancelled.
struct Go {
    gate: JobGate,
    queue: String,
    put_off: usize,
}

impl Drop for Go {
    fn drop(&mut self) {
        self.gate.read_ahead().end(&self.queue, self.put_off > 0);
    }
}

/// Reads ahead in the background, unless somebody does.
pub(super) fn read_ahead<Args: JobArgs + DeserializeOwned>(gate: &JobGate, queue: &str) {
    if !gate.read_ahead().begin(queue) {
        return;
    }
    let mut go = Go { gate: gate.clone(), queue: queue.to_owned(), put_off: 0 };
    tokio::spawn(async move {
        tokio::time::sleep(SETTLE).await;
        let mut writing = Writing(None);
        let read = go.pages::<Args>(&mut writing).await;
        let written = go.has_written(&mut writing).await;
        if let Err(error) = read.and(written.map(drop)) {
            tracing::debug!(%error, "jobs that wait cannot be put off together; they are claimed one by one");
        }
        let pause = go.gate.read_ahead().statistics.lock().add(go.put_off, Instant::now());
        let gate = go.gate.downgrade();
        drop(go);
        if let Some(pause) = pause {
            tokio::time::sleep(pause).await;
            renew_statistics(&gate).await;
        }
    });
}

/// Renews the statistics. The database passes over a table that somebody else has locked, a vacuum for one, and says nothing of it: so it is
/// looked whether they were renewed, and otherwise done again some time later.
async fn renew_statistics(gate: &WeakGate) {
    for attempt in 1..=ANALYZE_ATTEMPTS {
        {
            let Some(gate) = gate.upgrade() else { return };
            if attempt == 1 {
                gate.read_ahead().statistics.lock().renew(Instant::now());
            }
            // A role that does not own the table gets a warning of the database, and nothing else happens.
            match analyze(&gate.line().pool).await {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => {
                    tracing::debug!(%error, "the statistics of apalis.jobs cannot be renewed; autovacuum will");
                }
            }
        }
        tokio::time::sleep(ANALYZE_EVERY).await;
    }
}

/// Answers whether the statistics are new now.
async fn analyze(pool: &PgPool) -> Result<bool, sqlx::Error> {
    let now: i64 = sqlx::query_scalar("select (extract(epoch from clock_timestamp()) * 1000000)::bigint")
        .fetch_one(pool)
        .await?;
    sqlx::query("analyze (skip_locked) apalis.jobs").execute(pool).await?;
    let renewed = "select coalesce(greatest(last_analyze, last_autoanalyze) >= timestamptz 'epoch' + $1 * interval '1 microsecond', false)
        from pg_stat_all_tables where relid = 'apalis.jobs'::regclass";
    sqlx::query_scalar(renewed).bind(now).fetch_one(pool).await
}

/// The page that is being written.
struct Writing(Option<JoinHandle<Result<Option<usize>, sqlx::Error>>>);

impl Writing {
    /// Waits for it to end; answers how many jobs it has put off, or `None` if the limits cannot be asked.
    async fn finish(&mut self) -> Result<Option<usize>, sqlx::Error> {
        match self.0.take() {
            None => Ok(Some(0)),
            Some(page) => page.await.unwrap_or(Err(sqlx::Error::WorkerCrashed)),
        }
    }

    /// Waits a little for it to end; answers whether it goes on.
    async fn goes_on(&self) -> bool {
        if self.0.as_ref().is_some_and(|page| !page.is_finished()) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.0.as_ref().is_some_and(|page| !page.is_finished())
    }
}

impl Go {
    /// Waits for the page that is being written; answers whether there is a point in going on.
    async fn has_written(&mut self, writing: &mut Writing) -> Result<bool, sqlx::Error> {
        let put_off = writing.finish().await?;
        self.put_off = self.put_off.saturating_add(put_off.unwrap_or(0));
        Ok(put_off.is_some())
    }

    /// Reads page by page, to the end.
    async fn pages<Args: JobArgs + DeserializeOwned>(
        &mut self,
        writing: &mut Writing,
    ) -> Result<(), sqlx::Error> {
        let pipelines = self.gate.line().pool.options().get_max_connections() >= MANY_CONNECTIONS;
        let mut place = Cursor::Start;
        for _ in 0..PAGES {
            if !pipelines && !self.has_written(writing).await? {
                return Ok(());
            }
            let Some(found) = find_page::<Args>(&self.gate, &self.queue, &place, writing.0.is_some()).await?
            else {
                return Ok(());
            };
            let is_soon = matches!(place, Cursor::Soon { .. });
            if let Some(behind) = found.behind {
                place = behind;
            }
            if let Some(page) = found.page {
                // One after the other, in their order.
                if !self.has_written(writing).await? {
                    return Ok(());
                }
                writing.0 = Some(tokio::spawn(page.write(self.gate.clone(), self.queue.clone())));
            }
            match (found.is_last, is_soon) {
                (true, true) => return Ok(()),
                // What is pushed while a page is written is not left to be claimed.
                (true, false) if writing.goes_on().await => {}
                (true, false) => place = Cursor::soon(),
                (false, _) => {}
            }
        }
        Ok(())
    }
}

/// Where a page begins.
#[derive(Clone)]
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

/// What was found at a place.
struct FoundPage {
    /// The jobs that have to wait, if there are any.
    page: Option<Page>,
    /// The place behind all that was found, if anything was.
    behind: Option<Cursor>,
    /// Whether there was nothing behind it.
    is_last: bool,
}

/// Jobs that have to wait, whose rows are locked.
struct Page {
    transaction: Transaction<'static, Postgres>,
    plans: Vec<Plan>,
    /// When the sleep of each ends, if it goes on.
    ends_us: Option<Vec<u64>>,
    /// Of the policies that the plans were made by.
    version: u64,
}

/// What a crash of the database would lose is put off again, so nobody waits for the disk.
const LOCK_QUEUE: &str = "select pg_try_advisory_xact_lock(hashtextextended('{prefix}job_ahead ' || $1, 0)),
    set_config('synchronous_commit', 'off', true)";

/// Finds the jobs at a place and locks those that have to wait; `None` if another process reads ahead in this queue. It does not while this
/// one writes a page (`is_ours`).
async fn find_page<Args: JobArgs + DeserializeOwned>(
    gate: &JobGate,
    queue: &str,
    place: &Cursor,
    is_ours: bool,
) -> Result<Option<FoundPage>, sqlx::Error> {
    let line = gate.line();
    let version = gate.version();
    let mut transaction = line.pool.begin().await?;
    let (is_locked, _): (bool, String) =
        sqlx::query_as(line.sql(LOCK_QUEUE)).bind(queue).fetch_one(&mut *transaction).await?;
    if !is_locked && !is_ours {
        return Ok(None);
    }
    let goes_on = matches!(place, Cursor::Soon { .. });
    let found = find(line, &mut transaction, queue, place.clone()).await?;
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
    let behind = found[..count].last().map(|(id, priority, at_us, _)| match goes_on {
        true => Cursor::Soon { until_us: *at_us, id: id.clone() },
        false => Cursor::Behind { priority: *priority, run_at_us: *at_us, id: id.clone() },
    });
    let plans = plans.into_iter().flatten().collect();
    let (plans, ends_us) = lock_those_that_wait(gate, &mut transaction, plans, goes_on).await?;
    gate.expect_crowd(&plans, WRITTEN_WITHIN);
    let ends_us = goes_on.then_some(ends_us);
    let page = (!plans.is_empty()).then_some(Page { transaction, plans, ends_us, version });
    Ok(Some(FoundPage { page, behind, is_last }))
}

impl Page {
    /// Puts its jobs off; answers how many, or `None` if the limits cannot be asked.
    async fn write(self, gate: JobGate, queue: String) -> Result<Option<usize>, sqlx::Error> {
        let Page { mut transaction, plans, ends_us, version } = self;
        // The page before has ended, and with it its lock.
        sqlx::query(gate.line().sql(LOCK_QUEUE)).bind(&queue).execute(&mut *transaction).await?;
        let sleep = ends_us.as_deref().map_or(Sleep::IsOver, Sleep::GoesOn);
        let put_offs = gate.put_off_many(&mut transaction, &plans, sleep).await?;
        let Some(put_offs) = put_offs else { return Ok(None) };
        let put_off = &put_offs.jobs;
        if put_off.is_empty() {
            return Ok(Some(0));
        }
        let ids: Vec<String> = put_off.iter().map(|one| plans[one.index].job.clone()).collect();
        let untils: Vec<i64> =
            put_off.iter().map(|one| i64::try_from(one.until_us).unwrap_or(i64::MAX)).collect();
        if ends_us.is_some() {
            // It was put off before, so that all but the time is there.
            let text = "update apalis.jobs j set run_at = timestamptz 'epoch' + u.until_us * interval '1 microsecond'
                from unnest($1::text[], $2::bigint[]) as u(id, until_us) where j.id = u.id";
            sqlx::query(text).bind(&ids).bind(untils).execute(&mut *transaction).await?;
        } else {
            let result = |one: &PutOff| delayed_result(&one.limit, one.until_us);
            let results: Vec<serde_json::Value> = put_off.iter().map(result).collect();
            let text =
                "update apalis.jobs j set run_at = timestamptz 'epoch' + u.until_us * interval '1 microsecond',
                  last_result = case when j.status = 'Pending' then u.result else j.last_result end,
                  lock_by = case when j.status = 'Pending' then null else j.lock_by end,
                  lock_at = case when j.status = 'Pending' then null else j.lock_at end
                from unnest($1::text[], $2::bigint[], $3::jsonb[]) as u(id, until_us, result) where j.id = u.id";
            sqlx::query(text).bind(&ids).bind(untils).bind(results).execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        gate.have_put_off(&plans, sleep, &put_offs).await;
        gate.expect_crowd(&plans, EXPECTED);
        gate.call_if_changed(version, &ids).await;
        Ok(Some(put_off.len()))
    }
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
    let soon = "select j.id, j.priority, (extract(epoch from j.run_at) * 1000000)::bigint, octet_length(j.job) + coalesce(pg_column_size(j.metadata), 0)
        from apalis.jobs j join {prefix}job_waiting w on w.job = j.id
        where j.job_type = $1 and (j.status = 'Pending' or (j.status = 'Failed' and j.attempts < j.max_attempts)) and j.run_at > now() and j.run_at < now() + $2 * interval '1 microsecond'
          and (j.run_at, j.id) > (timestamptz 'epoch' + $4 * interval '1 microsecond', $5) and w.slot_us > (extract(epoch from j.run_at) * 1000000)::bigint + 1000000
        order by j.run_at, j.id limit $3";
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
/// all others are left to workers, who pass over what is locked. Answers those that it has locked, and for when each is written.
async fn lock_those_that_wait(
    gate: &JobGate,
    connection: &mut PgConnection,
    mut plans: Vec<Plan>,
    goes_on: bool,
) -> Result<(Vec<Plan>, Vec<u64>), sqlx::Error> {
    if !goes_on && !plans.is_empty() {
        let mut waits = gate.have_to_wait(&mut *connection, &plans).await?.into_iter();
        plans.retain(|_| waits.next() == Some(true));
    }
    if plans.is_empty() {
        return Ok((plans, Vec::new()));
    }
    let ids: Vec<&str> = plans.iter().map(|plan| plan.job.as_str()).collect();
    let lock = "select id, (extract(epoch from run_at) * 1000000)::bigint from apalis.jobs where id = any($1) and (run_at < now()) = $2
          and (status = 'Pending' or (status = 'Failed' and attempts < max_attempts)) for update skip locked";
    let locked = sqlx::query_as(lock).bind(ids).bind(!goes_on);
    let locked: Vec<(String, i64)> = locked.fetch_all(&mut *connection).await?;
    let locked: HashMap<String, i64> = locked.into_iter().collect();
    plans.retain(|plan| locked.contains_key(&plan.job));
    let at_us = |plan: &Plan| locked.get(&plan.job).and_then(|at_us| u64::try_from(*at_us).ok()).unwrap_or(0);
    let at_us = plans.iter().map(at_us).collect();
    Ok((plans, at_us))
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

/// What a job is to be charged; `None` if it meets no policy, or cannot be read: then it is left to who claims it.
fn plan<Args: JobArgs + DeserializeOwned>(gate: &JobGate, queue: &str, row: &PgRow) -> Option<Plan> {
    let id: String = row.try_get(0).ok()?;
    let args: Args = serde_json::from_slice(row.try_get::<&[u8], _>(1).ok()?).ok()?;
    let metadata: Option<PgHstore> = row.try_get(2).ok()?;
    let metadata = |name: &str| metadata.as_ref()?.get(name)?.clone();
    plan_of(gate, &id, queue, &args, &metadata).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_one_job_at_least_and_few_large_ones() {
        assert_eq!(in_budget([].into_iter()), 0);
        assert_eq!(in_budget([i32::MAX, 1].into_iter()), 1);
        assert_eq!(in_budget([100_000; 1_000].into_iter()), 167);
        assert_eq!(in_budget([200; 1_000].into_iter()), 1_000);
    }
}
