//! Our shared stores beside the least that anybody could do, on a real Redis and a real PostgreSQL.
//!
//! `redis.rs` and `postgres.rs` start a server each and say who takes part; `load.rs` makes the calls, `rounds.rs` measures
//! them, `cpu.rs` reads what they cost both sides, `report.rs` and `goals.rs` tell; `latency.rs` is a run of its own, which can fail. A store is called through its public API,
//! and what it is compared with goes over the same client. Client and server are on one machine: what goes through says as
//! much about the machine as about us, and the ratios are the result.

mod callers;
pub(crate) mod cpu;
mod goals;
pub(crate) mod latency;
mod load;
mod postgres;
mod redis;
mod report;
mod rounds;

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::{Args, ValueEnum};

pub(crate) use self::report::{quartiles_to_json, spell_rates};
use self::rounds::Plan;
use crate::machine::{self, Facts};

#[derive(Args)]
pub(crate) struct Options {
    /// Rounds that every contestant runs in every cell [default: 9]
    #[arg(long, value_parser = clap::value_parser!(u16).range(3..=30))]
    rounds: Option<u16>,
    /// A smoke run: 3 short rounds of a thousand keys. Its numbers mean little
    #[arg(long)]
    quick: bool,
    /// One store only
    #[arg(long)]
    only: Option<Which>,
    /// Also write the results and the facts of the machine to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Which {
    Redis,
    Postgres,
}

/// All that a run found out.
struct Results {
    redis: Option<redis::Found>,
    postgres: Option<postgres::Found>,
}

pub(crate) fn run(options: &Options, is_strict: bool) -> Result<(), String> {
    let (rounds, turn, keys) = if options.quick {
        (3, Duration::from_millis(150), 1_000)
    } else {
        (9, Duration::from_millis(500), 10_000)
    };
    let plan = Plan { rounds: options.rounds.map_or(rounds, usize::from), turn, keys };
    let wants = |which| options.only.is_none_or(|only| only == which);
    // What is missing, and a file that cannot be written, are reported before minutes of measuring.
    if wants(Which::Redis) {
        find_redis()?;
    }
    if wants(Which::Postgres) {
        postgres::find_programs()?;
    }
    let json = options
        .json
        .as_ref()
        .map(|path| File::create(path).map_err(|error| crate::unwritable(path, &error)))
        .transpose()?;
    let facts = Facts::read();
    report::print_head(&facts, &plan);

    let mut results = Results { redis: None, postgres: None };
    if wants(Which::Redis) {
        let found = redis::measure(&plan, &machine::cores())?;
        report::print_redis(&found);
        results.redis = Some(found);
    }
    if wants(Which::Postgres) {
        let found = postgres::measure(&plan)?;
        report::print_postgres(&found);
        results.postgres = Some(found);
    }
    let goals = goals::judge(&results);
    crate::report::print_goals(&goals);

    if let (Some(mut file), Some(path)) = (json, &options.json) {
        let json = report::to_json(&facts, &machine::load_average(), &plan, &results, &goals);
        writeln!(file, "{json:#}").map_err(|error| crate::unwritable(path, &error))?;
    }
    crate::goals::strictly(
        crate::goals::Strict::of(is_strict, options.quick || options.only.is_some()),
        &goals,
    )
}

/// The runtime of a client: one thread, so that a client takes one core.
fn block_on<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| format!("starting the client's runtime: {error}"))?.block_on(work)
}

/// The server that the test kit starts, which would panic without it.
pub(crate) fn find_redis() -> Result<(), String> {
    let server = std::env::var_os("TOLLGATE_REDIS_SERVER").unwrap_or_else(|| "redis-server".into());
    let asked = Command::new(server).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    match asked {
        Ok(_) => Ok(()),
        Err(_) => Err("redis-server is not installed: run apt-get install -y redis-server".into()),
    }
}
