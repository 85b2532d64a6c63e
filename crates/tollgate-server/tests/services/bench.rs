//! `tollgate bench` on real stores: every shape is measured, nothing stays behind, and a store that fails is reported.

use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::{RedisCluster, RedisServer};
use tollgate_testkit::tls::Certificates;

use crate::server;

/// The deadline of a call is not what is tested, on a machine that is busy with other tests.
const PATIENT: (&str, &str) = ("RL_TIMEOUT", "10s");

const SECRET: &str = "hunter2";

fn bench(config: &str, args: &[&str], env: &[(&str, &str)]) -> Command {
    let home = server::home();
    std::fs::write(home.join("tollgate.toml"), config).unwrap();
    let env = [&[PATIENT], env].concat();
    let mut command = server::command(&home, &[&["bench"], args].concat(), &env);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// What it answered, and what it said to people; neither has the password in it.
fn reported(output: &Output) -> (Value, String) {
    let stdout = String::from_utf8(output.stdout.clone()).unwrap();
    let stderr = String::from_utf8(output.stderr.clone()).unwrap();
    for secret in [SECRET, PostgresServer::PASSWORD] {
        assert!(!stdout.contains(secret) && !stderr.contains(secret), "{stdout}{stderr}");
    }
    (serde_json::from_str(&stdout).unwrap_or(Value::Null), stderr)
}

/// Measures a store on which all is well.
fn check(store: &str, config: &str, args: &[&str], env: &[(&str, &str)]) {
    let few = ["--json", "--keys", "100", "--callers", "4", "--seconds", "1"];
    let output = bench(config, &[&few, args].concat(), env).output().unwrap();
    let (report, stderr) = reported(&output);
    assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{args:?}: {report}");
    assert_eq!(report["store"], store);
    let runs = report["runs"].as_array().unwrap();
    let shape = |run: &Value| (run["keys"].clone(), run["call"].clone(), run["callers"].clone());
    let shapes: Vec<_> = runs.iter().map(shape).collect();
    let mut expected: Vec<(Value, Value, Value)> = Vec::new();
    for keys in [1, 100] {
        for call in ["check", "check_many"] {
            expected.extend([1, 4].map(|callers| (keys.into(), call.into(), callers.into())));
        }
    }
    assert_eq!(shapes, expected, "{args:?}");
    for run in runs {
        let checks = run["checks"].as_u64().unwrap();
        let group = if run["call"] == "check" { 1 } else { 16 };
        assert!(checks > 0 && run["checks_per_second"].as_u64() > Some(0), "{run}");
        assert_eq!(run["latency_ns"]["samples"].as_u64(), Some(checks / group), "{run}");
        assert_eq!((&run["fallbacks"], &run["errors"]), (&0.into(), &0.into()), "{run}");
        let latency = ["p50", "p95", "p99", "p999", "max"].map(|p| run["latency_ns"][p].as_u64().unwrap());
        assert!(latency.is_sorted() && latency[0] > 0, "{run}");
    }
    let limit = report["limit"].as_str().unwrap();
    assert!(limit.starts_with("tollgate-bench-") && limit.len() > 40, "{limit}");
    assert!((1..=100).contains(&report["keys_written"].as_u64().unwrap()), "{report}");
    assert_eq!(report["keys_left"], 0);
    assert_eq!((&report["interrupted"], &report["failures"]), (&false.into(), &Value::Array(Vec::new())));
}

/// How many keys there are, without the marks by which a store knows a server again: those run out by themselves.
fn keys_in(redis: &RedisServer) -> usize {
    let keys = redis.command(&["KEYS", "*"]).unwrap();
    keys.items().iter().filter(|key| !key.text().contains(":mark:")).count()
}

#[test]
fn redis_is_measured_and_left_as_it_was() {
    let certificates = Certificates::generate();
    let redis = RedisServer::builder().password(SECRET).tls(&certificates).start();
    redis.command(&["SET", "somebody's", "own"]).unwrap();
    let with_login = redis.url().replace("://", &format!("://:{SECRET}@"));
    check("redis", "", &["--store", &with_login], &[]);
    // What the environment says of another store is not heeded; how to log in is.
    check(
        "redis",
        "",
        &["--store", &redis.url()],
        &[("REDIS_PASSWORD", SECRET), ("RL_STORAGE_MODE", "postgres"), ("REDIS_ADDR", "127.0.0.1:1")],
    );
    let config = format!(
        "[store]\nmode = \"redis\"\nredis = {{ url = \"{}\", password = \"env:SECRET\", ca_file = \"{}\" }}\n\
         [limits.api]\nunlimited = true\n",
        redis.tls_url(),
        certificates.authority().display()
    );
    check("redis", &config, &["--config", "tollgate.toml"], &[("SECRET", SECRET)]);
    assert_eq!(keys_in(&redis), 1);

    let few = ["--store", &with_login, "--keys", "10", "--seconds", "1"];
    let output = bench("", &few, &[]).output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    for said in
        ["CHECKS/S", "P99", "check_many of 16", "FALLBACKS", "Wrote 10 keys under the limit tollgate-bench-"]
    {
        assert!(stdout.contains(said), "{said}: {stdout}");
    }
    assert!(stdout.ends_with(", and removed them: 0 keys are left.\n"), "{stdout}");
}

#[test]
fn a_cluster_is_measured_by_its_config() {
    let cluster = RedisCluster::start();
    let config = format!("[store]\nmode = \"redis\"\nredis = {{ urls = {:?} }}\n", cluster.urls());
    check("redis", &config, &["--config", "tollgate.toml"], &[]);
    // Replicas follow a moment later.
    let is_primary = |node: &&RedisServer| node.info("replication", "role").as_deref() == Some("master");
    assert_eq!(cluster.nodes().iter().filter(is_primary).map(keys_in).sum::<usize>(), 0);
}

#[test]
fn postgres_is_measured_and_no_row_is_left() {
    let postgres = PostgresServer::builder().scram().start();
    let url = postgres.url("postgres");
    check("postgres", "", &["--store", &url], &[]);
    let bare = url.replace(&format!(":{}@", PostgresServer::PASSWORD), "@");
    let config = format!(
        "[store]\nmode = \"postgres\"\npostgres = {{ url = \"{bare}\", password = \"env:SECRET\" }}\n"
    );
    check("postgres", &config, &["--config", "tollgate.toml"], &[("SECRET", PostgresServer::PASSWORD)]);
    assert_eq!(postgres.psql("select count(*) from tollgate_state"), "0");

    let output = bench("", &["--store", &bare.replace("@", &format!(":{SECRET}@"))], &[]).output().unwrap();
    let (_, stderr) = reported(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("tollgate: error: cannot measure postgres: "), "{stderr}");
}

/// One that has begun to write; it would go on for a long time.
fn under_way(redis: &RedisServer, seconds: &str) -> Child {
    let mut child =
        bench("", &["--store", &redis.url(), "--keys", "100", "--seconds", seconds, "--json"], &[])
            .spawn()
            .unwrap();
    // Its own keys: the look at the server before it begins writes one, too.
    while redis.command(&["KEYS", "*:tollgate-bench-*"]).unwrap().items().is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it wrote anything");
        std::thread::yield_now();
    }
    child
}

#[test]
fn ended_early_it_removes_what_it_wrote() {
    let redis = RedisServer::start();
    for signal in [Signal::TERM, Signal::INT] {
        let child = under_way(&redis, "3600");
        kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        let (report, stderr) = reported(&output);
        assert_eq!((output.status.code(), stderr.as_str()), (Some(0), ""), "{report}");
        assert_eq!((&report["interrupted"], &report["keys_left"]), (&true.into(), &0.into()), "{report}");
        assert_eq!(keys_in(&redis), 0);
    }
}

#[test]
fn killed_it_leaves_only_what_expires_within_a_minute() {
    let redis = RedisServer::start();
    let mut child = under_way(&redis, "3600");
    child.kill().unwrap();
    child.wait().unwrap();
    let keys = redis.command(&["KEYS", "*"]).unwrap();
    assert!(!keys.items().is_empty());
    for key in keys.items() {
        let expires_ms = redis.command(&["PTTL", &key.text()]).unwrap().int().unwrap();
        assert!((1..=60_000).contains(&expires_ms), "{} expires in {expires_ms} ms", key.text());
    }
}

#[test]
fn a_store_that_fails_meanwhile_is_reported() {
    let redis = RedisServer::start();
    let child = under_way(&redis, "8");
    redis.kill();
    let output = child.wait_with_output().unwrap();
    let (report, stderr) = reported(&output);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("tollgate: error: redis failed while it was measured: "), "{stderr}");
    assert!(stderr.contains("of the kind connection"), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    let runs = report["runs"].as_array().unwrap();
    assert!(runs.iter().any(|run| run["fallbacks"].as_u64() > Some(0)), "{report}");
    assert!(runs.len() < 8, "it went on without its store: {report}");
    assert_eq!(report["keys_left"], report["keys_written"]);
    assert!(
        report["failures"].as_array().unwrap().iter().any(|failed| failed["failure"] == "connection"),
        "{report}"
    );
}
