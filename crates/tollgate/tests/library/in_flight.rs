//! Charges whose answer never came: the reply was lost, or the caller left. The store must not go on holding them.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate::store::{Cost, Failure, Store, StoredCharge, StoredLimit};
use tollgate::{Charge, ChargeId, Fallback, Limit, ManualClock, Settled, Settlement, Tollgate};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{a_minute, at_once, every_strategy, hands, on, one, secs, waited};

const HOUR: Duration = Duration::from_secs(3_600);
const DOWN: Fault = Fault::Fails(Failure::Connection);
const LOST: Fault = Fault::Loses(Failure::Timeout);

fn gate(hands: &ManualClock, limit: Limit, fallback: Fallback) -> (Tollgate, Arc<FaultyStore>) {
    let faulty = FaultyStore::new(hands);
    let builder = on(hands).limit("api", limit).limit("other", a_minute(100)).fallback(fallback);
    (builder.store(faulty.clone()).build().unwrap(), faulty)
}

/// What the store itself counts for the key `a`, asked past the library.
fn stored(faulty: &FaultyStore, limit: Limit) -> u64 {
    let limit = StoredLimit::new("api", limit);
    let item = StoredCharge { limit: &limit, key: "a", cost: Cost::new(u64::MAX).unwrap(), shadow: false };
    let outcome = ready(Store::peek(&faulty.store, &[item])).unwrap().outcomes[0];
    outcome.capacity - outcome.remaining
}

/// The store answers again, and a call of another key reaches it.
fn heal(gate: &Tollgate, faulty: &FaultyStore, hands: &ManualClock) {
    faulty.fault(Fault::None);
    hands.advance(secs(30));
    assert!(ready(gate.status("other", "b")).is_ok(), "the store is asked again");
}

fn settle(gate: &Tollgate, id: ChargeId, settlement: &Settlement) -> Settled {
    ready(gate.settle(id, settlement)).unwrap()
}

/// The cancel was answered `Done` while the store held the charge for as long as the reservation lasted.
#[test]
fn a_reservation_whose_reply_was_lost_is_pending_until_the_store_has_cancelled_its_copy() {
    for fallback in [Fallback::Open, Fallback::Local] {
        let hands = hands();
        let limit = Limit::fixed_window(5, secs(3_600)).unwrap();
        let (gate, faulty) = gate(&hands, limit, fallback);
        faulty.answers_pings(true);
        let reserve = || {
            faulty.fault(LOST);
            let reserved = ready(gate.reserve(&[Charge::new("api", "a").cost(2)], HOUR)).unwrap();
            faulty.fault(DOWN);
            reserved.expect("the fallback admits it").id()
        };
        let [cancelled, renewed] = [reserve(), reserve()];
        assert_eq!((stored(&faulty, limit), gate.store_health().pending_cancels), (4, 2), "{fallback}");

        assert_eq!(settle(&gate, cancelled, &Settlement::Cancel), Settled::Pending, "{fallback}");
        assert_eq!(settle(&gate, cancelled, &Settlement::Cancel), Settled::Already, "{fallback}");
        assert_eq!(settle(&gate, renewed, &Settlement::Renew), Settled::Pending, "{fallback}");
        assert_eq!(stored(&faulty, limit), 4, "{fallback}: the store was not asked");

        heal(&gate, &faulty, &hands);
        assert_eq!(stored(&faulty, limit), 0, "{fallback}");
        assert_eq!(gate.store_health().pending_cancels, 0, "{fallback}");
        assert_eq!(settle(&gate, renewed, &Settlement::Renew), Settled::Done, "{fallback}");
        assert_eq!(settle(&gate, renewed, &Settlement::Actual(1)), Settled::Done, "{fallback}");
        assert_eq!(settle(&gate, renewed, &Settlement::Actual(1)), Settled::Already, "{fallback}");
        assert_eq!(stored(&faulty, limit), 0, "{fallback}: what was settled here is not in the store");
    }
}

#[test]
fn what_the_fallback_denied_is_cancelled_in_the_store_too() {
    for limit in every_strategy(5) {
        let hands = hands();
        let (gate, faulty) = gate(&hands, limit, Fallback::Closed);
        faulty.fault(LOST);
        assert!(ready(gate.reserve(&[Charge::new("api", "a").cost(2)], HOUR)).unwrap().is_err());
        assert_eq!(stored(&faulty, limit), 2, "{limit}");
        faulty.fault(Fault::None);
        let _ = ready(gate.status("other", "b")).unwrap();
        assert_eq!(stored(&faulty, limit), 0, "{limit}");
    }
}

/// The cancel may overtake the charge. It is repeated for as long as the charge may still arrive.
#[test]
fn a_charge_that_arrives_after_its_cancel_is_cancelled_all_the_same() {
    let hands = hands();
    let limit = Limit::fixed_window(5, secs(3_600)).unwrap();
    let (gate, faulty) = gate(&hands, limit, Fallback::Open);
    faulty.fault(Fault::Vanishes(Failure::Connection));
    let _ = ready(gate.reserve(&[Charge::new("api", "a").cost(2)], HOUR)).unwrap();
    let hold = faulty.last_hold().expect("a reservation carries an id");
    faulty.fault(Fault::None);
    let _ = ready(gate.status("other", "b")).unwrap();
    assert_eq!(gate.store_health().pending_cancels, 1, "the store knows nothing of it yet");

    hands.advance(secs(1));
    let stored_limit = StoredLimit::new("api", limit);
    let item = StoredCharge { limit: &stored_limit, key: "a", cost: Cost::new(2).unwrap(), shadow: false };
    assert!(ready(Store::charge(&faulty.store, &[item], Some(hold))).unwrap().allowed);
    assert_eq!(stored(&faulty, limit), 2);
    hands.advance(secs(1));
    let _ = ready(gate.status("other", "b")).unwrap();
    assert_eq!((stored(&faulty, limit), gate.store_health().pending_cancels), (0, 0));
}

#[test]
fn a_charge_that_never_arrived_is_not_cancelled_for_ever() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, a_minute(5), Fallback::Open);
    faulty.fault(Fault::Vanishes(Failure::Connection));
    let _ = ready(gate.reserve(&[Charge::new("api", "a").cost(2)], HOUR)).unwrap();
    faulty.fault(Fault::None);
    let before = faulty.calls();
    let mut looks = 0;
    while gate.store_health().pending_cancels > 0 {
        hands.advance(Duration::from_millis(10));
        let _ = ready(gate.peek(&[Charge::new("other", "b")])).unwrap();
        looks += 1;
        assert!(looks < 2_000, "still being cancelled after 20 s");
    }
    let cancels = faulty.calls() - before - looks;
    assert!((2..=12).contains(&cancels), "{cancels} calls for one id");
    assert_eq!(gate.store_health().abandoned_cancels, 0);
}

/// Polls a call once, so that it reaches the store, and drops it before its answer.
fn leave_in_flight<T>(faulty: &FaultyStore, call: impl Future<Output = T>) {
    faulty.fault(Fault::Hangs);
    let mut crowd = Crowd::new();
    let caller = crowd.join(call);
    crowd.leave(caller);
    faulty.fault(Fault::None);
}

#[test]
fn a_wait_that_is_dropped_in_flight_leaves_nothing_in_the_store() {
    for limit in every_strategy(5) {
        let hands = hands();
        let (gate, faulty) = gate(&hands, limit, Fallback::Closed);
        leave_in_flight(&faulty, waited(&gate, Charge::new("api", "a").cost(3)));
        assert_eq!(stored(&faulty, limit), 3, "{limit}: it was charged");
        assert_eq!(gate.store_health().pending_cancels, 1, "{limit}");
        let _ = ready(gate.status("other", "b")).unwrap();
        assert_eq!(stored(&faulty, limit), 0, "{limit}");
        assert_eq!(gate.store_health().pending_cancels, 0, "{limit}");
    }
}

#[test]
fn a_reserve_that_is_dropped_in_flight_leaves_nothing_in_the_store() {
    for limit in every_strategy(5) {
        let hands = hands();
        let (gate, faulty) = gate(&hands, limit, Fallback::Closed);
        let asks = [Charge::new("api", "a").cost(3), Charge::new("other", "a")];
        leave_in_flight(&faulty, gate.reserve(&asks, HOUR));
        assert_eq!(stored(&faulty, limit), 3, "{limit}: it was charged");
        let _ = ready(gate.status("other", "b")).unwrap();
        assert_eq!(stored(&faulty, limit), 0, "{limit}");
        assert_eq!(ready(gate.status("other", "a")).unwrap().used(), 0, "{limit}");
    }
}

#[test]
fn a_wait_whose_reply_was_lost_is_answered_by_the_fallback_and_cancelled_in_the_store() {
    for (fallback, is_admitted) in
        [(Fallback::Open, true), (Fallback::Local, true), (Fallback::Closed, false)]
    {
        let hands = hands();
        let limit = Limit::fixed_window(5, secs(3_600)).unwrap();
        let (gate, faulty) = gate(&hands, limit, fallback);
        faulty.fault(LOST);
        let waited = ready(gate.wait(one(Charge::new("api", "a").cost(3)), Duration::ZERO));
        assert_eq!(waited.unwrap().is_allowed(), is_admitted, "{fallback}");
        assert_eq!(stored(&faulty, limit), 3, "{fallback}");
        faulty.fault(Fault::None);
        let _ = ready(gate.status("other", "b")).unwrap();
        assert_eq!(stored(&faulty, limit), 0, "{fallback}");
    }
}

/// Each attempt has an id of its own: a retry under the same one would find it cancelled.
#[test]
fn a_waiter_is_charged_once_though_its_first_reply_was_lost() {
    let hands = hands();
    let limit = Limit::fixed_window(5, secs(3_600)).unwrap();
    let (gate, faulty) = gate(&hands, limit, Fallback::Closed);
    faulty.fault(LOST);
    let mut crowd = Crowd::new();
    crowd.join(waited(&gate, Charge::new("api", "a").cost(3)));
    faulty.fault(Fault::None);
    let admitted = (0..100).find(|_| {
        hands.advance(Duration::from_millis(100));
        !crowd.run().is_empty()
    });
    assert!(admitted.is_some());
    let _ = ready(gate.status("other", "b")).unwrap();
    assert_eq!(stored(&faulty, limit), 3);
}

#[test]
fn only_so_many_charges_are_remembered_to_be_cancelled() {
    let hands = hands();
    let limit = Limit::fixed_window(1_000_000, secs(3_600)).unwrap();
    let (gate, faulty) = gate(&hands, limit, Fallback::Open);
    for number in 0..12_000 {
        // On two keys, because one has at most 10,000 reservations open.
        let key = if number < 10_000 && number % 2 == 0 { "b" } else { "a" };
        leave_in_flight(&faulty, waited(&gate, Charge::new("api", key)));
    }
    let health = gate.store_health();
    assert_eq!((health.pending_cancels, health.abandoned_cancels), (10_000, 2_000));
    for _ in 0..10_000 {
        let _ = ready(gate.peek(&[Charge::new("other", "b")])).unwrap();
    }
    assert_eq!((stored(&faulty, limit), gate.store_health().pending_cancels), (2_000, 0));
}

/// After that the store holds it no longer, and the charge stays as it is.
#[test]
fn a_cancel_ends_with_the_time_to_live() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, a_minute(5), Fallback::Open);
    faulty.fault(LOST);
    let asks = [Charge::new("api", "a").cost(2)];
    let reserved = ready(gate.reserve(&asks, Duration::from_secs(20))).unwrap();
    let id = reserved.unwrap().id();
    faulty.fault(DOWN);
    hands.advance(secs(21));
    faulty.fault(Fault::None);
    let _ = ready(gate.status("other", "b")).unwrap();
    let health = gate.store_health();
    assert_eq!((health.pending_cancels, health.abandoned_cancels), (0, 1));
    assert_eq!(settle(&gate, id, &Settlement::Cancel), Settled::Unknown);
    assert_eq!(stored(&faulty, a_minute(5)), 2);
}

/// A lease that no caller keeps would have been held to its end.
#[test]
fn a_cancelled_lease_lets_the_next_waiter_in() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, at_once(1), Fallback::Closed);
    leave_in_flight(&faulty, waited(&gate, Charge::new("api", "a")));
    faulty.fault(Fault::None);
    // Its first try has the store cancel what was left behind, and that wakes it.
    assert!(ready(waited(&gate, Charge::new("api", "a"))).unwrap().is_allowed());
}

/// Polls a call so often and then drops it. Returns its answer, if it had one by then.
fn polled<T>(times: usize, call: impl Future<Output = T>) -> Option<T> {
    let mut call = pin!(call);
    (0..times).find_map(|_| match call.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    })
}

/// Wherever a call is left, the store holds what was answered and nothing else.
#[test]
fn a_call_can_be_dropped_at_every_point() {
    let mut answered = 0;
    for (limit, times) in
        every_strategy(20).into_iter().flat_map(|limit| (0..10).map(move |times| (limit, times)))
    {
        let hands = hands();
        let faulty = FaultyStore::new(&hands);
        let builder = on(&hands).limit("api", limit).limit("other", a_minute(100));
        let gate = builder.fallback(Fallback::Closed).store(faulty.clone()).build().unwrap();
        let mut held = 0;
        faulty.fault(Fault::Pauses);
        held += polled(times, waited(&gate, Charge::new("api", "a").cost(2))).map_or(0, |_| 2);
        let asks = [Charge::new("api", "a").cost(3), Charge::new("other", "a").cost(3)];
        let reserved = polled(times, gate.reserve(&asks, HOUR));
        held += reserved.as_ref().map_or(0, |_| 3);
        // A settlement that is left may or may not have been carried out, and can be sent again.
        if let Some(reservation) = reserved.and_then(|reserved| reserved.unwrap().ok()) {
            polled(times % 3, gate.settle(reservation.id(), &Settlement::Cancel));
            faulty.fault(Fault::None);
            assert_ne!(settle(&gate, reservation.id(), &Settlement::Cancel), Settled::Unknown);
            held -= 3;
        }
        answered += held;
        faulty.fault(Fault::None);
        hands.advance(Duration::from_micros(1));
        for _ in 0..14 {
            let _ = ready(gate.peek(&[Charge::new("other", "b")])).unwrap();
            hands.advance(Duration::from_millis(600));
        }
        assert_eq!(gate.store_health().pending_cancels, 0, "{limit}, {times} polls");
        let limit_holds_still = !matches!(limit, Limit::TokenBucket(_) | Limit::LeakyBucket(_));
        if limit_holds_still {
            assert_eq!(stored(&faulty, limit), held, "{limit}, {times} polls");
        } else {
            assert!(stored(&faulty, limit) <= held, "{limit}, {times} polls");
        }
    }
    assert!(answered > 0, "some were answered");
}

/// Inside a runtime nobody has to call again, and a task that died with its runtime is replaced.
#[cfg(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis"))]
#[test]
fn a_task_of_its_own_cancels_where_there_is_a_runtime() {
    async fn others_run() {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let hands = hands();
    let (gate, faulty) = gate(&hands, a_minute(5), Fallback::Closed);
    let pending = || gate.store_health().pending_cancels;
    runtime().block_on(async {
        for _ in 0..3 {
            leave_in_flight(&faulty, waited(&gate, Charge::new("api", "a")));
            assert_eq!(pending(), 1);
            others_run().await;
            assert_eq!((pending(), stored(&faulty, a_minute(5))), (0, 0));
        }
        leave_in_flight(&faulty, waited(&gate, Charge::new("api", "a")));
        faulty.fault(DOWN);
        others_run().await;
        assert_eq!(pending(), 1, "the store is away");
    });
    faulty.fault(Fault::None);
    hands.advance(secs(1));
    runtime().block_on(async {
        others_run().await;
        assert_eq!(pending(), 1, "its task is gone");
        assert!(gate.status("other", "b").await.is_ok());
        others_run().await;
        assert_eq!((pending(), stored(&faulty, a_minute(5))), (0, 0));
    });
}
