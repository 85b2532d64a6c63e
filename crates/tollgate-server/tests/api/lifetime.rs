//! A server from its start to its end: a config that changes under it, and signals.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::server::{self, POLICY, Tollgate};

/// How long a change may take to be noticed on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(30);

fn about(server: &Tollgate) -> Value {
    serde_json::from_str(&server.get("/v1/server").body).expect("JSON")
}

/// Asks until it is so.
fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is_so() {
        assert!(Instant::now() < end, "not so after {TIMEOUT:?}: {what}");
        std::thread::yield_now();
    }
}

fn remaining(server: &Tollgate) -> Value {
    let body = server.get("/v1/status?limit=login&key=user:1").body;
    serde_json::from_str::<Value>(&body).expect("JSON")["remaining"].clone()
}

#[test]
fn a_changed_config_is_followed_and_what_was_consumed_stays_so() {
    let server = server::start();
    server.post("/v1/check", r#"{"limit":"login","key":"user:1"}"#);
    assert_eq!(remaining(&server), 1);
    server.write_config(&POLICY.replace("limit = 2\nwindow", "limit = 5\nwindow"));
    wait_for("the file was read", || remaining(&server) == 4);
    // Once more, at once, by asking for it.
    server.write_config(&POLICY.replace("limit = 2\nwindow", "limit = 9\nwindow"));
    let change = "~ limit login: 5 per 1h window -> 9 per 1h window";
    let reloaded = format!(r#"{{"changes":["{change}"],"reloaded":true,"restart":[]}}"#);
    assert_eq!(server.ask("POST", "/v1/reload", &[], "").body, reloaded);
    wait_for("the log says what changed", || server.output().contains(&format!("\"changes\":\"{change}\"")));
    assert_eq!(remaining(&server), 8);
    assert!(server.get("/metrics").body.contains("tollgate_config_refused 0"));
}

/// A change of `[server]` kept the limits of the same file from being applied, and did not say which field it was.
#[test]
fn limits_are_applied_beside_fields_that_need_a_restart() {
    let server = server::start();
    let policy = POLICY.replace("limit = 2\nwindow", "limit = 5\nwindow");
    let changed = "[server]\nhttp = \"127.0.0.1:1\"\n[store]\nmax_keys = 1000\n";
    server.write_config(&format!("{changed}{policy}"));
    let answer = server.ask("POST", "/v1/reload", &[], "");
    assert_eq!(
        answer.body,
        r#"{"changes":["~ limit login: 2 per 1h window -> 5 per 1h window"],"reloaded":true,"restart":["server.http","store.max_keys"]}"#
    );
    assert_eq!(remaining(&server), 5);
    let about = about(&server);
    let last = about["reloads"].as_array().and_then(|reloads| reloads.last()).expect("a reload");
    assert_eq!((&last["refused"], &last["restart"][0]), (&Value::Null, &"server.http".into()), "{about}");
    // Until the restart each reload says so.
    assert!(server.ask("POST", "/v1/reload", &[], "").body.contains("server.http"));
    let log = server.stop().output;
    assert!(log.contains("\"fields\":\"server.http, store.max_keys\""), "{log}");
}

#[test]
fn limits_that_went_away_are_reported() {
    let server = server::start();
    server.reload("limits.login.blocked = true");
    let reported = server.stop().output;
    let line = reported.lines().find(|line| line.contains("limits went away")).expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["level"], "WARN", "{line}");
    assert_eq!(line["limits"], "api, watched, uploads, even, free, shut", "{line}");
}

#[test]
fn sighup_reads_it_again() {
    let server = server::start();
    assert_eq!(about(&server)["reloads"].as_array().map(Vec::len), Some(0));
    server.signal(Signal::HUP);
    wait_for("it was read again", || about(&server)["reloads"].as_array().map(Vec::len) == Some(1));
    assert_eq!(about(&server)["reloads"][0]["refused"], Value::Null);
}

/// The server used to look at the file for the first time when its store was open, and took what was there by then for read.
#[test]
fn a_config_that_changes_while_the_server_starts_is_followed() {
    let store = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = store.local_addr().expect("an address");
    let config = |limit: &str| {
        format!(
            "store = {{ mode = 'redis', redis = {{ url = 'redis://{url}' }} }}\nlimits.{limit}.blocked = true\n"
        )
    };
    let file = server::home().join("policy.toml");
    std::fs::write(&file, config("before")).expect("written");
    let args = ["--config".to_owned(), file.display().to_string()];
    let after = config("after");
    // The config has been read when the store is first asked, and the start goes on when this store hangs up.
    let change = std::thread::spawn(move || {
        let asked = store.accept().expect("asked");
        std::fs::write(file, after).expect("written");
        drop(asked);
    });
    let server = server::builder().args(args).start();
    change.join().expect("changed");
    wait_for("the change was read", || server.get("/v1/limits").body.contains("\"after\""));
}

/// Who asks for a reload is reported all of it, everybody else no key.
#[test]
fn a_refused_config_is_told_without_the_keys_of_its_overrides() {
    let server = server::start();
    server
        .write_config(&POLICY.replace(r#""user:vip" = { burst = 30 }"#, r#""alice@x.com" = { burst = 0 }"#));
    let answer = server.ask("POST", "/v1/reload", &[], "").body;
    assert!(answer.contains(r#"limits.api.overrides.\"alice@x.com\".burst = 0"#), "{answer}");
    for path in ["/v1/server", "/v1/snapshot"] {
        let shown = server.get(path).body;
        assert!(
            shown.contains(r#"limits.api.overrides.\"…\".burst = 0: must be at least 1"#),
            "{path}: {shown}"
        );
        assert!(!shown.contains("alice"), "{path}: {shown}");
    }
    let reported = server.stop().output;
    assert!(reported.contains("the config stays as it was") && !reported.contains("alice"), "{reported}");
}

/// A pipe is empty after the start, and would be a policy without limits; one that is open for writing would be waited for.
#[test]
fn a_config_from_a_pipe_is_not_read_again() {
    let pipe = server::home().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let writer = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::write(pipe, POLICY).expect("it is read")
    });
    let server = server::builder().args(["--config".to_owned(), pipe.display().to_string()]).start();
    writer.join().expect("written");
    let answer = server.ask("POST", "/v1/reload", &[], "");
    assert_eq!(answer.status, 400, "{}", answer.body);
    assert!(answer.body.contains("was read from a pipe, and cannot be read again"), "{}", answer.body);
    server.signal(Signal::HUP);
    wait_for("the signal is answered", || server.output().matches("cannot be read again").count() == 2);
    assert_eq!(remaining(&server), 2);
    assert!(!server.get("/metrics").body.contains("tollgate_config_refused 1"));
}

#[test]
fn a_broken_config_changes_nothing_and_is_reported() {
    let server = server::start();
    for (broken, said) in [
        (POLICY.replace("limit = 2", "limit = 0"), "limits.login.limit"),
        ("[limits".to_owned(), "line 1"),
        // As an editor leaves it for a moment.
        (String::new(), "it has no limits; the one in force has 7"),
    ] {
        server.write_config(&broken);
        let answer = server.ask("POST", "/v1/reload", &[], "");
        assert_eq!(answer.status, 400, "{said}: {}", answer.body);
        assert!(answer.body.contains(said), "{said}: {}", answer.body);
        let about = about(&server);
        let last = about["reloads"].as_array().and_then(|reloads| reloads.last()).expect("a reload");
        assert!(last["refused"].as_str().is_some_and(|why| why.contains(said)), "{said}: {about}");
        let metrics = server.get("/metrics").body;
        assert!(metrics.contains("tollgate_config_refused 1"), "{metrics}");
        assert!(metrics.contains("tollgate_reloads_total{outcome=\"refused\"}"), "{metrics}");
        assert_eq!(remaining(&server), 2, "the last good one stays");
    }
    // It comes to itself with the file.
    server.write_config(POLICY);
    assert_eq!(server.ask("POST", "/v1/reload", &[], "").status, 200);
    assert!(server.get("/metrics").body.contains("tollgate_config_refused 0"));
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert!(ended.output.contains("the config stays as it was"), "{ended:?}");
}

/// What has begun is answered, and then the process ends in order.
#[test]
fn signals_end_it_in_order() {
    for signal in [Signal::TERM, Signal::INT] {
        let server = server::start();
        let mut idle = server.connect();
        assert_eq!(idle.ask("GET", "/healthz", &[]).status, 200);
        // A request whose body is still to come.
        let mut busy = server.connect();
        let body = r#"{"limit":"api","key":"user:1"}"#;
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\nexpect: 100-continue\r\n\r\n",
            body.len()
        );
        busy.send(head.as_bytes()).unwrap();
        assert_eq!(busy.receive(false).unwrap().status, 100, "it waits for the body");
        server.signal(signal);
        // Who is idle is hung up on, which says that the signal has arrived.
        assert!(idle.receive(false).is_err());
        busy.send(body.as_bytes()).unwrap();
        let answer = busy.receive(false).unwrap();
        assert!(answer.body.contains("\"remaining\":2"), "{answer:?}");
        let ended = server.ended();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(!ended.output.contains("were still busy"), "{ended:?}");
    }
}

/// A request that never comes to its end holds the end up, unless it is asked for twice.
#[test]
fn whoever_says_it_twice_need_not_wait() {
    let server = server::start();
    let mut idle = server.connect();
    assert_eq!(idle.ask("GET", "/healthz", &[]).status, 200);
    let mut busy = server.connect();
    busy.send(b"POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\nexpect: 100-continue\r\n\r\n")
        .unwrap();
    assert_eq!(busy.receive(false).unwrap().status, 100, "it waits for the body");
    server.signal(Signal::TERM);
    assert!(idle.receive(false).is_err(), "the first signal has arrived");
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.output.contains("a second stop signal"), "{ended:?}");
}

/// The listener closed with the first signal, so that a balancer met closed doors before it could learn that they would be.
#[test]
fn with_a_delay_it_says_that_it_is_not_ready_and_answers_until_then() {
    let server = server::with(&format!("[server]\ndrain_delay = \"10m\"\n{POLICY}"), &[], &[]);
    assert_eq!(server.get("/readyz").body, "ready\n");
    let mut kept = server.connect();
    assert_eq!(kept.ask("GET", "/healthz", &[]).status, 200);
    server.signal(Signal::TERM);
    wait_for("a new connection sees it", || server.get("/readyz").status == 503);
    assert_eq!(server.get("/readyz").body, "draining\n");
    assert_eq!(about(&server)["draining"], true);
    let check = server.post("/v1/check", r#"{"limit":"api","key":"user:1"}"#);
    assert!(check.status == 200 && check.body.contains("\"remaining\":2"), "{check:?}");
    assert_eq!(kept.ask("GET", "/healthz", &[]).status, 200, "who is inside stays");
    // Over the other faces as well, to who comes anew.
    let mut resp = std::net::TcpStream::connect(server.resp()).expect("it listens");
    std::io::Write::write_all(&mut resp, b"*1\r\n$4\r\nPING\r\n").expect("room");
    let mut pong = [0; 7];
    std::io::Read::read_exact(&mut resp, &mut pong).expect("an answer");
    assert_eq!(&pong, b"+PONG\r\n");
    // What it was reported twice it does at once.
    server.signal(Signal::TERM);
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.output.contains("not ready any more, but still answering"), "{ended:?}");
    assert!(ended.output.contains("a second stop signal"), "{ended:?}");
    // And when the time is over it ends by itself.
    let server = server::with(&format!("[server]\ndrain_delay = \"100ms\"\n{POLICY}"), &[], &[]);
    let ended = server.stop();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.output.contains("a second stop signal"), "{ended:?}");
}

/// However many requests come while it ends: every response is complete.
#[test]
fn under_load_it_ends_in_order_too() {
    let server = server::start();
    let address = server.http();
    let served = Arc::new(AtomicUsize::new(0));
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let served = served.clone();
            std::thread::spawn(move || {
                let mut connection = tollgate_testkit::http::Connection::open(address);
                let body = format!(r#"{{"limit":"free","key":"user:{worker}"}}"#);
                let request = format!(
                    "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                let mut answered = 0;
                while connection.send(request.as_bytes()).is_ok() {
                    match connection.receive(false) {
                        Ok(answer) => assert_eq!(answer.status, 200),
                        // Hung up on between two requests; half an answer would be another error.
                        Err(error) => {
                            use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
                            let kind = error.kind();
                            assert!(matches!(kind, UnexpectedEof | ConnectionReset | BrokenPipe), "{error}");
                            break;
                        }
                    }
                    answered += 1;
                    if answered == 1 {
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                }
            })
        })
        .collect();
    wait_for("all are served", || served.load(Ordering::Relaxed) == workers.len());
    server.signal(Signal::TERM);
    workers.into_iter().for_each(|worker| worker.join().unwrap());
    let ended = server.ended();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}
