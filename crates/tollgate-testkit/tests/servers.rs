//! The servers really start, do what the faults say, and leave nothing behind.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::prometheus::{Prometheus, promtool};
use tollgate_testkit::redis::{Client, RedisServer, Value};
use tollgate_testkit::tls::Certificates;

fn text(server: &RedisServer, command: &[&str]) -> String {
    server.command(command).unwrap().text()
}

fn is_running(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[test]
fn redis_answers_and_speaks_all_kinds_of_values() {
    let server = RedisServer::start();
    assert_eq!(server.command(&["PING"]), Ok(Value::Status("PONG".to_owned())));
    assert_eq!(server.command(&["INCRBY", "count", "41"]), Ok(Value::Int(41)));
    assert_eq!(server.command(&["GET", "nothing"]), Ok(Value::Nil));
    assert_eq!(server.command(&["SET", "line", "a\r\nb"]).unwrap().text(), "OK");
    assert_eq!(server.command(&["GET", "line"]), Ok(Value::Bulk(b"a\r\nb".to_vec())));
    let nested = server.command(&["EVAL", "return {1, {'two', false}, redis.error_reply('E three')}", "0"]);
    let inner = Value::Array(vec![Value::Bulk(b"two".to_vec()), Value::Nil]);
    let outer = Value::Array(vec![Value::Int(1), inner, Value::Error("E three".to_owned())]);
    assert_eq!(nested, Ok(outer));
    assert!(server.command(&["NOSUCH"]).unwrap_err().contains("unknown command"));
    assert_eq!(server.command(&["GET", "count"]).unwrap().int(), Some(41));
    assert_eq!(text(&server, &["CONFIG", "GET", "appendonly"]), "appendonly\nno");
    assert_eq!(server.info("server", "process_id"), server.pid().map(|pid| pid.to_string()));
    assert_eq!(server.command(&["DEBUG", "SLEEP", "0"]).unwrap().text(), "OK");
}

#[test]
fn redis_is_asked_thousands_of_times_quickly() {
    let server = RedisServer::start();
    let start = Instant::now();
    for expected in 1..=5000 {
        assert_eq!(server.command(&["INCR", "n"]), Ok(Value::Int(expected)));
    }
    assert!(start.elapsed() < Duration::from_secs(10), "5000 commands took {:?}", start.elapsed());
}

#[test]
fn killed_redis_comes_back_empty_on_its_port() {
    let server = RedisServer::start();
    let (port, pid) = (server.port(), server.pid().unwrap());
    server.command(&["SET", "key", "value"]).unwrap();
    server.kill();
    assert!(!is_running(pid));
    assert_eq!(server.pid(), None);
    assert!(server.command(&["PING"]).is_err());
    server.restart();
    assert_eq!(server.port(), port);
    assert_eq!(server.command(&["GET", "key"]), Ok(Value::Nil));
    assert_ne!(server.pid(), Some(pid));
}

#[test]
fn frozen_redis_is_silent_and_goes_on_where_it_was() {
    let server = RedisServer::start();
    server.command(&["SET", "key", "value"]).unwrap();
    server.stop();
    // The kernel accepts the connection for it; no answer comes.
    let mut client = Client::connect(server.port(), Duration::from_millis(50)).unwrap();
    client.call(&["PING"]).unwrap_err();
    server.resume();
    assert_eq!(text(&server, &["GET", "key"]), "value");
}

#[test]
fn redis_wants_its_password_and_keeps_to_its_users() {
    let server = RedisServer::builder()
        .password("secret")
        .user("reader", "on >word ~* &* +get +ping")
        .arguments(["--maxmemory", "3mb"])
        .start();
    assert_eq!(text(&server, &["CONFIG", "GET", "maxmemory"]), "maxmemory\n3145728");
    let mut stranger = Client::connect(server.port(), Duration::from_secs(5)).unwrap();
    assert!(stranger.call(&["GET", "key"]).unwrap().unwrap_err().starts_with("NOAUTH"));
    stranger.call(&["AUTH", "reader", "word"]).unwrap().unwrap();
    assert_eq!(stranger.call(&["GET", "key"]).unwrap(), Ok(Value::Nil));
    assert!(stranger.call(&["SET", "key", "1"]).unwrap().unwrap_err().starts_with("NOPERM"));
}

#[test]
fn dropped_servers_leave_nothing_behind() {
    let server = RedisServer::start();
    let (pid, dir) = (server.pid().unwrap(), text(&server, &["CONFIG", "GET", "dir"]));
    let dir = dir.lines().nth(1).unwrap().to_owned();
    assert!(Path::new(&dir).exists());
    server.stop();
    drop(server);
    assert!(!is_running(pid) && !Path::new(&dir).exists());

    let server = PostgresServer::start();
    let (pid, dir) = (server.pid().unwrap(), server.psql("show data_directory"));
    server.stop();
    drop(server);
    assert!(!is_running(pid) && !Path::new(&dir).exists());
}

/// The client that comes with OpenSSL, asking for `PING` over TLS.
fn ping_over_tls(port: u16, arguments: &[&Path]) -> String {
    let mut client = Command::new("openssl");
    client.args(["s_client", "-quiet", "-verify_return_error", "-verify_hostname", "localhost"]);
    client.args(["-connect", &format!("127.0.0.1:{port}"), "-CAfile"]).args(&arguments[..1]);
    if let [_, certificate, key] = arguments {
        client.arg("-cert").arg(certificate).arg("-key").arg(key);
    }
    let mut child =
        client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    use std::io::Write;
    // QUIT makes the server close, which ends the client. A client that refused the server is gone already.
    let _ = child.stdin.as_mut().unwrap().write_all(b"PING\r\nQUIT\r\n");
    String::from_utf8_lossy(&child.wait_with_output().unwrap().stdout).into_owned()
}

#[test]
fn redis_speaks_tls_to_those_who_trust_its_authority() {
    let certificates = Certificates::generate();
    let server = RedisServer::builder().tls(&certificates).arguments(["--tls-auth-clients", "yes"]).start();
    let (ours, other) = (certificates.authority(), certificates.other_authority());
    let (certificate, key) = (certificates.client_certificate(), certificates.client_key());
    let port = server.tls_port().unwrap();
    assert_eq!(server.tls_url(), format!("rediss://localhost:{port}"));
    assert!(ping_over_tls(port, &[&ours, &certificate, &key]).starts_with("+PONG"));
    assert_eq!(ping_over_tls(port, &[&other, &certificate, &key]), "");
    assert!(!ping_over_tls(port, &[&ours]).contains("PONG"), "no client certificate, no answer");
}

#[test]
fn postgres_answers_and_survives_a_kill() {
    let server = PostgresServer::start();
    assert_eq!(server.psql("show fsync"), "on");
    assert_eq!(server.url("postgres"), format!("postgres://postgres@127.0.0.1:{}/postgres", server.port()));
    server.psql("create table t (n int); insert into t values (7)");
    assert_eq!(server.psql("select n, n + 1 from t"), "7|8");
    assert!(server.try_psql("select nonsense").unwrap_err().contains("nonsense"));
    let pid = server.pid().unwrap();
    server.kill();
    assert!(!is_running(pid));
    assert!(server.try_psql("select 1").is_err());
    server.restart();
    assert_eq!(server.psql("select n from t"), "7");
}

#[test]
fn frozen_postgres_is_silent_and_goes_on() {
    let server = PostgresServer::start();
    let mut sleeper = Command::new("psql");
    sleeper.args([
        "-X",
        "-A",
        "-t",
        "-d",
        &server.url("postgres"),
        "-c",
        "select 'awake' from pg_sleep(0.1)",
    ]);
    server.stop();
    let mut sleeper = sleeper.stdout(Stdio::piped()).spawn().unwrap();
    // Nothing to await here: what is shown is that nothing happens.
    std::thread::sleep(Duration::from_millis(400));
    assert!(sleeper.try_wait().unwrap().is_none());
    server.resume();
    assert_eq!(String::from_utf8(sleeper.wait_with_output().unwrap().stdout).unwrap().trim(), "awake");
}

#[test]
fn a_killed_backend_takes_the_others_with_it_and_the_server_recovers() {
    let server = PostgresServer::start();
    assert_eq!(server.kill_one_backend(), None);
    let mut sleeper = Command::new("psql");
    sleeper.args(["-X", "-d", &server.url("postgres"), "-c", "select pg_sleep(60)"]);
    let sleeper = sleeper.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while server.kill_one_backend().is_none() {
        assert!(start.elapsed() < Duration::from_secs(20), "psql never connected");
    }
    let output = sleeper.wait_with_output().unwrap();
    assert!(!output.status.success());
    server.wait_until_ready();
    assert_eq!(server.psql("select 1"), "1");
}

#[test]
fn postgres_asks_for_passwords_and_certificates() {
    let certificates = Certificates::generate();
    let access = "hostssl all cert 127.0.0.1/32 trust clientcert=verify-ca\n\
                  host all postgres 127.0.0.1/32 scram-sha-256\n";
    let server = PostgresServer::builder()
        .scram()
        .tls(&certificates)
        .access(access)
        .setting("max_connections", "23")
        .start();
    assert_eq!(server.psql("show max_connections"), "23");
    assert_eq!(server.psql("show ssl"), "on");
    server.psql("create role cert login");
    let select = |url: &str| {
        let output =
            Command::new("psql").args(["-X", "-A", "-t", "-w", "-d", url, "-c", "select 1"]).output();
        String::from_utf8(output.unwrap().stdout).unwrap()
    };
    let port = server.port();
    assert_eq!(select(&server.url("postgres")), "1\n");
    assert_eq!(select(&format!("postgres://postgres:wrong@127.0.0.1:{port}/postgres")), "");
    let with = |authority: &Path| {
        format!(
            "postgres://cert@127.0.0.1:{port}/postgres?sslmode=verify-full&sslrootcert={}&sslcert={}&sslkey={}",
            authority.display(),
            certificates.client_certificate().display(),
            certificates.client_key().display()
        )
    };
    assert_eq!(select(&with(&certificates.authority())), "1\n");
    assert_eq!(select(&with(&certificates.other_authority())), "");
    assert_eq!(select(&format!("postgres://cert@127.0.0.1:{port}/postgres?sslmode=disable")), "");
}

#[test]
fn a_server_that_is_not_installed_is_a_failure_that_says_what_to_do() {
    let start = || RedisServer::builder().binary("/nowhere/redis-server").start();
    let panic = std::panic::catch_unwind(start).err().unwrap();
    let message = panic.downcast_ref::<String>().unwrap();
    assert_eq!(message, "redis-server is not installed: run apt-get install -y redis-server");
}

#[test]
fn prometheus_scrapes_and_says_what_is_wrong() {
    let nobody = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    let prometheus = Prometheus::builder().target(nobody).start();
    let limit = Duration::from_secs(30);
    prometheus.wait_for(limit, |prometheus| match prometheus.number("up{job='tollgate'}")? {
        Some(0.0) => Ok(()),
        other => Err(format!("nobody is there, and up is {other:?}")),
    });
    let targets = prometheus.targets().unwrap();
    assert_eq!(targets.len(), 1);
    assert!(targets[0]["lastError"].as_str().is_some_and(|error| error.contains("refused")), "{targets:?}");
    assert_eq!(prometheus.rules(), Ok(Vec::new()));
    assert_eq!(prometheus.query("absent(up)"), Ok(Vec::new()));
    assert_eq!(prometheus.number("sum(1 < bool vector(2))"), Ok(Some(1.0)));
    assert!(prometheus.query("sum(up").unwrap_err().contains("parse error"));
    assert!(promtool(Path::new("/"), &["check", "rules", "/nowhere.yml"]).is_err());
}
