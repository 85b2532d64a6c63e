//! Background jobs on two queues: e-mail waits for its turn, calls to an API fail when there are too many, and a cache refresher that comes
//! every second is skipped when it comes too often.
//!
//! `cargo run -p tollgate-jobs --example jobs`: starts a PostgreSQL of its own, which must be installed, and ends by itself.

use std::borrow::Cow;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use apalis::prelude::{BoxDynError, Data, PollWith, TaskSink, WorkerBuilder};
use apalis_cron::timezone::Utc;
use apalis_cron::{CronScheduler, Schedule, Tick};
use apalis_postgres::{Config, PostgresStorage};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tollgate::Tollgate;
use tollgate::store::PostgresOptions;
use tollgate_jobs::adapter::{DuePoll, GateLayer, JobArgs, prepare, supervise};
use tollgate_jobs::{JobGate, JobPolicy, Jobs, OnExceeded};
use tollgate_testkit::postgres::PostgresServer;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, Serialize, Deserialize)]
enum Work {
    SendEmail { to: String },
    CallApi { path: String },
    RefreshCache,
}

/// Policies name jobs by these.
impl JobArgs for Work {
    fn job_type(&self) -> Cow<'_, str> {
        match self {
            Work::SendEmail { .. } => "send_email".into(),
            Work::CallApi { .. } => "call_api".into(),
            Work::RefreshCache => "refresh_cache".into(),
        }
    }
}

async fn work(work: Work) -> Result<String, BoxDynError> {
    Ok(format!("did {work:?}"))
}

/// Ticks every second; a schedule of the `cron` crate would do as well.
#[derive(Clone)]
struct EverySecond;

impl Schedule<Utc> for EverySecond {
    fn next_tick(&mut self, _: &Utc) -> Option<Tick<Utc>> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        Some(Tick::new(now.as_secs() + 1))
    }
}

/// A recurring job is one that a tick pushes.
async fn on_tick(_: Tick<Utc>, pool: Data<PgPool>) -> Result<(), BoxDynError> {
    storage(&pool, "cache").push(Work::RefreshCache).await?;
    Ok(())
}

fn storage(pool: &PgPool, queue: &str) -> PostgresStorage<Work> {
    let config = Config::default().queue(queue).lock_tasks(false).heartbeat_interval(5 * SECOND);
    PostgresStorage::new(pool).with_config(config)
}

/// Runs a worker of a queue in the background.
fn start(gate: &JobGate, pool: &PgPool, queue: &'static str) {
    let (gate, pool) = (gate.clone(), pool.clone());
    tokio::spawn(async move {
        supervise(queue, |name| {
            let poll = DuePoll::new(&gate, Duration::from_millis(100));
            WorkerBuilder::new(&*name)
                .backend(PollWith::new(storage(&pool, queue), poll))
                .layer(GateLayer::new(&gate))
                .build(work)
                .run()
        })
        .await;
    });
}

#[tokio::main]
async fn main() -> Result<(), BoxDynError> {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    let pool = PgPool::connect(&url).await?;
    PostgresStorage::<()>::setup(&pool).await?;

    let jobs = Jobs::new()
        .job("send_email", JobPolicy::new().with_rate_limit(5, SECOND).on_exceeded(OnExceeded::Delay))
        .job("call_api", JobPolicy::new().with_rate_limit(3, 60 * SECOND).on_exceeded(OnExceeded::Reject))
        .job("refresh_cache", JobPolicy::new().with_rate_limit(1, 60 * SECOND).on_exceeded(OnExceeded::Skip))
        .queue("outbound", JobPolicy::new().with_rate_limit(20, SECOND))
        .global(JobPolicy::new().with_rate_limit(1_000, 60 * SECOND));
    // Within 100 ms, the default, a busy laptop may not answer, and then jobs are counted without the store (`fallback`).
    let store = PostgresOptions { timeout: 5 * SECOND, ..PostgresOptions::new(&url) };
    let tollgate = Tollgate::builder().postgres_with(store).connect().await?;
    let gate = JobGate::builder(tollgate, pool.clone()).jobs(jobs).connect().await?;
    prepare(&gate).await?;

    let mut outbound = storage(&pool, "outbound");
    for number in 0..12 {
        outbound.push(Work::SendEmail { to: format!("user-{number}@example.com") }).await?;
    }
    for number in 0..6 {
        outbound.push(Work::CallApi { path: format!("/orders/{number}") }).await?;
    }
    start(&gate, &pool, "outbound");
    start(&gate, &pool, "cache");
    let cron =
        WorkerBuilder::new("cron").backend(CronScheduler::new(EverySecond)).data(pool.clone()).build(on_tick);
    tokio::spawn(cron.run());

    tokio::time::sleep(SECOND / 2).await;
    let status = gate.status("job:send_email").await?;
    println!("e-mail: {} of {} in a second, {} wait", status.count, status.limit, status.waiting);

    // Until all e-mail and calls have ended, and the cache was refreshed once and skipped once.
    let text = "select count(*) filter (where queue = 'outbound' and state = 'ran'),
        count(*) filter (where state = 'rejected'), count(*) filter (where state = 'skipped') > 0
        from (select job_type as queue, case
            when status = 'Done' then 'ran'
            when last_result ->> 'Err' = 'Rate limit exceeded' then 'rejected'
            when last_result -> 'Ok' ->> 'tollgate' = 'skipped' then 'skipped' end as state from apalis.jobs) as jobs";
    loop {
        let (ran, rejected, is_skipped): (i64, i64, bool) = sqlx::query_as(text).fetch_one(&pool).await?;
        if ran + rejected == 18 && is_skipped {
            println!("outbound: 12 e-mails and {} calls ran, {rejected} calls were rejected", ran - 12);
            println!("cache: refreshed once a minute, skipped in between");
            return Ok(());
        }
        tokio::time::sleep(SECOND / 10).await;
    }
}
