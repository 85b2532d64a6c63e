//! Whether the shared stores reach the latency that is asked of them. The run fails where they do not.
//!
//! `cargo run --release -p tollgate-benches -- latency`. A gate on a real Redis, and then one on a real PostgreSQL, decides at a steady pace of
//! 60,000 a minute over a thousand keys, each decision timed from when it was due. Asked for are p95 below 5 ms, p99 below 10 ms, 50,000
//! decisions a minute, and none that failed or fell back. The machine must be otherwise idle: what its other work adds counts.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tollgate::{Rate, Tollgate};
use tollgate_store::{Limit, PostgresOptions, PostgresStore, RedisOptions, RedisStore, Store};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;

use super::Which;
use super::load::{Answer, Caller, Draw, Keys, Paced, keys, steady_load};
use crate::goals::{Goal, Grade, Wanted};

/// What is asked for.
const P95_MS: f64 = 5.0;
const P99_MS: f64 = 10.0;
const A_MINUTE: f64 = 50_000.0;
const KEYS: u32 = 1_000;

/// How many decisions are made in a second: a fifth more than is asked for, so that a run that keeps up shows it.
const PER_SECOND: u32 = 1_000;

#[derive(Args)]
pub(crate) struct Options {
    /// How long each store is asked
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// One store only
    #[arg(long)]
    only: Option<Which>,
}

/// Decides through a gate, as a service does.
#[derive(Clone)]
struct Decides(Arc<Tollgate>);

impl Caller for Decides {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let decision = self.0.check("api", draw.one()).await.map_err(|error| error.to_string())?;
        if decision.is_degraded() {
            return Err("the store did not answer in time, and the gate fell back".into());
        }
        Ok(Answer::one(decision.is_allowed()))
    }
}

pub(crate) fn run(options: &Options) -> Result<(), String> {
    let wants = |which| options.only.is_none_or(|only| only == which);
    let duration = Duration::from_secs(options.seconds);
    let mut goals = Vec::new();
    if wants(Which::Redis) {
        super::find_redis()?;
        let server = RedisServer::start();
        let paced = super::block_on(async {
            let store =
                RedisStore::new(RedisOptions::new(server.url())).map_err(|error| error.to_string())?;
            measure(Arc::new(store), duration).await
        })?;
        goals.extend(judge("Redis", &paced));
    }
    if wants(Which::Postgres) {
        let server = PostgresServer::start();
        let paced = super::block_on(async {
            let options = PostgresOptions::new(server.url("postgres"));
            let store = PostgresStore::connect(options).await.map_err(|error| error.to_string())?;
            measure(Arc::new(store), duration).await
        })?;
        goals.extend(judge("PostgreSQL", &paced));
    }
    crate::report::print_goals(&goals);
    fail_unless_reached(&goals)
}

async fn measure(store: Arc<dyn Store>, duration: Duration) -> Result<Paced, String> {
    let rate = Rate::per_second(1_000).map_err(|error| error.to_string())?;
    let limit = Limit::token_bucket(rate, 1_000_000).map_err(|error| error.to_string())?;
    let gate =
        Tollgate::builder().limit("api", limit).store(store).build().map_err(|error| error.to_string())?;
    let decides = Decides(Arc::new(gate));
    let keys: Keys = keys("", KEYS);
    // Every key is charged once before the clock starts: connections, scripts and plans are made.
    for key in keys.iter() {
        let _ = decides.0.check("api", key).await.map_err(|error| error.to_string())?;
    }
    Ok(steady_load(&|| decides.clone(), &keys, PER_SECOND, duration).await)
}

fn judge(store: &str, paced: &Paced) -> Vec<Goal> {
    let percentile = |percent: f64| {
        let millis = |us: u64| us as f64 / 1e3;
        let late = millis(paced.late.value_at_percentile(percent));
        let measured = millis(paced.latencies.value_at_percentile(percent));
        (Some(measured).filter(|_| !paced.latencies.is_empty()), format!("calls were made {late:.2} ms late"))
    };
    let latency = |percent: f64, below: f64| {
        let (measured, beside) = percentile(percent);
        let what = format!("{store}: p{percent} over {KEYS} keys");
        Goal { what, wanted: Wanted::BelowMillis(below), measured, beside }
    };
    let tally = &paced.tally;
    let seconds = tally.wall.as_secs_f64().max(1e-9);
    vec![
        latency(95.0, P95_MS),
        latency(99.0, P99_MS),
        Goal {
            what: format!("{store}: decisions a minute"),
            wanted: Wanted::AtLeastAMinute(A_MINUTE),
            measured: Some(tally.checks as f64 / seconds * 60.0),
            beside: format!("{} in {seconds:.1} s", tally.checks),
        },
        Goal {
            what: format!("{store}: decisions that failed, fell back or were denied"),
            wanted: Wanted::AtMost(0.0),
            measured: Some((tally.failed + tally.astray) as f64),
            beside: tally.failure.clone().unwrap_or_default(),
        },
    ]
}

/// Fails unless every goal is reached.
fn fail_unless_reached(goals: &[Goal]) -> Result<(), String> {
    let missed: Vec<&str> =
        goals.iter().filter(|goal| goal.grade() != Grade::Reached).map(|goal| &goal.what[..]).collect();
    match missed[..] {
        [] => Ok(()),
        _ => Err(format!("{} of {} goals are not reached: {}", missed.len(), goals.len(), missed.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::{Tally, no_latencies};
    use super::*;

    /// `slow` of a thousand decisions took 12 ms, the others 1 ms.
    fn paced(slow: u64, wall: u64, failed: u64) -> Paced {
        let mut latencies = no_latencies();
        latencies.record_n(1_000, 1_000 - slow).unwrap();
        latencies.record_n(12_000, slow.max(1)).unwrap();
        let wall = Duration::from_secs(wall);
        let tally = Tally { checks: 1_000, failed, wall, ..Tally::default() };
        Paced { tally, latencies, late: no_latencies() }
    }

    #[test]
    fn one_missed_goal_fails_the_run_and_is_named() {
        let judged = |paced: &Paced| fail_unless_reached(&judge("Redis", paced));
        assert_eq!(judged(&paced(5, 1, 0)), Ok(()));
        for (paced, words) in [
            (paced(60, 1, 0), "2 of 4 goals are not reached: Redis: p95 over 1000 keys; Redis: p99"),
            (paced(20, 1, 0), "1 of 4 goals are not reached: Redis: p99 over 1000 keys"),
            (paced(5, 2, 0), "1 of 4 goals are not reached: Redis: decisions a minute"),
            (paced(5, 1, 1), "1 of 4 goals are not reached: Redis: decisions that failed"),
        ] {
            let error = judged(&paced).unwrap_err();
            assert!(error.starts_with(words), "{error}");
        }
        let nothing = Paced { tally: Tally::default(), latencies: no_latencies(), late: no_latencies() };
        assert!(judged(&nothing).is_err(), "nothing measured is nothing reached");
    }
}
