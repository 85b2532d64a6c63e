//! A config that changes a thousand times while its limits are charged over all faces, and one that is broken.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_testkit::hostile::{Answered, CLIENTS};

use crate::peers::faces;
use crate::server::{self, Tollgate};

/// How long a change may take to be shown on a loaded machine.
const TIMEOUT: Duration = Duration::from_secs(60);

const RELOADS: u64 = 1_000;

/// What both limits allow in the end, and never more before.
const CAPACITY: u64 = 10_000;

/// The config at a step. What is allowed goes up and down, always near what was consumed so far; other limits come, go and
/// change around it.
fn config(step: u64) -> String {
    let so_far = CAPACITY * (step + 1) / (RELOADS + 1);
    let capacity = if step % 3 == 2 { so_far.div_ceil(2) } else { so_far };
    let extra = if step.is_multiple_of(2) {
        "[limits.extra]\nstrategy = \"sliding_window\"\nlimit = 3\nwindow = \"1m\"\n"
    } else {
        ""
    };
    format!(
        r#"
[limits.window]
strategy = "fixed_window"
limit = {capacity}
window = "1d"

{extra}
[limits.other]
strategy = "leaky_bucket"
rate = "{}/s"
capacity = 5
shadow = {}

[limits.bucket]
strategy = "token_bucket"
rate = "1/d"
burst = {capacity}

[[envoy]]
domain = "edge"
entries = ["window"]
shared = ["window"]
limit = "window"

[[envoy]]
domain = "edge"
entries = ["bucket"]
shared = ["bucket"]
limit = "bucket"
"#,
        step % 7 + 1,
        step.is_multiple_of(5),
    )
}

/// Envoy's key is made from its entries; the others are reported it, so that all charge one state.
fn key_of(limit: &str) -> String {
    format!("edge:{limit}*=")
}

#[test]
fn a_thousand_reloads_lose_no_quota_and_make_none() {
    let server = server::with(&config(0), &[], &[]);
    let faces = faces(&server);
    let is_last = AtomicBool::new(false);
    let is_last = &is_last;
    let allowed = std::thread::scope(|scope| {
        let mut clients = Vec::new();
        for limit in ["window", "bucket"] {
            for (face, make) in CLIENTS {
                let mut client = make(&faces, limit, &key_of(limit));
                let charge = move || {
                    let mut allowed = 0;
                    loop {
                        // Looked at before the answer: what is denied under the last config stays so.
                        let is_last = is_last.load(Ordering::Acquire);
                        match client.charge() {
                            Ok(Answered::Allowed) => allowed += 1,
                            Ok(Answered::Denied) if is_last => return allowed,
                            Ok(Answered::Denied) => {}
                            other => panic!("{face}: {other:?}"),
                        }
                    }
                };
                clients.push((limit, scope.spawn(charge)));
            }
        }
        let mut connection = server.connect();
        for step in 1..=RELOADS {
            server.write_config(&config(step));
            let answer = connection.ask("POST", "/v1/reload", &[]);
            let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
            let is_applied = answer.status == 200 && body["reloaded"] == true && body["restart"] == json!([]);
            if !is_applied {
                // Clients go on until the last config.
                is_last.store(true, Ordering::Release);
            }
            assert!(is_applied, "step {step}: {} {}", answer.status, answer.body);
        }
        assert!(config(RELOADS).contains(&format!("limit = {CAPACITY}\n")));
        is_last.store(true, Ordering::Release);
        let mut allowed = [0, 0];
        for (limit, client) in clients {
            allowed[usize::from(limit == "bucket")] += client.join().expect("no failure");
        }
        allowed
    });
    assert_eq!(allowed, [CAPACITY; 2], "of window and bucket");
    for limit in ["window", "bucket"] {
        let status = server.get(&format!("/v1/status?limit={limit}&key={}", key_of(limit))).body;
        assert!(status.contains("\"remaining\":0,"), "{limit}: {status}");
    }
    let metrics = server.get("/metrics").body;
    assert!(!metrics.contains("tollgate_reloads_total{outcome=\"refused\"}"), "{metrics}");
}

/// Waits until the last reload is reported so, here and on the page, which looks once a second.
fn wait_for_last(server: &Tollgate, is_so: impl Fn(&Value) -> bool) {
    let end = Instant::now() + TIMEOUT;
    for path in ["/v1/server", "/v1/snapshot"] {
        loop {
            let reported: Value = serde_json::from_str(&server.get(path).body).expect("JSON");
            let last = reported["reloads"].as_array().and_then(|reloads| reloads.last()).cloned();
            if last.as_ref().is_some_and(|last| is_so(&last["refused"])) {
                break;
            }
            assert!(Instant::now() < end, "{path}: {last:?}");
            std::thread::yield_now();
        }
    }
}

#[test]
fn a_broken_config_is_reported_everywhere_until_a_better_one_comes() {
    let server = server::with(&config(0), &[], &[]);
    let mut client = CLIENTS[0].1(&faces(&server), "window", "user:1");
    server.write_config(&config(0).replace("window = \"1d\"", "window = \"1 fortnight\""));
    let said = "limits.window.window";
    assert_eq!(server.ask("POST", "/v1/reload", &[], "").status, 400);
    wait_for_last(&server, |refused| refused.as_str().is_some_and(|why| why.contains(said)));
    assert!(server.get("/metrics").body.contains("tollgate_config_refused 1"));
    assert_eq!(client.charge().expect("an answer"), Answered::Allowed, "the last good one serves");
    let line = crate::log::wait_for_line(&server, |line| line["target"] == "tollgate_server::reload");
    assert_eq!(line["level"], "ERROR");
    assert!(line["message"].as_str().is_some_and(|message| message.contains(said)), "{line}");
    server.write_config(&config(RELOADS));
    assert_eq!(server.ask("POST", "/v1/reload", &[], "").status, 200);
    wait_for_last(&server, Value::is_null);
    assert!(server.get("/metrics").body.contains("tollgate_config_refused 0"));
}

/// Somebody deletes the file, and nobody would notice before the next restart, which fails.
#[test]
fn a_config_that_is_gone_is_reported_until_it_is_back() {
    let server = server::with(&config(0), &[], &[]);
    let mut client = CLIENTS[0].1(&faces(&server), "window", "user:1");
    std::fs::remove_file(server.home().join("tollgate.toml")).expect("removed");
    wait_for_last(&server, |refused| {
        refused.as_str().is_some_and(|why| why.contains("the config file is gone"))
    });
    let line = crate::log::wait_for_line(&server, |line| line["target"] == "tollgate_server::reload");
    assert_eq!(line["level"], "WARN", "{line}");
    assert!(server.get("/metrics").body.contains("tollgate_config_refused 1"));
    assert_eq!(client.charge().expect("an answer"), Answered::Allowed, "the last good one serves");
    // Told once, and read when it is back.
    server.write_config(&config(RELOADS));
    wait_for_last(&server, Value::is_null);
    assert!(server.get("/metrics").body.contains("tollgate_config_refused 0"));
    let status = server.get("/v1/limits").body;
    assert!(status.contains(&format!("\"capacity\":{CAPACITY}")), "{status}");
    assert_eq!(server.output().matches("the config file is gone").count(), 1, "{}", server.output());
}
