//! Makes apalis's table ready, and sees at start whether it behaves as this adapter was tested with.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use apalis::prelude::{Status, TaskResult};
use apalis_postgres::PgTaskId;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use sqlx::Row;
use sqlx::postgres::{PgConnection, PgPool};

use crate::error::Error;
use crate::gate::JobGate;
use crate::line::Line;
use crate::wake::{ApalisRows, Wake};

const TRIGGER: &str = include_str!("apalis.sql");

/// What its second part begins with, behind the function.
const TRIGGER_BEGINS: &str = "drop trigger if exists";

const INDEX: &str = "create index if not exists {prefix}job_due on apalis.jobs (job_type, run_at)
    where status = 'Pending' or (status = 'Failed' and attempts < max_attempts)";

/// A table beyond this size is not indexed at start: nothing could be pushed for as long as that takes.
const INDEXED_BYTES: i64 = 256 * 1024 * 1024;

/// Processes that start at once wait for each other.
const MIGRATION_LOCK: &str =
    "select pg_advisory_xact_lock(hashtextextended('tollgate migrate jobs {prefix}', 0))";

/// The columns of `apalis.jobs` that the adapter reads or writes, with their types.
const COLUMNS: [(&str, &str); 13] = [
    ("id", "text"),
    ("job_type", "text"),
    ("job", "bytea"),
    // hstore, which is an extension's.
    ("metadata", "USER-DEFINED"),
    ("priority", "integer"),
    ("status", "text"),
    ("attempts", "integer"),
    ("max_attempts", "integer"),
    ("run_at", "timestamp with time zone"),
    ("last_result", "jsonb"),
    ("lock_at", "timestamp with time zone"),
    ("lock_by", "text"),
    ("done_at", "timestamp with time zone"),
];

/// What this adapter was tested with.
const TESTED: &str = "this adapter was tested with apalis-postgres 1.0.0";

/// Makes the trigger in the database of the jobs, and tries the ack of a delayed job in a transaction that is rolled back. To be called
/// when a program starts, after apalis's own `setup`; an error says what differs from what was tested.
pub async fn prepare(gate: &JobGate) -> Result<(), Error> {
    let line = gate.line();
    check_columns(&line.pool).await?;
    install(line).await?;
    let indexed = index(line).await;
    if !matches!(indexed, Ok(true)) {
        let error = indexed.err().map_or_else(|| "the table is large".to_owned(), |error| error.to_string());
        tracing::warn!(
            error,
            "apalis.jobs has no index by time, so that each poll reads all jobs that wait; docs/jobs.md has the statement to make it"
        );
    }
    if let Err(error) = refine_statistics(line).await {
        tracing::warn!(
            %error,
            "the statistics of apalis.jobs are coarse, so that each poll may read all jobs that wait; docs/jobs.md has the statement to refine them"
        );
    }
    let failed = |error| Error::database("trying the ack of a delayed job", error);
    let mut transaction = line.pool.begin().await.map_err(failed)?;
    let tried = try_ack(&mut transaction).await;
    transaction.rollback().await.map_err(failed)?;
    tried?;
    let rows = ApalisRows { pool: line.pool.clone() };
    gate.set_wake(Arc::new(ApalisWake { rows, line: line.clone(), checked: Mutex::new(Instant::now()) }));
    Ok(())
}

/// Makes an index of the jobs by time, unless it is there: apalis's own is by priority first, so that a poll which finds nothing reads all
/// jobs that wait. Jobs run without it too, so that nothing of this is an error. Answers whether it is there.
///
/// It is made at once and not `concurrently`, which would wait for every open transaction, and such a one that is to change the table for it.
async fn index(line: &Line) -> Result<bool, sqlx::Error> {
    let mut transaction = line.pool.begin().await?;
    sqlx::query(line.sql(MIGRATION_LOCK)).execute(&mut *transaction).await?;
    let there = "select to_regclass('apalis.{prefix}job_due') is not null, pg_relation_size('apalis.jobs')";
    let (is_there, bytes): (bool, i64) = sqlx::query_as(line.sql(there)).fetch_one(&mut *transaction).await?;
    if is_there || bytes > INDEXED_BYTES {
        return Ok(is_there);
    }
    sqlx::raw_sql(line.sql(INDEX)).execute(&mut *transaction).await?;
    transaction.commit().await?;
    Ok(true)
}

/// Lets the planner know more precisely when jobs are due, unless the owner of the table has chosen how precisely. By default it knows that to one in a
/// hundred rows: if one job has ended and twenty thousand wait, two hundred of them are taken to be due. Then the index by priority seems
/// cheaper, which each poll reads to its end.
async fn refine_statistics(line: &Line) -> Result<(), sqlx::Error> {
    let is_default = "select coalesce(attstattarget, -1) < 0 from pg_attribute
        where attrelid = 'apalis.jobs'::regclass and attname = 'run_at'";
    let mut transaction = line.pool.begin().await?;
    sqlx::query(line.sql(MIGRATION_LOCK)).execute(&mut *transaction).await?;
    if sqlx::query_scalar(is_default).fetch_one(&mut *transaction).await? {
        // A vacuum by hand holds the same lock for as long as it runs.
        let refine =
            "set local lock_timeout = '2s'; alter table apalis.jobs alter column run_at set statistics 1000";
        sqlx::raw_sql(refine).execute(&mut *transaction).await?;
        transaction.commit().await?;
    }
    Ok(())
}

async fn check_columns(pool: &PgPool) -> Result<(), Error> {
    let text = "select column_name::text, data_type::text from information_schema.columns
        where table_schema = 'apalis' and table_name = 'jobs'";
    let failed = |error| Error::database("looking at apalis.jobs", error);
    let rows = sqlx::query(text).fetch_all(pool).await.map_err(failed)?;
    if rows.is_empty() {
        return Err(Error::new(
            "there is no table apalis.jobs, or this role may not see it; run PostgresStorage::setup(&pool) first",
        ));
    }
    let mut found = Vec::new();
    for row in rows {
        found.push((
            row.try_get::<String, _>(0).map_err(failed)?,
            row.try_get::<String, _>(1).map_err(failed)?,
        ));
    }
    for (name, kind) in COLUMNS {
        match found.iter().find(|(other, _)| other == name) {
            Some((_, other)) if other == kind => {}
            Some((_, other)) => {
                return Err(Error::new(format!(
                    "the column {name} of apalis.jobs is {other} and not {kind}; {TESTED}"
                )));
            }
            None => return Err(Error::new(format!("apalis.jobs has no column {name}; {TESTED}"))),
        }
    }
    Ok(())
}

/// Makes the trigger and its function unless they are there with the same text: making the trigger locks the table for a moment. Answers whether
/// anything was made.
///
/// Which text was made last is noted at the function, which belongs to who makes it: a note at the trigger is for the owner of the table alone, and
/// is only read, as older versions have written it. A role that is not the owner can make a trigger that is not there, and cannot replace one.
async fn install(line: &Line) -> Result<bool, Error> {
    let failed = |error| Error::database("making the trigger on apalis.jobs", error);
    let text = TRIGGER.replace("{prefix}", &line.prefix);
    let digest = Sha256::digest(text.as_bytes());
    let fingerprint: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut transaction = line.pool.begin().await.map_err(failed)?;
    sqlx::query(line.sql(MIGRATION_LOCK)).execute(&mut *transaction).await.map_err(failed)?;
    let made = "with trigger as (
          select t.tgfoid, obj_description(t.oid, 'pg_trigger') as note from pg_trigger t
          where t.tgrelid = 'apalis.jobs'::regclass and t.tgname = '{prefix}job_defer' and t.tgenabled in ('O', 'A')
        ), function as (
          select coalesce((select tgfoid from trigger), to_regprocedure('{prefix}job_defer_on_ack()')) as oid
        )
        select exists (select from trigger), coalesce($1 in ((select note from trigger), obj_description(oid, 'pg_proc')), false) from function";
    let (is_there, is_current): (bool, bool) = sqlx::query_as(line.sql(made))
        .bind(&fingerprint)
        .fetch_one(&mut *transaction)
        .await
        .map_err(failed)?;
    if is_there && is_current {
        return Ok(false);
    }
    // The function may be another role's, who alone can replace it.
    let trigger = text.find(TRIGGER_BEGINS).filter(|_| is_current).map_or(&*text, |at| &text[at..]);
    sqlx::raw_sql(line.sql(trigger)).execute(&mut *transaction).await.map_err(failed)?;
    if !is_current {
        let note = format!("comment on function {{prefix}}job_defer_on_ack() is '{fingerprint}'");
        sqlx::raw_sql(line.sql(&note)).execute(&mut *transaction).await.map_err(failed)?;
    }
    transaction.commit().await.map_err(failed)?;
    Ok(true)
}

/// The ack of a delayed job, by apalis's own statement, must be its reschedule.
async fn try_ack(connection: &mut PgConnection) -> Result<(), Error> {
    let failed = |error| Error::database("trying the ack of a delayed job", error);
    let (worker, job) = ("tollgate-contract", "00000000000000000000000001");
    let begin = "insert into apalis.workers (id, worker_type, storage_name) values ($1, $1, 'tollgate')";
    sqlx::query(begin).bind(worker).execute(&mut *connection).await.map_err(failed)?;
    let claimed = "insert into apalis.jobs (id, job_type, job, status, attempts, max_attempts, run_at, lock_by, lock_at)
        values ($1, $2, ''::bytea, 'Queued', 3, 25, now() + interval '1 day', $2, now())";
    sqlx::query(claimed).bind(job).bind(worker).execute(&mut *connection).await.map_err(failed)?;
    let until_us = 4_102_444_800_000_000_u64;
    let result = serde_json::json!({"tollgate": "delayed", "until_us": until_us, "nonce": "contract"});
    let task_id: PgTaskId = PgTaskId::from_string(job);
    let ack = TaskResult { task_id, attempt: 4, status: Status::Pending, result: Ok(result) };
    let acked = apalis_postgres::queries::handle_results(&mut *connection, &[&ack], worker).await;
    let acked = acked.map_err(|error| {
        Error::caused(format!("trying the ack of a delayed job: {error}; {TESTED}"), error)
    })?;
    let found = "select status, attempts, lock_by is null and lock_at is null and done_at is null,
        (extract(epoch from run_at) * 1000000)::bigint from apalis.jobs where id = $1";
    let row = sqlx::query(found).bind(job).fetch_one(&mut *connection).await.map_err(failed)?;
    let status: String = row.try_get(0).map_err(failed)?;
    let attempts: i32 = row.try_get(1).map_err(failed)?;
    let is_free: bool = row.try_get(2).map_err(failed)?;
    let run_at: i64 = row.try_get(3).map_err(failed)?;
    let is_as_tested =
        (acked, &*status, attempts, is_free, run_at.cast_unsigned()) == (1, "Pending", 3, true, until_us);
    if is_as_tested {
        return Ok(());
    }
    Err(Error::new(format!(
        "the ack of a delayed job left it {status}, attempts {attempts}, unlocked {is_free}, run_at {run_at} µs ({acked} rows): the ack \
         of this apalis, or a trigger on apalis.jobs, differs; {TESTED}"
    )))
}

/// Calls waiting jobs by their rows, and looks after the trigger.
struct ApalisWake {
    rows: ApalisRows,
    line: Line,
    /// When the trigger was last looked for.
    checked: Mutex<Instant>,
}

/// How often the trigger is looked for at most.
const CHECK_EVERY: Duration = Duration::from_secs(1);

impl Wake for ApalisWake {
    fn wake<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<u64, Error>> + Send + 'a>> {
        self.rows.wake(jobs)
    }

    fn in_hands<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, Error>> + Send + 'a>> {
        self.rows.in_hands(jobs)
    }

    fn ended<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, Error>> + Send + 'a>> {
        self.rows.ended(jobs)
    }

    /// Without the trigger a delayed job comes back at once, again and again.
    fn came_early(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        {
            let mut checked = self.checked.lock();
            if checked.elapsed() < CHECK_EVERY {
                return Box::pin(std::future::ready(()));
            }
            *checked = Instant::now();
        }
        Box::pin(async {
            match install(&self.line).await {
                Ok(false) => {}
                Ok(true) => tracing::error!(
                    "the trigger on apalis.jobs was gone, so that delayed jobs came back at once; it is there again"
                ),
                Err(error) => tracing::error!(%error, "the trigger on apalis.jobs cannot be looked after"),
            }
        })
    }
}
