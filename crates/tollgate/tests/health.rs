//! Isolation over real stores: what one caller sends, and what is wrong with one key, one right or one server, changes the
//! answer of no other key.
//!
//! Each test attacks while bystanders are asked: keys that are exhausted, under a limit that admits while its store is down.
//! A bystander that passes was answered without the store. The denial cache is off, so that each call asks the store.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tollgate::config::Config;
use tollgate::store::{Failure, RecordKind, StoreState};
use tollgate::telemetry::Source;
use tollgate::{Charge, ChargeId, Settlement, Tollgate};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

const POLICY: &str = "
[store]
timeout = '250ms'
denial_cache = '0s'
fallback = 'open'

[limits.bystander]
strategy = 'fixed_window'
limit = 3
window = '1h'

[limits.bucket]
strategy = 'token_bucket'
rate = '3/h'
burst = 3

[limits.counter]
strategy = 'sliding_window_counter'
limit = 3
window = '1h'

[limits.log]
strategy = 'sliding_window'
limit = 3
window = '1h'

[limits.leases]
strategy = 'concurrency'
limit = 3
lease = '1h'

[limits.closed]
strategy = 'token_bucket'
rate = '3/h'
burst = 3
fallback = 'closed'
";

const LIMITS: [&str; 5] = ["bystander", "bucket", "counter", "log", "leases"];

async fn open(variables: &[(&str, &str)]) -> Arc<Tollgate> {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let config = Config::parse_with_env(POLICY, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    Arc::new(Tollgate::open(&config).await.expect("opened"))
}

async fn on_redis(server: &RedisServer) -> Arc<Tollgate> {
    let address = format!("127.0.0.1:{}", server.port());
    open(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)]).await
}

async fn charge(gate: &Tollgate, limit: &str, key: &str) -> (bool, Source) {
    let charges = [Charge::new(limit, key)];
    // Leases are reserved, and end by themselves.
    let decision = match limit {
        "leases" => match gate.reserve(&charges, Duration::ZERO).await.expect("a decision") {
            Ok(reservation) => reservation.decision().clone(),
            Err(denied) => denied.into_decision(),
        },
        _ => gate.charge(&charges).await.expect("a decision"),
    };
    (decision.is_allowed(), decision.outcomes()[0].source())
}

async fn exhaust(gate: &Tollgate, limit: &str, key: &str) {
    for _ in 0..3 {
        assert_eq!(charge(gate, limit, key).await, (true, Source::Store), "{limit}");
    }
    assert_eq!(charge(gate, limit, key).await, (false, Source::Store), "{limit}");
}

/// Runs `attack` over and over on three tasks until dropped.
struct Attack(Arc<AtomicBool>, Vec<tokio::task::JoinHandle<usize>>);

impl Attack {
    fn on<F: Future<Output = ()> + Send>(attack: impl Fn(usize) -> F + Clone + Send + 'static) -> Attack {
        let goes_on = Arc::new(AtomicBool::new(true));
        let tasks = (0..3).map(|_| {
            let (goes_on, attack) = (goes_on.clone(), attack.clone());
            tokio::spawn(async move {
                let mut calls = 0;
                while goes_on.load(Ordering::Relaxed) {
                    attack(calls).await;
                    calls += 1;
                    tokio::task::yield_now().await;
                }
                calls
            })
        });
        let tasks = tasks.collect();
        Attack(goes_on, tasks)
    }

    /// Waits until every attacker has made some calls, so that the bystanders are surely asked in between and after.
    async fn ends(self) -> usize {
        self.0.store(false, Ordering::Relaxed);
        let mut calls = 0;
        for task in self.1 {
            calls += task.await.expect("an attacker does not panic");
        }
        calls
    }
}

/// Asks the exhausted keys, many times, and none may pass or be answered by anyone but the store.
async fn hold(gate: &Tollgate, keys: &[(&str, String)], calls: usize) {
    for call in 0..calls {
        for (limit, key) in keys {
            let answer = charge(gate, limit, key).await;
            assert_eq!(answer, (false, Source::Store), "call {call} of {limit}");
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The names of all keys of a server.
fn names(server: &RedisServer) -> BTreeSet<String> {
    let found = server.command(&["KEYS", "*"]).expect("keys");
    found.items().iter().map(|name| name.text()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_holds_a_foreign_value_falls_back_alone() {
    let server = RedisServer::start();
    let gate = on_redis(&server).await;
    exhaust(&gate, "bystander", "user:1").await;
    let before = names(&server);
    charge(&gate, "closed", "user:foreign").await;
    let key = names(&server).difference(&before).next().expect("a new key").clone();
    server.command(&["DEL", &key]).expect("deleted");
    server.command(&["RPUSH", &key, "not", "ours"]).expect("pushed");

    let attacker = gate.clone();
    let attack = Attack::on(move |_| {
        let gate = attacker.clone();
        async move { assert!(!charge(&gate, "closed", "user:foreign").await.0) }
    });
    hold(&gate, &[("bystander", "user:1".to_owned())], 100).await;
    assert!(attack.ends().await > 15);
    let health = gate.store_health();
    assert_eq!((health.state, health.outages), (StoreState::Up, 0));
    assert!(health.failures(Failure::State) > 15);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_that_one_strategy_misses_is_no_outage() {
    let server = RedisServer::start();
    let gate = on_redis(&server).await;
    exhaust(&gate, "bystander", "user:1").await;
    // The names of all strategies but these two, and of marks: docs/storage.md.
    let names = ["b", "w", "c", "hold"].map(|letter| format!("~tollgate:1:*:{letter}:*"));
    let mut rights =
        vec!["ACL", "SETUSER", "default", "resetkeys", "~tollgate:1:mark:*", "~tollgate:1:hold:*"];
    rights.extend(names.iter().map(String::as_str));
    server.command(&rights).expect("taken away");
    let attacker = gate.clone();
    let attack = Attack::on(move |call| {
        let gate = attacker.clone();
        async move {
            let answer = charge(&gate, ["log", "leases"][call % 2], "user:2").await;
            assert_eq!(answer, (true, Source::FallbackOpen));
        }
    });
    hold(&gate, &[("bystander", "user:1".to_owned())], 100).await;
    assert!(attack.ends().await > 15);
    let health = gate.store_health();
    assert_eq!((health.state, health.outages), (StoreState::Up, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_primary_of_a_cluster_is_ill_alone() {
    let cluster = RedisCluster::start();
    let addresses: Vec<String> =
        cluster.nodes().iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    let addresses = addresses.join(",");
    let gate =
        open(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &addresses), ("REDIS_CLUSTER", "true")]).await;
    let (mut hung, mut healthy) = (Vec::new(), Vec::new());
    for number in 0..24 {
        let key = format!("user:{number}");
        let before = names(&cluster.nodes()[0]);
        exhaust(&gate, "bystander", &key).await;
        let is_there = names(&cluster.nodes()[0]) != before;
        if is_there { &mut hung } else { &mut healthy }.push(key);
    }
    assert!(!hung.is_empty() && healthy.len() >= 4, "keys are spread over the primaries");

    cluster.nodes()[0].stop();
    let (attacker, keys) = (gate.clone(), hung.clone());
    let attack = Attack::on(move |call| {
        let (gate, key) = (attacker.clone(), keys[call % keys.len()].clone());
        async move {
            charge(&gate, "bystander", &key).await;
            // Calls that are turned away cost nothing; a million of them are not needed.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    let bystanders: Vec<(&str, String)> =
        healthy.iter().take(4).map(|key| ("bystander", key.clone())).collect();
    let started = Instant::now();
    let mut was_down = false;
    while started.elapsed() < Duration::from_secs(2) || !was_down {
        assert!(started.elapsed() < Duration::from_secs(20), "the hung server is never found out");
        hold(&gate, &bystanders, 10).await;
        was_down |= gate.store_health().outages > 0;
    }
    // The node that replaces it is found without it, and then all is well.
    while gate.store_health().state != StoreState::Up {
        assert!(started.elapsed() < Duration::from_secs(40), "its replica took over and nobody asks it");
        hold(&gate, &bystanders, 10).await;
    }
    attack.ends().await;
    for key in &hung {
        assert_eq!(charge(&gate, "bystander", key).await, (false, Source::Store), "what its replica knows");
    }
    cluster.nodes()[0].resume();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_redis_takes_no_new_keys_and_knows_the_old_ones() {
    let server = RedisServer::builder().arguments(["--maxmemory-policy", "noeviction"]).start();
    let gate = on_redis(&server).await;
    let mut bystanders = Vec::new();
    for limit in LIMITS {
        exhaust(&gate, limit, "user:1").await;
        assert_eq!(charge(&gate, limit, "user:half").await, (true, Source::Store), "{limit}");
        bystanders.push((limit, "user:1".to_owned()));
    }
    server.command(&["CONFIG", "SET", "maxmemory", "1"]).expect("full");
    let attacker = gate.clone();
    let attack = Attack::on(move |call| {
        let gate = attacker.clone();
        async move {
            let key = format!("user:new{call}");
            assert_eq!(charge(&gate, "closed", &key).await, (false, Source::FallbackClosed));
            assert_eq!(charge(&gate, "bystander", &key).await, (true, Source::FallbackOpen));
        }
    });
    hold(&gate, &bystanders, 50).await;
    // What a known key has left is spent, and no more than that. A lease is remembered by its id, which is a new key.
    for limit in LIMITS.into_iter().filter(|limit| *limit != "leases") {
        for left in [true, true, false, false] {
            assert_eq!(charge(&gate, limit, "user:half").await, (left, Source::Store), "{limit}");
        }
    }
    assert!(attack.ends().await > 15);
    let health = gate.store_health();
    assert_eq!((health.state, health.outages), (StoreState::Up, 0));
    assert!(health.failures(Failure::Full) > 15);

    // With room again, the new are known like the old.
    server.command(&["CONFIG", "SET", "maxmemory", "0"]).expect("room");
    assert_eq!(charge(&gate, "closed", "user:new0").await, (true, Source::Store));
}

/// What a caller sends that no text of PostgreSQL can hold is the caller's error, and no failure of the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_postgres_cannot_keep_is_the_callers_error() {
    let server = PostgresServer::start();
    let gate = open(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &server.url("postgres"))]).await;
    exhaust(&gate, "bystander", "user:1").await;
    let attacker = gate.clone();
    let attack = Attack::on(move |_| {
        let gate = attacker.clone();
        async move {
            let settlement = Settlement::Named(vec![("a\0b".to_owned(), 1)]);
            let settled = gate.settle(ChargeId::random(), &settlement).await;
            assert!(!settled.is_err_and(|error| error.is_transient()), "it is the caller's mistake");
        }
    });
    hold(&gate, &[("bystander", "user:1".to_owned())], 100).await;
    assert!(attack.ends().await > 15);
    let health = gate.store_health();
    assert_eq!((health.state, health.outages, health.last_failure), (StoreState::Up, 0, None));
}

/// A server that hangs is found out after few calls, costs no more of them, and is asked again by itself.
async fn hangs_and_comes_back(gate: &Tollgate, stop: impl Fn(), resume: impl Fn()) {
    exhaust(gate, "bystander", "user:1").await;
    stop();
    let mut paid = 0;
    while gate.store_health().state == StoreState::Up {
        assert_eq!(charge(gate, "bystander", "user:1").await, (true, Source::FallbackOpen));
        paid += 1;
        assert!(paid <= 8, "{paid} callers have waited for a server that hangs");
    }
    let health = gate.store_health();
    assert_eq!((health.outages, health.state != StoreState::Up), (1, true));
    for _ in 0..2_000 {
        assert_eq!(charge(gate, "bystander", "user:1").await, (true, Source::FallbackOpen));
    }
    assert_eq!(gate.store_health().calls, health.calls, "nobody's own call is the probe");
    resume();
    let started = Instant::now();
    while gate.store_health().state != StoreState::Up {
        assert!(started.elapsed() < Duration::from_secs(20), "the server is back and nobody asks it");
        charge(gate, "bystander", "user:2").await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(charge(gate, "bystander", "user:1").await, (false, Source::Store));
}

/// Regression: a server that only looked at its records called a store up that had gone, until the next charge.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_is_noticed_without_a_charge() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let address = format!("127.0.0.1:{}", proxy.port());
    let gate = open(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)]).await;
    gate.records(RecordKind::Override, None).await.expect("records");
    for (mode, expected) in [(Mode::Refuse, StoreState::Down), (Mode::Pass, StoreState::Up)] {
        proxy.set(mode);
        let begun = Instant::now();
        while gate.store_health().state != expected {
            assert!(begun.elapsed() < Duration::from_secs(60), "never {expected:?}");
            let _ = gate.records(RecordKind::Override, None).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_hangs_is_left_alone_and_comes_back() {
    let server = RedisServer::start();
    let gate = on_redis(&server).await;
    hangs_and_comes_back(&gate, || server.stop(), || server.resume()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_that_hangs_is_left_alone_and_comes_back() {
    let server = PostgresServer::start();
    let gate = open(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &server.url("postgres"))]).await;
    hangs_and_comes_back(&gate, || server.stop(), || server.resume()).await;
}
