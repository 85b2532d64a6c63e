//! Limits on background jobs in apalis, on a real PostgreSQL that it starts.
//!
//! `throughput.rs` runs jobs that do nothing as fast as they go, with and without the gate; `drain.rs` runs a backlog at its limit, and sees
//! how soon it is done; `tenants.rs` sees how long one tenant waits behind another, `change.rs` how soon waiting jobs run when their limit is raised, `idle.rs` what they
//! cost a database. Everything is in one process with the database on the same machine: the ratios of one run, and CPU time per job, are the result.

mod change;
mod drain;
mod idle;
mod tenants;
mod throughput;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use apalis::prelude::{BoxDynError, Data, IntervalStrategy, PollWith, TaskSink, WorkerBuilder};
use apalis_postgres::{Config, PostgresStorage};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinHandle;
use tollgate::{Fallback, Tollgate};
use tollgate_jobs::adapter::{DuePoll, GateLayer, JobArgs, prepare, supervise};
use tollgate_jobs::{JobGate, Jobs};
use tollgate_testkit::postgres::PostgresServer;

use crate::goals::{Goal, Strict, strictly};
use crate::machine::Facts;
use crate::report::{print_goals, print_machine};

/// How often a worker polls.
const POLL: Duration = Duration::from_millis(50);

#[derive(Args)]
pub(crate) struct Options {
    /// Rounds of the throughput, and of each drain
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=30))]
    rounds: u16,
    /// Jobs of a round of the throughput
    #[arg(long, default_value_t = 2_000)]
    jobs: usize,
    /// How long an idle database is looked at, in seconds: a multiple of 285, in which each waiting job is put off again once
    #[arg(long, default_value_t = 570)]
    idle_seconds: u64,
    /// Also prints the statements that an idle database spent most time in (needs pg_stat_statements, which itself costs a little)
    #[arg(long)]
    statements: bool,
    /// One part only
    #[arg(long)]
    only: Option<Part>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Throughput,
    Drain,
    Tenants,
    Change,
    Idle,
}

pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot start the runtime: {error}"))?;
    print_machine(&Facts::read());
    let wants = |part| options.only.is_none_or(|only| only == part);
    // What one part failed at does not cost the others.
    let (mut goals, mut failed) = (Vec::new(), Vec::new());
    let parts = [Part::Throughput, Part::Drain, Part::Tenants, Part::Change, Part::Idle];
    for part in parts.into_iter().filter(|part| wants(*part)) {
        let measured: Result<Vec<Goal>, BoxDynError> = runtime.block_on(async {
            Ok(match part {
                Part::Throughput => throughput::run(options.rounds, options.jobs).await?,
                Part::Drain => drain::run(options.rounds).await?,
                Part::Tenants => vec![tenants::run(options.rounds).await?],
                Part::Change => vec![change::run(options.rounds).await?],
                Part::Idle => {
                    vec![idle::run(Duration::from_secs(options.idle_seconds), options.statements).await?]
                }
            })
        });
        match measured {
            Ok(measured) => goals.extend(measured),
            Err(error) => failed.push(error.to_string()),
        }
    }
    print_goals(&goals);
    failed.extend(strictly(Strict::of(is_strict, options.only.is_some()), &goals).err());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// A job that does nothing.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Nothing {
    number: usize,
    tenant: usize,
}

impl JobArgs for Nothing {
    fn job_type(&self) -> Cow<'_, str> {
        Cow::Borrowed("nothing")
    }
}

/// How many handlers have run.
#[derive(Clone, Debug, Default)]
struct Runs(Arc<AtomicUsize>);

async fn handle(job: Nothing, runs: Data<Runs>) -> Result<(), BoxDynError> {
    // Those of the second tenant alone are counted where there are two.
    if job.tenant == 0 || job.tenant == 2 {
        runs.0.0.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

impl Runs {
    /// Waits until so many have run.
    async fn wait_for(&self, count: usize) -> Result<(), BoxDynError> {
        let begun = Instant::now();
        while self.0.load(Ordering::Relaxed) < count {
            if begun.elapsed() > Duration::from_secs(180) {
                return Err(format!("{} of {count} jobs ran in 180 s", self.0.load(Ordering::Relaxed)).into());
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }
}

/// A worker that ends when it is dropped.
struct Worker(JoinHandle<()>);

impl Drop for Worker {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn storage(pool: &PgPool, queue: &str) -> PostgresStorage<Nothing> {
    let config = Config::default().queue(queue).batch_size(100).lock_tasks(false);
    PostgresStorage::new(pool).with_config(config)
}

/// Starts a worker with the gate as its layer.
fn start(gate: &JobGate, pool: &PgPool, queue: &str, runs: &Runs) -> Worker {
    let (gate, pool, queue, runs) = (gate.clone(), pool.clone(), queue.to_owned(), runs.clone());
    Worker(tokio::spawn(async move {
        supervise("bench", |name| {
            let poll = DuePoll::new(&gate, POLL);
            let worker = WorkerBuilder::new(&*name).backend(PollWith::new(storage(&pool, &queue), poll));
            worker.layer(GateLayer::new(&gate)).data(runs.clone()).build(handle).run()
        })
        .await;
    }))
}

/// Starts a worker as apalis has them.
fn start_alone(pool: &PgPool, queue: &str, runs: &Runs) -> Worker {
    let (pool, queue, runs) = (pool.clone(), queue.to_owned(), runs.clone());
    Worker(tokio::spawn(async move {
        supervise("alone", |name| {
            let poll = IntervalStrategy::new(POLL);
            let worker = WorkerBuilder::new(&*name).backend(PollWith::new(storage(&pool, &queue), poll));
            worker.data(runs.clone()).build(handle).run()
        })
        .await;
    }))
}

async fn pool(url: &str) -> Result<PgPool, BoxDynError> {
    Ok(PgPoolOptions::new().max_connections(10).connect(url).await?)
}

/// A database with apalis's tables.
async fn database() -> Result<(PostgresServer, PgPool), BoxDynError> {
    with_tables(PostgresServer::start()).await
}

/// Another one on the same server, with apalis's tables and nothing of ours.
async fn untouched_database(server: &PostgresServer) -> Result<PgPool, BoxDynError> {
    server.psql("create database untouched");
    let pool = pool(&server.url("untouched")).await?;
    PostgresStorage::<()>::setup(&pool).await?;
    Ok(pool)
}

async fn with_tables(server: PostgresServer) -> Result<(PostgresServer, PgPool), BoxDynError> {
    let pool = pool(&server.url("postgres")).await?;
    PostgresStorage::<()>::setup(&pool).await?;
    Ok((server, pool))
}

async fn gate(server: &PostgresServer, pool: &PgPool, jobs: Jobs) -> Result<JobGate, BoxDynError> {
    let url = server.url("postgres");
    let options = tollgate::store::PostgresOptions {
        timeout: Duration::from_secs(3),
        ..tollgate::store::PostgresOptions::new(url)
    };
    // A store that is slow on a busy machine is not to let a job run that nobody counted.
    let tollgate = Tollgate::builder().postgres_with(options).fallback(Fallback::Closed).connect().await?;
    let gate = JobGate::builder(tollgate, pool.clone()).jobs(jobs).connect().await?;
    prepare(&gate).await?;
    Ok(gate)
}

async fn push(pool: &PgPool, queue: &str, count: usize) -> Result<(), BoxDynError> {
    push_of(pool, queue, count, 0).await
}

async fn push_of(pool: &PgPool, queue: &str, count: usize, tenant: usize) -> Result<(), BoxDynError> {
    let mut storage = storage(pool, queue);
    for chunk in (0..count).collect::<Vec<_>>().chunks(2_500) {
        storage.push_bulk(chunk.iter().map(|number| Nothing { number: *number, tenant }).collect()).await?;
    }
    Ok(())
}
