//! A changed policy over the same counters: nothing that was consumed is lost, and nothing is counted twice.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::Duration;

use tollgate::{
    Allowance, Ask, Event, Failure, Fallback, Key, Limit, ManualClock, Observer, Rule, Settled, Settlement,
    Source, StoreState, Tollgate, WaitError,
};

use crate::crowd::{Crowd, ready};
use crate::elsewhere::{Elsewhere, Fault};
use crate::scene::{a_minute, at_once, bucket, every_strategy, gate, hands, on, secs};

const HOUR: Duration = Duration::from_secs(3_600);

fn api(limit: Limit) -> Rule {
    Rule::new("api", limit).unwrap()
}

fn with_own(limit: Limit, key: &str, own: impl Into<Allowance>) -> Rule {
    api(limit).with_override(Key::parse(key).unwrap(), own).unwrap()
}

fn continued(old: &Tollgate, rule: Rule) -> Tollgate {
    Tollgate::builder().continuing(old).rule(rule).build().unwrap()
}

fn remaining(gate: &Tollgate, key: &str) -> u64 {
    ready(gate.status("api", key)).unwrap().remaining
}

fn allows(gate: &Tollgate, key: &str, cost: u64) -> bool {
    ready(gate.charge(&[Ask::new("api", key).cost(cost)])).unwrap().allowed()
}

fn fixed(limit: u64, window: u64) -> Limit {
    Limit::fixed_window(limit, secs(window)).unwrap()
}

fn clock(limit: u64, window: u64) -> Limit {
    Limit::clock_window(limit, secs(window)).unwrap()
}

fn log(limit: u64, window: u64) -> Limit {
    Limit::sliding_window(limit, secs(window)).unwrap()
}

fn counter(limit: u64, window: u64) -> Limit {
    Limit::sliding_window_counter(limit, secs(window)).unwrap()
}

fn leaky(rate: &str, capacity: u64) -> Limit {
    Limit::leaky_bucket(rate, capacity).unwrap()
}

/// After `spent` under the old rule and a change, the key has so much left, and not one more; and so on its way back.
fn check(old: Rule, new: Rule, spent: u64, left: u64) {
    let what = format!("{old:?} to {new:?}");
    for looks_first in [true, false] {
        let hands = hands();
        let before = gate(&hands, [old.clone()]);
        assert!(allows(&before, "a", spent), "{what}");
        let unspent = remaining(&before, "a");
        let after = continued(&before, new.clone());
        if looks_first {
            assert_eq!(remaining(&after, "a"), left, "{what}");
        }
        assert_eq!(after.keys(), 1, "{what}: it is one key before and after");
        let again = continued(&after, old.clone());
        assert_eq!(remaining(&again, "a"), unspent, "{what}, and back");
        let after = continued(&again, new.clone());
        assert!(!allows(&after, "a", left + 1), "{what}");
        assert!(left == 0 || allows(&after, "a", left), "{what}");
        assert!(!allows(&after, "a", 1), "{what}");
        assert_eq!((after.keys(), allows(&after, "b", 1)), (1, true), "{what}: others begin afresh");
    }
}

#[test]
fn a_changed_limit_goes_on_from_what_was_consumed() {
    for (old, new, spent, left) in [
        (bucket("1/s", 10), bucket("1/s", 20), 6, 14),
        (bucket("1/s", 10), bucket("1/s", 5), 4, 1),
        (bucket("1/s", 10), bucket("1/s", 5), 9, 0),
        (bucket("1/s", 10), bucket("2/s", 10), 3, 7),
        (bucket("2/s", 10), bucket("1/s", 10), 6, 4),
        // In sevenths of a microsecond, and in units of which one word does not hold enough.
        (bucket("10/s", 10), bucket("7/s", 7), 5, 2),
        (bucket("7/s", 7), bucket("10/s", 10), 7, 3),
        (bucket("1/s", 10), bucket("10007/10000s", 10), 5, 5),
        (bucket("10007/10000s", 10), bucket("3/s", 90), 10, 80),
        (bucket("1/s", 10), leaky("1/s", 20), 6, 14),
        (leaky("1/s", 10), bucket("1/s", 5), 4, 1),
        (leaky("7/s", 14), leaky("1/s", 14), 14, 0),
        (fixed(10, 60), fixed(20, 60), 6, 14),
        (fixed(10, 60), fixed(5, 60), 6, 0),
        (fixed(10, 60), fixed(10, 10), 6, 4),
        (fixed(10, 60), clock(12, 60), 6, 6),
        (clock(10, 60), clock(7, 3_600), 6, 1),
        (log(10, 60), log(20, 60), 6, 14),
        (log(10, 60), log(5, 60), 6, 0),
        (log(10, 60), log(10, 10), 6, 4),
        (log(10, 10), log(10, 60), 6, 4),
        (counter(10, 60), counter(20, 60), 6, 14),
        (counter(10, 60), counter(5, 60), 6, 0),
        (counter(10, 10), counter(10, 60), 6, 4),
        (at_once(10), at_once(20), 6, 14),
        (at_once(10), at_once(5), 6, 0),
    ] {
        check(api(old), api(new), spent, left);
        if old.strategy() == new.strategy() {
            // So does a key that gains an override, and one that loses it.
            check(api(old), with_own(old, "a", new), spent, left);
            check(with_own(new, "a", old), api(new), spent, left);
            check(with_own(new, "a", old), with_own(old, "a", new), spent, left);
        }
    }
}

#[test]
fn another_strategy_begins_afresh() {
    let kept_alike = |limit: &Limit| match limit {
        Limit::LeakyBucket(_) => tollgate::Strategy::TokenBucket,
        other => other.strategy(),
    };
    let all = every_strategy(10);
    for (old, new) in all.iter().flat_map(|old| all.iter().map(move |new| (old, new))) {
        let hands = hands();
        let before = gate(&hands, [api(*old)]);
        assert!(allows(&before, "a", 7));
        let after = continued(&before, api(*new));
        let left = if kept_alike(old) == kept_alike(new) { 3 } else { 10 };
        assert_eq!(remaining(&after, "a"), left, "{old} to {new}");
    }
}

#[test]
fn time_goes_on_as_if_nothing_had_been_changed() {
    for (limit, until) in [
        (bucket("1/s", 10), 10),
        (leaky("7/s", 70), 10),
        (fixed(10, 10), 10),
        (log(10, 10), 10),
        (at_once(10), 10),
        (counter(10, 10), 20),
    ] {
        let hands = hands();
        let capacity = limit.capacity();
        let mut now = gate(&hands, [api(limit)]);
        assert!(allows(&now, "a", capacity));
        for _ in 0..until {
            assert!(remaining(&now, "a") < capacity, "{limit}");
            now = continued(&now, api(limit));
            hands.advance(secs(1));
        }
        assert_eq!(remaining(&now, "a"), capacity, "{limit}");
    }
}

#[test]
fn an_old_registry_goes_on_by_its_own_numbers_over_the_same_counters() {
    let hands = hands();
    let old = gate(&hands, [api(a_minute(5))]);
    let limiter = old.limiter("api").unwrap();
    let new = continued(&old, api(a_minute(9)));
    assert!(limiter.charge("a", 4).unwrap().allowed);
    assert!(allows(&new, "a", 4));
    assert!(!limiter.check("a").allowed, "eight of five");
    assert_eq!(remaining(&new, "a"), 1);
    assert!(limiter.reset("a"));
    assert_eq!(remaining(&new, "a"), 9);
}

#[test]
fn open_reservations_are_settled_by_whoever_knows_their_name() {
    for (old, new, reserved, before, actual, after) in [
        (bucket("10/s", 10), bucket("7/s", 7), 6, 1, 1, 6),
        (bucket("10/s", 10), bucket("7/s", 7), 1, 6, 5, 2),
        (bucket("10/s", 10), leaky("20/s", 20), 6, 14, 0, 20),
        (a_minute(10), a_minute(20), 6, 14, 8, 12),
        (log(10, 60), log(20, 30), 6, 14, 1, 19),
        (counter(10, 60), counter(20, 60), 6, 14, 1, 19),
    ] {
        for (by_name, touched) in [(true, true), (false, true), (true, false), (false, false)] {
            let hands = hands();
            let first = gate(&hands, [api(old)]);
            let ask = [Ask::new("api", "a").cost(reserved)];
            let held = ready(first.reserve(&ask, HOUR)).unwrap().reservation.unwrap();
            let second = continued(&first, api(new));
            assert!(!touched || remaining(&second, "a") == before, "{old} to {new}");
            let settled = match by_name {
                true => ready(second.settle(held.id(), &Settlement::Actual(actual))),
                false => held.settle(actual),
            };
            assert_eq!(settled.unwrap(), Settled::Done);
            assert_eq!(remaining(&second, "a"), after, "{old} to {new}, {actual} of {reserved}");
        }
    }
}

#[test]
fn a_permit_of_the_old_registry_makes_room_in_the_new_one() {
    let hands = hands();
    let old = gate(&hands, [api(at_once(1))]);
    let permit = old.limiter("api").unwrap().acquire("a").unwrap();
    let new = continued(&old, api(Limit::concurrency(1, secs(30)).unwrap()));
    let limiter = new.limiter("api").unwrap();
    let mut crowd = Crowd::new();
    let waiter = crowd.join(limiter.wait("a", 1, HOUR));
    assert!(crowd.run_to_see_who_is_done().is_empty());
    assert!(permit.renew(), "a lease is renewed by the numbers that it was taken under");
    drop(permit);
    assert_eq!(crowd.run_to_see_who_is_done(), [waiter], "the clock has not moved");
}

#[test]
fn those_who_wait_are_served_by_the_new_limits_in_the_order_in_which_they_came() {
    for (old, new) in [(bucket("1/h", 5), bucket("1/s", 5)), (bucket("1/h", 5), bucket("7/s", 5))] {
        let hands = hands();
        let before = gate(&hands, [api(old)]);
        assert!(allows(&before, "a", 5));
        let after;
        let mut crowd = Crowd::new();
        let [first, second] = [1, 2].map(|_| crowd.join(before.wait(Ask::new("api", "a"), HOUR)));
        assert!(crowd.run_to_see_who_is_done().is_empty());
        // Five tokens are missing, whatever the rate is: they refill at the new one.
        after = continued(&before, api(new));
        let third = crowd.join(after.wait(Ask::new("api", "a"), HOUR));
        assert!(crowd.run_to_see_who_is_done().is_empty(), "{new}: nothing is left");
        let mut done = Vec::new();
        for _ in 0..4 {
            hands.advance(secs(1));
            done.extend(crowd.run_to_see_who_is_done());
        }
        assert_eq!(done, [first, second, third], "{new}");
    }
}

#[test]
fn those_who_wait_are_told_what_a_new_policy_says_of_them() {
    let hands = hands();
    let old = gate(&hands, [api(a_minute(5))]);
    assert!(allows(&old, "a", 5));
    for (rule, expected) in [
        (Rule::unlimited("api").unwrap(), "admitted"),
        (api(a_minute(5)).shadow(), "admitted"),
        (api(a_minute(6)), "admitted"),
        (Rule::blocked("api").unwrap(), "never"),
        (Rule::unlimited("other").unwrap(), "waits"),
    ] {
        let mut crowd = Crowd::new();
        crowd.join(old.wait(Ask::new("api", "a"), HOUR));
        assert!(crowd.run().is_empty());
        let new = continued(&old, rule.clone());
        let told = match crowd.run().pop() {
            Some((_, Ok(_))) => "admitted",
            Some((_, Err(WaitError::Never(_)))) => "never",
            None => "waits",
            Some((_, Err(error))) => panic!("{rule:?}: {error}"),
        };
        assert_eq!(told, expected, "{rule:?}");
        drop(new);
    }
}

/// The lock that a server holds around its decisions: many charge at once, and nobody while the limits are changed.
fn race(limits: &[Limit], check: impl Fn(&[AtomicU64])) {
    const RELOADS: usize = 1_000;
    let hands = hands();
    let current = RwLock::new(gate(&hands, [api(limits[0])]));
    let admitted: Vec<AtomicU64> = limits.iter().map(|_| AtomicU64::new(0)).collect();
    let (which, is_over, asked) = (AtomicUsize::new(0), AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let charge = || {
                    let current = current.read().unwrap();
                    let outcome = current.limiter("api").unwrap().check("a");
                    asked.fetch_add(1, Ordering::SeqCst);
                    admitted[which.load(Ordering::SeqCst)]
                        .fetch_add(u64::from(outcome.allowed), Ordering::SeqCst);
                    outcome.allowed
                };
                while !is_over.load(Ordering::SeqCst) {
                    charge();
                    thread::yield_now();
                }
                while charge() {}
            });
        }
        for reload in 1..=RELOADS {
            // Every limit is charged by several before the next one comes.
            while asked.load(Ordering::SeqCst) < 12 * reload {
                thread::yield_now();
            }
            let mut current = current.write().unwrap();
            let next = continued(&current, api(limits[reload % limits.len()]));
            which.store(reload % limits.len(), Ordering::SeqCst);
            *current = next;
            assert!(current.keys() <= 1);
        }
        is_over.store(true, Ordering::SeqCst);
    });
    check(&admitted);
    assert_eq!(current.read().unwrap().keys(), 1);
}

#[test]
fn a_thousand_changes_under_load_admit_exactly_the_limit() {
    const MOST: u64 = 20_000;
    let sum = |admitted: &[AtomicU64]| admitted.iter().map(|count| count.load(Ordering::SeqCst)).sum::<u64>();
    let exactly = |admitted: &[AtomicU64]| assert_eq!(sum(admitted), MOST);
    race(&[bucket("1/s", MOST), leaky("1/s", MOST)], exactly);
    race(
        &[bucket("1/s", MOST), bucket("1/s", MOST / 3), bucket("1/s", MOST / 4), leaky("1/s", MOST / 2)],
        exactly,
    );
    race(&[fixed(MOST, 60), fixed(MOST, 3_600), clock(MOST, 60)], exactly);
    race(&[log(MOST, 60), log(MOST, 3_600)], exactly);
    // A counter knows only when its window began, so one that is made shorter may take its counts for long past.
    race(&[counter(MOST, 60), counter(MOST / 2, 60)], exactly);
    // Buckets of different units: each counts the tokens that all of them admitted, and the largest burst is the most. What is not
    // whole in the units of another is rounded up at each move, by less than a thousandth of a token in all.
    let limits = [("10/1s", 20_000), ("7/1s", 14_000), ("10007/1000s", 20_014), ("3/1s", 6_000)]
        .map(|(rate, burst)| bucket(rate, burst));
    race(&limits, |admitted| {
        let sum = sum(admitted);
        // The last to be asked has the second largest burst.
        assert!((19_999..=20_014).contains(&sum), "{sum} of 20014");
    });
}

#[test]
fn a_refused_policy_changes_nothing() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let old = gate(&hands, [api(a_minute(5))]);
    assert!(allows(&old, "a", 2));
    let twice = Tollgate::builder().continuing(&old).rule(api(a_minute(9))).rule(api(a_minute(8)));
    let nameless = Tollgate::builder().continuing(&old).limit("no name", a_minute(9));
    let divided = Tollgate::builder().continuing(&old).rule(api(a_minute(9))).instances(0);
    let stored = Tollgate::builder().continuing(&old).rule(api(a_minute(9))).store(elsewhere.clone());
    for (builder, message) in
        [(twice, "api"), (nameless, "no name"), (divided, "0 instances"), (stored, "leave out the store")]
    {
        let mut crowd = Crowd::new();
        crowd.join(old.wait(Ask::new("api", "a").cost(4), HOUR));
        assert!(crowd.run().is_empty());
        let error = builder.build().unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
        assert!(crowd.run().is_empty(), "whoever waits is not disturbed");
        assert_eq!((remaining(&old, "a"), old.keys(), elsewhere.calls()), (3, 1, 0));
    }
}

fn away(hands: &ManualClock, rule: Rule) -> (Tollgate, Arc<Elsewhere>) {
    let elsewhere = Elsewhere::new(hands);
    let gate = on(hands).rule(rule).denial_cache(HOUR).store(elsewhere.clone()).build().unwrap();
    (gate, elsewhere)
}

fn continued_away(old: &Tollgate, rule: Rule) -> Tollgate {
    Tollgate::builder().continuing(old).rule(rule).denial_cache(HOUR).build().unwrap()
}

fn source(gate: &Tollgate, key: &str) -> (bool, Source) {
    let decision = ready(gate.charge(&[Ask::new("api", key)])).unwrap();
    (decision.allowed(), decision.limits()[0].source)
}

#[test]
fn a_store_that_is_down_stays_down_and_the_local_counters_go_on() {
    let hands = hands();
    let local = |limit| api(a_minute(limit)).fallback(Fallback::Local);
    let (old, elsewhere) = away(&hands, local(100));
    elsewhere.fault(Fault::Fails(Failure::Connection));
    while old.store_health().state != StoreState::Down {
        assert_eq!(source(&old, "a"), (true, Source::FallbackLocal));
    }
    let before = old.store_health();
    let asked = elsewhere.calls();
    let new = continued_away(&old, local(usize::MAX as u64 >> 20));
    assert_eq!(source(&new, "a"), (true, Source::FallbackLocal));
    assert_eq!(elsewhere.calls(), asked, "it is not asked again");
    let after = new.store_health();
    assert_eq!((after.state, after.since, after.outages), (before.state, before.since, before.outages));
    assert_eq!(after.fallen_back, before.fallen_back + 1);
    // What was counted here goes on to count: so much was charged, and one more.
    let few = continued_away(&new, local(after.fallen_back));
    assert_eq!(source(&few, "a"), (false, Source::FallbackLocal));
    assert_eq!(source(&few, "b"), (true, Source::FallbackLocal));
    assert_eq!(old.store_health().fallen_back, few.store_health().fallen_back, "one tally");
}

#[test]
fn denials_are_believed_where_a_limit_stays_and_not_where_it_is_changed() {
    let hands = hands();
    let (old, elsewhere) = away(&hands, api(a_minute(1)));
    assert_eq!(source(&old, "a"), (true, Source::Store));
    assert_eq!(source(&old, "a"), (false, Source::Store));
    let same = continued_away(&old, api(a_minute(1)));
    assert_eq!(source(&same, "a"), (false, Source::DenialCache));
    let more = continued_away(&same, api(a_minute(2)));
    assert_eq!(source(&more, "a"), (true, Source::Store), "one of two");
    assert_eq!(source(&more, "a"), (false, Source::Store));
    let back = continued_away(&more, api(a_minute(1)));
    assert_eq!(source(&back, "a"), (false, Source::Store), "what was known of it is from before");
    let unbelieving =
        Tollgate::builder().continuing(&back).rule(api(a_minute(1))).denial_cache(Duration::ZERO);
    assert_eq!(source(&unbelieving.build().unwrap(), "a"), (false, Source::Store));
    assert_eq!(elsewhere.calls(), 6);
}

#[test]
fn a_slice_is_used_up_by_those_who_come_after() {
    let hands = hands();
    let rule = || api(a_minute(10)).slice(4, Duration::from_secs(60)).unwrap();
    let (old, elsewhere) = away(&hands, rule());
    assert_eq!(source(&old, "a"), (true, Source::Store));
    let new = continued_away(&old, rule());
    for _ in 0..3 {
        assert_eq!(source(&new, "a"), (true, Source::Slice));
    }
    assert_eq!((source(&new, "a"), elsewhere.calls()), ((true, Source::Store), 2));
}

#[derive(Default)]
struct Counting(AtomicUsize);

impl Observer for Counting {
    fn decided(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn clock_and_observers_are_the_old_ones_unless_others_are_named() {
    let hands = hands();
    let (first, second) = (Arc::new(Counting::default()), Arc::new(Counting::default()));
    let told = || (first.0.load(Ordering::SeqCst), second.0.load(Ordering::SeqCst));
    let old = on(&hands).rule(api(a_minute(5))).observer(first.clone()).build().unwrap();
    let new = continued(&old, api(a_minute(5)));
    assert!(allows(&new, "a", 5));
    assert_eq!(told(), (1, 0));
    hands.advance(secs(60));
    let other = Tollgate::builder().continuing(&new).rule(api(a_minute(5))).observer(second.clone()).build();
    assert!(allows(&other.unwrap(), "a", 5), "by the clock that was moved");
    assert_eq!(told(), (1, 1));
}
