//! Refunds: what they give back wherever the counters are, what they end, and what is said when they fail.

use std::sync::Arc;
use std::time::Duration;

use tollgate::store::{Charged, Failure, Hold, Store, StoreFuture, StoreState, StoredCharge, StoredLimit};
use tollgate::telemetry::Source;
use tollgate::{Charge, ChargeId, Fallback, Limit, Rule, Settled, Settlement, Tollgate};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{a_minute, charged, every_strategy, hands, on, waited};

const HOUR: Duration = Duration::from_secs(3_600);

fn used(gate: &Tollgate, limit: &str, key: &str) -> u64 {
    ready(gate.status(limit, key)).unwrap().used()
}

fn source(gate: &Tollgate, key: &str) -> (bool, Source) {
    let decision = charged(gate, &[Charge::new("api", key)]);
    (decision.is_allowed(), decision.outcomes()[0].source())
}

#[test]
fn a_refund_is_the_same_wherever_the_counters_are() {
    for limit in every_strategy(10) {
        let hands = hands();
        let gates = [on(&hands), on(&hands).store(FaultyStore::new(&hands))].map(|builder| {
            let watching = Rule::new("watching", limit).unwrap().shadow();
            let builder = builder.limit("api", limit).rule(watching);
            builder.rule(Rule::unlimited("free").unwrap()).build().unwrap()
        });
        let [here, faulty] = gates.map(|gate| {
            let ask = |limit, key, cost| Charge::new(limit, key).cost(cost);
            let _ = charged(&gate, &[ask("api", "a", 6), ask("watching", "a", 6), ask("free", "a", 6)]);
            let _ = charged(&gate, &[ask("api", "b", 2)]);
            let back = [ask("api", "a", 2), ask("watching", "a", 5), ask("free", "a", 5), ask("api", "b", 9)];
            ready(gate.refund(&back)).unwrap();
            ready(gate.refund(&[ask("api", "nobody", 3)])).unwrap();
            ready(gate.refund(&[])).unwrap_err();
            assert!(ready(gate.refund(&[ask("apis", "a", 1)])).unwrap_err().to_string().contains("`api`"));
            ["a", "b", "nobody"].map(|key| (used(&gate, "api", key), used(&gate, "watching", key)))
        });
        let is_leased = matches!(limit, Limit::Concurrency(_));
        let expected = if is_leased { [(6, 6), (2, 0), (0, 0)] } else { [(4, 1), (0, 0), (0, 0)] };
        assert_eq!(here, expected, "{limit}");
        assert_eq!(faulty, expected, "{limit}");
    }
}

#[test]
fn a_refund_ends_what_is_believed_of_its_keys_and_of_no_other() {
    let hands = hands();
    let faulty = FaultyStore::new(&hands);
    let gate = on(&hands).limit("api", a_minute(2)).store(faulty.clone()).denial_cache(HOUR).build().unwrap();
    let exhaust = |key: &str| {
        while source(&gate, key).0 {}
        assert_eq!(source(&gate, key), (false, Source::DenialCache));
    };
    for key in ["a", "b"] {
        exhaust(key);
    }
    let back = [Charge::new("api", "a")];
    ready(gate.refund(&back)).unwrap();
    assert_eq!(source(&gate, "a"), (true, Source::Store));
    assert_eq!(source(&gate, "b"), (false, Source::DenialCache));

    // Done, and the answer lost: it may have been, so the store is asked.
    exhaust("a");
    faulty.fault(Fault::Loses(Failure::Timeout));
    let error = ready(gate.refund(&back)).unwrap_err();
    assert!(error.is_transient() && error.is_ambiguous(), "{error}");
    faulty.fault(Fault::None);
    assert_eq!(source(&gate, "a"), (true, Source::Store));

    // The caller gave up on it.
    exhaust("a");
    faulty.fault(Fault::Hangs);
    let mut crowd = Crowd::new();
    let quitter = crowd.join(gate.refund(&back));
    crowd.leave(quitter);
    faulty.fault(Fault::None);
    assert_eq!(source(&gate, "a"), (true, Source::Store));
}

#[test]
fn whoever_waits_is_told_of_a_refund() {
    let hands = hands();
    for gate in [on(&hands), on(&hands).store(FaultyStore::new(&hands))] {
        let gate = gate.limit("api", a_minute(2)).denial_cache(HOUR).build().unwrap();
        let _ = charged(&gate, &[Charge::new("api", "a").cost(2)]);
        let mut crowd = Crowd::new();
        crowd.join(waited(&gate, Charge::new("api", "a")));
        assert!(crowd.run().is_empty());
        ready(gate.refund(&[Charge::new("api", "a")])).unwrap();
        assert_eq!(crowd.run_to_see_who_is_done(), [0]);
    }
}

/// Nobody stands in for the store: whatever limits fall back to, nothing is given back, and a call costs nothing.
#[test]
fn while_the_store_is_down_nothing_is_refunded_and_that_is_an_error() {
    for fallback in [Fallback::Open, Fallback::Closed, Fallback::Local] {
        let hands = hands();
        let faulty = FaultyStore::new(&hands);
        let rule = Rule::new("api", a_minute(10)).unwrap().fallback(fallback);
        let gate = on(&hands).rule(rule).store(faulty.clone()).build().unwrap();
        let back = [Charge::new("api", "a").cost(3)];
        let _ = charged(&gate, &back);
        faulty.fault(Fault::Fails(Failure::Connection));
        for _ in 0..10 {
            let error = ready(gate.refund(&back)).unwrap_err();
            assert!(error.is_transient() && !error.is_ambiguous(), "{error}");
        }
        assert_eq!(gate.store_health().state, StoreState::Down);
        assert_eq!((faulty.calls(), faulty.pings()), (2, 1), "a charge, a failure, and a ping that failed");
        faulty.fault(Fault::None);
        hands.advance(Duration::from_secs(6));
        assert_eq!(used(&gate, "api", "a"), 3);
        ready(gate.refund(&back)).unwrap();
        assert_eq!(used(&gate, "api", "a"), 0);
        faulty.fault(Fault::Invalid);
        assert!(!ready(gate.refund(&back)).unwrap_err().is_transient(), "that is the caller's error");
    }
}

/// A store of somebody's own that does not know refunds says so.
#[test]
fn a_store_that_cannot_refund_says_so() {
    struct Plain(Arc<FaultyStore>);
    impl Store for Plain {
        fn charge<'a>(
            &'a self,
            items: &'a [StoredCharge<'a>],
            hold: Option<Hold>,
        ) -> StoreFuture<'a, Charged> {
            self.0.charge(items, hold)
        }
        fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
            self.0.settle(id, settlement)
        }
        fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
            self.0.peek(items)
        }
        fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
            self.0.forget(limit, key)
        }
    }
    let hands = hands();
    let store = Arc::new(Plain(FaultyStore::new(&hands)));
    let gate = on(&hands).limit("api", a_minute(10)).store(store).build().unwrap();
    let error = ready(gate.refund(&[Charge::new("api", "a")])).unwrap_err();
    assert!(error.to_string().contains("cannot refund") && !error.is_transient(), "{error}");
}
