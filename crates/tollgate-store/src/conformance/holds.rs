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
    let charges = |units| [StoredCharge { limit: &tokens, key: "model", cost: cost(units), shadow: false }];
    let remaining = async || store.peek(&charges(1_000)).await.expect("peek").outcomes[0].remaining;
    let settle = async |id, settlement| store.settle(id, &settlement).await.expect("settle");
    let minute = |id| Some(Hold { id, ttl: Micros::from_secs(60) });

    // Sent twice, charged once, with the same answer.
    let id = ChargeId::random();
    let first = store.charge(&charges(40), minute(id)).await.expect("charge");
    assert!(first.allowed, "{first:?}");
    let again = store.charge(&charges(40), minute(id)).await.expect("charge");
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
    assert!(!store.charge(&charges(91), minute(refused)).await.expect("charge").allowed);
    assert_eq!(settle(refused, Settlement::Cancel).await, Settled::Unknown);

    // A forgotten reservation stays charged as reserved, and settling it late changes nothing.
    let forgotten = ChargeId::random();
    let short = Some(Hold { id: forgotten, ttl: Micros::from_secs(5) });
    assert!(store.charge(&charges(50), short).await.expect("charge").allowed);
    clock.advance(Micros::from_secs(5));
    assert_eq!(settle(forgotten, Settlement::Cancel).await, Settled::Unknown);
    assert_eq!(remaining().await, 40);

    // Renewed in time, it can be settled for as long again.
    let renewed = ChargeId::random();
    let short = Some(Hold { id: renewed, ttl: Micros::from_secs(5) });
    assert!(store.charge(&charges(40), short).await.expect("charge").allowed);
    clock.advance(Micros::from_secs(4));
    assert_eq!(settle(renewed, Settlement::Renew).await, Settled::Done);
    clock.advance(Micros::from_secs(4));
    // More than was reserved is taken even below zero, and later charges wait for it.
    assert_eq!(settle(renewed, Settlement::Actual(70)).await, Settled::Done);
    assert_eq!(remaining().await, 0);
    assert!(!store.charge(&charges(1), None).await.expect("charge").allowed);

    an_id_is_of_one_charge(&subject).await;
    one_actual_for_several_limits(&subject).await;
    each_by_position(&subject).await;
    leases_end_and_charges_stay(&subject).await;
}

/// The id of an admitted charge passes no other charge: another cost, key, limit or number of them is an error and charges
/// nothing, also once the first charge is settled.
async fn an_id_is_of_one_charge(subject: &Subject) {
    let store = &subject.store;
    let minute = Micros::from_secs(60);
    let orders = limit("orders", Limit::fixed_window(100, minute));
    let bytes =
        limit("bytes", Limit::token_bucket(Rate::new(1, Micros::from_secs(3_600)).expect("a rate"), 100));
    let charge = |limit, key, units| StoredCharge { limit, key, cost: cost(units), shadow: false };
    let id = ChargeId::random();
    let hold = Some(Hold { id, ttl: FOR_LONG });
    let charges = [charge(&orders, "one", 1), charge(&bytes, "two", 2), charge(&orders, "one", 3)];
    let first = store.charge(&charges, hold).await.expect("charge");
    assert!(first.allowed);
    for is_settled in [false, true] {
        if is_settled {
            assert_eq!(
                store.settle(id, &Settlement::Each(vec![1, 2, 3])).await.expect("settle"),
                Settled::Done
            );
        }
        assert_eq!(store.charge(&charges, hold).await.expect("the same charge"), first);
        let [one, two, three] = charges;
        for others in [
            &[one][..],
            &[one, two],
            &[one, two, charge(&orders, "one", 4)],
            &[charge(&orders, "one", 99), two, three],
            &[charge(&orders, "other", 1), two, three],
            &[one, charge(&bytes, "other", 2), three],
            &[one, charge(&orders, "two", 2), three],
            &[one, two, three, charge(&orders, "more", 1)],
            &[one, two, charge(&orders, "other", 3)],
            &[charge(&orders, "one", 4), two],
        ] {
            let error = store.charge(others, hold).await.expect_err("another charge");
            assert!(error.is_invalid(), "{error}");
        }
        let left = async |limit, key| {
            store.peek(&[charge(limit, key, 1)]).await.expect("peek").outcomes[0].remaining
        };
        assert_eq!(
            (left(&orders, "one").await, left(&bytes, "two").await),
            (95, 97),
            "as if one more were charged"
        );
        assert_eq!((left(&orders, "other").await, left(&orders, "two").await), (99, 99));
    }
}

/// Each charge is settled with its own amount, in the order of the charges: one limit with two keys, pairs that are repeated and
/// one whose shadow limit took nothing.
async fn each_by_position(subject: &Subject) {
    let store = &subject.store;
    let minute = Micros::from_secs(60);
    for (strategy, numbers) in [
        ("by_window", Limit::fixed_window(100, minute)),
        ("by_bucket", Limit::token_bucket(Rate::new(1, Micros::from_secs(3_600)).expect("a rate"), 100)),
        ("by_log", Limit::sliding_window(100, minute)),
        ("by_counter", Limit::sliding_window_counter(100, minute)),
    ] {
        let (tokens, small) = (limit(strategy, numbers), limit("small", Limit::fixed_window(5, minute)));
        let charge = |limit, key, units, shadow| StoredCharge { limit, key, cost: cost(units), shadow };
        let charges = [
            charge(&tokens, "one", 20, false),
            charge(&small, "none", 10, true),
            charge(&tokens, "two", 20, false),
            charge(&tokens, "one", 10, false),
        ];
        let remaining = async |key| {
            let peeked = store.peek(&[charge(&tokens, key, 1_000, false)]).await.expect("peek");
            peeked.outcomes[0].remaining
        };
        let id = ChargeId::random();
        assert!(store.charge(&charges, Some(Hold { id, ttl: FOR_LONG })).await.expect("charge").allowed);
        assert_eq!((remaining("one").await, remaining("two").await), (70, 80), "{strategy}");
        for amounts in [0, 3, 5] {
            let error =
                store.settle(id, &Settlement::Each(vec![1; amounts])).await.expect_err("four charges");
            assert!(error.is_invalid(), "{error}");
        }
        let settled = store.settle(id, &Settlement::Each(vec![5, 99, 50, 2])).await.expect("settle");
        assert_eq!(settled, Settled::Done);
        assert_eq!((remaining("one").await, remaining("two").await), (93, 50), "{strategy}");
        let peeked = store.peek(&[charge(&small, "none", 99, false)]).await.expect("peek");
        assert_eq!(peeked.outcomes[0].remaining, 5, "it took nothing");
        let again = store.settle(id, &Settlement::Each(vec![1, 1, 1, 1])).await.expect("settle");
        assert_eq!(again, Settled::Already);
        for key in ["one", "two"] {
            assert!(store.forget(&tokens, key).await.expect("forget"));
        }
    }
}

/// A release ends leases, and leaves what else was charged as it was reserved.
async fn leases_end_and_charges_stay(subject: &Subject) {
    let store = &subject.store;
    let minute = Micros::from_secs(60);
    let (rate, leases) =
        (limit("rate", Limit::fixed_window(9, minute)), limit("leases", Limit::concurrency(2, minute)));
    let charge = |limit, units| StoredCharge { limit, key: "k", cost: cost(units), shadow: false };
    let id = ChargeId::random();
    let charges = [charge(&rate, 3), charge(&leases, 2)];
    assert!(store.charge(&charges, Some(Hold { id, ttl: FOR_LONG })).await.expect("charge").allowed);
    let left = async || {
        let peeked = store.peek(&[charge(&rate, 99), charge(&leases, 99)]).await.expect("peek");
        (peeked.outcomes[0].remaining, peeked.outcomes[1].remaining)
    };
    assert_eq!(left().await, (6, 0));
    assert_eq!(store.settle(id, &Settlement::Release).await.expect("release"), Settled::Done);
    assert_eq!(left().await, (6, 2));
    assert_eq!(store.settle(id, &Settlement::Release).await.expect("release"), Settled::Already);
}

/// One amount settles limits that reserved alike; otherwise each is named.
async fn one_actual_for_several_limits(subject: &Subject) {
    let store = &subject.store;
    let requests = limit("requests", Limit::fixed_window(10, Micros::from_secs(60)));
    let tokens = limit("words", Limit::fixed_window(1_000, Micros::from_secs(60)));
    let charge = |limit, units| StoredCharge { limit, key: "model", cost: cost(units), shadow: false };
    let charges = [charge(&requests, 1), charge(&tokens, 400)];
    let id = ChargeId::random();
    let hold = Some(Hold { id, ttl: FOR_LONG });
    assert!(store.charge(&charges, hold).await.expect("charge").allowed);
    let error = store.settle(id, &Settlement::Actual(300)).await.expect_err("two different reservations");
    assert!(error.is_invalid(), "{error}");
    let error =
        store.settle(id, &Settlement::Named(vec![("other".into(), 1)])).await.expect_err("no such limit");
    assert!(error.is_invalid(), "{error}");
    let named = Settlement::Named(vec![("words".into(), 300)]);
    assert_eq!(store.settle(id, &named).await.expect("settle"), Settled::Done);
    let after = store.peek(&[charge(&requests, 99), charge(&tokens, 9_999)]).await.expect("peek");
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
            let charge =
                StoredCharge { limit, key: &format!("key:{key}"), cost: cost(1 + key % 10), shadow: false };
            let hold = (key % 3 == 0).then(|| Hold { id: ChargeId::random(), ttl: window });
            assert!(subject.store.charge(&[charge], hold).await.expect("charge").allowed);
        }
    }
    assert_eq!((subject.remembered)().await, limits.len() * 20, "all that was just charged");
    clock.advance(Micros::from_secs(20));
    assert_eq!((subject.remembered)().await, 0, "nothing is left after twice the window");
}
