//! Reads what there is to see of jobs from their database (`line.rs` beside this has what the line says), and closes and opens keys for people.
//!
//! Read for people and for `GET /v1/jobs`, and never on the way of a job. Every statement is bounded: it looks at so many rows, for so
//! long, on connections of its own, so that a long line costs a look and not the workers. What counts under a limit is asked of the gate;
//! nothing here counts.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::{PgConnection, PgPoolOptions};
use tollgate::config::Config;
use tollgate::{Limit, Tollgate};

use super::{HeldUpJob, JobCount, JobKey, JobWorkers, JobsOverview, OpenedKey, Unreadable};
use crate::error::Error;
use crate::gate::{closing, held_by};
use crate::history::{ALL, JobCounts};
use crate::limits::{JobLimits, JobScope, JobsConfig};
use crate::line::{Called, Line};
use crate::open::{database, reach};
use crate::wake::{ApalisRows, Wake};

/// How long a statement may take, and a connection.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long the jobs of a key that was opened may be called for.
const CALLING: Duration = Duration::from_secs(10);

/// How long after the others those of them are called that workers had in their hands.
const PUT_BACK: Duration = Duration::from_millis(500);

/// How many rows of the line are looked at. Beyond, numbers are lower bounds, and [`JobsOverview::is_cut`] says so.
pub(super) const MOST_ROWS: i64 = 100_000;

/// How many keys are shown, and how many of the jobs that were held up.
pub(super) const MOST_KEYS: usize = 200;
const MOST_LATELY: i64 = 10;

/// A worker that was heard from before this is gone, and one that was not heard from for as long as this is late.
const WORKER_GONE: &str = "1 day";
const WORKER_LATE: &str = "90 seconds";

/// Reads what the jobs' database says. Connects when it is first asked, and again when it must. Cheap to clone.
#[derive(Clone, Debug)]
pub struct JobsReader {
    pub(super) line: Line,
}

/// What a read came to.
type Read<T> = Result<T, (Unreadable, Error)>;

impl JobsReader {
    /// A reader of the database that a configuration names. Connects to nothing yet.
    pub fn of(config: &Config, jobs: &JobsConfig) -> Result<JobsReader, Error> {
        let (options, prefix) = database(config, jobs)?;
        let milliseconds = TIMEOUT.as_millis().to_string();
        let options = options
            .application_name("tollgate page")
            .options([("statement_timeout", milliseconds.as_str()), ("lock_timeout", milliseconds.as_str())]);
        let pool =
            PgPoolOptions::new().max_connections(2).acquire_timeout(TIMEOUT).connect_lazy_with(options);
        Ok(JobsReader { line: Line { pool, prefix: prefix.to_owned() } })
    }

    /// Whether the database answers at all; the error names its address, without a password, and why it does not.
    pub async fn reach(&self) -> Result<(), Error> {
        reach(&self.line.pool.connect_options()).await
    }

    /// All there is to see, under these policies. The counts are the gate's.
    pub async fn read(&self, tollgate: &Tollgate, jobs: &JobsConfig) -> Read<JobsOverview> {
        let reading = async {
            let mut connection = self.line.pool.acquire().await?;
            let mut overview = self.line(&mut connection, jobs).await?;
            overview.workers = self.workers(&mut connection).await;
            self.hour(&mut connection, &mut overview).await?;
            self.lately(&mut connection, &mut overview).await?;
            Ok(overview)
        };
        let mut overview = in_time(reading).await.map_err(unreadable)?;
        for (scope, limits) in jobs.scopes().take(MOST_KEYS) {
            if let Some(key) = overview.keys.iter_mut().find(|key| is_key(scope, &key.key)) {
                count(tollgate, scope, limits, key).await;
            }
        }
        Ok(overview)
    }

    /// How many jobs wait.
    pub async fn waiting(&self) -> Read<u64> {
        let text = "select count(*) from (select 1 from {prefix}job_waiting limit $1) as w";
        let call = sqlx::query_scalar(self.line.sql(text)).bind(MOST_ROWS).fetch_one(&self.line.pool);
        in_time(call).await.map(unsigned).map_err(unreadable)
    }

    /// Closes a key for some time, for all workers, as [`JobGate::close`](crate::JobGate::close) does. Answers what is shown of the key.
    pub async fn close(&self, key: &str, wait: Duration, reason: &str) -> Result<String, Error> {
        let (name, label) = closing(key)?;
        let closed = in_time(self.line.close(name, &label, wait, reason)).await;
        closed.map_err(|error| Error::database("closing a key", error))?;
        Ok(label)
    }

    /// Opens a key that was closed, and with `values` each value of the field that splits it, and what its jobs have closed. Its jobs are called, if apalis has them and the
    /// database role may do so.
    pub async fn open(&self, key: &str, values: bool, jobs: &JobsConfig) -> Result<OpenedKey, Error> {
        let failed = |error| Error::database("opening a key", error);
        let (name, label) = closing(key)?;
        let called = held_by(key, jobs)?;
        let opened = if values {
            let text = "delete from {prefix}job_closed where key = $1 or label = $2";
            let call = sqlx::query(self.line.sql(text)).bind(name).bind(&label).execute(&self.line.pool);
            in_time(call).await.map_err(failed)?.rows_affected()
        } else {
            u64::from(in_time(self.line.open(name)).await.map_err(failed)?)
        };
        let called = if opened > 0 { self.call(&called).await } else { Some(0) };
        Ok(OpenedKey { label, opened, called })
    }

    /// Calls jobs that sleep; `None` if they cannot be called.
    async fn call(&self, called: &Called) -> Option<u64> {
        let calling = async {
            let rows = ApalisRows::of(&self.line.pool).await;
            let rows = rows.map_err(|error| Error::database("calling waiting jobs", error))?;
            match rows {
                Some(rows) => {
                    let (mut count, in_hands) = self.line.call(called, &rows).await?;
                    if !in_hands.is_empty() {
                        // Workers are about to put these back.
                        tokio::time::sleep(PUT_BACK).await;
                        count += rows.wake(&in_hands).await?;
                    }
                    Ok::<_, Error>(Some(count))
                }
                None => Ok(None),
            }
        };
        match tokio::time::timeout(CALLING, calling).await {
            Ok(Ok(count)) => count,
            Ok(Err(error)) => {
                tracing::warn!(%error, "a key was opened, and its jobs cannot be called; they look again by themselves");
                None
            }
            Err(_) => None,
        }
    }

    /// What became of jobs in the last hour.
    async fn hour(
        &self,
        connection: &mut PgConnection,
        overview: &mut JobsOverview,
    ) -> Result<(), sqlx::Error> {
        let there = format!("select to_regclass('{}job_history') is not null", self.line.prefix);
        if !sqlx::query_scalar(sqlx::AssertSqlSafe(there)).fetch_one(&mut *connection).await? {
            return Ok(());
        }
        let labels: Vec<&str> = overview.keys.iter().map(|key| key.key.as_str()).chain([ALL]).collect();
        let text = "select label, sum(started)::bigint, sum(delayed)::bigint, sum(rejected)::bigint, sum(skipped)::bigint
            from {prefix}job_history where minute > $1 / 1000000 - 3600 and label = any($2) group by label";
        let now = i64::try_from(overview.now_us).unwrap_or(i64::MAX);
        let rows: Vec<(String, i64, i64, i64, i64)> =
            sqlx::query_as(self.line.sql(text)).bind(now).bind(labels).fetch_all(connection).await?;
        let find = |label: &str| {
            let Some((_, started, delayed, rejected, skipped)) = rows.iter().find(|row| row.0 == label)
            else {
                return JobCounts::default();
            };
            let [started, delayed, rejected, skipped] =
                [*started, *delayed, *rejected, *skipped].map(unsigned);
            JobCounts { started, delayed, rejected, skipped }
        };
        overview.hour = Some(find(ALL));
        overview.keys.iter_mut().for_each(|key| key.hour = Some(find(&key.key)));
        Ok(())
    }

    /// The last jobs that were held up, if the workers are of a version that writes that down.
    async fn lately(
        &self,
        connection: &mut PgConnection,
        overview: &mut JobsOverview,
    ) -> Result<(), sqlx::Error> {
        let there = format!("select to_regclass('{}job_lately') is not null", self.line.prefix);
        if !sqlx::query_scalar(sqlx::AssertSqlSafe(there)).fetch_one(&mut *connection).await? {
            return Ok(());
        }
        let text = "select greatest(0, $1 - at_us), left(job_type, 64), left(label, 200), behavior, wait_us
            from {prefix}job_lately order by at_us desc, id desc limit $2";
        let now = i64::try_from(overview.now_us).unwrap_or(i64::MAX);
        let rows: Vec<(i64, String, String, String, i64)> =
            sqlx::query_as(self.line.sql(text)).bind(now).bind(MOST_LATELY).fetch_all(connection).await?;
        let span = |us: i64| Duration::from_micros(unsigned(us));
        let held_up = |(ago, job_type, key, behaviour, wait)| HeldUpJob {
            ago: span(ago),
            job_type,
            key,
            behaviour,
            wait: span(wait),
        };
        overview.lately = rows.into_iter().map(held_up).collect();
        Ok(())
    }

    /// The workers that apalis has noted, if it is apalis that has the jobs.
    async fn workers(&self, connection: &mut PgConnection) -> Option<JobWorkers> {
        let there = "select to_regclass('apalis.workers') is not null";
        let is_there: bool = sqlx::query_scalar(there).fetch_one(&mut *connection).await.ok()?;
        if !is_there {
            return None;
        }
        let text = format!(
            "select count(*), count(*) filter (where last_seen > now() - interval '{WORKER_LATE}') from (
               select last_seen from apalis.workers where last_seen > now() - interval '{WORKER_GONE}'
               order by last_seen desc limit 1000) as w"
        );
        let row = sqlx::query(sqlx::AssertSqlSafe(text)).fetch_one(&mut *connection).await.ok()?;
        let number = |index: usize| row.try_get(index).ok().map(unsigned);
        Some(JobWorkers { known: number(0)?, heard_from: number(1)? })
    }
}

/// Asks the gate how the limits of a scope stand.
async fn count(tollgate: &Tollgate, scope: JobScope<'_>, limits: &JobLimits, key: &mut JobKey) {
    for (name, limit) in limits.named(scope) {
        let outcome = match key.split_by {
            Some(_) => None,
            None => tollgate.status(name.as_str(), key.key.as_str()).await.ok(),
        };
        let is_concurrency = matches!(limit, Limit::Concurrency(_));
        let used = outcome.as_ref().map(tollgate::Outcome::used);
        if is_concurrency {
            key.running = used;
        }
        key.limits.push(JobCount {
            limit: name,
            rule: limit.to_string(),
            capacity: outcome.as_ref().map_or_else(|| limit.capacity(), tollgate::Outcome::capacity),
            is_concurrency,
            count: used,
            resets_after: outcome.as_ref().map(tollgate::Outcome::reset_after),
        });
    }
}

fn is_key(scope: JobScope<'_>, key: &str) -> bool {
    scope.key().is_ok_and(|own| own.canonical() == key)
}

pub(super) fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// A server that is frozen keeps no timeout of its own.
async fn in_time<T>(work: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
    tokio::time::timeout(TIMEOUT * 2, work).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

fn unreadable(error: sqlx::Error) -> (Unreadable, Error) {
    let code = error.as_database_error().and_then(|error| error.code());
    let why = match (code.as_deref(), &error) {
        (Some("42P01" | "42883" | "3F000" | "3D000"), _) => Unreadable::NoTables,
        (Some("42501" | "28000" | "28P01"), _) => Unreadable::NoRight,
        // Shutting down, starting up, cancelled because it took too long.
        (Some("57P01" | "57P02" | "57P03" | "57014"), _) => Unreadable::Unreachable,
        (Some(_), _) => Unreadable::Other,
        (None, sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::Protocol(_)) => {
            Unreadable::Unreachable
        }
        (None, _) => Unreadable::Other,
    };
    (why, Error::database("reading the line for the page", error))
}
