//! A service that is watched: one registry in memory and one over Redis, and a page with what both have counted.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use metrics_exporter_prometheus::PrometheusBuilder;
use tollgate::store::{RedisOptions, RedisStore, StoreState};
use tollgate::telemetry::{LogDecisions, Telemetry};
use tollgate::{Fallback, Limit, ManualClock, Rule, Tollgate, TollgateBuilder};
use tollgate_testkit::redis::RedisServer;

pub(crate) struct Service {
    pub(crate) redis: RedisServer,
    memory: Tollgate,
    shared: Tollgate,
    /// Of the clock of both registries. It stands still, so that all is logged, or left out, within one second, and so that a
    /// store that failed is not tried again before it is to be.
    hands: ManualClock,
    address: SocketAddr,
}

impl Service {
    pub(crate) fn start() -> Service {
        let recorder = PrometheusBuilder::new()
            .set_buckets(&tollgate::telemetry::BUCKETS_MS)
            .expect("buckets")
            .build_recorder();
        let page = recorder.handle();
        let telemetry = Telemetry::new().metrics_to(Arc::new(recorder)).namespaces(["user"]);
        let (redis, hands) = (RedisServer::start(), ManualClock::at(Duration::from_secs(1_000)));
        let builder = || Tollgate::builder().clock(hands.clock());
        let memory = in_memory(builder().telemetry(telemetry.clone().log(LogDecisions::Denials)));
        let shared = over(&redis, builder().telemetry(telemetry));
        let gates = [memory.clone(), shared.clone()];
        let address = serve(move || {
            gates.iter().for_each(Tollgate::publish_metrics);
            page.render()
        });
        Service { redis, memory, shared, hands, address }
    }

    /// Where the page is.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// 13 decisions in memory and 15 by Redis, and a reset of a key that was never charged.
    pub(crate) async fn decide(&self) {
        for (name, calls) in [("pages", 8), ("trial", 5)] {
            let limiter = self.memory.local(name).expect("a limit");
            for _ in 0..calls {
                let _ = limiter.check("user:1");
            }
        }
        assert!(!self.memory.local("pages").expect("a limit").reset("user:2"));
        self.charge(5).await;
    }

    /// A hundred decisions of each limit, without Redis.
    pub(crate) async fn fall_back(&self) {
        self.charge(100).await;
    }

    async fn charge(&self, calls: usize) {
        for limit in ["api", "login", "jobs"] {
            for _ in 0..calls {
                let _ = self.shared.check(limit, "user:1").await.expect("a decision");
            }
        }
    }

    /// Redis is there again; charges try it until one is decided by it, each after more time than it is left alone for. That the
    /// store is up is not enough: a ping finds that out, and only a call that connects anew notices that state was lost.
    pub(crate) async fn come_back(&self) {
        for _ in 0..100 {
            self.hands.advance(Duration::from_secs(10));
            let decision = self.shared.check("probe", "user:1").await.expect("a decision");
            if !decision.is_degraded() {
                assert_eq!(self.shared.store_health().state, StoreState::Up);
                return;
            }
            // The ping goes over a real connection, beside this loop.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("Redis is back and nobody asks it");
    }

    /// A charge is sent, and no answer comes in time.
    pub(crate) async fn lose_an_answer(&self) {
        self.redis.stop();
        let decision = self.shared.check("probe", "user:1").await.expect("a decision");
        self.redis.resume();
        assert!(decision.is_degraded());
    }
}

fn in_memory(builder: TollgateBuilder) -> Tollgate {
    let hourly = |count| Limit::token_bucket("1/h", count).expect("a limit");
    let trial = Rule::new("trial", hourly(2)).expect("a name").shadow();
    builder.limit("pages", hourly(5)).rule(trial).build().expect("a registry")
}

fn over(redis: &RedisServer, builder: TollgateBuilder) -> Tollgate {
    let mut options = RedisOptions::new(redis.url());
    options.timeout = Duration::from_millis(500);
    let store = RedisStore::new(options).expect("a store");
    let limit = Limit::fixed_window(3, Duration::from_secs(3_600)).expect("a limit");
    let rule = |name, fallback| Rule::new(name, limit).expect("a name").fallback(fallback);
    builder
        .rule(rule("api", Fallback::Open))
        .rule(rule("login", Fallback::Closed))
        .rule(rule("jobs", Fallback::Local))
        .rule(rule("probe", Fallback::Open))
        .store(store)
        // Every denial is to be Redis's own.
        .denial_cache(Duration::ZERO)
        .build()
        .expect("a registry")
}

/// Answers every request with the page as it is then, from a thread that ends with the process.
fn serve(page: impl Fn() -> String + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A scrape that goes wrong is one that Prometheus tells of.
            let _ = answer(stream, &page());
        }
    });
    address
}

fn answer(mut stream: TcpStream, page: &str) -> std::io::Result<()> {
    let mut request = BufReader::new(stream.try_clone()?).lines();
    while request.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{page}", page.len())
}

/// The names of all metrics that the library describes.
pub(crate) fn described() -> BTreeSet<String> {
    let names = Arc::new(Names::default());
    let telemetry = Telemetry::new().metrics_to(names.clone());
    Tollgate::builder().telemetry(telemetry).build().expect("a registry");
    std::mem::take(&mut *names.0.lock().expect("nobody panicked"))
}

#[derive(Default)]
struct Names(std::sync::Mutex<BTreeSet<String>>);

impl Names {
    fn add(&self, name: &KeyName) {
        self.0.lock().expect("nobody panicked").insert(name.as_str().to_owned());
    }
}

impl Recorder for Names {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name);
    }

    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name);
    }

    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.add(&name);
    }

    fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
        Counter::noop()
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}
