//! Real servers: the one that is limited, and those that count for it.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use tokio::runtime::Runtime;
use tollgate::headers::{Format, ResetAs};
use tollgate::http::LimitLayer;
use tollgate::store::{PostgresOptions, PostgresStore, RedisOptions, RedisStore, Store};
use tollgate::{Fallback, ManualClock, Tollgate, TollgateBuilder};
use tollgate_testkit::http::Answer;
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;

/// Where the counters are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    Memory,
    Redis,
    Postgres,
}

pub(crate) const ALL: [On; 3] = [On::Memory, On::Redis, On::Postgres];

/// Time enough for whatever a loaded machine does. A release that its store did not take in time is tried again by the clock, which stands still.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Longer than any call of a store may take, so that a store that failed is reported by what the layer answered.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// When the clock starts: at a full hour, where windows of the clock begin.
const START: Duration = Duration::from_secs(472_222 * 3_600);

/// The fields that tell a caller how it stands.
const FIELDS: [&str; 6] = [
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "retry-after",
    "ratelimit-policy",
    "ratelimit",
];

/// One server for all tests; each registry has names of its own on it.
pub(crate) fn redis() -> &'static RedisServer {
    static SERVER: OnceLock<RedisServer> = OnceLock::new();
    SERVER.get_or_init(RedisServer::start)
}

/// One server for all tests, on which nothing need survive a crash.
fn postgres() -> &'static PostgresServer {
    static SERVER: OnceLock<PostgresServer> = OnceLock::new();
    SERVER.get_or_init(|| PostgresServer::builder().setting("fsync", "off").start())
}

/// A registry, the hands of its clock, and the runtime of whatever is served. Tests themselves are plain threads, as callers are.
pub(crate) struct Scene {
    runtime: Runtime,
    pub(crate) gate: Tollgate,
    pub(crate) hands: ManualClock,
}

impl Scene {
    /// A registry whose store goes by the hands.
    pub(crate) fn new(on: On, rules: impl FnOnce(TollgateBuilder) -> TollgateBuilder) -> Scene {
        Scene::build(on, true, rules)
    }

    /// A registry whose store goes by its own clock, as in production.
    pub(crate) fn on_own_clock(on: On, rules: impl FnOnce(TollgateBuilder) -> TollgateBuilder) -> Scene {
        Scene::build(on, false, rules)
    }

    fn build(on: On, by_hand: bool, rules: impl FnOnce(TollgateBuilder) -> TollgateBuilder) -> Scene {
        let runtime = Runtime::new().expect("a runtime");
        let hands = ManualClock::at(START);
        let clock = by_hand.then_some(&hands);
        // Were a store to fail, every test would see it.
        let mut builder = rules(Tollgate::builder().fallback(Fallback::Closed));
        if let Some(hands) = clock {
            builder = builder.clock(hands.clock());
        }
        if let Some(store) = runtime.block_on(store(on, clock)) {
            builder = builder.store(store);
        }
        let gate = builder.build().expect("a sound registry");
        Scene { runtime, gate, hands }
    }

    /// Serves plain answers behind a layer.
    pub(crate) fn serve(&self, layer: LimitLayer) -> SocketAddr {
        self.serve_router(
            Router::new().route("/", get("fine")).fallback(async || "fine").layer(layer.for_axum()),
        )
    }

    /// Serves a router, which learns where its callers are.
    pub(crate) fn serve_router(&self, router: Router) -> SocketAddr {
        serve_on(&self.runtime, router)
    }

    /// What a key has used.
    pub(crate) fn used(&self, limit: &str, key: &str) -> u64 {
        self.runtime.block_on(self.gate.status(limit, key)).expect("a status").used()
    }

    /// Moves the clock on to the next full hour, and returns it in seconds.
    pub(crate) fn next_hour(&self) -> u64 {
        let hour = self.hands.now().get().div_ceil(3_600_000_000) * 3_600;
        self.hands.set(Duration::from_secs(hour));
        hour
    }
}

/// Serves a router on a free port until the runtime ends.
pub(crate) fn serve_on(runtime: &Runtime, router: Router) -> SocketAddr {
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a free port");
    let address = listener.local_addr().expect("an address");
    let service = router.into_make_service_with_connect_info::<SocketAddr>();
    runtime.spawn(async move { axum::serve(listener, service).await });
    address
}

/// A store with names that no other has; `None` where the registry counts by itself.
async fn store(on: On, clock: Option<&ManualClock>) -> Option<Arc<dyn Store>> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    match on {
        On::Memory => None,
        On::Redis => {
            let mut options = RedisOptions::new(redis().url());
            options.prefix = format!("t{number}:");
            options.timeout = TIMEOUT;
            options.clock = clock.cloned();
            Some(Arc::new(RedisStore::new(options).expect("sound options")))
        }
        On::Postgres => {
            let mut options = PostgresOptions::new(postgres().url("postgres"));
            // Prefixes of tables have letters for digits.
            let letters =
                number.to_string().bytes().map(|digit| char::from(digit - b'0' + b'a')).collect::<String>();
            options.prefix = format!("t_{letters}_");
            options.timeout = TIMEOUT;
            options.clock = clock.map(ManualClock::clock);
            let store = PostgresStore::new(options).expect("sound options");
            store.migrate().await.expect("tables");
            Some(Arc::new(store))
        }
    }
}

/// Both sets of fields, with the reset written in this way.
pub(crate) fn format(reset: ResetAs) -> Format {
    Format { reset, ..Format::default() }
}

/// Waits until something that is on its way has happened. It looks every millisecond: a loop without a pause takes the processor from the
/// server that is waited for, and asks the store thousands of times a second.
pub(crate) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let started = std::time::Instant::now();
    while !happened() {
        assert!(started.elapsed() < LONGEST_WAIT, "it never came about that {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a caller was reported, line by line: the status, then the fields in the order in which they came.
pub(crate) fn reported(answer: &Answer) -> String {
    let mut lines = vec![answer.status.to_string()];
    lines.extend(answer.lines_of(&FIELDS).into_iter().map(str::to_owned));
    lines.join("\n")
}

/// The number in a field, if it is there.
pub(crate) fn number(answer: &Answer, field: &str) -> Option<u64> {
    answer
        .field(field)
        .map(|value| value.parse().unwrap_or_else(|_| panic!("{field} is no number: {answer:?}")))
}
