//! Fixed window: at most `limit` in each window, counted from zero when the next one opens.
//!
//! State kept: the start and the end of the open window and the count in it. With [`Align::First`] a window opens at the first charge after
//! the last one ended and lasts `window`; with [`Align::Clock`] windows start at multiples of `window` since 1970. A window
//! holds its first instant and not its end. A time before the open window counts as the window's start.
//!
//! Change: an open window keeps its start, its end and its count, whatever numbers it is charged by; the next one is opened by
//! the numbers of the first charge. Settlement: what is given back goes into the window that is open if it was taken there.
//!
//! Bounds: limit < 2^53, window ≤ ten years; a count saturates below 2^53, debts included. No division. Known weakness: a burst at a window's edge,
//! up to twice the limit within one window's length. Twins: fixed_window.lua, .sql. Cases: fixed_window.cases.

use super::{Algorithm, Taken};
use crate::bounds::{MAX_COUNT, checked_count, checked_span};
use crate::error::LimitError;
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// Where windows begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Align {
    /// At the first charge.
    #[default]
    First,
    /// At multiples of the window since 1970.
    Clock,
}

/// A fixed window: `limit`, `window` and `align`.
///
/// ```
/// use tollgate_kernel::{Algorithm, Align, Cost, FixedWindow, Micros, WindowState};
///
/// let login = FixedWindow::new(5, Micros::from_secs(60), Align::First)?;
/// let mut state = WindowState::default();
/// let now = Micros::from_secs(100);
/// assert!(login.charge(&mut state, Cost::new(5).unwrap(), now).allowed);
/// let denied = login.charge(&mut state, Cost::ONE, Micros::from_secs(130));
/// assert_eq!(denied.retry_after, Some(Micros::from_secs(30)));
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FixedWindow {
    limit: u64,
    window: Micros,
    align: Align,
}

/// The open window. An end that has passed means that none is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WindowState {
    /// When the window ends.
    pub end: Micros,
    /// What was charged in it.
    pub count: u64,
    /// When the window started.
    pub start: Micros,
}

impl FixedWindow {
    /// At most `limit` in each `window`.
    pub fn new(limit: u64, window: Micros, align: Align) -> Result<Self, LimitError> {
        Ok(FixedWindow {
            limit: checked_count("limit", limit)?,
            window: checked_span("window", window)?,
            align,
        })
    }

    /// How much fits in a window.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// How long a window lasts.
    pub const fn window(&self) -> Micros {
        self.window
    }

    /// Where windows begin.
    pub const fn align(&self) -> Align {
        self.align
    }

    /// The window that a charge at `now` would count in: the open one, or a new one with nothing in it.
    fn current(&self, state: &WindowState, now: Micros) -> WindowState {
        if now < state.end {
            return *state;
        }
        let start = match self.align {
            Align::First => now,
            Align::Clock => Micros::new(now.get() - now.get() % self.window.get()),
        };
        WindowState { end: start.saturating_add(self.window), count: 0, start }
    }
}

impl Algorithm for FixedWindow {
    type State = WindowState;

    fn peek(&self, state: &WindowState, cost: Cost, now: Micros) -> Outcome {
        self.charge(&mut state.clone(), cost, now)
    }

    fn charge(&self, state: &mut WindowState, cost: Cost, now: Micros) -> Outcome {
        let open = self.current(state, now);
        let room = self.limit.saturating_sub(open.count);
        // A clock behind the window's start sees all of it.
        let left = open.end.saturating_sub(now.max(open.start));
        let mut outcome = Outcome {
            allowed: cost.get() <= room,
            capacity: self.limit,
            remaining: room,
            retry_after: Some(left),
            reset_after: left,
            delay: Micros::ZERO,
        };
        if outcome.allowed {
            outcome.remaining = room - cost.get();
            outcome.retry_after = Some(Micros::ZERO);
            *state = WindowState { count: open.count + cost.get(), ..open };
        } else if cost.get() > self.limit {
            outcome.retry_after = None;
            if self.align == Align::First && now >= state.end {
                // No window is open and this charge opens none: there is nothing to reset.
                outcome.reset_after = Micros::ZERO;
            }
        }
        outcome
    }

    fn charged_at(&self, state: &WindowState, now: Micros) -> Micros {
        now.max(state.start)
    }

    fn give_back(&self, state: &mut WindowState, taken: Taken, amount: u64, now: Micros) {
        // Windows follow each other, so what was taken between the start and the end of one was taken from it.
        if now < state.end && state.start <= taken.at && taken.at < state.end {
            state.count = state.count.saturating_sub(amount);
        }
    }

    fn debit(&self, state: &mut WindowState, amount: u64, now: Micros) {
        // A debt of nothing opens no window.
        if amount > 0 {
            let open = self.current(state, now);
            *state = WindowState { count: open.count.saturating_add(amount).min(MAX_COUNT), ..open };
        }
    }

    /// A window of one's own may have ended just now, so the window that one joins begins anew: if it ended early, its successor
    /// would be a third one within one window's length.
    fn joined(&self, state: &WindowState, now: Micros) -> WindowState {
        match self.align {
            Align::First if now < state.end => {
                WindowState { end: now.saturating_add(self.window), start: now, ..*state }
            }
            _ => *state,
        }
    }

    fn is_fresh(&self, state: &WindowState, now: Micros) -> bool {
        now >= state.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_debt_saturates_and_a_debt_of_nothing_is_none() {
        let window = FixedWindow::new(10, Micros::from_secs(1), Align::First).unwrap();
        let mut state = WindowState::default();
        window.debit(&mut state, 0, Micros::ZERO);
        assert_eq!(state, WindowState::default());
        for _ in 0..3 {
            window.debit(&mut state, u64::MAX, Micros::ZERO);
            assert_eq!(state.count, MAX_COUNT);
        }
    }

    /// A reservation of a shorter window was given back into a later one, and a longer window's end was cut off.
    #[test]
    fn an_open_window_is_the_same_for_all_numbers() {
        let s = Micros::from_secs;
        let [long, short] = [60, 10].map(|secs| FixedWindow::new(10, s(secs), Align::First).unwrap());
        let mut state = WindowState::default();
        assert!(long.charge(&mut state, Cost::new(10).unwrap(), s(100)).allowed);
        let denied = short.charge(&mut state, Cost::ONE, s(130));
        assert_eq!(
            (denied.allowed, denied.retry_after),
            (false, Some(s(30))),
            "as long as it was opened for"
        );
        let taken = Taken { cost: 10, at: s(100) };
        short.give_back(&mut state.clone(), taken, 10, s(140));
        assert!(short.charge(&mut state, Cost::ONE, s(160)).allowed);
        assert_eq!(state.end, s(170));
        let before = state;
        long.give_back(&mut state, taken, 10, s(165));
        assert_eq!(state, before, "never into a later window");
    }

    #[test]
    fn a_window_that_is_joined_begins_anew_unless_the_clock_says_when() {
        let (second, count) = (Micros::from_secs(1), 7);
        let ms = Micros::from_millis;
        let open = WindowState { end: ms(1_200), count, start: ms(200) };
        for (align, now, start) in [
            (Align::First, 500, 500),
            (Align::First, 1_199, 1_199),
            (Align::First, 1_200, 200),
            (Align::Clock, 500, 200),
        ] {
            let window = FixedWindow::new(10, second, align).unwrap();
            let joined = window.joined(&open, ms(now));
            let expected = WindowState { end: ms(start + 1_000), count, start: ms(start) };
            assert_eq!(joined, expected, "{align:?} at {now}");
        }
        let bucket = crate::TokenBucket::new("1/s".parse().unwrap(), 5).unwrap();
        let state = crate::BucketState { full_at: 3_000_000, ..Default::default() };
        assert_eq!(bucket.joined(&state, second), state, "time tells it all");
    }
}
