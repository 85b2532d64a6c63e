//! Overrides on a store that several servers share: all of them follow within a second, and a restart keeps what was set.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::{RedisCluster, RedisServer};

use crate::server::{self, POLICY, Tollgate};

/// Within which time every server follows.
const SOON: Duration = Duration::from_secs(1);

fn capacity(server: &Tollgate) -> u64 {
    let body = server.get("/v1/status?limit=login&key=user:1").body;
    let status: Value = serde_json::from_str(&body).expect("JSON");
    status["capacity"].as_u64().unwrap_or_else(|| panic!("{status}"))
}

/// How long it takes until a server has the key at this capacity. Fails after ten seconds.
fn until(server: &Tollgate, expected: u64) -> Duration {
    let start = Instant::now();
    while capacity(server) != expected {
        assert!(start.elapsed() < Duration::from_secs(10), "still {}, not {expected}", capacity(server));
        std::thread::sleep(Duration::from_millis(10));
    }
    start.elapsed()
}

fn raise(server: &Tollgate, limit: u64, for_ms: Option<u64>) {
    let mut body = json!({ "limit": "login", "key": "user:1", "override": { "limit": limit } });
    if let Some(for_ms) = for_ms {
        body["for_ms"] = for_ms.into();
    }
    let answer = server.post("/v1/overrides", &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.body.contains("\"survives_restart\":true"), "{}", answer.body);
    assert_eq!(capacity(server), limit, "at once where it was set");
}

/// Two servers on one store, which this starts servers on.
fn check(start: impl Fn() -> Tollgate) {
    let (one, other) = (start(), start());
    let charge = r#"{"limit":"login","key":"user:1","cost":2}"#;
    assert!(one.post("/v1/check", charge).body.contains("\"allowed\":true"));
    raise(&one, 9, None);
    let took = until(&other, 9);
    assert!(took < SOON, "the other server followed after {took:?}");
    let body = other.get("/v1/status?limit=login&key=user:1").body;
    assert!(body.contains("\"used\":2"), "what was consumed stays consumed: {body}");

    // By itself at its time, on both.
    raise(&other, 5, Some(1_500));
    assert!(until(&one, 5) < SOON);
    let took = until(&one, 2);
    assert!(took < Duration::from_millis(1_500) + SOON, "it ended after {took:?}");
    assert!(until(&other, 2) < SOON);

    // A crash and a restart keep it, from the first request on.
    raise(&one, 7, None);
    assert!(until(&other, 7) < SOON);
    for server in [&one, &other] {
        server.signal(Signal::KILL);
        server.ended();
    }
    let (one, other) = (start(), start());
    assert_eq!((capacity(&one), capacity(&other)), (7, 7));
    let removed = other.post("/v1/overrides/remove", r#"{"limit":"login","key":"user:1"}"#).body;
    assert_eq!(removed, r#"{"removed":true,"rule":"2 per 1h window"}"#);
    assert!(until(&one, 2) < SOON);
}

#[test]
fn every_server_on_a_redis_follows() {
    let redis = RedisServer::start();
    check(|| crate::redis::over(&redis, POLICY));
}

#[test]
fn every_server_on_a_cluster_follows() {
    let cluster = RedisCluster::start();
    let urls = format!("{:?}", cluster.urls());
    let config = format!(
        "[store]\nmode = \"redis\"\ntimeout = \"5s\"\nredis = {{ urls = {urls}, cluster = true }}\n{POLICY}"
    );
    check(|| server::with(&config, &[], &[]));
}

#[test]
fn every_server_on_a_postgres_follows() {
    let postgres = PostgresServer::start();
    let config = format!(
        "[store]\nmode = \"postgres\"\ntimeout = \"5s\"\npostgres = {{ url = \"{}\" }}\n{POLICY}",
        postgres.url("postgres")
    );
    check(|| server::with(&config, &[], &[]));
}

/// While the store is away, what is set stays in force and nothing can be set; afterwards it goes on.
#[test]
fn an_outage_forgets_nothing() {
    let redis = RedisServer::start();
    let config = format!(
        "[store]\nmode = \"redis\"\ntimeout = \"300ms\"\nredis = {{ url = \"{}\" }}\n{POLICY}",
        redis.url()
    );
    let server = server::with(&config, &[], &[]);
    let block = r#"{"limit":"api","key":"user:1","override":{"blocked":true}}"#;
    assert_eq!(server.post("/v1/overrides", block).status, 200);
    redis.stop();
    let answer = server.post("/v1/overrides", &block.replace("user:1", "user:2"));
    assert_eq!(answer.status, 503, "{}", answer.body);
    let ask = r#"{"limit":"api","key":"user:1"}"#;
    assert!(server.post("/v1/check", ask).body.contains("\"reason\":\"blocked\""));
    let list = server.get("/v1/overrides").body;
    assert!(list.contains("\"stale\":true") && list.contains("user:1"), "{list}");
    redis.resume();
    let start = Instant::now();
    while server.post("/v1/overrides", &block.replace("user:1", "user:2")).status != 200 {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(server.post("/v1/check", ask).body.contains("\"reason\":\"blocked\""));
}
