//! Many callers at once. The clock stands still, so what may be admitted is known to the unit.

use std::sync::Arc;

use tokio::task::JoinSet;
use tollgate_kernel::Limit;

use super::{Effort, FOR_LONG, Subject, cost, limit};
use crate::{ChargeId, Hold, ManualClock, Micros, Settled, Settlement, Store, StoredCharge, StoredLimit};

/// A limit of every strategy that admits exactly `most` while the clock stands still.
pub(super) fn limits(most: u64) -> Vec<StoredLimit> {
    let rate = "1/m";
    let hour = Micros::from_secs(3_600);
    vec![
        limit("token", Limit::token_bucket(rate, most)),
        limit("leaky", Limit::leaky_bucket(rate, most)),
        limit("fixed", Limit::fixed_window(most, hour)),
        limit("log", Limit::sliding_window(most, hour)),
        limit("counter", Limit::sliding_window_counter(most, hour)),
        limit("leases", Limit::concurrency(most, hour)),
    ]
}

/// Has every racer run `race`, and adds up what they return.
pub(super) async fn race<F>(
    effort: Effort,
    store: &Arc<dyn Store>,
    race: impl Fn(Arc<dyn Store>, usize) -> F,
) -> u64
where
    F: Future<Output = u64> + Send + 'static,
{
    let mut racers = JoinSet::new();
    for racer in 0..effort.racers {
        racers.spawn(race(store.clone(), racer));
    }
    racers.join_all().await.into_iter().sum()
}

/// However many callers race for one key, exactly the limit is admitted.
pub(super) async fn one_key(effort: Effort, make: &impl AsyncFn(ManualClock) -> Subject) {
    let charges = effort.racers * effort.charges_each;
    let most = charges as u64 / 3;
    for limit in limits(most) {
        let subject = make(super::clock()).await;
        // Logs and leases grow with every admission; a tenth of the charges makes their point.
        let is_long = matches!(limit.limit, Limit::SlidingWindow(_) | Limit::Concurrency(_));
        let (each, most) =
            if is_long { (effort.charges_each / 100, most / 300) } else { (effort.charges_each, most) };
        let limit = if is_long {
            limits(most).into_iter().find(|other| other.name == limit.name)
        } else {
            Some(limit)
        };
        let limit = limit.expect("the same strategy");
        let name = limit.name.clone();
        let admitted = race(effort, &subject.store, |store, _| {
            let limit = limit.clone();
            async move {
                let mut admitted = 0;
                let mut last_remaining = u64::MAX;
                for _ in 0..each {
                    let charge = StoredCharge { limit: &limit, key: "hot", cost: cost(1), shadow: false };
                    let charged = store.charge(&[charge], None).await.expect("charge");
                    let remaining = charged.outcomes[0].remaining;
                    assert!(remaining <= last_remaining, "{}: what is left grew", limit.name);
                    last_remaining = remaining;
                    admitted += u64::from(charged.allowed);
                }
                admitted
            }
        })
        .await;
        assert_eq!(admitted, most, "{name}: admitted by {charges} racing charges");
    }
}

/// Two limits in one charge are never half charged: each has taken as much as was admitted.
pub(super) async fn several_limits(effort: Effort, make: &impl AsyncFn(ManualClock) -> Subject) {
    let subject = make(super::clock()).await;
    let each = effort.charges_each / 10;
    let offered = (effort.racers * each) as u64;
    let hour = Micros::from_secs(3_600);
    let global = limit("global", Limit::fixed_window(offered / 2, hour));
    let user = limit("user", Limit::token_bucket("1/h", offered / 10));
    let admitted = race(effort, &subject.store, |store, racer| {
        let (global, user) = (global.clone(), user.clone());
        async move {
            let mut admitted = 0;
            for turn in 0..each {
                let key = format!("user:{}", (racer + turn) % 7);
                let of_global = StoredCharge { limit: &global, key: "all", cost: cost(1), shadow: false };
                let of_user = StoredCharge { limit: &user, key: &key, cost: cost(1), shadow: false };
                // In either order: locks must not be taken in a ring.
                let charges = if racer % 2 == 0 { [of_global, of_user] } else { [of_user, of_global] };
                admitted += u64::from(store.charge(&charges, None).await.expect("charge").allowed);
            }
            admitted
        }
    })
    .await;
    let used = async |limit: &StoredLimit, key: &str| {
        let charge = StoredCharge { limit, key, cost: crate::Cost::MAX, shadow: false };
        subject.store.peek(&[charge]).await.expect("peek").outcomes[0].used()
    };
    let mut by_users = 0;
    for key in 0..7 {
        by_users += used(&user, &format!("user:{key}")).await;
    }
    assert!(admitted > 0 && admitted <= offered / 2, "{admitted} of {offered}");
    assert_eq!(used(&global, "all").await, admitted, "the global limit took what was admitted");
    assert_eq!(by_users, admitted, "the users took what was admitted");
}

/// Reserving and settling from many callers loses no quota and makes none.
pub(super) async fn reservations(effort: Effort, make: &impl AsyncFn(ManualClock) -> Subject) {
    let subject = make(super::clock()).await;
    let effort = Effort { racers: 8, ..effort };
    let each = effort.charges_each / 4;
    for limit in limits(1_000_000).into_iter().filter(|limit| limit.name != "log") {
        let is_lease = matches!(limit.limit, Limit::Concurrency(_));
        // Stores bound what one key keeps of reservations, so each limit has a key of its own.
        let key = format!("shared:{}", limit.name);
        let spent = race(effort, &subject.store, |store, racer| {
            let (limit, key) = (limit.clone(), key.clone());
            async move {
                let mut spent = 0;
                for turn in 0..each {
                    let charge = StoredCharge { limit: &limit, key: &key, cost: cost(10), shadow: false };
                    let hold = Hold { id: ChargeId::random(), ttl: FOR_LONG };
                    if !store.charge(&[charge], Some(hold)).await.expect("charge").allowed {
                        continue;
                    }
                    let actual = ((racer + turn) % 12) as u64;
                    let settled = store.settle(hold.id, &Settlement::Actual(actual)).await;
                    assert_eq!(settled.expect("settle"), Settled::Done);
                    spent += if is_lease { 0 } else { actual };
                }
                spent
            }
        })
        .await;
        let charge = StoredCharge { limit: &limit, key: &key, cost: crate::Cost::MAX, shadow: false };
        let used = subject.store.peek(&[charge]).await.expect("peek").outcomes[0].used();
        assert_eq!(used, spent, "{}: what was settled is what is used", limit.name);
    }
}
