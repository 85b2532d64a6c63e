//! Sliding window: at most `limit` in any span of `window`, exactly, from a log of what was charged when.
//!
//! State kept: the log, oldest first, as (time, cost); charges at the same instant share an entry, so one key holds at most
//! one entry a microsecond and, debts aside, never more entries than its limit. An entry counts while `now - time < window`
//! and is gone at exactly `time + window`. A time before the newest entry counts as the newest entry's.
//!
//! Bounds: limit < 2^53, window ≤ ten years; the total saturates below 2^53, debts included. No division. Known weakness: memory, one entry a charge; where
//! an estimate is enough, sliding_window_counter keeps two numbers. Twins: sliding_window.lua, .sql. Cases: sliding_window.cases.

use std::collections::VecDeque;

use super::{Algorithm, Look};
use crate::limit::{Limit, LimitError, MAX_COUNT, checked_count, checked_span};
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// An exact sliding window: `limit` and `window`.
///
/// ```
/// use tollgate_kernel::{Algorithm, Cost, LogState, Micros, SlidingWindow};
///
/// let window = SlidingWindow::new(2, Micros::from_secs(1))?;
/// let mut log = LogState::default();
/// let ms = Micros::from_millis;
/// assert!(window.charge(&mut log, Cost::ONE, ms(0)).allowed);
/// assert!(window.charge(&mut log, Cost::ONE, ms(400)).allowed);
/// assert_eq!(window.charge(&mut log, Cost::ONE, ms(700)).retry_after, Some(ms(300)));
/// assert!(window.charge(&mut log, Cost::ONE, ms(1000)).allowed);
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlidingWindow {
    limit: u64,
    window: Micros,
}

/// What was charged at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// When.
    pub at: Micros,
    /// How much.
    pub cost: u64,
}

/// The log of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogState {
    /// Oldest first, each later than the one before.
    entries: VecDeque<LogEntry>,
    /// The sum of all costs in `entries`, those that have run out included.
    total: u64,
}

impl LogState {
    /// The entries, oldest first; some may have run out.
    pub fn entries(&self) -> impl Iterator<Item = LogEntry> + '_ {
        self.entries.iter().copied()
    }

    /// How many entries are kept: what the log costs in memory.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The newest time in the log, or `now`, whichever is later: time never goes back for a key.
    fn not_before_newest(&self, now: Micros) -> Micros {
        self.entries.back().map_or(now, |newest| newest.at.max(now))
    }

    fn push(&mut self, at: Micros, cost: u64) {
        self.total = self.total.saturating_add(cost);
        match self.entries.back_mut() {
            Some(newest) if newest.at == at => newest.cost = newest.cost.saturating_add(cost),
            _ => self.entries.push_back(LogEntry { at, cost }),
        }
    }
}

impl SlidingWindow {
    /// At most `limit` in any span of `window`.
    pub fn new(limit: u64, window: Micros) -> Result<Self, LimitError> {
        Ok(SlidingWindow { limit: checked_count("limit", limit)?, window: checked_span("window", window)? })
    }

    /// How much fits in the window.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// How long the window is.
    pub const fn window(&self) -> Micros {
        self.window
    }

    /// When an entry stops counting.
    fn end(&self, entry: &LogEntry) -> Micros {
        entry.at.saturating_add(self.window)
    }

    /// What still counts at `now`.
    fn used(&self, state: &LogState, now: Micros) -> u64 {
        let gone = state.entries.iter().take_while(|entry| self.end(entry) <= now);
        state.total - gone.map(|entry| entry.cost).sum::<u64>()
    }

    /// Drops the entries that have run out.
    fn prune(&self, state: &mut LogState, now: Micros) {
        while let Some(oldest) = state.entries.front().filter(|entry| self.end(entry) <= now) {
            state.total -= oldest.cost;
            state.entries.pop_front();
        }
    }

    /// The smallest wait after which `cost`, which does not fit now but can, would fit.
    fn wait(&self, state: &LogState, cost: Cost, now: Micros) -> Micros {
        let mut used = state.total;
        let mut entries = state.entries.iter();
        let enough = entries.find(|entry| {
            used -= entry.cost;
            used + cost.get() <= self.limit
        });
        enough.map_or(Micros::ZERO, |entry| self.end(entry).saturating_sub(now))
    }
}

impl Algorithm for SlidingWindow {
    type State = LogState;

    fn peek(&self, state: &LogState, cost: Cost, now: Micros) -> Outcome {
        let now = state.not_before_newest(now);
        let used = self.used(state, now);
        // A charge that fits waits for nothing, and one that never can waits for nothing that helps.
        let waits = cost.get() <= self.limit && cost.get() > self.limit.saturating_sub(used);
        let wait = if waits { self.wait(state, cost, now) } else { Micros::ZERO };
        let last = state.entries.back().map_or(Micros::ZERO, |newest| self.end(newest).saturating_sub(now));
        Look { used, wait, last }.answer(self.limit, self.window, cost)
    }

    fn charge(&self, state: &mut LogState, cost: Cost, now: Micros) -> Outcome {
        let outcome = self.peek(state, cost, now);
        if outcome.allowed {
            let now = state.not_before_newest(now);
            self.prune(state, now);
            state.push(now, cost.get());
        }
        outcome
    }

    fn charged_at(&self, state: &LogState, now: Micros) -> Micros {
        state.not_before_newest(now)
    }

    fn give_back(&self, state: &mut LogState, amount: u64, charged_at: Micros, _now: Micros) {
        let Ok(index) = state.entries.binary_search_by_key(&charged_at, |entry| entry.at) else { return };
        let entry = &mut state.entries[index];
        let returned = amount.min(entry.cost);
        entry.cost -= returned;
        state.total -= returned;
        if entry.cost == 0 {
            state.entries.remove(index);
        }
    }

    /// The newest charges are undone first: they would have counted longest.
    fn refund(&self, state: &mut LogState, amount: u64, now: Micros) {
        let mut left = amount;
        while let Some(newest) = state.entries.back().copied().filter(|_| left > 0) {
            self.give_back(state, left, newest.at, now);
            left = left.saturating_sub(newest.cost);
        }
    }

    fn debit(&self, state: &mut LogState, amount: u64, now: Micros) {
        let now = state.not_before_newest(now);
        self.prune(state, now);
        let most = MAX_COUNT.saturating_sub(state.total);
        if amount > 0 && most > 0 {
            state.push(now, amount.min(most));
        }
    }

    fn is_fresh(&self, state: &LogState, now: Micros) -> bool {
        state.entries.back().is_none_or(|newest| self.end(newest) <= now)
    }
}

impl From<SlidingWindow> for Limit {
    fn from(window: SlidingWindow) -> Self {
        Limit::SlidingWindow(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Micros = Micros::from_secs(1);

    #[test]
    fn a_log_is_no_longer_than_it_must_be() {
        let window = SlidingWindow::new(9, SECOND).unwrap();
        let ms = Micros::from_millis;
        let mut log = LogState::default();
        assert!(log.is_empty());
        for at in [0, 0, 400, 700, 700] {
            assert!(window.charge(&mut log, Cost::ONE, ms(at)).allowed);
        }
        let entry = |at, cost| LogEntry { at: ms(at), cost };
        assert_eq!(log.entries().collect::<Vec<_>>(), [entry(0, 2), entry(400, 1), entry(700, 2)]);
        window.give_back(&mut log, 1, ms(400), ms(700));
        assert_eq!(log.len(), 2, "what was given back whole is gone");
        assert!(window.charge(&mut log, Cost::ONE, ms(1000)).allowed);
        assert_eq!(log.entries().collect::<Vec<_>>(), [entry(700, 2), entry(1000, 1)], "so is what ran out");
    }

    #[test]
    fn a_debt_saturates() {
        let window = SlidingWindow::new(9, SECOND).unwrap();
        let mut log = LogState::default();
        for at in 0..5 {
            window.debit(&mut log, u64::MAX, Micros::new(at));
        }
        assert_eq!(log.entries().map(|entry| entry.cost).sum::<u64>(), MAX_COUNT);
        assert_eq!(window.peek(&log, Cost::ONE, Micros::new(5)).retry_after, Some(Micros::new(999_995)));
    }
}
