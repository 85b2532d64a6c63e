//! Sliding window counter: at most `limit` in a span of `window`, by an estimate from two counters.
//!
//! State kept: the start of the current window (windows are aligned to multiples of `window` since 1970), what was charged in
//! it, and what was charged in the one before. With e the time into the current window, the estimate weighs the previous
//! window by the part of it that a span ending now still covers: `prev * (W - e) + cur * W`, compared with `limit * W` so that
//! nothing is divided. A time before the current window counts as its start.
//!
//! Bounds: `limit * window` ≤ 2^62; counters saturate below 2^53, so 128 bits hold every product. Rounding: what is left rounds
//! down, waits are the smallest sufficient whole µs. Known weakness: the previous window is taken as evenly spread, so a span
//! may truly hold more than `limit`, though less than twice as much. Twins: sliding_window_counter.lua, .sql. Cases: sliding_window_counter.cases.

use super::Algorithm;
use crate::limit::{Limit, LimitError, MAX_COUNT, checked_count, checked_product, checked_span};
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

/// The two counters of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CounterState {
    /// When the current window started.
    pub start: Micros,
    /// What was charged in the window before it.
    pub prev: u64,
    /// What was charged in it.
    pub cur: u64,
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

    /// The counters as of `now`, and the time into the current window in µs.
    fn rolled(&self, state: &CounterState, now: Micros) -> (CounterState, u64) {
        let now = now.max(state.start).get();
        let window = self.window.get();
        let into = now % window;
        let start = Micros::new(now - into);
        // Of a window whose length was changed since, the start may lie ahead: then the counters stay as they are.
        let (prev, cur) = match start.saturating_sub(state.start).get() / window {
            0 => (state.prev, state.cur),
            1 => (state.cur, 0),
            _ => (0, 0),
        };
        (CounterState { start, prev, cur }, into)
    }

    /// How far back a window of `count` may still reach so that it leaves `room` units of 1/W: floor(room / count) µs, and at
    /// most all of it.
    fn reach(&self, room: u128, count: u64) -> u64 {
        let window = u128::from(self.window.get());
        let reach = room.checked_div(u128::from(count)).map_or(window, |reach| reach.min(window));
        u64::try_from(reach).unwrap_or(u64::MAX)
    }

    /// The smallest wait after which `cost`, which does not fit now but can, would fit.
    fn wait(&self, counters: &CounterState, into: u64, cost: Cost) -> Micros {
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
        let (mut counters, into) = self.rolled(state, now);
        let window = self.window.get();
        let units = |count: u64, us: u64| u128::from(count) * u128::from(us);
        let used = units(counters.prev, window - into) + units(counters.cur, window);
        let room = units(self.limit, window).saturating_sub(used);
        let price = units(cost.get(), window);
        let allowed = cost.get() <= self.limit && price <= room;
        let retry_after = if allowed {
            *state = CounterState { cur: counters.cur + cost.get(), ..counters };
            counters = *state;
            Some(Micros::ZERO)
        } else if cost.get() > self.limit {
            None
        } else {
            Some(self.wait(&counters, into, cost))
        };
        let left = if allowed { room - price } else { room };
        Outcome {
            allowed,
            capacity: self.limit,
            // At most the limit, so it fits.
            remaining: u64::try_from(left / u128::from(window)).unwrap_or(self.limit),
            retry_after,
            reset_after: match (counters.prev, counters.cur) {
                (0, 0) => Micros::ZERO,
                (_, 0) => Micros::new(window - into),
                _ => Micros::new(2 * window - into),
            },
            delay: Micros::ZERO,
        }
    }

    fn charged_at(&self, state: &CounterState, now: Micros) -> Micros {
        now.max(state.start)
    }

    fn give_back(&self, state: &mut CounterState, amount: u64, charged_at: Micros, now: Micros) {
        let (mut counters, _) = self.rolled(state, now);
        let charged_in = charged_at.get() - charged_at.get() % self.window.get();
        if charged_in == counters.start.get() {
            counters.cur = counters.cur.saturating_sub(amount);
        } else if charged_in.checked_add(self.window.get()) == Some(counters.start.get()) {
            counters.prev = counters.prev.saturating_sub(amount);
        }
        *state = counters;
    }

    /// What this window counts goes first, then what the last one did.
    fn refund(&self, state: &mut CounterState, amount: u64, now: Micros) {
        let (counters, _) = self.rolled(state, now);
        let of_prev = amount.saturating_sub(counters.cur);
        *state = CounterState {
            cur: counters.cur.saturating_sub(amount),
            prev: counters.prev.saturating_sub(of_prev),
            ..counters
        };
    }

    fn debit(&self, state: &mut CounterState, amount: u64, now: Micros) {
        let (counters, _) = self.rolled(state, now);
        *state = CounterState { cur: counters.cur.saturating_add(amount).min(MAX_COUNT), ..counters };
    }

    fn is_fresh(&self, state: &CounterState, now: Micros) -> bool {
        // With a clock behind the state the counters are as they are; rolled() sees to that.
        let (counters, _) = self.rolled(state, now);
        counters.prev == 0 && counters.cur == 0 && now >= state.start
    }
}

impl From<SlidingWindowCounter> for Limit {
    fn from(window: SlidingWindowCounter) -> Self {
        Limit::SlidingWindowCounter(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A start that is no multiple of the window was subtracted from an earlier one, which overflowed.
    #[test]
    fn a_window_of_another_length_keeps_what_was_counted() {
        let window = SlidingWindowCounter::new(10, Micros::from_secs(60)).unwrap();
        let at = Micros::from_secs(100);
        let mut state = CounterState { start: at, prev: 0, cur: 4 };
        assert_eq!(window.charge(&mut state, Cost::ONE, at).remaining, 5);
        assert_eq!(state, CounterState { start: Micros::from_secs(60), prev: 0, cur: 5 });
    }

    #[test]
    fn a_debt_saturates() {
        let window = SlidingWindowCounter::new(10, Micros::from_secs(1)).unwrap();
        let mut state = CounterState::default();
        for _ in 0..3 {
            window.debit(&mut state, u64::MAX, Micros::ZERO);
            assert_eq!(state.cur, MAX_COUNT);
        }
    }

    /// Before its window a key counts as at its start; a fresh one would not.
    #[test]
    fn a_key_is_not_fresh_before_it_began() {
        let window = SlidingWindowCounter::new(10, Micros::from_secs(1)).unwrap();
        let state = CounterState { start: Micros::from_secs(9), prev: 0, cur: 0 };
        assert!(!window.is_fresh(&state, Micros::from_secs(8)));
        assert!(window.is_fresh(&state, Micros::from_secs(9)));
    }
}
