//! Sliding window: at most `limit` in any span of `window`, exactly, from a log of what was charged when.
//!
//! State kept: the log, oldest first, as (time, cost); charges at the same instant share an entry, so one key holds at most
//! one entry a microsecond and, debts aside, never more entries than its limit and 64 besides. An entry counts while
//! `now - time < window` and is gone at exactly `time + window`. A time before the newest entry counts as the newest entry's.
//! Sums are kept by the block (entries.rs), so no charge walks the log.
//!
//! Change: entries stay, and each version of a limit counts those in its own window. The log keeps what the longest window that
//! it was charged by may count (`keep`); what is out of the own window and too much to keep is merged into later entries, so
//! that a longer window counts it for longer and never for less. Settlement: what is given back shrinks the entry it was in.
//!
//! Bounds: limit < 2^53, window ≤ ten years; the total saturates below 2^53, debts included. No division. Known weakness: memory, one entry a charge; where
//! an estimate is enough, sliding_window_counter keeps two numbers. Twins: sliding_window.lua, .sql. Cases: sliding_window.cases.

use super::entries::{Entries, Entry};
use super::{Algorithm, EntriesReading, Taken};
use crate::bounds::{MAX_COUNT, checked_count, checked_span};
use crate::error::LimitError;
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

/// The charges at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// When.
    pub at: Micros,
    /// How much.
    pub cost: u64,
}

impl Entry for LogEntry {
    fn instant(&self) -> Micros {
        self.at
    }

    fn cost(&self) -> u64 {
        self.cost
    }

    fn cost_mut(&mut self) -> &mut u64 {
        &mut self.cost
    }
}

/// How many entries above its limit a log keeps for versions of the limit with a longer window.
const SPARE_ENTRIES: u64 = 64;

/// The log of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogState {
    /// Each later than the one before.
    entries: Entries<LogEntry>,
    /// The longest window that the log was charged by.
    keep: Micros,
}

impl LogState {
    /// The entries, oldest first; some may have run out.
    pub fn entries(&self) -> impl Iterator<Item = LogEntry> + '_ {
        self.entries.iter()
    }

    /// How many entries are kept: what the log costs in memory.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.len() == 0
    }

    /// The newest time in the log, or `now`, whichever is later: time never goes back for a key.
    fn not_before_newest(&self, now: Micros) -> Micros {
        self.entries.last().map_or(now, |newest| newest.at.max(now))
    }

    fn push(&mut self, at: Micros, cost: u64) {
        match self.entries.last() {
            Some(newest) if newest.at == at => self.entries.add_to_last(cost),
            _ => self.entries.insert(LogEntry { at, cost }),
        }
    }

    /// Keeps the entries that a window may count, and drops those that no window of its charges counts any more.
    fn keep_for(&mut self, window: Micros, now: Micros) {
        self.keep = self.keep.max(window);
        if let Some(gone) = now.get().checked_sub(self.keep.get()) {
            self.entries.drop_until(Micros::new(gone));
        }
        if self.is_empty() {
            self.keep = window;
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

    /// The sum of the entries that have expired at `now`.
    fn gone(&self, state: &LogState, now: Micros) -> u64 {
        let gone = now.get().checked_sub(self.window.get());
        gone.map_or(0, |gone| state.entries.sum_until(Micros::new(gone)))
    }
}

impl Algorithm for SlidingWindow {
    type State = LogState;

    fn peek(&self, state: &LogState, cost: Cost, now: Micros) -> Outcome {
        let now = state.not_before_newest(now);
        let gone = self.gone(state, now);
        let used = state.entries.total() - gone;
        // A charge that fits waits for nothing, and for a charge that can never fit no wait helps.
        let room = self.limit.saturating_sub(used);
        let wait = match cost.get() <= self.limit && cost.get() > room {
            true => state.entries.first_to_sum(gone + (used + cost.get() - self.limit)),
            false => None,
        };
        let wait = wait.map_or(Micros::ZERO, |at| at.saturating_add(self.window).saturating_sub(now));
        let last = state.entries.last().map_or(Micros::ZERO, |newest| self.end(&newest).saturating_sub(now));
        EntriesReading { used, wait, last }.answer(self.limit, self.window, cost)
    }

    fn charge(&self, state: &mut LogState, cost: Cost, now: Micros) -> Outcome {
        let outcome = self.peek(state, cost, now);
        if outcome.allowed {
            self.take(state, cost.get(), now);
        } else {
            self.adopt(state, now);
        }
        outcome
    }

    /// From now on the log keeps what this window may count.
    fn adopt(&self, state: &mut LogState, _now: Micros) {
        if !state.is_empty() {
            state.keep = state.keep.max(self.window);
        }
    }

    fn charged_at(&self, state: &LogState, now: Micros) -> Micros {
        state.not_before_newest(now)
    }

    fn give_back(&self, state: &mut LogState, taken: Taken, amount: u64, _now: Micros) {
        state.entries.reduce(taken.at, amount, |_| true);
    }

    /// The newest charges are undone first: they would have counted longest.
    fn refund(&self, state: &mut LogState, amount: u64, _now: Micros) {
        let mut left = amount;
        while let Some(newest) = state.entries.last().filter(|_| left > 0) {
            left -= state.entries.reduce(newest.at, left, |_| true);
        }
    }

    fn debit(&self, state: &mut LogState, amount: u64, now: Micros) {
        let now = state.not_before_newest(now);
        state.keep_for(self.window, now);
        let most = MAX_COUNT.saturating_sub(state.entries.total());
        if amount > 0 && most > 0 {
            state.push(now, amount.min(most));
        }
    }

    fn is_fresh(&self, state: &LogState, now: Micros) -> bool {
        let keep = state.keep.max(self.window);
        state.entries.last().is_none_or(|newest| newest.at.saturating_add(keep) <= now)
    }
}

impl SlidingWindow {
    /// Enters a charge that fits.
    fn take(&self, state: &mut LogState, cost: u64, now: Micros) {
        let now = state.not_before_newest(now);
        state.keep_for(self.window, now);
        state.push(now, cost);
        let own = Micros::new(now.get().saturating_sub(self.window.get()));
        let most = usize::try_from(self.limit.saturating_add(SPARE_ENTRIES)).unwrap_or(usize::MAX);
        // Each charge adds one entry, so two merged make room however many there are.
        for _ in 0..2 {
            if state.len() <= most || now < self.window || !state.entries.merge_oldest_until(own) {
                break;
            }
        }
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
        window.give_back(&mut log, Taken { cost: 1, at: ms(400) }, 1, ms(700));
        assert_eq!(log.len(), 2, "what was given back whole is gone");
        assert!(window.charge(&mut log, Cost::ONE, ms(1000)).allowed);
        assert_eq!(log.entries().collect::<Vec<_>>(), [entry(700, 2), entry(1000, 1)], "so is what ran out");
    }

    /// Regression: a short window dropped what a long one still counted, and admitted its limit again and again.
    #[test]
    fn a_shorter_window_drops_nothing_that_a_longer_one_counts() {
        let (long, short) =
            (SlidingWindow::new(10, Micros::from_secs(60)).unwrap(), SlidingWindow::new(10, SECOND).unwrap());
        let ten = Cost::new(10).unwrap();
        let mut log = LogState::default();
        assert!(long.charge(&mut log, ten, Micros::from_secs(100)).allowed);
        for at in 102..159 {
            assert!(short.charge(&mut log, Cost::ONE, Micros::from_secs(at)).allowed);
            assert!(!long.charge(&mut log, Cost::ONE, Micros::from_secs(at)).allowed, "at {at}");
        }
        assert!(!long.is_fresh(&log, Micros::from_secs(200)), "its newest entry counts for a minute");
        // Many more than its limit are merged, and counted for longer rather than less.
        for at in 0..1_000 {
            assert!(short.charge(&mut log, ten, Micros::from_secs(1_000 + at)).allowed);
            assert!(log.len() <= 10 + 64, "{} entries", log.len());
        }
        assert!(!long.charge(&mut log, Cost::ONE, Micros::from_millis(2_058_999)).allowed);
        assert!(long.charge(&mut log, ten, Micros::from_secs(2_059)).allowed);
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
