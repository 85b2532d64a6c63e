//! The Redis store against real servers: the suite, on one server and on a cluster, and what only a store elsewhere has to show:
//! races of processes, expiry, deadlines, faults, and whatever strangers and operators can get wrong. Needs `redis-server`;
//! fails without it.

mod bad_input;
mod bounded;
mod bytes;
mod deadline;
mod expiry;
mod faults;
mod faults_cluster;
mod log;
mod losses;
mod matrix;
mod old_format;
mod ping;
mod races;
mod refund;
mod script_time;
mod several;
mod suite;
mod textbook;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use tollgate_store::{
    Cost, Limit, ManualClock, Micros, RedisOptions, RedisStore, Store, StoredCharge, StoredLimit,
};
use tollgate_testkit::redis::{RedisServer, Value};

/// Names that no other store of this process uses.
fn prefix() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    format!("t{}:", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Options for tests that are not about deadlines: a loaded machine may take its time.
fn patient(mut options: RedisOptions) -> RedisOptions {
    options.prefix = prefix();
    options.timeout = Duration::from_secs(10);
    options
}

/// A store with these names and this deadline.
fn store_with(mut options: RedisOptions, names: &str, timeout: Duration) -> RedisStore {
    (options.prefix, options.timeout) = (names.to_owned(), timeout);
    RedisStore::new(options).expect("sound options")
}

/// Time enough for whatever a loaded machine does.
const PATIENCE: Duration = Duration::from_secs(10);

/// A store on one server.
fn store_on(server: &RedisServer, clock: Option<&ManualClock>) -> RedisStore {
    let mut options = patient(RedisOptions::new(server.url()));
    options.clock = clock.cloned();
    RedisStore::new(options).expect("sound options")
}

/// Who measures time, or keeps the machine busy to its limits, does so while no other test of this binary runs.
static MACHINE: RwLock<()> = RwLock::const_new(());

async fn alone() -> RwLockWriteGuard<'static, ()> {
    MACHINE.write().await
}

async fn beside_others() -> RwLockReadGuard<'static, ()> {
    MACHINE.read().await
}

const HOUR: Micros = Micros::from_secs(3_600);

/// A limit of each strategy that admits `most` at once, and practically no more for the rest of the test.
fn one_of_each(most: u64) -> Vec<StoredLimit> {
    let hourly = "1/h";
    // Windows that begin by the calendar must not end while the test runs.
    let aligned = (24..).map(|hours| HOUR.get() * hours).find(|window| {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_micros();
        now % u128::from(*window) + 600_000_000 < u128::from(*window)
    });
    let aligned = Micros::new(aligned.expect("there is one"));
    [
        ("token-bucket", Limit::token_bucket(hourly, most)),
        ("leaky-bucket", Limit::leaky_bucket(hourly, most)),
        ("fixed-window", Limit::fixed_window(most, HOUR)),
        ("clock-window", Limit::clock_window(most, aligned)),
        ("sliding-window", Limit::sliding_window(most, HOUR)),
        ("sliding-counter", Limit::sliding_window_counter(most, aligned)),
        ("concurrency", Limit::concurrency(most, HOUR)),
    ]
    .map(|(name, limit)| StoredLimit::new(name, limit.expect("a sound limit")))
    .into()
}

/// So many an hour, counted from the first.
fn hourly(name: &str, most: u64) -> StoredLimit {
    StoredLimit::new(name, Limit::fixed_window(most, HOUR).expect("a sound limit"))
}

fn item<'a>(limit: &'a StoredLimit, key: &'a str) -> StoredCharge<'a> {
    StoredCharge { limit, key, cost: Cost::ONE, shadow: false }
}

fn costing<'a>(limit: &'a StoredLimit, key: &'a str, cost: u64) -> StoredCharge<'a> {
    StoredCharge { cost: Cost::new(cost).expect("a cost"), ..item(limit, key) }
}

/// What is used of a limit.
async fn used(store: &RedisStore, limit: &StoredLimit, key: &str) -> u64 {
    let most = StoredCharge { cost: Cost::MAX, ..item(limit, key) };
    store.peek(&[most]).await.unwrap_or_else(|error| panic!("a peek: {error}")).outcomes[0].used()
}

/// The names of all keys of a server that begin like this, or of all; without the marks by which servers are known again.
fn keys(server: &RedisServer, prefix: &str) -> Vec<String> {
    let keys = server.command(&["KEYS", &format!("{prefix}*")]).expect("keys");
    keys.items().iter().map(Value::text).filter(|key| !key.contains(":mark:")).collect()
}
