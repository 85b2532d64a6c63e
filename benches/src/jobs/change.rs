//! How soon fifty waiting jobs have run after their limit was raised from one a minute to a hundred a second.

use std::time::{Duration, Instant};

use apalis::prelude::BoxDynError;
use tollgate_jobs::{JobPolicy, Jobs};

use super::{Runs, database, gate, push, start};
use crate::goals::{Goal, Wanted};
use crate::harness::Quartiles;

const WAITING: usize = 50;

pub(super) async fn run(rounds: u16) -> Result<Goal, BoxDynError> {
    let policies =
        |limit, window| Jobs::new().job("nothing", JobPolicy::new().with_rate_limit(limit, window));
    let mut all = Vec::new();
    for _ in 0..rounds {
        let (server, pool) = database().await?;
        let gate = gate(&server, &pool, policies(1, Duration::from_secs(60))).await?;
        let runs = Runs::default();
        let _workers = [start(&gate, &pool, "change", &runs), start(&gate, &pool, "change", &runs)];
        push(&pool, "change", WAITING + 1).await?;
        runs.wait_for(1).await?;
        let waiting = || server.psql("select count(*) from tollgate_job_waiting where delays > 0");
        while waiting().trim() != WAITING.to_string() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let begun = Instant::now();
        gate.reload(policies(100, Duration::from_secs(1))).await?;
        runs.wait_for(WAITING + 1).await?;
        let took = begun.elapsed().as_secs_f64();
        println!("{WAITING} waiting jobs ran within {took:.2} s of a raised limit");
        all.push(took);
    }
    println!();
    Ok(Goal {
        what: "jobs: 50 waiting jobs after their limit was raised, seconds".to_owned(),
        wanted: Wanted::AtMost(3.0),
        measured: Quartiles::of(all).map(|all| all.median),
        beside: String::new(),
    })
}
