//! Slices: fewer round trips, and the two bounds that pay for them.

use std::sync::Arc;
use std::time::Duration;

use tollgate::{
    Allowance, Ask, Failure, Fallback, Key, Limit, ManualClock, Micros, Rule, Settlement, Source, Tollgate,
};

use crate::crowd::{Crowd, ready};
use crate::elsewhere::{Elsewhere, Fault};
use crate::scene::{Dice, a_minute, at_once, bucket, hands, on, secs};

const HOUR: Duration = Duration::from_secs(3_600);
const TTL: Duration = Duration::from_secs(1);

fn process(hands: &ManualClock, elsewhere: &Arc<Elsewhere>, limit: Limit, units: u64) -> Tollgate {
    let rule = Rule::new("api", limit).unwrap().slice(units, TTL).unwrap();
    let rule = rule.with_override(Key::parse("small").unwrap(), limit_of(&limit, 2)).unwrap();
    on(hands).rule(rule).limit("other", a_minute(5)).store(elsewhere.clone()).build().unwrap()
}

/// A limit of the same strategy that holds so much.
fn limit_of(limit: &Limit, capacity: u64) -> Allowance {
    let rate = "10/s";
    let limit = match limit {
        Limit::TokenBucket(_) => Limit::token_bucket(rate, capacity),
        Limit::FixedWindow(_) => Limit::fixed_window(capacity, secs(10)),
        Limit::SlidingWindow(_) => Limit::sliding_window(capacity, secs(10)),
        _ => Limit::sliding_window_counter(capacity, secs(10)),
    };
    limit.unwrap().into()
}

/// The strategies that can be sliced, each holding `capacity`.
fn sliceable(capacity: u64) -> Vec<Limit> {
    [bucket("10/s", 1), a_minute(1), Limit::sliding_window(1, secs(1)).unwrap()]
        .iter()
        .chain([&Limit::sliding_window_counter(1, secs(1)).unwrap()])
        .map(|limit| match limit_of(limit, capacity) {
            Allowance::Limited(limit) => limit,
            other => panic!("{other}"),
        })
        .collect()
}

fn charge(gate: &Tollgate, key: &str, cost: u64) -> (bool, Source) {
    let decision = ready(gate.charge(&[Ask::new("api", key).cost(cost)])).unwrap();
    (decision.allowed(), decision.limits()[0].source)
}

#[test]
fn a_slice_is_one_round_trip_for_as_many_charges() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = process(&hands, &elsewhere, bucket("10/s", 100), 10);
    for (call, remaining) in (0..40).zip((60..100).rev()) {
        let decision = ready(gate.charge(&[Ask::new("api", "a")])).unwrap();
        let limit = decision.limits()[0];
        assert_eq!(limit.source, if call % 10 == 0 { Source::Store } else { Source::Slice });
        assert_eq!(
            (limit.outcome.capacity, limit.outcome.remaining),
            (100, remaining),
            "as if asked each time"
        );
    }
    assert_eq!((elsewhere.calls(), gate.store_health().slice_hits), (4, 36));
    assert_eq!(charge(&gate, "b", 1), (true, Source::Store), "each key has its own");
    // Held charges, charges over several limits and those above a slice are not sliced.
    let several = [Ask::new("api", "a"), Ask::new("other", "a")];
    let before = elsewhere.calls();
    assert!(
        !ready(gate.charge(&several)).unwrap().limits().iter().any(|limit| limit.source == Source::Slice)
    );
    assert!(ready(gate.reserve(&[Ask::new("api", "a")], HOUR)).unwrap().decision.allowed());
    assert_eq!(charge(&gate, "a", 11), (true, Source::Store));
    assert_eq!(charge(&gate, "small", 1), (true, Source::Store), "an override that holds less than a slice");
    assert_eq!(charge(&gate, "small", 1), (true, Source::Store));
    assert_eq!(elsewhere.calls() - before, 5);
}

/// Whatever is admitted in an interval was taken from the store in it or at most a time to live before.
#[test]
fn an_interval_admits_what_the_limit_allows_for_it_and_a_time_to_live() {
    for limit in sliceable(20) {
        let hands = hands();
        let elsewhere = Elsewhere::new(&hands);
        let processes: Vec<Tollgate> = (0..3).map(|_| process(&hands, &elsewhere, limit, 5)).collect();
        let mut dice = Dice(9);
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        let mut sliced = 0;
        for _ in 0..6_000 {
            // A burst now and then, so that slices are used at once as well as late.
            hands.advance(match dice.below(100) {
                0 => secs(20),
                1..70 => Micros::new(1),
                _ => Micros::new(dice.below(400_000)),
            });
            let cost = 1 + dice.below(2);
            let (allowed, source) = charge(&processes[usize::try_from(dice.below(3)).unwrap()], "a", cost);
            sliced += u64::from(source == Source::Slice);
            if allowed {
                admitted.push((hands.now().get(), cost));
            }
        }
        assert!(sliced > 50, "{limit}: {sliced} admissions from slices");
        // How much any interval of t + ttl may admit by the limit itself.
        let ttl = Micros::from(TTL).get();
        let allows = |t_us: u64| match limit {
            Limit::TokenBucket(_) => 20 + t_us.div_ceil(100_000),
            // Windows that an interval touches; the counter's true worst case is twice its limit in any window.
            Limit::FixedWindow(_) => 20 * (t_us / 10_000_000 + 2),
            Limit::SlidingWindow(_) => 20 * (t_us / 10_000_000 + 1),
            _ => 20 * (t_us / 10_000_000 + 2),
        };
        for span in [1, 500_000, 2_000_000, 9_000_000, 30_000_000] {
            let (mut from, mut sum) = (0, 0);
            for to in 0..admitted.len() {
                sum += admitted[to].1;
                while admitted[to].0 - admitted[from].0 >= span {
                    sum -= admitted[from].1;
                    from += 1;
                }
                assert!(sum <= allows(span + ttl), "{limit}: {sum} within {span} us");
            }
        }
    }
}

/// The worst that can happen: a whole slice, used at its very end together with all that has come back meanwhile.
#[test]
fn a_slice_used_late_adds_what_came_back_in_its_time_to_live_and_no_more() {
    for (late_us, from_slice, admitted) in [(1_000_000 - 1, 19, 28), (1_000_000, 0, 20)] {
        let hands = hands();
        let elsewhere = Elsewhere::new(&hands);
        let gate = process(&hands, &elsewhere, bucket("10/s", 20), 20);
        assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
        hands.advance(Micros::new(late_us));
        let sources: Vec<Source> = (0..50)
            .map(|_| charge(&gate, "a", 1))
            .filter(|(allowed, _)| *allowed)
            .map(|(_, from)| from)
            .collect();
        assert_eq!(sources.len(), admitted, "after {late_us} us; by the limit alone 20, for t + ttl 30");
        let sliced = sources.iter().take_while(|source| **source == Source::Slice).count();
        assert_eq!(sliced, from_slice, "after {late_us} us");
    }
}

/// What a process takes and does not use is at most a slice, and comes back once the slice has ended.
#[test]
fn at_most_a_slice_lies_idle_and_comes_back() {
    for limit in sliceable(20) {
        let hands = hands();
        let elsewhere = Elsewhere::new(&hands);
        let [one, two] = [(); 2].map(|()| process(&hands, &elsewhere, limit, 5));
        assert_eq!(charge(&one, "a", 2), (true, Source::Store));
        let used = |gate: &Tollgate| ready(gate.status("api", "a")).unwrap().used();
        assert_eq!(used(&two), 5, "{limit}: as the others see it");
        let others = (0..30).filter(|_| charge(&two, "a", 1).0).count();
        assert_eq!(others, 15, "{limit}: all but the slice, to the last unit");
        assert!(charge(&one, "a", 3).0, "{limit}: and the slice is there for whoever took it");
        assert!(!charge(&one, "a", 1).0);

        // Another key, whose slice ends unused: its next charge gives back, and so does a call for all that have ended.
        assert!(charge(&one, "b", 1).0 && charge(&one, "c", 1).0);
        hands.advance(Micros::from(TTL).saturating_sub(Micros::new(1)));
        assert_eq!(ready(one.give_back_ended_slices()).unwrap(), 0, "{limit}: not yet");
        hands.advance(Micros::new(1));
        let status = |key| ready(one.status("api", key)).unwrap().used();
        let is_window = !matches!(limit, Limit::TokenBucket(_));
        if is_window {
            assert_eq!((status("b"), status("c")), (5, 5), "{limit}");
        }
        assert_eq!(ready(one.give_back_ended_slices()).unwrap(), 2, "{limit}");
        if is_window {
            assert_eq!((status("b"), status("c")), (1, 1), "{limit}: only what was used");
        }
        assert!(charge(&one, "b", 1).0);
        hands.advance(secs(1));
        assert!(charge(&one, "b", 1).0, "{limit}");
        if is_window {
            assert_eq!(status("b"), 7, "{limit}: two used, and a slice of which one is the third");
        }
        assert_eq!(ready(one.give_back_slices()).unwrap(), 1, "{limit}: before the process ends");
        if is_window {
            assert_eq!(status("b"), 3, "{limit}");
        }
    }
}

#[test]
fn where_there_is_less_than_a_slice_charges_go_one_by_one() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = process(&hands, &elsewhere, bucket("1/s", 12), 5);
    let admitted = (0..20).filter(|_| charge(&gate, "a", 1).0).count();
    assert_eq!(admitted, 12, "slices lose nothing to one process");
    assert!(
        elsewhere.calls() <= 7,
        "{} calls: two slices, one refused, two alone, one denied",
        elsewhere.calls()
    );
    // Each second one more, and no slice is asked for before there may be one.
    let before = elsewhere.calls();
    for _ in 0..4 {
        hands.advance(secs(1));
        assert!(charge(&gate, "a", 1).0);
    }
    assert!(elsewhere.calls() - before <= 8);
}

#[test]
fn while_a_slice_is_taken_others_are_charged_alone() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = process(&hands, &elsewhere, a_minute(20), 5);
    elsewhere.fault(Fault::Hangs);
    let asks = [Ask::new("api", "a")];
    let mut crowd = Crowd::new();
    crowd.join(gate.charge(&asks));
    elsewhere.fault(Fault::None);
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
    assert_eq!(ready(gate.status("api", "a")).unwrap().used(), 6, "a slice and one");
    elsewhere.let_go();
    assert_eq!(crowd.run_to_see_who_is_done(), [0]);
    assert_eq!(charge(&gate, "a", 1), (true, Source::Slice));
}

#[test]
fn a_caller_who_gives_up_leaves_the_key_as_it_was() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = process(&hands, &elsewhere, a_minute(20), 5);
    elsewhere.fault(Fault::Hangs);
    let asks = [Ask::new("api", "a")];
    let mut crowd = Crowd::new();
    let quitter = crowd.join(gate.charge(&asks));
    crowd.leave(quitter);
    elsewhere.fault(Fault::None);
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
    assert_eq!(charge(&gate, "a", 1), (true, Source::Slice), "the next one takes a slice");
}

#[test]
fn a_reset_ends_a_slice_and_an_outage_does_not() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let rule = Rule::new("api", a_minute(20)).unwrap().slice(5, TTL).unwrap();
    let rule = rule.fallback(Fallback::Closed);
    let gate = on(&hands).rule(rule).store(elsewhere.clone()).build().unwrap();
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
    elsewhere.fault(Fault::Fails(Failure::Connection));
    assert_eq!(charge(&gate, "a", 1), (true, Source::Slice), "it is paid for");
    assert_eq!(charge(&gate, "b", 1), (false, Source::FallbackClosed));
    hands.advance(TTL);
    assert_eq!(charge(&gate, "a", 1), (false, Source::FallbackClosed));
    elsewhere.fault(Fault::None);
    hands.advance(secs(5));
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
    assert!(ready(gate.reset("api", "a")).unwrap());
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store), "a new slice of a new life");
    assert_eq!(ready(gate.status("api", "a")).unwrap().used(), 5);
    let held = ready(gate.reserve(&[Ask::new("api", "a")], HOUR)).unwrap().reservation.unwrap();
    ready(gate.settle(held.id(), &Settlement::Cancel)).unwrap();
    assert_eq!(charge(&gate, "a", 1), (true, Source::Slice));
}

#[test]
fn the_memory_store_has_no_use_for_slices() {
    let rule = Rule::new("api", a_minute(20)).unwrap().slice(5, TTL).unwrap();
    let gate = on(&hands()).rule(rule).build().unwrap();
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
    assert_eq!(ready(gate.status("api", "a")).unwrap().used(), 1);
    assert_eq!(ready(gate.give_back_slices()).unwrap(), 0);
}

#[test]
fn what_cannot_be_sliced_is_refused_with_the_reason() {
    let rule = |limit| Rule::new("api", limit).unwrap();
    let leaky = Limit::leaky_bucket("1/s", 5).unwrap();
    for (sliced, reason) in [
        (rule(leaky).slice(1, TTL), "a leaky_bucket tells each charge its own delay"),
        (rule(at_once(5)).slice(1, TTL), "a lease belongs to one holder"),
        (rule(a_minute(5)).slice(0, TTL), "at least 1 and at most what the limit holds, which is 5"),
        (rule(a_minute(5)).slice(6, TTL), "at most what the limit holds, which is 5"),
        (rule(a_minute(5)).slice(5, Duration::ZERO), "lasts longer than zero and at most 1m"),
        (rule(a_minute(5)).slice(5, HOUR), "at most 1m"),
        (rule(a_minute(5)).shadow().slice(5, TTL), "a limit that only watches cannot be sliced"),
        (Rule::unlimited("api").unwrap().slice(5, TTL), "is unlimited and has nothing to slice"),
    ] {
        let error = sliced.unwrap_err().to_string();
        assert!(error.starts_with("limit `api`: ") && error.contains(reason), "{error}");
    }
}

#[test]
fn threads_share_slices_and_lose_no_unit() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = process(&hands, &elsewhere, a_minute(1_000), 7);
    let charges = || (0..1_000).filter(|_| charge(&gate, "a", 1).0).count();
    let admitted: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(charges)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 1_000, "neither more nor less than the limit");
    assert!(elsewhere.calls() < 600, "{} calls", elsewhere.calls());
}

/// A reset that answered with an error had thrown the slice away, and its units with it.
#[test]
fn a_reset_that_fails_keeps_the_slice() {
    let hands = hands();
    let elsewhere = Elsewhere::new(&hands);
    let gate = process(&hands, &elsewhere, bucket("10/s", 100), 10);
    charge(&gate, "a", 1);
    assert_eq!(charge(&gate, "a", 1), (true, Source::Slice));
    elsewhere.fault(Fault::Fails(Failure::Connection));
    assert!(ready(gate.reset("api", "a")).is_err());
    assert_eq!(charge(&gate, "a", 1), (true, Source::Slice));
    elsewhere.fault(Fault::None);
    assert!(ready(gate.reset("api", "a")).unwrap());
    assert_eq!(charge(&gate, "a", 1), (true, Source::Store));
}
