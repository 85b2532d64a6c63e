//! The cells on PostgreSQL: one process with eight connections, against one server on the same cores.
//!
//! The ceiling is `pgbench`, which sends the barest statement that could count: an upsert of one row, prepared, on a table with
//! the room that our own leaves. `synchronous_commit` is off for it and for everybody else, as our store has it for charges;
//! only held charges, which must be on disk before they are acknowledged, switch it on.

mod full_logs;
mod pgbench;
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate::store::LimitError;
use tollgate_store::{Cost, Limit, Micros, PostgresOptions, PostgresStore, Store, StoredCharge, StoredLimit};
use tollgate_testkit::postgres::PostgresServer;

use self::full_logs::FullLogs;
use self::pgbench::Pgbench;
use self::raw::{CountThenInsert, Executions};
use super::callers::{Charges, MANY, ManyCharges, Refusals, Reserves};
use super::cpu::Server;
use super::load::{Keys, keys};
use super::rounds::{self, Cell, Contestant, Plan};

pub(crate) const SELECT: &str = "pgbench: select 1";
pub(crate) const UPSERT: &str = "pgbench: bare upsert";
pub(crate) const DURABLE_UPSERT: &str = "pgbench: durable upsert, 64";
pub(crate) const SINGLE: &str = "token bucket, 8 callers";
pub(crate) const SIXTEEN: &str = "token bucket, 16 a statement";
pub(crate) const COUNT_ONE: &str = "count, insert: 1 used";
pub(crate) const COUNT_FIFTY: &str = "count, insert: 50 used";
pub(crate) const RESERVE: &str = "reserve, settle, 64";
pub(crate) const RESERVE_FEW: &str = "reserve, settle, 8";
pub(crate) const RESERVE_HOT: &str = "reserve, settle, one key, 64";
pub(crate) const RELEASE: &str = "reserve, release a lease, 64";
pub(crate) const LONG_LOG: &str = "sliding window of 2,000, 64";
pub(crate) const REFUSED: &str = "reserve, refused, 64";

/// A sliding window of 100 with 80 entries a key.
const LOGS: [&str; 2] = ["sliding window (80 entries), 8 callers", "sliding window (80 entries), 64 callers"];

/// One check a call of every strategy, with 8 callers and with 64.
pub(crate) const STRATEGIES: [[&str; 2]; 6] = [
    [SINGLE, "token bucket, 64 callers"],
    ["leaky bucket, 8 callers", "leaky bucket, 64 callers"],
    ["fixed window, 8 callers", "fixed window, 64 callers"],
    LOGS,
    ["sliding counter, 8 callers", "sliding counter, 64 callers"],
    ["concurrency, 8 callers", "concurrency, 64 callers"],
];

/// Three limits of one key in one charge, which is three rows.
pub(crate) const THREE: [&str; 2] = ["three limits, 8 callers", "three limits, 64 callers"];

const CONNECTIONS: usize = 8;
const CROWD: usize = 64;

/// No deadline is to pass because the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(30);

/// All that a run on PostgreSQL found out.
pub(crate) struct Found {
    pub(crate) version: String,
    pub(crate) cells: Vec<Cell>,
}

/// Says what to install, if anything is missing.
pub(crate) fn find_programs() -> Result<(), String> {
    Pgbench::find().map(drop)
}

/// Starts a server and measures all cells.
pub(crate) fn measure(plan: &Plan) -> Result<Found, String> {
    let pgbench = Pgbench::find()?;
    let server = PostgresServer::start();
    super::block_on(measure_here(plan, &server, &pgbench))
}

async fn measure_here(plan: &Plan, server: &PostgresServer, pgbench: &Pgbench) -> Result<Found, String> {
    raw::make_tables(server, plan.keys)?;
    let url = server.url("postgres");
    let options = PostgresOptions {
        timeout: TIMEOUT,
        connections: CONNECTIONS,
        cleanup_every: None,
        ..PostgresOptions::new(&url)
    };
    let postgres = PostgresStore::connect(options.clone()).await.map_err(|error| error.to_string())?;
    let store: Arc<dyn Store> = Arc::new(postgres);

    let keys = keys("", plan.keys);
    let span = Micros::from_secs(600);
    let rate = || tollgate::Rate::per_second(4);
    let (single, many, held) = (bucket("single")?, bucket("many")?, bucket("held")?);
    let leaky = limit("leaky", rate().and_then(|rate| Limit::leaky_bucket(rate, 2_400)))?;
    let fixed = limit("fixed", Limit::fixed_window(1_000_000, span))?;
    let counter = limit("counter", Limit::sliding_window_counter(1_000_000, span))?;
    // Leases that nobody holds by name: they end by themselves.
    let leases = limit("leases", Limit::concurrency(1_000, Micros::from_secs(10)))?;
    let three = ["three.a", "three.b", "three.c"].map(bucket);
    let three = three.into_iter().collect::<Result<Vec<StoredLimit>, String>>()?;
    let filled = [&single, &many, &held, &leaky, &fixed, &counter, &leases];
    for limit in filled.into_iter().chain(&three) {
        let items: Vec<StoredCharge<'_>> =
            keys.iter().map(|key| StoredCharge { limit, key, cost: Cost::ONE, shadow: false }).collect();
        for filled in store.charge_each(&items).await {
            filled.map_err(|error| format!("filling `{}`: {error}", limit.name))?;
        }
    }
    let refused = limit("refused", Limit::fixed_window(1, Micros::from_secs(86_400)))?;
    super::callers::fill(&*store, &refused, &keys, Cost::ONE).await?;
    let logs = FullLogs::fill(options, &url, &keys).await?;
    server.try_psql("vacuum analyze")?;

    let many = ManyCharges { store: store.clone(), limit: Arc::new(many) };
    let (one, fifty) =
        (connections(&url, Executions::One).await?, connections(&url, Executions::Fifty).await?);
    let about_many = format!("{MANY} keys by charge_each, 8 callers");
    let upsert = pgbench::upsert(plan.keys);
    let mut contestants = vec![
        pgbench.contestant(SELECT, "no table at all: the protocol's ceiling", &url, pgbench::SELECT),
        pgbench.contestant(UPSERT, "one row, one statement, prepared: the ceiling", &url, &upsert),
        pgbench.durable_contestant(DURABLE_UPSERT, "the same on disk, 64 connections", &url, &upsert, CROWD),
        Contestant::new(SIXTEEN, about_many, CONNECTIONS, &keys, move || many.clone()),
        Contestant::new(COUNT_ONE, raw::ABOUT, CONNECTIONS, &keys, by_turns(one)),
        Contestant::new(
            COUNT_FIFTY,
            "the same, 50 rows of each key in the window",
            CONNECTIONS,
            &keys,
            by_turns(fifty),
        ),
    ];
    let others = STRATEGIES.into_iter().filter(|names| *names != LOGS);
    let singles = [single, leaky, fixed, counter, leases].map(|limit| vec![limit]);
    let charged = others.zip(singles).chain([(THREE, three)]);
    for ([few, crowd], limits) in charged {
        let charges = Charges { store: store.clone(), limits: limits.into() };
        let crowded = charges.clone();
        let about = "one check a call";
        contestants.push(Contestant::new(few, about, CONNECTIONS, &keys, move || charges.clone()));
        let about = "the same on 8 connections";
        contestants.push(Contestant::new(crowd, about, CROWD, &keys, move || crowded.clone()));
    }
    for (name, callers) in LOGS.into_iter().zip([CONNECTIONS, CROWD]) {
        let charges = Charges { store: logs.store.clone(), limits: [logs.limit.clone()].into() };
        let about = "a log in its state, put back before each turn";
        let contestant = Contestant::new(name, about, callers, &keys, move || charges.clone());
        let logs = logs.clone();
        contestants.push(contestant.prepared(move || logs.clone().restore()));
    }
    let long = limit("long", Limit::sliding_window(2_000, span))?;
    let long = Charges { store: store.clone(), limits: [long].into() };
    let about = "a log that grows out of its state, into rows of 64 entries";
    contestants.push(Contestant::new(LONG_LOG, about, CROWD, &keys, move || long.clone()));
    let leases = limit("held-leases", Limit::concurrency(1_000, Micros::from_secs(10)))?;
    let hot = limit("hot", Limit::sliding_window_counter(1_000_000_000, span))?;
    let (held, leases, hot) = (Arc::new(held), Arc::new(leases), Arc::new(hot));
    let one_key: Keys = [String::from("hot")].into();
    for (name, about, callers, limit, keys) in [
        (RESERVE_FEW, "a held charge, given back: two calls, each on disk", CONNECTIONS, &held, &keys),
        (RESERVE, "the same with 64 callers", CROWD, &held, &keys),
        (RESERVE_HOT, "the same, all of one key", CROWD, &hot, &one_key),
        (RELEASE, "a lease, released: two calls, each on disk", CROWD, &leases, &keys),
    ] {
        let reserves = Reserves { store: store.clone(), limit: limit.clone() };
        contestants.push(Contestant::new(name, about, callers, keys, move || reserves.clone()));
    }
    let refusals = Refusals { store, limit: Arc::new(refused) };
    let about = "a held charge that does not fit: one call, nothing to write to disk";
    contestants.push(Contestant::new(REFUSED, about, CROWD, &keys, move || refusals.clone()));
    let cells = rounds::run(plan, contestants, &Server::Postgres(server)).await;
    Ok(Found { version: server.try_psql("show server_version")?, cells })
}

async fn connections(url: &str, executions: Executions) -> Result<Vec<CountThenInsert>, String> {
    let mut made = Vec::new();
    for _ in 0..CONNECTIONS {
        made.push(CountThenInsert::connect(url, executions).await?);
    }
    Ok(made)
}

/// One caller for each connection.
fn by_turns<C: Clone>(callers: Vec<C>) -> impl Fn() -> C {
    let next = AtomicUsize::new(0);
    move || callers[next.fetch_add(1, Ordering::Relaxed) % callers.len()].clone()
}

/// As on Redis: slow and too deep to be emptied.
fn bucket(name: &str) -> Result<StoredLimit, String> {
    limit(name, tollgate::Rate::per_second(4).and_then(|rate| Limit::token_bucket(rate, 2_400)))
}

fn limit(name: &str, limit: Result<Limit, LimitError>) -> Result<StoredLimit, String> {
    limit.map(|limit| StoredLimit::new(name, limit)).map_err(|error| error.to_string())
}
