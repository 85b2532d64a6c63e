//! How long a tenant's job waits that comes right behind ten thousand of another tenant, each with a limit of five a second.

use std::time::{Duration, Instant};

use apalis::prelude::BoxDynError;
use tollgate_jobs::{JobPolicy, Jobs};

use super::{Runs, database, gate, pool, push_of, start};
use crate::goals::{Goal, Wanted};
use crate::harness::Quartiles;

const MANY: usize = 10_000;

pub(super) async fn run(rounds: u16) -> Result<Goal, BoxDynError> {
    let mut waits = Vec::new();
    for _ in 0..rounds {
        let (server, pool_one) = database().await?;
        let pool_two = pool(&server.url("postgres")).await?;
        let policies = || {
            let policy = JobPolicy::new().with_rate_limit(5, Duration::from_secs(1)).key("tenant");
            Jobs::new().job("nothing", policy)
        };
        let gates =
            [gate(&server, &pool_one, policies()).await?, gate(&server, &pool_two, policies()).await?];
        let runs = Runs::default();
        let _workers =
            [start(&gates[0], &pool_one, "tenants", &runs), start(&gates[1], &pool_two, "tenants", &runs)];
        push_of(&pool_one, "tenants", MANY, 1).await?;
        let begun = Instant::now();
        push_of(&pool_one, "tenants", 1, 2).await?;
        runs.wait_for(1).await?;
        let wait = begun.elapsed().as_secs_f64();
        println!("a job behind {MANY} of another tenant: {wait:.2} s");
        waits.push(wait);
    }
    println!();
    Ok(Goal {
        what: "jobs: a job behind 10,000 of another tenant, seconds".to_owned(),
        wanted: Wanted::AtMost(1.0),
        measured: Quartiles::of(waits).map(|all| all.median),
        beside: String::new(),
    })
}
