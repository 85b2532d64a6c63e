//! The decision log: what is in a line, which lines there are, and that no log can hold a decision up.

use std::io::{self, Write};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate::config::Config;
use tollgate::store::{Failure, StoreState};
use tollgate::telemetry::{LogDecisions, json_lines_to};
use tollgate::{Charge, Fallback, Limiter, ManualClock, Rule, Tollgate};
use tollgate_testkit::redis::RedisServer;
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::crowd::ready;
use crate::faulty_store::{Fault, FaultyStore};
use crate::page::{Page, brief, logged};
use crate::scene::{a_minute, at_once, bucket, charged, hands, on, secs};
use crate::scrape::Scrape;

fn logging(hands: &ManualClock, scrape: &Scrape, decisions: LogDecisions) -> Tollgate {
    let rules = [
        Rule::new("api", a_minute(2)).unwrap(),
        Rule::new("watching", bucket("1/h", 1)).unwrap().shadow(),
        Rule::new("workers", at_once(1)).unwrap(),
        Rule::blocked("shut").unwrap(),
    ];
    let builder = rules.into_iter().fold(on(hands), tollgate::TollgateBuilder::rule);
    builder.telemetry(scrape.telemetry().log(decisions)).build().unwrap()
}

#[test]
fn a_line_has_exactly_these_fields() {
    let (hands, scrape) = (hands(), Scrape::new());
    let gate = logging(&hands, &scrape, LogDecisions::All);
    let mut lines = logged(|| {
        let api = gate.local("api").unwrap();
        let _ = api.charge("user:1", 2).unwrap();
        let _ = api.check("user:1");
        let _ = gate.local("shut").unwrap().check("user:1");
        let _ = api.check("user:1:2:3");
    });
    // The library's own warning of a malformed key stands before the line of the decision.
    assert_eq!(lines.remove(3)["target"], "tollgate::engine");
    let expected = |decision: &str, limiter: &str, strategy: &str, source: &str, cost: u64| {
        json!({
            "level": "INFO", "target": "tollgate::decision", "message": "decided", "operation": "charge",
            "decision": decision, "limiter": limiter, "strategy": strategy, "storage_mode": "memory",
            "source": source, "cost": cost, "suppressed": 0,
        })
    };
    // HMAC-SHA-256 of `user:1` under the key `salt`, as any other program computes it.
    let hash = "c980697a019f663de0e0ae81cc35fece";
    let with = |mut line: Value, rest: &[(&str, Value)]| {
        rest.iter().for_each(|(name, value)| line[*name] = value.clone());
        line
    };
    let retry = |millis: u64| ("retry_after_ms", json!(millis));
    let of_user = ("key_hash", json!(hash));
    let expected = [
        with(expected("allowed", "api", "fixed_window", "store", 2), &[retry(0), of_user.clone()]),
        with(expected("denied", "api", "fixed_window", "store", 1), &[retry(60_000), of_user.clone()]),
        // Never is absent, and so is the hash of a key that makes no sense.
        with(expected("denied", "shut", "none", "blocked", 1), &[of_user]),
        expected("denied", "api", "fixed_window", "malformed", 1),
    ];
    for line in &mut lines {
        let object = line.as_object_mut().unwrap();
        let timestamp = object.remove("timestamp").unwrap();
        let shape: String =
            timestamp.as_str().unwrap().chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "0000-00-00T00:00:00.000000Z");
        assert!(object.remove("latency_ms").unwrap().as_f64().unwrap() >= 0.0);
    }
    assert_eq!(lines, expected);
}

/// The lines of some work, in brief.
fn check(decisions: LogDecisions, work: impl FnOnce(&Tollgate, &ManualClock), expected: &[&str]) {
    let (hands, scrape) = (hands(), Scrape::new());
    let gate = logging(&hands, &scrape, decisions);
    let lines = logged(|| work(&gate, &hands));
    assert_eq!(lines.iter().map(brief).collect::<Vec<_>>(), expected);
}

#[test]
fn decisions_are_logged_once_by_the_limit_that_bound_and_peeks_are_not() {
    let work = |gate: &Tollgate, _: &ManualClock| {
        let limiter = |name| gate.local(name).unwrap();
        let (api, watching, workers) = (limiter("api"), limiter("watching"), limiter("workers"));
        let both = |key| drop(charged(gate, &[workers.of("w"), api.of(key)]));
        both("a");
        both("a");
        let _ = ready(gate.check("api", "b")).unwrap();
        let _ = ready(gate.peek(&[Charge::new("shut", "b")])).unwrap();
        let _ = (api.peek("b", 9).unwrap(), api.status("b"));
        (0..2).for_each(|_| assert!(watching.check("c").is_allowed()));
        let _ = ready(gate.wait(&[Charge::new("api", "b")], Duration::ZERO)).unwrap();
        let _ = ready(gate.charge_each(&[Charge::new("api", "b")])).unwrap();
    };
    check(
        LogDecisions::All,
        work,
        &[
            "INFO allowed workers store null 0 0",
            "INFO denied workers store null 10000 0",
            "INFO allowed api store null 0 0",
            "INFO allowed watching store null 0 0",
            "INFO would_deny watching store null 0 0",
            "INFO allowed api store null 0 0",
            "INFO denied api store null 60000 0",
        ],
    );
    check(
        LogDecisions::Denials,
        work,
        &[
            "INFO denied workers store null 10000 0",
            "INFO would_deny watching store null 0 0",
            "INFO denied api store null 60000 0",
        ],
    );
    check(LogDecisions::Off, work, &[]);
}

#[test]
fn a_storm_of_denials_is_a_line_a_second_for_a_key() {
    let denials = |gate: &Tollgate, times: usize| {
        (0..times).for_each(|_| assert!(!gate.local("shut").unwrap().check("k").is_allowed()));
    };
    check(
        LogDecisions::Denials,
        |gate, hands| {
            denials(gate, 500);
            hands.advance(secs(1));
            denials(gate, 1);
            hands.advance(secs(1));
            denials(gate, 3);
        },
        &[
            "INFO denied shut blocked null null 0",
            "INFO denied shut blocked null null 499",
            "INFO denied shut blocked null null 0",
        ],
    );
}

#[test]
fn a_storm_of_keys_is_a_hundred_lines_a_second_and_the_rest_is_counted() {
    let (hands, scrape) = (hands(), Scrape::new());
    let gate = logging(&hands, &scrape, LogDecisions::Denials);
    let shut = gate.local("shut").unwrap();
    let lines = logged(|| {
        (0..300).for_each(|key| assert!(!shut.check(key.to_string()).is_allowed()));
        hands.advance(secs(1));
        gate.publish_metrics();
        let _ = shut.charge("one more", 1).unwrap();
    });
    assert_eq!(lines.len(), 102);
    assert_eq!((&lines[100]["left_out"], &lines[100]["level"]), (&json!(200), &json!("WARN")));
    assert_eq!(brief(&lines[101]), "INFO denied shut blocked null null 0");
    assert_eq!(scrape.samples("rate_limiter_log_suppressed_total"), ["200"]);
}

#[test]
fn a_fallback_is_a_warning_and_the_first_to_meet_a_fault_an_error() {
    for decisions in [LogDecisions::All, LogDecisions::Denials] {
        let (hands, scrape) = (hands(), Scrape::new());
        let store = FaultyStore::new(&hands);
        let closed = Rule::new("closed", a_minute(9)).unwrap().fallback(Fallback::Closed);
        let open = Rule::new("open", a_minute(9)).unwrap().fallback(Fallback::Open);
        let builder = on(&hands).rule(open).rule(closed).store(store.clone());
        let gate = builder.telemetry(scrape.telemetry().log(decisions)).build().unwrap();
        let lines = logged(|| {
            // A key each, so that no denial stands for another.
            let charge = |key: &str, limit: &str| drop(ready(gate.check(limit, key)).unwrap());
            charge("a", "open");
            store.fault(Fault::Fails(Failure::Timeout));
            charge("b", "open");
            charge("c", "closed");
            (0..9).for_each(|key| charge(&format!("d{key}"), "open"));
            assert_eq!(gate.store_health().state, StoreState::Down);
            charge("e", "closed");
            store.fault(Fault::None);
            while gate.store_health().state != StoreState::Up {
                hands.advance(secs(1));
                charge("f", "open");
            }
            store.fault(Fault::Fails(Failure::Connection));
            charge("g", "closed");
        });
        let mut seen: Vec<String> =
            lines.iter().filter(|line| line["message"] == "decided").map(brief).collect();
        let expected = [
            "INFO allowed open store null 0 0",
            "ERROR allowed open fallback_open timeout 0 0",
            "WARN allowed open fallback_open timeout 0 0",
            "ERROR denied closed fallback_closed connection 1000 0",
        ];
        // How long the breaker waits is drawn by lot.
        let is_turned_away = |line: &String| line.starts_with("WARN denied") && !line.ends_with(" 1000 0");
        assert_eq!(seen.iter().filter(|line| is_turned_away(line)).count(), 2, "{seen:#?}");
        seen.retain(|line| !is_turned_away(line));
        seen.dedup();
        let is_recovery = |line: &String| line.starts_with("INFO");
        let last = seen.iter().rposition(is_recovery).filter(|index| *index > 0);
        last.map(|index| seen.remove(index));
        let is_wanted = |line: &&str| {
            decisions == LogDecisions::All || line.starts_with("ERROR") || line.contains("denied")
        };
        assert_eq!(seen, expected.into_iter().filter(is_wanted).collect::<Vec<_>>(), "{decisions:?}");
        let states = lines.iter().filter(|line| line["message"] != "decided").map(|line| &line["level"]);
        assert_eq!(
            states.collect::<Vec<_>>(),
            ["WARN", "INFO"],
            "the store went and came back, each logged once"
        );
    }
}

#[tokio::test]
async fn a_redis_that_is_killed_is_an_error_and_then_warnings() {
    let server = RedisServer::start();
    let text = "[store]\nmode = 'redis'\nfallback = 'open'\ntimeout = '500ms'\n[limits.api]\nstrategy = 'fixed_window'\nlimit = 2\nwindow = '1h'\n";
    let variables = [("REDIS_ADDR".to_owned(), format!("127.0.0.1:{}", server.port()))];
    let config = Config::parse_with_env(text, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let (page, scrape) = (Page::default(), Scrape::new());
    let (lines, guard) = json_lines_to(page.clone());
    let subscriber = tracing_subscriber::registry().with(lines);
    let _default = tracing::subscriber::set_default(subscriber);
    let telemetry = scrape.telemetry().log(LogDecisions::All);
    let gate = Tollgate::opening(&config).await.unwrap().telemetry(telemetry).build().unwrap();
    for _ in 0..3 {
        let _ = gate.check("api", "user:1").await.unwrap();
    }
    server.kill();
    for _ in 0..10 {
        assert!(gate.check("api", "user:2").await.unwrap().is_allowed());
    }
    drop(guard);
    let lines: Vec<Value> = page.lines().into_iter().filter(|line| line["message"] == "decided").collect();
    let levels: Vec<&str> = lines.iter().map(|line| line["level"].as_str().unwrap()).collect();
    assert_eq!(levels, [&["INFO"; 3][..], &["ERROR"], &["WARN"; 9]].concat());
    assert!(lines.iter().all(|line| line["storage_mode"] == "redis"));
    assert_eq!((&lines[2]["decision"], &lines[3]["source"]), (&json!("denied"), &json!("fallback_open")));
    let calls = scrape.samples("rate_limiter_script_duration_ms_count");
    assert_eq!(calls, [format!("charge redis {}", gate.store_health().calls)]);
    gate.publish_metrics();
    assert_eq!(scrape.samples("rate_limiter_store_up"), ["redis 0"]);
}

/// A writer that fails in one way, always.
enum Broken {
    Errs,
    Panics,
    /// Until the other end is dropped.
    Blocks(mpsc::Receiver<()>),
}

impl Write for Broken {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Broken::Errs => Err(io::Error::other("no room on the device")),
            Broken::Panics => panic!("the writer panics, as it is meant to"),
            Broken::Blocks(end) => end.recv().map_or(Ok(bytes.len()), |()| Ok(0)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A subscriber's layer that panics on each event.
struct Panics;

impl<S: tracing::Subscriber> Layer<S> for Panics {
    fn on_event(&self, _: &tracing::Event<'_>, _: Context<'_, S>) {
        panic!("the layer panics, as it is meant to");
    }
}

/// More decisions than lines may wait, each with a line of its own.
fn decide(limiter: &Limiter, hands: &ManualClock) -> Vec<(bool, u64)> {
    let decide = |number: u64| {
        if number.is_multiple_of(100) {
            hands.advance(secs(1));
        }
        let outcome = limiter.check(format!("user:{}", number % 300));
        (outcome.is_allowed(), outcome.remaining())
    };
    (0..20_000).map(decide).collect()
}

#[test]
fn no_log_holds_a_decision_up_or_changes_it() {
    let limit = || bucket("10/m", 10);
    let expected = {
        let hands = hands();
        let gate = on(&hands).limit("api", limit()).build().unwrap();
        decide(&gate.local("api").unwrap(), &hands)
    };
    assert!(expected.iter().any(|(allowed, _)| !allowed));
    let (_end, blocked) = mpsc::channel();
    let writers = [("errs", Broken::Errs), ("panics", Broken::Panics), ("blocks", Broken::Blocks(blocked))];
    for (what, writer) in writers {
        let (hands, scrape) = (hands(), Scrape::new());
        let telemetry = scrape.telemetry().log(LogDecisions::All);
        let gate = on(&hands).limit("api", limit()).telemetry(telemetry).build().unwrap();
        let limiter = gate.local("api").unwrap();
        let (lines, guard) = json_lines_to(writer);
        let subscriber = tracing_subscriber::registry().with(lines);
        let decided = tracing::subscriber::with_default(subscriber, || decide(&limiter, &hands));
        assert!(decided == expected, "{what}");
        let dropped = guard.dropped();
        if what == "blocks" {
            assert!(dropped.count() > 3_000, "{dropped:?}");
        }
        // No caller waits for a writer that never comes back, not even at the end.
        drop(guard);
        if what != "blocks" {
            let end = Instant::now() + Duration::from_secs(60);
            while dropped.count() < 20_000 {
                assert!(Instant::now() < end, "{what}: {dropped:?}");
                std::thread::yield_now();
            }
            assert_eq!(dropped.count(), 20_000, "{what}");
        }
    }
    let hands = hands();
    let telemetry = tollgate::telemetry::Telemetry::new().log(LogDecisions::All).spans();
    let gate = on(&hands).limit("api", limit()).telemetry(telemetry).build().unwrap();
    let limiter = gate.local("api").unwrap();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| ()));
    let subscriber = tracing_subscriber::registry().with(Panics);
    let decided = tracing::subscriber::with_default(subscriber, || decide(&limiter, &hands));
    std::panic::set_hook(hook);
    assert!(decided == expected, "a subscriber that panics");
}

#[test]
fn a_line_is_a_line_whatever_is_in_it() {
    let lines = logged(|| {
        tracing::warn!(
            text = "two\nlines, \u{1b}[31mred\u{1b}[0m and \"quotes\"",
            level = "a field of the same name",
            wide = u128::MAX,
            below = -1_i64,
            share = 0.5,
            none = f64::NAN,
            is_so = true,
            error = &io::Error::other("x\ty") as &dyn std::error::Error,
            debugged = ?Duration::from_secs(1),
            "a \\ message"
        );
    });
    let line = &lines[0];
    assert_eq!((lines.len(), &line["level"], &line["message"]), (1, &json!("WARN"), &json!("a \\ message")));
    assert_eq!(line["text"], "two\nlines, \u{1b}[31mred\u{1b}[0m and \"quotes\"");
    assert_eq!(line["field_level"], "a field of the same name");
    assert_eq!((&line["below"], &line["share"], &line["none"]), (&json!(-1), &json!(0.5), &Value::Null));
    assert_eq!((&line["is_so"], &line["error"]), (&json!(true), &json!("x\ty")));
    assert!(line["debugged"].is_string() && line["wide"].is_number());
    assert!(line.get("trace_id").is_none(), "there is no span");
}
