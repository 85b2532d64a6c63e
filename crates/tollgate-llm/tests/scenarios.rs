//! Scenarios of admission, reservation and settlement on a clock that is moved by hand. The gateway's own are in the server's tests.

#[path = "scenarios/groups.rs"]
mod groups;
#[path = "scenarios/reloads.rs"]
mod reloads;
#[path = "scenarios/threads.rs"]
mod threads;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate::config::Config;
use tollgate::store::Micros;
use tollgate::{ManualClock, Tollgate};
use tollgate_llm::count::Encoding;
use tollgate_llm::{
    Admission, Api, Caller, Check, EventReader, LlmSection, ModelLimits, ModelRequest, Refusal, RefusalKind,
    Usage,
};

/// The input tokens of the request below.
const INPUT: u64 = 8;

/// A gate whose clock the test moves.
#[derive(Clone)]
struct World {
    hands: ManualClock,
    gate: Tollgate,
    limits: ModelLimits,
}

const OPENAI: &str = "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'x'\n";
const ANTHROPIC: &str =
    "[llm.upstreams.up]\nkind = 'anthropic'\nbase_url = 'http://localhost'\napi_key = 'x'\n";

impl World {
    fn of(upstream: &str, rest: &str) -> World {
        // Without a margin: exact windows are what is looked at here.
        let text = format!("llm.margin = '0s'\n{rest}\n{upstream}");
        let mut llm = LlmSection::default();
        let config = Config::parse_with(&text, [], &mut [&mut llm]);
        let config = config.unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let gate = Tollgate::builder().config(&config).clock(hands.clock()).build().expect("a gate");
        let limits = ModelLimits::with_clock(gate.clone(), llm.config.expect("a section"), hands.clock());
        World { hands, gate, limits }
    }

    fn openai(model: &str) -> World {
        World::of(OPENAI, &format!("[llm.models.gpt-4o]\n{model}"))
    }

    fn advance(&self, seconds: u64) {
        self.hands.advance(Micros::from_secs(seconds));
    }

    async fn admit(&self, tokens: u64) -> Result<Admission, Refusal> {
        self.admit_within(tokens, None).await
    }

    async fn admit_within(&self, tokens: u64, within: Option<Duration>) -> Result<Admission, Refusal> {
        let body = body(tokens);
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        self.limits.admit(&request, &Caller::default(), within).await
    }

    async fn check(&self, tokens: u64) -> Check {
        let body = body(tokens);
        let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
        self.limits.check(&request, &Caller::default()).await.expect("a check")
    }

    /// A call that uses exactly what was reserved for it.
    async fn call(&self, tokens: u64) {
        let admission = self.admit(tokens).await.expect("room");
        admission.settle(used(tokens)).await.expect("settled");
    }

    async fn left(&self, limit: &str) -> u64 {
        self.gate.status(limit, "llm:up").await.expect("a status").remaining()
    }
}

fn used(tokens: u64) -> Usage {
    Usage { input: INPUT, cached: 0, output: tokens - INPUT }
}

/// A request that reserves so many tokens.
fn body(tokens: u64) -> String {
    let cap = tokens - INPUT;
    format!(r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap}}}"#)
}

/// Lets everything that can run, run.
async fn settle_down() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// The cases of the original request, and those that naive limiters get wrong.
#[tokio::test]
async fn the_table_of_scenarios() {
    let cases: Vec<serde_json::Value> =
        serde_json::from_str(include_str!("scenarios.json")).expect("a table");
    for case in cases {
        let number = |name: &str| case[name].as_u64().expect("a number");
        let world = World::openai(&format!("rpm = {}\ntpm = {}", number("rpm"), number("tpm")));
        let mut now = 0;
        for call in case["before"].as_array().expect("calls") {
            let (at, tokens) = (call[0].as_u64().expect("seconds"), call[1].as_u64().expect("tokens"));
            world.advance(at - now);
            now = at;
            world.call(tokens).await;
        }
        world.advance(number("at") - now);
        let check = world.check(number("tokens")).await;
        let name = &case["name"];
        assert_eq!(check.can_proceed, check.reason.is_none(), "{name}");
        assert_eq!(check.reason.as_deref(), case["reason"].as_str(), "{name}");
        assert_eq!(check.wait, case["wait"].as_u64().map(Duration::from_secs), "{name}");
        assert_eq!(check.input_tokens, INPUT, "{name}");
    }
}

#[tokio::test]
async fn a2_a_boundary_burst_never_exceeds_the_limit() {
    let world = World::openai("tpm = 1000");
    world.advance(57);
    world.call(991).await;
    world.advance(5);
    let check = world.check(991).await;
    assert_eq!((check.can_proceed, check.wait), (false, Some(Duration::from_secs(55))));
    world.advance(55);
    world.call(991).await;
}

#[tokio::test]
async fn a3_of_a_hundred_at_once_ten_go_and_ninety_wait() {
    let world = World::of(OPENAI, "llm.max_wait = '1h'\n[llm.models.gpt-4o]\nrpm = 10");
    let (sent, failed) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let (world, sent, failed) = (world.clone(), sent.clone(), failed.clone());
            tokio::spawn(async move {
                match world.admit(100).await {
                    Ok(admission) => {
                        sent.fetch_add(1, Ordering::Relaxed);
                        let _ = admission.settle(used(100)).await;
                    }
                    Err(_) => drop(failed.fetch_add(1, Ordering::Relaxed)),
                }
            })
        })
        .collect();
    for minute in 1..=10 {
        settle_down().await;
        assert_eq!(sent.load(Ordering::Relaxed), 10 * minute, "minute {minute}");
        assert_eq!(world.limits.waiting("gpt-4o"), 100 - 10 * minute);
        world.advance(59);
        settle_down().await;
        assert_eq!(sent.load(Ordering::Relaxed), 10 * minute, "not a second too early");
        world.advance(1);
    }
    for call in calls {
        call.await.expect("no panic");
    }
    assert_eq!(failed.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a4_waiters_wake_exactly_and_in_order() {
    let world = World::openai("tpm = 10000");
    world.call(9_000).await;
    world.advance(40);
    world.call(500).await;
    world.advance(10);
    world.call(500).await;
    world.advance(1);
    let order = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let waiters: Vec<_> = [3_000, 3_000, 3_000]
        .into_iter()
        .enumerate()
        .map(|(number, tokens)| {
            let (world, order) = (world.clone(), order.clone());
            tokio::spawn(async move {
                let admission = world.admit(tokens).await.expect("it waits");
                order.lock().push(number);
                assert_eq!(admission.waited(), Duration::from_secs(9));
            })
        })
        .collect();
    settle_down().await;
    world.hands.advance(Micros::new(8_999_999));
    settle_down().await;
    assert!(order.lock().is_empty());
    world.hands.advance(Micros::new(1));
    for waiter in waiters {
        waiter.await.expect("no panic");
    }
    assert_eq!(*order.lock(), [0, 1, 2]);
}

#[tokio::test]
async fn a5_a_request_larger_than_the_limit_is_refused_or_runs_alone() {
    let world = World::openai("tpm = 1000");
    let refusal = world.admit(50_000).await.expect_err("it is too large");
    assert_eq!((refusal.kind, refusal.retry_after), (RefusalKind::Never, None));
    assert_eq!(world.left("llm.gpt-4o.tpm").await, 1_000);

    let world = World::of(OPENAI, "llm.on_oversize = 'alone'\n[llm.models.gpt-4o]\ntpm = 1000");
    world.call(10).await;
    let waiting = tokio::spawn({
        let world = world.clone();
        async move { world.admit(50_000).await.expect("it waits for an empty window") }
    });
    settle_down().await;
    assert!(!waiting.is_finished());
    world.advance(60);
    let admission = waiting.await.expect("no panic");
    assert_eq!(admission.waited(), Duration::from_secs(60));
    world.advance(30);
    admission.settle(used(3_000)).await.expect("settled");
    // What was reserved leaves after 60 s, the debt 60 s after it was made.
    let check = world.check(100).await;
    assert_eq!((check.can_proceed, check.wait), (false, Some(Duration::from_secs(60))));
}

#[tokio::test]
async fn a6_a_refusal_at_one_limit_leaves_the_others_unchanged() {
    let world = World::of(
        OPENAI,
        "[llm.models.gpt-4o]\nrpm = 100\ntpm = 100000\n[llm.clients.team]\nkey = 'k'\nmodels.gpt-4o = { tpm = 200 }",
    );
    let body = body(200);
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    let caller = Caller { client: Some("team".to_owned()) };
    let held = world.limits.admit(&request, &caller, None).await.expect("room");
    let before = (world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await);
    assert_eq!(before, (99, 99_800));
    for _ in 0..1_000 {
        let refusal =
            world.limits.admit(&request, &caller, Some(Duration::ZERO)).await.expect_err("it is out");
        assert_eq!(refusal.reason, "Token limit exceeded: 200 tokens / 200 TPM");
    }
    assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), before);
    held.cancel().await.expect("cancelled");
    assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (100, 100_000));
}

#[tokio::test]
async fn a7_a_minute_that_is_judged_by_the_second_is_kept_by_the_second() {
    let world = World::openai("rpm = 600\nslice = '1s'");
    let mut sent = 0;
    for _ in 0..100 {
        while let Ok(admission) = world.admit_within(100, Some(Duration::ZERO)).await {
            admission.settle(used(100)).await.expect("settled");
            sent += 1;
        }
        world.hands.advance(Micros::from_millis(100));
    }
    assert_eq!(sent, 100, "ten in each second of ten");
}

#[tokio::test]
async fn b1_what_was_not_used_wakes_a_waiter_at_once() {
    let world = World::openai("tpm = 1000");
    let first = world.admit(900).await.expect("room");
    let waiting = tokio::spawn({
        let world = world.clone();
        async move { world.admit(900).await.expect("it waits") }
    });
    settle_down().await;
    assert!(!waiting.is_finished());
    first.settle(used(20)).await.expect("settled");
    let second = waiting.await.expect("no panic");
    assert_eq!(second.waited(), Duration::ZERO, "the clock has not moved");
    assert_eq!(world.left("llm.gpt-4o.tpm").await, 80);
}

/// LiteLLM's counter went to -870 here.
#[tokio::test]
async fn b2_a_late_settlement_makes_no_credit() {
    let world = World::openai("tpm = 1000");
    let late = world.admit(900).await.expect("room");
    world.advance(61);
    let other = world.admit(11).await.expect("room");
    late.settle(used(20)).await.expect("settled");
    assert_eq!(world.left("llm.gpt-4o.tpm").await, 989, "what left the window is not given back again");
    other.settle(used(11)).await.expect("settled");
    let mut admitted = 11;
    while let Ok(admission) = world.admit_within(401, Some(Duration::ZERO)).await {
        admission.settle(used(401)).await.expect("settled");
        admitted += 401;
    }
    assert!(admitted <= 1_000, "{admitted}");
}

#[tokio::test]
async fn b3_excess_is_a_debt_that_delays_the_next() {
    let world = World::openai("tpm = 1000");
    let short = world.admit(500).await.expect("room");
    world.advance(10);
    world.call(500).await;
    world.advance(10);
    short.settle(used(1_500)).await.expect("settled");
    // At 20 s: 500 of 0 s, 500 of 10 s and 1,000 of now. A hundred fit when the first two and the debt are gone: 60 s.
    assert_eq!(world.check(100).await.wait, Some(Duration::from_secs(60)));
    assert_eq!(world.left("llm.gpt-4o.tpm").await, 0, "never below zero");
}

/// What must be left, by the rules alone: a list of entries, looked at from the beginning every time.
#[derive(Default)]
struct Reference {
    now: u64,
    /// When, and how many tokens.
    entries: Vec<(u64, u64)>,
}

impl Reference {
    const LIMIT: u64 = 1_000;

    fn used(&self) -> u64 {
        self.entries.iter().filter(|(at, _)| self.now - at < 60).map(|(_, tokens)| tokens).sum()
    }

    fn left(&self) -> u64 {
        Self::LIMIT.saturating_sub(self.used())
    }

    fn reserve(&mut self, tokens: u64) -> Option<usize> {
        (self.used() + tokens <= Self::LIMIT).then(|| {
            self.entries.push((self.now, tokens));
            self.entries.len() - 1
        })
    }

    fn settle(&mut self, entry: usize, reserved: u64, used: u64) {
        if used <= reserved {
            self.entries[entry].1 = used;
        } else {
            self.entries.push((self.now, used - reserved));
        }
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    /// Any order of reservations, settlements, cancels, forgotten calls and time: the same is admitted and the same is left as by the rules.
    #[test]
    fn b4_any_history_agrees_with_the_rules(
        steps in proptest::collection::vec((0_u8..6, 9_u64..700, 0_usize..8), 1..80)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let world = World::openai("tpm = 1000");
            let mut reference = Reference::default();
            let mut open: Vec<(Admission, usize, u64)> = Vec::new();
            for (step, tokens, which) in steps {
                match step {
                    0 | 1 => {
                        let admitted = world.admit_within(tokens, Some(Duration::ZERO)).await;
                        let expected = reference.reserve(tokens);
                        assert_eq!(admitted.is_ok(), expected.is_some(), "{tokens} of {} left", reference.left());
                        open.extend(admitted.ok().zip(expected).map(|(admission, entry)| (admission, entry, tokens)));
                    }
                    2 => {
                        world.advance(tokens % 41);
                        reference.now += tokens % 41;
                    }
                    _ if open.is_empty() => {}
                    _ => {
                        let (admission, entry, reserved) = open.swap_remove(which % open.len());
                        match step {
                            3 => {
                                admission.settle(used(tokens)).await.expect("settled");
                                reference.settle(entry, reserved, tokens);
                            }
                            4 => {
                                admission.cancel().await.expect("cancelled");
                                reference.settle(entry, reserved, 0);
                            }
                            _ => drop(admission),
                        }
                    }
                }
                assert_eq!(world.left("llm.gpt-4o.tpm").await, reference.left());
            }
        });
    }
}

#[tokio::test]
async fn b5_without_usage_nothing_unproven_is_given_back() {
    let world = World::openai("tpm = 1000");
    world.admit(500).await.expect("room").settle_estimated(20, true).await.expect("settled");
    assert_eq!(
        world.left("llm.gpt-4o.tpm").await,
        1_000 - INPUT - 20,
        "an answer that ended is counted by its text"
    );
    world.admit(500).await.expect("room").settle_estimated(20, false).await.expect("settled");
    assert_eq!(
        world.left("llm.gpt-4o.tpm").await,
        1_000 - INPUT - 20 - 500,
        "one that did not is charged as reserved"
    );
    drop(world.admit(100).await.expect("room"));
    assert_eq!(
        world.left("llm.gpt-4o.tpm").await,
        1_000 - INPUT - 20 - 600,
        "and so is one that is forgotten"
    );
}

/// A provider that reports zeros, or leaves something out, has proven nothing.
#[tokio::test]
async fn b5_what_is_not_reported_is_not_given_back() {
    let world = World::openai("input_tpm = 1000\noutput_tpm = 1000");
    let left = async || (world.left("llm.gpt-4o.input_tpm").await, world.left("llm.gpt-4o.output_tpm").await);
    let settle = async |usage: &str| {
        let admission = world.admit(108).await.expect("room");
        admission.settle(Usage::read(usage).unwrap_or_default()).await.expect("settled");
    };
    settle(r#"{"output_tokens":3}"#).await;
    assert_eq!(left().await, (1_000 - INPUT, 997), "the input is what it was reckoned at");
    settle(r#"{"input_tokens":0,"output_tokens":0}"#).await;
    assert_eq!(left().await, (1_000 - 2 * INPUT, 897), "nothing is known, so nothing comes back");
    settle(r#"{"input_tokens":5,"output_tokens":0}"#).await;
    assert_eq!(left().await, (1_000 - 2 * INPUT - 5, 897), "an input was reported");
}

#[tokio::test]
async fn b6_a_call_without_a_cap_reserves_what_answers_have_been() {
    let world = World::openai("tpm = 100000");
    let body = r#"{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}]}"#;
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    let reserved = async || {
        let admission = world.limits.admit(&request, &Caller::default(), None).await.expect("room");
        let reserved = admission.reserved();
        admission.settle(Usage { input: INPUT, cached: 0, output: 40 }).await.expect("settled");
        reserved
    };
    for _ in 0..8 {
        assert_eq!(reserved().await, INPUT + 1_000);
    }
    assert_eq!(reserved().await, INPUT + 40);
    // A guess is lowered to what a small limit holds, and the first call of a fresh key is not refused for ever.
    let small = World::openai("tpm = 100");
    let admission = small.limits.admit(&request, &Caller::default(), None).await.expect("room");
    assert_eq!(admission.reserved(), 100);
}

fn anthropic(model: &str) -> World {
    World::of(ANTHROPIC, &format!("[llm.models.claude-x]\n{model}"))
}

fn message(text: &str, cap: u64) -> String {
    format!(r#"{{"model":"claude-x","max_tokens":{cap},"messages":[{{"role":"user","content":"{text}"}}]}}"#)
}

/// How many calls of a thousand tokens, four fifths of them read from a cache, go through in a minute.
async fn cached_calls(world: &World) -> u64 {
    let body = message(&"word ".repeat(995), 10);
    let request = ModelRequest::read(Api::Messages, body.as_bytes()).expect("a request");
    let usage = Usage { input: 1_000, cached: 800, output: 5 };
    let mut calls = 0;
    while let Ok(admission) = world.limits.admit(&request, &Caller::default(), Some(Duration::ZERO)).await {
        admission.settle(usage).await.expect("settled");
        calls += 1;
    }
    calls
}

#[tokio::test]
async fn b7_what_a_cache_has_read_does_not_count_for_anthropic() {
    let world = anthropic("input_tpm = 20000");
    assert!(
        cached_calls(&world).await >= 95,
        "five times what a naive count admits, but for the first calls"
    );
    world.advance(61);
    assert_eq!(cached_calls(&world).await, 100);
    let old = anthropic("input_tpm = 20000\ncount_cache_reads = true");
    cached_calls(&old).await;
    old.advance(61);
    assert_eq!(cached_calls(&old).await, 20);
}

#[tokio::test]
async fn c2_output_counts_in_the_minute_in_which_it_was_produced() {
    let world = anthropic("output_tpm = 1000\nrpm = 100");
    let body = message("hello", 900);
    let request = ModelRequest::read(Api::Messages, body.as_bytes()).expect("a request");
    let mut admission = world.limits.admit(&request, &Caller::default(), None).await.expect("room");
    let left = async || world.left("llm.claude-x.output_tpm").await;
    assert_eq!(left().await, 100);
    let mut reader = EventReader::new(Encoding::O200k);
    let start = r#"{"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}"#;
    reader.feed(format!("data: {start}\n\n").as_bytes());
    for second in 1..=90 {
        world.advance(1);
        let delta =
            format!(r#"{{"type":"message_delta","delta":{{}},"usage":{{"output_tokens":{}}}}}"#, 10 * second);
        reader.feed(format!("data: {delta}\n\n").as_bytes());
        admission.produced(reader.streamed()).await.expect("charged");
    }
    admission.settle(Usage { input: 9, cached: 0, output: 900 }).await.expect("settled");
    // Of 900 tokens at ten a second, 600 were produced in the last minute. A charge at the beginning would have left it by now.
    assert!((390..=410).contains(&left().await), "{}", left().await);
    world.advance(30);
    assert!((690..=710).contains(&left().await), "{}", left().await);
}

/// More than the limit: nothing is waited for at the end of the stream, and the excess is a debt.
#[tokio::test]
async fn c2_output_beyond_its_limit_is_charged_without_waiting() {
    let world = anthropic("output_tpm = 1000");
    let body = message("hello", 5_000);
    let request = ModelRequest::read(Api::Messages, body.as_bytes()).expect("a request");
    let mut admission = world.limits.admit(&request, &Caller::default(), None).await.expect("room");
    let mut reader = EventReader::new(Encoding::O200k);
    let start = r#"{"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}"#;
    reader.feed(format!("data: {start}\n\n").as_bytes());
    admission.produced(reader.streamed()).await.expect("charged");
    for second in 1..=20 {
        world.advance(1);
        let delta =
            format!(r#"{{"type":"message_delta","delta":{{}},"usage":{{"output_tokens":{}}}}}"#, 75 * second);
        reader.feed(format!("data: {delta}\n\n").as_bytes());
        admission.produced(reader.streamed()).await.expect("charged");
    }
    let settling = tokio::spawn(admission.settle(Usage { input: 9, cached: 0, output: 1_500 }));
    settle_down().await;
    assert!(settling.is_finished(), "it waits for room");
    settling.await.expect("no panic").expect("settled");
    // The last 600 tokens are charged to what was still held when the limit was reached.
    world.advance(45);
    assert_eq!(world.left("llm.claude-x.output_tpm").await, 0);
    world.advance(15);
    assert_eq!(world.left("llm.claude-x.output_tpm").await, 1_000);
}

#[tokio::test]
async fn c6_a_waiter_that_leaves_leaves_nothing() {
    let world = World::openai("tpm = 1000\nrpm = 10");
    world.call(1_000).await;
    let waiting = tokio::spawn({
        let world = world.clone();
        async move { world.admit(500).await.map(drop) }
    });
    settle_down().await;
    assert_eq!(world.limits.waiting("gpt-4o"), 1);
    waiting.abort();
    settle_down().await;
    assert_eq!(world.limits.waiting("gpt-4o"), 0);
    assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (9, 0));
}

#[tokio::test]
async fn a_deadline_ends_the_waiting_with_a_true_hint() {
    let world = World::openai("tpm = 1000");
    world.call(1_000).await;
    world.advance(10);
    let refusal =
        world.admit_within(100, Some(Duration::from_secs(20))).await.expect_err("there is no room in time");
    assert_eq!((refusal.kind, refusal.retry_after), (RefusalKind::Limited, Some(Duration::from_secs(50))));
    world.advance(50);
    assert!(world.admit_within(100, Some(Duration::ZERO)).await.is_ok());
}

#[tokio::test]
async fn a_client_that_is_out_does_not_hold_up_the_next() {
    let world = World::of(
        OPENAI,
        "[llm.models.gpt-4o]\ntpm = 1000\n[llm.clients.a]\nkey = 'k'\nmodels.gpt-4o = { rpm = 1 }\n[llm.clients.b]\nkey = 'l'",
    );
    let body = body(100);
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    let [a, b] = ["a", "b"].map(|name| Caller { client: Some(name.to_owned()) });
    world.limits.admit(&request, &a, None).await.expect("room").settle(used(100)).await.expect("settled");
    let waiting = tokio::spawn({
        let (world, a) = (world.clone(), a.clone());
        async move {
            let body = self::body(100);
            let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
            world.limits.admit(&request, &a, None).await.map(drop)
        }
    });
    settle_down().await;
    assert_eq!(world.limits.waiting("gpt-4o"), 1);
    world
        .limits
        .admit(&request, &b, Some(Duration::ZERO))
        .await
        .expect("the other goes on")
        .cancel()
        .await
        .expect("cancelled");
    world.advance(60);
    waiting.await.expect("no panic").expect("its own turn");
}

/// Twenty calls of 900 tokens that wait for a day.
async fn twenty_wait(world: &World) -> Vec<tokio::task::JoinHandle<()>> {
    let wait = |_| {
        let world = world.clone();
        tokio::spawn(async move {
            let _ = world.admit_within(900, Some(Duration::from_secs(86_400))).await;
        })
    };
    let waiting = (0..20).map(wait).collect();
    settle_down().await;
    waiting
}

/// A hint in a contended line counts the calls that wait: a call that comes back goes behind them.
#[tokio::test]
async fn a_hint_counts_the_calls_before() {
    let world = World::openai("tpm = 1000");
    world.call(1_000).await;
    world.advance(40);
    let day = Some(Duration::from_secs(86_400));
    let waiting = twenty_wait(&world).await;
    let refusal = world.admit_within(900, Some(Duration::ZERO)).await.expect_err("twenty are before it");
    // Tokens are given out by the thousand, a minute each, from 20 s on; and 18,900 are needed.
    let expected = Some(Duration::from_secs(20 + 18 * 60));
    assert_eq!(refusal.retry_after, expected, "{refusal}");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);

    let world = World::of(OPENAI, "llm.max_waiting = 20\n[llm.models.gpt-4o]\ntpm = 1000");
    world.call(1_000).await;
    world.advance(40);
    let waiting = twenty_wait(&world).await;
    let refusal = world.admit_within(900, day).await.expect_err("the line is full");
    assert_eq!((refusal.kind, refusal.retry_after), (RefusalKind::LineFull, expected));
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

/// The same where the quota of all is out as well, for a shorter time.
#[tokio::test]
async fn a_client_that_is_out_for_longer_does_not_hold_up_the_next() {
    let world = World::of(
        OPENAI,
        "[llm.models.gpt-4o]\ntpm = 1000\n[llm.clients.a]\nkey = 'k'\nmodels.gpt-4o = { rpm = 1 }\n\
         [llm.clients.b]\nkey = 'l'\n[llm.clients.d]\nkey = 'm'",
    );
    let day = Some(Duration::from_secs(86_400));
    let call = |client: &'static str, tokens: u64| {
        let world = world.clone();
        tokio::spawn(async move {
            let body = body(tokens);
            let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
            let caller = Caller { client: Some(client.to_owned()) };
            let admission = world.limits.admit(&request, &caller, day).await.expect("it waits");
            admission.settle(used(tokens)).await.expect("settled");
        })
    };
    let mut now = 0;
    let mut waiting = Vec::new();
    for (at, client, tokens) in
        [(0, "d", 800), (30, "a", 100), (31, "b", 100), (32, "a", 100), (33, "b", 100)]
    {
        world.advance(at - now);
        now = at;
        waiting.push(call(client, tokens));
        settle_down().await;
    }
    let is_done = |waiting: &Vec<tokio::task::JoinHandle<()>>| {
        waiting.iter().map(|one| one.is_finished()).collect::<Vec<_>>()
    };
    assert_eq!(is_done(&waiting), [true, true, true, false, false]);
    world.advance(60 - now);
    settle_down().await;
    assert_eq!(is_done(&waiting), [true, true, true, false, true], "800 tokens are free");
    world.advance(30);
    settle_down().await;
    assert_eq!(is_done(&waiting), [true; 5]);
}

/// A limit of `[limits]` that only one client names is that client's own, whatever its key is.
#[tokio::test]
async fn a_client_that_is_out_of_a_limit_of_the_company_does_not_hold_up_the_next() {
    let world = World::of(
        OPENAI,
        "[limits.team]\nstrategy = 'sliding_window'\nlimit = 1\nwindow = '60s'\n[llm.models.gpt-4o]\ntpm = 1000\n\
         [llm.clients.a]\nkey = 'k'\nlimits = ['team']\n[llm.clients.b]\nkey = 'l'",
    );
    let day = Some(Duration::from_secs(86_400));
    let call = |client: &'static str, tokens: u64| {
        let world = world.clone();
        tokio::spawn(async move {
            let body = body(tokens);
            let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
            let caller = Caller { client: Some(client.to_owned()) };
            world.limits.admit(&request, &caller, day).await.map(drop).is_ok()
        })
    };
    // A client that has had less goes first, so `a` is before `b` in the line.
    assert!(call("b", 300).await.expect("no panic"));
    assert!(call("a", 100).await.expect("no panic"), "the only request of its team");
    let out = call("a", 100);
    settle_down().await;
    let other = call("b", 100);
    settle_down().await;
    assert_eq!([out.is_finished(), other.is_finished()], [false, true]);
    out.abort();
}

/// A hint is of the moment at which it is given, and not of the last look.
#[tokio::test]
async fn a_refusal_after_a_wait_says_how_long_it_is_from_then() {
    // A call under way may give something back, so the wait is not in vain.
    let world = World::openai("tpm = 1000");
    let open = world.admit(1_000).await.expect("room");
    let waiting = tokio::spawn({
        let world = world.clone();
        async move { world.admit_within(100, Some(Duration::from_secs(20))).await }
    });
    settle_down().await;
    world.advance(20);
    let refusal = waiting.await.expect("no panic").expect_err("nothing came back");
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(40)), "{refusal}");
    assert_eq!(refusal.standing[0].reset_after, Duration::from_secs(40));
    drop(open);
}

/// A limit of the company is charged by what else there is and by calls of models, in one charge: together they never exceed it.
#[tokio::test]
async fn a_limit_of_the_company_is_charged_by_calls_and_by_all_else() {
    let world = World::of(
        OPENAI,
        "[limits.company]\nstrategy = 'sliding_window'\nlimit = 5\nwindow = '60s'\n\
         [llm.models.gpt-4o]\nrpm = 100\ntpm = 10000\nlimits = ['company']\nlimit_key = 'team:a'\n\
         [llm.clients.c]\nkey = 'k'\nlimits = ['company']\nlimit_key = 'team:a'",
    );
    let body = body(100);
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    let client = Caller { client: Some("c".to_owned()) };
    let now = Some(Duration::ZERO);
    let (mut checks, mut calls) = (0, 0);
    for _ in 0..10 {
        checks += u32::from(world.gate.check("company", "team:a").await.expect("a decision").is_allowed());
        if let Ok(admission) = world.limits.admit(&request, &client, now).await {
            calls += 1;
            // What it used is no number of requests, and a refusal by the provider was one.
            match calls {
                1 => admission.refused().await.expect("settled"),
                _ => admission.settle(used(100)).await.expect("settled"),
            }
        }
    }
    assert_eq!((checks, calls), (3, 2));
    let refusal = world.limits.admit(&request, &client, now).await.expect_err("the company is out");
    assert_eq!(refusal.reason, "Rate limit exceeded: 5 requests / 5 of the limit company");
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(60)));
    assert_eq!(
        (world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await),
        (98, 9_900),
        "a call that was refused is charged nowhere"
    );
    // One that was never sent is none.
    world.advance(60);
    world.limits.admit(&request, &client, now).await.expect("room").cancel().await.expect("cancelled");
    assert_eq!(world.gate.status("company", "team:a").await.expect("a status").remaining(), 5);
}

#[tokio::test]
async fn an_unknown_model_passes_or_is_refused() {
    let body = r#"{"model":"other","messages":[]}"#;
    let request = ModelRequest::read(Api::ChatCompletions, body.as_bytes()).expect("a request");
    let world = World::openai("rpm = 1");
    for _ in 0..5 {
        world
            .limits
            .admit(&request, &Caller::default(), None)
            .await
            .expect("it passes")
            .settle(Usage::default())
            .await
            .expect("settled");
    }
    let world = World::of(OPENAI, "llm.unknown_model = 'refuse'\n[llm.models.gpt-4o]\nrpm = 1");
    let refusal = world.limits.admit(&request, &Caller::default(), None).await.expect_err("refused");
    assert_eq!(refusal.kind, RefusalKind::UnknownModel);
}
