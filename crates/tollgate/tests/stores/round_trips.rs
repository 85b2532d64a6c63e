//! One decision is one round trip: what a client sends is counted at the server, for every call that decides or settles.
//!
//! Redis shows in `MONITOR` what clients send, apart from what scripts call, and counts scripts in `commandstats`. PostgreSQL logs each
//! message of the protocol that takes time: `parse`, `bind`, `execute`, and plain statements.

use std::sync::Arc;
use std::time::Duration;

use tollgate::store::{PostgresOptions, PostgresStore};
use tollgate::{Charge, Limit, Settlement, Tollgate};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::{Client, RedisServer};

use crate::open;

/// How the messages of one call are counted.
trait Counted {
    /// What was sent since this was last asked, one word for each message.
    fn sent(&mut self) -> Vec<String>;
}

/// A loaded machine may take its time, and a denial is believed all the same.
const PATIENT: [(&str, &str); 2] =
    [("TOLLGATE_STORE_TIMEOUT", "10s"), ("TOLLGATE_STORE_DENIAL_CACHE", "10s")];

const ONE_HOUR: Duration = Duration::from_secs(3_600);

/// Each kind of call, with what the server is to have seen of it. The first round is not counted: connections are made, and scripts and
/// statements prepared, by the first calls of each kind.
async fn count_all(gate: &Tollgate, server: &mut impl Counted, expected: &[&str]) {
    for is_counted in [false, true] {
        let key = |name: &str| format!("{}:{name}", if is_counted { "user" } else { "warm" });
        let [one, two, three] = ["1", "2", "3"].map(key);
        let _ = server.sent();
        let mut check = |call: &str, expected: &[&str]| {
            let sent = server.sent();
            assert!(sent == expected || !is_counted, "{call}: {sent:?}");
        };

        for turn in 0..3 {
            assert!(gate.check("open", &one).await.expect("check").is_allowed(), "turn {turn}");
            check("an allowed check", expected);
        }
        assert!(!gate.check("open", &one).await.expect("check").is_allowed());
        check("a denied check", expected);
        assert!(!gate.check("open", &one).await.expect("check").is_allowed());
        check("a denial that is known already", &[]);
        let limits = ["open", "closed", "bucket"].map(|limit| Charge::new(limit, &two));
        assert!(gate.charge(&limits).await.expect("charge").is_allowed());
        check("three limits of one key in one decision", expected);
        let keys = ["a", "b", "c", "d"].map(key);
        let many: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new("bucket", key)).collect();
        assert_eq!(gate.charge_each(&many).await.expect("many").len(), 4);
        check("four keys, each for itself, in one call", expected);
        let _ = gate.peek(&limits).await.expect("peek");
        check("a peek at three limits", expected);
        let reserved = gate.reserve(&limits[..2], ONE_HOUR).await.expect("reserve").expect("admitted");
        check("a reservation", expected);
        let settled = gate.settle(reserved.id(), &Settlement::Actual(0)).await.expect("settle");
        assert_eq!(settled, tollgate::Settled::Done);
        check("a settlement", expected);
        assert!(gate.reset("open", &one).await.expect("reset"));
        check("a reset", expected);
        let _ = gate.status("open", &one).await.expect("status");
        check("a status", expected);
        let waited = gate.wait(&[Charge::new("open", &three)], Duration::ZERO).await.expect("wait");
        assert!(waited.is_allowed());
        check("a wait that need not wait", expected);

        // A log of few entries, and one of many, which Redis reads in another way.
        for turn in 0..104 {
            assert!(gate.check("log", &one).await.expect("check").is_allowed(), "turn {turn}");
            check("a check of an exact log", expected);
        }
        assert!(!gate.charge(&[Charge::new("log", &one).cost(200)]).await.expect("charge").is_allowed());
        check("a denial by a long log", expected);
        let _ = gate.status("log", &one).await.expect("status");
        check("a status of a long log", expected);
        for limit in ["counter", "leaky"] {
            for _ in 0..3 {
                assert!(gate.check(limit, &one).await.expect("check").is_allowed(), "{limit}");
                check(limit, expected);
            }
            let _ = gate.status(limit, &one).await.expect("status");
            check("a status", expected);
        }
        let places = [Charge::new("workers", &one)];
        let place = gate.reserve(&places, ONE_HOUR).await.expect("reserve").expect("admitted");
        check("a lease", expected);
        gate.settle(place.id(), &Settlement::Renew).await.expect("renew");
        check("a renewal", expected);
        gate.settle(place.id(), &Settlement::Cancel).await.expect("cancel");
        check("a lease that is given back", expected);
        let permit = gate.acquire("workers", &two).await.expect("acquire").expect("admitted");
        check("a permit", expected);
        permit.release().await.expect("release");
        check("a permit that is released", expected);
        assert!(gate.status("bucket", &two).await.expect("status").is_allowed());
        check("a status", expected);
    }
}

struct Monitored<'a> {
    server: &'a RedisServer,
    monitor: Client,
    marks: u32,
}

impl Counted for Monitored<'_> {
    fn sent(&mut self) -> Vec<String> {
        self.marks += 1;
        let mark = format!("mark-{}", self.marks);
        self.server.command(&["ECHO", &mark]).expect("echo");
        let mut sent = Vec::new();
        loop {
            // `1700000000.123456 [0 127.0.0.1:4711] "evalsha" "…"`, or `[0 lua]` where a script calls.
            let line = self.monitor.receive().expect("the monitor").expect("a line").text();
            if line.contains(&mark) {
                return sent;
            }
            let (place, command) = line.split_once("] ").expect("a line of MONITOR");
            if !place.ends_with(" lua") {
                let name = command.split('"').nth(1).unwrap_or(command);
                sent.push(name.to_ascii_lowercase());
            }
        }
    }
}

fn scripts(server: &RedisServer) -> u64 {
    let stats = server.info("commandstats", "cmdstat_evalsha").unwrap_or_default();
    let calls = stats.split(',').find_map(|field| field.strip_prefix("calls="));
    calls.and_then(|calls| calls.parse().ok()).unwrap_or(0)
}

#[tokio::test]
async fn a_decision_is_one_script_on_redis() {
    let server = RedisServer::start();
    let address = format!("127.0.0.1:{}", server.port());
    let variables = [("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &*address)];
    let gate = open(&[&variables[..], &PATIENT].concat()).await.expect("opened");
    let mut monitor = server.connect().expect("a connection");
    monitor.call(&["MONITOR"]).expect("the monitor").expect("OK");
    let mut monitored = Monitored { server: &server, monitor, marks: 0 };
    count_all(&gate, &mut monitored, &["evalsha"]).await;
    // And by the server's own count, once the script for these two limits is loaded.
    let mut before = 0;
    for number in 0..=100 {
        let key = format!("many:{number}");
        let both = [Charge::new("open", &key), Charge::new("bucket", &key)];
        assert!(gate.charge(&both).await.expect("charge").is_allowed());
        if number == 0 {
            before = scripts(&server);
        }
    }
    assert_eq!(scripts(&server) - before, 100);
}

struct Logged<'a> {
    server: &'a PostgresServer,
    read: usize,
    marks: u32,
}

impl Counted for Logged<'_> {
    fn sent(&mut self) -> Vec<String> {
        self.marks += 1;
        let mark = format!("mark-{}", self.marks);
        self.server.psql(&format!("select '{mark}'"));
        let (log, end) = loop {
            // Sessions write their lines before they answer; only the file may be behind.
            let log = self.server.log();
            if let Some(at) = log[self.read..].find(&mark) {
                let end = self.read + at;
                break (log, end);
            }
            std::thread::yield_now();
        };
        // `LOG:  duration: 0.1 ms  bind s0: select …`; a statement of several lines goes on without `duration`. The last line is the mark's.
        let last = log[..end].rfind('\n').unwrap_or(end).max(self.read);
        let messages = log[self.read..last].lines().filter_map(|line| line.split_once("duration: "));
        let words = messages.filter_map(|(_, rest)| rest.split_once(" ms  "));
        let sent = words.map(|(_, rest)| rest.split([' ', ':']).next().unwrap_or_default().to_owned());
        let sent = sent.collect();
        self.read = end + mark.len();
        sent
    }
}

#[tokio::test]
async fn a_decision_is_one_prepared_statement_on_postgresql() {
    let server = PostgresServer::builder().setting("log_min_duration_statement", "0").start();
    // One connection, and no cleanup beside it: all messages are those of the calls.
    let options = PostgresOptions {
        connections: 1,
        cleanup_every: None,
        timeout: Duration::from_secs(10),
        ..PostgresOptions::new(server.url("postgres"))
    };
    let store = PostgresStore::connect(options).await.expect("a store");
    let window = Limit::fixed_window(3, ONE_HOUR).expect("a limit");
    let gate = Tollgate::builder()
        .limit("open", window)
        .limit("closed", window)
        .limit("bucket", Limit::token_bucket("3/h", 3).expect("a limit"))
        .limit("log", Limit::sliding_window(200, ONE_HOUR).expect("a limit"))
        .limit("counter", Limit::sliding_window_counter(200, ONE_HOUR).expect("a limit"))
        .limit("leaky", Limit::leaky_bucket("3/h", 3).expect("a limit"))
        .limit("workers", Limit::concurrency(3, ONE_HOUR).expect("a limit"))
        .store(Arc::new(store))
        .denial_cache(Duration::from_secs(10));
    let gate = gate.build().expect("a gate");
    let mut logged = Logged { server: &server, read: 0, marks: 0 };
    // Bound and executed in one message, of which the server logs both parts.
    count_all(&gate, &mut logged, &["bind", "execute"]).await;
}
