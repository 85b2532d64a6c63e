//! The whole library over real stores: opened from a configuration and the environment, through an outage and back.

#[path = "stores/round_trips.rs"]
mod round_trips;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tollgate::config::Config;
use tollgate::store::StoreState;
use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{Charge, Tollgate};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::{RedisCluster, RedisServer};

const POLICY: &str = "
[store]
timeout = '500ms'

[limits.open]
strategy = 'fixed_window'
limit = 3
window = '1h'
fallback = 'open'

[limits.closed]
strategy = 'fixed_window'
limit = 3
window = '1h'
fallback = 'closed'

[limits.local]
strategy = 'fixed_window'
limit = 3
window = '1h'
fallback = 'local'

[limits.bucket]
strategy = 'token_bucket'
rate = '3/h'
burst = 3

[limits.log]
strategy = 'sliding_window'
limit = 200
window = '1h'

[limits.counter]
strategy = 'sliding_window_counter'
limit = 200
window = '1h'

[limits.leaky]
strategy = 'leaky_bucket'
rate = '3/h'
capacity = 3

[limits.workers]
strategy = 'concurrency'
limit = 3
lease = '1h'
";

/// The registry that the policy and these variables describe.
async fn open(variables: &[(&str, &str)]) -> Result<Tollgate, tollgate::Error> {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let config = Config::parse_with_env(POLICY, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    Tollgate::open(&config).await
}

/// How many of `calls` charges of one key are admitted, and where the answers came from.
async fn admitted(gate: &Tollgate, limit: &str, key: &str, calls: usize) -> (usize, Vec<Source>) {
    let mut admitted = 0;
    let mut sources = Vec::new();
    for _ in 0..calls {
        let decision = gate.charge(&[Charge::new(limit, key)]).await.expect("a decision");
        admitted += usize::from(decision.is_allowed());
        let source = decision.outcomes()[0].source();
        if !sources.contains(&source) {
            sources.push(source);
        }
    }
    (admitted, sources)
}

/// The same policy by one variable, and the same answers from two registries that share a store.
async fn shared_by_two(variables: &[(&str, &str)]) {
    let (one, other) = (open(variables).await.expect("opened"), open(variables).await.expect("opened"));
    for limit in ["open", "closed", "local", "bucket"] {
        assert_eq!(admitted(&one, limit, "user:1", 2).await.0, 2, "{limit}");
        assert_eq!(admitted(&other, limit, "user:1", 5).await.0, 1, "{limit}: what the other has left");
        let status = one.status(limit, "user:1").await.expect("status");
        assert_eq!((status.remaining(), status.used()), (0, 3), "{limit}");
        assert!(other.reset(limit, "user:1").await.expect("reset"));
        assert_eq!(one.status(limit, "user:1").await.expect("status").remaining(), 3);
    }
    let reserved =
        one.reserve(&[Charge::new("open", "job").cost(3)], Duration::from_secs(60)).await.expect("reserve");
    let id = reserved.expect("admitted").id();
    assert_eq!(admitted(&other, "open", "job", 1).await.0, 0);
    let settlement = tollgate::Settlement::Actual(1);
    assert_eq!(other.settle(id, &settlement).await.expect("settle"), tollgate::Settled::Done);
    assert_eq!(one.settle(id, &settlement).await.expect("settle"), tollgate::Settled::Already);
    assert_eq!(one.status("open", "job").await.expect("status").used(), 1);
    let charges = ["a", "b", "a", "a", "a", "c"].map(|key| Charge::new("bucket", key));
    let many = one.charge_each(&charges).await.expect("many");
    let allowed: Vec<bool> =
        many.iter().map(|one| one.as_ref().is_ok_and(tollgate::Outcome::is_allowed)).collect();
    assert_eq!(allowed, [true, true, true, true, false, true]);
}

#[tokio::test]
async fn redis_by_one_variable() {
    let server = RedisServer::start();
    let address = format!("127.0.0.1:{}", server.port());
    shared_by_two(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)]).await;
}

#[tokio::test]
async fn a_cluster_by_two_variables() {
    let cluster = RedisCluster::start();
    let addresses: Vec<String> =
        cluster.nodes().iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    let addresses = addresses.join(",");
    shared_by_two(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &addresses), ("REDIS_CLUSTER", "true")])
        .await;
}

#[tokio::test]
async fn postgres_by_one_variable() {
    let server = PostgresServer::start();
    shared_by_two(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &server.url("postgres"))]).await;
}

#[tokio::test]
async fn what_is_wrong_for_good_stops_the_start() {
    let server = RedisServer::builder().password("right").start();
    let address = format!("127.0.0.1:{}", server.port());
    let redis = [("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &*address)];
    let error = open(&redis).await.unwrap_err().to_string();
    assert!(error.contains("refused the user or the password"), "{error}");
    let error = open(&[redis[0], redis[1], ("REDIS_CLUSTER", "true")]).await.unwrap_err().to_string();
    assert!(error.contains("refused the user or the password"), "{error}");
    let alone = format!("redis://:right@{address}");
    let error =
        open(&[redis[0], ("REDIS_ADDR", &alone), ("REDIS_CLUSTER", "true")]).await.unwrap_err().to_string();
    assert!(error.contains("was said to be one") && !error.contains("right"), "{error}");
    let server = PostgresServer::start();
    let missing = server.url("nowhere");
    let error =
        open(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &missing)]).await.unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
}

/// Counts answers by where they came from.
#[derive(Default)]
struct Sources {
    fallen_back: AtomicU64,
    changes: AtomicU64,
}

impl Observer for Sources {
    fn decided(&self, event: &Event<'_>) {
        self.fallen_back.fetch_add(u64::from(event.source.is_fallback()), Ordering::Relaxed);
    }

    fn store_changed(&self, _: &tollgate::store::StoreChange) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }
}

/// A store that is away: each limit does what its policy says, a call costs next to nothing, and when it is back it is asked
/// again by itself, with nothing that was decided meanwhile in it.
async fn through_an_outage(variables: &[(&str, &str)], proxy: &FaultProxy) {
    // Here the store refuses, so nothing waits for the deadline, and a slow disk is to be no outage.
    let patient = [("TOLLGATE_STORE_TIMEOUT", "5s")];
    let variables =
        variables.iter().chain(&patient).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let config = Config::parse_with_env(POLICY, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let sources = Arc::new(Sources::default());
    let gate =
        Tollgate::opening(&config).await.expect("opened").observer(sources.clone()).build().expect("built");
    for limit in ["open", "closed", "local"] {
        assert_eq!(admitted(&gate, limit, "user:1", 1).await, (1, vec![Source::Store]), "{limit}");
    }
    assert_eq!(gate.store_health().state, StoreState::Up);

    proxy.set(Mode::Refuse);
    assert_eq!(admitted(&gate, "open", "user:1", 20).await, (20, vec![Source::FallbackOpen]));
    assert_eq!(gate.store_health().state, StoreState::Down);
    // With the breaker open nothing waits for the store: a thousand calls take far less than a thousand deadlines would.
    let started = Instant::now();
    assert_eq!(admitted(&gate, "closed", "user:1", 1_000).await, (0, vec![Source::FallbackClosed]));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(admitted(&gate, "local", "user:1", 10).await, (3, vec![Source::FallbackLocal]));
    let decision = gate
        .charge(&[Charge::new("open", "user:1"), Charge::new("closed", "user:1")])
        .await
        .expect("decided");
    assert!(!decision.is_allowed() && decision.is_degraded());
    assert_eq!(decision.binding().limit(), "closed");
    assert!(decision.retry_after().is_some_and(|wait| wait > Duration::ZERO));

    proxy.set(Mode::Pass);
    let started = Instant::now();
    while gate.store_health().state != StoreState::Up {
        assert!(started.elapsed() < Duration::from_secs(20), "the store is back and nobody asks it");
        let _ = gate.charge(&[Charge::new("open", "prober")]).await.expect("decided");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for limit in ["open", "closed", "local"] {
        let used = gate.status(limit, "user:1").await.expect("status").used();
        assert_eq!(used, 1, "{limit}: what was decided without the store is not in it");
        assert_eq!(admitted(&gate, limit, "user:1", 1).await, (1, vec![Source::Store]), "{limit}");
    }
    assert_eq!(sources.changes.load(Ordering::Relaxed), 2, "down once and up once");
    assert!(sources.fallen_back.load(Ordering::Relaxed) >= 1_031);
}

#[tokio::test]
async fn redis_goes_and_comes_back() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let address = format!("127.0.0.1:{}", proxy.port());
    through_an_outage(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)], &proxy).await;
}

#[tokio::test]
async fn postgres_goes_and_comes_back() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let url = server.url("postgres").replace(&server.port().to_string(), &proxy.port().to_string());
    through_an_outage(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &url)], &proxy).await;
}

/// How the way to a store is broken: late, silent, refused, or with its replies lost, which are different errors.
const OUTAGES: [Mode; 6] = [
    Mode::Latency(Duration::from_millis(900)),
    Mode::Blackhole,
    Mode::Reset,
    Mode::SwallowReplies,
    Mode::Refuse,
    Mode::CutReply { after_bytes: 3 },
];

/// Counters of a process begin empty. So a call that failed, for want of the store or of time, let a spent key pass again, and who
/// could make its calls fail had switched its limit off.
async fn a_spent_key_stays_denied(variables: &[(&str, &str)], proxy: &FaultProxy) {
    let gate = open(variables).await.expect("opened");
    let alone = [Charge::new("local", "spent")];
    let beside = [Charge::new("bucket", "spent"), Charge::new("local", "spent")];
    assert_eq!(admitted(&gate, "local", "spent", 4).await.0, 3);
    for mode in OUTAGES {
        proxy.set(mode);
        for charges in [&alone[..], &beside] {
            // Until then the denial cache answers.
            let started = Instant::now();
            let mut fallen_back = 0;
            while fallen_back < 4 {
                assert!(started.elapsed() < Duration::from_secs(30), "{mode:?} breaks nothing");
                let decision = gate.charge(charges).await.expect("decided");
                assert!(!decision.is_allowed(), "{mode:?}: {decision}");
                fallen_back += usize::from(decision.is_degraded());
            }
        }
        proxy.set(Mode::Pass);
        let started = Instant::now();
        while gate.charge(&beside).await.expect("decided").is_degraded() {
            assert!(started.elapsed() < Duration::from_secs(30), "the store is back and is not asked");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    let used = gate.status("local", "spent").await.expect("status").used();
    assert_eq!(used, 3, "nothing was charged by what was denied");
}

#[tokio::test]
async fn a_spent_key_stays_denied_in_every_outage_of_redis() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let address = format!("127.0.0.1:{}", proxy.port());
    a_spent_key_stays_denied(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)], &proxy).await;
}

#[tokio::test]
async fn a_spent_key_stays_denied_in_every_outage_of_postgresql() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let url = server.url("postgres").replace(&server.port().to_string(), &proxy.port().to_string());
    a_spent_key_stays_denied(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &url)], &proxy).await;
}

/// The store charges a reservation and its reply is lost. The fallback answers, the caller cancels, and once the network heals
/// the store holds nothing of it, without another call. So it is with a wait and a reserve that are dropped in flight.
async fn through_lost_replies(variables: &[(&str, &str)], proxy: &FaultProxy) {
    let gate = open(variables).await.expect("opened");
    for limit in ["open", "local"] {
        // The connection has prepared what a reservation needs, so that the next one is sent in one go.
        let ttl = Duration::from_secs(600);
        let first = gate.reserve(&[Charge::new(limit, "user:0")], ttl).await.expect("decided");
        assert!(first.is_ok_and(|held| !held.decision().is_degraded()), "{limit}");
        // After a call the store looks how many keys there are, on the same connection: it has to be back.
        tokio::time::sleep(Duration::from_millis(200)).await;
        proxy.set(Mode::SwallowReplies);
        let reserved = gate.reserve(&[Charge::new(limit, "user:1").cost(2)], ttl).await.expect("decided");
        let reserved = reserved.expect("the fallback admits it");
        assert!(reserved.decision().is_degraded(), "{limit}");
        let id = reserved.id();
        let settled = gate.settle(id, &tollgate::Settlement::Cancel).await.expect("settled here");
        assert_eq!(settled, tollgate::Settled::Pending, "{limit}");
        // Dropped once the call has been sent, long before its deadline.
        let key = format!("user:{limit}");
        for round in 0..2 {
            let sent = proxy.swallowed();
            let asks = [Charge::new("closed", &key)];
            let wait = gate.wait(&asks, ttl);
            let call = async {
                match round {
                    0 => drop(wait.await),
                    _ => drop(gate.reserve(&asks, ttl).await),
                }
            };
            tokio::select! {
                () = call => {}
                () = async { while proxy.swallowed() == sent { tokio::task::yield_now().await } } => {}
                () = tokio::time::sleep(Duration::from_secs(2)) => {}
            }
        }
        assert!(gate.store_health().pending_cancels > 0, "{limit}");
        proxy.set(Mode::Reset);
        proxy.set(Mode::Pass);
        let started = Instant::now();
        while gate.store_health().pending_cancels > 0 {
            assert!(
                started.elapsed() < Duration::from_secs(30),
                "the store is back and nothing is cancelled"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(gate.store_health().abandoned_cancels, 0);
        for (limit, key) in [(limit, "user:1"), ("closed", &*key)] {
            let used = gate.status(limit, key).await.expect("status").used();
            assert_eq!(used, 0, "{limit} {key}: the store holds nothing of it");
        }
    }
}

#[tokio::test]
async fn redis_holds_nothing_of_what_was_cancelled_after_a_lost_reply() {
    let server = RedisServer::start();
    let proxy = FaultProxy::start(server.port());
    let address = format!("127.0.0.1:{}", proxy.port());
    through_lost_replies(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)], &proxy).await;
}

#[tokio::test]
async fn postgres_holds_nothing_of_what_was_cancelled_after_a_lost_reply() {
    let server = PostgresServer::start();
    let proxy = FaultProxy::start(server.port());
    let url = server.url("postgres").replace(&server.port().to_string(), &proxy.port().to_string());
    through_lost_replies(&[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &url)], &proxy).await;
}

/// A service starts although its store is not there, and uses it once it is.
#[tokio::test]
async fn a_store_may_come_later() {
    let redis = RedisServer::start();
    let postgres = PostgresServer::start();
    for (name, port) in [("redis", redis.port()), ("postgres", postgres.port())] {
        let proxy = FaultProxy::start(port);
        proxy.set(Mode::Refuse);
        let address = format!("127.0.0.1:{}", proxy.port());
        let url = postgres.url("postgres").replace(&postgres.port().to_string(), &proxy.port().to_string());
        let variables = [("RL_STORAGE_MODE", name), ("REDIS_ADDR", &*address), ("DATABASE_URL", &*url)];
        let gate = open(&variables).await.expect("the start does not depend on it");
        assert_eq!(admitted(&gate, "local", "user:1", 9).await, (3, vec![Source::FallbackLocal]), "{name}");
        proxy.set(Mode::Pass);
        let started = Instant::now();
        while admitted(&gate, "open", "later", 1).await.1 != [Source::Store] {
            assert!(started.elapsed() < Duration::from_secs(20), "{name} is there and nobody asks it");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// The example, on the store that the environment names. `cargo test` has built it beside this test; a narrower command has not,
/// and then it is built here.
fn example(variables: &[(&str, &str)]) -> String {
    let this = std::env::current_exe().expect("a test knows where it is");
    let folder = this.parent().and_then(std::path::Path::parent).expect("tests are built two folders down");
    let path = folder.join("examples").join(format!("shared{}", std::env::consts::EXE_SUFFIX));
    if !path.exists() {
        let mut cargo = std::process::Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--package", "tollgate", "--example", "shared", "--all-features"]);
        cargo.args(["--profile", "test", "--target-dir"]).arg(folder.parent().expect("a profile's folder"));
        assert!(cargo.status().expect("cargo is there").success(), "the example does not build");
    }
    let output = std::process::Command::new(&path).envs(variables.iter().copied()).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8(output.stdout).expect("text");
    // Examples go by the clock, so the time to wait is left out.
    said.split("retry after").next().unwrap_or_default().trim().to_owned()
}

#[test]
fn the_example_runs_on_every_store() {
    let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
    let (address, url) = (format!("127.0.0.1:{}", redis.port()), postgres.url("postgres"));
    for (mode, variables) in [
        ("memory", &[][..]),
        ("redis", &[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &*address)]),
        ("postgres", &[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &*url)]),
    ] {
        let expected = format!(
            "counting in {mode}\n\
             request 1: allowed by per-user, 2 of 3 left\n\
             request 2: allowed by per-user, 1 of 3 left\n\
             request 3: allowed by per-user, 0 of 3 left\n\
             request 4: denied by per-user,"
        );
        assert_eq!(example(variables), expected);
    }
}
