//! The same with real threads and the real clock: the recorder, and races that nobody scheduled.

use std::borrow::Cow;
use std::sync::Mutex;
use std::time::Duration;

use tollgate_testkit::history::{Bound, Call, Check, History, Outcome, Promises, Recorder, now_us};

/// Not a multiple of the number of threads, which may well run in step.
const LIMIT: usize = 37;
const WINDOW_US: u64 = 100_000;
const PROMISES: Bound = Bound::Window { limit: LIMIT as u64, window_us: WINDOW_US };

/// What an admission and its version are decided on.
#[derive(Default)]
struct State {
    log: Vec<u64>,
    version: u64,
}

impl State {
    fn fits(&mut self, now: u64) -> bool {
        self.log.retain(|at| now < at + WINDOW_US);
        self.log.len() < LIMIT
    }

    fn add(&mut self, now: u64, version: u64) -> u64 {
        self.log.push(now);
        self.version = version;
        version
    }
}

type Decide = fn(&Mutex<State>) -> (bool, u64, Option<u64>);

fn atomic(state: &Mutex<State>) -> (bool, u64, Option<u64>) {
    let mut state = state.lock().unwrap();
    let now = now_us();
    let fits = state.fits(now);
    let next = state.version + 1;
    (fits, now, fits.then(|| state.add(now, next)))
}

/// Reads, waits for as long as a round trip takes, and writes what follows from what it read.
fn racy(state: &Mutex<State>) -> (bool, u64, Option<u64>) {
    let (fits, version) = {
        let mut state = state.lock().unwrap();
        (state.fits(now_us()), state.version)
    };
    std::thread::sleep(Duration::from_micros(300));
    let mut state = state.lock().unwrap();
    let now = now_us();
    (fits, now, fits.then(|| state.add(now, version + 1)))
}

fn record(decide: Decide) -> History {
    let (recorder, state) = (Recorder::new(), Mutex::new(State::default()));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let begin = now_us();
                while now_us() < begin + 5 * WINDOW_US {
                    let start_us = now_us();
                    let (admitted, decided_us, version) = decide(&state);
                    let end_us = now_us();
                    let outcome = if admitted { Outcome::Admitted } else { Outcome::Denied };
                    let (store_time_us, label) = (Some(decided_us), Cow::Borrowed("store"));
                    recorder.record(Call {
                        key: 0,
                        start_us,
                        end_us,
                        cost: 1,
                        outcome,
                        version,
                        store_time_us,
                        label,
                    });
                    std::thread::sleep(Duration::from_micros(100));
                }
            });
        }
    });
    recorder.take()
}

#[test]
fn an_atomic_limiter_passes_and_a_racy_one_does_not() {
    let history = record(atomic);
    let report = history.check(&Promises::of(PROMISES));
    report.assert_clean();
    assert_eq!((report.fullest, report.gaps), (Some((37, 37)), 0));
    assert!(history.in_version_order(0).is_sorted_by_key(|call| call.store_time_us));

    // A race is a matter of chance, so it gets several.
    let caught = (0..10).any(|_| {
        let flagged = record(racy).check(&Promises::of(PROMISES)).flagged();
        flagged.contains(&Check::Exact)
            && flagged.contains(&Check::BlackBox)
            && flagged.contains(&Check::Versions)
    });
    assert!(caught, "ten races, and none was flagged");
}
