//! The Redis store against real servers: the suite, on one server and on a cluster, and what only a store elsewhere has to show.

mod suite;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate_store::{ManualClock, RedisOptions, RedisStore};
use tollgate_testkit::redis::RedisServer;

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

/// A store on one server.
fn store_on(server: &RedisServer, clock: Option<&ManualClock>) -> RedisStore {
    let mut options = patient(RedisOptions::new(server.url()));
    options.clock = clock.cloned();
    RedisStore::new(options).expect("sound options")
}
