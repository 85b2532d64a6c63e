//! What a refund comes to: over several keys at once, by numbers that have changed since, and among callers who charge meanwhile.
//! What it comes to on one key is in the tables of cases.

use tollgate_kernel::Limit;

use super::races::{limits, race};
use super::{Effort, Subject, cost, limit};
use crate::{ManualClock, Micros, Store, StoredCharge, StoredLimit};

async fn used(store: &dyn Store, limit: &StoredLimit, key: &str) -> u64 {
    let all = [StoredCharge { limit, key, cost: crate::Cost::MAX, shadow: false }];
    store.peek(&all).await.expect("peek").outcomes[0].used()
}

fn charge<'a>(limit: &'a StoredLimit, key: &'a str, units: u64) -> StoredCharge<'a> {
    StoredCharge { limit, key, cost: cost(units), shadow: false }
}

pub(super) async fn refunds(make: &impl AsyncFn(ManualClock) -> Subject) {
    several_at_once(make).await;
    by_changed_numbers(make).await;
}

/// Each key is given back its own, one that is named twice twice, and one that is not remembered nothing.
async fn several_at_once(make: &impl AsyncFn(ManualClock) -> Subject) {
    let clock = super::clock();
    let subject = make(clock.clone()).await;
    let store = &*subject.store;
    let limits = limits(10);
    let keys = ["a", "user:b", "user:c:v2", "tenant:d"];
    for limit in &limits {
        for key in keys {
            assert!(store.charge(&[charge(limit, key, 6)], None).await.expect("charge").allowed);
        }
    }
    store.refund(&[]).await.expect("a refund of nothing");
    assert_eq!((subject.remembered)().await, limits.len() * keys.len());
    for limit in &limits {
        let watching = StoredCharge { shadow: true, ..charge(limit, keys[2], 3) };
        let charges = [
            charge(limit, keys[0], 2),
            charge(limit, "nobody", 5),
            charge(limit, keys[1], u64::MAX),
            charge(limit, keys[0], 3),
            watching,
        ];
        store.refund(&charges).await.expect("refund");
    }
    for limit in &limits {
        let is_lease = matches!(limit.limit, Limit::Concurrency(_));
        let expected = if is_lease { [6, 6, 6, 6, 0] } else { [1, 0, 3, 6, 0] };
        for (key, expected) in keys.into_iter().chain(["nobody"]).zip(expected) {
            assert_eq!(used(store, limit, key).await, expected, "{}: {key}", limit.name);
        }
        assert!(!store.charge(&[charge(limit, "nobody", 11)], None).await.expect("charge").allowed);
    }
    // All limits of a key in one call.
    let of_all: Vec<StoredCharge<'_>> = limits.iter().map(|limit| charge(limit, keys[3], 1)).collect();
    store.refund(&of_all).await.expect("refund");
    for limit in &limits {
        let expected = if matches!(limit.limit, Limit::Concurrency(_)) { 6 } else { 5 };
        assert_eq!(used(store, limit, keys[3]).await, expected, "{}", limit.name);
    }
    clock.advance(Micros::from_secs(3 * 3_600));
    assert_eq!((subject.remembered)().await, 0, "what was refunded goes as if it had not been");
}

/// What was charged under the old numbers is refunded by the new ones.
async fn by_changed_numbers(make: &impl AsyncFn(ManualClock) -> Subject) {
    let minute = Micros::from_secs(60);
    let token = |rate: &str, burst| Limit::token_bucket(rate, burst);
    for (old, new, refunded, expected) in [
        // Tokens are tokens, whatever they refill by.
        (token("10/s", 10), token("20/s", 20), 2, 4),
        (token("10/s", 10), token("7/s", 7), 2, 4),
        (token("10/s", 10), token("7/s", 7), 7, 0),
        (token("7/s", 7), token("10/s", 10), 3, 3),
        (Limit::fixed_window(10, minute), Limit::fixed_window(20, minute), 2, 4),
        (Limit::sliding_window(10, minute), Limit::sliding_window(20, minute), 2, 4),
        (Limit::sliding_window_counter(10, minute), Limit::sliding_window_counter(20, minute), 2, 4),
        (Limit::concurrency(10, minute), Limit::concurrency(20, minute), 2, 6),
        // Another strategy knows nothing of it.
        (Limit::fixed_window(10, minute), Limit::sliding_window(10, minute), 2, 0),
    ] {
        let (old, new) = (limit("changed", old), limit("changed", new));
        let store = make(super::clock()).await.store;
        assert!(store.charge(&[charge(&old, "user:42", 6)], None).await.expect("charge").allowed);
        store.refund(&[charge(&new, "user:42", refunded)]).await.expect("refund");
        let got = used(&*store, &new, "user:42").await;
        assert_eq!(got, expected, "{} to {}", old.limit, new.limit);
    }
}

/// Refunds among charges lose no quota and make none, in whatever order keys are named.
pub(super) async fn races(effort: Effort, make: &impl AsyncFn(ManualClock) -> Subject) {
    let subject = make(super::clock()).await;
    let effort = Effort { racers: 8, ..effort };
    let each = effort.charges_each / 8;
    for limit in limits(1_000_000).into_iter().filter(|limit| limit.name != "leases") {
        let spent = race(effort, &subject.store, |store, racer| {
            let limit = limit.clone();
            async move {
                let mut spent = 0;
                for turn in 0..each {
                    let mut charges = [charge(&limit, "one", 5), charge(&limit, "other", 5)];
                    if racer % 2 == 0 {
                        charges.reverse();
                    }
                    assert!(store.charge(&charges, None).await.expect("charge").allowed);
                    let back = ((racer + turn) % 6) as u64;
                    if back > 0 {
                        charges = charges.map(|charge| StoredCharge { cost: cost(back), ..charge });
                        charges.reverse();
                        store.refund(&charges).await.expect("refund");
                    }
                    spent += 5 - back;
                }
                spent
            }
        })
        .await;
        for key in ["one", "other"] {
            let used = used(&*subject.store, &limit, key).await;
            assert_eq!(used, spent, "{}: what was not refunded is what is used of {key}", limit.name);
        }
    }
}
