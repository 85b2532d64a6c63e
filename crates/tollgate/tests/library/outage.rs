//! An outage from its beginning to its end: what it costs, who hears of it, and how it is over.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollgate::store::{Failure, Scope, StoreChange, StoreState, WhenFull};
use tollgate::telemetry::{Event, Observer, Source};
use tollgate::{Charge, Fallback, ManualClock, Tollgate};

use crate::crowd::{Crowd, ready};
use crate::faulty_store::{Fault, FaultyStore};
use crate::observe::logged;
use crate::scene::{a_minute, bucket, hands, on, secs};

/// Keeps what was reported of the store.
#[derive(Default)]
struct News(Mutex<Vec<StoreChange>>);

impl Observer for News {
    fn decided(&self, _: &Event<'_>) {}

    fn store_changed(&self, change: &StoreChange) {
        self.0.lock().unwrap().push(*change);
    }
}

fn scene() -> (ManualClock, Tollgate, Arc<FaultyStore>, Arc<News>) {
    let hands = hands();
    let (faulty, news) = (FaultyStore::new(&hands), Arc::new(News::default()));
    let gate = on(&hands)
        .limit("api", bucket("1000/s", 1_000_000))
        .when_full(WhenFull::Share)
        .store(faulty.clone())
        .observer(news.clone())
        .build()
        .unwrap();
    (hands, gate, faulty, news)
}

fn source(gate: &Tollgate) -> Source {
    ready(gate.charge(&[Charge::new("api", "alice")])).unwrap().outcomes()[0].source()
}

#[test]
fn an_outage_is_few_calls_one_warning_and_over_by_itself() {
    let (hands, gate, faulty, news) = scene();
    let lines = logged(|| {
        for _ in 0..100 {
            assert_eq!(source(&gate), Source::Store);
        }
        let started = hands.now();
        faulty.fault(Fault::Fails(Failure::Timeout));
        for _ in 0..10_000 {
            assert_eq!(source(&gate), Source::FallbackLocal);
        }
        assert_eq!((faulty.calls(), faulty.pings()), (101, 1), "a failure, a ping, and it is left alone");
        let health = gate.store_health();
        assert_eq!((health.state, health.since), (StoreState::Down, started.into()));
        assert_eq!((health.calls, health.fallen_back, health.outages), (101, 10_000, 1));
        assert_eq!((health.failures(Failure::Timeout), health.last_failure), (1, Some(Failure::Timeout)));

        assert_eq!((health.nodes_up, health.nodes), (0, 1));

        // Half a minute more, with a call every millisecond: few of them ping, the rest cost nothing.
        for _ in 0..30_000 {
            hands.advance(Duration::from_millis(1));
            assert_eq!(source(&gate), Source::FallbackLocal);
        }
        let pings = faulty.pings() - 1;
        assert!((7..=12).contains(&pings), "{pings} pings in half a minute");
        assert_eq!(faulty.calls(), 101, "and no caller's own call is one");
        assert_eq!(gate.store_health().state, StoreState::Down);

        faulty.fault(Fault::None);
        let back = (1..).find(|_| {
            hands.advance(Duration::from_millis(1));
            source(&gate) == Source::Store
        });
        assert!(back <= Some(6_000), "the longest wait is five seconds and a fifth");
        for _ in 0..100 {
            assert_eq!(source(&gate), Source::Store);
        }
        let health = gate.store_health();
        assert_eq!((health.state, health.since, health.outages), (StoreState::Up, hands.now().into(), 1));
        let down_for = hands.now().saturating_sub(started).into();
        let fallen_back = health.fallen_back - 1;
        let expected =
            [StoreChange::Down { failure: Failure::Timeout }, StoreChange::Up { down_for, fallen_back }];
        assert_eq!(*news.0.lock().unwrap(), expected);
    });
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (line, parts) in lines.iter().zip([
        ["WARN", "the store is down", "failure=timeout", "ambiguous=0"],
        ["INFO", "the store answers again", "fallen_back=", "down_for=3"],
    ]) {
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        assert!(!line.contains("alice"), "{line}");
    }
}

#[test]
fn a_second_outage_is_told_again() {
    let (hands, gate, faulty, news) = scene();
    let lines = logged(|| {
        for _ in 0..3 {
            hands.advance(secs(1));
            faulty.fault(Fault::Fails(Failure::Refused));
            for _ in 0..20 {
                source(&gate);
            }
            faulty.fault(Fault::None);
            hands.advance(secs(1));
            source(&gate);
            source(&gate);
        }
    });
    assert_eq!((lines.len(), news.0.lock().unwrap().len(), gate.store_health().outages), (6, 6, 3));
}

/// Callers can make calls fail, but not pings: then it is their calls that are ill, and only those fall back.
#[test]
fn calls_that_fail_are_no_outage_while_pings_are_answered() {
    for failure in Failure::ALL {
        let (hands, gate, faulty, news) = scene();
        faulty.answers_pings(true);
        for call in 0..1_000 {
            hands.advance(Duration::from_millis(1));
            let fails = call % 8 != 0;
            faulty.fault(if fails { Fault::Fails(failure) } else { Fault::None });
            let expected = if fails { Source::FallbackLocal } else { Source::Store };
            assert_eq!(source(&gate), expected, "{failure}: the store is asked by each of them");
        }
        let health = gate.store_health();
        assert_eq!((health.state, health.outages, news.0.lock().unwrap().len()), (StoreState::Up, 0, 0));
        let pings = match failure.scope() {
            Scope::Call => 0,
            Scope::Node => 10,
        };
        assert_eq!(faulty.pings(), pings, "{failure}: one every 100 ms at most");
    }
}

#[test]
fn one_ping_at_a_time_however_many_ask() {
    let (hands, gate, faulty, _) = scene();
    faulty.fault(Fault::Fails(Failure::Connection));
    for _ in 0..2 {
        source(&gate);
    }
    faulty.fault(Fault::Hangs);
    hands.advance(secs(1));
    let (calls, pings) = (faulty.calls(), faulty.pings());
    let asks = [Charge::new("api", "alice")];
    let mut crowd = Crowd::new();
    // This store has nothing to run a ping on, so one caller waits for it.
    let waiter = crowd.join(gate.charge(&asks));
    for _ in 0..1_000 {
        assert_eq!(source(&gate), Source::FallbackLocal, "nobody else waits for the ping");
    }
    assert_eq!((faulty.calls() - calls, faulty.pings() - pings), (0, 1));
    assert_eq!(gate.store_health().state, StoreState::Probing);

    // Its caller gives up: the next ping is due after as long a wait, and not before.
    crowd.leave(waiter);
    assert_eq!(source(&gate), Source::FallbackLocal);
    hands.advance(Duration::from_millis(300));
    let waiter = crowd.join(gate.charge(&asks));
    assert_eq!(faulty.pings() - pings, 2);
    faulty.let_go();
    let done = crowd.run();
    assert_eq!((done.len(), done[0].0), (1, waiter));
    assert_eq!(done[0].1.as_ref().unwrap().outcomes()[0].source(), Source::Store, "it finds the store back");
    assert_eq!(gate.store_health().state, StoreState::Up);
}

#[test]
fn one_ping_at_a_time_among_threads() {
    let (hands, gate, faulty, _) = scene();
    faulty.fault(Fault::Fails(Failure::Connection));
    for _ in 0..2 {
        source(&gate);
    }
    for round in 0..50 {
        hands.advance(secs(7));
        let before = (faulty.calls(), faulty.pings());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| assert_eq!(source(&gate), Source::FallbackLocal)));
            }
        });
        assert_eq!((faulty.calls(), faulty.pings()), (before.0, before.1 + 1), "round {round}");
    }
}

#[test]
fn calls_whose_answer_was_lost_are_counted_apart_and_not_sent_again() {
    let hands = hands();
    let faulty = FaultyStore::new(&hands);
    let gate = on(&hands).limit("api", a_minute(100)).store(faulty.clone()).build().unwrap();
    faulty.answers_pings(true);
    faulty.fault(Fault::Loses(Failure::Timeout));
    for _ in 0..3 {
        assert_eq!(source(&gate), Source::FallbackLocal);
    }
    faulty.fault(Fault::Fails(Failure::Timeout));
    source(&gate);
    let health = gate.store_health();
    assert_eq!((health.ambiguous, health.failures(Failure::Timeout), health.calls), (3, 4, 4));
    faulty.fault(Fault::None);
    assert_eq!(ready(gate.status("api", "alice")).unwrap().used(), 3, "each of them once");
}

#[test]
fn failures_now_and_then_fall_back_without_an_outage_and_are_told_once_a_minute() {
    let (hands, gate, faulty, news) = scene();
    let lines = logged(|| {
        for call in 0..1_400 {
            hands.advance(Duration::from_millis(100));
            let fails = call % 10 == 0;
            faulty.fault(if fails { Fault::Fails(Failure::Overloaded) } else { Fault::None });
            assert_eq!(source(&gate), if fails { Source::FallbackLocal } else { Source::Store });
        }
    });
    assert_eq!((lines.len(), news.0.lock().unwrap().len()), (2, 0), "{lines:?}");
    assert!(lines[0].contains("WARN") && lines[0].contains("last=overloaded"), "{}", lines[0]);
}

#[test]
fn the_memory_store_is_always_up() {
    let hands = hands();
    let builder = on(&hands).limit("api", a_minute(1)).fallback(Fallback::Closed);
    let gate = builder.denial_cache(Duration::from_secs(9)).instances(3).build().unwrap();
    for admitted in [true, false, false] {
        let decision = ready(gate.charge(&[Charge::new("api", "a")])).unwrap();
        assert_eq!((decision.is_allowed(), decision.is_degraded()), (admitted, false));
        assert_eq!(decision.outcomes()[0].source(), Source::Store);
    }
    assert_eq!(gate.store_health().state, StoreState::Up);
}
