//! The PostgreSQL store against the suite, and what only a store in a database has to show: races of processes, deadlines,
//! crashes, rights, certificates and cleanup. Needs PostgreSQL's programs; fails without them.

mod deadline;
mod each;
mod faults;
mod leases;
mod ping;
mod pooler;
mod refusal;
mod room;
mod rows;
mod several;
mod shared_commit;
mod shares;
mod short_log;
mod suite;
mod versions;
mod work;

use std::time::Duration;

use tollgate_store::{Cost, Limit, Micros, PostgresOptions, PostgresStore, StoredCharge, StoredLimit};
use tollgate_testkit::postgres::PostgresServer;

/// The usual options, with time enough for a loaded machine, and no task of the store's own.
fn options(url: &str) -> PostgresOptions {
    PostgresOptions { timeout: Duration::from_secs(10), cleanup_every: None, ..PostgresOptions::new(url) }
}

/// A store with a schema.
async fn connect(options: PostgresOptions) -> PostgresStore {
    PostgresStore::connect(options).await.unwrap_or_else(|error| panic!("{error}"))
}

/// A store on a server of its own.
async fn start() -> (PostgresServer, PostgresStore) {
    let server = PostgresServer::start();
    let store = connect(options(&server.url("postgres"))).await;
    (server, store)
}

/// So many an hour.
fn hourly(name: &str, most: u64) -> StoredLimit {
    StoredLimit::new(name, Limit::fixed_window(most, Micros::from_secs(3_600)).unwrap())
}

fn item<'a>(limit: &'a StoredLimit, key: &'a str) -> StoredCharge<'a> {
    StoredCharge { limit, key, cost: Cost::ONE, shadow: false }
}

/// One charge for each key.
fn items<'a, K: AsRef<str>>(limit: &'a StoredLimit, keys: &'a [K], cost: Cost) -> Vec<StoredCharge<'a>> {
    keys.iter().map(|key| StoredCharge { cost, ..item(limit, key.as_ref()) }).collect()
}
