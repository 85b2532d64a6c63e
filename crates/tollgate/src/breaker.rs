//! Whether the store is asked at all: so that an outage costs microseconds, and not a deadline for every call.
//!
//! While the store answers, every call passes. After five failures in a row, or when half of at least twenty calls of a second
//! failed, it is taken to be down: calls are turned away at once. After a wait (a quarter of a second, doubled with every
//! further failure up to five seconds, give or take a fifth so that processes do not come back in step) one call at a time is
//! let through to try: a real call of a caller, with its own deadline. Two successes in a row, and the store is up again.
//!
//! Every way in which a store fails counts alike. What a caller who is turned away is told is not known here: `fallback.rs`.
//! Nothing sleeps and no thread runs: time is read when a call comes, from the registry's clock.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tollgate_kernel::Micros;
use tollgate_store::{Clock, Failure};

use crate::health::{StoreChange, StoreState};

/// So many failures in a row are an outage.
const FAILURES_IN_A_ROW: u32 = 5;
/// So many calls within `WINDOW`, half of them failures, are one too.
const CALLS_IN_A_WINDOW: u64 = 20;
const WINDOW: Micros = Micros::from_secs(1);
/// How long a store that is down is left alone at first, and at most.
const FIRST_WAIT: Micros = Micros::from_millis(250);
const LONGEST_WAIT: Micros = Micros::from_secs(5);
/// So many successes in a row, and it is up again.
const SUCCESSES_IN_A_ROW: u32 = 2;
/// How long failures that are too few for an outage are gathered before they are told.
const STRAYS_GATHERED: Micros = Micros::from_secs(60);

/// Lets calls through to a store, or turns them away.
pub(crate) struct Breaker {
    clock: Clock,
    /// The generation, and as the lowest bit whether all is well: then nobody takes the lock.
    word: AtomicU64,
    inner: Mutex<Inner>,
}

struct Inner {
    phase: Phase,
    /// Counts changes between up and down: a call of an earlier one says nothing about this one.
    generation: u64,
    failures_in_a_row: u32,
    /// The calls of the last second, while any of them failed.
    window: Option<Window>,
    wait: Micros,
    /// Since when the store is up, or down.
    since: Micros,
    last_failure: Option<Failure>,
    outages: u64,
    /// How many calls had fallen back when it went down.
    fallen_back_before: u64,
    /// Failures that were too few for an outage, and since when they are gathered.
    strays: Option<(Micros, u64)>,
    random: u64,
}

#[derive(Clone, Copy)]
enum Phase {
    Up,
    Down { until: Micros },
    Probing { is_out: bool, successes: u32 },
}

struct Window {
    start: Micros,
    calls: u64,
    failures: u64,
}

/// What the operator should know.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    Changed(StoreChange),
    /// So many failures within a minute or more, too few at a time to be an outage.
    Strays {
        failures: u64,
        last: Failure,
    },
}

/// Why a call is turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TurnedAway {
    /// How the store failed last.
    pub(crate) failure: Failure,
    /// When it is tried next.
    pub(crate) retry_after: Micros,
}

/// Leave to ask the store once. Dropped without an answer, it says nothing about the store.
pub(crate) struct Pass<'a> {
    breaker: &'a Breaker,
    generation: u64,
    is_probe: bool,
}

impl Breaker {
    pub(crate) fn new(clock: Clock) -> Breaker {
        Breaker::seeded(clock, RandomState::new().hash_one(0))
    }

    fn seeded(clock: Clock, seed: u64) -> Breaker {
        let inner = Inner {
            phase: Phase::Up,
            generation: 0,
            failures_in_a_row: 0,
            window: None,
            wait: FIRST_WAIT,
            since: clock.now(),
            last_failure: None,
            outages: 0,
            fallen_back_before: 0,
            strays: None,
            random: seed,
        };
        Breaker { clock, word: AtomicU64::new(word(0, true)), inner: Mutex::new(inner) }
    }

    /// Lets a call through, or turns it away.
    pub(crate) fn admit(&self) -> Result<Pass<'_>, TurnedAway> {
        let word = self.word.load(Ordering::Acquire);
        if is_well(word) {
            return Ok(Pass { breaker: self, generation: word >> 1, is_probe: false });
        }
        let now = self.clock.now();
        let mut inner = self.inner.lock();
        let turned_away = |inner: &Inner, retry_after| {
            // It does not go down without a failure.
            Err(TurnedAway { failure: inner.last_failure.unwrap_or(Failure::Connection), retry_after })
        };
        let is_probe = match inner.phase {
            Phase::Up => false,
            Phase::Down { until } if now < until => {
                return turned_away(&inner, until.saturating_sub(now));
            }
            Phase::Probing { is_out: true, .. } => return turned_away(&inner, inner.wait),
            Phase::Down { .. } => {
                inner.phase = Phase::Probing { is_out: true, successes: 0 };
                true
            }
            Phase::Probing { is_out: false, successes } => {
                inner.phase = Phase::Probing { is_out: true, successes };
                true
            }
        };
        Ok(Pass { breaker: self, generation: inner.generation, is_probe })
    }

    /// Whether the store is asked, since when that is so, how it failed last, and how often it went down.
    pub(crate) fn reading(&self) -> (StoreState, Micros, Option<Failure>, u64) {
        let inner = self.inner.lock();
        let state = match inner.phase {
            Phase::Up => StoreState::Up,
            Phase::Down { .. } => StoreState::Down,
            Phase::Probing { .. } => StoreState::Probing,
        };
        (state, inner.since, inner.last_failure, inner.outages)
    }

    fn publish(&self, inner: &Inner) {
        let well = matches!(inner.phase, Phase::Up) && inner.failures_in_a_row == 0 && inner.window.is_none();
        self.word.store(word(inner.generation, well), Ordering::Release);
    }
}

const fn word(generation: u64, well: bool) -> u64 {
    generation << 1 | well as u64
}

const fn is_well(word: u64) -> bool {
    word & 1 == 1
}

impl fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass").field("is_probe", &self.is_probe).finish_non_exhaustive()
    }
}

impl Pass<'_> {
    /// The store answered. `fallen_back` is how many calls have fallen back so far.
    pub(crate) fn succeeded(mut self, fallen_back: u64) -> Option<Notice> {
        let breaker = self.breaker;
        let is_probe = std::mem::take(&mut self.is_probe);
        if breaker.word.load(Ordering::Acquire) == word(self.generation, true) {
            return None;
        }
        let now = breaker.clock.now();
        let mut inner = breaker.inner.lock();
        if inner.generation != self.generation {
            return None;
        }
        let notice = match inner.phase {
            Phase::Up => {
                inner.failures_in_a_row = 0;
                inner.window = inner.window.take().filter(|window| window.is_open(now));
                if let Some(window) = &mut inner.window {
                    window.calls += 1;
                }
                None
            }
            Phase::Probing { successes, .. } if is_probe && successes + 1 < SUCCESSES_IN_A_ROW => {
                inner.phase = Phase::Probing { is_out: false, successes: successes + 1 };
                None
            }
            Phase::Probing { .. } if is_probe => Some(inner.close(now, fallen_back)),
            Phase::Probing { .. } | Phase::Down { .. } => None,
        };
        breaker.publish(&inner);
        notice
    }

    /// The store failed.
    pub(crate) fn failed(mut self, failure: Failure, fallen_back: u64) -> Option<Notice> {
        let breaker = self.breaker;
        let is_probe = std::mem::take(&mut self.is_probe);
        let now = breaker.clock.now();
        let mut inner = breaker.inner.lock();
        inner.last_failure = Some(failure);
        if inner.generation != self.generation {
            return None;
        }
        let notice = match inner.phase {
            Phase::Up => inner.note_failure(now, failure, fallen_back),
            Phase::Probing { .. } if is_probe => {
                inner.wait = Micros::new(inner.wait.get() * 2).min(LONGEST_WAIT);
                inner.leave_alone(now);
                None
            }
            Phase::Probing { .. } | Phase::Down { .. } => None,
        };
        breaker.publish(&inner);
        notice
    }
}

/// A probe that came to nothing, because its caller gave up or asked nonsense, is tried again after the same wait.
impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.is_probe {
            self.breaker.inner.lock().leave_alone(self.breaker.clock.now());
        }
    }
}

impl Window {
    fn is_open(&self, now: Micros) -> bool {
        now.saturating_sub(self.start) < WINDOW
    }
}

impl Inner {
    /// Counts a failure of a store that is up, and takes it to be down if that is one too many.
    fn note_failure(&mut self, now: Micros, failure: Failure, fallen_back: u64) -> Option<Notice> {
        self.failures_in_a_row += 1;
        let open = self.window.take().filter(|window| window.is_open(now));
        let mut window = open.unwrap_or(Window { start: now, calls: 0, failures: 0 });
        window.calls += 1;
        window.failures += 1;
        let is_half = window.calls >= CALLS_IN_A_WINDOW && window.failures * 2 >= window.calls;
        self.window = Some(window);
        if is_half || self.failures_in_a_row >= FAILURES_IN_A_ROW {
            self.generation += 1;
            self.outages += 1;
            (self.since, self.wait) = (now, FIRST_WAIT);
            (self.window, self.strays, self.failures_in_a_row) = (None, None, 0);
            self.fallen_back_before = fallen_back;
            self.leave_alone(now);
            return Some(Notice::Changed(StoreChange::Down { failure }));
        }
        let (since, failures) = self.strays.map_or((now, 1), |(since, failures)| (since, failures + 1));
        if now.saturating_sub(since) < STRAYS_GATHERED {
            self.strays = Some((since, failures));
            return None;
        }
        self.strays = None;
        Some(Notice::Strays { failures, last: failure })
    }

    fn leave_alone(&mut self, now: Micros) {
        // From four fifths of the wait to six, in steps of a µs.
        let fifth = self.wait.get() / 5;
        let wait = self.wait.get() - fifth + self.draw() % (2 * fifth + 1);
        self.phase = Phase::Down { until: now.saturating_add(Micros::new(wait)) };
    }

    fn close(&mut self, now: Micros, fallen_back: u64) -> Notice {
        let down_for = now.saturating_sub(self.since);
        let fallen_back = fallen_back.saturating_sub(self.fallen_back_before);
        self.generation += 1;
        (self.phase, self.since) = (Phase::Up, now);
        Notice::Changed(StoreChange::Up { down_for, fallen_back })
    }

    /// A number that looks random (splitmix64).
    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use tollgate_store::ManualClock;

    use super::*;

    fn breaker(seed: u64) -> (ManualClock, Breaker) {
        let hands = ManualClock::at(Micros::from_secs(1_000));
        let breaker = Breaker::seeded(hands.clock(), seed);
        (hands, breaker)
    }

    fn fail(breaker: &Breaker) -> Option<Notice> {
        breaker.admit().expect("lets calls through").failed(Failure::Timeout, 0)
    }

    fn succeed(breaker: &Breaker, fallen_back: u64) -> Option<Notice> {
        breaker.admit().expect("lets calls through").succeeded(fallen_back)
    }

    fn wait_of(breaker: &Breaker) -> Micros {
        breaker.admit().expect_err("turns calls away").retry_after
    }

    const DOWN: Option<Notice> = Some(Notice::Changed(StoreChange::Down { failure: Failure::Timeout }));

    fn take_down(breaker: &Breaker) {
        for _ in 1..FAILURES_IN_A_ROW {
            assert_eq!(fail(breaker), None);
        }
        assert_eq!(fail(breaker), DOWN);
    }

    #[test]
    fn a_success_in_between_is_not_five_in_a_row() {
        let (_, breaker) = breaker(1);
        for _ in 0..4 {
            for _ in 1..FAILURES_IN_A_ROW {
                assert_eq!(fail(&breaker), None);
            }
            for _ in 0..8 {
                assert_eq!(succeed(&breaker, 0), None);
            }
        }
        assert_eq!(breaker.reading().0, StoreState::Up);
    }

    #[test]
    fn half_of_twenty_calls_within_a_second_are_an_outage_and_of_longer_are_not() {
        for (step_us, is_outage) in [(40_000, true), (120_000, false)] {
            let (hands, breaker) = breaker(1);
            let mut went_down = false;
            for call in 0..60 {
                hands.advance(Micros::new(step_us));
                let Ok(pass) = breaker.admit() else { break };
                went_down |= match call % 2 {
                    0 => pass.failed(Failure::Timeout, 0) == DOWN,
                    _ => pass.succeeded(0).is_some(),
                };
            }
            assert_eq!(went_down, is_outage, "a call every {step_us} us");
        }
    }

    #[test]
    fn once_all_is_well_again_nobody_takes_the_lock() {
        let (hands, breaker) = breaker(1);
        assert!(is_well(breaker.word.load(Ordering::Relaxed)));
        fail(&breaker);
        assert!(!is_well(breaker.word.load(Ordering::Relaxed)));
        hands.advance(WINDOW);
        succeed(&breaker, 0);
        assert!(is_well(breaker.word.load(Ordering::Relaxed)));
        let _held = breaker.inner.lock();
        succeed(&breaker, 0);
    }

    #[test]
    fn waits_double_up_to_five_seconds_give_or_take_a_fifth() {
        let mut shares = Vec::new();
        for seed in 0..200 {
            let (hands, breaker) = breaker(seed);
            take_down(&breaker);
            for wait_ms in [250, 500, 1_000, 2_000, 4_000, 5_000, 5_000] {
                let wait = wait_of(&breaker);
                let (low, high) =
                    (Micros::from_millis(wait_ms * 4 / 5), Micros::from_millis(wait_ms * 6 / 5));
                assert!((low..=high).contains(&wait), "{wait} is not within {low} and {high}");
                shares.push(wait.get() * 1_000 / (wait_ms * 1_000));
                hands.advance(wait.saturating_sub(Micros::new(1)));
                assert_eq!(wait_of(&breaker), Micros::new(1), "not a moment too soon");
                hands.advance(Micros::new(1));
                assert_eq!(fail(&breaker), None, "a failed probe is no change");
            }
        }
        let below = shares.iter().filter(|share| **share < 1_000).count();
        assert!((shares.len() * 2 / 5..shares.len() * 3 / 5).contains(&below), "half of them are shorter");
        assert!(shares.iter().any(|share| *share < 830) && shares.iter().any(|share| *share > 1_170));
    }

    #[test]
    fn one_probe_at_a_time_and_two_successes_bring_it_back() {
        let (hands, breaker) = breaker(7);
        let early = breaker.admit().unwrap();
        take_down(&breaker);
        assert_eq!(early.succeeded(0), None, "a call of before the outage says nothing about it");
        assert_eq!(breaker.reading().0, StoreState::Down);
        hands.advance(wait_of(&breaker));

        let probe = breaker.admit().unwrap();
        assert_eq!(breaker.reading().0, StoreState::Probing);
        assert!(breaker.admit().is_err() && breaker.admit().is_err());
        drop(probe);
        let wait = wait_of(&breaker);
        assert!(wait <= Micros::from_millis(300), "a probe that nobody waited for doubles nothing: {wait}");
        hands.advance(wait);

        assert_eq!(succeed(&breaker, 5), None, "once is not enough");
        let probe = breaker.admit().unwrap();
        assert!(breaker.admit().is_err());
        let down_for = hands.now().saturating_sub(Micros::from_secs(1_000));
        let up = StoreChange::Up { down_for, fallen_back: 9 };
        assert_eq!(probe.succeeded(9), Some(Notice::Changed(up)));
        assert_eq!((breaker.reading().0, breaker.reading().3), (StoreState::Up, 1));
        take_down(&breaker);
        assert!(wait_of(&breaker) <= Micros::from_millis(300), "the next outage starts afresh");
    }

    #[test]
    fn failures_that_are_no_outage_are_told_once_a_minute() {
        let (hands, breaker) = breaker(7);
        let mut told = Vec::new();
        for _ in 0..130 {
            told.extend(fail(&breaker));
            for _ in 0..5 {
                succeed(&breaker, 0);
            }
            hands.advance(Micros::from_secs(1));
        }
        let strays = Notice::Strays { failures: 61, last: Failure::Timeout };
        assert_eq!(told, [strays, Notice::Strays { failures: 61, last: Failure::Timeout }]);
    }
}
