//! Jobs that do nothing, as fast as they go: apalis alone, with the layer, and with one, two and three levels of limits that never deny.
//!
//! apalis alone has a database of its own on the same server, which nobody has prepared, and polls by its own strategy: neither our trigger and
//! index nor our polls help or hinder it.

use std::time::{Duration, Instant};

use apalis::prelude::BoxDynError;
use tollgate_jobs::{JobPolicy, Jobs};

use super::{Runs, database, gate, push, start, start_alone, untouched_database};
use crate::goals::{Goal, Wanted};
use crate::harness::Quartiles;
use crate::report::print_table;
use crate::stores::cpu::{Server, of_ourselves};

const NAMES: [&str; 5] = ["apalis alone", "layer, no policy", "one level", "two levels", "three levels"];

/// What one turn of one of them came to.
#[derive(Clone, Copy)]
struct Sample {
    per_second: f64,
    server_us: f64,
    client_us: f64,
}

fn policies(index: usize) -> Jobs {
    let free = || JobPolicy::new().with_rate_limit(1_000_000, Duration::from_secs(1));
    let mut jobs = Jobs::new();
    if index >= 2 {
        jobs = jobs.job("nothing", free());
    }
    if index >= 3 {
        jobs = jobs.queue("bench-3", free()).queue("bench-4", free());
    }
    if index >= 4 {
        jobs = jobs.global(free());
    }
    jobs
}

pub(super) async fn run(rounds: u16, count: usize) -> Result<Vec<Goal>, BoxDynError> {
    let (server, pool) = database().await?;
    let untouched = untouched_database(&server).await?;
    let mut gates = Vec::new();
    for index in 0..NAMES.len() {
        gates.push(gate(&server, &pool, policies(index)).await?);
    }
    let used = || Server::Postgres(&server).used();
    let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); NAMES.len()];
    for round in 0..usize::from(rounds) {
        for turn in 0..NAMES.len() {
            let index = (round + turn) % NAMES.len();
            let queue = format!("bench-{index}");
            let pool = if index == 0 { &untouched } else { &pool };
            sqlx::query("truncate apalis.jobs").execute(pool).await?;
            push(pool, &queue, count).await?;
            let runs = Runs::default();
            let (wall, server_cpu, client_cpu) = (Instant::now(), used(), of_ourselves());
            let worker = match index {
                0 => start_alone(pool, &queue, &runs),
                _ => start(&gates[index], pool, &queue, &runs),
            };
            runs.wait_for(count).await?;
            let (wall, server_cpu, client_cpu) = (
                wall.elapsed(),
                used().saturating_sub(server_cpu),
                of_ourselves().saturating_sub(client_cpu),
            );
            drop(worker);
            let each = |cpu: Duration| cpu.as_secs_f64() * 1e6 / count as f64;
            samples[index].push(Sample {
                per_second: count as f64 / wall.as_secs_f64(),
                server_us: each(server_cpu),
                client_us: each(client_cpu),
            });
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let median = |index: usize, of: fn(&Sample) -> f64| {
        Quartiles::of(samples[index].iter().map(of).collect()).map_or(0.0, |all| all.median)
    };
    let share = |index: usize| {
        let pairs = samples[index].iter().zip(&samples[0]);
        Quartiles::of(pairs.map(|(own, alone)| own.per_second / alone.per_second).collect())
            .map(|all| all.median)
    };
    println!("{count} jobs that do nothing, one worker, batches of 100, {rounds} rounds; medians\n");
    let head = ["", "jobs/s", "of apalis alone", "database µs CPU a job", "client µs CPU a job"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (index, name) in NAMES.iter().enumerate() {
        rows.push(vec![
            (*name).to_owned(),
            format!("{:.0}", median(index, |sample| sample.per_second)),
            share(index).map_or_else(|| "–".to_owned(), |share| format!("{share:.2}")),
            format!("{:.0}", median(index, |sample| sample.server_us)),
            format!("{:.0}", median(index, |sample| sample.client_us)),
        ]);
    }
    print_table(&rows);
    let cpu = |index: usize| median(index, |sample| sample.server_us + sample.client_us);
    Ok(vec![Goal {
        what: "jobs: with the layer and no policy, of apalis alone".to_owned(),
        wanted: Wanted::AtLeast(0.95),
        measured: share(1),
        beside: format!("CPU per job {:.2} of its", cpu(1) / cpu(0).max(1.0)),
    }])
}
