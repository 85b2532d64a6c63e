//! What an operator sees of jobs: everything that the line's tables say, of all workers together.
//!
//! Read for people and for `GET /v1/jobs`, and never on the way of a job. Every statement is bounded: it looks at so many rows, for so
//! long, on connections of its own, so that a long line costs a look and not the workers. What counts under a limit is asked of the gate;
//! nothing here counts. No tenant and no key of one is read: lines are known by the labels `job:<type>`, `queue:<name>` and `global`.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::{PgConnection, PgPoolOptions, PgRow};
use tollgate::config::Config;
use tollgate::{Key, Limit, Tollgate};
use uuid::Uuid;

use crate::error::Error;
use crate::gate::{closing, held_by};
use crate::history::{ALL, JobCounts};
use crate::limits::{JobLimits, JobScope, JobsConfig, OnExceeded};
use crate::line::{BY_HAND, Called, Line, REMOTE_SIDE};
use crate::open::{database, reach};
use crate::plan::closable;
use crate::wake::{ApalisRows, Wake};

/// How long a statement may take, and a connection.
const TIMEOUT: Duration = Duration::from_secs(2);

/// How long the jobs of a key that was opened may be called for.
const CALLING: Duration = Duration::from_secs(10);

/// How long after the others those of them are called that workers had in their hands.
const PUT_BACK: Duration = Duration::from_millis(500);

/// How many rows of the line are looked at. Beyond, numbers are lower bounds, and [`JobsOverview::is_cut`] says so.
const MOST_ROWS: i64 = 100_000;

/// How many keys are shown, how many of them closed, and how many jobs of the line.
const MOST_KEYS: usize = 200;
const MOST_CLOSED: i64 = 50;
const MOST_JOBS: i64 = 40;
const MOST_LATELY: i64 = 10;

/// How many points a forecast has.
const POINTS: usize = 60;

/// A worker that was heard from before this is gone, and one that was not heard from for as long as this is late.
const WORKER_GONE: &str = "1 day";
const WORKER_LATE: &str = "90 seconds";

/// Reads what the jobs' database says. Connects when it is first asked, and again when it must. Cheap to clone.
#[derive(Clone, Debug)]
pub struct JobsReader {
    line: Line,
}

/// What there is to see at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobsOverview {
    /// The database's clock, in µs since 1970.
    pub now_us: u64,
    /// How many jobs wait, whatever for.
    pub waiting: u64,
    /// Whether there are more than were looked at.
    pub is_cut: bool,
    /// When the first of them expects its turn, and the last: the end of the backlog.
    pub next_slot: Option<Duration>,
    /// See `next_slot`.
    pub backlog_ends: Option<Duration>,
    /// Since when the one waits that has waited longest.
    pub longest_wait: Option<Duration>,
    /// How many of them will still wait, at evenly spaced moments from now to the end of the backlog, if nothing new comes.
    pub forecast: Vec<u64>,
    /// Each type, queue and all.
    pub keys: Vec<JobKey>,
    /// How many keys there are besides.
    pub more_keys: usize,
    /// What holds jobs up, the one that ends last first.
    pub holds: Vec<JobHold>,
    /// The first of the line.
    pub line: Vec<WaitingJob>,
    /// What is closed.
    pub closed: Vec<ClosedLabel>,
    /// The workers, if the framework keeps a list.
    pub workers: Option<JobWorkers>,
    /// What became of jobs in the last hour, as far as workers have written it down; `None` if they are of a version that does not.
    pub hour: Option<JobCounts>,
    /// The last jobs that were held up, the newest first, as far as workers have written it down.
    pub lately: Vec<HeldUpJob>,
}

/// A job that was held up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HeldUpJob {
    /// How long ago.
    pub ago: Duration,
    /// Its type.
    pub job_type: String,
    /// Whose limit it was: `job:<type>`, `queue:<name>` or `global`; `shared` for a limit that others use too.
    pub key: String,
    /// `delay`, `reject` or `skip`.
    pub behaviour: String,
    /// For how long it was delayed.
    pub wait: Duration,
}

/// One type of job, one queue, or all jobs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobKey {
    /// `job:<type>`, `queue:<name>` or `global`.
    pub key: String,
    /// What becomes of a job that is over its limits.
    pub on_exceeded: OnExceeded,
    /// Whether its limits are in shadow mode.
    pub shadow: bool,
    /// The field that splits its limits: each of its values is counted by itself, so there is no one count.
    pub split_by: Option<String>,
    /// Its limits. Their counts are missing where a field splits them, and where the store cannot be asked.
    pub limits: Vec<JobCount>,
    /// Limits of `[limits]` that its jobs are charged to too.
    pub shared: Vec<String>,
    /// How many run now, where their number is limited.
    pub running: Option<u64>,
    /// How many jobs stand in its lines.
    pub waiting: u64,
    /// When the first and the last of them expect their turn.
    pub next_slot: Option<Duration>,
    /// See `next_slot`.
    pub backlog_ends: Option<Duration>,
    /// How often the jobs that wait were put off by one of its limits.
    pub delays: u64,
    /// For how long it is closed yet.
    pub closed: Option<Duration>,
    /// What became of its jobs in the last hour: all that started, and those that one of its limits held up.
    pub hour: Option<JobCounts>,
}

/// How one limit stands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobCount {
    /// Its name.
    pub limit: String,
    /// In words.
    pub rule: String,
    /// What it allows.
    pub capacity: u64,
    /// Whether it counts runs at once, which end by themselves.
    pub is_concurrency: bool,
    /// How many count now.
    pub count: Option<u64>,
    /// The time until nothing counts any more.
    pub resets_after: Option<Duration>,
}

/// A limit that holds jobs up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobHold {
    /// The limit.
    pub limit: String,
    /// Whose it is: `job:<type>`, `queue:<name>` or `global`; `None` for a limit that others use too.
    pub key: Option<String>,
    /// How many jobs wait for it.
    pub jobs: u64,
    /// When the last of them expects its turn.
    pub ends: Duration,
}

/// A job that waits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaitingJob {
    /// Its id in the framework.
    pub job: String,
    /// Its type.
    pub job_type: String,
    /// Its queue.
    pub queue: String,
    /// For how long it has waited.
    pub waited: Duration,
    /// When it expects its turn.
    pub slot: Duration,
    /// How often it was put off.
    pub delays: u64,
    /// The limit that holds it up, and whose it is.
    pub limit: String,
    /// See `limit`.
    pub key: Option<String>,
}

/// What is closed under one label.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClosedLabel {
    /// `job:<type>`, `queue:<name>` or `global`; `shared` for keys of limits that others use too.
    pub label: String,
    /// For how long yet.
    pub wait: Duration,
    /// By whom or why.
    pub reason: String,
    /// How many values of the field that splits it are closed, and not the key as a whole.
    pub values: u64,
    /// How many jobs stand in its lines.
    pub waiting: u64,
}

impl ClosedLabel {
    /// Who closed it, without what they wrote.
    pub fn reason_for_all(&self) -> &'static str {
        match self.reason.as_str() {
            REMOTE_SIDE => REMOTE_SIDE,
            BY_HAND => BY_HAND,
            _ => "by an admin",
        }
    }
}

/// What became of opening a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenedKey {
    /// What is shown of the key.
    pub label: String,
    /// How many were closed: itself, and values of the field that splits it.
    pub opened: u64,
    /// How many of its jobs are due now because of that. `None` if they could not be called: they look again when their slot or their longest sleep
    /// has passed.
    pub called: Option<u64>,
}

/// The workers of a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobWorkers {
    /// How many there were in the last day.
    pub known: u64,
    /// How many of them were heard from lately.
    pub heard_from: u64,
}

/// Why the database could not be read, in words that have no address in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unreadable {
    /// Nobody answers there, or not in time.
    Unreachable,
    /// The tables of the line are not there.
    NoTables,
    /// The role lacks a right, or its password is wrong.
    NoRight,
    /// Anything else; the log has it.
    Other,
}

impl Unreadable {
    /// As a sentence.
    pub const fn words(self) -> &'static str {
        match self {
            Unreadable::Unreachable => "it does not answer",
            Unreadable::NoTables => {
                "the job tables are not there; the first worker makes them, or a look at [store.postgres] prefix helps"
            }
            Unreadable::NoRight => "the database role lacks a right",
            Unreadable::Other => "it answers with an error, which the log has",
        }
    }
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

    /// Opens a key that was closed, and with `values` each value of the field that splits it. Its jobs are called, if apalis has them and the
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

    async fn line(
        &self,
        connection: &mut PgConnection,
        jobs: &JobsConfig,
    ) -> Result<JobsOverview, sqlx::Error> {
        let now: i64 = sqlx::query_scalar(self.line.sql("select {prefix}job_now_us()"))
            .fetch_one(&mut *connection)
            .await?;
        let scopes: Vec<(String, &JobLimits)> = jobs
            .scopes()
            .filter_map(|(scope, limits)| Some((scope.key().ok()?.into_canonical(), limits)))
            .collect();
        let more_keys = scopes.len().saturating_sub(MOST_KEYS);
        let mut overview = JobsOverview {
            now_us: unsigned(now),
            waiting: 0,
            is_cut: false,
            next_slot: None,
            backlog_ends: None,
            longest_wait: None,
            forecast: Vec::new(),
            keys: scopes.iter().take(MOST_KEYS).map(|(key, limits)| JobKey::of(key, limits)).collect(),
            more_keys,
            holds: Vec::new(),
            line: Vec::new(),
            closed: Vec::new(),
            workers: None,
            hour: None,
            lately: Vec::new(),
        };
        self.by_label(connection, now, &mut overview.keys).await?;
        self.by_slot(connection, now, jobs, &mut overview).await?;
        overview.line = self.first(connection, now, jobs).await?;
        overview.closed = self.closed(connection, now, &overview.keys).await?;
        for closed in &overview.closed {
            let whole = |key: &&mut JobKey| key.key == closed.label && closed.values == 0;
            overview.keys.iter_mut().filter(whole).for_each(|key| key.closed = Some(closed.wait));
        }
        Ok(overview)
    }

    /// Who waits under each label.
    async fn by_label(
        &self,
        connection: &mut PgConnection,
        now: i64,
        keys: &mut [JobKey],
    ) -> Result<(), sqlx::Error> {
        let labels: Vec<&str> = keys.iter().map(|key| key.key.as_str()).collect();
        let text = "select w.jobs, w.next_us, (select max(l.slot_us) from {prefix}job_line l where l.label = k.label)
            from unnest($1::text[]) with ordinality as k(label, number)
            cross join lateral (
              select count(distinct l.job) as jobs, min(l.slot_us) as next_us from (
                select job, slot_us from {prefix}job_line where label = k.label order by slot_us limit $2) as l) as w
            order by k.number";
        let rows =
            sqlx::query(self.line.sql(text)).bind(labels).bind(MOST_ROWS).fetch_all(&mut *connection).await?;
        for (key, row) in keys.iter_mut().zip(rows) {
            key.waiting = unsigned(row.try_get(0)?);
            key.next_slot = row.try_get::<Option<i64>, _>(1)?.map(|at| after(now, at));
            key.backlog_ends = row.try_get::<Option<i64>, _>(2)?.map(|at| after(now, at));
        }
        Ok(())
    }

    /// The whole line in one look: by what holds jobs up, and by when they expect their turn.
    async fn by_slot(
        &self,
        connection: &mut PgConnection,
        now: i64,
        jobs: &JobsConfig,
        overview: &mut JobsOverview,
    ) -> Result<(), sqlx::Error> {
        let text = "select min(slot_us), max(slot_us) from {prefix}job_waiting";
        let row = sqlx::query(self.line.sql(text)).fetch_one(&mut *connection).await?;
        let (Some(first), Some(last)): (Option<i64>, Option<i64>) = (row.try_get(0)?, row.try_get(1)?) else {
            return Ok(());
        };
        (overview.next_slot, overview.backlog_ends) = (Some(after(now, first)), Some(after(now, last)));
        let points = i64::try_from(POINTS).unwrap_or(i64::MAX);
        let span = last.saturating_sub(now).max(1);
        let text = "select w.binding, w.bucket, count(*), coalesce(sum(w.delays), 0)::bigint, max(w.slot_us), min(w.since_us)
            from (select binding, delays, slot_us, since_us,
                least($4 - 1, greatest(0, slot_us - $2) / greatest(1, $3 / $4))::bigint as bucket
              from {prefix}job_waiting order by slot_us limit $1) as w
            group by grouping sets ((w.binding), (w.bucket))";
        let rows = sqlx::query(self.line.sql(text))
            .bind(MOST_ROWS)
            .bind(now)
            .bind(span)
            .bind(points)
            .fetch_all(&mut *connection)
            .await?;
        let mut buckets = vec![0; POINTS];
        for row in rows {
            let count = unsigned(row.try_get(2)?);
            let since = after(row.try_get(5)?, now);
            if let Some(bucket) = row.try_get::<Option<i64>, _>(1)? {
                let bucket = usize::try_from(bucket).unwrap_or(0).min(POINTS - 1);
                buckets[bucket] += count;
                overview.waiting += count;
                overview.longest_wait = overview.longest_wait.max(Some(since));
                continue;
            }
            let limit: String = row.try_get(0)?;
            let key = key_of(jobs, &limit);
            if let Some(key) = overview.keys.iter_mut().find(|one| Some(&one.key) == key.as_ref()) {
                key.delays += unsigned(row.try_get(3)?);
            }
            // A job that has just come has no binding limit yet.
            if !limit.is_empty() {
                overview.holds.push(JobHold { limit, key, jobs: count, ends: after(now, row.try_get(4)?) });
            }
        }
        overview.holds.sort_by(|one, other| {
            other.ends.cmp(&one.ends).then(other.jobs.cmp(&one.jobs)).then(one.limit.cmp(&other.limit))
        });
        overview.holds.truncate(MOST_KEYS);
        overview.is_cut = overview.waiting >= unsigned(MOST_ROWS);
        let mut left = overview.waiting;
        overview.forecast.push(left);
        for bucket in buckets {
            left -= bucket;
            overview.forecast.push(left);
        }
        Ok(())
    }

    /// The first of the line.
    async fn first(
        &self,
        connection: &mut PgConnection,
        now: i64,
        jobs: &JobsConfig,
    ) -> Result<Vec<WaitingJob>, sqlx::Error> {
        let text =
            "select left(job, 64), left(job_type, 64), left(queue, 64), since_us, slot_us, delays, binding
            from {prefix}job_waiting order by slot_us, job limit $1";
        let rows = sqlx::query(self.line.sql(text)).bind(MOST_JOBS).fetch_all(&mut *connection).await?;
        let read = |row: PgRow| {
            let limit: String = row.try_get(6)?;
            let delays: i32 = row.try_get(5)?;
            Ok(WaitingJob {
                job: row.try_get(0)?,
                job_type: row.try_get(1)?,
                queue: row.try_get(2)?,
                waited: after(row.try_get(3)?, now),
                slot: after(now, row.try_get(4)?),
                delays: u64::try_from(delays).unwrap_or(0),
                key: key_of(jobs, &limit),
                limit,
            })
        };
        rows.into_iter().map(read).collect()
    }

    async fn closed(
        &self,
        connection: &mut PgConnection,
        now: i64,
        keys: &[JobKey],
    ) -> Result<Vec<ClosedLabel>, sqlx::Error> {
        let whole: Vec<Uuid> = keys.iter().map(|key| closable(&key.key)).collect();
        let text = "select label, max(until_us), (array_agg(reason order by until_us desc))[1],
              count(*) filter (where not key = any($3))
            from {prefix}job_closed where until_us > $1 group by label order by 2 desc, 1 limit $2";
        let rows = sqlx::query(self.line.sql(text))
            .bind(now)
            .bind(MOST_CLOSED)
            .bind(whole)
            .fetch_all(&mut *connection)
            .await?;
        let read = |row: PgRow| {
            let label: String = row.try_get(0)?;
            let waiting = keys.iter().find(|key| key.key == label).map_or(0, |key| key.waiting);
            Ok(ClosedLabel {
                wait: after(now, row.try_get(1)?),
                reason: row.try_get(2)?,
                values: unsigned(row.try_get(3)?),
                waiting,
                label,
            })
        };
        rows.into_iter().map(read).collect()
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

impl JobKey {
    fn of(key: &str, limits: &JobLimits) -> JobKey {
        JobKey {
            key: key.to_owned(),
            on_exceeded: limits.on_exceeded,
            shadow: limits.shadow,
            split_by: limits.key.clone(),
            limits: Vec::new(),
            shared: limits.limits.clone(),
            running: None,
            waiting: 0,
            next_slot: None,
            backlog_ends: None,
            delays: 0,
            closed: None,
            hour: None,
        }
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

/// Whose limit this is.
fn key_of(jobs: &JobsConfig, limit: &str) -> Option<String> {
    let is_of = |(scope, _): &(JobScope<'_>, &JobLimits)| {
        let rest = limit.strip_prefix(&scope.limit_name());
        rest.is_some_and(|rest| rest.is_empty() || rest == ".running" || rest.starts_with(".also-"))
    };
    jobs.scopes().find(is_of).and_then(|(scope, _)| scope.key().ok()).map(Key::into_canonical)
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// From one instant of the database's clock to another; nothing if that has passed.
fn after(from_us: i64, to_us: i64) -> Duration {
    Duration::from_micros(unsigned(to_us.saturating_sub(from_us)))
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
