//! What the process writes to its log, and that nobody waits for it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStderr, ChildStdout, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tollgate_testkit::http::Connection;

use crate::collector::Collector;
use crate::server::{self, POLICY, Tollgate, command, home};

/// How long a line may take to be written on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);

const LOGIN: &str = r#"{"limit":"login","key":"user:mallory"}"#;

/// The lines of the log so far; what is reported at the start is for people.
fn lines(server: &Tollgate) -> Vec<Value> {
    let said = server.output();
    let lines = said.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// A line of this kind, as soon as it is there.
pub(crate) fn wait_for_line(server: &Tollgate, is_it: impl Fn(&Value) -> bool) -> Value {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(line) = lines(server).into_iter().find(|line| is_it(line)) {
            return line;
        }
        assert!(Instant::now() < end, "there is no such line: {}", server.output());
        std::thread::yield_now();
    }
}

fn is_decision(line: &Value) -> bool {
    line["target"] == "tollgate::decision"
}

/// Three checks, of which the last is denied, and the lines about decisions that are written of them by the end.
fn decisions(level: &str) -> Vec<Value> {
    let server = server::with(&format!("{level}{POLICY}"), &[], &[("RL_LOG_SALT", "salt")]);
    for _ in 0..3 {
        assert_eq!(server.post("/v1/check", LOGIN).status, 200);
    }
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.output.contains("mallory"), "a key is shown: {ended:?}");
    let lines = ended.output.lines().filter(|line| line.starts_with('{'));
    lines.map(|line| serde_json::from_str(line).expect("JSON")).filter(is_decision).collect()
}

#[test]
fn a_denial_is_one_line_without_the_key() {
    let reported = decisions("");
    assert_eq!(reported.len(), 1, "{reported:?}");
    let line = &reported[0];
    for (field, value) in
        [("level", "INFO"), ("decision", "denied"), ("limiter", "login"), ("storage_mode", "memory")]
    {
        assert_eq!(line[field], value, "{line}");
    }
    let hash = line["key_hash"].as_str().expect("a hash");
    assert!(hash.len() == 32 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{hash}");
}

#[test]
fn the_level_says_which_decisions_are_reported() {
    for (level, expected) in [("off", 0), ("error", 0), ("warn", 0), ("info", 1), ("debug", 3)] {
        let reported = decisions(&format!("[server]\nlog = \"{level}\"\n"));
        assert_eq!(reported.len(), expected, "{level}: {reported:?}");
    }
}

/// The log is on stdout, or where the config says; how much of it is left out is the config's, too.
#[test]
fn the_log_goes_where_the_config_says() {
    let denials = |config: &str| {
        let home = home();
        std::fs::write(home.join("tollgate.toml"), format!("{config}{POLICY}")).unwrap();
        let faces = ["--listen", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
        let args = [&["serve", "--config", "tollgate.toml"], &faces[..]].concat();
        let mut child =
            command(&home, &args, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut said = String::new();
        let address = loop {
            let start = said.len();
            assert_ne!(stderr.read_line(&mut said).unwrap(), 0, "it ended: {said}");
            if let Some((_, rest)) = said[start..].split_once("API    http://") {
                break rest.split('/').next().and_then(|address| address.parse().ok()).expect("an address");
            }
        };
        let mut connection = Connection::open(address);
        for _ in 0..20 {
            connection.ask_with_body("POST", "/v1/check", &["content-type: application/json"], LOGIN);
        }
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let (mut out, mut err) = (String::new(), String::new());
        child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        stderr.read_to_string(&mut err).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let _ = std::fs::remove_dir_all(home);
        [out, err].map(|text| text.matches("\"decision\":\"denied\"").count())
    };
    let [out, err] = denials("");
    assert!((1..18).contains(&out) && err == 0, "{out} {err}");
    assert_eq!(denials("[server]\nlog_all = true\n"), [18, 0], "two of twenty are allowed");
    assert_eq!(denials("[server]\nlog_all = true\nlog_to = \"stderr\"\n"), [0, 18]);
}

/// With `log_all` and `log = "debug"` there is no cap: each of some thousand decisions of a few seconds has its line, allowed or denied.
#[test]
fn a_complete_log_has_every_decision() {
    const KEYS: u64 = 50;
    const EACH: u64 = 80;
    const LIMIT: u64 = 30;
    let policy = format!(
        "[server]\nlog = \"debug\"\nlog_all = true\n[limits.api]\nstrategy = \"fixed_window\"\nlimit = {LIMIT}\nwindow = \"1h\"\n"
    );
    let server = server::with(&policy, &[], &[("RL_LOG_SALT", "salt")]);
    let callers = (0..2).map(|caller| {
        let mut connection = server.connect();
        std::thread::spawn(move || {
            for number in 0..KEYS * EACH / 2 {
                let body = format!("{{\"limit\":\"api\",\"key\":\"user:{caller}-{}\"}}", number % (KEYS / 2));
                let answer =
                    connection.ask_with_body("POST", "/v1/check", &["content-type: application/json"], &body);
                assert_eq!(answer.status, 200, "{answer:?}");
            }
        })
    });
    let callers: Vec<_> = callers.collect();
    callers.into_iter().for_each(|caller| caller.join().expect("its checks are answered"));
    let metrics = server.get("/metrics").body;
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0));
    let lines = ended.output.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<Value> = lines.map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let mut by_key: BTreeMap<&str, [u64; 2]> = BTreeMap::new();
    for line in lines.iter().filter(|line| is_decision(line)) {
        assert!(line["suppressed"].as_u64().is_none_or(|count| count == 0), "{line}");
        let counts = by_key.entry(line["key_hash"].as_str().expect("a hash")).or_default();
        counts[usize::from(line["decision"] == "denied")] += 1;
    }
    assert_eq!(by_key.len() as u64, KEYS);
    for (key, counts) in by_key {
        assert_eq!(counts, [LIMIT, EACH - LIMIT], "{key}: allowed and denied");
    }
    let dropped = metrics.lines().find_map(|line| line.strip_prefix("tollgate_log_lines_dropped_total "));
    assert_eq!(dropped, Some("0"), "{metrics}");
}

/// What a server logs of its traffic is what a backtest replays: the same charges with their costs, denied where they were denied.
#[test]
fn a_complete_log_is_replayed_as_it_was_decided() {
    let policy = "[server]\nlog = \"debug\"\nlog_all = true\n[limits.api]\nstrategy = \"fixed_window\"\nlimit = 10\nwindow = \"1d\"\n";
    let server = server::with(policy, &[], &[("RL_LOG_SALT", "salt")]);
    let costs = [3, 4, 4, 2, 1, 1, 7];
    for (number, cost) in costs.into_iter().enumerate() {
        let path = ["/v1/check", "/v1/reserve"][number % 2];
        let body = format!("{{\"limit\":\"api\",\"key\":\"user:mallory\",\"cost\":{cost}}}");
        assert_eq!(server.post(path, &body).status, 200);
    }
    server.signal(Signal::TERM);
    let log = server.ended().output;
    assert_eq!(log.matches("\"decision\":\"denied\"").count(), 3, "4, then 1 and 7 of nothing: {log}");
    let home = home();
    std::fs::write(home.join("policy.toml"), policy).unwrap();
    let log: String =
        log.lines().filter(|line| line.starts_with('{')).map(|line| format!("{line}\n")).collect();
    std::fs::write(home.join("server.log"), log).unwrap();
    let args = ["backtest", "--config", "policy.toml", "--json", "server.log"];
    let output = command(&home, &args, &[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let summary: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    let _ = std::fs::remove_dir_all(home);
    let counts = ["requests", "denied", "keys", "skipped_lines"].map(|name| &summary[name]);
    assert_eq!(counts, [7, 3, 1, 0], "{summary}");
}

#[test]
fn who_reads_the_config_again_and_who_resets_a_key_is_reported() {
    let server = server::start();
    server.ask("POST", "/v1/reload", &[], "");
    wait_for_line(&server, |line| line["message"] == "the config was read again");
    server.post("/v1/reset", LOGIN);
    let line = wait_for_line(&server, |line| line["message"] == "a key was reset");
    assert_eq!((&line["limiter"], &line["level"]), (&"login".into(), &"INFO".into()));
    assert!(!server.output().contains("mallory"));
}

/// A server whose log nobody need read, and where it is.
fn start(config: &str) -> (Child, ChildStdout, BufReader<ChildStderr>, SocketAddr, std::path::PathBuf) {
    let home = home();
    std::fs::write(home.join("tollgate.toml"), config).unwrap();
    let listen = ["--listen", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let args = [&["serve", "--config", "tollgate.toml"], &listen[..]].concat();
    let mut child = command(&home, &args, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut address = None;
    for line in stderr.by_ref().lines().map(Result::unwrap) {
        if let Some((_, rest)) = line.split_once("API    http://") {
            address = rest.split('/').next().and_then(|address| address.parse().ok());
        }
        if line.trim_start().starts_with("try ") {
            break;
        }
    }
    let log = child.stdout.take().unwrap();
    (child, log, stderr, address.expect("an address"), home)
}

/// The reader of the log is gone, or has stopped reading: checks are answered, reloads are refused, and it ends in order. What is
/// dropped is counted, and one line on stderr says so.
#[test]
fn a_log_that_nobody_takes_holds_nobody_up() {
    for is_closed in [true, false] {
        let (mut child, log, mut stderr, address, home) = start(POLICY);
        let log = (!is_closed).then_some(log);
        let mut connection = Connection::open(address);
        for _ in 0..3 {
            connection.ask_with_body("POST", "/v1/check", &["content-type: application/json"], LOGIN);
        }
        // More than a pipe has room for: a thousand mistakes a time, and each is reported.
        let mistakes: String = (0..1_000).map(|number| format!("mistake{number} = 1\n")).collect();
        std::fs::write(home.join("tollgate.toml"), mistakes).unwrap();
        for _ in 0..20 {
            let answer = connection.ask("POST", "/v1/reload", &[]);
            assert_eq!(answer.status, 400, "closed: {is_closed}");
        }
        for _ in 0..100 {
            let answer =
                connection.ask_with_body("POST", "/v1/check", &["content-type: application/json"], LOGIN);
            assert!(answer.body.contains("\"allowed\":false"), "{answer:?}");
        }
        // What nobody can take any more is dropped; what nobody has taken yet waits.
        if is_closed {
            let mut warning = String::new();
            while !warning.contains("lines of the log were dropped") {
                warning.clear();
                assert_ne!(stderr.read_line(&mut warning).unwrap(), 0, "it ended without a warning");
            }
            let metrics = connection.ask("GET", "/metrics", &[]).body;
            let count =
                metrics.lines().find_map(|line| line.strip_prefix("tollgate_log_lines_dropped_total "));
            assert!(count.and_then(|count| count.parse::<u64>().ok()).expect("a count") > 0, "{metrics}");
        }
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "closed: {is_closed}");
        drop(log);
        let _ = std::fs::remove_dir_all(home);
    }
}

#[test]
fn spans_arrive_at_the_collector_that_the_environment_names() {
    let collector = Collector::start();
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())];
    let server = server::with(POLICY, &[], &environment);
    for _ in 0..3 {
        server.post("/v1/check", LOGIN);
    }
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let spans = collector.spans();
    let reported: Vec<String> = spans
        .iter()
        .map(|span| format!("{} {} {}", span.service, span.name, span.brief(&["limiter", "decision"])))
        .collect();
    let [allowed, denied] =
        ["allowed", "denied"].map(|verdict| format!("tollgate rate_limit.check login {verdict}"));
    assert_eq!(reported, [allowed.clone(), allowed, denied]);
    assert!(spans.iter().all(|span| span.get("key_hash").len() == 32));
    // The line about the denial names the span.
    let line = ended.output.lines().find(|line| line.contains("\"decision\":\"denied\"")).expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["trace_id"], spans[2].trace_id.as_str(), "{line}");
}

#[test]
fn a_collector_that_is_away_is_no_reason_not_to_serve() {
    let environment = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")];
    let server = server::with(POLICY, &[], &environment);
    assert_eq!(server.post("/v1/check", LOGIN).status, 200);
    server.signal(Signal::TERM);
    assert_eq!(server.ended().code, Some(0));
}
