//! Calls that a provider refuses: when they are sent again, and what they are charged.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::json;
use tollgate::store::Micros;
use tollgate_llm::RefusalKind;
use tollgate_llm::executor::{
    Admit, BatchReport, CallErrorKind, Executor, ExecutorBuilder, Outgoing, Reply, RetryPolicy, SendError,
    Transport,
};
use tollgate_llm::provider::Failure;

use super::{START, Scripted, World, call, settle_down, used, with_keys};

pub(super) fn refusal(status: u16, code: &str, header: Option<(&'static str, &str)>) -> Reply {
    let body = json!({ "error": { "message": "m", "type": "requests", "code": code } }).to_string();
    let headers =
        header.iter().map(|(name, value)| (http::HeaderName::from_static(name), value.parse().unwrap()));
    Reply { status, headers: headers.collect(), body: body.into_bytes() }
}

/// A hint is waited for, each attempt is one request, and an attempt that did not run costs no tokens.
#[tokio::test]
async fn d1_a_refused_call_is_sent_again_after_the_hint() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let executor = world.executor(RetryPolicy::default(), |number, _| match number {
        0 => Ok(refusal(429, "rate_limit_exceeded", Some(("retry-after", "10")))),
        1 => Ok(refusal(529, "overloaded", None)),
        2 => Err(SendError::NotSent("refused".to_owned())),
        _ => Ok(used(92)),
    });
    let pending = executor.submit(call(1));
    settle_down().await;
    world.advance(9);
    settle_down().await;
    assert_eq!(world.sent(), 1, "not before the hint");
    world.advance(2);
    settle_down().await;
    assert_eq!(world.sent(), 2);
    // Neither the refusal nor the overload has used tokens.
    assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (8, 1_000));
    world.advance(1);
    settle_down().await;
    world.advance(2);
    settle_down().await;
    let completed = pending.result().await.expect("an answer");
    assert_eq!((completed.attempts, completed.is_estimated), (4, false));
    assert_eq!(
        (world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await),
        (7, 900),
        "what was not sent is free"
    );
}

/// An overload that a proxy may have answered while the call went on counts as reserved.
#[tokio::test]
async fn d3_a_503_stays_charged_and_a_529_does_not() {
    for (status, left) in [(503, 900), (529, 1_000)] {
        let world = World::of("[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
        let executor =
            world.executor(RetryPolicy::never(), move |_, _| Ok(refusal(status, "overloaded", None)));
        let error = executor.submit(call(1)).result().await.expect_err("it is overloaded");
        assert_eq!(error.kind, CallErrorKind::Provider(Failure::Overloaded));
        assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (9, left));
    }
}

/// A provider that says when to come back has not failed, so no attempt is used up. One that says so for ever is asked less and less.
#[tokio::test]
async fn d1_a_hint_is_followed_as_often_as_it_comes_and_not_for_ever() {
    let limited = |ms: &str| refusal(429, "rate_limit_exceeded", Some(("retry-after-ms", ms)));
    let world = World::of("[llm.models.gpt-4o]\nrpm = 1000");
    let executor = world.executor(RetryPolicy::default(), move |number, _| match number {
        0..20 => Ok(limited("2000")),
        _ => Ok(used(92)),
    });
    let pending = executor.submit(call(1));
    for _ in 0..200 {
        settle_down().await;
        world.advance(10);
    }
    assert_eq!(pending.result().await.expect("an answer").attempts, 21);

    let world = World::of("[llm.models.gpt-4o]\nrpm = 100000");
    let limited = |_: usize, _: &serde_json::Value| {
        Ok(refusal(429, "rate_limit_exceeded", Some(("retry-after-ms", "1"))))
    };
    let transport = Scripted { script: limited, sent: world.sent.clone(), clock: world.hands.clock() };
    let executor = ExecutorBuilder::default()
        .max_wait(Duration::from_secs(3_600))
        .build(world.limits.clone(), transport);
    let pending = executor.submit(call(1));
    for _ in 0..800 {
        settle_down().await;
        world.advance(5);
    }
    let error = pending.result().await.expect_err("it never fits");
    assert_eq!(error.kind, CallErrorKind::Provider(Failure::Limited));
    // Every minute or a little less, once the back-off is at its longest.
    assert!((50..=100).contains(&world.sent()), "{}", world.sent());
}

/// A line that is full says nothing about the call, which has a day to wait.
#[tokio::test]
async fn a_full_line_is_waited_out() {
    for admit in [Admit::AsCapacityAllows, Admit::AllOrNothing] {
        let world = World::of("llm.max_waiting = 1\n[llm.models.gpt-4o]\nrpm = 1");
        let executor = world.executor(RetryPolicy::never(), |_, _| Ok(used(92)));
        let calls: Vec<_> = (0..4).map(|number| executor.submit_batch(vec![call(number)], admit)).collect();
        for _ in 0..60 {
            settle_down().await;
            world.advance(10);
        }
        for batch in calls {
            let results = batch.all().await;
            assert!(results.iter().all(Result::is_ok), "{admit:?}: {results:?}");
        }
    }
    // Not for longer than the executor waits.
    let world = World::of("llm.max_waiting = 1\n[llm.models.gpt-4o]\nrpm = 1");
    let patient = world.executor(RetryPolicy::never(), |_, _| Ok(used(92)));
    let before = patient.submit_batch((0..2).map(call).collect(), Admit::AsCapacityAllows);
    settle_down().await;
    let transport = Scripted {
        script: |_: usize, _: &serde_json::Value| Ok(used(92)),
        sent: world.sent.clone(),
        clock: world.hands.clock(),
    };
    let executor =
        ExecutorBuilder::default().max_wait(Duration::from_secs(20)).build(world.limits.clone(), transport);
    let pending = executor.submit(call(3));
    for _ in 0..10 {
        settle_down().await;
        world.advance(5);
    }
    let error = pending.result().await.expect_err("the line stays full");
    // Full at first; then those before it take longer than the time that is left.
    let kinds = [RefusalKind::LineFull, RefusalKind::Limited].map(CallErrorKind::NotAdmitted);
    assert!(kinds.contains(&error.kind), "{error:?}");
    assert_eq!(world.sent(), 1);
    drop(before);
}

/// What the provider reports to be left is taken in by the executor as by the gateway.
#[tokio::test]
async fn e2_what_others_have_used_is_charged() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10");
    let executor = world.executor(RetryPolicy::never(), |_, _| {
        let name = http::HeaderName::from_static("x-ratelimit-remaining-requests");
        Ok(Reply { headers: [(name, "3".parse().unwrap())].into_iter().collect(), ..used(92) })
    });
    executor.submit(call(1)).result().await.expect("an answer");
    assert_eq!(world.left("llm.gpt-4o.rpm").await, 2, "six of others, and one more until the next report");
}

#[tokio::test]
async fn d2_a_billing_refusal_is_sent_once() {
    let world = World::of("[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let executor = world.executor(RetryPolicy::default(), |_, _| {
        Ok(refusal(429, "insufficient_quota", Some(("retry-after", "1"))))
    });
    let error = executor.submit(call(1)).result().await.expect_err("nobody pays");
    assert_eq!((error.kind, error.attempts), (CallErrorKind::Provider(Failure::Billing), 1));
    assert_eq!((world.left("llm.gpt-4o.rpm").await, world.left("llm.gpt-4o.tpm").await), (9, 1_000));
}

/// A group of keys that the provider asks to leave alone holds up nobody while another group is free: its quota is another one.
#[tokio::test]
async fn f1_a_hint_of_one_group_is_not_waited_for_while_another_is_free() {
    struct ByGroup(Arc<Mutex<Vec<(Micros, String)>>>, tollgate::Clock);
    impl Transport for ByGroup {
        async fn send(&self, outgoing: Outgoing<'_>) -> Result<Reply, SendError> {
            let group = outgoing.group.unwrap_or_default().to_owned();
            self.0.lock().push((self.1.now(), group.clone()));
            Ok(match group.as_str() {
                "two" => used(92),
                _ => refusal(429, "rate_limit_exceeded", Some(("retry-after", "900"))),
            })
        }
    }
    let keys = "keys = [{ key = 'a', group = 'one' }, { key = 'b', group = 'two' }]";
    let world = World::from(with_keys("llm.margin = '0s'\n[llm.models.gpt-4o]\nrpm = 10", keys));
    let sent: Arc<Mutex<Vec<(Micros, String)>>> = Arc::default();
    // More than the longest hint that is waited for: the call would fail if it waited.
    let executor = Executor::new(world.limits.clone(), ByGroup(sent.clone(), world.hands.clock()));
    let results = executor.submit_batch((0..4).map(call).collect(), Admit::AsCapacityAllows).all().await;
    let report = BatchReport::of(&results);
    let sent = sent.lock().clone();
    let refused = sent.iter().filter(|(_, group)| group == "one").count();
    assert!((1..=4).contains(&refused), "{sent:?}");
    assert!(sent.iter().all(|(at, _)| *at == Micros::from_secs(START)), "nobody waits: {sent:?}");
    let expected = BatchReport {
        answered: 4,
        retried: refused,
        attempts: 4 + refused as u64,
        limited: refused as u64,
        tokens: 400,
        ..BatchReport::default()
    };
    assert_eq!(report, expected);
}
