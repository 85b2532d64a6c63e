//! Denials that are answered here: the answer that the store would give, or none.

use std::sync::Arc;
use std::time::Duration;

use tollgate::store::Failure;
use tollgate::telemetry::Source;
use tollgate::{Charge, Limit, ManualClock, Rule, Settled, Settlement, Tollgate};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::scene::{Dice, a_minute, at_once, bucket, charged, every_strategy, hands, on, one, reload, secs};

const HOUR: Duration = Duration::from_secs(3_600);

fn gate(hands: &ManualClock, limit: Limit, cap: Duration) -> (Tollgate, Arc<FaultyStore>) {
    let faulty = FaultyStore::new(hands);
    let builder = on(hands).limit("api", limit).limit("other", a_minute(5)).store(faulty.clone());
    let builder = builder.rule(Rule::new("watching", limit).unwrap().shadow());
    (builder.denial_cache(cap).build().unwrap(), faulty)
}

fn charge(gate: &Tollgate, key: &str, cost: u64) -> (tollgate::Outcome, Source) {
    let decision = charged(gate, &[Charge::new("api", key).cost(cost)]);
    (decision.outcomes()[0], decision.outcomes()[0].source())
}

/// For random traffic of one process: what is answered here is what the store would have said at that very instant.
#[test]
fn a_cached_answer_is_the_stores_answer_under_every_strategy() {
    for (number, limit) in every_strategy(5).into_iter().enumerate() {
        for cap in [Duration::from_millis(100), HOUR] {
            let hands = hands();
            let (gate, faulty) = gate(&hands, limit, cap);
            let mut dice = Dice(31 + number as u64);
            let mut open = Vec::new();
            let mut cached = 0;
            for _ in 0..6_000 {
                hands.advance(Duration::from_micros(dice.below(200_000)));
                let (key, cost) = (dice.pick(&["a", "b"]), 1 + dice.below(6).min(dice.below(6)));
                let asks = [Charge::new("api", key).cost(cost)];
                match dice.below(41) {
                    40 => ready(gate.refund(&asks)).unwrap(),
                    0 => drop(ready(gate.reset("api", key)).unwrap()),
                    1 => open.extend(ready(gate.reserve(&asks, HOUR)).unwrap().ok()),
                    2 => {
                        let actual = Settlement::Actual(dice.below(7));
                        open.pop().map(|held| ready(gate.settle(held.id(), &actual)).unwrap());
                    }
                    3 => drop(charged(&gate, &[asks[0].clone(), Charge::new("other", key)])),
                    4 => drop(ready(gate.charge_each(&[Charge::new("api", key)]))),
                    _ => {
                        // The same answer as a look at the store gives, and an admission only from the store itself.
                        let truth = ready(gate.peek(&asks)).unwrap().outcomes()[0];
                        let (outcome, source) = charge(&gate, key, cost);
                        assert_eq!(outcome.numbers(), truth.numbers(), "{limit}, {cost} by {source:?}");
                        cached += usize::from(source == Source::DenialCache);
                        assert!(source == Source::Store || !outcome.is_allowed());
                    }
                }
            }
            let is_leased = matches!(limit, Limit::Concurrency(_));
            assert_eq!(cached > 50, !is_leased, "{limit}: {cached} answers from here");
            assert_eq!(gate.store_health().denial_cache_hits > 0, !is_leased);
            drop(faulty);
        }
    }
}

/// The store decides later than the call was sent, and its answer takes time too: nothing is denied here that it would admit.
#[test]
fn nothing_is_denied_that_the_store_would_admit_however_slow_it_is() {
    for limit in every_strategy(3) {
        let hands = hands();
        let (gate, faulty) = gate(&hands, limit, HOUR);
        let mut dice = Dice(77);
        let mut cached = 0;
        for _ in 0..3_000 {
            faulty.latency(Duration::from_micros(dice.below(30_000)));
            hands.advance(Duration::from_micros(dice.below(150_000)));
            let (outcome, source) = charge(&gate, "a", 1);
            if source == Source::DenialCache {
                cached += 1;
                faulty.latency(Duration::ZERO);
                let truth = ready(gate.peek(&[Charge::new("api", "a")])).unwrap().outcomes()[0];
                assert!(!truth.is_allowed(), "{limit}");
                assert_eq!((truth.remaining(), truth.capacity()), (outcome.remaining(), outcome.capacity()));
                let late = truth.retry_after().unwrap().saturating_sub(outcome.retry_after().unwrap());
                assert!(
                    outcome.retry_after() <= truth.retry_after() && late <= Duration::from_micros(30_000),
                    "{limit}: {late:?}"
                );
            }
        }
        assert_eq!(cached > 100, !matches!(limit, Limit::Concurrency(_)), "{limit}: {cached}");
    }
}

#[test]
fn a_hot_denied_key_asks_the_store_at_most_once_in_ten() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, bucket("1/s", 1), Duration::from_millis(100));
    let mut admitted = 0;
    for _ in 0..10_000 {
        hands.advance(Duration::from_millis(1));
        admitted += u64::from(charge(&gate, "hot", 1).0.is_allowed());
    }
    assert_eq!(admitted, 10, "a second each, and none is lost");
    assert!(faulty.calls() <= 120, "{} calls for 10,000 checks", faulty.calls());

    let before = faulty.calls();
    for _ in 0..10_000 {
        let _ = charge(&gate, "hot", 1);
    }
    assert!(faulty.calls() - before <= 1);
}

#[test]
fn what_happens_in_this_process_ends_a_denial_at_once() {
    let hands = hands();
    let (gate, _) = gate(&hands, a_minute(3), HOUR);
    let held = ready(gate.reserve(&[Charge::new("api", "a").cost(3)], HOUR)).unwrap().unwrap();
    assert_eq!(charge(&gate, "a", 1).1, Source::Store);
    assert_eq!(charge(&gate, "a", 1).1, Source::DenialCache);
    assert_eq!(charge(&gate, "a", 3).1, Source::DenialCache, "a window ends for all costs alike");
    assert_eq!(charge(&gate, "a", 4).1, Source::Store, "what can never fit is another answer");
    assert_eq!(charge(&gate, "b", 4).1, Source::Store);

    ready(gate.settle(held.id(), &Settlement::Renew)).unwrap();
    assert_eq!(charge(&gate, "a", 1).1, Source::DenialCache, "nothing was given back");
    ready(gate.settle(held.id(), &Settlement::Actual(2))).unwrap();
    let (outcome, source) = charge(&gate, "a", 2);
    assert_eq!((outcome.is_allowed(), outcome.remaining(), source), (false, 1, Source::Store));
    let (outcome, source) = charge(&gate, "a", 2);
    assert_eq!((outcome.is_allowed(), outcome.remaining(), source), (false, 1, Source::DenialCache));
    assert!(charge(&gate, "a", 1).0.is_allowed(), "a lower cost is asked for");
    let (outcome, source) = charge(&gate, "a", 2);
    assert_eq!(
        (outcome.remaining(), source),
        (0, Source::Store),
        "and the admission has changed what is left"
    );

    assert_eq!(charge(&gate, "a", 2).1, Source::DenialCache);
    assert!(ready(gate.reset("api", "a")).unwrap());
    assert!(charge(&gate, "a", 2).0.is_allowed());
}

/// Any settlement, even of an id that somebody made up, emptied the whole cache.
#[test]
fn a_settlement_ends_only_what_is_believed_about_its_own_keys() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, a_minute(3), HOUR);
    let reserve = |key| {
        let reserved = ready(gate.reserve(&[Charge::new("api", key).cost(3)], HOUR)).unwrap();
        reserved.unwrap().id()
    };
    let [own, other] = [reserve("a"), reserve("b")];
    let source = |key| charge(&gate, key, 1).1;
    assert_eq!([source("a"), source("b")], [Source::Store; 2]);
    assert_eq!([source("a"), source("b")], [Source::DenialCache; 2]);
    for number in 1..50 {
        let made_up = tollgate::ChargeId::new(number).unwrap();
        for settlement in [Settlement::Cancel, Settlement::Actual(0), Settlement::Renew] {
            assert_eq!(ready(gate.settle(made_up, &settlement)).unwrap(), tollgate::Settled::Unknown);
        }
    }
    assert_eq!([source("a"), source("b")], [Source::DenialCache; 2], "nobody's ids end nothing");
    faulty.fault(Fault::Loses(Failure::Timeout));
    assert!(ready(gate.settle(tollgate::ChargeId::new(7).unwrap(), &Settlement::Cancel)).is_err());
    faulty.fault(Fault::None);
    assert_eq!([source("a"), source("b")], [Source::DenialCache; 2], "nor do they when the store fails");

    ready(gate.settle(other, &Settlement::Actual(2))).unwrap();
    assert_eq!([source("a"), source("b")], [Source::DenialCache, Source::Store]);
    assert_eq!(ready(gate.settle(other, &Settlement::Cancel)).unwrap(), tollgate::Settled::Already);
    assert_eq!(source("a"), Source::DenialCache);
    // A settlement whose reply is lost may have given something back.
    faulty.fault(Fault::Loses(Failure::Timeout));
    assert!(ready(gate.settle(own, &Settlement::Cancel)).is_err());
    faulty.fault(Fault::None);
    assert_eq!(source("a"), Source::Store);
}

/// Which keys a reservation of another process charged is not known here, but that something was given back is.
#[test]
fn what_another_process_reserved_and_this_one_settles_is_seen_at_once() {
    let hands = hands();
    let (ours, faulty) = gate(&hands, a_minute(3), HOUR);
    let theirs = on(&hands).limit("api", a_minute(3)).store(faulty).build().unwrap();
    let reserved = ready(theirs.reserve(&[Charge::new("api", "a").cost(3)], HOUR)).unwrap();
    let id = reserved.unwrap().id();
    assert_eq!([charge(&ours, "a", 1).1, charge(&ours, "a", 1).1], [Source::Store, Source::DenialCache]);
    assert_eq!(ready(ours.settle(id, &Settlement::Cancel)).unwrap(), tollgate::Settled::Done);
    assert!(charge(&ours, "a", 1).0.is_allowed());
}

/// A reservation that was made before a reload is known by numbers that no limit has any more.
#[test]
fn a_settlement_after_a_reload_is_seen_at_once() {
    let hands = hands();
    let (old, _in_a_remote_store) = gate(&hands, a_minute(3), HOUR);
    let reserved = ready(old.reserve(&[Charge::new("api", "a").cost(3)], HOUR)).unwrap();
    let id = reserved.unwrap().id();
    reload(&old, [Rule::new("api", a_minute(2)).unwrap()]);
    let new = old;
    assert_eq!([charge(&new, "a", 1).1, charge(&new, "a", 1).1], [Source::Store, Source::DenialCache]);
    assert_eq!(ready(new.settle(id, &Settlement::Cancel)).unwrap(), tollgate::Settled::Done);
    assert!(charge(&new, "a", 1).0.is_allowed());
}

#[test]
fn what_another_process_gives_back_is_seen_after_the_cap() {
    let hands = hands();
    let (ours, faulty) = gate(&hands, a_minute(1), Duration::from_millis(100));
    let theirs = on(&hands).limit("api", a_minute(1)).store(faulty).build().unwrap();
    for source in [Source::Store, Source::Store, Source::DenialCache] {
        assert_eq!(charge(&ours, "a", 1).1, source);
    }
    assert!(ready(theirs.reset("api", "a")).unwrap());
    hands.advance(Duration::from_micros(99_999));
    assert_eq!(charge(&ours, "a", 1).1, Source::DenialCache);
    hands.advance(Duration::from_micros(1));
    let (outcome, source) = charge(&ours, "a", 1);
    assert_eq!((outcome.is_allowed(), source), (true, Source::Store));
}

#[test]
fn only_plain_denials_of_one_limit_are_believed() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, bucket("1/s", 2), HOUR);
    let asks = |cost| [Charge::new("api", "a").cost(cost)];
    assert!(charge(&gate, "a", 2).0.is_allowed());
    let calls = |work: &dyn Fn()| {
        let before = faulty.calls();
        work();
        faulty.calls() - before
    };
    assert_eq!(calls(&|| _ = charge(&gate, "a", 1)), 1);
    assert_eq!(calls(&|| _ = charge(&gate, "a", 1)), 0);
    assert_eq!(
        calls(&|| drop(ready(gate.reserve(&asks(1), HOUR)))),
        0,
        "a denied reservation changes nothing"
    );
    assert_eq!(
        calls(&|| drop(ready(gate.charge_each(&["a", "default:a"].map(|key| Charge::new("api", key)))))),
        0
    );
    assert_eq!(calls(&|| drop(ready(gate.peek(&asks(1))))), 1, "a peek looks");
    assert_eq!(calls(&|| _ = charge(&gate, "a", 2)), 1, "when two units are there is not known");
    assert_eq!(calls(&|| _ = charge(&gate, "a", 3)), 1);
    let several = [Charge::new("api", "a"), Charge::new("other", "a")];
    for _ in 0..2 {
        assert_eq!(calls(&|| drop(ready(gate.charge(&several)))), 1, "only the store knows both");
        let twice = [Charge::new("api", "a"), Charge::new("api", "a")];
        assert_eq!(calls(&|| drop(ready(gate.charge(&twice)))), 1);
        assert_eq!(calls(&|| drop(ready(gate.charge(&[Charge::new("watching", "a").cost(2)])))), 1);
    }
    // A limit without counters is answered here anyway.
    let free = on(&hands).rule(Rule::unlimited("free").unwrap()).limit("api", a_minute(1));
    let free = free.store(faulty.clone()).build().unwrap();
    let both = [Charge::new("free", "x"), Charge::new("api", "x")];
    let sources: Vec<Source> =
        (0..3).map(|_| ready(free.charge(&both)).unwrap().outcomes()[1].source()).collect();
    assert_eq!(sources, [Source::Store, Source::Store, Source::DenialCache]);

    let none = FaultyStore::new(&hands);
    let off = on(&hands).limit("api", a_minute(1)).denial_cache(Duration::ZERO).store(none.clone());
    let off = off.build().unwrap();
    (0..10).for_each(|_| assert_eq!(charge(&off, "a", 1).1, Source::Store));
    assert_eq!(none.calls(), 10);
    let leases = on(&hands).limit("api", at_once(1)).store(none).build().unwrap();
    (0..10).for_each(|_| assert_eq!(charge(&leases, "a", 1).1, Source::Store));
}

#[test]
fn a_waiter_is_admitted_to_the_microsecond_all_the_same() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, bucket("1/s", 1), HOUR);
    let _ = charge(&gate, "a", 1);
    let _ = charge(&gate, "a", 1);
    let mut crowd = Crowd::new();
    crowd.join(gate.wait(one(Charge::new("api", "a")), HOUR));
    hands.advance(secs(1).saturating_sub(Duration::from_micros(1)));
    assert!(crowd.run().is_empty());
    hands.advance(Duration::from_micros(1));
    assert_eq!(crowd.run_to_see_who_is_done(), [0]);
    assert_eq!(faulty.calls(), 4, "the waiter asked once in between, for what others give back");
}

#[test]
fn a_denial_outlives_the_stores_failure_and_a_lost_answer_ends_it() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, bucket("1/h", 2), HOUR);
    faulty.answers_pings(true);
    let _ = charge(&gate, "a", 2);
    let _ = charge(&gate, "a", 1);
    faulty.fault(Fault::Fails(Failure::Timeout));
    assert_eq!(charge(&gate, "a", 1).1, Source::DenialCache);
    assert_eq!(charge(&gate, "a", 2).1, Source::FallbackLocal);
    assert_eq!(charge(&gate, "a", 1).1, Source::DenialCache);
    faulty.fault(Fault::Loses(Failure::Timeout));
    assert_eq!(charge(&gate, "a", 2).1, Source::FallbackLocal);
    assert_eq!(
        charge(&gate, "a", 1).1,
        Source::FallbackLocal,
        "what the store remembers is not known any more"
    );
}

/// Counters of this process begin empty, so a store that fails would let a spent key pass again: who makes the calls of a key fail,
/// by load or by an outage, would switch its limit off.
#[test]
fn a_key_that_the_store_denied_is_denied_while_it_fails_until_the_store_would_admit_it() {
    let timeout = Failure::Timeout;
    for fault in [Fault::Fails(timeout), Fault::Loses(timeout), Fault::Fails(Failure::Connection)] {
        let hands = hands();
        let (gate, faulty) = gate(&hands, bucket("1/h", 2), Duration::from_millis(100));
        let passes = |key: &str, cost: u64| {
            let (outcome, source) = charge(&gate, key, cost);
            assert_eq!(source, Source::FallbackLocal, "{fault:?}");
            outcome.is_allowed()
        };
        let _ = charge(&gate, "a", 2);
        assert_eq!(charge(&gate, "a", 1).1, Source::Store);
        faulty.fault(fault);
        hands.advance(Duration::from_millis(100));
        for minute in 0..59 {
            for cost in [1, 2] {
                assert!(!passes("a", cost), "{fault:?}, minute {minute}, cost {cost}");
            }
            hands.advance(secs(60));
        }
        assert!(passes("b", 1), "another key is counted here");
        let failed = ready(gate.reset("api", "a"));
        assert!(failed.is_err(), "{failed:?}");
        assert!(!passes("a", 1), "a reset that fails forgets nothing");
        hands.advance(secs(60));
        assert!(passes("a", 1), "the store would admit it, too");
    }
}

/// The same of a limit that was charged with others, and of a cost that was more than was left.
#[test]
fn a_limit_that_denied_beside_others_denies_while_the_store_fails() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, bucket("1/h", 4), Duration::from_millis(100));
    let both = |cost| [Charge::new("other", "a"), Charge::new("api", "a").cost(cost)];
    assert!(charged(&gate, &both(2)).is_allowed());
    assert!(!charged(&gate, &both(3)).is_allowed());
    let twice = [Charge::new("api", "b").cost(3), Charge::new("api", "b").cost(3)];
    assert!(!charged(&gate, &twice).is_allowed());
    faulty.fault(Fault::Fails(Failure::Timeout));
    let alone = [3, 4].map(|cost| charge(&gate, "a", cost).0.is_allowed());
    let beside = [3, 2].map(|cost| charged(&gate, &both(cost)).is_allowed());
    assert_eq!((alone, beside), ([false, false], [false, true]), "two were left");
    assert!(charge(&gate, "b", 3).0.is_allowed(), "it was denied twice as much");
}

/// What this process gives back is known, and ends the denial for the fallback, too.
#[test]
fn what_is_given_back_before_an_outage_can_be_had_in_it() {
    for give_back in ["settle", "reset", "refund", "nothing"] {
        let hands = hands();
        let (gate, faulty) = gate(&hands, bucket("1/h", 2), Duration::from_millis(100));
        let two = [Charge::new("api", "a").cost(2)];
        let held = ready(gate.reserve(&two, HOUR)).unwrap().unwrap();
        assert!(!charge(&gate, "a", 1).0.is_allowed());
        match give_back {
            "settle" => drop(ready(gate.settle(held.id(), &Settlement::Cancel)).unwrap()),
            "reset" => drop(ready(gate.reset("api", "a")).unwrap()),
            "refund" => ready(gate.refund(&two)).unwrap(),
            _ => {}
        }
        hands.advance(secs(1));
        faulty.fault(Fault::Fails(Failure::Connection));
        let (outcome, source) = charge(&gate, "a", 1);
        assert_eq!(
            (outcome.is_allowed(), source),
            (give_back != "nothing", Source::FallbackLocal),
            "{give_back}"
        );
    }
}

/// A settlement that gives nothing back leaves the last denial for the fallback.
#[test]
fn a_settlement_that_gives_nothing_back_ends_no_denial() {
    let named = |actual| Settlement::Named(vec![("api".to_owned(), actual)]);
    for (settlement, is_given_back) in [
        (Settlement::Actual(2), false),
        (Settlement::Actual(3), false),
        (Settlement::Actual(1), true),
        (Settlement::Each(vec![2]), false),
        (Settlement::Each(vec![0]), true),
        (named(2), false),
        (named(1), true),
        (Settlement::Release, false),
        (Settlement::Renew, false),
        (Settlement::Cancel, true),
    ] {
        let hands = hands();
        let (gate, faulty) = gate(&hands, bucket("1/h", 2), Duration::from_millis(100));
        let held = ready(gate.reserve(&[Charge::new("api", "a").cost(2)], HOUR)).unwrap().unwrap();
        assert!(!charge(&gate, "a", 1).0.is_allowed());
        assert_eq!(ready(gate.settle(held.id(), &settlement)).unwrap(), Settled::Done);
        faulty.fault(Fault::Fails(Failure::Connection));
        hands.advance(secs(1));
        let (outcome, source) = charge(&gate, "a", 1);
        assert_eq!((outcome.is_allowed(), source), (is_given_back, Source::FallbackLocal), "{settlement:?}");
    }
}

/// A release ends leases, of which nothing is believed, so that no caller makes this process forget denials with one.
#[test]
fn a_release_by_an_id_that_another_process_made_ends_no_denial() {
    let hands = hands();
    let faulty = FaultyStore::new(&hands);
    let on_it = || on(&hands).limit("api", a_minute(1)).limit("pool", at_once(5)).denial_cache(HOUR);
    let [gate, other] = [(); 2].map(|()| on_it().store(faulty.clone()).build().unwrap());
    let held = ready(other.reserve(&[Charge::new("pool", "a")], HOUR)).unwrap().unwrap();
    let _ = charge(&gate, "a", 1);
    assert_eq!([(); 2].map(|()| charge(&gate, "a", 1).1), [Source::Store, Source::DenialCache]);
    assert_eq!(ready(gate.settle(held.id(), &Settlement::Release)).unwrap(), Settled::Done);
    assert_eq!(charge(&gate, "a", 1).1, Source::DenialCache);
}

/// However threads interleave, no denial is left behind that is not true any more: the clock stands, so it would never end.
#[test]
fn threads_leave_no_stale_denial_behind() {
    for round in 0..300 {
        let hands = hands();
        let (gate, _) = gate(&hands, bucket("1/s", 4), HOUR);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let gate = &gate;
                scope.spawn(move || {
                    let mut dice = Dice(round * 3 + thread);
                    for _ in 0..20 {
                        let (key, cost) = (dice.pick(&["a", "b"]), 1 + dice.below(3));
                        let asks = [Charge::new("api", key).cost(cost)];
                        match dice.below(8) {
                            0 => drop(ready(gate.reset("api", key)).unwrap()),
                            1 | 2 => {
                                let reserved = ready(gate.reserve(&asks, HOUR)).unwrap().ok();
                                let cancel = Settlement::Cancel;
                                reserved.map(|held| ready(gate.settle(held.id(), &cancel)).unwrap());
                            }
                            _ => drop(ready(gate.charge(&asks)).unwrap()),
                        }
                    }
                });
            }
        });
        for (key, cost) in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)] {
            let truth = ready(gate.peek(&[Charge::new("api", key).cost(cost)])).unwrap().outcomes()[0];
            assert_eq!(charge(&gate, key, cost).0.numbers(), truth.numbers(), "round {round}, {key} {cost}");
        }
    }
}

#[test]
fn a_charge_whose_caller_gave_up_ends_what_is_believed_of_its_key() {
    let hands = hands();
    let (gate, faulty) = gate(&hands, a_minute(3), HOUR);
    let _ = charge(&gate, "a", 2);
    for source in [Source::Store, Source::DenialCache] {
        assert_eq!(charge(&gate, "a", 2).1, source);
    }
    faulty.fault(Fault::Hangs);
    let asks = [Charge::new("api", "a")];
    let mut crowd = Crowd::new();
    let quitter = crowd.join(gate.charge(&asks));
    crowd.leave(quitter);
    faulty.fault(Fault::None);
    let (outcome, source) = charge(&gate, "a", 2);
    assert_eq!((outcome.remaining(), source), (0, Source::Store), "it was charged all the same");
}

#[test]
fn a_denial_that_was_overtaken_on_its_way_back_is_not_believed() {
    type Happens = fn(&Tollgate);
    let ways: [(Happens, u64); 2] =
        [(|gate| _ = ready(gate.reset("api", "a")).unwrap(), 1), (|gate| _ = charge(gate, "a", 1), 0)];
    for (happens, remaining) in ways {
        let hands = hands();
        let (gate, faulty) = gate(&hands, a_minute(3), HOUR);
        let _ = charge(&gate, "a", 2);
        faulty.fault(Fault::Hangs);
        let asks = [Charge::new("api", "a").cost(2)];
        let mut crowd = Crowd::new();
        crowd.join(gate.charge(&asks));
        faulty.fault(Fault::None);
        happens(&gate);
        faulty.let_go();
        assert!(!crowd.run()[0].1.as_ref().unwrap().is_allowed());
        let (outcome, source) = charge(&gate, "a", 2);
        assert_eq!((outcome.remaining(), source), (remaining, Source::Store));
    }
}
