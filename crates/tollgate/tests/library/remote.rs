//! Counters in a remote store: the same calls and the same answers over any `dyn Store`.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate::store::Failure;
use tollgate::store::Outcome as Numbers;
use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{
    Allowance, Charge, ChargeId, Decision, Denied, Key, ManualClock, Outcome, Reservation, Rule, Settled,
    Settlement, Tollgate, TollgateBuilder,
};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{
    Dice, a_minute, at_once, bucket, charged, every_strategy, hands, is_by_the_clock, on, one, secs, waited,
};

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

fn near_and_far(hands: &ManualClock) -> (Tollgate, Tollgate, Arc<FaultyStore>) {
    let faulty = FaultyStore::new(hands);
    (with_rules(on(hands)), with_rules(on(hands).store(faulty.clone())), faulty)
}

/// A decision, whatever its source.
fn said(decision: &Decision) -> Vec<(bool, Answer)> {
    decision.outcomes().iter().map(|outcome| (decision.is_allowed(), answer(outcome))).collect()
}

type Answer = (&'static str, Numbers, Source, bool);

/// An outcome, whatever its source.
fn answer(outcome: &Outcome) -> Answer {
    let source = match outcome.source() {
        Source::DenialCache => Source::Store,
        source => source,
    };
    (outcome.limit(), *outcome.numbers(), source, outcome.is_shadow())
}

/// What a reservation call says.
fn reserved(answer: &Result<Reservation, Denied>) -> &Decision {
    match answer {
        Ok(reservation) => reservation.decision(),
        Err(denied) => denied.decision(),
    }
}

/// Charges without leases, or reserves where there are any: an error on both stores else.
fn charge(gate: &Tollgate, asks: &[Charge<'_>]) -> Decision {
    match asks.iter().any(|ask| ask.limit() == "workers") {
        false => ready(gate.charge(asks)).unwrap(),
        true => {
            let error = ready(gate.charge(asks)).unwrap_err().to_string();
            assert!(error.contains("use acquire, or reserve"), "{error}");
            reserved(&ready(gate.reserve(asks, Duration::ZERO)).unwrap()).clone()
        }
    }
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
    let faulty = FaultyStore::new(&hands);
    let near = with_rules(on(&hands));
    let far = with_rules(on(&hands).store(faulty.clone()).denial_cache(denial_cache));
    let mut dice = Dice(11);
    let mut open: Vec<(ChargeId, ChargeId)> = Vec::new();
    for _ in 0..5_000 {
        hands.advance(Duration::from_millis(dice.below(most_ms)));
        let count = 1 + dice.below(3);
        let asks: Vec<Charge<'_>> = (0..count)
            .map(|_| {
                let limit = dice.pick(&["api", "api", "watching", "workers", "free", "shut"]);
                let key = dice.pick(&["a", "default:a", "b", "vip", "free", "shut", "user:c:v1", ""]);
                Charge::new(limit, key).cost(1 + dice.below(3))
            })
            .collect();
        let (limit, key) =
            (dice.pick(&["api", "watching", "workers", "free", "shut"]), dice.pick(&["a", "vip", ""]));
        match dice.below(10) {
            0..4 => {
                let [here, there] = [&near, &far].map(|gate| said(&charge(gate, &asks)));
                assert_eq!(here, there, "{asks:?}")
            }
            4 => assert_eq!(ready(near.peek(&asks)).unwrap(), ready(far.peek(&asks)).unwrap(), "{asks:?}"),
            5 | 6 => {
                let ttl = Duration::from_secs(dice.below(20));
                let [here, there] = [&near, &far].map(|gate| ready(gate.reserve(&asks, ttl)).unwrap());
                assert_eq!(here.is_ok(), reserved(&here).is_allowed());
                assert_eq!(said(reserved(&here)), said(reserved(&there)), "{asks:?}");
                open.extend(here.ok().zip(there.ok()).map(|(here, there)| (here.id(), there.id())));
            }
            7 => {
                let Some((here, there)) = open.pop() else { continue };
                let settlement = match dice.below(4) {
                    0 => Settlement::Cancel,
                    1 => Settlement::Renew,
                    2 => Settlement::Named(Vec::new()),
                    _ => Settlement::Release,
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
    assert!(faulty.calls() > 1_000);
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
    let (_, far, faulty) = near_and_far(&hands);
    assert!(ready(far.charge(&[Charge::new("api", "a").cost(5)])).unwrap().is_allowed());
    let is_admitted = |answer: &Result<Decision, tollgate::Error>| answer.as_ref().unwrap().is_allowed();
    let mut crowd = Crowd::new();
    crowd.join(far.wait(one(Charge::new("api", "a").cost(3)), HOUR));
    crowd.join(far.wait(one(Charge::new("api", "a")), HOUR));
    crowd.join(far.wait(one(Charge::new("api", "a").cost(2)), Duration::from_secs(4)));
    let before = faulty.calls();
    for (second, expected) in [(1, &[][..]), (2, &[]), (3, &[0]), (4, &[1]), (5, &[])] {
        hands.advance(secs(1));
        let done = crowd.run();
        let admitted: Vec<usize> =
            done.iter().filter(|(_, answer)| is_admitted(answer)).map(|(who, _)| *who).collect();
        assert_eq!(admitted, expected, "second {second}");
        assert!(done.iter().all(|(who, answer)| *who == 2 || is_admitted(answer)));
    }
    let asked = faulty.calls() - before;
    assert!(asked <= 6, "the clock moved five times, and only the first in line asks: {asked} calls");

    assert!(ready(waited(&far, Charge::new("free", "a"))).unwrap().is_allowed());
    assert!(ready(waited(&far, Charge::new("watching", "a").cost(9))).unwrap().is_allowed());
    for ask in [
        Charge::new("api", "a").cost(6),
        Charge::new("shut", "a"),
        Charge::new("api", "shut"),
        Charge::new("api", ""),
    ] {
        assert_eq!(
            ready(far.wait(std::slice::from_ref(&ask), HOUR)).unwrap().retry_after(),
            None,
            "{ask:?}: never"
        );
    }

    // A reset, or a settlement, made through this registry wakes those who wait here.
    let reserved = ready(far.reserve(&[Charge::new("workers", "pool").cost(2)], HOUR)).unwrap();
    let id = reserved.unwrap().id();
    let mut crowd = Crowd::new();
    crowd.join(waited(&far, Charge::new("workers", "pool").cost(2)));
    crowd.join(waited(&far, Charge::new("workers", "pool")));
    assert_eq!(ready(far.settle(id, &Settlement::Cancel)).unwrap(), Settled::Done);
    assert_eq!(crowd.run_to_see_who_is_done(), [0]);
    assert!(ready(far.reset("workers", "pool")).unwrap());
    assert_eq!(crowd.run_to_see_who_is_done(), [1]);
}

/// What another process gave back was seen only when the refusal that was reported first had run out.
#[test]
fn a_waiter_looks_again_within_a_quarter_of_a_second() {
    for limit in every_strategy(1).into_iter().filter(|limit| !is_by_the_clock(limit)) {
        let hands = hands();
        let faulty = FaultyStore::new(&hands);
        let process = || on(&hands).limit("api", limit).denial_cache(HOUR).store(faulty.clone()).build();
        let (ours, theirs) = (process().unwrap(), process().unwrap());
        let reserved = ready(theirs.reserve(&[Charge::new("api", "a")], HOUR)).unwrap();
        let mut crowd = Crowd::new();
        for _ in 0..3 {
            crowd.join(waited(&ours, Charge::new("api", "a")));
        }
        let id = reserved.unwrap().id();
        assert_eq!(ready(theirs.settle(id, &Settlement::Cancel)).unwrap(), Settled::Done);
        hands.advance(Duration::from_millis(100));
        assert!(crowd.run().is_empty(), "{limit}: it does not ask all the time");
        hands.advance(Duration::from_millis(150));
        assert_eq!(crowd.run_to_see_who_is_done(), [0], "{limit}");
    }
}

#[test]
fn only_the_first_in_line_looks_again_and_not_in_step_with_others() {
    let hands = hands();
    let faulty = FaultyStore::new(&hands);
    let gate = on(&hands).limit("api", at_once(1)).store(faulty.clone()).build().unwrap();
    let mut crowd = Crowd::new();
    for key in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        assert!(charged(&gate, &[Charge::new("api", key)]).is_allowed());
        for _ in 0..5 {
            crowd.join(waited(&gate, Charge::new("api", key)));
        }
    }
    let before = faulty.calls();
    let mut at_once = Vec::new();
    for _ in 0..5_000 {
        let asked = faulty.calls();
        hands.advance(Duration::from_millis(1));
        assert!(crowd.run().is_empty());
        at_once.push(faulty.calls() - asked);
    }
    let asked = faulty.calls() - before;
    assert!((8 * 20..=8 * 34).contains(&asked), "{asked} calls of eight waiters in five seconds");
    let in_step = at_once.iter().filter(|calls| **calls >= 7).count();
    assert!(in_step < 3, "all of them asked in the same millisecond {in_step} times");
}

#[test]
fn what_needs_counters_in_this_process_is_refused_clearly() {
    let hands = hands();
    let (_, far, _) = near_and_far(&hands);
    let error = far.local("api").unwrap_err();
    let message = "the counters of `api` are in a remote store and not in this process; use the async calls of Tollgate";
    assert_eq!((error.to_string().as_str(), error.is_transient()), (message, false));
    let unknown = far.local("apis").unwrap_err().to_string();
    assert!(unknown.contains("did you mean `api`?"), "{unknown}");
    assert!(far.local("default").is_err());

    let reserved = ready(far.reserve(&[Charge::new("api", "a").cost(3)], HOUR)).unwrap();
    let reservation = reserved.unwrap();
    // A reservation is settled by the same calls as on the memory store.
    assert_eq!(ready(reservation.renew()).unwrap(), Settled::Done);
    assert_eq!(ready(reservation.settle_each(&[1])).unwrap(), Settled::Done);
    assert_eq!(ready(far.status("api", "a")).unwrap().used(), 1);
    assert_eq!(ready(reservation.cancel()).unwrap(), Settled::Already);
    assert_eq!(ready(far.settle(reservation.id(), &Settlement::Actual(1))).unwrap(), Settled::Already);
}

#[test]
fn what_cannot_be_answered_without_the_store_is_an_error_that_may_pass() {
    let hands = hands();
    let (_, far, faulty) = near_and_far(&hands);
    let asks = [Charge::new("api", "a"), Charge::new("free", "a")];
    let reserved = ready(far.reserve(&asks, HOUR)).unwrap().unwrap();

    faulty.answers_pings(true);
    faulty.fault(Fault::Fails(Failure::Connection));
    for (call, error) in [
        ("settle", ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap_err()),
        ("status", ready(far.status("api", "a")).unwrap_err()),
        ("reset", ready(far.reset("api", "a")).unwrap_err()),
    ] {
        assert!(error.is_transient(), "{call}");
        assert_eq!(error.to_string(), "could not ask the store", "{call}");
        assert_eq!(error.source().unwrap().to_string(), "on purpose", "{call}");
    }
    faulty.answers_pings(false);
    hands.advance(secs(1));
    for _ in 0..2 {
        let _ = ready(far.status("api", "a"));
    }
    let error = ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap_err();
    assert!(
        error.is_transient() && error.to_string().starts_with("the store is down (connection)"),
        "{error}"
    );

    faulty.fault(Fault::None);
    hands.advance(secs(1));
    assert_eq!(ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap(), Settled::Done);
    assert_eq!(ready(far.status("api", "a")).unwrap().used(), 0);
}

#[test]
fn a_call_that_is_wrong_is_an_error_and_no_failure_of_the_store() {
    let hands = hands();
    let (_, far, faulty) = near_and_far(&hands);
    faulty.fault(Fault::Invalid);
    for _ in 0..20 {
        let error = ready(far.charge(&[Charge::new("api", "a")])).unwrap_err();
        assert!(!error.is_transient() && error.to_string() == "the call is wrong", "{error}");
        assert!(ready(far.peek(&[Charge::new("api", "a")])).is_err());
        let each = ready(far.charge_each(&["a", "b"].map(|key| Charge::new("api", key)))).unwrap();
        assert!(each.len() == 2 && each.iter().all(Result::is_err));
        assert!(ready(waited(&far, Charge::new("api", "a"))).is_err());
    }
    let health = far.store_health();
    assert_eq!((health.fallen_back, health.outages, health.last_failure), (0, 0, None));
    faulty.fault(Fault::None);
    assert!(ready(far.charge(&[Charge::new("api", "a")])).unwrap().is_allowed());
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
    let faulty = FaultyStore::new(&hands);
    let [near, far] = [(); 2].map(|()| Arc::new(Count::default()));
    let gates = [
        (with_rules(on(&hands).observer(near.clone())), &near),
        (with_rules(on(&hands).store(faulty.clone()).observer(far.clone())), &far),
    ];
    for (gate, count) in gates {
        let asks = [Charge::new("api", "a"), Charge::new("shut", "a"), Charge::new("free", "")];
        let expected =
            |events: usize, call: &str| assert_eq!(count.0.swap(0, Ordering::SeqCst), events, "{call}");
        let _ = charged(&gate, &asks);
        expected(3, "charge");
        let _ = ready(gate.peek(&asks)).unwrap();
        expected(3, "peek");
        drop(ready(gate.reserve(&asks[..1], HOUR)).unwrap());
        expected(1, "reserve");
        let _ = ready(gate.wait(&asks[..1], HOUR)).unwrap();
        expected(1, "wait");
        let _ = ready(gate.status("api", "a")).unwrap();
        expected(0, "status");
        ready(gate.reset("api", "a")).unwrap();
        expected(0, "reset");
        faulty.fault(Fault::Invalid);
        let failed = [ready(gate.wait(&asks[..1], HOUR)).is_err(), ready(gate.check("api", "a")).is_err()];
        faulty.fault(Fault::None);
        expected(if failed == [true; 2] { 0 } else { 2 }, "a call that could not be decided is no decision");
    }
}

#[test]
fn what_meets_no_counters_is_answered_without_asking_the_store() {
    let hands = hands();
    let (_, far, faulty) = near_and_far(&hands);
    faulty.fault(Fault::Fails(Failure::Connection));
    for (limit, key, allowed) in
        [("free", "a", true), ("api", "free", true), ("shut", "a", false), ("api", "", false)]
    {
        let asks = [Charge::new(limit, key)];
        assert_eq!(ready(far.charge(&asks)).unwrap().is_allowed(), allowed, "{limit} {key}");
        assert_eq!(ready(far.peek(&asks)).unwrap().is_allowed(), allowed, "{limit} {key}");
        assert_eq!(ready(far.status(limit, key)).unwrap().is_allowed(), allowed, "{limit} {key}");
        assert_eq!(ready(far.wait(&asks, HOUR)).unwrap().is_allowed(), allowed, "{limit} {key}");
    }
    assert!(!ready(far.reset("free", "a")).unwrap());
    assert_eq!(faulty.calls(), 0);
}

#[test]
fn many_keys_are_checked_in_few_calls_each_by_itself() {
    let hands = hands();
    let (near, far, faulty) = near_and_far(&hands);
    let keys: Vec<String> = (0..150).map(|number| format!("user:{number}")).collect();
    let check_many = |gate: &Tollgate, limit: &str, keys: &[&str]| {
        let charges: Vec<Charge<'_>> = keys.iter().map(|key| Charge::new(limit, *key)).collect();
        ready(gate.charge_each(&charges)).unwrap().into_iter().collect::<Result<Vec<_>, _>>()
    };
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let answers = check_many(&far, "api", &keys).unwrap();
    assert_eq!((answers.len(), faulty.calls()), (150, 3), "64 in a call");
    assert!(answers.iter().all(|answer| answer.remaining() == 4 && answer.source() == Source::Store));

    // Spellings of one key are one key, refusals delay no other key, and every kind of key is answered in its place.
    let keys = ["a", "shut", "a", "default:a", "free", "", "a", "vip", "a", "b", "a", "a"];
    for (name, limit) in [("api", "api"), ("watching", "watching"), ("free", "free")] {
        let before = faulty.calls();
        let [here, there] = [&near, &far].map(|gate| check_many(gate, limit, &keys).unwrap());
        assert_eq!(here.len(), keys.len());
        for (key, (here, there)) in keys.iter().zip(here.iter().zip(&there)) {
            assert_eq!(answer(here), answer(there), "{name} {key}");
        }
        assert!(faulty.calls() - before <= 7, "as many calls as the commonest key needs");
    }
    assert!(check_many(&far, "api", &[]).unwrap().is_empty());
    assert!(check_many(&far, "ap", &["a"]).is_err());
    assert!(check_many(&far, "workers", &["a"]).is_err());

    // What is wrong with one is its own answer, and the others are charged.
    let wrong = [
        Charge::new("api", "e"),
        Charge::new("ap", "e"),
        Charge::new("workers", "e"),
        Charge::new("api", "e").cost(0),
        Charge::new("api", "e"),
    ];
    for gate in [&near, &far] {
        let each = ready(gate.charge_each(&wrong)).unwrap();
        let left: Vec<_> = each.iter().map(|one| one.as_ref().ok().map(|one| one.remaining())).collect();
        assert_eq!(left, [Some(4), None, None, None, Some(3)]);
    }

    faulty.fault(Fault::Fails(Failure::Timeout));
    let answers = check_many(&far, "api", &["x", "shut", "x"]).unwrap();
    let sources: Vec<Source> = answers.iter().map(|answer| answer.source()).collect();
    assert_eq!(sources, [Source::FallbackLocal, Source::Blocked, Source::FallbackLocal]);
}

/// Work for any thread of a runtime.
#[test]
fn every_call_can_be_sent_to_another_thread() {
    fn sent<T: Send>(_: T) {}
    let hands = hands();
    let (_, far, _) = near_and_far(&hands);
    let asks = [Charge::new("api", "a")];
    sent(far.charge(&asks));
    sent(far.peek(&asks));
    sent(far.reserve(&asks, HOUR));
    sent(far.settle(ChargeId::random(), &Settlement::Cancel));
    sent(far.status("api", "a"));
    sent(far.reset("api", "a"));
    sent(far.wait(&asks, HOUR));
    sent(far.charge_each(&asks));
    sent(far.acquire("api", "a"));
    sent(far.reserve_within(&asks, HOUR, HOUR));
    sent(far.acquire_within("api", "a", HOUR));
    sent(far.flush());
}
