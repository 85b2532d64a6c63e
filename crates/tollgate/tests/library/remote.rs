//! Counters that are elsewhere: the same calls and the same answers over any `dyn Store`, and its failures passed on.

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tollgate::{
    Allowance, Ask, Event, Key, ManualClock, Micros, Observer, Rule, Settled, Settlement, Store, StoreError,
    Tollgate, TollgateBuilder, WaitError,
};
use tollgate_store::{Charged, Hold, HoldId, Item, MemoryOptions, MemoryStore, StoreFuture, StoredLimit};

use crate::crowd::{Crowd, ready};
use crate::scene::{Dice, a_minute, at_once, bucket, hands, on, secs};

const HOUR: Duration = Duration::from_secs(3_600);

/// A memory store that passes for one elsewhere, and can be cut off.
struct Elsewhere {
    store: MemoryStore,
    is_cut_off: AtomicBool,
    calls: AtomicUsize,
}

impl Elsewhere {
    fn new(hands: &ManualClock) -> Arc<Elsewhere> {
        let options = MemoryOptions { clock: hands.clock(), sweep_every: None, ..MemoryOptions::default() };
        Arc::new(Elsewhere { store: MemoryStore::new(options), is_cut_off: false.into(), calls: 0.into() })
    }

    fn answer<'a, T: Send + 'a>(&self, answer: StoreFuture<'a, T>) -> StoreFuture<'a, T> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.is_cut_off.load(Ordering::SeqCst) {
            return Box::pin(async {
                Err(StoreError::unavailable("could not ask the store", "connection refused"))
            });
        }
        answer
    }
}

impl Store for Elsewhere {
    fn charge<'a>(&'a self, items: &'a [Item<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        self.answer(Store::charge(&self.store, items, hold))
    }

    fn settle<'a>(&'a self, id: HoldId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        self.answer(Store::settle(&self.store, id, settlement))
    }

    fn peek<'a>(&'a self, items: &'a [Item<'a>]) -> StoreFuture<'a, Charged> {
        self.answer(Store::peek(&self.store, items))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        self.answer(Store::forget(&self.store, limit, key))
    }
}

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

#[test]
fn every_call_is_answered_as_on_the_memory_store() {
    let hands = hands();
    let (near, far, elsewhere) = near_and_far(&hands);
    let mut dice = Dice(11);
    let mut open: Vec<(HoldId, HoldId)> = Vec::new();
    for _ in 0..5_000 {
        hands.advance(Micros::from_millis(dice.below(900)));
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
                assert_eq!(ready(near.charge(&asks)).unwrap(), ready(far.charge(&asks)).unwrap(), "{asks:?}")
            }
            4 => assert_eq!(ready(near.peek(&asks)).unwrap(), ready(far.peek(&asks)).unwrap(), "{asks:?}"),
            5 | 6 => {
                let ttl = Duration::from_secs(dice.below(20));
                let [here, there] = [&near, &far].map(|gate| ready(gate.reserve(&asks, ttl)).unwrap());
                assert_eq!(here.decision, there.decision, "{asks:?}");
                let ids =
                    here.reservation.zip(there.reservation).map(|(here, there)| (here.id(), there.id()));
                assert_eq!(ids.is_some(), here.decision.allowed());
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
    assert!(elsewhere.calls.load(Ordering::SeqCst) > 1_000);
    assert_eq!(far.keys(), 0, "none of them in this process");
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
    let before = elsewhere.calls.load(Ordering::SeqCst);
    for (second, expected) in [(1, &[][..]), (2, &[]), (3, &[0]), (4, &[1]), (5, &[])] {
        hands.advance(secs(1));
        let done = crowd.run();
        let admitted: Vec<usize> =
            done.iter().filter(|(_, answer)| answer.is_ok()).map(|(who, _)| *who).collect();
        assert_eq!(admitted, expected, "second {second}");
        assert!(done.iter().all(|(who, answer)| *who == 2 || answer.is_ok()));
    }
    let asked = elsewhere.calls.load(Ordering::SeqCst) - before;
    assert!(asked <= 6, "nobody asks the store over and over: {asked} calls");

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
fn a_store_that_fails_is_an_error_that_may_pass() {
    let hands = hands();
    let (_, far, elsewhere) = near_and_far(&hands);
    let asks = [Ask::new("api", "a"), Ask::new("free", "a")];
    let reserved = ready(far.reserve(&asks, HOUR)).unwrap().reservation.unwrap();
    assert!(ready(far.charge(&[Ask::new("api", "waiting").cost(5)])).unwrap().allowed());
    let mut crowd = Crowd::new();
    crowd.join(far.wait(Ask::new("api", "waiting"), HOUR));
    crowd.join(far.wait(Ask::new("api", "waiting"), HOUR));

    elsewhere.is_cut_off.store(true, Ordering::SeqCst);
    let waited = match ready(far.wait(asks[0], HOUR)) {
        Err(WaitError::Failed(error)) => error,
        other => panic!("{other:?}"),
    };
    for (call, error) in [
        ("acquire", ready(far.acquire("a", "api")).unwrap_err()),
        ("charge", ready(far.charge(&asks)).unwrap_err()),
        ("peek", ready(far.peek(&asks)).unwrap_err()),
        ("reserve", ready(far.reserve(&asks, HOUR)).unwrap_err()),
        ("settle", ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap_err()),
        ("status", ready(far.status("api", "a")).unwrap_err()),
        ("reset", ready(far.reset("api", "a")).unwrap_err()),
        ("wait", waited),
    ] {
        assert!(error.is_transient(), "{call}");
        assert_eq!(error.to_string(), "could not ask the store", "{call}");
        assert_eq!(error.source().unwrap().to_string(), "connection refused", "{call}");
    }
    hands.advance(secs(1));
    let failed = crowd.run();
    assert_eq!(failed.len(), 2, "both in the line are told");
    for (_, answer) in failed {
        let error = answer.unwrap_err();
        assert_eq!(error.to_string(), "could not ask the store");
        assert_eq!(error.source().unwrap().to_string(), "connection refused");
    }

    elsewhere.is_cut_off.store(false, Ordering::SeqCst);
    assert_eq!(
        ready(far.status("api", "a")).unwrap().used(),
        0,
        "a second has passed, and nothing was charged"
    );
    assert_eq!(ready(far.settle(reserved.id(), &Settlement::Cancel)).unwrap(), Settled::Done);
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
        elsewhere.is_cut_off.store(true, Ordering::SeqCst);
        let failed = [ready(gate.wait(asks[0], HOUR)).is_err(), ready(gate.acquire("a", "api")).is_err()];
        elsewhere.is_cut_off.store(false, Ordering::SeqCst);
        expected(if failed == [true; 2] { 0 } else { 2 }, "a call that could not be decided is no decision");
    }
}

#[test]
fn what_meets_no_counters_is_answered_without_asking_the_store() {
    let hands = hands();
    let (_, far, elsewhere) = near_and_far(&hands);
    elsewhere.is_cut_off.store(true, Ordering::SeqCst);
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
    assert_eq!(elsewhere.calls.load(Ordering::SeqCst), 0);
}
