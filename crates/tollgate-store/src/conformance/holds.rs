//! What a held charge and an idle key come to.

use tollgate_kernel::{Limit, Rate};

use super::{FOR_LONG, Subject, cost, limit};
use crate::{ChargeId, Hold, ManualClock, Micros, Settled, Settlement, StoredCharge};

/// A name is charged once and settled once, and what happens to it after its time is up changes nothing.
pub(super) async fn holds(make: &impl AsyncFn(ManualClock) -> Subject) {
    let clock = super::clock();
    let subject = make(clock.clone()).await;
    let store = &subject.store;
    let tokens = limit("tokens", Limit::fixed_window(100, Micros::from_secs(60)));
    let items = |units| [StoredCharge { limit: &tokens, key: "model", cost: cost(units), shadow: false }];
    let remaining = async || store.peek(&items(1_000)).await.expect("peek").outcomes[0].remaining;
    let settle = async |id, settlement| store.settle(id, &settlement).await.expect("settle");
    let minute = |id| Some(Hold { id, ttl: Micros::from_secs(60) });

    // Sent twice, charged once, with the same answer.
    let id = ChargeId::random();
    let first = store.charge(&items(40), minute(id)).await.expect("charge");
    assert!(first.allowed, "{first:?}");
    let again = store.charge(&items(40), minute(id)).await.expect("charge");
    assert_eq!(first, again, "the same name is the same charge");
    assert_eq!(remaining().await, 60);

    // Settled twice, corrected once.
    assert_eq!(settle(id, Settlement::Actual(10)).await, Settled::Done);
    assert_eq!(remaining().await, 90);
    assert_eq!(settle(id, Settlement::Actual(0)).await, Settled::Already);
    assert_eq!(settle(id, Settlement::Cancel).await, Settled::Already);
    assert_eq!(remaining().await, 90);
    assert_eq!(settle(ChargeId::random(), Settlement::Cancel).await, Settled::Unknown);

    // A refused charge holds nothing.
    let refused = ChargeId::random();
    assert!(!store.charge(&items(91), minute(refused)).await.expect("charge").allowed);
    assert_eq!(settle(refused, Settlement::Cancel).await, Settled::Unknown);

    // A forgotten reservation stays charged as reserved, and settling it late changes nothing.
    let forgotten = ChargeId::random();
    let short = Some(Hold { id: forgotten, ttl: Micros::from_secs(5) });
    assert!(store.charge(&items(50), short).await.expect("charge").allowed);
    clock.advance(Micros::from_secs(5));
    assert_eq!(settle(forgotten, Settlement::Cancel).await, Settled::Unknown);
    assert_eq!(remaining().await, 40);

    // Renewed in time, it can be settled for as long again.
    let renewed = ChargeId::random();
    let short = Some(Hold { id: renewed, ttl: Micros::from_secs(5) });
    assert!(store.charge(&items(40), short).await.expect("charge").allowed);
    clock.advance(Micros::from_secs(4));
    assert_eq!(settle(renewed, Settlement::Renew).await, Settled::Done);
    clock.advance(Micros::from_secs(4));
    // More than was reserved is taken even below zero, and later charges wait for it.
    assert_eq!(settle(renewed, Settlement::Actual(70)).await, Settled::Done);
    assert_eq!(remaining().await, 0);
    assert!(!store.charge(&items(1), None).await.expect("charge").allowed);

    one_actual_for_several_limits(&subject).await;
}

/// One amount settles limits that reserved alike; otherwise each is named.
async fn one_actual_for_several_limits(subject: &Subject) {
    let store = &subject.store;
    let requests = limit("requests", Limit::fixed_window(10, Micros::from_secs(60)));
    let tokens = limit("words", Limit::fixed_window(1_000, Micros::from_secs(60)));
    let item = |limit, units| StoredCharge { limit, key: "model", cost: cost(units), shadow: false };
    let items = [item(&requests, 1), item(&tokens, 400)];
    let id = ChargeId::random();
    let hold = Some(Hold { id, ttl: FOR_LONG });
    assert!(store.charge(&items, hold).await.expect("charge").allowed);
    let error = store.settle(id, &Settlement::Actual(300)).await.expect_err("two different reservations");
    assert!(error.is_invalid(), "{error}");
    let error =
        store.settle(id, &Settlement::Each(vec![("other".into(), 1)])).await.expect_err("no such limit");
    assert!(error.is_invalid(), "{error}");
    let each = Settlement::Each(vec![("words".into(), 300)]);
    assert_eq!(store.settle(id, &each).await.expect("settle"), Settled::Done);
    let after = store.peek(&[item(&requests, 99), item(&tokens, 9_999)]).await.expect("peek");
    assert_eq!([after.outcomes[0].remaining, after.outcomes[1].remaining], [9, 700]);
}

/// Twice a window after the last call nothing is left of a key, under any strategy.
pub(super) async fn idle_keys_vanish(make: &impl AsyncFn(ManualClock) -> Subject) {
    let clock = super::clock();
    let subject = make(clock.clone()).await;
    let window = Micros::from_secs(10);
    let rate = Rate::per_second(1).expect("a rate");
    let limits = [
        limit("token", Limit::token_bucket(rate, 10)),
        limit("leaky", Limit::leaky_bucket(rate, 10)),
        limit("fixed", Limit::fixed_window(10, window)),
        limit("clock", Limit::clock_window(10, window)),
        limit("log", Limit::sliding_window(10, window)),
        limit("counter", Limit::sliding_window_counter(10, window)),
        limit("leases", Limit::concurrency(10, window)),
    ];
    for limit in &limits {
        for key in 0..20 {
            let item =
                StoredCharge { limit, key: &format!("key:{key}"), cost: cost(1 + key % 10), shadow: false };
            let hold = (key % 3 == 0).then(|| Hold { id: ChargeId::random(), ttl: window });
            assert!(subject.store.charge(&[item], hold).await.expect("charge").allowed);
        }
    }
    assert_eq!((subject.remembered)().await, limits.len() * 20, "all that was just charged");
    clock.advance(Micros::from_secs(20));
    assert_eq!((subject.remembered)().await, 0, "nothing is left after twice the window");
}
