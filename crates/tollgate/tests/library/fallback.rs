//! What is answered when the store cannot: each limit by its own policy, all or none, and every answer labelled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollgate::store::Failure;
use tollgate::store::Outcome as Numbers;
use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{
    Allowance, Charge, ChargeId, Decision, Fallback, Key, Limit, ManualClock, Rule, Settled, Settlement,
    Tollgate,
};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{Dice, a_minute, at_once, bucket, every_strategy, hands, on, one, secs, waited};

const HOUR: Duration = Duration::from_secs(3_600);
const DOWN: Fault = Fault::Fails(Failure::Connection);

/// Limits of 5 a minute by every policy, one that says nothing, and one that watches.
fn gate(hands: &ManualClock, otherwise: Fallback) -> (Tollgate, Arc<FaultyStore>) {
    let faulty = FaultyStore::new(hands);
    let rule = |name: &str| Rule::new(name, a_minute(5)).unwrap();
    let gate = Fallback::ALL
        .iter()
        .fold(on(hands), |builder, fallback| builder.rule(rule(fallback.name()).fallback(*fallback)))
        .rule(rule("silent"))
        .rule(rule("watching").shadow().fallback(Fallback::Closed))
        .rule(Rule::new("workers", at_once(2)).unwrap().fallback(Fallback::Local))
        .rule(Rule::unlimited("free").unwrap())
        .fallback(otherwise)
        .store(faulty.clone())
        .build()
        .unwrap();
    (gate, faulty)
}

/// What each limit of a charge on the key `a` said and where it came from, and whether it was admitted.
fn charged(gate: &Tollgate, limits: &[&str]) -> (bool, Vec<(bool, Source)>) {
    let asks: Vec<Charge<'_>> = limits.iter().map(|limit| Charge::new(limit, "a")).collect();
    said(ready(gate.charge(&asks)).unwrap())
}

/// The same of a reservation, as of leases.
fn reserved(gate: &Tollgate, limits: &[&str]) -> (bool, Vec<(bool, Source)>) {
    let asks: Vec<Charge<'_>> = limits.iter().map(|limit| Charge::new(limit, "a")).collect();
    said(match ready(gate.reserve(&asks, HOUR)).unwrap() {
        Ok(reservation) => reservation.decision().clone(),
        Err(denied) => denied.into_decision(),
    })
}

fn said(decision: Decision) -> (bool, Vec<(bool, Source)>) {
    assert_eq!(decision.is_degraded(), decision.outcomes().iter().any(|limit| limit.source().is_fallback()));
    let said = decision.outcomes().iter().map(|limit| (limit.numbers().allowed, limit.source())).collect();
    (decision.is_allowed(), said)
}

#[test]
fn each_limit_answers_by_its_own_policy_and_else_by_the_registrys() {
    for otherwise in Fallback::ALL {
        let hands = hands();
        let (gate, faulty) = gate(&hands, otherwise);
        assert_eq!(charged(&gate, &["open"]), (true, vec![(true, Source::Store)]));
        faulty.fault(DOWN);
        for _ in 0..9 {
            assert_eq!(charged(&gate, &["open"]), (true, vec![(true, Source::FallbackOpen)]));
            assert_eq!(charged(&gate, &["closed"]), (false, vec![(false, Source::FallbackClosed)]));
        }
        for admitted in [true, true, true, true, true, false, false] {
            assert_eq!(charged(&gate, &["local"]), (admitted, vec![(admitted, Source::FallbackLocal)]));
        }
        let silent = charged(&gate, &["silent"]).1[0].1;
        let expected = [Source::FallbackOpen, Source::FallbackClosed, Source::FallbackLocal];
        assert!(Fallback::ALL.iter().zip(expected).any(|pair| pair == (&otherwise, silent)), "{otherwise}");
        assert_eq!(gate.keys(), 0);

        faulty.fault(Fault::None);
        hands.advance(secs(10));
        assert_eq!(ready(gate.status("open", "a")).unwrap().used(), 1, "nothing was charged meanwhile");
        assert_eq!(ready(gate.status("local", "a")).unwrap().used(), 0, "nor is it afterwards");
    }
}

#[test]
fn answers_without_the_store_are_well_formed() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, Fallback::Open);
    faulty.fault(DOWN);
    for call in 0..20 {
        for limit in ["open", "closed", "local", "silent", "watching"] {
            for act in 0..2 {
                let asks = [Charge::new(limit, "a")];
                let decision = match act {
                    0 => ready(gate.charge(&asks)),
                    _ => ready(gate.peek(&asks)),
                };
                let decision = decision.unwrap();
                let Numbers { allowed, capacity, remaining, retry_after, .. } =
                    *decision.outcomes()[0].numbers();
                assert!(remaining <= capacity && capacity == 5, "{limit}");
                let wait = Duration::from(retry_after.expect("a wait that ends"));
                assert_eq!(allowed, wait == Duration::ZERO, "{limit}");
                assert!(wait <= secs(60), "{limit}: {wait:?}");
                assert_eq!(
                    decision.is_allowed(),
                    limit != "closed" && (limit != "local" || allowed),
                    "{call}"
                );
            }
        }
        // A charge that can never fit is denied by every policy, also where it is asked for in parts.
        for limit in ["open", "closed", "local"] {
            let [whole, parts] = [vec![6], vec![3, 3]].map(|costs: Vec<u64>| {
                let asks: Vec<Charge<'_>> =
                    costs.iter().map(|cost| Charge::new(limit, "default:b").cost(*cost)).collect();
                ready(gate.charge(&asks)).unwrap()
            });
            assert_eq!((whole.is_allowed(), whole.retry_after()), (false, None), "{limit}");
            assert_eq!((parts.is_allowed(), parts.retry_after()), (false, None), "{limit}");
        }
    }
    // The denial of a closed limit says when the store is tried next.
    let health = gate.store_health();
    let wait = ready(gate.charge(&[Charge::new("closed", "a")])).unwrap().retry_after().unwrap();
    assert!(health.outages == 1 && wait <= Duration::from_millis(300), "{wait:?}");
}

#[test]
fn a_charge_over_several_limits_is_all_or_nothing_still() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, Fallback::Open);
    faulty.fault(DOWN);
    let used = |gate: &Tollgate| {
        let asks = [Charge::new("local", "a")];
        5 - ready(gate.peek(&asks)).unwrap().outcomes()[0].remaining() - 1
    };
    let local = |allowed| (allowed, Source::FallbackLocal);
    let (open, closed) = ((true, Source::FallbackOpen), (false, Source::FallbackClosed));
    assert_eq!(
        charged(&gate, &["local", "open", "free"]),
        (true, vec![local(true), open, (true, Source::Unlimited)])
    );
    assert_eq!(used(&gate), 1);
    assert_eq!(charged(&gate, &["local", "closed", "open"]), (false, vec![local(true), closed, open]));
    assert_eq!(used(&gate), 1, "a charge that one limit denies charges no other");
    assert_eq!(charged(&gate, &["watching", "local"]), (true, vec![closed, local(true)]));
    assert_eq!(used(&gate), 2, "a watching limit denies nothing, even closed");
    assert_eq!(
        reserved(&gate, &["local", "local", "workers"]),
        (true, vec![local(true), local(true), local(true)])
    );
    assert_eq!(reserved(&gate, &["local", "workers"]), (true, vec![local(true), local(true)]));
    assert_eq!(reserved(&gate, &["local", "workers"]), (false, vec![local(false), local(false)]));
    assert!(!ready(gate.peek(&[Charge::new("silent", ""), Charge::new("open", "a")])).unwrap().is_allowed());
}

#[test]
fn every_way_to_fail_falls_back() {
    for failure in Failure::ALL {
        for fault in [Fault::Fails(failure), Fault::Loses(failure)] {
            let hands = hands();
            let (gate, faulty) = gate(&hands, Fallback::Closed);
            // Each of the calls gets there, because the store itself is well.
            faulty.answers_pings(true);
            faulty.fault(fault);
            assert_eq!(charged(&gate, &["open"]), (true, vec![(true, Source::FallbackOpen)]), "{failure}");
            assert_eq!(charged(&gate, &["silent"]).1, [(false, Source::FallbackClosed)], "{failure}");
            let peeked = ready(gate.peek(&[Charge::new("silent", "a")])).unwrap();
            assert!(!peeked.is_allowed() && peeked.is_degraded(), "{failure}");
            let health = gate.store_health();
            assert_eq!((health.failures(failure), health.fallen_back), (3, 3), "{failure}");
            assert_eq!((health.answers(Fallback::Open), health.answers(Fallback::Closed)), (1, 2));
            assert_eq!(health.ambiguous, if fault == Fault::Loses(failure) { 3 } else { 0 });
        }
    }
}

#[test]
fn what_was_reserved_without_the_store_is_settled_without_it() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, Fallback::Open);
    let reserve = |limits: &[(&str, u64)]| {
        let asks: Vec<Charge<'_>> =
            limits.iter().map(|(limit, cost)| Charge::new(limit, "a").cost(*cost)).collect();
        ready(gate.reserve(&asks, HOUR)).unwrap().ok().map(|reservation| reservation.id())
    };
    let left = || ready(gate.peek(&[Charge::new("local", "a")])).unwrap().outcomes()[0];
    let stored = reserve(&[("local", 2), ("open", 2)]).unwrap();
    faulty.fault(DOWN);
    let [open, local, mixed] = [&[("open", 2)][..], &[("local", 3)], &[("local", 2), ("open", 1)]]
        .map(|limits| reserve(limits).unwrap());
    assert_eq!(reserve(&[("closed", 1), ("open", 1)]), None);
    assert!(!left().is_allowed());

    let settle = |id, settlement: &Settlement| ready(gate.settle(id, settlement));
    let each = |actuals: &[(&str, u64)]| {
        Settlement::Named(actuals.iter().map(|(name, actual)| ((*name).to_owned(), *actual)).collect())
    };
    assert!(settle(stored, &Settlement::Cancel).unwrap_err().is_transient(), "the store has that one");
    assert_eq!(settle(open, &each(&[("open", 1)])).unwrap(), Settled::Done, "nothing to correct");
    assert_eq!(settle(open, &Settlement::Cancel).unwrap(), Settled::Already);
    assert_eq!(settle(local, &Settlement::Renew).unwrap(), Settled::Done);
    assert_eq!(settle(local, &Settlement::Actual(1)).unwrap(), Settled::Done);
    assert_eq!(left().remaining(), 1, "two of five are free, less the one that was asked for");
    assert!(settle(mixed, &each(&[("lcal", 1)])).unwrap_err().to_string().contains("`lcal`"));
    assert_eq!(settle(mixed, &each(&[("local", 1), ("open", 1)])).unwrap(), Settled::Done);
    assert_eq!(left().remaining(), 2);

    // The store has learnt nothing of all this, and what it held it still holds.
    faulty.fault(Fault::None);
    hands.advance(secs(10));
    assert_eq!(settle(mixed, &Settlement::Cancel).unwrap(), Settled::Already, "still of this process");
    assert_eq!(ready(gate.status("local", "a")).unwrap().used(), 2);
    assert_eq!(settle(stored, &Settlement::Cancel).unwrap(), Settled::Done);
    assert_eq!(ready(gate.status("local", "a")).unwrap().used(), 0);
}

/// Which charges are counted here is known for each reservation, by position and by name.
#[test]
fn what_was_reserved_without_the_store_is_settled_charge_by_charge() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, Fallback::Open);
    faulty.fault(DOWN);
    let charges = [
        Charge::new("open", "a").cost(2),
        Charge::new("local", "a").cost(2),
        Charge::new("local", "b").cost(2),
    ];
    let used = || {
        ["a", "b"].map(|key| {
            let peeked = ready(gate.peek(&[Charge::new("local", key)])).unwrap().outcomes()[0];
            5 - peeked.remaining() - u64::from(peeked.is_allowed())
        })
    };
    let reserve = || ready(gate.reserve(&charges, HOUR)).unwrap().unwrap();
    let one = reserve();
    assert_eq!(used(), [2, 2]);
    assert!(ready(one.settle_each(&[1, 1])).is_err());
    assert_eq!(ready(one.renew()).unwrap(), Settled::Done);
    assert_eq!(ready(one.settle_each(&[9, 1, 3])).unwrap(), Settled::Done);
    assert_eq!(used(), [1, 3]);
    assert_eq!(ready(one.settle_each(&[9, 0, 0])).unwrap(), Settled::Already);
    let two = reserve();
    let by_id = |amounts: &[u64]| ready(gate.settle(two.id(), &Settlement::Each(amounts.to_vec())));
    assert!(by_id(&[1, 1]).is_err(), "three charges are counted, here or in the store");
    assert_eq!(by_id(&[7, 0, 1]).unwrap(), Settled::Done);
    assert_eq!(used(), [1, 4]);
}

/// A reset that answered with an error had forgotten the local counter all the same.
#[test]
fn a_reset_that_fails_forgets_nothing() {
    for lost in [DOWN, Fault::Loses(Failure::Timeout)] {
        let hands = hands();
        let (gate, faulty) = gate(&hands, Fallback::Open);
        faulty.fault(DOWN);
        for _ in 0..6 {
            charged(&gate, &["local"]);
        }
        assert!(!charged(&gate, &["local"]).0);
        faulty.fault(lost);
        assert!(ready(gate.reset("local", "a")).unwrap_err().is_transient());
        faulty.fault(DOWN);
        assert!(!charged(&gate, &["local"]).0, "{lost:?}");

        faulty.fault(Fault::None);
        hands.advance(secs(10));
        assert!(ready(gate.reset("local", "a")).unwrap(), "{lost:?}: it was counted here");
        faulty.fault(DOWN);
        assert!(charged(&gate, &["local"]).0, "{lost:?}");
    }
}

#[test]
fn waiting_goes_by_the_fallback_until_the_store_is_back() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, Fallback::Open);
    faulty.fault(DOWN);
    assert!(ready(waited(&gate, Charge::new("open", "a"))).unwrap().is_allowed());
    assert!(ready(waited(&gate, Charge::new("local", "a").cost(5))).unwrap().is_allowed());
    assert_eq!(
        ready(waited(&gate, Charge::new("closed", "a").cost(6))).unwrap().retry_after(),
        None,
        "never"
    );
    let mut crowd = Crowd::new();
    crowd.join(waited(&gate, Charge::new("closed", "a")));
    crowd.join(gate.wait(one(Charge::new("closed", "b")), Duration::from_secs(2)));
    for _ in 0..100 {
        hands.advance(Duration::from_millis(40));
        for (who, answer) in crowd.run() {
            assert!(
                who == 1
                    && answer.as_ref().is_ok_and(|late| !late.is_allowed() && late.retry_after().is_some()),
                "{answer:?}"
            );
        }
    }
    assert!(faulty.calls() < 15, "a store that is down is not asked over and over: {}", faulty.calls());
    faulty.fault(Fault::None);
    let admitted = (0..400).find(|_| {
        hands.advance(Duration::from_millis(40));
        crowd.run().iter().any(|(who, answer)| *who == 0 && answer.is_ok())
    });
    assert!(admitted.is_some(), "a waiter is admitted once the store is back");
}

/// A reservation of which some charges were counted here has run out, and its caller uses the id again.
#[test]
fn what_has_run_out_here_says_nothing_of_a_later_reservation_of_its_id() {
    let (hands, id) = (hands(), ChargeId::from(7_u128));
    for is_down in [false, true] {
        let (gate, faulty) = gate(&hands, Fallback::Open);
        faulty.fault(DOWN);
        let partly = [Charge::new("open", "a"), Charge::new("local", "a").cost(2)];
        assert!(ready(gate.reserve(&partly, secs(10)).id(id)).unwrap().is_ok());
        hands.advance(secs(10));
        if !is_down {
            faulty.fault(Fault::None);
            hands.advance(secs(60));
            let _ = crate::scene::charged(&gate, &[Charge::new("silent", "other")]);
        }
        let all = ["b", "c", "d"].map(|key| Charge::new("local", key).cost(4));
        let reserved = ready(gate.reserve(&all, secs(10)).id(id)).unwrap().expect("room");
        let source = if is_down { Source::FallbackLocal } else { Source::Store };
        assert_eq!(reserved.decision().outcomes()[0].source(), source);
        let settled = ready(gate.settle(id, &Settlement::Each(vec![1, 2, 3])));
        assert_eq!(settled.unwrap(), Settled::Done, "{source:?}");
        for (key, left) in [("b", 3), ("c", 2), ("d", 1)] {
            let peeked = ready(gate.peek(&[Charge::new("local", key)])).unwrap();
            assert_eq!(peeked.outcomes()[0].remaining(), left, "{source:?}, {key}");
        }
    }
}

/// A reservation is kept for as long as its leases, and what is known of it is, too.
#[test]
fn a_lease_that_outlasts_its_reservation_is_settled_charge_by_charge() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, Fallback::Open);
    faulty.fault(DOWN);
    let asks = [Charge::new("open", "a"), Charge::new("workers", "a"), Charge::new("local", "a").cost(4)];
    let held = ready(gate.reserve(&asks, secs(1))).unwrap().expect("room");
    hands.advance(secs(2));
    assert_eq!(ready(held.settle_each(&[9, 1, 1])).unwrap(), Settled::Done);
    assert_eq!(ready(gate.peek(&[Charge::new("local", "a")])).unwrap().outcomes()[0].remaining(), 3);
}

#[test]
fn instances_share_a_limit_while_each_counts_by_itself() {
    for limit in every_strategy(10) {
        for (instances, most) in [(1, 10), (2, 5), (3, 3), (11, 1)] {
            let hands = hands();
            let faulty = FaultyStore::new(&hands);
            faulty.fault(DOWN);
            let builder = on(&hands).limit("api", limit).store(faulty).fallback(Fallback::Local);
            let gate = builder.instances(instances).build().unwrap();
            let admitted = (0..20)
                .filter(|_| crate::scene::charged(&gate, &[Charge::new("api", "a")]).is_allowed())
                .count();
            assert_eq!(admitted, most, "{limit} among {instances}");
            // What only the store can hold is worth coming back for; what not even it can is not.
            let much = crate::scene::charged(&gate, &[Charge::new("api", "b").cost(10)]);
            assert_eq!(much.is_allowed(), instances == 1);
            assert!(much.retry_after().is_some(), "{limit} among {instances}");
            let too_much = crate::scene::charged(&gate, &[Charge::new("api", "b").cost(11)]);
            assert_eq!(too_much.retry_after(), None);
        }
    }
    let error = on(&hands()).limit("api", bucket("1/s", 1)).instances(0).build().unwrap_err();
    assert!(error.to_string().contains("0 instances"), "{error}");
    let slow = Limit::token_bucket("1/3000d", 2).unwrap();
    let builder = on(&hands()).limit("slow", slow).store(FaultyStore::new(&hands())).instances(2);
    assert!(builder.fallback(Fallback::Local).build().is_err(), "nothing slower can be kept exact");
}

/// Counts events by source, and what failed.
#[derive(Default)]
struct Labels(Mutex<HashMap<(Source, bool), u64>>, Mutex<Vec<(Option<Failure>, bool)>>);

impl Observer for Labels {
    fn decided(&self, event: &Event<'_>) {
        *self.0.lock().unwrap().entry((event.source, event.allowed)).or_default() += 1;
        assert_eq!(event.failure.is_some(), event.source.is_fallback(), "{event:?}");
        self.1.lock().unwrap().push((event.failure, event.is_ambiguous));
    }
}

#[test]
fn every_answer_has_one_label_and_labels_add_up() {
    let hands = hands();
    let faulty = FaultyStore::new(&hands);
    let labels = Arc::new(Labels::default());
    let key = |text| Key::parse(text).unwrap();
    let api = Rule::new("open", bucket("2/s", 3)).unwrap().with_override(key("free"), Allowance::Unlimited);
    let gate = on(&hands)
        .rule(api.unwrap().with_override(key("shut"), Allowance::Blocked).unwrap().fallback(Fallback::Open))
        .rule(Rule::new("closed", bucket("2/s", 3)).unwrap().fallback(Fallback::Closed))
        .rule(Rule::new("local", bucket("2/s", 3)).unwrap().fallback(Fallback::Local))
        .store(faulty.clone())
        .observer(labels.clone())
        .build()
        .unwrap();
    let mut dice = Dice(5);
    let (mut asked, mut admitted, mut by_source) = (0, 0, HashMap::new());
    // Long enough for every source, however long a store that failed is left alone: those times are drawn by lot.
    for _ in 0..40_000 {
        hands.advance(Duration::from_millis(dice.below(20)));
        if dice.below(20) == 0 {
            let fault = [Fault::None, DOWN, Fault::Loses(Failure::Timeout)];
            faulty.fault(dice.pick(&fault));
        }
        let count = 1 + dice.below(4) / 3;
        let asks: Vec<Charge<'_>> = (0..count)
            .map(|_| {
                let limit = dice.pick(&["open", "closed", "local"]);
                Charge::new(limit, dice.pick(&["a", "b", "free", "shut", ""]))
            })
            .collect();
        let decision = ready(gate.charge(&asks)).unwrap();
        for limit in decision.outcomes() {
            asked += 1;
            admitted += u64::from(limit.is_allowed());
            *by_source.entry((limit.source(), limit.is_allowed())).or_insert(0) += 1;
        }
    }
    let reported = labels.0.lock().unwrap();
    assert_eq!(*reported, by_source);
    assert_eq!(reported.values().sum::<u64>(), asked);
    assert_eq!(
        reported.iter().filter(|((_, allowed), _)| *allowed).map(|(_, count)| count).sum::<u64>(),
        admitted
    );
    for source in Source::ALL.into_iter().filter(|source| *source != Source::NeedsPermit) {
        assert!(reported.keys().any(|(seen, _)| *seen == source), "{source:?} was never seen");
    }
    let health = gate.store_health();
    let of = |source| {
        reported.iter().filter(|((seen, _), _)| *seen == source).map(|(_, count)| count).sum::<u64>()
    };
    assert_eq!(health.answers(Fallback::Open), of(Source::FallbackOpen));
    assert_eq!(health.answers(Fallback::Closed), of(Source::FallbackClosed));
    assert_eq!(health.answers(Fallback::Local), of(Source::FallbackLocal));
    assert_eq!(health.denial_cache_hits, of(Source::DenialCache));
    assert_eq!(health.calls, faulty.calls() as u64);
    let failures = labels.1.lock().unwrap();
    assert!(failures.contains(&(Some(Failure::Timeout), true)), "ambiguous calls are labelled");
    assert!(failures.contains(&(Some(Failure::Connection), false)));
}
