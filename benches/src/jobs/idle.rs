//! What 20,000 waiting jobs cost a database that has nothing else to do.
//!
//! Each job sleeps for 285 to 300 s, the default `max_delay` less its jitter, and is then put off again; all of them together, so that there is
//! a wave of writes every 285 s and nothing in between. A steady state is a whole number of such periods: the window is two of them by
//! default and begins half a period after the push, so that it cuts no wave. How often a job was written in it is printed, and so is a
//! window that is shorter.

use std::time::{Duration, Instant};

use apalis::prelude::BoxDynError;
use tollgate_jobs::{JobPolicy, Jobs};
use tollgate_testkit::postgres::PostgresServer;

use super::{POLL, Runs, gate, push, start, with_tables};
use crate::goals::{Goal, Wanted};
use crate::stores::cpu::Server;

const WAITING: usize = 20_000;

/// How often a job that sleeps as long as it may is put off again.
const PERIOD: Duration = Duration::from_secs(285);

/// How many updates of jobs there were.
const UPDATES: &str =
    "select n_tup_upd from pg_stat_user_tables where schemaname = 'apalis' and relname = 'jobs'";

/// How long the same workers are looked at while nothing waits.
const BEFORE: Duration = Duration::from_secs(10);

/// The statements that took longest. Those of functions are counted in the statement that calls the function, too.
const STATEMENTS: &str =
    "select total_exec_time::bigint, calls, rows, left(regexp_replace(query, '\\s+', ' ', 'g'), 150)
    from pg_stat_statements order by total_exec_time desc limit 30";

pub(super) async fn run(span: Duration, statements: bool) -> Result<Goal, BoxDynError> {
    let server = match statements {
        true => PostgresServer::builder()
            .setting("shared_preload_libraries", "pg_stat_statements")
            .setting("pg_stat_statements.track", "all")
            .start(),
        false => PostgresServer::start(),
    };
    let (server, pool) = with_tables(server).await?;
    if statements {
        server.psql("create extension pg_stat_statements");
    }
    if span < 2 * PERIOD {
        println!(
            "a window of {} s is shorter than two periods of {} s: what it shows is no steady state",
            span.as_secs(),
            PERIOD.as_secs()
        );
    }
    // The longest sleep is the default one.
    let policy = JobPolicy::new().with_rate_limit(1, Duration::from_secs(3_600));
    let gate = gate(&server, &pool, Jobs::new().job("nothing", policy)).await?;
    let runs = Runs::default();
    let _workers = [start(&gate, &pool, "idle", &runs), start(&gate, &pool, "idle", &runs)];
    tokio::time::sleep(Duration::from_secs(2)).await;
    let alone = share(&server, BEFORE).await;
    let begun = Instant::now();
    push(&pool, "idle", WAITING + 1).await?;
    let waiting =
        || server.psql("select count(*) from tollgate_job_waiting where until_us > 0").trim().to_owned();
    while waiting() != WAITING.to_string() {
        if begun.elapsed() > Duration::from_secs(180) {
            return Err(format!("{} of {WAITING} jobs wait after 180 s", waiting()).into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    println!("{WAITING} jobs put off in {:.1} s", begun.elapsed().as_secs_f64());
    tokio::time::sleep(PERIOD / 2).await;
    if statements {
        server.psql("select pg_stat_statements_reset()");
    }
    let updates = || server.psql(UPDATES).trim().parse::<f64>().unwrap_or(0.0);
    let before = updates();
    let share = share(&server, span).await;
    #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
    let writes = (updates() - before) / WAITING as f64;
    if statements {
        println!("ms, calls, rows, statement:\n{}", server.psql(STATEMENTS));
    }
    println!(
        "{WAITING} waiting jobs, two workers that poll every {} ms: {:.1} % of a core; {:.1} % while nothing waited; each job was \
         written {writes:.2} times in {} s\n",
        POLL.as_millis(),
        share * 100.0,
        alone * 100.0,
        span.as_secs()
    );
    Ok(Goal {
        what: "jobs: 20,000 waiting, share of a core of the database".to_owned(),
        wanted: Wanted::AtMost(0.05),
        measured: Some(share - alone),
        beside: format!(
            "max_delay 5 min, over {} s in which each job was put off {writes:.1} times; {share:.3} with the polls, which take {alone:.3} \
             without any job",
            span.as_secs()
        ),
    })
}

/// The share of a core that the database uses.
async fn share(server: &PostgresServer, span: Duration) -> f64 {
    let used = || Server::Postgres(server).used();
    let (from, since) = (used(), Instant::now());
    tokio::time::sleep(span).await;
    used().saturating_sub(from).as_secs_f64() / since.elapsed().as_secs_f64()
}
