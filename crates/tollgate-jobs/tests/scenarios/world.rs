//! A PostgreSQL with apalis's tables, a gate before its jobs, and workers; and what can be read of them afterwards, on the database's
//! clock: every permit, every start of a handler and every delay is logged by triggers and by the handler itself.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use apalis::prelude::{BoxDynError, Data, PollWith, TaskBuilder, TaskSink, WorkerBuilder, WorkerBuilderExt};
use apalis_postgres::{Config, PostgresStorage};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Row};
use tokio::task::JoinHandle;
use tollgate::{Fallback, Tollgate, TollgateBuilder};
use tollgate_jobs::adapter::{DuePoll, GateLayer, JobArgs, RateLimited, prepare, supervise};
use tollgate_jobs::{JobGate, JobPolicy, Jobs};
use tollgate_testkit::postgres::PostgresServer;

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const HOUR: Duration = Duration::from_secs(3_600);

/// How long anything may take that is waited for: tests do not depend on how fast the machine is.
const PATIENCE: Duration = Duration::from_secs(90);

/// The database's clock, in ms.
pub(crate) const CLOCK: &str = "select (extract(epoch from clock_timestamp()) * 1000)::bigint";

/// Whether scenarios run with the counts and the times that are promised on a machine that does nothing else (`TOLLGATE_JOBS_FULL=1`), and not
/// with fewer jobs and without times.
pub(crate) fn full() -> bool {
    std::env::var_os("TOLLGATE_JOBS_FULL").is_some_and(|value| value == "1")
}

/// The first in full, else the second.
pub(crate) fn in_full<T>(in_full: T, otherwise: T) -> T {
    if full() { in_full } else { otherwise }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TestJob {
    pub(crate) kind: String,
    pub(crate) number: i64,
    #[serde(default)]
    pub(crate) tenant: Option<String>,
    #[serde(default)]
    pub(crate) act: Act,
}

/// What the handler does.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) enum Act {
    #[default]
    Succeed,
    Fail,
    /// Panics the first time.
    Panic,
    SleepMs(u64),
    /// Answers a 429 the first time.
    AskForRestMs(u64),
}

impl TestJob {
    pub(crate) fn new(kind: &str, number: i64) -> TestJob {
        TestJob { kind: kind.to_owned(), number, tenant: None, act: Act::Succeed }
    }

    pub(crate) fn of(self, tenant: &str) -> TestJob {
        TestJob { tenant: Some(tenant.to_owned()), ..self }
    }

    pub(crate) fn act(self, act: Act) -> TestJob {
        TestJob { act, ..self }
    }
}

impl JobArgs for TestJob {
    fn job_type(&self) -> Cow<'_, str> {
        assert_ne!(self.kind, "without a type", "it panics");
        Cow::Borrowed(&self.kind)
    }
}

async fn handle(job: TestJob, pool: Data<PgPool>) -> Result<String, BoxDynError> {
    let text =
        "insert into starts (kind, number, tenant, at) values ($1, $2, $3, clock_timestamp()) returning
        run, (select count(*) from starts where kind = $1 and number = $2)";
    // No text of PostgreSQL has a NUL.
    let written = |text: &str| text.chars().take(100).filter(|letter| *letter != '\0').collect::<String>();
    let (run, before): (i64, i64) = sqlx::query_as(text)
        .bind(written(&job.kind))
        .bind(job.number)
        .bind(job.tenant.as_deref().map(written))
        .fetch_one(&*pool)
        .await?;
    match job.act {
        Act::Succeed => {}
        Act::Fail => return Err("it fails".into()),
        Act::Panic if before == 0 => panic!("it panics"),
        Act::Panic => {}
        Act::SleepMs(ms) => {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            sqlx::query("insert into ends values ($1, clock_timestamp())").bind(run).execute(&*pool).await?;
        }
        Act::AskForRestMs(ms) if before == 0 => {
            return Err(RateLimited { retry_after: Duration::from_millis(ms) }.into());
        }
        Act::AskForRestMs(_) => {}
    }
    Ok("done".to_owned())
}

/// How a worker is set up.
#[derive(Clone)]
pub(crate) struct WorkerOptions {
    pub(crate) poll: Duration,
    pub(crate) lock_tasks: bool,
    pub(crate) batch: usize,
    pub(crate) heartbeat: Duration,
    /// Of the layer behind the gate's.
    pub(crate) timeout: Duration,
}

impl Default for WorkerOptions {
    fn default() -> WorkerOptions {
        WorkerOptions {
            poll: Duration::from_millis(50),
            lock_tasks: false,
            batch: 10,
            heartbeat: SECOND,
            timeout: HOUR,
        }
    }
}

/// A worker that runs until it is dropped.
pub(crate) struct TestWorker(JoinHandle<()>);

impl Drop for TestWorker {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(crate) fn work(
    gate: &JobGate,
    pool: &PgPool,
    name: &str,
    queue: &str,
    options: WorkerOptions,
) -> TestWorker {
    let (gate, pool, queue, name) = (gate.clone(), pool.clone(), queue.to_owned(), name.to_owned());
    TestWorker(tokio::spawn(async move {
        supervise(&name, |name| {
            let config = Config::default()
                .queue(&queue)
                .batch_size(options.batch)
                .lock_tasks(options.lock_tasks)
                .heartbeat_interval(options.heartbeat)
                .missed_heartbeats(3);
            let storage = PostgresStorage::<TestJob>::new(&pool).with_config(config);
            WorkerBuilder::new(&*name)
                .backend(PollWith::new(storage, DuePoll::new(&gate, options.poll)))
                .layer(GateLayer::new(&gate))
                .timeout(options.timeout)
                .data(pool.clone())
                .build(handle)
                .run()
        })
        .await;
    }))
}

/// A tollgate on this database, and a gate with these policies.
pub(crate) async fn gate_at(
    url: &str,
    pool: &PgPool,
    jobs: Jobs,
    with: impl FnOnce(TollgateBuilder) -> TollgateBuilder,
) -> JobGate {
    JobGate::builder(tollgate_at(url, with).await, pool.clone()).jobs(jobs).connect().await.unwrap()
}

pub(crate) async fn tollgate_at(
    url: &str,
    with: impl FnOnce(TollgateBuilder) -> TollgateBuilder,
) -> Tollgate {
    let options = tollgate::store::PostgresOptions {
        // Enough for a machine that is busy with other tests: what a timeout denies is not what is looked at here.
        timeout: 3 * SECOND,
        ..tollgate::store::PostgresOptions::new(url.to_owned())
    };
    let builder = Tollgate::builder().postgres_with(options).fallback(Fallback::Closed);
    with(builder).connect().await.unwrap()
}

pub(crate) async fn pool_at(url: &str) -> PgPool {
    PgPoolOptions::new()
        .max_connections(20)
        .acquire_timeout(Duration::from_secs(10))
        .connect(url)
        .await
        .unwrap()
}

pub(crate) struct World {
    pub(crate) server: PostgresServer,
    pub(crate) url: String,
    pub(crate) pool: PgPool,
    pub(crate) gate: JobGate,
}

impl World {
    pub(crate) async fn new(jobs: Jobs) -> World {
        World::with(jobs, |builder| builder).await
    }

    pub(crate) async fn with(jobs: Jobs, with: impl FnOnce(TollgateBuilder) -> TollgateBuilder) -> World {
        let server = PostgresServer::start();
        let url = server.url("postgres");
        let pool = pool_at(&url).await;
        PostgresStorage::<()>::setup(&pool).await.unwrap();
        let gate = gate_at(&url, &pool, jobs, with).await;
        prepare(&gate).await.unwrap();
        World::of(server, url, pool, gate)
    }

    /// Around a gate that was prepared: logs permits, starts and delays.
    pub(crate) fn of(server: PostgresServer, url: String, pool: PgPool, gate: JobGate) -> World {
        let world = World { server, url, pool, gate };
        world.server.psql(
            "create table starts (run bigint generated always as identity, kind text, number bigint, tenant text, at timestamptz);
             create table ends (run bigint, at timestamptz);
             create table permits (limit_name text, at_us bigint, cost bigint);
             create table delays (job text, run_at timestamptz, logged timestamptz, was_claimed boolean);
             create function log_permit() returns trigger language plpgsql as $$ begin
               insert into permits select * from unnest(new.limit_names, new.charged_at_us, new.costs);
               return new; end $$;
             create trigger log_permit after insert on tollgate_hold for each row execute function log_permit();
             create function log_delay() returns trigger language plpgsql as $$ begin
               insert into delays values (new.id, new.run_at, clock_timestamp(), old.status <> 'Pending'); return new; end $$;
             create trigger log_delay after update on apalis.jobs for each row
               when (new.status = 'Pending' and new.last_result->'Ok'->>'tollgate' = 'delayed'
                 and (new.last_result is distinct from old.last_result or new.run_at > old.run_at)) execute function log_delay();",
        );
        world
    }

    pub(crate) fn worker(&self, queue: &str) -> TestWorker {
        self.worker_with("worker", queue, WorkerOptions::default())
    }

    pub(crate) fn worker_with(&self, name: &str, queue: &str, options: WorkerOptions) -> TestWorker {
        work(&self.gate, &self.pool, name, queue, options)
    }

    pub(crate) async fn push(&self, queue: &str, jobs: impl IntoIterator<Item = TestJob>) {
        self.push_tries(queue, 25, jobs).await;
    }

    pub(crate) async fn push_tries(
        &self,
        queue: &str,
        attempts: usize,
        jobs: impl IntoIterator<Item = TestJob>,
    ) {
        let mut storage =
            PostgresStorage::<TestJob>::new(&self.pool).with_config(Config::default().queue(queue));
        for job in jobs {
            storage.push_task(TaskBuilder::new(job).max_attempts(attempts).build()).await.unwrap();
        }
    }

    /// Pushes one that is due later.
    pub(crate) async fn push_later(&self, queue: &str, wait: Duration, job: TestJob) {
        let mut storage =
            PostgresStorage::<TestJob>::new(&self.pool).with_config(Config::default().queue(queue));
        storage.push_task(TaskBuilder::new(job).run_after(wait).build()).await.unwrap();
    }

    /// Pushes many at once.
    pub(crate) async fn push_all(&self, queue: &str, jobs: impl IntoIterator<Item = TestJob>) {
        let mut storage =
            PostgresStorage::<TestJob>::new(&self.pool).with_config(Config::default().queue(queue));
        storage.push_bulk(jobs.into_iter().collect()).await.unwrap();
    }

    /// How many rows there are by status.
    pub(crate) async fn statuses(&self) -> BTreeMap<String, i64> {
        self.counts("select status, count(*) from apalis.jobs group by status").await
    }

    pub(crate) async fn counts(&self, text: &str) -> BTreeMap<String, i64> {
        let rows = sqlx::query(AssertSqlSafe(text.to_owned())).fetch_all(&self.pool).await.unwrap();
        rows.iter().map(|row| (row.get(0), row.get(1))).collect()
    }

    pub(crate) async fn number(&self, text: &str) -> i64 {
        number(&self.pool, text).await.unwrap()
    }

    /// Waits until a query answers this number.
    pub(crate) async fn until(&self, text: &str, wanted: i64) {
        let begun = Instant::now();
        loop {
            let found = number(&self.pool, text).await;
            if found.as_ref().is_ok_and(|found| *found == wanted) {
                return;
            }
            assert!(
                begun.elapsed() < in_full(4 * PATIENCE, PATIENCE),
                "{text}: {found:?} and not {wanted}\n{:?}\n{}\n{}",
                self.statuses().await,
                self.server.try_psql("select * from tollgate_job_waiting limit 20").unwrap_or_default(),
                last_lines(&self.server.log(), 15),
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until all jobs of a kind are done.
    pub(crate) async fn until_done(&self, wanted: i64) {
        self.until("select count(*) from apalis.jobs where status = 'Done'", wanted).await;
    }

    /// The most units that a limit admitted in any window.
    pub(crate) async fn most_permits(&self, limit: &str, window: Duration) -> i64 {
        let rows = sqlx::query("select at_us, cost from permits where limit_name = $1 order by at_us")
            .bind(limit)
            .fetch_all(&self.pool)
            .await
            .unwrap();
        let permits: Vec<(i64, i64)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        let window = i64::try_from(window.as_micros()).unwrap();
        let within = |from: i64| permits.iter().filter(move |(at, _)| (from..from + window).contains(at));
        permits.iter().map(|(from, _)| within(*from).map(|(_, cost)| cost).sum()).max().unwrap_or(0)
    }

    /// How many ms after `from`, on the database's clock, the last job of a kind was started.
    pub(crate) async fn last_start(&self, kind: &str, from: i64) -> i64 {
        let last = "select (extract(epoch from max(at)) * 1000)::bigint from starts where kind";
        self.number(&format!("{last} = '{kind}'")).await - from
    }

    pub(crate) async fn starts(&self, kind: &str) -> i64 {
        self.number(&format!("select count(*) from starts where kind = '{kind}'")).await
    }
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

async fn number(pool: &PgPool, text: &str) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar(AssertSqlSafe(text.to_owned())).fetch_one(pool).await
}

pub(crate) fn jobs(kind: &str, count: i64) -> impl Iterator<Item = TestJob> + '_ {
    (0..count).map(move |number| TestJob::new(kind, number))
}

/// One policy for one type.
pub(crate) fn only(kind: &str, policy: JobPolicy) -> Jobs {
    Jobs::new().job(kind, policy)
}

pub(crate) fn rate(limit: u64, window: Duration) -> JobPolicy {
    JobPolicy::new().with_rate_limit(limit, window)
}

/// The exporter of this process, installed once.
pub(crate) fn exporter() -> metrics_exporter_prometheus::PrometheusHandle {
    static EXPORTER: std::sync::OnceLock<metrics_exporter_prometheus::PrometheusHandle> =
        std::sync::OnceLock::new();
    let install = || metrics_exporter_prometheus::PrometheusBuilder::new().install_recorder().unwrap();
    EXPORTER.get_or_init(install).clone()
}
