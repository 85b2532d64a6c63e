//! Each example that serves starts on a free port and does what its reader is promised, asked over the network.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

use tollgate_testkit::http::{Answer, Connection};
use tollgate_testkit::redis::RedisServer;
use tonic::Code;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt;

#[path = "examples/built.rs"]
mod built;

const EXAMPLES: [&str; 3] = ["axum", "login", "grpc"];

/// An example that runs until it is dropped.
struct Running {
    process: Child,
    address: SocketAddr,
    /// The first line that it has printed.
    said: String,
    /// Kept open for the others: it cannot print into the void.
    _output: BufReader<ChildStdout>,
}

impl Running {
    /// Starts an example with these variables and no others.
    fn start(name: &str, variables: &[(&str, &str)]) -> Running {
        let mut command = command(name, variables);
        let mut process = command.env("PORT", "0").stdout(Stdio::piped()).spawn().expect("it starts");
        let mut said = String::new();
        let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
        output.read_line(&mut said).expect("text");
        let address = said.strip_prefix("listening on http://").and_then(|rest| {
            let address = rest.split([',', '\n']).next()?;
            address.parse().ok()
        });
        let address = address.unwrap_or_else(|| panic!("{name} does not say where it listens: {said}"));
        Running { process, address, said, _output: output }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn command(name: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(built::built(&EXAMPLES, "axum,config,redis", name));
    command.env_clear().envs(variables.iter().copied());
    command
}

fn left(answer: &Answer) -> Option<&str> {
    answer.field("x-ratelimit-remaining")
}

#[test]
fn axum_limits_users_and_endpoints() {
    let redis = RedisServer::start();
    let redis_address = format!("127.0.0.1:{}", redis.port());
    for (mode, variables) in
        [("memory", &[][..]), ("redis", &[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &*redis_address)])]
    {
        let service = Running::start("axum", variables);
        assert_eq!(service.said.trim_end().rsplit(' ').next(), Some(mode));
        let mut caller = Connection::open(service.address);
        let mut ask =
            |path: &str, key: &str| caller.ask("GET", path, &[&format!("authorization: Bearer {key}")]);
        let item = ask("/items/7", "key-of-ann");
        assert_eq!((item.status, &*item.body, left(&item)), (200, "item 7\n", Some("19")), "{mode}");
        for expected in ["2", "1", "0"] {
            let found = ask("/search", "key-of-ann");
            assert_eq!((found.status, left(&found)), (200, Some(expected)), "{mode}");
        }
        let denied = ask("/search", "key-of-ann");
        assert_eq!(denied.status, 429, "{mode}");
        assert!(denied.body.contains("\"violated-policies\":[\"search\"]"), "{mode}: {denied:?}");
        // Another user has a limit of his own, and all made-up keys of one address have one together.
        assert_eq!(ask("/search", "key-of-bob").status, 200, "{mode}");
        assert_eq!(
            ["a", "b", "c", "d"].map(|key| ask("/search", key).status),
            [200, 200, 200, 429],
            "{mode}"
        );
        let health = caller.ask("GET", "/healthz", &[]);
        assert_eq!((health.status, left(&health)), (200, None), "{mode}");
    }
}

#[test]
fn login_counts_failures_alone() {
    let service = Running::start("login", &[]);
    let mut caller = Connection::open(service.address);
    let mut log_in = |account: &str, password: &str| {
        caller.ask_with_body("POST", "/login", &[&format!("x-account: {account}")], password).status
    };
    for (account, password, status) in [
        ("alice", "open sesame", 200),
        ("alice", "open sesame", 200),
        ("alice", "open sesame", 200),
        ("alice", "open sesame", 200),
        ("alice", "guess", 401),
        ("ALICE", "guess", 401),
        ("  Alice ", "guess", 401),
        // Three failures are enough, and the right password does not help then.
        ("alice", "guess", 429),
        ("alice", "open sesame", 429),
        ("bob", "open sesame", 200),
    ] {
        assert_eq!(log_in(account, password), status, "{account} {password}");
    }
    // Seven more of one address, whatever the account.
    let statuses: Vec<u16> = (0..8).map(|number| log_in(&format!("user{number}"), "guess")).collect();
    assert_eq!(statuses, [401, 401, 401, 401, 401, 401, 401, 429]);
}

#[test]
fn a_login_that_nobody_counts_is_closed() {
    let address = format!("127.0.0.1:{}", tollgate_testkit::free_port());
    let service = Running::start("login", &[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)]);
    let answer = Connection::open(service.address).ask_with_body(
        "POST",
        "/login",
        &["x-account: alice"],
        "open sesame",
    );
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.field("retry-after").is_some(), "{answer:?}");
}

#[tokio::test]
async fn grpc_calls_are_refused_in_their_own_protocol() {
    let service = Running::start("grpc", &[]);
    let endpoint = Endpoint::try_from(format!("http://{}", service.address)).expect("an address");
    let mut client = HealthClient::new(endpoint.connect().await.expect("it listens"));
    for left in ["2", "1", "0"] {
        let answer = client.check(HealthCheckRequest::default()).await.expect("healthy");
        assert_eq!(answer.metadata().get("x-ratelimit-remaining").expect("it is reported"), left);
    }
    let refused = client.check(HealthCheckRequest::default()).await.expect_err("over the limit");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    assert!(refused.message().starts_with("checks allows 3 per 1m window; retry after "), "{refused:?}");
    let details = refused.get_error_details();
    let wait = details.retry_info().and_then(|info| info.retry_delay).expect("when to try again");
    assert!((1..=60).contains(&wait.as_secs()), "{wait:?}");
    let violations = &details.quota_failure().expect("what was exceeded").violations;
    assert_eq!(violations.iter().map(|one| one.subject.as_str()).collect::<Vec<_>>(), ["checks"]);
    assert!(refused.metadata().get("retry-after").is_some(), "{refused:?}");
}

#[test]
fn what_cannot_start_says_so_in_one_line() {
    for (name, variables) in [
        ("axum", [("PORT", "many")]),
        ("login", [("PORT", "-1")]),
        ("grpc", [("PORT", "65536")]),
        ("axum", [("RL_STORAGE_MODE", "paper")]),
    ] {
        let output = command(name, &variables).output().expect("it runs");
        let errors = String::from_utf8(output.stderr).expect("text");
        assert_eq!(output.status.code(), Some(1), "{name}: {errors}");
        assert!(errors.contains(variables[0].1) && !errors.contains("panicked"), "{name}: {errors}");
    }
}
