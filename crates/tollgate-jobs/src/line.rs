//! The line of waiting jobs, in the database that has the jobs.
//!
//! Each delayed job stands in the lines of the limits that held it up, each with a place, and knows when to expect its turn. Where another
//! limit makes it wait much longer its place is parked: it is kept, and those behind it do not wait for it. All of it is in tables, so that it survives workers and is seen by all of them. What a place means in time is the kernel's to say;
//! nothing here knows a limit. The SQL is in `line/`: tables change by numbered migration, functions are made afresh whenever their
//! text has changed.

mod survey;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use sqlx::postgres::{PgPool, PgRow};
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use crate::error::Error;
use crate::limits::LONGEST_SLEEP;
use crate::plan::Plan;
use crate::wake::Wake;

pub(crate) use survey::{NewPlace, NewSlot, Survey, Waits};

/// The tables, one text for each version.
const MIGRATIONS: [&str; 6] = [
    include_str!("line/1.sql"),
    include_str!("line/2.sql"),
    include_str!("line/3.sql"),
    include_str!("line/4.sql"),
    include_str!("line/5.sql"),
    include_str!("line/6.sql"),
];

const FUNCTIONS: &str = include_str!("line/functions.sql");

/// A place whose slot passed longer ago than this counts no more for those behind it: its job does not come.
const GRACE: Duration = Duration::from_secs(2);

/// How often a job that takes a place looks whether its lines are locked, and the pause after each look. Then it waits for the locks.
const STAND_ATTEMPTS: u32 = 100;
const STAND_PAUSE: Duration = Duration::from_millis(20);

/// Why a key is closed that nobody gave a reason for.
pub(crate) const REMOTE_SIDE: &str = "the remote side asked for it";
pub(crate) const BY_HAND: &str = "closed by hand";

/// How many jobs are called at once, and how long after them the next.
const CALLED_AT_ONCE: usize = 1_000;
const CALLED_EVERY: Duration = Duration::from_millis(200);

/// The line, in tables whose names begin with a prefix.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) pool: PgPool,
    pub(crate) prefix: String,
}

/// What a job finds.
#[derive(Clone, Debug)]
pub(crate) struct Look {
    /// The database's clock, and ours when it answered.
    now_us: u64,
    at: Instant,
    /// Until when a key of the job is closed.
    pub(crate) closed_us: Option<u64>,
    pub(crate) closed: Vec<Uuid>,
    /// Since when it waits, and when it expects its turn.
    pub(crate) since_us: Option<u64>,
    pub(crate) slot_us: Option<u64>,
    /// Until when it was to sleep when that was last written: a sleep that only goes on is not.
    until_us: Option<u64>,
    /// The units ahead of it at each of its charges.
    pub(crate) ahead: Vec<u64>,
}

impl Look {
    /// The database's clock now.
    pub(crate) fn now_us(&self) -> u64 {
        self.now_us.saturating_add(u64::try_from(self.at.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.since_us.is_some()
    }

    /// It has taken places since.
    pub(crate) fn has_stood(&mut self) {
        self.since_us = self.since_us.or(Some(self.now_us()));
    }

    /// Whether it came long before it was to: it was called, or its sleep was not kept. This is not known of a sleep that went on;
    /// the trigger is looked for every so often as well.
    pub(crate) fn is_early(&self) -> bool {
        self.until_us.is_some_and(|until_us| until_us > self.now_us().saturating_add(250_000))
    }

    fn read(row: &PgRow) -> Result<Look, sqlx::Error> {
        let us = |name: &str| {
            let value: Option<i64> = row.try_get(name)?;
            Ok::<_, sqlx::Error>(value.and_then(|value| u64::try_from(value).ok()))
        };
        let ahead: Vec<i64> = row.try_get("ahead")?;
        Ok(Look {
            now_us: us("now_us")?.unwrap_or(0),
            at: Instant::now(),
            closed_us: us("closed_us")?,
            closed: row.try_get::<Option<Vec<Uuid>>, _>("closed")?.unwrap_or_default(),
            since_us: us("since_us")?,
            slot_us: us("slot_us")?,
            until_us: us("until_us")?,
            ahead: ahead.into_iter().map(|units| u64::try_from(units).unwrap_or(0)).collect(),
        })
    }
}

/// What a job had in line, while it is charged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    /// Its place at each of its charges, if it has one there.
    places: Vec<Option<i64>>,
    since_us: Option<i64>,
    delays: Option<i32>,
}

impl Taken {
    /// Whether it waited.
    pub(crate) fn is_some(&self) -> bool {
        self.since_us.is_some()
    }
}

/// A key that is closed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClosedKey {
    /// `job:<type>`, `queue:<name>` or `global`; `shared` for the key of a limit that others use too.
    pub label: String,
    /// For how long yet.
    pub wait: Duration,
    /// Why.
    pub reason: String,
}

/// Which of the jobs that sleep are called.
#[derive(Clone, Debug)]
pub(crate) enum Called {
    All,
    /// Those that stand in these lines or under this label.
    Of {
        lines: Vec<Uuid>,
        label: Option<String>,
    },
}

impl Called {
    /// How many times some are called at most. Who opens a key waits for it; those behind look again by themselves.
    fn pages(&self) -> usize {
        match self {
            Called::All => usize::MAX,
            Called::Of { .. } => 10,
        }
    }
}

/// What is said of one label's line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) jobs: u64,
    /// The first and the last slot, from now.
    pub(crate) next: Option<Duration>,
    pub(crate) last: Option<Duration>,
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

impl Line {
    /// `text` with our prefix, as a statement. The prefix was checked, and no text comes from a caller.
    pub(crate) fn sql(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(text.replace("{prefix}", &self.prefix))
    }

    /// Makes the tables and functions, or brings them up to date. Processes that start at once wait for each other.
    pub(crate) async fn migrate(&self) -> Result<(), Error> {
        let failed = |error| Error::database("migrating the tables of the line", error);
        let digest = Sha256::digest(FUNCTIONS.replace("{prefix}", &self.prefix).as_bytes());
        let fingerprint: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut transaction = self.pool.begin().await.map_err(failed)?;
        let begin = "select pg_advisory_xact_lock(hashtextextended('tollgate migrate jobs {prefix}', 0));
            create table if not exists {prefix}job_schema (
              one boolean primary key default true check (one), version integer not null, functions text not null)";
        sqlx::raw_sql(self.sql(begin)).execute(&mut *transaction).await.map_err(failed)?;
        let found = sqlx::query(self.sql("select version, functions from {prefix}job_schema"))
            .fetch_optional(&mut *transaction)
            .await
            .map_err(failed)?;
        let (from, made): (i32, String) = match found {
            Some(row) => (row.try_get(0).map_err(failed)?, row.try_get(1).map_err(failed)?),
            None => (0, String::new()),
        };
        let version = i32::try_from(MIGRATIONS.len()).unwrap_or(i32::MAX);
        if from > version {
            return Err(Error::new(format!(
                "the job tables of prefix {:?} are of version {from}, and this Tollgate knows up to {version}: another, newer \
                 Tollgate uses them; upgrade this one",
                self.prefix
            )));
        }
        for (_, text) in (1..).zip(MIGRATIONS).filter(|(number, _)| *number > from) {
            sqlx::raw_sql(self.sql(text)).execute(&mut *transaction).await.map_err(failed)?;
        }
        if made != fingerprint {
            sqlx::raw_sql(self.sql(FUNCTIONS)).execute(&mut *transaction).await.map_err(failed)?;
        }
        let note = "insert into {prefix}job_schema (version, functions) values ($1, $2)
            on conflict (one) do update set version = excluded.version, functions = excluded.functions";
        sqlx::query(self.sql(note))
            .bind(version)
            .bind(fingerprint)
            .execute(&mut *transaction)
            .await
            .map_err(failed)?;
        transaction.commit().await.map_err(failed)
    }

    /// What stands before a job.
    pub(crate) async fn look(&self, plan: &Plan) -> Result<Look, sqlx::Error> {
        let row = sqlx::query(self.sql("select * from {prefix}job_look($1, $2, $3, $4)"))
            .bind(&plan.job)
            .bind(plan.lines())
            .bind(&plan.closable)
            .bind(micros(GRACE))
            .fetch_one(&self.pool)
            .await?;
        Look::read(&row)
    }

    /// Takes a job out of its lines while it is charged.
    pub(crate) async fn take(&self, plan: &Plan) -> Result<Taken, sqlx::Error> {
        let row = sqlx::query(self.sql("select places, since_us, delays from {prefix}job_take($1, $2)"))
            .bind(&plan.job)
            .bind(plan.lines())
            .fetch_one(&self.pool)
            .await?;
        let places: Option<Vec<Option<i64>>> = row.try_get(0)?;
        Ok(Taken { places: places.unwrap_or_default(), since_us: row.try_get(1)?, delays: row.try_get(2)? })
    }

    /// Takes a place in the lines that are marked, and again those that it had, and looks.
    ///
    /// A line is locked for a second or two while thousands of jobs are put off in it. A waiting call keeps no connection meanwhile:
    /// fetches, and jobs of other lines, need one.
    pub(crate) async fn stand(&self, plan: &Plan, stands: &[bool], had: Taken) -> Result<Look, sqlx::Error> {
        let mut places = had.places.clone();
        places.resize(plan.charges.len(), None);
        let mut attempts = 0;
        loop {
            attempts += 1;
            let waits = attempts > STAND_ATTEMPTS;
            if let Some(look) = self.try_to_stand(plan, stands, &had, &places, waits).await? {
                return Ok(look);
            }
            tokio::time::sleep(STAND_PAUSE).await;
        }
    }

    /// The same in one statement; `None` if it does not wait and somebody has one of the lines locked.
    async fn try_to_stand(
        &self,
        plan: &Plan,
        stands: &[bool],
        had: &Taken,
        places: &[Option<i64>],
        waits: bool,
    ) -> Result<Option<Look>, sqlx::Error> {
        let labels: Vec<&str> = plan.charges.iter().map(|charge| charge.label.as_str()).collect();
        let units: Vec<i64> = plan.charges.iter().map(|charge| signed(charge.cost)).collect();
        let row =
            sqlx::query(self.sql(
                "select * from {prefix}job_stand($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
            ))
            .bind(&plan.job)
            .bind(&plan.queue)
            .bind(&plan.job_type)
            .bind(plan.lines())
            .bind(labels)
            .bind(units)
            .bind(stands)
            .bind(places)
            .bind(had.since_us)
            .bind(had.delays)
            .bind(&plan.closable)
            .bind(micros(GRACE))
            .bind(waits)
            .fetch_one(&self.pool)
            .await?;
        let now_us: Option<i64> = row.try_get(0)?;
        now_us.map(|_| Look::read(&row)).transpose()
    }

    /// Writes when a job expects its turn, until when it sleeps, and in which lines its place is parked.
    pub(crate) async fn set_slot(
        &self,
        job: &str,
        slot_us: u64,
        until_us: u64,
        binding: &str,
        parked: &[Uuid],
    ) -> Result<(), sqlx::Error> {
        let call = sqlx::query(self.sql("select {prefix}job_slot($1, $2, $3, $4, $5)"));
        let call = call.bind(job).bind(signed(slot_us)).bind(signed(until_us)).bind(binding);
        call.bind(parked).execute(&self.pool).await?;
        Ok(())
    }

    /// Takes a job out of all lines.
    pub(crate) async fn leave(&self, job: &str) -> Result<(), sqlx::Error> {
        sqlx::query(self.sql("select {prefix}job_leave($1)")).bind(job).execute(&self.pool).await?;
        Ok(())
    }

    /// The first jobs of these lines, so many of each. One that is parked there is not called: another limit holds it up.
    pub(crate) async fn next(&self, lines: &[Uuid], count: i32) -> Result<Vec<String>, sqlx::Error> {
        let call = sqlx::query_scalar(self.sql("select {prefix}job_next($1, $2)"));
        call.bind(lines).bind(count).fetch_all(&self.pool).await
    }

    /// Calls jobs that sleep, first those whose turn comes first, some at a time. Answers how many were due because of that, and which
    /// could not hear it because a worker had them in its hands.
    pub(crate) async fn call(&self, called: &Called, wake: &dyn Wake) -> Result<(u64, Vec<String>), Error> {
        let (mut count, mut behind) = (0, (i64::MIN, String::new()));
        let mut in_hands = Vec::new();
        for page in 0.. {
            if page > 0 {
                tokio::time::sleep(CALLED_EVERY).await;
            }
            let sleepers = self.sleepers(called, &behind).await;
            let sleepers = sleepers.map_err(|error| Error::database("calling waiting jobs", error))?;
            let is_last = sleepers.len() < CALLED_AT_ONCE || called.pages() <= page + 1;
            let Some((job, slot_us)) = sleepers.last() else { break };
            behind = (*slot_us, job.clone());
            let jobs: Vec<String> = sleepers.into_iter().map(|(job, _)| job).collect();
            // First, so that one that is put back in between is called now or later, and not missed.
            in_hands.extend(wake.in_hands(&jobs).await?);
            count += wake.wake(&jobs).await?;
            if is_last {
                break;
            }
        }
        Ok((count, in_hands))
    }

    /// Takes jobs out of all lines that were removed or ended while they waited: those behind them would wait for their units, too. Answers
    /// how many, and their lines.
    pub(crate) async fn forget_ended(&self, wake: &dyn Wake) -> Result<(u64, Vec<Uuid>), Error> {
        let failed = |error| Error::database("taking removed jobs out of the line", error);
        let text = "with gone as (delete from {prefix}job_waiting where job = any($1))
            delete from {prefix}job_line where job = any($1) returning key";
        let (mut count, mut lines, mut behind) = (0, BTreeSet::new(), (i64::MIN, String::new()));
        loop {
            let waiting = self.sleepers(&Called::All, &behind).await.map_err(failed)?;
            let is_last = waiting.len() < CALLED_AT_ONCE;
            if let Some((job, slot_us)) = waiting.last() {
                behind = (*slot_us, job.clone());
            }
            let jobs: Vec<String> = waiting.into_iter().map(|(job, _)| job).collect();
            let ended = if jobs.is_empty() { Vec::new() } else { wake.ended(&jobs).await? };
            if !ended.is_empty() {
                let left: Vec<Uuid> = sqlx::query_scalar(self.sql(text))
                    .bind(&ended)
                    .fetch_all(&self.pool)
                    .await
                    .map_err(failed)?;
                lines.extend(left);
                count += u64::try_from(ended.len()).unwrap_or(0);
            }
            if is_last {
                return Ok((count, lines.into_iter().collect()));
            }
            tokio::time::sleep(CALLED_EVERY).await;
        }
    }

    /// The next jobs that sleep, behind one of them, in the order of their slots.
    async fn sleepers(
        &self,
        called: &Called,
        behind: &(i64, String),
    ) -> Result<Vec<(String, i64)>, sqlx::Error> {
        let count = i32::try_from(CALLED_AT_ONCE).unwrap_or(i32::MAX);
        let call = match called {
            Called::All => {
                sqlx::query_as(self.sql("select job, slot_us from {prefix}job_sleepers($1, $2, $3)"))
            }
            Called::Of { .. } => sqlx::query_as(
                self.sql("select job, slot_us from {prefix}job_sleepers_of($1, $2, $3, $4, $5)"),
            ),
        };
        let call = call.bind(behind.0).bind(&behind.1).bind(count);
        match called {
            Called::All => call.fetch_all(&self.pool).await,
            Called::Of { lines, label } => call.bind(lines).bind(label).fetch_all(&self.pool).await,
        }
    }

    /// Forgets what was left behind, a batch at a time, so that nobody waits for long; answers how many rows.
    pub(crate) async fn cleanup(&self, keep: Duration) -> Result<u64, sqlx::Error> {
        const BATCH: i32 = 2_000;
        let mut rows = 0;
        loop {
            let call = sqlx::query_scalar(self.sql("select {prefix}job_cleanup($1, $2)"));
            let gone: i64 = call.bind(micros(keep)).bind(BATCH).fetch_one(&self.pool).await?;
            rows += u64::try_from(gone).unwrap_or(0);
            if gone < i64::from(BATCH) {
                return Ok(rows);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Closes a key for some time, or opens it. Answers for how long it is closed now.
    pub(crate) async fn close(
        &self,
        key: Uuid,
        label: &str,
        wait: Duration,
        reason: &str,
    ) -> Result<Duration, sqlx::Error> {
        let text = "insert into {prefix}job_closed (key, label, until_us, reason) values ($1, $2, {prefix}job_now_us() + $3, $4)
            on conflict (key) do update set until_us = greatest({prefix}job_closed.until_us, excluded.until_us), reason = excluded.reason
            returning until_us - {prefix}job_now_us()";
        let wait = micros(wait.min(LONGEST_SLEEP));
        let call = sqlx::query_scalar(self.sql(text)).bind(key).bind(label).bind(wait).bind(reason);
        let in_force: i64 = call.fetch_one(&self.pool).await?;
        Ok(Duration::from_micros(u64::try_from(in_force.max(wait)).unwrap_or(0)))
    }

    pub(crate) async fn open(&self, key: Uuid) -> Result<bool, sqlx::Error> {
        let done = sqlx::query(self.sql("delete from {prefix}job_closed where key = $1"))
            .bind(key)
            .execute(&self.pool);
        Ok(done.await?.rows_affected() > 0)
    }

    pub(crate) async fn closed(&self) -> Result<Vec<ClosedKey>, sqlx::Error> {
        let text = "select label, until_us - {prefix}job_now_us(), reason from {prefix}job_closed
            where until_us > {prefix}job_now_us() order by label, until_us";
        let rows: Vec<(String, i64, String)> = sqlx::query_as(self.sql(text)).fetch_all(&self.pool).await?;
        let wait = |us: i64| Duration::from_micros(u64::try_from(us).unwrap_or(0));
        Ok(rows.into_iter().map(|(label, us, reason)| ClosedKey { label, wait: wait(us), reason }).collect())
    }

    /// The waiting jobs of a label.
    pub(crate) async fn waiting(&self, label: &str) -> Result<Waiting, sqlx::Error> {
        // A job stands in several lines of a label. The subselect is hashed, where `count(distinct job)` would sort all ids.
        let text = "select (select count(*) from (select from {prefix}job_line where label = $1 group by job) as jobs),
            min(slot_us) - {prefix}job_now_us(), max(slot_us) - {prefix}job_now_us()
            from {prefix}job_line where label = $1";
        let row = sqlx::query(self.sql(text)).bind(label).fetch_one(&self.pool).await?;
        let from_now = |index: usize| {
            let us: Option<i64> = row.try_get(index)?;
            Ok::<_, sqlx::Error>(us.map(|us| Duration::from_micros(u64::try_from(us).unwrap_or(0))))
        };
        let jobs: i64 = row.try_get(0)?;
        Ok(Waiting { jobs: u64::try_from(jobs).unwrap_or(0), next: from_now(1)?, last: from_now(2)? })
    }
}
