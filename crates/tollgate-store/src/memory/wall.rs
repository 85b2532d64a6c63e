//! Aligned windows, which follow the system's wall clock: when that is corrected, they start and end by the new time.
//!
//! Everything else uses a monotonic clock (clock.rs). The offset of the wall clock is measured when an aligned window is charged
//! and a second has passed since the last measurement. If the wall clock goes back, open windows stay: time never goes back for a
//! key.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tollgate_kernel::{Algorithm, Align, Cost, FixedWindow, Micros, Outcome, Taken, WindowState};

use super::cell::InWords;
use super::whole::InWhole;
use crate::clock::Clock;

/// How long a look at the wall clock holds, in µs.
const LOOK_EVERY_US: u64 = 1_000_000;

/// How far the wall clock may be from where it was expected before it counts as corrected, in µs: the two clocks are not read at
/// one instant.
const LEAST_STEP_US: u64 = 1_000;

/// How far the wall clock is from the store's clock.
pub(super) struct Wall {
    clock: Clock,
    /// In µs; negative where the wall clock is behind.
    offset_us: AtomicI64,
    looked_at: AtomicU64,
}

impl Wall {
    pub(super) fn new(clock: Clock) -> Wall {
        let wall = Wall { clock, offset_us: AtomicI64::new(0), looked_at: AtomicU64::new(0) };
        wall.look(wall.clock.now());
        wall
    }

    /// The wall clock at an instant of the store's clock.
    #[inline]
    fn at(&self, now: Micros) -> Micros {
        if now.get().saturating_sub(self.looked_at.load(Ordering::Relaxed)) >= LOOK_EVERY_US {
            self.look(now);
        }
        Micros::new(now.get().saturating_add_signed(self.offset_us.load(Ordering::Relaxed)))
    }

    #[cold]
    fn look(&self, now: Micros) {
        self.looked_at.store(now.get(), Ordering::Relaxed);
        let (clock, wall) = self.clock.now_and_wall();
        let offset = i64::try_from(i128::from(wall.get()) - i128::from(clock.get())).unwrap_or(0);
        if offset.abs_diff(self.offset_us.load(Ordering::Relaxed)) >= LEAST_STEP_US {
            self.offset_us.store(offset, Ordering::Relaxed);
        }
    }
}

/// A fixed window with its clock.
#[derive(Clone)]
pub(crate) struct WallWindow {
    window: FixedWindow,
    /// For windows of the clock.
    wall: Option<Arc<Wall>>,
}

impl WallWindow {
    pub(super) fn new(window: FixedWindow, wall: &Arc<Wall>) -> WallWindow {
        let wall = (window.align() == Align::Clock).then(|| wall.clone());
        WallWindow { window, wall }
    }

    #[inline]
    fn time(&self, now: Micros) -> Micros {
        self.wall.as_ref().map_or(now, |wall| wall.at(now))
    }
}

impl Algorithm for WallWindow {
    type State = WindowState;

    fn peek(&self, state: &WindowState, cost: Cost, now: Micros) -> Outcome {
        self.window.peek(state, cost, self.time(now))
    }

    #[inline]
    fn charge(&self, state: &mut WindowState, cost: Cost, now: Micros) -> Outcome {
        self.window.charge(state, cost, self.time(now))
    }

    #[inline]
    fn charged_at(&self, state: &WindowState, now: Micros) -> Micros {
        self.window.charged_at(state, self.time(now))
    }

    fn give_back(&self, state: &mut WindowState, taken: Taken, amount: u64, now: Micros) {
        self.window.give_back(state, taken, amount, self.time(now));
    }

    fn debit(&self, state: &mut WindowState, amount: u64, now: Micros) {
        self.window.debit(state, amount, self.time(now));
    }

    fn joined(&self, state: &WindowState, now: Micros) -> WindowState {
        self.window.joined(state, self.time(now))
    }

    fn refund(&self, state: &mut WindowState, amount: u64, now: Micros) {
        self.window.refund(state, amount, self.time(now));
    }

    /// By either clock: the same table may have windows of the other one.
    fn is_fresh(&self, state: &WindowState, now: Micros) -> bool {
        self.window.is_fresh(state, now.min(self.time(now)))
    }
}

impl InWords for WallWindow {
    #[inline]
    fn to_words(&self, state: &WindowState) -> [u64; 3] {
        [state.end.get(), state.count, state.start.get()]
    }

    #[inline]
    fn of_words(&self, words: [u64; 3]) -> WindowState {
        WindowState { end: Micros::new(words[0]), count: words[1], start: Micros::new(words[2]) }
    }

    #[inline]
    fn is_plain(&self, _state: &WindowState, _now: Micros) -> bool {
        true
    }

    fn made_plain(&self, state: &WindowState, _now: Micros) -> WindowState {
        WindowState::of_whole(&state.to_whole())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, ManualClock, MemoryOptions, MemoryStore, StoredLimit};

    /// The date was taken once, when the process began: a wall clock that was wrong then, and corrected later, moved no window.
    #[test]
    fn windows_of_the_clock_follow_a_corrected_wall_clock() {
        let s = Micros::from_secs;
        let hands = ManualClock::at(s(1_700_000_040)); // a whole minute
        let store = MemoryStore::new(MemoryOptions {
            clock: hands.clock(),
            sweep_every: None,
            ..MemoryOptions::default()
        });
        let minute = Limit::clock_window(5, s(60)).unwrap();
        let [limit, first] = [("clock", minute), ("first", Limit::fixed_window(5, s(60)).unwrap())]
            .map(|(name, limit)| store.open(&StoredLimit::new(name, limit)));
        let five = Cost::new(5).unwrap();
        assert_eq!(limit.charge("a", five).reset_after, s(60));
        assert!(first.charge("a", five).allowed);
        // 50 s forward: within the second nothing is seen of it, and then the window ends 10 s on.
        hands.step_wall(50_000_000);
        hands.advance(Micros::from_millis(1_100));
        assert_eq!(limit.charge("a", Cost::ONE).retry_after, Some(Micros::from_millis(8_900)));
        hands.advance(Micros::from_millis(8_900));
        assert!(limit.charge("a", five).allowed, "the minute is over on the wall");
        assert!(!first.charge("a", Cost::ONE).allowed, "other windows last as long as they were opened for");
        // Back by half an hour: the open window stays, and nothing is admitted a second time.
        hands.step_wall(-1_800_000_000);
        hands.advance(s(2));
        assert!(!limit.charge("a", Cost::ONE).allowed, "time does not go back for a key");
        store.sweep();
        assert!(!limit.charge("a", Cost::ONE).allowed, "nor is it forgotten");
        let other = limit.charge("b", five);
        assert!(other.allowed && other.reset_after == s(58), "{other:?}");
    }
}
