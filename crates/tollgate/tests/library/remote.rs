//! Counters that are elsewhere: the same calls and the same answers over any `dyn Store`.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate::{
    Allowance, Ask, Decision, Event, Failure, HoldId, Key, LimitOutcome, ManualClock, Micros, Observer, Rule,
    Settled, Settlement, Source, Tollgate, TollgateBuilder, WaitError,
};

use crate::crowd::{Crowd, ready};
use crate::elsewhere::{Elsewhere, Fault};
use crate::scene::{Dice, a_minute, at_once, bucket, every_strategy, hands, is_by_the_clock, on, secs};

const HOUR: Duration = Duration::from_secs(3_600);

fn with_rules(builder: TollgateBuilder) -> Tollgate {
    let key = |text| Key::parse(text).unwrap();
    let api = Rule::new("api", bucket("1/s", 5))
        .and_then(|rule| rule.with_override(key("vip"), bucket("1/s", 9)))
        .and_then(|rule| rule.with_override(key("free"), Allowance::Unlimited))
        .and_then(|rule| rule.with_override(key("shut"), Allowance::Blocked));
    builder
        .rule(api.unwrap())
        .rule(Rule::new("watching", a_minute(2)).unwrap().shadow())
        .rule(Rule::new("workers", at_once(2)).unwrap())
        .rule(Rule::unlimited("free").unwrap())
        .rule(Rule::blocked("shut").unwrap())
        .build()
        .unwrap()
}

fn near_and_far(hands: &ManualClock) -> (Tollgate, Tollgate, Arc<Elsewhere>) {
    let elsewhere = Elsewhere::new(hands);
    (with_rules(on(hands)), with_rules(on(hands).store(elsewhere.clone())), elsewhere)
}

/// What a decision says, whoever said it.
fn said(decision: Decision<'_>) -> Vec<(bool, LimitOutcome<'_>)> {
    let anyone = |limit: &LimitOutcome<'_>| match limit.source {
        Source::DenialCache => Source::Store,
        source => source,
    };
    decision
        .limits()
        .iter()
        .map(|limit| (decision.allowed(), LimitOutcome { source: anyone(limit), ..*limit }))
        .collect()
}

#[test]
fn every_call_is_answered_as_on_the_memory_store() {
    for (most_ms, denial_cache) in [(900, Duration::ZERO), (900, HOUR), (30, HOUR)] {
        answers_are_the_same_near_and_far(most_ms, denial_cache);
    }
}

/// With up to so many milliseconds between two calls.
fn answers_are_the_same_near_and_far(most_ms: u64, denial_cache: Duration) {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let near = with_rules(on(&hands));
    let far = with_rules(on(&hands).store(elsewhere.clone()).denial_cache(denial_cache));
    let mut dice = Dice(11);
    let mut open: Vec<(HoldId, HoldId)> = Vec::new();
    for _ in 0..5_000 {
        hands.advance(Micros::from_millis(dice.below(most_ms)));
        let count = 1 + dice.below(3);
        let asks: Vec<Ask<'_>> = (0..count)
            .map(|_| {
                let limit = dice.pick(&["api", "api", "watching", "workers", "free", "shut"]);
                let key = dice.pick(&["a", "default:a", "b", "vip", "free", "shut", "user:c:v1", ""]);
                Ask::new(limit, key).cost(1 + dice.below(3))
            })
            .collect();
        let (limit, key) =
            (dice.pick(&["api", "watching", "workers", "free", "shut"]), dice.pick(&["a", "vip", ""]));
        match dice.below(10) {
            0..4 => {
                let [here, there] = [&near, &far].map(|gate| said(ready(gate.charge(&asks)).unwrap()));
                assert_eq!(here, there, "{asks:?}")
            }
            4 => assert_eq!(ready(near.peek(&asks)).unwrap(), ready(far.peek(&asks)).unwrap(), "{asks:?}"),
            5 | 6 => {
                let ttl = Duration::from_secs(dice.below(20));
                let [here, there] = [&near, &far].map(|gate| ready(gate.reserve(&asks, ttl)).unwrap());
                let ids =
                    here.reservation.zip(there.reservation).map(|(here, there)| (here.id(), there.id()));
                assert_eq!(ids.is_some(), here.decision.allowed());
                assert_eq!(said(here.decision), said(there.decision), "{asks:?}");
                open.extend(ids);
            }
            7 => {
                let Some((here, there)) = open.pop() else { continue };
                let settlement = match dice.below(3) {
                    0 => Settlement::Cancel,
                    1 => Settlement::Renew,
                    _ => Settlement::Each(Vec::new()),
                };
                assert_eq!(
                    ready(near.settle(here, &settlement)).unwrap(),
                    ready(far.settle(there, &settlement)).unwrap()
                );
            }
            8 => {
                assert_eq!(
                    ready(near.status(limit, key)).unwrap(),
                    ready(far.status(limit, key)).unwrap(),
                    "{limit} {key}"
                );
            }
            _ => match (ready(near.reset(limit, key)), ready(far.reset(limit, key))) {
                (Ok(here), Ok(there)) => assert_eq!(here, there, "{limit} {key}"),
                (Err(here), Err(there)) => assert_eq!(here.to_string(), there.to_string()),
                other => panic!("{limit} {key}: {other:?}"),
            },
        }
    }
    assert!(elsewhere.calls() > 1_000);
    assert_eq!(far.keys(), 0, "none of them in this process");
    let hits = far.store_health().denial_cache_hits;
    match most_ms {
        _ if denial_cache.is_zero() => assert_eq!(hits, 0),
        30 => assert!(hits > 0, "{hits} answers from the denial cache"),
        _ => {}
    }
}

#[test]
fn waiting_works_over_any_store() {
    let hands = hands();
    let (_, far, elsewhere) = near_and_far(&hands);
    assert!(ready(far.charge(&[Ask::new("api", "a").cost(5)])).unwrap().allowed());
    let mut crowd = Crowd::new();
    crowd.join(far.wait(Ask::new("api", "a").cost(3), HOUR));
    crowd.join(far.wait(Ask::new("api", "a"), HOUR));
    crowd.join(far.wait(Ask::new("api", "a").cost(2), Duration::from_secs(4)));
    let before = elsewhere.calls();
    for (second, expected) in [(1, &[][..]), (2, &[]), (3, &[0]), (4, &[1]), (5, &[])] {
        hands.advance(secs(1));
        let done = crowd.run();
        let admitted: Vec<usize> =
            done.iter().filter(|(_, answer)| answer.is_ok()).map(|(who, _)| *who).collect();
        assert_eq!(admitted, expected, "second {second}");
        assert!(done.iter().all(|(who, answer)| *who == 2 || answer.is_ok()));
    }
    let asked = elsewhere.calls() - before;
    assert!(asked <= 6, "the clock moved five times, and only the first in line asks: {asked} calls");

    assert!(ready(far.wait(Ask::new("free", "a"), HOUR)).unwrap().allowed);
    assert!(ready(far.wait(Ask::new("watching", "a").cost(9), HOUR)).unwrap().allowed);
    for ask in
        [Ask::new("api", "a").cost(6), Ask::new("shut", "a"), Ask::new("api", "shut"), Ask::new("api", "")]
    {
        assert!(matches!(ready(far.wait(ask, HOUR)), Err(WaitError::Never(_))), "{ask:?}");
    }

    // A reset, or a settlement, made through this registry wakes those who wait here.
    let reserved = ready(far.reserve(&[Ask::new("workers", "pool").cost(2)], HOUR)).unwrap();
    let id = reserved.reservation.unwrap().id();
    let mut crowd = Crowd::new();
    crowd.join(far.wait(Ask::new("workers", "pool").cost(2), HOUR));
    crowd.join(far.wait(Ask::new("workers", "pool"), HOUR));
    assert_eq!(ready(far.settle(id, &Settlement::Cancel)).unwrap(), Settled::Done);
    assert_eq!(crowd.run_to_see_who_is_done(), [0]);
    assert!(ready(far.reset("workers", "pool")).unwrap());
    assert_eq!(crowd.run_to_see_who_is_done(), [1]);
}

/// What another process gave back was seen only when the refusal that was told first had run out.
#[test]
fn a_waiter_looks_again_within_a_quarter_of_a_second() {
    for limit in every_strategy(1).into_iter().filter(|limit| !is_by_the_clock(limit)) {
        let hands = hands();
        let elsewhere = Elsewhere::new(&hands);
        let process = || on(&hands).limit("api", limit).denial_cache(HOUR).store(elsewhere.clone()).build();
        let (ours, theirs) = (process().unwrap(), process().unwrap());
        let reserved = ready(theirs.reserve(&[Ask::new("api", "a")], HOUR)).unwrap();
        let mut crowd = Crowd::new();
        for _ in 0..3 {
            crowd.join(ours.wait(Ask::new("api", "a"), HOUR));
        }
        let id = reserved.reservation.unwrap().id();
        assert_eq!(ready(theirs.settle(id, &Settlement::Cancel)).unwrap(), Settled::Done);
        hands.advance(Micros::from_millis(100));
        assert!(crowd.run().is_empty(), "{limit}: it does not ask all the time");
        hands.advance(Micros::from_millis(150));
        assert_eq!(crowd.run_to_see_who_is_done(), [0], "{limit}");
    }
}

#[test]
fn only_the_first_in_line_looks_again_and_not_in_step_with_others() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = on(&hands).limit("api", at_once(1)).store(elsewhere.clone()).build().unwrap();
    let mut crowd = Crowd::new();
    for key in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        assert!(ready(gate.acquire(key, "api")).unwrap().allowed());
        for _ in 0..5 {
            crowd.join(gate.wait(Ask::new("api", key), HOUR));
        }
    }
    let before = elsewhere.calls();
    let mut at_once = Vec::new();
    for _ in 0..5_000 {
        let asked = elsewhere.calls();
        hands.advance(Micros::from_millis(1));
        assert!(crowd.run().is_empty());
        at_once.push(elsewhere.calls() - asked);
    }
    let asked = elsewhere.calls() - before;
    assert!((8 * 20..=8 * 34).contains(&asked), "{asked} calls of eight waiters in five seconds");
    let in_step = at_once.iter().filter(|calls| **calls >= 7).count();
    assert!(in_step < 3, "all of them asked in the same millisecond {in_step} times");
}

#[test]
fn what_needs_counters_in_this_process_is_refused_clearly() {
    let hands = hands();
    let (_, far, _) = near_and_far(&hands);
    let error = far.limiter("api").unwrap_err();
    let message = "the counters of `api` are not in this process; use Tollgate's async calls";
    assert_eq!((error.to_string().as_str(), error.is_transient()), (message, false));
    let unknown = far.limiter("apis").unwrap_err().to_string();
    assert!(unknown.contains("did you mean `api`?"), "{unknown}");
    assert!(far.default_limiter().is_err());

    let reserved = ready(far.reserve(&[Ask::new("api", "a").cost(3)], HOUR)).unwrap();
    let reservation = reserved.reservation.unwrap();
    for refused in
        [reservation.settle(1), reservation.cancel(), reservation.renew(), reservation.settle_each(&[])]
    {
        let message = "this reservation's store is elsewhere; use Tollgate::settle";
        assert_eq!(refused.unwrap_err().to_string(), message);
    }
    assert_eq!(ready(far.settle(reservation.id(), &Settlement::Actual(1))).unwrap(), Settled::Done);
    assert_eq!(ready(far.status("api", "a")).unwrap().used(), 1);
}

#[test]
fn what_cannot_be_answered_without_the_store_is_an_error_that_may_pass() {
    let hands = hands();
    let (_, far, elsewhere) = near_and_far(&hands);
    let asks = [Ask::new("api", "a"), Ask::new("free", "a")];
    let reserved = ready(far.reserve(&asks, HOUR)).unwrap().reservation.unwrap();

    elsewhere.answers_pings(true);
    elsewhere.fault(Fault::Fails(Failure::Connection));
    for (call, error) in [
        ("settle", ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap_err()),
        ("status", ready(far.status("api", "a")).unwrap_err()),
        ("reset", ready(far.reset("api", "a")).unwrap_err()),
    ] {
        assert!(error.is_transient(), "{call}");
        assert_eq!(error.to_string(), "could not ask the store", "{call}");
        assert_eq!(error.source().unwrap().to_string(), "on purpose", "{call}");
    }
    elsewhere.answers_pings(false);
    hands.advance(secs(1));
    for _ in 0..2 {
        let _ = ready(far.status("api", "a"));
    }
    let error = ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap_err();
    assert!(
        error.is_transient() && error.to_string().starts_with("the store is down (connection)"),
        "{error}"
    );

    elsewhere.fault(Fault::None);
    hands.advance(secs(1));
    assert_eq!(ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap(), Settled::Done);
    assert_eq!(ready(far.status("api", "a")).unwrap().used(), 0);
}

#[test]
fn a_call_that_is_wrong_is_an_error_and_no_failure_of_the_store() {
    let hands = hands();
    let (_, far, elsewhere) = near_and_far(&hands);
    elsewhere.fault(Fault::Invalid);
    for _ in 0..20 {
        let error = ready(far.charge(&[Ask::new("api", "a")])).unwrap_err();
        assert!(!error.is_transient() && error.to_string() == "the call is wrong", "{error}");
        assert!(ready(far.peek(&[Ask::new("api", "a")])).is_err());
        assert!(ready(far.check_many("api", &["a"])).is_err());
        assert!(matches!(ready(far.wait(Ask::new("api", "a"), HOUR)), Err(WaitError::Failed(_))));
    }
    let health = far.store_health();
    assert_eq!((health.fallen_back, health.outages, health.last_failure), (0, 0, None));
    elsewhere.fault(Fault::None);
    assert!(ready(far.charge(&[Ask::new("api", "a")])).unwrap().allowed());
}

/// Counts events by what was done.
#[derive(Default)]
struct Count(AtomicUsize);

impl Observer for Count {
    fn decided(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn the_same_is_told_of_calls_near_and_far() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let [near, far] = [(); 2].map(|()| Arc::new(Count::default()));
    let gates = [
        (with_rules(on(&hands).observer(near.clone())), &near),
        (with_rules(on(&hands).store(elsewhere.clone()).observer(far.clone())), &far),
    ];
    for (gate, count) in gates {
        let asks = [Ask::new("api", "a"), Ask::new("shut", "a"), Ask::new("free", "")];
        let expected =
            |events: usize, call: &str| assert_eq!(count.0.swap(0, Ordering::SeqCst), events, "{call}");
        ready(gate.charge(&asks)).unwrap();
        expected(3, "charge");
        ready(gate.peek(&asks)).unwrap();
        expected(3, "peek");
        ready(gate.reserve(&asks[..1], HOUR)).unwrap();
        expected(1, "reserve");
        ready(gate.wait(asks[0], HOUR)).unwrap();
        expected(1, "wait");
        ready(gate.status("api", "a")).unwrap();
        expected(0, "status");
        ready(gate.reset("api", "a")).unwrap();
        expected(0, "reset");
        elsewhere.fault(Fault::Invalid);
        let failed = [ready(gate.wait(asks[0], HOUR)).is_err(), ready(gate.acquire("a", "api")).is_err()];
        elsewhere.fault(Fault::None);
        expected(if failed == [true; 2] { 0 } else { 2 }, "a call that could not be decided is no decision");
    }
}

#[test]
fn what_meets_no_counters_is_answered_without_asking_the_store() {
    let hands = hands();
    let (_, far, elsewhere) = near_and_far(&hands);
    elsewhere.fault(Fault::Fails(Failure::Connection));
    for (limit, key, allowed) in
        [("free", "a", true), ("api", "free", true), ("shut", "a", false), ("api", "", false)]
    {
        let asks = [Ask::new(limit, key)];
        assert_eq!(ready(far.charge(&asks)).unwrap().allowed(), allowed, "{limit} {key}");
        assert_eq!(ready(far.peek(&asks)).unwrap().allowed(), allowed, "{limit} {key}");
        assert_eq!(ready(far.status(limit, key)).unwrap().allowed, allowed, "{limit} {key}");
        assert_eq!(ready(far.wait(asks[0], HOUR)).is_ok(), allowed, "{limit} {key}");
    }
    assert!(!ready(far.reset("free", "a")).unwrap());
    assert_eq!(elsewhere.calls(), 0);
}

#[test]
fn many_keys_are_checked_in_few_calls_each_by_itself() {
    let hands = hands();
    let (near, far, elsewhere) = near_and_far(&hands);
    let keys: Vec<String> = (0..150).map(|number| format!("user:{number}")).collect();
    let answers = ready(far.check_many("api", &keys)).unwrap();
    assert_eq!((answers.len(), elsewhere.calls()), (150, 3), "64 in a call");
    assert!(answers.iter().all(|answer| answer.outcome.remaining == 4 && answer.source == Source::Store));

    // Spellings of one key are one key, refusals hold up nobody else, and every kind of key is answered in its place.
    let keys = ["a", "shut", "a", "default:a", "free", "", "a", "vip", "a", "b", "a", "a"];
    for (name, limit) in [("api", "api"), ("watching", "watching"), ("workers", "workers"), ("free", "free")]
    {
        let before = elsewhere.calls();
        let [here, there] = [&near, &far].map(|gate| ready(gate.check_many(limit, &keys)).unwrap());
        assert_eq!(here.len(), keys.len());
        for (key, (here, there)) in keys.iter().zip(here.iter().zip(&there)) {
            let source = if there.source == Source::DenialCache { Source::Store } else { there.source };
            assert_eq!(here, &LimitOutcome { source, ..*there }, "{name} {key}");
        }
        assert!(elsewhere.calls() - before <= 7, "as many calls as the commonest key needs");
    }
    assert!(ready(far.check_many("api", &[""; 0])).unwrap().is_empty());
    assert!(ready(far.check_many("ap", &["a"])).is_err());

    elsewhere.fault(Fault::Fails(Failure::Timeout));
    let answers = ready(far.check_many("api", &["x", "shut", "x"])).unwrap();
    let sources: Vec<Source> = answers.iter().map(|answer| answer.source).collect();
    assert_eq!(sources, [Source::FallbackLocal, Source::Blocked, Source::FallbackLocal]);
}

/// Work for any thread of a runtime.
#[test]
fn every_call_can_be_sent_to_another_thread() {
    fn sent<T: Send>(_: T) {}
    let hands = hands();
    let (_, far, _) = near_and_far(&hands);
    let asks = [Ask::new("api", "a")];
    sent(far.charge(&asks));
    sent(far.peek(&asks));
    sent(far.reserve(&asks, HOUR));
    sent(far.settle(HoldId::random(), &Settlement::Cancel));
    sent(far.status("api", "a"));
    sent(far.reset("api", "a"));
    sent(far.wait(asks[0], HOUR));
    sent(far.check_many("api", &["a"]));
    sent(far.give_back_slices());
}
