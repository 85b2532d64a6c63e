//! Charges with ids of the caller's: sent again, with other charges, beside cached denials, and settled by several at once.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate::{Charge, ChargeId, Decision, Error, Rule, Settled, Settlement, Tollgate};

use crate::crowd::ready;
use crate::faulty_store::FaultyStore;
use crate::scene::{a_minute, at_once, bucket, hands, on, secs};

/// The same limits in this process and in a remote store.
fn near_and_far() -> [Tollgate; 2] {
    let hands = hands();
    let faulty = FaultyStore::new(&hands);
    [on(&hands), on(&hands).store(faulty)].map(|builder| {
        builder
            .limit("orders", a_minute(2))
            .limit("bytes", bucket("1/h", 100))
            .limit("workers", at_once(1))
            .rule(Rule::new("tried", a_minute(1)).unwrap().shadow())
            .build()
            .unwrap()
    })
}

fn used(gate: &Tollgate, limit: &str, key: &str) -> u64 {
    ready(gate.status(limit, key)).unwrap().used()
}

/// Regression: the second order was let through for nothing, or denied for good if it had more charges than the first.
#[test]
fn an_id_passes_no_other_charge() {
    for gate in near_and_far() {
        let id = ChargeId::random();
        let orders = |key: &'static str, cost| Charge::new("orders", key).cost(cost);
        let first = [orders("a", 1), Charge::new("bytes", "a").cost(10)];
        let of_first: Decision = ready(gate.charge(&first).id(id)).unwrap();
        assert!(of_first.is_allowed());
        let is_taken = |answer: Result<bool, Error>| {
            let error = answer.expect_err("another charge");
            assert!(
                !error.is_transient() && error.to_string().contains("belongs to another charge"),
                "{error}"
            );
        };
        for others in [
            &[orders("a", 2), Charge::new("bytes", "a").cost(10)][..],
            &[orders("b", 1), Charge::new("bytes", "b").cost(10)],
            &[Charge::new("bytes", "a").cost(10), orders("a", 1)],
            &[orders("a", 1)],
            &[orders("a", 1), Charge::new("bytes", "a").cost(10), Charge::new("tried", "a")],
        ] {
            is_taken(ready(gate.charge(others).id(id)).map(|decision| decision.is_allowed()));
            is_taken(ready(gate.reserve(others, secs(9)).id(id)).map(|reserved| reserved.is_ok()));
            is_taken(ready(gate.wait(others, secs(0)).id(id)).map(|decision| decision.is_allowed()));
        }
        assert_eq!(ready(gate.charge(&first).id(id)).unwrap(), of_first);
        assert_eq!((used(&gate, "orders", "a"), used(&gate, "bytes", "a")), (1, 10));
        assert_eq!((used(&gate, "orders", "b"), used(&gate, "tried", "a")), (0, 0));
        // Nor once it is settled.
        assert_eq!(ready(gate.settle(id, &Settlement::Cancel)).unwrap(), Settled::Done);
        is_taken(ready(gate.charge(&[orders("a", 2)]).id(id)).map(|decision| decision.is_allowed()));
        assert_eq!(used(&gate, "orders", "a"), 0);
    }
}

/// Regression: a charge that the store had admitted was denied when it was sent again, because its key was in the denial cache.
#[test]
fn what_was_admitted_is_answered_again_though_its_key_is_denied_since() {
    for gate in near_and_far() {
        let charges = [Charge::new("orders", "a").cost(2)];
        let id = ChargeId::random();
        assert!(ready(gate.charge(&charges).id(id)).unwrap().is_allowed());
        for _ in 0..3 {
            assert!(!ready(gate.charge(&charges)).unwrap().is_allowed());
            assert!(ready(gate.charge(&charges).id(id)).unwrap().is_allowed(), "the same charge, sent again");
            assert!(ready(gate.wait(&charges, secs(0)).id(id)).unwrap().is_allowed());
            assert!(
                !ready(gate.charge(&charges).id(ChargeId::random())).unwrap().is_allowed(),
                "another one"
            );
        }
        assert_eq!(used(&gate, "orders", "a"), 2);
    }
}

/// Regression: the id was ignored, so what was sent twice was carried out twice.
#[test]
fn calls_that_cannot_have_an_id_say_so() {
    for gate in near_and_far() {
        let charges = [Charge::new("bytes", "a").cost(10), Charge::new("bytes", "b").cost(10)];
        assert!(ready(gate.charge(&charges)).unwrap().is_allowed());
        let id = ChargeId::random();
        for error in [
            ready(gate.charge_each(&charges).id(id)).map(drop).unwrap_err(),
            ready(gate.refund(&charges).id(id)).unwrap_err(),
        ] {
            assert!(error.to_string().contains("takes no id"), "{error}");
        }
        assert!(ready(gate.peek(&charges).id(id)).unwrap().is_allowed(), "it changes nothing anyway");
        assert_eq!((used(&gate, "bytes", "a"), used(&gate, "bytes", "b")), (10, 10));
    }
}

/// Two permits by one id are one lease; the second holder learns that the first gave it back.
#[test]
fn an_acquire_that_is_sent_again_takes_one_lease() {
    for gate in near_and_far() {
        let id = ChargeId::random();
        let first = ready(gate.acquire("workers", "pool").id(id)).unwrap().unwrap();
        let again = ready(gate.acquire("workers", "pool").id(id)).unwrap().unwrap();
        assert_eq!((first.id(), used(&gate, "workers", "pool")), (again.id(), 1));
        assert!(ready(gate.acquire("workers", "pool")).unwrap().is_err());
        ready(first.release()).unwrap();
        ready(gate.flush());
        assert_eq!(used(&gate, "workers", "pool"), 0);
        if gate.local("workers").is_ok() {
            assert!(again.is_lost());
        }
    }
}

/// Of settlements that come at the same time one is carried out, and the others say that it was.
#[test]
fn of_many_settlements_at_once_one_is_carried_out() {
    for gate in near_and_far() {
        for round in 0..50 {
            let key = format!("round-{round}");
            let charges = [Charge::new("bytes", &key).cost(50)];
            let reservation = ready(gate.reserve(&charges, secs(60))).unwrap().unwrap();
            let (done, barrier) = (AtomicUsize::new(0), Barrier::new(4));
            std::thread::scope(|scope| {
                for actual in [0, 10, 40, 60] {
                    let (gate, done, barrier, id) = (&gate, &done, &barrier, reservation.id());
                    scope.spawn(move || {
                        barrier.wait();
                        match ready(gate.settle(id, &Settlement::Actual(actual))).unwrap() {
                            Settled::Done => _ = done.fetch_add(1, Ordering::SeqCst),
                            other => assert_eq!(other, Settled::Already),
                        }
                    });
                }
            });
            assert_eq!(done.into_inner(), 1);
            assert!([0, 10, 40, 60].contains(&used(&gate, "bytes", &key)), "{}", used(&gate, "bytes", &key));
        }
    }
}
