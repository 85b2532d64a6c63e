//! Attackers and a bystander on one server, on every store: what the attackers send never changes what the bystander is answered.
//!
//! The bystander's limit lets five pass in an hour, so its answers are known beforehand whatever the time is: five times yes for
//! each of its keys, and then no. Some of its keys are exhausted before the attack, others come new in the middle of it.

mod attack;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tollgate::ManualClock;
use tollgate::store::{
    Cost, Micros, PostgresOptions, PostgresStore, RedisOptions, RedisStore, SlidingWindow, Store,
    StoredCharge, StoredLimit,
};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::{RedisCluster, RedisServer};
use tollgate_testkit::tollgate::Tollgate;

use crate::attack::Attack;

const LIMITS: &str = r#"
[limits.bystander]
strategy = "sliding_window"
limit = 5
window = "1h"

[limits.log]
strategy = "sliding_window"
limit = 2000
window = "1h"

[limits.deep]
strategy = "sliding_window"
limit = 30000
window = "1h"

[limits.bucket]
strategy = "token_bucket"
rate = "1/d"
burst = 1000

[limits.leases]
strategy = "concurrency"
limit = 500
lease = "1h"

[limits.free]
unlimited = true
"#;

/// How often each of the bystander's keys is asked.
const ASKED: usize = 8;
/// How many keys come new while the attack lasts.
const NEWCOMERS: usize = 24;

/// A deadline that a busy machine keeps; what the attackers achieve must not depend on it.
fn server(store: &str) -> Tollgate {
    let config = format!("[store]\ntimeout = \"5s\"\n{store}\n{LIMITS}");
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start()
}

/// What a key of the bystander is answered, asked so often.
fn ask(server: &Tollgate, key: &str, times: usize) -> Vec<bool> {
    let body = format!(r#"{{"limit":"bystander","key":"{key}"}}"#);
    let mut connection = server.connect();
    let decide = |_| {
        let line = ["content-type: application/json"];
        let answer = connection.ask_with_body("POST", "/v1/check", &line, &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert!(answer.body.contains("\"degraded\":false"), "the store decides: {}", answer.body);
        answer.body.contains("\"allowed\":true")
    };
    (0..times).map(decide).collect()
}

fn five_and_no_more(times: usize) -> Vec<bool> {
    (0..times).map(|index| index < 5).collect()
}

/// The bystander's calls under each attack by itself, and under all of them at once.
fn withstands(server: &Tollgate) {
    assert_eq!(ask(server, "user:before", ASKED), five_and_no_more(ASKED));
    for one in &attack::ALL {
        asks_under(server, one.0, std::slice::from_ref(one), NEWCOMERS / 4);
    }
    asks_under(server, "all", &attack::ALL, NEWCOMERS);
    // And when it is over, the server and its store are well.
    assert_eq!(ask(server, "user:after", ASKED), five_and_no_more(ASKED));
    assert_eq!(server.get("/readyz").status, 200);
}

fn asks_under(server: &Tollgate, what: &str, attacks: &[(&str, Attack)], newcomers: usize) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for &(_, attack) in attacks {
            let is_over = &is_over;
            scope.spawn(move || {
                // At least one round, however soon the bystander is done.
                let mut round = 0;
                while round == 0 || !is_over.load(Ordering::Relaxed) {
                    attack(server, round);
                    round += 1;
                }
            });
        }
        let bystander = || {
            for number in 0..newcomers {
                assert_eq!(ask(server, "user:before", 4), [false; 4], "{what}, newcomer {number}");
                let key = format!("user:{}-{number}", what.replace(|c: char| !c.is_alphanumeric(), "-"));
                assert_eq!(ask(server, &key, ASKED), five_and_no_more(ASKED), "{what}, newcomer {number}");
            }
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(bystander));
        is_over.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
}

/// Puts a value under a key of the attackers that is not ours, as another program with the same prefix would.
fn spoil(redis: &RedisServer, server: &Tollgate) {
    assert_eq!(server.post("/v1/check", attack::FOREIGN).status, 200);
    let keys = redis.command(&["KEYS", "*:b:bucket"]).expect("keys");
    let [key] = keys.items() else { panic!("{keys} should be the one key there is") };
    let key = &key.text();
    redis.command(&["DEL", key]).expect("deleted");
    redis.command(&["LPUSH", key, "not ours"]).expect("spoilt");
}

#[test]
fn in_memory() {
    withstands(&server("mode = \"memory\""));
}

#[test]
fn on_redis() {
    let redis = RedisServer::start();
    let server = server(&format!("mode = \"redis\"\nredis = {{ url = \"{}\" }}", redis.url()));
    spoil(&redis, &server);
    withstands(&server);
}

#[test]
fn on_a_cluster() {
    let cluster = RedisCluster::start();
    let urls: Vec<String> = cluster.urls();
    let url = &urls[0];
    withstands(&server(&format!("mode = \"redis\"\nredis = {{ url = \"{url}\", cluster = true }}")));
}

#[test]
fn on_postgresql() {
    let postgres = PostgresServer::start();
    let url = postgres.url("postgres");
    withstands(&server(&format!("mode = \"postgres\"\npostgres = {{ url = \"{url}\" }}")));
}

/// The bystander's calls beside denied charges of large cost under a log of 30,000 entries, which this fills in the server's store.
fn withstands_a_deep_log<S: Store>(server: &Tollgate, connect: impl AsyncFn(ManualClock) -> S) {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        // Each entry has an instant of its own, in the last minute; charges of one instant would be one entry.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let clock = ManualClock::at(Micros::new(
            u64::try_from((now - Duration::from_secs(60)).as_micros()).expect("few"),
        ));
        let store = connect(clock.clone()).await;
        let window = SlidingWindow::new(attack::DEEP, Micros::from_secs(3_600)).expect("a sound limit");
        let limit = StoredLimit::new(attack::DEEP_LIMIT, window.into());
        let item = StoredCharge { limit: &limit, key: attack::DEEP_KEY, cost: Cost::ONE, shadow: false };
        for entry in 0..attack::DEEP {
            let charged = store.charge(&[item], None).await.expect("a charge");
            assert!(charged.allowed, "entry {entry}");
            clock.advance(Micros::new(1_000));
        }
    });
    let (limit, key) = (attack::DEEP_LIMIT, attack::DEEP_KEY);
    let denied = server.post("/v1/check", &format!(r#"{{"limit":"{limit}","key":"{key}"}}"#)).body;
    assert!(denied.contains("\"allowed\":false") && denied.contains("\"degraded\":false"), "{denied}");

    assert_eq!(ask(server, "user:before", ASKED), five_and_no_more(ASKED));
    let attack: (&str, Attack) = ("large costs under a deep log", attack::large_costs_under_a_deep_log);
    asks_under(server, attack.0, &[attack], NEWCOMERS);
    assert_eq!(ask(server, "user:after", ASKED), five_and_no_more(ASKED));
}

#[test]
fn beside_a_deep_log_on_redis() {
    let redis = RedisServer::start();
    let server = server(&format!("mode = \"redis\"\nredis = {{ url = \"{}\" }}", redis.url()));
    withstands_a_deep_log(&server, async |clock| {
        let mut options = RedisOptions::new(redis.url());
        (options.clock, options.timeout) = (Some(clock), Duration::from_secs(5));
        RedisStore::new(options).expect("sound options")
    });
}

#[test]
fn beside_a_deep_log_on_postgresql() {
    // Nothing crashes here, so nothing need be on disk.
    let postgres = PostgresServer::builder().setting("fsync", "off").start();
    let url = postgres.url("postgres");
    let server = server(&format!("mode = \"postgres\"\npostgres = {{ url = \"{url}\" }}"));
    withstands_a_deep_log(&server, async |clock| {
        let timeout = Duration::from_secs(5);
        let options = PostgresOptions { clock: Some(clock.clock()), timeout, ..PostgresOptions::new(&url) };
        PostgresStore::connect(options).await.expect("a store")
    });
}

/// Where the store is far away, a flood that waits for it is long, whatever the machine: it must not be the bystander who waits.
#[test]
fn beside_a_flood_of_keys_on_a_distant_redis() {
    let redis = RedisServer::start();
    let proxy = FaultProxy::start(redis.port());
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let server = server(&format!("mode = \"redis\"\nredis = {{ url = \"{url}\" }}"));
    proxy.set(Mode::Latency(Duration::from_millis(15)));
    assert_eq!(ask(&server, "user:before", ASKED), five_and_no_more(ASKED));
    let attack: (&str, Attack) = ("a flood of invented keys", attack::invented_keys_beyond_a_timeout);
    asks_under(&server, attack.0, &[attack], NEWCOMERS / 4);
    assert_eq!(ask(&server, "user:after", ASKED), five_and_no_more(ASKED));
}
