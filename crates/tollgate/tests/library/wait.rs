//! Waiting: first come, first served; a waiter that gives up leaves no trace; and no waiter waits past its deadline.

use std::collections::HashMap;
use std::error::Error as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use tollgate::telemetry::{Event, Observer};
use tollgate::{
    Allowance, Charge, Error, Key, Limiter, ManualClock, Outcome, Reservation, Rule, Settled, Settlement,
    Strategy, Tollgate,
};

use crate::crowd::{Crowd, block_on, ready};
use crate::scene::{a_minute, at_once, bucket, every_strategy, gate, hands, limiter, on, one, secs};

const HOUR: Duration = Duration::from_secs(3_600);

/// A bucket of five that is empty and gets one unit a second.
fn empty_bucket(hands: &ManualClock) -> Limiter {
    let limiter = limiter(hands, bucket("1/s", 5));
    assert!(limiter.charge("a", 5).unwrap().is_allowed());
    limiter
}

/// Whether a wait ended without room in time: denied, and not for ever.
fn is_too_late(outcome: &Outcome) -> bool {
    !outcome.is_allowed() && outcome.retry_after().is_some()
}

/// Waits by the name of the limit.
async fn by_name(gate: &Tollgate, charge: Charge<'_>) -> Result<Outcome, Error> {
    gate.wait(&[charge], HOUR).await.map(|decision| *decision.binding())
}

/// Advances second by second. Returns who was done in which second.
fn seconds<T>(hands: &ManualClock, crowd: &mut Crowd<'_, T>, seconds: u64) -> Vec<(u64, usize)> {
    let mut done = Vec::new();
    for second in 1..=seconds {
        hands.advance(secs(1));
        done.extend(crowd.run_to_see_who_is_done().into_iter().map(|who| (second, who)));
    }
    done
}

#[test]
fn waiters_are_served_in_the_order_in_which_they_came_whatever_they_ask_for() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let mut crowd = Crowd::new();
    let mut expected = Vec::new();
    let mut paid = 0;
    for number in 0..60 {
        let cost = [5, 1, 3, 2, 4, 1][number % 6];
        assert_eq!(crowd.join(limiter.wait("a", cost, HOUR)), number);
        paid += cost;
        expected.push((paid, number));
    }
    // Each is admitted in the very second in which all that came before, and they themselves, are paid for.
    assert_eq!(seconds(&hands, &mut crowd, paid), expected);
    assert_eq!(limiter.status("a").remaining(), 0);
}

#[test]
fn a_big_one_in_front_is_not_starved_by_small_ones_behind() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let mut crowd = Crowd::new();
    crowd.join(limiter.wait("a", 5, HOUR));
    for _ in 0..3 {
        crowd.join(limiter.wait("a", 1, HOUR));
    }
    assert_eq!(seconds(&hands, &mut crowd, 10), [(5, 0), (6, 1), (7, 2), (8, 3)]);
}

#[test]
fn whoever_gives_up_frees_their_place_at_once_and_is_charged_nothing() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let mut crowd = Crowd::new();
    let [front, second, middle, last] = [5, 1, 3, 1].map(|cost| crowd.join(limiter.wait("a", cost, HOUR)));
    assert!(seconds(&hands, &mut crowd, 1).is_empty());

    crowd.leave(front);
    assert_eq!(crowd.run_to_see_who_is_done(), [second], "the clock has not moved");
    crowd.leave(middle);
    assert!(crowd.run_to_see_who_is_done().is_empty());
    assert_eq!(seconds(&hands, &mut crowd, 5), [(1, last)]);
    assert_eq!(limiter.status("a").remaining(), 4, "two units were charged in six seconds");
}

#[test]
fn the_last_one_may_give_up_as_well_and_a_line_that_is_gone_is_forgotten() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let mut crowd = Crowd::new();
    let [first, last] = [2, 1].map(|cost| crowd.join(limiter.wait("a", cost, HOUR)));
    crowd.leave(last);
    crowd.leave(first);
    assert!(seconds(&hands, &mut crowd, 5).is_empty());
    assert_eq!(limiter.status("a").used(), 0);
    // A future that was never polled has taken no place.
    drop(limiter.wait("a", 1, HOUR));
    assert!(ready(limiter.wait("a", 5, Duration::ZERO)).unwrap().is_allowed());
}

#[test]
fn lines_are_apart_by_limit_and_key_and_one_for_all_spellings_and_handles() {
    let hands = hands();
    let gate = on(&hands).limit("api", bucket("1/s", 5)).limit("other", bucket("1/s", 5)).build().unwrap();
    let (api, clone) = (gate.local("api").unwrap(), gate.clone());
    assert!(api.charge("a", 5).unwrap().is_allowed());
    let mut crowd = Crowd::new();
    crowd.join(api.wait("a", 2, HOUR));
    crowd.join(by_name(&gate, Charge::new("api", "default:a")));
    crowd.join(by_name(&clone, Charge::new("api", "a")));
    crowd.join(api.wait("default:a", 1, HOUR));

    assert!(ready(api.wait("b", 5, HOUR)).unwrap().is_allowed(), "nobody is in line for this key");
    assert!(ready(gate.wait(one(Charge::new("other", "a")), HOUR)).unwrap().is_allowed());
    assert_eq!(seconds(&hands, &mut crowd, 5), [(2, 0), (3, 1), (4, 2), (5, 3)]);
}

#[test]
fn a_waiter_is_too_late_at_the_deadline_and_not_before() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let just_short = Duration::from_micros(999_999);
    let mut crowd = Crowd::new();
    crowd.join(limiter.wait("a", 1, just_short));
    crowd.join(limiter.wait("a", 1, just_short));
    hands.advance(Duration::from_micros(999_998));
    assert!(crowd.run().is_empty());
    hands.advance(Duration::from_micros(1));
    let done: HashMap<usize, _> = crowd.run().into_iter().collect();
    let outcome = done[&0].as_ref().unwrap();
    assert_eq!((outcome.is_allowed(), outcome.retry_after()), (false, Some(Duration::from_micros(1))));
    assert!(is_too_late(done[&1].as_ref().unwrap()), "{done:?}");
    hands.advance(Duration::from_micros(1));
    assert_eq!(limiter.status("a").remaining(), 1, "nothing was charged");
}

#[test]
fn to_be_admitted_at_the_deadline_is_to_be_in_time() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let mut crowd = Crowd::new();
    crowd.join(limiter.wait("a", 2, Duration::from_secs(2)));
    hands.advance(Duration::from_micros(1_999_999));
    assert!(crowd.run().is_empty());
    hands.advance(Duration::from_micros(1));
    let [(0, Ok(outcome))] = &crowd.run()[..] else { panic!("not admitted") };
    assert!(outcome.is_allowed() && outcome.remaining() == 0);
}

#[test]
fn one_who_never_came_to_the_front_is_too_late_without_an_answer() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    let mut crowd = Crowd::new();
    crowd.join(limiter.wait("a", 5, HOUR));
    let impatient = crowd.join(limiter.wait("a", 1, Duration::from_secs(3)));
    crowd.join(limiter.wait("a", 1, HOUR));
    hands.advance(Duration::from_micros(2_999_999));
    assert!(crowd.run().is_empty());
    hands.advance(Duration::from_micros(1));
    let [(who, Ok(outcome))] = &crowd.run()[..] else { panic!("not too late") };
    assert_eq!((*who, is_too_late(outcome)), (impatient, true), "{outcome:?}");
    assert_eq!(seconds(&hands, &mut crowd, 5), [(2, 0), (3, 2)], "the others keep their places");
}

#[test]
fn whoever_has_no_time_is_answered_at_once_and_whoever_has_all_of_it_waits() {
    let hands = hands();
    let limiter = empty_bucket(&hands);
    assert!(ready(limiter.wait("b", 1, Duration::ZERO)).unwrap().is_allowed());
    assert!(is_too_late(&ready(limiter.wait("a", 1, Duration::ZERO)).unwrap()));
    let mut crowd = Crowd::new();
    crowd.join(limiter.wait("a", 1, Duration::MAX));
    assert!(is_too_late(&ready(limiter.wait("a", 1, Duration::ZERO)).unwrap()));
    assert_eq!(seconds(&hands, &mut crowd, 1), [(1, 0)]);
}

#[test]
fn what_can_never_fit_is_said_at_once_even_behind_others() {
    let hands = hands();
    let key = |text| Key::parse(text).unwrap();
    let gate = gate(
        &hands,
        [
            Rule::new("api", a_minute(5)).unwrap().with_override(key("shut"), Allowance::Blocked).unwrap(),
            Rule::blocked("shut").unwrap(),
            Rule::new("watching", a_minute(5)).unwrap().shadow(),
        ],
    );
    let api = gate.local("api").unwrap();
    let _ = api.charge("a", 5).unwrap();
    let mut crowd = Crowd::new();
    crowd.join(api.wait("a", 1, HOUR));
    for ask in [
        Charge::new("api", "a").cost(6),
        Charge::new("api", "a").cost(1 << 63),
        Charge::new("api", "b").cost(u64::MAX),
        Charge::new("api", "shut"),
        Charge::new("shut", "a"),
        Charge::new("api", ""),
        Charge::new("api", "a:b:c:d"),
        Charge::new("watching", "a\n"),
    ] {
        let decision = ready(gate.wait(std::slice::from_ref(&ask), HOUR)).unwrap();
        assert_eq!((decision.is_allowed(), decision.retry_after()), (false, None), "{ask:?}");
    }
    let zero = ready(api.wait("a", 0, HOUR)).unwrap_err();
    assert_eq!(zero.to_string(), "a cost must be at least 1; to look without charging, peek");
    assert_eq!((gate.keys(), api.status("a").used()), (1, 5));
}

#[test]
fn nobody_waits_where_nobody_is_refused() {
    let hands = hands();
    let gate = gate(
        &hands,
        [Rule::unlimited("free").unwrap(), Rule::new("watching", a_minute(1)).unwrap().shadow()],
    );
    for _ in 0..3 {
        let free = ready(gate.wait(one(Charge::new("free", "a").cost(1 << 63)), Duration::ZERO)).unwrap();
        assert!(free.binding().is_unlimited());
        assert!(ready(gate.wait(one(Charge::new("watching", "a")), Duration::ZERO)).unwrap().is_allowed());
        assert!(
            ready(gate.wait(one(Charge::new("watching", "a").cost(2)), Duration::ZERO)).unwrap().is_allowed()
        );
    }
}

#[test]
fn a_waiter_wakes_when_something_is_given_back() {
    let hands = hands();
    let gate = on(&hands).limit("limit", bucket("1/h", 5)).limit("workers", at_once(1)).build().unwrap();
    let [limiter, workers] = ["limit", "workers"].map(|name| gate.local(name).unwrap());
    let reserved = || limiter.reserve("a", 5).unwrap().unwrap();

    // The clock stands still. What wakes them: a reservation that cost less, or nothing, also by name; a reset, both ways.
    type GivesBack = fn(&Tollgate, &Reservation) -> bool;
    let ways: [(&str, GivesBack); 7] = [
        ("settle", |_, reservation| ready(reservation.settle(4)).is_ok()),
        ("settle each", |_, reservation| ready(reservation.settle_each(&[4])).is_ok()),
        ("cancel", |_, reservation| ready(reservation.cancel()).is_ok()),
        ("settle by name", |gate, it| ready(gate.settle(it.id(), &Settlement::Actual(1))).is_ok()),
        ("cancel by name", |gate, it| ready(gate.settle(it.id(), &Settlement::Cancel)).is_ok()),
        ("reset", |gate, _| gate.local("limit").unwrap().reset("a")),
        ("reset by name", |gate, _| ready(gate.reset("limit", "a")).unwrap()),
    ];
    for (way, give_back) in ways {
        let reservation = reserved();
        let mut crowd = Crowd::new();
        crowd.join(limiter.wait("a", 1, HOUR));
        assert_eq!(ready(reservation.renew()).unwrap(), Settled::Done);
        assert!(crowd.run().is_empty(), "{way}: woken for nothing, it waits on");
        assert!(give_back(&gate, &reservation), "{way}");
        assert_eq!(crowd.run_to_see_who_is_done(), [0], "{way}");
        limiter.reset("a");
    }

    let permit = workers.acquire("pool").unwrap().unwrap();
    let charges = [workers.of("pool")];
    let mut crowd = Crowd::new();
    crowd.join(gate.reserve_within(&charges, Duration::ZERO, HOUR));
    crowd.join(gate.reserve_within(&charges, Duration::ZERO, HOUR));
    drop(permit);
    assert_eq!(crowd.run_to_see_who_is_done(), [0]);
    assert_eq!(seconds(&hands, &mut crowd, 20), [(10, 1)], "the first did not come back: its lease ran out");
}

#[test]
fn every_strategy_can_be_waited_for_to_the_microsecond() {
    for limit in every_strategy(3).into_iter().filter(|limit| limit.strategy() != Strategy::Concurrency) {
        let hands = hands();
        hands.advance(Duration::from_micros(1_234_567));
        let limiter = limiter(&hands, limit);
        assert!(limiter.charge("a", 2).unwrap().is_allowed());
        hands.advance(Duration::from_micros(777_777));
        assert!(limiter.charge("a", 1).unwrap().is_allowed());
        for cost in [1, 3] {
            let mut crowd = Crowd::new();
            crowd.join(limiter.wait("a", cost, HOUR));
            let wait = limiter.peek("a", cost).unwrap().retry_after().unwrap();
            hands.advance(wait.saturating_sub(Duration::from_micros(1)));
            assert!(crowd.run().is_empty(), "{limit}");
            hands.advance(Duration::from_micros(1));
            assert_eq!(crowd.run_to_see_who_is_done(), [0], "{limit}");
        }
    }
}

#[test]
fn waiting_needs_no_runtime_and_works_by_the_system_clock() {
    let limiter = Limiter::new(bucket("500/s", 1));
    let started = Instant::now();
    for _ in 0..4 {
        assert!(block_on(limiter.wait("a", 1, HOUR)).unwrap().is_allowed());
    }
    assert!(started.elapsed() >= Duration::from_millis(5), "three of four waited two milliseconds");
    let never = block_on(Limiter::new(bucket("1/h", 1)).wait("a", 2, Duration::from_millis(1))).unwrap();
    assert_eq!((never.is_allowed(), never.retry_after()), (false, None));
    let hourly = Limiter::new(bucket("1/h", 1));
    let _ = hourly.check("a");
    let started = Instant::now();
    assert!(is_too_late(&block_on(hourly.wait("a", 1, Duration::from_millis(3))).unwrap()));
    assert!(started.elapsed() >= Duration::from_millis(3));
}

#[test]
fn a_permit_that_was_waited_for_is_passed_on_when_it_is_dropped() {
    let hands = hands();
    let workers = limiter(&hands, tollgate::Limit::concurrency(1, secs(3_600)).unwrap());
    let first = ready(workers.acquire_within("pool", HOUR)).unwrap().unwrap();
    let mut crowd = Crowd::new();
    let (second, third) =
        (crowd.join(workers.acquire_within("pool", HOUR)), crowd.join(workers.acquire_within("pool", HOUR)));
    drop(first);
    let mut done = crowd.run();
    assert_eq!(done.len(), 1, "one at a time");
    let (who, permit) = done.remove(0);
    assert_eq!(who, second);
    assert_eq!(workers.status("pool").used(), 1);
    drop(permit);
    let mut done = crowd.run();
    let (who, permit) = done.remove(0);
    assert_eq!(who, third);
    drop(permit);
    assert_eq!(workers.status("pool").used(), 0, "nothing is held for the rest of the lease");
    assert_eq!(ready(workers.acquire_within("", HOUR)).unwrap().unwrap_err().retry_after(), None, "never");
}

#[test]
fn a_permit_dropped_in_one_thread_wakes_a_waiter_in_another() {
    let workers = Limiter::new(tollgate::Limit::concurrency(1, secs(3_600)).unwrap());
    for _ in 0..100 {
        let permit = workers.acquire("pool").unwrap().unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(|| block_on(workers.acquire_within("pool", Duration::from_secs(60))));
            drop(permit);
            assert!(waiter.join().unwrap().unwrap().is_ok());
        });
        assert_eq!(workers.status("pool").used(), 0);
    }
}

#[tokio::test]
async fn the_future_may_move_between_threads() {
    let hands = hands();
    let gate = on(&hands).limit("api", bucket("1/s", 1)).build().unwrap();
    let waiters: Vec<_> = (0..5)
        .map(|_| {
            let gate = gate.clone();
            tokio::spawn(async move {
                gate.wait(one(Charge::new("api", "a")), HOUR).await.map(|decision| decision.is_allowed())
            })
        })
        .collect();
    for waiter in waiters {
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
            if waiter.is_finished() {
                break;
            }
            hands.advance(secs(1));
        }
        assert!(waiter.is_finished(), "nobody is forgotten");
        assert!(waiter.await.unwrap().unwrap());
    }
}

/// Counts what was admitted, by limit.
#[derive(Default)]
struct Admitted(AtomicUsize);

impl Observer for Admitted {
    fn decided(&self, event: &Event<'_>) {
        assert_eq!(event.operation, "wait");
        self.0.fetch_add(usize::from(event.allowed), Ordering::Relaxed);
    }
}

/// A thousand waiters for a hundred keys, from four threads; every tenth gives up. All others are admitted, and no key
/// gets more than its bucket gives.
#[test]
fn a_thousand_waiters_in_several_threads_get_what_there_is_and_no_more() {
    const THREADS: usize = 4;
    const KEYS: usize = 100;
    const WAITERS: usize = 1_000;
    let (hands, admitted) = (hands(), Arc::new(Admitted::default()));
    let gate = on(&hands).limit("api", bucket("1/s", 2)).observer(admitted.clone()).build().unwrap();
    let api = gate.local("api").unwrap();
    let start = Duration::from(hands.now());
    let times: Mutex<HashMap<usize, Vec<Duration>>> = Mutex::default();
    let running = AtomicUsize::new(THREADS);

    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (hands, api, times, running) = (&hands, &api, &times, &running);
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                let local = tokio::task::LocalSet::new();
                let waiters = (thread..WAITERS).step_by(THREADS).map(|number| {
                    let (api, hands) = (api.clone(), hands.clone());
                    local.spawn_local(async move {
                        let key = number % KEYS;
                        let text = format!("user:{key}");
                        let mut waiting = Box::pin(api.wait(&text, 1, 50 * HOUR));
                        if number % 10 == 3 {
                            // Takes a place, and is gone before it is polled again.
                            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
                            return waiting
                                .as_mut()
                                .poll(&mut context)
                                .is_ready()
                                .then(|| (key, hands.now().into()));
                        }
                        assert!(waiting.await.unwrap().is_allowed());
                        Some((key, hands.now().into()))
                    })
                });
                let waiters: Vec<_> = waiters.collect();
                local.block_on(&runtime, async {
                    for waiter in waiters {
                        if let Some((key, time)) = waiter.await.unwrap() {
                            times.lock().unwrap().entry(key).or_default().push(time);
                        }
                    }
                });
                running.fetch_sub(1, Ordering::SeqCst);
            });
        }
        // Nothing moves but the clock. A waiter that were lost would be too late in the end, and its thread would say so.
        for _ in 0..2_000_000 {
            if running.load(Ordering::SeqCst) == 0 {
                break;
            }
            hands.advance(Duration::from_millis(100));
            thread::yield_now();
        }
    });

    let times = times.into_inner().unwrap();
    let total: usize = times.values().map(Vec::len).sum();
    assert_eq!(admitted.0.load(Ordering::Relaxed), total);
    assert!(total >= WAITERS - WAITERS / 10, "{total}");
    for (key, mut times) in times {
        times.sort_unstable();
        // In any time a bucket admits at most its burst and what came in since.
        for (before, time) in times.iter().enumerate() {
            let most = 2 + time.saturating_sub(start).as_secs();
            assert!((before as u64) < most, "key {key}: {times:?}");
        }
    }
}

#[test]
fn a_failure_to_ask_is_passed_on_with_its_cause() {
    let error = ready(on(&hands()).build().unwrap().wait(one(Charge::new("b", "a")), HOUR)).unwrap_err();
    assert_eq!(error.to_string(), "unknown limit `b`; no limit is registered");
    assert!(error.source().is_none());
}
