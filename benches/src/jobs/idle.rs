//! What 20,000 waiting jobs cost a database that has nothing else to do.

use std::time::{Duration, Instant};

use apalis::prelude::BoxDynError;
use tollgate_jobs::{JobPolicy, Jobs};

use super::{Runs, database, gate, push, start};
use crate::goals::{Goal, Wanted};
use crate::stores::cpu::Server;

const WAITING: usize = 20_000;

pub(super) async fn run(span: Duration) -> Result<Goal, BoxDynError> {
    let (server, pool) = database().await?;
    // A fifth of the default sleep, so that a short look sees every job wake: five times as much work as by default.
    let policy =
        JobPolicy::new().with_rate_limit(1, Duration::from_secs(3_600)).max_delay(Duration::from_secs(60));
    let gate = gate(&server, &pool, Jobs::new().job("nothing", policy)).await?;
    push(&pool, "idle", WAITING + 1).await?;
    let runs = Runs::default();
    let begun = Instant::now();
    let _workers = [start(&gate, true, &pool, "idle", &runs), start(&gate, true, &pool, "idle", &runs)];
    let waiting =
        || server.psql("select count(*) from tollgate_job_waiting where until_us > 0").trim().to_owned();
    while waiting() != WAITING.to_string() {
        if begun.elapsed() > Duration::from_secs(180) {
            return Err(format!("{} of {WAITING} jobs wait after 180 s", waiting()).into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("{WAITING} jobs put off in {:.1} s", begun.elapsed().as_secs_f64());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let used = || Server::Postgres(&server).used();
    let (from, since) = (used(), Instant::now());
    tokio::time::sleep(span).await;
    let share = used().saturating_sub(from).as_secs_f64() / since.elapsed().as_secs_f64();
    println!("{WAITING} waiting jobs, two workers that poll every 50 ms: {:.1} % of a core\n", share * 100.0);
    Ok(Goal {
        what: "jobs: 20,000 waiting, share of a core of the database".to_owned(),
        wanted: Wanted::AtMost(0.05),
        measured: Some(share),
        beside: format!("max_delay 60 s, over {} s", span.as_secs()),
    })
}
