//! A backlog of 1,000 jobs at 200 a second by two workers: how much longer than need be, and how often a job is put off.

use std::time::{Duration, Instant};

use apalis::prelude::BoxDynError;
use tollgate::Limit;
use tollgate_jobs::{JobPolicy, Jobs};

use super::{Runs, database, gate, pool, push, start};
use crate::goals::{Goal, Wanted};
use crate::harness::Quartiles;

const JOBS: usize = 1_000;

pub(super) async fn run(rounds: u16) -> Result<Vec<Goal>, BoxDynError> {
    let bucket = Limit::token_bucket("200/s", 20)?;
    let window = Limit::sliding_window(200, Duration::from_secs(1))?;
    let mut goals = Vec::new();
    // The bucket begins full; of the window's five, the last fifth goes after four seconds.
    for (name, limit, ideal, most) in
        [("a token bucket", bucket, 980.0 / 200.0, 1.15), ("a 1 s sliding window", window, 4.0, 1.25)]
    {
        let (mut over, mut delays) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (took, put_off) = once(limit).await?;
            println!(
                "drain of 1,000 jobs at 200/s by two workers, {name}: {took:.2} s (ideal {ideal:.2}), {put_off:.2} delays a job"
            );
            over.push(took / ideal);
            delays.push(put_off);
        }
        let median = |samples: Vec<f64>| Quartiles::of(samples).map(|all| all.median);
        goals.push(Goal {
            what: format!("jobs: drain with {name}, of the ideal"),
            wanted: Wanted::AtMost(most),
            measured: median(over),
            beside: String::new(),
        });
        goals.push(Goal {
            what: format!("jobs: delays a job, {name}"),
            wanted: Wanted::AtMost(2.0),
            measured: median(delays),
            beside: String::new(),
        });
    }
    println!();
    Ok(goals)
}

/// From the start of the workers to the start of the last job, in seconds, and delays per job.
async fn once(limit: Limit) -> Result<(f64, f64), BoxDynError> {
    let (server, pool_one) = database().await?;
    let policies = || Jobs::new().job("nothing", JobPolicy::new().with_limit(limit));
    // Two workers that know nothing of each other, as in two processes.
    let pool_two = pool(&server.url("postgres")).await?;
    let gates = [gate(&server, &pool_one, policies()).await?, gate(&server, &pool_two, policies()).await?];
    server.psql(
        "create table delays (job text);
         create function log_delay() returns trigger language plpgsql as $$ begin insert into delays values (new.id); return new; end $$;
         create trigger log_delay after update on apalis.jobs for each row when (new.status = 'Pending'
           and new.last_result is distinct from old.last_result and new.last_result->'Ok'->>'tollgate' = 'delayed') execute function log_delay();",
    );
    push(&pool_one, "drain", JOBS).await?;
    let runs = Runs::default();
    let begun = Instant::now();
    let _workers = [start(&gates[0], &pool_one, "drain", &runs), start(&gates[1], &pool_two, "drain", &runs)];
    runs.wait_for(JOBS).await?;
    let took = begun.elapsed().as_secs_f64();
    let delays: f64 = server.psql("select count(*) from delays").trim().parse()?;
    Ok((took, delays / JOBS as f64))
}
