//! The clock of all decisions: whole microseconds since 1970 that never go back.
//!
//! The system clock reads the date once, at its first use, and from then on follows the machine's monotonic clock, so a corrected
//! wall clock moves only aligned windows (memory/wall.rs). Reading the monotonic clock costs more than a whole decision, so each
//! thread reads it at most every ten milliseconds and interpolates with the processor's time-stamp counter, slowed by one part in
//! 2,048: the clock is then always a few microseconds behind the true one and never ahead, and every correction goes forward. A
//! limiter that lags by microseconds admits late; one that leads would admit too much.
//!
//! A [coarse](Clock::coarse) clock is the system clock with a recent reading, for callers that accept a late one
//! (clock/coarse.rs). A [`ManualClock`] moves only by hand: for tests, simulations and backtests. An [`Alarm`] waits for either
//! (clock/alarm.rs).

mod alarm;
pub(crate) mod coarse;

use std::cell::Cell;
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Waker};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tollgate_kernel::Micros;

pub use self::alarm::Alarm;
use self::alarm::Alarms;
use self::coarse::CoarseClock;

/// Where a store gets its time from. Cheap to clone; clones show the same time.
///
/// ```
/// use tollgate_store::Clock;
/// let clock = Clock::system();
/// let earlier = clock.now();
/// assert!(clock.now() >= earlier);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Clock {
    source: Source,
}

#[derive(Clone, Debug, Default)]
enum Source {
    #[default]
    System,
    Coarse(Arc<CoarseClock>),
    Manual(ManualClock),
    #[cfg(feature = "simulation")]
    Skewed(SkewedClock),
}

impl Clock {
    /// The machine's clock.
    pub fn system() -> Clock {
        Clock { source: Source::System }
    }

    /// The machine's clock, which a thread reads every millisecond for checks of token buckets in memory: a check then need not
    /// read it. Such a check is decided as if it had come up to a millisecond earlier, or more if the machine is very busy; a
    /// denial that may be out of date is decided again with the exact clock. Everything else uses the exact clock.
    ///
    /// ```
    /// use tollgate_store::Clock;
    /// let clock = Clock::coarse();
    /// assert!(clock.recent() <= clock.now());
    /// ```
    pub fn coarse() -> Clock {
        CoarseClock::of_process()
            .map_or_else(Clock::system, |coarse| Clock { source: Source::Coarse(coarse) })
    }

    /// The time now.
    #[inline(always)]
    pub fn now(&self) -> Micros {
        match &self.source {
            Source::System => system_now(),
            Source::Coarse(coarse) => coarse.clock().now_of_other(),
            Source::Manual(manual) => manual.now(),
            #[cfg(feature = "simulation")]
            Source::Skewed(skewed) => skewed.now(),
        }
    }

    /// The time now or, of a [coarse](Self::coarse) clock, when it was last read: late at times, and never early.
    #[inline(always)]
    pub fn recent(&self) -> Micros {
        match &self.source {
            Source::System => system_now(),
            Source::Coarse(coarse) => coarse.latest(),
            Source::Manual(manual) => manual.now(),
            #[cfg(feature = "simulation")]
            Source::Skewed(skewed) => skewed.now(),
        }
    }

    /// Whether a denial by [`recent`](Self::recent) has to be decided again by [`now`](Self::now), by whether the charge fits
    /// within a time.
    #[inline(always)]
    pub(crate) fn may_have_overtaken(&self, fits_within: impl FnOnce(Micros) -> bool) -> bool {
        self.is_coarse() && fits_within(coarse::MOST_LATE)
    }

    /// Whether [`recent`](Self::recent) may be late.
    #[inline(always)]
    pub(crate) fn is_coarse(&self) -> bool {
        matches!(self.source, Source::Coarse(_))
    }

    /// The time of the clock under a coarse one.
    #[inline(never)]
    fn now_of_other(&self) -> Micros {
        self.now()
    }

    /// The clock that a coarse one reads, or this one.
    fn exact(&self) -> &Clock {
        match &self.source {
            Source::Coarse(coarse) => coarse.clock(),
            _ => self,
        }
    }

    /// The clock of a shared store's server, in tests with a manual clock: unlike [`now`](Self::now) it may step back.
    pub fn server_now(&self) -> Micros {
        match &self.exact().source {
            Source::System | Source::Coarse(_) => system_now(),
            Source::Manual(manual) => manual.server_now(),
            #[cfg(feature = "simulation")]
            Source::Skewed(skewed) => skewed.now(),
        }
    }

    /// The time now, and the wall clock at the same instant: the machine's clock as it is set and corrected.
    pub(crate) fn now_and_wall(&self) -> (Micros, Micros) {
        match &self.exact().source {
            Source::System | Source::Coarse(_) => (system_now(), wall_now()),
            Source::Manual(manual) => manual.now_and_wall(),
            #[cfg(feature = "simulation")]
            Source::Skewed(skewed) => (skewed.now(), skewed.now()),
        }
    }

    /// A future that is ready once the clock shows `at`.
    pub fn alarm(&self, at: Micros) -> Alarm {
        Alarm::new(self.clone(), at)
    }
}

/// How long a thread may use the counter before it reads the monotonic clock again, in µs.
const RESYNC_US: u64 = 10_000;

struct Origin {
    counter: quanta::Clock,
    /// The length of one tick of the counter, in µs / 2^40, less one part in 2,048: more than the error of its calibration.
    tick: u64,
    /// How many ticks pass in `RESYNC_US`.
    resync_ticks: u64,
    started: Instant,
    started_us: u64,
}

static ORIGIN: LazyLock<Origin> = LazyLock::new(|| {
    let counter = quanta::Clock::new();
    // The ticks of about a second, to measure the length of one.
    let ticks = 1 << 31;
    let ns = counter.delta_as_nanos(0, ticks).max(1);
    let tick = u64::try_from((u128::from(ns) << 40) / u128::from(ticks) / 1_000).unwrap_or(u64::MAX);
    let tick = tick - (tick >> 11);
    let resync_ticks = (RESYNC_US << 40) / tick.max(1);
    let started_us = wall_now().get();
    Origin { counter, tick, resync_ticks, started: Instant::now(), started_us }
});

fn wall_now() -> Micros {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().into()
}

/// A reading of the counter and the time it stood for, in µs since 1970; at first none.
#[derive(Clone, Copy)]
struct Anchor {
    ticks: u64,
    us: u64,
}

thread_local! {
    // So far from any reading of a counter that the first one takes an anchor.
    static ANCHOR: Cell<Anchor> = const { Cell::new(Anchor { ticks: 1 << 63, us: 0 }) };
}

#[inline(always)]
fn system_now() -> Micros {
    let origin = &*ORIGIN;
    let anchor = ANCHOR.get();
    let ticks = origin.counter.raw().wrapping_sub(anchor.ticks);
    if ticks < origin.resync_ticks {
        // Below 2^64: the ticks are worth at most `RESYNC_US`.
        return Micros::new(anchor.us + ((ticks * origin.tick) >> 40));
    }
    Micros::new(resync(origin, anchor))
}

/// Reads the monotonic clock and anchors this thread's counter to it.
#[cold]
#[inline(never)]
fn resync(origin: &Origin, anchor: Anchor) -> u64 {
    let is_anchored = anchor.us > 0;
    if is_anchored && origin.counter.raw() < anchor.ticks {
        // The counter of another core may be a little behind.
        return anchor.us;
    }
    // Nothing later than this was shown under the old anchor.
    let at_least = if is_anchored { anchor.us + RESYNC_US } else { 0 };
    // The counter is read last: a pause between the two readings makes the clock late, never early.
    let elapsed = u64::try_from(origin.started.elapsed().as_micros()).unwrap_or(u64::MAX);
    let ticks = origin.counter.raw();
    let us = origin.started_us.saturating_add(elapsed).max(at_least);
    ANCHOR.set(Anchor { ticks, us });
    us
}

/// A clock that moves only by hand, and never back.
///
/// ```
/// use tollgate_store::{ManualClock, Micros};
/// let hands = ManualClock::at(Micros::from_secs(100));
/// let clock = hands.clock();
/// hands.advance(Micros::from_secs(5));
/// assert_eq!(clock.now(), Micros::from_secs(105));
/// hands.set(Micros::from_secs(1)); // a step back is not followed
/// assert_eq!(clock.now(), Micros::from_secs(105));
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock {
    state: Arc<Mutex<ManualState>>,
}

#[derive(Debug, Default)]
struct ManualState {
    now: Micros,
    /// How far the wall clock is ahead, in µs.
    wall_offset_us: i64,
    /// How far the clock of a shared store's server is ahead, in µs.
    server_offset_us: i64,
    alarms: Alarms,
}

impl Default for ManualClock {
    fn default() -> ManualClock {
        ManualClock::new()
    }
}

impl ManualClock {
    /// A clock that shows the first second of 2020, for tests that only measure how time passes.
    pub fn new() -> ManualClock {
        ManualClock::at(Micros::from_secs(1_577_836_800))
    }

    /// A clock that shows `now`, counted from 1970.
    pub fn at(now: impl Into<Micros>) -> ManualClock {
        let now = now.into();
        ManualClock { state: Arc::new(Mutex::new(ManualState { now, ..ManualState::default() })) }
    }

    /// The clock to hand to a store; it follows this one.
    pub fn clock(&self) -> Clock {
        Clock { source: Source::Manual(self.clone()) }
    }

    /// The time it shows.
    #[inline(never)]
    pub fn now(&self) -> Micros {
        self.state.lock().now
    }

    /// Moves it to `now`, and rings the alarms that are due. An earlier time changes nothing.
    pub fn set(&self, now: impl Into<Micros>) {
        let now = now.into();
        self.move_to(|old| old.max(now));
    }

    /// Moves it forward.
    pub fn advance(&self, span: impl Into<Micros>) {
        let span = span.into();
        self.move_to(|old| old.saturating_add(span));
    }

    /// Corrects the wall clock by so many µs, as an administrator or a time server would. Only windows that are aligned to the clock
    /// follow it; the time that this clock shows stays.
    ///
    /// ```
    /// use tollgate_store::{ManualClock, Micros};
    /// let hands = ManualClock::at(Micros::from_secs(100));
    /// hands.step_wall(-3_000_000);
    /// assert_eq!(hands.now(), Micros::from_secs(100));
    /// ```
    pub fn step_wall(&self, by_us: i64) {
        let mut state = self.state.lock();
        state.wall_offset_us = state.wall_offset_us.saturating_add(by_us);
    }

    /// Moves the clock of a shared store's server by this many µs, as its administrator or a time server would. It affects stores
    /// that take their time from a server; the time of this clock stays.
    ///
    /// ```
    /// use tollgate_store::{ManualClock, Micros};
    /// let hands = ManualClock::at(Micros::from_secs(100));
    /// hands.step_server(-3_000_000);
    /// assert_eq!((hands.now(), hands.server_now()), (Micros::from_secs(100), Micros::from_secs(97)));
    /// ```
    pub fn step_server(&self, by_us: i64) {
        let mut state = self.state.lock();
        state.server_offset_us = state.server_offset_us.saturating_add(by_us);
    }

    /// The clock of a shared store's server.
    pub fn server_now(&self) -> Micros {
        let state = self.state.lock();
        Micros::new(state.now.get().saturating_add_signed(state.server_offset_us))
    }

    /// When the next alarm rings, if one is set: how far a simulation may move the clock in one step.
    #[cfg(feature = "simulation")]
    pub fn next_alarm(&self) -> Option<Micros> {
        self.state.lock().alarms.next()
    }

    /// A clock that follows this one wrongly: ahead by so many µs now, or behind, and faster by so many parts in a million from now on.
    ///
    /// ```
    /// use tollgate_store::{ManualClock, Micros};
    /// let hands = ManualClock::at(Micros::from_secs(100));
    /// let skewed = hands.skewed(-3_000_000, 500);
    /// hands.advance(Micros::from_secs(10));
    /// assert_eq!(skewed.now(), Micros::new(107_005_000));
    /// ```
    #[cfg(feature = "simulation")]
    pub fn skewed(&self, ahead_us: i64, drift_ppm: i32) -> Clock {
        let skewed = SkewedClock { manual: self.clone(), start: self.now(), ahead_us, drift_ppm };
        Clock { source: Source::Skewed(skewed) }
    }

    fn now_and_wall(&self) -> (Micros, Micros) {
        let state = self.state.lock();
        (state.now, Micros::new(state.now.get().saturating_add_signed(state.wall_offset_us)))
    }

    fn set_alarm(&self, at: Micros, number: &mut Option<u64>, waker: &Waker) -> Poll<()> {
        let mut state = self.state.lock();
        if state.now >= at {
            return Poll::Ready(());
        }
        let replaced = state.alarms.set(at, number, waker);
        drop(state);
        drop(replaced);
        Poll::Pending
    }

    fn move_to(&self, to: impl FnOnce(Micros) -> Micros) {
        let mut state = self.state.lock();
        state.now = to(state.now);
        let now = state.now;
        let due = state.alarms.take_expired(now);
        drop(state);
        due.into_iter().for_each(Waker::wake);
    }
}

/// A clock that is wrong, for simulations.
#[cfg(feature = "simulation")]
#[derive(Clone, Debug)]
struct SkewedClock {
    manual: ManualClock,
    start: Micros,
    ahead_us: i64,
    drift_ppm: i32,
}

#[cfg(feature = "simulation")]
impl SkewedClock {
    const MILLION: i128 = 1_000_000;

    fn now(&self) -> Micros {
        let passed = i128::from(self.manual.now().get() - self.start.get());
        let shown = (passed * (Self::MILLION + i128::from(self.drift_ppm))).div_euclid(Self::MILLION);
        Micros::new(u64::try_from(self.shown_at_start() + shown).unwrap_or(0))
    }

    fn shown_at_start(&self) -> i128 {
        i128::from(self.start.get()) + i128::from(self.ahead_us)
    }

    /// The earliest true time at which this clock shows `at`.
    fn true_time(&self, at: Micros) -> Micros {
        let shown = (i128::from(at.get()) - self.shown_at_start()).max(0);
        let rate = (Self::MILLION + i128::from(self.drift_ppm)).max(1);
        let passed = (shown * Self::MILLION + rate - 1) / rate;
        self.start.saturating_add(Micros::new(u64::try_from(passed).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_never_leads_and_never_goes_back() {
        let clock = Clock::system();
        clock.now();
        let origin = &*ORIGIN;
        let (mut last, mut least_lag) = (Micros::ZERO, u128::MAX);
        for _ in 0..200_000 {
            let before = origin.started.elapsed();
            let now = clock.now();
            let after = origin.started.elapsed();
            let elapsed = now.get() - origin.started_us;
            assert!(now >= last, "went back");
            assert!(u128::from(elapsed) <= after.as_micros(), "ahead of the machine");
            least_lag = least_lag.min(before.as_micros().saturating_sub(u128::from(elapsed)));
            last = now;
        }
        assert!(least_lag <= 10, "always behind by at least {least_lag} us");
    }
}
