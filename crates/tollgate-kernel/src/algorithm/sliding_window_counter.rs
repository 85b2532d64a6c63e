//! Sliding window counter: at most `limit` in a span of `window`, by an estimate from two counters.
//!
//! State kept: the start of the current window (windows are aligned to multiples of `window` since 1970), what was charged in
//! it, and what was charged in the one before. With e the time into the current window, the estimate weighs the previous
//! window by the part of it that a span ending now still covers: `prev * (W - e) + cur * W`, compared with `limit * W` so that
//! nothing is divided. A time before the current window counts as its start.
//!
//! Change: counts belong to the window length that they were charged by, and slide out by it. Beside the counts of the length
//! that was charged last the state keeps those of one other length, and an estimate is the sum of both, each rounded up to whole
//! units but the own. Versions with two lengths that are live at the same time thus each count all that was charged. A third
//! length finds the older counts added to its own, as if they had been charged just now: counted for longer, never for less.
//! Settlement: what is given back goes into the counts of the length that it was charged by, if its window still counts.
//!
//! Bounds: `limit * window` ≤ 2^62; counters saturate below 2^53, so 128 bits hold every product. Rounding: what is left rounds
//! down, waits are the smallest sufficient whole µs. Known weakness: the previous window is taken as evenly spread, so a span
//! may truly hold more than `limit`, though less than twice as much. Twins: sliding_window_counter.lua, .sql. Cases: sliding_window_counter.cases.

use super::{Algorithm, Taken};
use crate::bounds::{MAX_COUNT, checked_count, checked_product, checked_span};
use crate::error::LimitError;
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// A sliding window counter: `limit` and `window`.
///
/// ```
/// use tollgate_kernel::{Algorithm, Cost, CounterState, Micros, SlidingWindowCounter};
///
/// let window = SlidingWindowCounter::new(10, Micros::from_secs(1))?;
/// let mut state = CounterState::default();
/// assert!(window.charge(&mut state, Cost::new(10).unwrap(), Micros::from_millis(500)).allowed);
/// // A quarter into the next window three quarters of the ten still count.
/// let outcome = window.charge(&mut state, Cost::new(2).unwrap(), Micros::from_millis(1250));
/// assert!(outcome.allowed);
/// assert_eq!(outcome.remaining, 0);
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindowCounter {
    limit: u64,
    window: Micros,
}

/// The two counters of one key, by the length of window that it was charged by last, and those by another length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterState {
    /// By the length that was charged last.
    pub newer: Counts,
    /// By another length, while they count.
    pub older: Counts,
}

/// What was charged in the current window of one length and in the one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The length of the windows. Zero where nothing was ever charged, and then so is all the rest.
    pub window: Micros,
    /// When the current window started.
    pub start: Micros,
    /// What was charged in the window before it.
    pub prev: u64,
    /// What was charged in it.
    pub cur: u64,
}

impl Counts {
    /// The counts as of `now`, and the time into the current window in µs.
    fn rolled(&self, now: Micros) -> (Counts, u64) {
        let window = self.window.get();
        if window == 0 {
            return (*self, 0);
        }
        let now = now.max(self.start).get();
        let into = now % window;
        let start = Micros::new(now - into);
        let (prev, cur) = match start.saturating_sub(self.start).get() / window {
            0 => (self.prev, self.cur),
            1 => (self.cur, 0),
            _ => (0, 0),
        };
        (Counts { window: self.window, start, prev, cur }, into)
    }

    /// What counts at `now`, rounded up to whole units.
    fn estimate(&self, now: Micros) -> u64 {
        let (counts, into) = self.rolled(now);
        let window = counts.window.get();
        if window == 0 {
            return 0;
        }
        let sliding = u128::from(counts.prev) * u128::from(window - into);
        let sliding = u64::try_from(sliding.div_ceil(u128::from(window))).unwrap_or(u64::MAX);
        sliding.saturating_add(counts.cur)
    }

    /// The time until nothing counts any more.
    fn reset_after(&self, now: Micros) -> Micros {
        let (counts, into) = self.rolled(now);
        let window = counts.window.get();
        Micros::new(match (counts.prev, counts.cur) {
            (0, 0) => 0,
            (_, 0) => window - into,
            _ => 2 * window - into,
        })
    }

    /// Whether nothing counts at `now` or later. Before its window a count says more than none would.
    fn is_fresh(&self, now: Micros) -> bool {
        let (counts, _) = self.rolled(now);
        counts.prev == 0 && counts.cur == 0 && now >= self.start
    }

    /// Takes off what was charged at an instant, where that still counts.
    fn give_back(&mut self, amount: u64, at: Micros, now: Micros) {
        let (mut counts, _) = self.rolled(now);
        let charged_in = at.get() - at.get() % self.window.get().max(1);
        if charged_in == counts.start.get() {
            counts.cur = counts.cur.saturating_sub(amount);
        } else if charged_in.checked_add(self.window.get()) == Some(counts.start.get()) {
            counts.prev = counts.prev.saturating_sub(amount);
        }
        *self = counts;
    }

    fn debit(&mut self, amount: u64, now: Micros) {
        let (counts, _) = self.rolled(now);
        *self = Counts { cur: counts.cur.saturating_add(amount).min(MAX_COUNT), ..counts };
    }

    /// Takes off what counts now, the current window first. Answers what is left of the amount.
    fn refund(&mut self, amount: u64, now: Micros) -> u64 {
        let (counts, _) = self.rolled(now);
        let of_prev = amount.saturating_sub(counts.cur);
        let (cur, prev) = (counts.cur.saturating_sub(amount), counts.prev.saturating_sub(of_prev));
        *self = Counts { cur, prev, ..counts };
        of_prev.saturating_sub(counts.prev)
    }
}

impl SlidingWindowCounter {
    /// At most `limit` in about any span of `window`.
    pub fn new(limit: u64, window: Micros) -> Result<Self, LimitError> {
        let (limit, window) = (checked_count("limit", limit)?, checked_span("window", window)?);
        checked_product("limit", limit, window.get())?;
        Ok(SlidingWindowCounter { limit, window })
    }

    /// How much fits in the window.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// How long the window is.
    pub const fn window(&self) -> Micros {
        self.window
    }

    /// The state with the counts of this window first, rolled to `now`, and the time into the current window in µs.
    fn adopted(&self, state: &CounterState, now: Micros) -> (CounterState, u64) {
        let CounterState { mut newer, mut older } = *state;
        let now = now.max(newer.start).max(older.start);
        if newer.window != self.window {
            if older.window == self.window || newer.is_fresh(now) {
                (newer, older) = (older, newer);
            }
            if newer.window != self.window {
                // Neither is this window's: the newer becomes the other one, and what the older counts becomes its own.
                let folded = match newer.window == Micros::ZERO || newer.is_fresh(now) {
                    true => 0,
                    false => {
                        let folded = older.estimate(now);
                        older = newer;
                        folded
                    }
                };
                newer = Counts { window: self.window, start: Micros::ZERO, prev: 0, cur: 0 };
                newer = Counts { cur: folded.min(MAX_COUNT), ..newer.rolled(now).0 };
            }
        }
        if older.is_fresh(now) {
            older = Counts::default();
        }
        let (newer, into) = newer.rolled(now);
        (CounterState { newer, older }, into)
    }

    /// How far back a window of `count` may still reach so that it leaves `room` units of 1/W: floor(room / count) µs, and at
    /// most all of it.
    fn reach(&self, room: u128, count: u64) -> u64 {
        let window = u128::from(self.window.get());
        let reach = room.checked_div(u128::from(count)).map_or(window, |reach| reach.min(window));
        u64::try_from(reach).unwrap_or(u64::MAX)
    }

    /// The smallest wait after which `cost`, which does not fit now but can, would fit.
    fn wait(&self, state: &CounterState, into: u64, cost: Cost, now: Micros) -> Micros {
        if state.older == Counts::default() {
            self.wait_alone(&state.newer, into, cost)
        } else {
            self.wait_beside(state, cost, now)
        }
    }

    /// The same where counts of two lengths slide out at once: they only ever become less, so the moment is found by halving.
    fn wait_beside(&self, state: &CounterState, cost: Cost, now: Micros) -> Micros {
        let now = now.max(state.newer.start).max(state.older.start);
        let fits_after = |wait: u64| {
            let (state, into) = self.adopted(state, now.saturating_add(Micros::new(wait)));
            self.price(cost) <= self.room(&state, into, now.saturating_add(Micros::new(wait)))
        };
        let (mut short, mut enough) = (0, self.reset_after(state, now).get());
        while enough - short > 1 {
            let middle = short + (enough - short) / 2;
            if fits_after(middle) { enough = middle } else { short = middle }
        }
        Micros::new(enough)
    }

    fn reset_after(&self, state: &CounterState, now: Micros) -> Micros {
        let now = now.max(state.newer.start).max(state.older.start);
        state.newer.reset_after(now).max(state.older.reset_after(now))
    }

    /// Free units of 1/W where so much time has passed in the current window.
    fn room(&self, state: &CounterState, into: u64, now: Micros) -> u128 {
        let window = self.window.get();
        let units = |count: u64, us: u64| u128::from(count) * u128::from(us);
        let CounterState { newer, older } = state;
        let used =
            units(newer.prev, window - into) + units(newer.cur, window) + units(older.estimate(now), window);
        units(self.limit, window).saturating_sub(used)
    }

    fn price(&self, cost: Cost) -> u128 {
        u128::from(cost.get()) * u128::from(self.window.get())
    }

    fn wait_alone(&self, counters: &Counts, into: u64, cost: Cost) -> Micros {
        let window = self.window.get();
        let left = window - into;
        let units = |count: u64| u128::from(count) * u128::from(window);
        let wait = match self.limit.checked_sub(counters.cur.saturating_add(cost.get())) {
            // In this window, once enough of the previous one has slid out; at its end none of it is left.
            Some(room) => left - self.reach(units(room), counters.prev).min(left),
            // In the next window, in which the current count is the one that slides out.
            None => left + (window - self.reach(units(self.limit - cost.get()), counters.cur)),
        };
        Micros::new(wait)
    }
}

impl Algorithm for SlidingWindowCounter {
    type State = CounterState;

    fn peek(&self, state: &CounterState, cost: Cost, now: Micros) -> Outcome {
        self.charge(&mut state.clone(), cost, now)
    }

    fn charge(&self, state: &mut CounterState, cost: Cost, now: Micros) -> Outcome {
        let (mut adopted, into) = self.adopted(state, now);
        let now = now.max(adopted.newer.start).max(adopted.older.start);
        let (room, price) = (self.room(&adopted, into, now), self.price(cost));
        let allowed = cost.get() <= self.limit && price <= room;
        let retry_after = if allowed {
            adopted.newer.cur += cost.get();
            *state = adopted;
            Some(Micros::ZERO)
        } else if cost.get() > self.limit {
            None
        } else {
            Some(self.wait(&adopted, into, cost, now))
        };
        let left = if allowed { room - price } else { room };
        Outcome {
            allowed,
            capacity: self.limit,
            // At most the limit, so it fits.
            remaining: u64::try_from(left / u128::from(self.window.get())).unwrap_or(self.limit),
            retry_after,
            reset_after: self.reset_after(&adopted, now),
            delay: Micros::ZERO,
        }
    }

    fn charged_at(&self, state: &CounterState, now: Micros) -> Micros {
        now.max(state.newer.start).max(state.older.start)
    }

    fn give_back(&self, state: &mut CounterState, taken: Taken, amount: u64, now: Micros) {
        let CounterState { newer, older } = state;
        if let Some(counts) = [newer, older].into_iter().find(|counts| counts.window == self.window) {
            counts.give_back(amount, taken.at, now);
        }
    }

    fn refund(&self, state: &mut CounterState, amount: u64, now: Micros) {
        let left = state.newer.refund(amount, now);
        state.older.refund(left, now);
    }

    fn debit(&self, state: &mut CounterState, amount: u64, now: Micros) {
        if amount == 0 {
            return;
        }
        let is_own = |counts: &Counts| counts.window == self.window;
        if state.newer.window == Micros::ZERO {
            *state = self.adopted(state, now).0;
        }
        let is_older = is_own(&state.older) && !is_own(&state.newer);
        let counts = if is_older { &mut state.older } else { &mut state.newer };
        counts.debit(amount, now);
    }

    fn is_fresh(&self, state: &CounterState, now: Micros) -> bool {
        state.newer.is_fresh(now) && state.older.is_fresh(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window of another length took the counts over as if they were its own: a shorter one forgot them, a settlement by
    /// the old length wiped them.
    #[test]
    fn windows_of_two_lengths_count_all_that_was_charged() {
        let s = Micros::from_secs;
        let [long, short] = [60, 10].map(|secs| SlidingWindowCounter::new(10, s(secs)).unwrap());
        let mut state = CounterState::default();
        let four = Cost::new(4).unwrap();
        assert_eq!(long.charge(&mut state, four, s(605)).remaining, 6);
        assert_eq!(short.charge(&mut state, four, s(606)).remaining, 2);
        assert_eq!(long.peek(&state, Cost::MAX, s(606)).remaining, 2);
        // At 620 the ten seconds have slid out; of the minute nothing has before 660.
        assert_eq!(short.peek(&state, Cost::MAX, s(620)).remaining, 6);
        assert_eq!(long.charge(&mut state, Cost::new(6).unwrap(), s(620)).remaining, 0);
        let denied = short.charge(&mut state, Cost::ONE, s(621));
        assert_eq!(denied.retry_after, Some(s(45)), "a tenth of the minute has slid out at 666");
        let mut settled = state;
        short.give_back(&mut settled, Taken { cost: 4, at: s(606) }, 4, s(621));
        assert_eq!(settled, state, "its window counts no more");
        long.give_back(&mut settled, Taken { cost: 4, at: s(605) }, 3, s(621));
        assert_eq!(short.peek(&settled, Cost::MAX, s(621)).remaining, 3);
        assert!(!long.is_fresh(&state, s(719)) && long.is_fresh(&state, s(720)));
    }

    /// What a third length finds is counted as its own.
    #[test]
    fn a_third_length_forgets_nothing() {
        let s = Micros::from_secs;
        let mut state = CounterState::default();
        for (secs, left) in [(60, 7), (10, 4), (30, 1), (20, 1)] {
            let window = SlidingWindowCounter::new(10, s(secs)).unwrap();
            let cost = Cost::new(3).unwrap();
            let outcome = window.charge(&mut state, cost, s(605));
            assert_eq!((outcome.remaining, outcome.allowed), (left, secs != 20), "{secs}");
        }
    }

    #[test]
    fn a_debt_saturates() {
        let window = SlidingWindowCounter::new(10, Micros::from_secs(1)).unwrap();
        let mut state = CounterState::default();
        for _ in 0..3 {
            window.debit(&mut state, u64::MAX, Micros::ZERO);
            assert_eq!(state.newer.cur, MAX_COUNT);
        }
    }

    /// Before its window a key counts as at its start; a fresh one would not.
    #[test]
    fn a_key_is_not_fresh_before_it_began() {
        let window = SlidingWindowCounter::new(10, Micros::from_secs(1)).unwrap();
        let (window_us, start) = (Micros::from_secs(1), Micros::from_secs(9));
        let newer = Counts { window: window_us, start, prev: 0, cur: 0 };
        let state = CounterState { newer, older: Counts::default() };
        assert!(!window.is_fresh(&state, Micros::from_secs(8)));
        assert!(window.is_fresh(&state, Micros::from_secs(9)));
    }
}
