//! A limit whose numbers are changed goes on from what was consumed; one whose strategy is changed begins afresh.
//!
//! The instants here are whole microseconds in the units of every rate: what is less is not promised to be alike in all stores.

use tollgate_kernel::{Limit, LimitError};

use super::{FOR_LONG, Subject, cost, limit};
use crate::{ChargeId, Hold, ManualClock, Micros, Settled, Settlement, Store, StoredCharge, StoredLimit};

/// At so many ms, under this limit, a charge of so much is admitted or not and leaves so much. A charge of nothing only looks.
type Step<'a> = (u64, &'a StoredLimit, u64, bool, u64);

fn named(built: Result<Limit, LimitError>) -> StoredLimit {
    limit("changed", built)
}

/// Walks through the steps on a store of their own, so that every history has the same name and key.
async fn check(what: &str, make: &impl AsyncFn(ManualClock) -> Subject, steps: &[Step<'_>]) {
    let clock = super::clock();
    let start = clock.now();
    let store = make(clock.clone()).await.store;
    for (index, &(at_ms, limit, units, allowed, remaining)) in steps.iter().enumerate() {
        clock.advance(start.saturating_add(Micros::from_millis(at_ms)).saturating_sub(clock.now()));
        let charge = |units| [StoredCharge { limit, key: "user:42", cost: cost(units), shadow: false }];
        // What is left is the same to one who looks first.
        let seen = store.peek(&charge(units.max(1))).await.expect("peek");
        let got = match units {
            0 => seen.clone(),
            units => store.charge(&charge(units), None).await.expect("charge"),
        };
        assert_eq!(seen, got, "{what}, step {index}: a look and a charge");
        let left = if units == 0 { remaining_of(&*store, limit).await } else { got.outcomes[0].remaining };
        assert_eq!((got.allowed, left), (allowed, remaining), "{what}, step {index}: {:?}", got.outcomes);
    }
}

async fn remaining_of(store: &dyn Store, limit: &StoredLimit) -> u64 {
    let all = [StoredCharge { limit, key: "user:42", cost: crate::Cost::MAX, shadow: false }];
    store.peek(&all).await.expect("peek").outcomes[0].remaining
}

pub(super) async fn changes(make: &impl AsyncFn(ManualClock) -> Subject) {
    let s = Micros::from_secs;
    let token = |rate: &str, burst| named(Limit::token_bucket(rate, burst));
    let leaky = |rate: &str, most| named(Limit::leaky_bucket(rate, most));
    let fixed = |most, secs| named(Limit::fixed_window(most, s(secs)));
    let aligned = |most, secs| named(Limit::clock_window(most, s(secs)));
    let log = |most, secs| named(Limit::sliding_window(most, s(secs)));
    let counter = |most, secs| named(Limit::sliding_window_counter(most, s(secs)));
    let leases = |most, secs| named(Limit::concurrency(most, s(secs)));

    // A bucket keeps the missing tokens, at most the new burst of them, and refills at the new rate.
    let (one, two) = (token("1/s", 10), token("2/s", 10));
    check("a larger bucket", make, &[(0, &one, 10, true, 0), (0, &token("1/s", 20), 10, true, 0)]).await;
    check("a smaller bucket", make, &[(0, &one, 4, true, 6), (0, &token("1/s", 5), 1, true, 0)]).await;
    let emptied =
        [(0, &one, 10, true, 0), (0, &token("1/s", 5), 1, false, 0), (1_000, &token("1/s", 5), 1, true, 0)];
    check("a smaller bucket that was emptied", make, &emptied).await;
    let back = [(0, &one, 4, true, 6), (0, &two, 1, true, 5), (0, &one, 0, true, 5), (500, &two, 6, true, 0)];
    check("a faster rate and back", make, &back).await;
    let slower = [(0, &token("100/s", 1_000), 1_000, true, 0), (0, &token("1/s", 1_000), 1, false, 0)];
    check("a slower rate gives nothing back", make, &slower).await;
    let faster = [
        (0, &token("1/s", 1_000), 100, true, 900),
        (0, &token("100/s", 1_000), 900, true, 0),
        (500, &token("100/s", 1_000), 50, true, 0),
    ];
    check("a faster rate refills at once", make, &faster).await;
    let (small, large) = (token("10/s", 50), token("10/s", 100));
    let rolling = [
        (0, &large, 100, true, 0),
        (0, &small, 1, false, 0),
        (100, &small, 1, true, 0),
        // The larger counts what the smaller let go, and the smaller then finds all of it again.
        (100, &large, 1, false, 0),
        (200, &small, 1, false, 0),
        (300, &small, 1, true, 0),
    ];
    check("two versions with different bursts", make, &rolling).await;
    check("to leaky", make, &[(0, &one, 4, true, 6), (0, &leaky("1/s", 10), 1, true, 5)]).await;
    check("from leaky", make, &[(0, &leaky("1/s", 10), 4, true, 6), (0, &one, 1, true, 5)]).await;
    // 7/s is kept in sevenths of a microsecond, and 10007 in 10000 s in units of which a word does not hold enough.
    let (ten, seven, wide) = (token("10/s", 10), token("7/s", 7), token("10007/10000s", 10));
    let odd = [(0, &ten, 10, true, 0), (0, &seven, 1, false, 0), (1_000, &seven, 7, true, 0)];
    check("to other units", make, &odd).await;
    let there_and_back = [(0, &seven, 7, true, 0), (500, &ten, 6, true, 0), (500, &seven, 0, false, 0)];
    check("to other units and back", make, &there_and_back).await;
    let to_wide = [(0, &one, 5, true, 5), (0, &wide, 4, true, 1), (0, &wide, 2, false, 1)];
    check("to the widest units", make, &to_wide).await;
    check("to the widest units later", make, &[(0, &seven, 7, true, 0), (1_000, &wide, 10, true, 0)]).await;
    // Where the numbers come with the call, the instant at which it is full stays.
    let come = |rate: &str| {
        let limit = Limit::token_bucket(rate, 10).map(Limit::keeping_instant);
        named(limit)
    };
    let instant =
        [(0, &come("1/s"), 4, true, 6), (0, &come("2/s"), 1, true, 1), (0, &come("1/s"), 0, true, 5)];
    check("numbers that come with the call", make, &instant).await;

    // A window keeps its end and its count.
    let ten = fixed(10, 60);
    check("a higher window", make, &[(0, &ten, 6, true, 4), (0, &fixed(20, 60), 1, true, 13)]).await;
    check("a lower window", make, &[(0, &ten, 6, true, 4), (0, &fixed(5, 60), 1, false, 0)]).await;
    let shorter = fixed(10, 10);
    let until_its_end =
        [(0, &ten, 6, true, 4), (30_000, &shorter, 4, true, 0), (59_999, &shorter, 1, false, 0)];
    check("a shorter window", make, &until_its_end).await;
    check("a window that ended", make, &[(0, &ten, 6, true, 4), (60_000, &shorter, 1, true, 9)]).await;
    check("to the clock's window", make, &[(0, &ten, 6, true, 4), (1_000, &aligned(10, 60), 1, true, 3)])
        .await;

    // A log keeps its entries, and a counter its counts.
    let ten = log(10, 10);
    check("a higher log", make, &[(0, &ten, 6, true, 4), (0, &log(20, 10), 1, true, 13)]).await;
    check("a lower log", make, &[(0, &ten, 6, true, 4), (0, &log(5, 10), 1, false, 0)]).await;
    check("a shorter log", make, &[(0, &ten, 6, true, 4), (5_000, &log(10, 5), 10, true, 0)]).await;
    let rolling = [
        (0, &ten, 10, true, 0),
        (5_000, &log(10, 5), 9, true, 1),
        (9_999, &ten, 1, false, 0),
        (10_000, &ten, 1, true, 0),
        (10_000, &log(10, 5), 9, true, 0),
    ];
    check("two versions of a log", make, &rolling).await;
    check("a longer log", make, &[(0, &ten, 6, true, 4), (9_999, &log(10, 20), 4, true, 0)]).await;
    let ten = counter(10, 10);
    check("a higher counter", make, &[(0, &ten, 6, true, 4), (0, &counter(20, 10), 1, true, 13)]).await;
    check("a lower counter", make, &[(0, &ten, 6, true, 4), (0, &counter(5, 10), 1, false, 0)]).await;
    check("a longer counter", make, &[(0, &ten, 6, true, 4), (0, &counter(10, 20), 1, true, 3)]).await;
    // The clock of the suite stands at a multiple of 60 s, so the counts of 10 s have gone at 20 s and those of 60 s at 120 s.
    let (minute, short) = (counter(10, 60), counter(10, 10));
    let rolling = [
        (0, &minute, 5, true, 5),
        (0, &short, 5, true, 0),
        (10_000, &minute, 1, false, 0),
        (20_000, &short, 5, true, 0),
        (20_000, &minute, 1, false, 0),
        (90_000, &minute, 7, true, 0),
        (120_000, &minute, 3, true, 0),
    ];
    check("two versions of a counter", make, &rolling).await;
    let two = leases(2, 60);
    check("more leases", make, &[(0, &two, 2, true, 0), (1_000, &leases(3, 60), 1, true, 0)]).await;
    check("fewer leases", make, &[(0, &two, 2, true, 0), (1_000, &leases(1, 60), 1, false, 0)]).await;
    check("longer leases", make, &[(0, &two, 1, true, 1), (1_000, &leases(2, 90), 2, false, 1)]).await;
    let short = leases(2, 2);
    let shorter = [
        (0, &two, 2, true, 0),
        (1_000, &short, 1, false, 0),
        (59_999, &short, 1, false, 0),
        (60_000, &short, 2, true, 0),
    ];
    check("shorter leases", make, &shorter).await;

    // Another strategy begins afresh, and finds its own again if it comes back.
    let all = [one, fixed(10, 60), log(10, 60), counter(10, 60), leases(10, 60)];
    for (index, first) in all.iter().enumerate() {
        for (_, then) in all.iter().enumerate().filter(|(other, _)| *other != index) {
            let steps = [(0, first, 9, true, 1), (0, then, 8, true, 2), (0, first, 0, true, 1)];
            check(&format!("{} to {}", first.limit, then.limit), make, &steps).await;
        }
    }
    holds(make).await;
}

/// What was held under the old numbers is settled by them, and what is forgotten under the new ones is gone.
async fn holds(make: &impl AsyncFn(ManualClock) -> Subject) {
    let s = Micros::from_secs;
    let token = |rate: &str, burst| named(Limit::token_bucket(rate, burst));
    let fixed = |most| named(Limit::fixed_window(most, s(60)));
    let leases = |most| named(Limit::concurrency(most, s(60)));
    let log = |most| named(Limit::sliding_window(most, s(60)));
    let (actual, cancel) = (Settlement::Actual, Settlement::Cancel);
    let fixed_of = |secs| named(Limit::fixed_window(10, s(secs)));
    let log_of = |secs| named(Limit::sliding_window(10, s(secs)));
    let counter_of = |secs| named(Limit::sliding_window_counter(10, s(secs)));
    for (old, new, units, between, settlement, after) in [
        (token("10/s", 10), token("7/s", 7), 6, 1, actual(1), 6),
        (token("10/s", 10), token("7/s", 7), 6, 1, cancel.clone(), 7),
        (token("10/s", 10), token("7/s", 7), 1, 6, actual(5), 2),
        (token("10/s", 10), token("20/s", 20), 6, 14, actual(1), 19),
        (token("7/s", 7), token("10007/10000s", 10), 7, 3, cancel.clone(), 10),
        (token("100/s", 100), token("1/s", 10), 90, 0, actual(4), 6),
        (fixed(10), fixed(20), 6, 14, actual(1), 19),
        (fixed(10), fixed(5), 6, 0, actual(8), 0),
        (fixed_of(60), fixed_of(5), 6, 4, actual(1), 9),
        (log(10), log(20), 6, 14, cancel.clone(), 20),
        (log_of(60), log_of(5), 6, 4, actual(2), 8),
        (counter_of(60), counter_of(5), 6, 4, actual(2), 8),
        (counter_of(5), counter_of(60), 6, 4, cancel.clone(), 10),
        (leases(2), leases(3), 1, 2, cancel.clone(), 3),
    ] {
        for is_touched in [false, true] {
            let store = make(super::clock()).await.store;
            let charge =
                |limit, units| [StoredCharge { limit, key: "user:42", cost: cost(units), shadow: false }];
            let what = format!("{} to {}, touched {is_touched}", old.limit, new.limit);
            let id = ChargeId::random();
            let hold = Some(Hold { id, ttl: FOR_LONG });
            assert!(store.charge(&charge(&old, units), hold).await.expect("charge").allowed, "{what}");
            if is_touched {
                assert_eq!(remaining_of(&*store, &new).await, between, "{what}");
            }
            assert_eq!(store.settle(id, &settlement).await.expect("settle"), Settled::Done, "{what}");
            assert_eq!(remaining_of(&*store, &new).await, after, "{what}");
            assert_eq!(store.settle(id, &settlement).await.expect("settle"), Settled::Already, "{what}");
            store.charge(&charge(&new, 1), None).await.expect("charge");
            store.forget(&new, "user:42").await.expect("forget");
            for limit in [&new, &old] {
                assert_eq!(remaining_of(&*store, limit).await, limit.limit.capacity(), "{what}: forgotten");
            }
        }
    }
}
