//! Spans, as a collector receives them: one around each decision, one within it around each call to the store.

use std::sync::Arc;
use std::time::Duration;

use tollgate::config::Config;
use tollgate::store::Failure;
use tollgate::telemetry::{LogDecisions, Telemetry, json_lines_to, otlp};
use tollgate::{Charge, ManualClock, Tollgate};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::proxy::{FaultProxy, Mode};
use tollgate_testkit::redis::RedisServer;
use tracing_subscriber::layer::SubscriberExt;

use crate::collector::{Collector, Span};
use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::page::Page;
use crate::scene::{a_minute, bucket, hands, on};

/// What a collector receives of work that is done in this thread.
fn traced(work: impl FnOnce()) -> Vec<Span> {
    let collector = Collector::start();
    let (layer, guard) = otlp().endpoint(collector.endpoint()).service_name("tests").start().unwrap();
    tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), work);
    assert!(guard.flush());
    drop(guard);
    collector.spans()
}

fn telemetry() -> Telemetry {
    Telemetry::new().salt("salt").spans()
}

fn faulty(hands: &ManualClock) -> (Tollgate, Arc<FaultyStore>) {
    let store = FaultyStore::new(hands);
    let builder = on(hands).limit("api", a_minute(2)).limit("other", bucket("1/s", 9)).store(store.clone());
    (builder.telemetry(telemetry()).build().unwrap(), store)
}

const CHECK: [&str; 9] = [
    "operation",
    "limiter",
    "strategy",
    "storage_mode",
    "key_hash",
    "decision",
    "source",
    "retry_after_ms",
    "limits",
];

/// HMAC-SHA-256 of `user:1` under `salt`, cut to 16 bytes.
const HASH: &str = "c980697a019f663de0e0ae81cc35fece";

#[test]
fn a_check_is_a_span_and_the_call_to_the_store_one_within_it() {
    let hands = hands();
    let (gate, store) = faulty(&hands);
    let spans = traced(|| {
        for _ in 0..2 {
            let _ = ready(gate.check("api", "user:1")).unwrap();
        }
        let _ = ready(gate.charge(&[Charge::new("other", "user:1"), Charge::new("api", "user:1")])).unwrap();
        let _ = ready(gate.peek(&[Charge::new("other", "user:1")])).unwrap();
        let _ = ready(gate.reserve(&[Charge::new("other", "user:1")], Duration::from_secs(9))).unwrap();
        let _ = ready(gate.wait(&[Charge::new("other", "user:1")], Duration::ZERO)).unwrap();
        store.fault(Fault::Fails(Failure::Timeout));
        let _ = ready(gate.check("other", "user:1")).unwrap();
    });
    let (checks, calls): (Vec<&Span>, Vec<&Span>) =
        spans.iter().partition(|span| span.name == "rate_limit.check");
    let briefs: Vec<String> = checks.iter().map(|span| span.brief(&CHECK)).collect();
    let expected = [
        "charge api fixed_window custom HASH allowed store 0 1",
        "charge api fixed_window custom HASH allowed store 0 1",
        "charge api fixed_window custom HASH denied store 60000 2",
        "peek other token_bucket custom HASH allowed store 0 1",
        "reserve other token_bucket custom HASH allowed store 0 1",
        "wait other token_bucket custom HASH allowed store 0 1",
        "charge other token_bucket custom HASH allowed fallback_local 0 1",
    ]
    .map(|line| line.replace("HASH", HASH));
    assert_eq!(briefs, expected);
    let operations: Vec<String> =
        calls.iter().map(|span| span.brief(&["operation", "storage_mode", "failure"])).collect();
    let expected =
        ["charge", "charge", "charge", "peek", "charge", "charge"].map(|name| format!("{name} custom "));
    assert_eq!(operations, [&expected[..], &["charge custom timeout".to_owned()]].concat());
    for (check, call) in checks.iter().zip(&calls) {
        assert_eq!((&call.name[..], &call.parent_id), ("rate_limit.store", &check.span_id));
        assert_eq!((&call.trace_id, &check.parent_id[..]), (&check.trace_id, ""));
        assert_eq!((&check.service[..], &call.service[..]), ("tests", "tests"));
    }
}

/// Decides over the store that these variables name, and checks each span against its child.
fn spans_over(storage_mode: &str, variables: &[(&str, &str)]) {
    let policy = "[store]\ntimeout = '10s'\n[limits.api]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1h'\nfallback = 'open'\n";
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let config = Config::parse_with_env(policy, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let spans = traced(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let opening = Tollgate::opening(&config).await.unwrap();
            let gate = opening.telemetry(telemetry()).denial_cache(Duration::ZERO).build().unwrap();
            for allowed in [true, false] {
                assert_eq!(gate.check("api", "user:1").await.unwrap().is_allowed(), allowed);
            }
            let _ = gate.peek(&[Charge::new("api", "user:2")]).await.unwrap();
            let reserved = gate.reserve(&[Charge::new("api", "user:2")], Duration::from_secs(60)).await;
            drop(reserved.unwrap().unwrap());
        });
    });
    let checks: Vec<&Span> = spans.iter().filter(|span| span.name == "rate_limit.check").collect();
    let briefs: Vec<String> =
        checks.iter().map(|span| span.brief(&["operation", "storage_mode", "decision", "source"])).collect();
    let expected = ["charge MODE allowed store", "charge MODE denied store", "peek MODE allowed store"];
    let expected = expected.into_iter().chain(["reserve MODE allowed store"]);
    assert_eq!(briefs, expected.map(|line| line.replace("MODE", storage_mode)).collect::<Vec<_>>());
    for (check, operation) in checks.iter().zip(["charge", "charge", "peek", "charge"]) {
        let children: Vec<&Span> = spans.iter().filter(|span| span.parent_id == check.span_id).collect();
        let [call] = children[..] else { panic!("{check:?} has {children:?}") };
        assert_eq!(call.name, "rate_limit.store");
        assert_eq!(call.trace_id, check.trace_id);
        let reported = call.brief(&["operation", "storage_mode", "failure"]);
        assert_eq!(reported, format!("{operation} {storage_mode} "));
        // The call is within the decision, and took time: it went to another process.
        assert!(check.starts <= call.starts && call.starts < call.ends && call.ends <= check.ends);
    }
}

#[test]
fn a_call_to_a_real_redis_is_a_child_of_its_decision() {
    let server = RedisServer::start();
    let address = format!("127.0.0.1:{}", server.port());
    spans_over("redis", &[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)]);
}

#[test]
fn a_call_to_a_real_postgresql_is_a_child_of_its_decision() {
    let server = PostgresServer::start();
    let url = server.url("postgres");
    spans_over("postgres", &[("RL_STORAGE_MODE", "postgres"), ("DATABASE_URL", &url)]);
}

#[test]
fn a_check_in_memory_is_within_the_span_of_its_caller() {
    let gate = on(&hands()).limit("api", a_minute(1)).telemetry(telemetry()).build().unwrap();
    let api = gate.local("api").unwrap();
    let spans = traced(|| {
        let _request = tracing::info_span!("request").entered();
        let _ = api.check("user:1");
        let _ = api.charge_all(&[api.of("user:1"), api.of("x")]).unwrap();
        let _ = api.peek("user:1", 1).unwrap();
        let _ = ready(gate.check("api", "")).unwrap();
        let mut outcomes = Vec::new();
        api.check_many(&["user:1", "y"], &mut outcomes);
    });
    let (checks, request) = spans.split_at(spans.len() - 1);
    assert_eq!(request[0].name, "request");
    let briefs: Vec<String> =
        checks.iter().map(|span| span.brief(&["operation", "decision", "source", "limits"])).collect();
    let expected = [
        "charge allowed store 1",
        "charge denied store 2",
        "peek denied store 1",
        "charge denied malformed 1",
    ];
    assert_eq!(briefs, [&expected[..], &["charge denied store 1", "charge allowed store 1"]].concat());
    for span in checks {
        assert_eq!((&span.parent_id, &span.trace_id), (&request[0].span_id, &request[0].trace_id));
        assert_eq!(span.get("key_hash").is_empty(), span.get("source") == "malformed");
    }
}

#[test]
fn many_keys_in_one_call_are_one_span_with_its_calls() {
    let hands = hands();
    let (gate, _) = faulty(&hands);
    let spans = traced(|| {
        drop(ready(gate.charge_each(&["a", "b", "a"].map(|key| Charge::new("api", key)))).unwrap())
    });
    let names: Vec<&str> = spans.iter().map(|span| &span.name[..]).collect();
    assert_eq!(names, ["rate_limit.store", "rate_limit.check"]);
    assert_eq!(spans[1].brief(&["limiter", "keys", "key_hash", "decision"]), "api 3  ");
    assert_eq!(spans[0].parent_id, spans[1].span_id);
}

#[test]
fn decisions_that_wait_for_the_store_at_the_same_time_keep_their_own_spans() {
    let hands = hands();
    let (gate, store) = faulty(&hands);
    store.fault(Fault::Hangs);
    let spans = traced(|| {
        let mut crowd = Crowd::new();
        for limit in ["api", "other", "api"] {
            let gate = gate.clone();
            crowd.join(async move { drop(gate.check(limit, "user:1").await.unwrap()) });
        }
        crowd.run();
        store.let_go();
        crowd.run();
    });
    let calls: Vec<&Span> = spans.iter().filter(|span| span.name == "rate_limit.store").collect();
    let checks: Vec<&Span> = spans.iter().filter(|span| span.name == "rate_limit.check").collect();
    assert_eq!((calls.len(), checks.len()), (3, 3));
    for check in checks {
        let own = calls.iter().filter(|call| call.parent_id == check.span_id);
        assert_eq!(own.count(), 1);
        assert_eq!(check.parent_id, "");
    }
}

#[test]
fn lines_have_the_ids_of_the_spans_that_they_were_written_in() {
    let (hands, page, collector) = (hands(), Page::default(), Collector::start());
    let telemetry = || telemetry().log(LogDecisions::All);
    let here = on(&hands).limit("api", a_minute(1)).telemetry(telemetry()).build().unwrap();
    let there = on(&hands).limit("api", a_minute(1)).store(FaultyStore::new(&hands)).telemetry(telemetry());
    let there = there.build().unwrap();
    let (lines, lines_guard) = json_lines_to(page.clone());
    let (layer, guard) = otlp().endpoint(collector.endpoint()).start().unwrap();
    let subscriber = tracing_subscriber::registry().with(lines).with(layer);
    tracing::subscriber::with_default(subscriber, || {
        let _ = here.local("api").unwrap().check("a");
        let _ = ready(here.check("api", "a")).unwrap();
        let _ = ready(there.check("api", "a")).unwrap();
        let _ = ready(there.wait(&[Charge::new("api", "b")], Duration::ZERO)).unwrap();
    });
    drop((guard, lines_guard));
    let spans = collector.spans();
    let checks: Vec<&Span> = spans.iter().filter(|span| span.name == "rate_limit.check").collect();
    let lines = page.lines();
    assert_eq!((lines.len(), checks.len()), (4, 4));
    for (line, check) in lines.iter().zip(checks) {
        assert_eq!(
            (&line["trace_id"], &line["span_id"]),
            (&check.trace_id.clone().into(), &check.span_id.clone().into())
        );
    }
}

#[test]
fn a_collector_that_is_not_there_changes_nothing() {
    let gate = on(&hands()).limit("api", a_minute(2_000)).telemetry(telemetry()).build().unwrap();
    let api = gate.local("api").unwrap();
    // A port that is held and refuses.
    let proxy = FaultProxy::start(1);
    proxy.set(Mode::Refuse);
    let endpoint = format!("http://127.0.0.1:{}", proxy.port());
    let start = || otlp().endpoint(&endpoint).start().unwrap();
    let (layer, guard) = start();
    let allowed = tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
        (0..3_000).filter(|_| api.check("user:1").is_allowed()).count()
    });
    assert_eq!(allowed, 2_000);
    drop(guard);
    // So few that they are not sent before they are flushed.
    let (layer, guard) = start();
    let _ =
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || api.check("user:1"));
    assert!(!guard.flush(), "nobody took the span");
}

#[test]
fn an_endpoint_that_makes_no_sense_is_refused_with_what_to_write() {
    let start = otlp().endpoint("not an endpoint").start::<tracing_subscriber::Registry>();
    let error = start.err().expect("refused");
    assert!(error.to_string().contains("http://host:4317"), "{error}");
}
