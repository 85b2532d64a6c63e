//! A changed policy over the same counters: nothing that was consumed is lost, and nothing is counted twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use tollgate::store::{Failure, StoreState};
use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{
    Allowance, Charge, Fallback, Key, Limit, ManualClock, Policy, Rule, Settled, Settlement, Tollgate,
};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{a_minute, at_once, bucket, every_strategy, gate, hands, on, reload, secs};

const HOUR: Duration = Duration::from_secs(3_600);

fn api(limit: Limit) -> Rule {
    Rule::new("api", limit).unwrap()
}

fn with_own(limit: Limit, key: &str, own: impl Into<Allowance>) -> Rule {
    api(limit).with_override(Key::parse(key).unwrap(), own).unwrap()
}

fn continued(old: &Tollgate, rule: Rule) -> Tollgate {
    reload(old, [rule]);
    old.clone()
}

fn remaining(gate: &Tollgate, key: &str) -> u64 {
    ready(gate.status("api", key)).unwrap().remaining()
}

fn allows(gate: &Tollgate, key: &str, cost: u64) -> bool {
    // Reserved for no time at all: a charge, also of leases.
    ready(gate.reserve(&[Charge::new("api", key).cost(cost)], Duration::ZERO)).unwrap().is_ok()
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

struct Counting(AtomicUsize);

impl Observer for Counting {
    fn decided(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Observers and the clock are the gate's, not the policy's.
#[test]
fn observers_and_the_clock_stay_over_a_reload() {
    let hands = hands();
    let observer = Arc::new(Counting(AtomicUsize::new(0)));
    let gate = on(&hands).rule(api(a_minute(5))).observer(observer.clone()).build().unwrap();
    let limiter = gate.local("api").unwrap();
    assert!(limiter.charge("a", 5).unwrap().is_allowed());
    for decisions in [2, 4] {
        reload(&gate, [api(a_minute(5))]);
        assert!(!limiter.check("a").is_allowed());
        hands.advance(secs(60));
        assert!(limiter.charge("a", 5).unwrap().is_allowed(), "by the clock that was moved");
        assert_eq!(observer.0.load(Ordering::SeqCst), decisions + 1);
    }
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
            let ask = [Charge::new("api", "a").cost(reserved)];
            let held = ready(first.reserve(&ask, HOUR)).unwrap().unwrap();
            let second = continued(&first, api(new));
            assert!(!touched || remaining(&second, "a") == before, "{old} to {new}");
            let settled = match by_name {
                true => ready(second.settle(held.id(), &Settlement::Actual(actual))),
                false => ready(held.settle(actual)),
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
    let permit = old.local("api").unwrap().acquire("a").unwrap().unwrap();
    let new = continued(&old, api(Limit::concurrency(1, secs(30)).unwrap()));
    let limiter = new.local("api").unwrap();
    let mut crowd = Crowd::new();
    let waiter = crowd.join(limiter.acquire_within("a", HOUR));
    assert!(crowd.run_to_see_who_is_done().is_empty());
    assert!(!permit.is_lost(), "a lease is kept under the numbers that it was taken under");
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
        let one = [Charge::new("api", "a")];
        let mut crowd = Crowd::new();
        let [first, second] = [1, 2].map(|_| crowd.join(before.wait(&one, HOUR)));
        assert!(crowd.run_to_see_who_is_done().is_empty());
        // Five tokens are missing, whatever the rate is: they refill at the new one.
        after = continued(&before, api(new));
        let third = crowd.join(after.wait(&one, HOUR));
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
    let one = [Charge::new("api", "a")];
    for (rule, expected) in [
        (Rule::unlimited("api").unwrap(), "admitted"),
        (api(a_minute(5)).shadow(), "admitted"),
        (api(a_minute(6)), "admitted"),
        (Rule::blocked("api").unwrap(), "never"),
        (Rule::unlimited("other").unwrap(), "unknown"),
    ] {
        let old = gate(&hands, [api(a_minute(5))]);
        assert!(allows(&old, "a", 5));
        let mut crowd = Crowd::new();
        crowd.join(old.wait(&one, HOUR));
        assert!(crowd.run().is_empty());
        let new = continued(&old, rule.clone());
        let reported = match crowd.run().pop() {
            Some((_, Ok(decision))) if decision.is_allowed() => "admitted",
            Some((_, Ok(decision))) if decision.retry_after().is_none() => "never",
            Some((_, Err(error))) if error.to_string().contains("unknown limit `api`") => "unknown",
            other => panic!("{rule:?}: {other:?}"),
        };
        assert_eq!(reported, expected, "{rule:?}");
        drop(new);
    }
}

/// Many charge at once, by name and by handles that they took before the first change, while the limits are changed under them.
fn race(limits: &[Limit], check: impl Fn(u64)) {
    const RELOADS: usize = 1_000;
    let hands = hands();
    let gate = gate(&hands, [api(limits[0])]);
    let (admitted, is_over, asked) = (AtomicU64::new(0), AtomicBool::new(false), AtomicUsize::new(0));
    thread::scope(|scope| {
        for number in 0..8 {
            let (gate, admitted, is_over, asked) = (&gate, &admitted, &is_over, &asked);
            let (handle, named) = (gate.local("api").unwrap(), gate.limit("api").unwrap());
            scope.spawn(move || {
                let charge = || {
                    let is_allowed = match number % 3 {
                        0 => handle.check("a").is_allowed(),
                        1 => ready(gate.check("api", "a")).unwrap().is_allowed(),
                        _ => ready(gate.check(&named, "a")).unwrap().is_allowed(),
                    };
                    asked.fetch_add(1, Ordering::SeqCst);
                    admitted.fetch_add(u64::from(is_allowed), Ordering::SeqCst);
                    is_allowed
                };
                while !is_over.load(Ordering::SeqCst) {
                    charge();
                    thread::yield_now();
                }
                while charge() {}
            });
        }
        for number in 1..=RELOADS {
            // Every limit is charged by several before the next one comes.
            while asked.load(Ordering::SeqCst) < 12 * number {
                thread::yield_now();
            }
            reload(&gate, [api(limits[number % limits.len()])]);
            assert!(gate.keys() <= 1);
        }
        is_over.store(true, Ordering::SeqCst);
    });
    check(admitted.load(Ordering::SeqCst));
    assert_eq!(gate.keys(), 1);
}

#[test]
fn a_thousand_changes_under_load_admit_exactly_the_limit() {
    const MOST: u64 = 20_000;
    let exactly = |admitted| assert_eq!(admitted, MOST);
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
    race(&limits, |sum| {
        // The last to be asked has the second largest burst.
        assert!((19_999..=20_014).contains(&sum), "{sum} of 20014");
    });
}

#[test]
fn a_refused_policy_changes_nothing() {
    let hands = hands();
    let old = gate(&hands, [api(a_minute(5))]);
    assert!(allows(&old, "a", 2));
    let four = [Charge::new("api", "a").cost(4)];
    // The names of all limits of a process are bounded, so a policy may be refused after some of it was made.
    let bounded = on(&hands).rule(api(a_minute(5))).max_names(0).build();
    assert!(bounded.is_ok(), "a name that is known already needs no room");
    let bounded = bounded.unwrap();
    let error =
        bounded.reload(Policy::new([api(a_minute(9)), Rule::unlimited("never-named").unwrap()]).unwrap());
    assert!(error.unwrap_err().to_string().contains("max_names"));
    assert_eq!(ready(bounded.status("api", "a")).unwrap().capacity(), 5, "nothing of it was put in place");
    let mut crowd = Crowd::new();
    crowd.join(old.wait(&four, HOUR));
    assert!(crowd.run().is_empty());
    let error = Policy::new([api(a_minute(9)), api(a_minute(8))]).unwrap_err().to_string();
    assert!(error.contains("two limits are called `api`"), "{error}");
    assert!(crowd.run().is_empty(), "waiters are not disturbed");
    assert_eq!((remaining(&old, "a"), old.keys()), (3, 1));
}

/// A limit that a policy leaves out goes on by its last numbers for those who hold it, and by the new ones when it is back.
#[test]
fn a_handle_outlives_its_limit_and_follows_it_when_it_is_back() {
    let hands = hands();
    let gate = gate(&hands, [api(a_minute(5))]);
    let (handle, named) = (gate.local("api").unwrap(), gate.limit("api").unwrap());
    assert!(handle.charge("a", 4).unwrap().is_allowed());
    reload(&gate, [Rule::unlimited("other").unwrap()]);
    assert!(ready(gate.check("api", "a")).unwrap_err().to_string().contains("unknown limit `api`"));
    assert_eq!(handle.check("a").remaining(), 0);
    assert!(!ready(gate.check(&named, "a")).unwrap().is_allowed());
    reload(&gate, [api(a_minute(9))]);
    assert_eq!(handle.check("a").remaining(), 3);
    assert_eq!(ready(gate.check(&named, "a")).unwrap().binding().remaining(), 2);
    // However often it is changed.
    for limit in 10..5_000 {
        reload(&gate, [api(a_minute(limit))]);
    }
    assert_eq!(handle.status("a").capacity(), 4_999);
}

fn away(hands: &ManualClock, rule: Rule) -> (Tollgate, Arc<FaultyStore>) {
    let faulty = FaultyStore::new(hands);
    let gate = on(hands).rule(rule).denial_cache(HOUR).store(faulty.clone()).build().unwrap();
    (gate, faulty)
}

fn continued_away(old: &Tollgate, rule: Rule) -> Tollgate {
    continued(old, rule)
}

fn source(gate: &Tollgate, key: &str) -> (bool, Source) {
    let decision = ready(gate.charge(&[Charge::new("api", key)])).unwrap();
    (decision.is_allowed(), decision.outcomes()[0].source())
}

#[test]
fn a_store_that_is_down_stays_down_and_the_local_counters_go_on() {
    let hands = hands();
    let local = |limit| api(a_minute(limit)).fallback(Fallback::Local);
    let (old, faulty) = away(&hands, local(100));
    faulty.fault(Fault::Fails(Failure::Connection));
    while old.store_health().state != StoreState::Down {
        assert_eq!(source(&old, "a"), (true, Source::FallbackLocal));
    }
    let before = old.store_health();
    let asked = faulty.calls();
    let new = continued_away(&old, local(usize::MAX as u64 >> 20));
    assert_eq!(source(&new, "a"), (true, Source::FallbackLocal));
    assert_eq!(faulty.calls(), asked, "it is not asked again");
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
    let (old, faulty) = away(&hands, api(a_minute(1)));
    assert_eq!(source(&old, "a"), (true, Source::Store));
    assert_eq!(source(&old, "a"), (false, Source::Store));
    let same = continued_away(&old, api(a_minute(1)));
    assert_eq!(source(&same, "a"), (false, Source::DenialCache));
    let more = continued_away(&same, api(a_minute(2)));
    assert_eq!(source(&more, "a"), (true, Source::Store), "one of two");
    assert_eq!(source(&more, "a"), (false, Source::Store));
    let back = continued_away(&more, api(a_minute(1)));
    assert_eq!(source(&back, "a"), (false, Source::Store), "what was known of it is from before");
    assert_eq!(faulty.calls(), 5);
}
