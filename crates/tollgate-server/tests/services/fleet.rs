//! All servers on one store in one view: who comes is seen, and who goes is gone, with a good-bye or without.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;

use crate::server::{self, POLICY, Tollgate};

fn fleet(server: &Tollgate) -> Value {
    serde_json::from_str(&server.get("/v1/fleet").body).expect("JSON")
}

/// Waits until a server sees so many, and answers what it sees and how long it took.
fn until(server: &Tollgate, count: usize, within: Duration) -> (Value, Duration) {
    let start = Instant::now();
    loop {
        let seen = fleet(server);
        if seen["servers"].as_array().map(Vec::len) == Some(count) {
            return (seen, start.elapsed());
        }
        assert!(start.elapsed() < within, "not {count}: {seen}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What each server decides under a limit is known to all of them: one allows, the other denies.
fn by_limit(one: &Tollgate, two: &Tollgate) {
    let start = Instant::now();
    loop {
        one.post("/v1/check", r#"{"limit":"free","key":"user:1"}"#);
        two.post("/v1/check", r#"{"limit":"login","key":"user:1"}"#);
        let seen = fleet(one);
        let of = |server: usize, limit: &str| {
            let rates = &seen["servers"][server]["by_limit"][limit];
            [0, 1, 2].map(|place| rates[place].as_f64().unwrap_or_default())
        };
        let [first, second] = [of(0, "free"), of(1, "login")];
        if first[0] > 0.0 && second[1] > 0.0 {
            assert_eq!((of(0, "login"), of(1, "free")), ([0.0; 3], [0.0; 3]), "{seen}");
            assert_eq!((first[1], second[2]), (0.0, 0.0), "{seen}");
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{seen}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn check(start: impl Fn(&str, &str) -> Tollgate) {
    let (one, two) = (start("gate-1", POLICY), start("gate-2", POLICY));
    for _ in 0..5 {
        two.post("/v1/check", r#"{"limit":"login","key":"user:1"}"#);
    }
    let (seen, took) = until(&one, 2, Duration::from_secs(10));
    assert!(took < Duration::from_secs(5), "{took:?}");
    assert_eq!((&seen["shared"], &seen["stale"]), (&true.into(), &false.into()));
    let servers = seen["servers"].as_array().expect("a list");
    let names: Vec<&str> = servers.iter().filter_map(|one| one["name"].as_str()).collect();
    assert_eq!(names, ["gate-1", "gate-2"]);
    assert_eq!((&servers[0]["this"], &servers[1]["this"]), (&true.into(), &false.into()));
    assert_eq!(servers[0]["config"], servers[1]["config"], "the same limits");
    assert_eq!(servers[1]["store"], "up");
    by_limit(&one, &two);

    // Another config has another revision.
    let three = start("gate-3", &format!("{POLICY}\n[limits.more]\nunlimited = true\n"));
    let (seen, _) = until(&two, 3, Duration::from_secs(10));
    let of = |name: &str| {
        let servers = seen["servers"].as_array().expect("a list");
        servers.iter().find(|one| one["name"] == name).map(|one| one["config"].clone())
    };
    assert!(of("gate-3").is_some() && of("gate-3") != of("gate-1"), "{seen}");

    three.stop();
    let (_, took) = until(&one, 2, Duration::from_secs(10));
    assert!(took < Duration::from_secs(3), "who says good-bye is gone at once: {took:?}");
    two.signal(Signal::KILL);
    two.ended();
    let (seen, took) = until(&one, 1, Duration::from_secs(20));
    assert!(took < Duration::from_secs(9), "who is killed is gone within seconds: {took:?} {seen}");
}

#[test]
fn servers_on_a_redis_see_each_other() {
    let redis = RedisServer::start();
    check(|name, policy| {
        let config = format!(
            "[server]\nname = \"{name}\"\n[store]\nmode = \"redis\"\ntimeout = \"5s\"\nredis = {{ url = \"{}\" }}\n{policy}",
            redis.url()
        );
        server::with(&config, &[], &[])
    });
}

#[test]
fn servers_on_a_postgres_see_each_other() {
    let postgres = PostgresServer::start();
    check(|name, policy| {
        let config = format!(
            "[server]\nname = \"{name}\"\n[store]\nmode = \"postgres\"\ntimeout = \"5s\"\npostgres = {{ url = \"{}\" }}\n{policy}",
            postgres.url("postgres")
        );
        server::with(&config, &[], &[])
    });
}
