//! The cells on PostgreSQL: one process with eight connections, against one server on the same cores.
//!
//! The ceiling is `pgbench`, which sends the barest statement that could count: an upsert of one row, prepared, on a table with
//! the room that our own leaves. `synchronous_commit` is off for it and for everybody else, as our store has it for charges;
//! only held charges, which must be on disk before they are acknowledged, switch it on.

mod pgbench;
mod raw;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate_store::{Cost, Limit, PostgresOptions, PostgresStore, Store, StoredCharge, StoredLimit};
use tollgate_testkit::postgres::PostgresServer;

use self::pgbench::Pgbench;
use self::raw::{CountThenInsert, Executions};
use super::callers::{Charges, MANY, ManyCharges, Reserves};
use super::cpu::Server;
use super::load::keys;
use super::rounds::{self, Cell, Contestant, Plan};

pub(crate) const SELECT: &str = "pgbench: select 1";
pub(crate) const UPSERT: &str = "pgbench: bare upsert";
pub(crate) const SINGLE: &str = "token bucket, 8 callers";
pub(crate) const SINGLE_CROWDED: &str = "token bucket, 64 callers";
pub(crate) const SIXTEEN: &str = "token bucket, 16 a statement";
pub(crate) const COUNT_ONE: &str = "count, insert: 1 used";
pub(crate) const COUNT_FIFTY: &str = "count, insert: 50 used";

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
    let postgres = PostgresStore::connect(options).await.map_err(|error| error.to_string())?;
    let store: Arc<dyn Store> = Arc::new(postgres);

    let keys = keys("", plan.keys);
    let (single, many, held) = (bucket("single")?, bucket("many")?, bucket("held")?);
    for limit in [&single, &many, &held] {
        let items: Vec<StoredCharge<'_>> =
            keys.iter().map(|key| StoredCharge { limit, key, cost: Cost::ONE, shadow: false }).collect();
        for filled in store.charge_each(&items).await {
            filled.map_err(|error| format!("filling `{}`: {error}", limit.name))?;
        }
    }
    server.try_psql("vacuum analyze")?;

    let charges = Charges { store: store.clone(), limits: [single].into() };
    let crowd = charges.clone();
    let many = ManyCharges { store: store.clone(), limit: Arc::new(many) };
    let reserves = Reserves { store, limit: Arc::new(held) };
    let (one, fifty) =
        (connections(&url, Executions::One).await?, connections(&url, Executions::Fifty).await?);
    let about_many = format!("{MANY} keys by charge_each, 8 callers");
    let contestants = vec![
        pgbench.contestant(SELECT, "no table at all: the protocol's ceiling", &url, pgbench::SELECT),
        pgbench.contestant(
            UPSERT,
            "one row, one statement, prepared: the ceiling",
            &url,
            &pgbench::upsert(plan.keys),
        ),
        Contestant::new(SINGLE, "one check a call", CONNECTIONS, &keys, move || charges.clone()),
        Contestant::new(SINGLE_CROWDED, "the same on 8 connections", CROWD, &keys, move || crowd.clone()),
        Contestant::new(SIXTEEN, about_many, CONNECTIONS, &keys, move || many.clone()),
        Contestant::new(COUNT_ONE, raw::ABOUT, CONNECTIONS, &keys, by_turns(one)),
        Contestant::new(
            COUNT_FIFTY,
            "the same, 50 rows of each key in the window",
            CONNECTIONS,
            &keys,
            by_turns(fifty),
        ),
        Contestant::new("reserve, give back", "two calls, each on disk", CONNECTIONS, &keys, move || {
            reserves.clone()
        }),
    ];
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
    let limit = tollgate::Rate::per_second(4).and_then(|rate| Limit::token_bucket(rate, 2_400));
    limit.map(|limit| StoredLimit::new(name, limit)).map_err(|error| error.to_string())
}
