//! Concurrency: at most `limit` held at once, each holding a lease that ends by itself.
//!
//! State kept: the leases, soonest to end first, as (id, cost, end). A lease counts while `now < end`, so a dead holder's is
//! gone at exactly its end; a live holder renews it. All leases of a limit last equally long, so new and renewed ones go to
//! the back. A time earlier than the newest lease's beginning counts as that beginning.
//!
//! Bounds: limit < 2^53, lease ≤ ten years; what is held saturates below 2^53, debts included. No division. Known weakness: a
//! holder that outlives its lease without renewing it is no longer counted. Twins: concurrency.lua, .sql. Cases: concurrency.cases.

use std::collections::VecDeque;

use super::{Algorithm, Look};
use crate::limit::{Limit, LimitError, MAX_COUNT, checked_count, checked_span};
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// A concurrency limit: `limit` and `lease`.
///
/// ```
/// use tollgate_kernel::{Concurrency, Cost, LeaseState, Micros};
///
/// let workers = Concurrency::new(1, Micros::from_secs(30))?;
/// let mut leases = LeaseState::default();
/// let s = Micros::from_secs;
/// assert!(workers.acquire(&mut leases, 7, Cost::ONE, s(0)).allowed);
/// assert_eq!(workers.acquire(&mut leases, 8, Cost::ONE, s(10)).retry_after, Some(s(20)));
/// assert!(workers.release(&mut leases, 7, s(11)));
/// assert!(workers.acquire(&mut leases, 8, Cost::ONE, s(12)).allowed);
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Concurrency {
    limit: u64,
    lease: Micros,
}

/// One holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Who holds it; zero for a charge that named nobody and so can only run out.
    pub id: u128,
    /// How much it holds.
    pub cost: u64,
    /// When it ends by itself.
    pub end: Micros,
}

/// The holders of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    leases: VecDeque<Lease>,
}

impl LeaseState {
    /// The leases, soonest to end first; some may have ended.
    pub fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.leases.iter().copied()
    }

    /// How many leases are kept: what the state costs in memory.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }
}

impl Concurrency {
    /// At most `limit` at once, each for `lease` unless renewed.
    pub fn new(limit: u64, lease: Micros) -> Result<Self, LimitError> {
        Ok(Concurrency { limit: checked_count("limit", limit)?, lease: checked_span("lease", lease)? })
    }

    /// How much may be held at once.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// How long a lease lasts unless renewed.
    pub const fn lease(&self) -> Micros {
        self.lease
    }

    /// Takes a lease of `cost` for `id` if it fits. A denial leaves the state untouched.
    pub fn acquire(&self, state: &mut LeaseState, id: u128, cost: Cost, now: Micros) -> Outcome {
        let outcome = self.peek(state, cost, now);
        if outcome.allowed {
            self.hold(state, id, cost.get(), now);
        }
        outcome
    }

    /// Ends the lease of `id`; false when it had none, or it had run out.
    pub fn release(&self, state: &mut LeaseState, id: u128, now: Micros) -> bool {
        self.take(state, id, now).is_some()
    }

    /// Extends the lease of `id` to a full lease from now; false when it had none, or it had run out.
    pub fn renew(&self, state: &mut LeaseState, id: u128, now: Micros) -> bool {
        let now = self.not_before_newest(state, now);
        match self.take(state, id, now) {
            Some(lease) => {
                self.hold(state, id, lease.cost, now);
                true
            }
            None => false,
        }
    }

    /// `now`, but not before the newest lease began: the end of a new lease is then the latest of all.
    fn not_before_newest(&self, state: &LeaseState, now: Micros) -> Micros {
        state.leases.back().map_or(now, |newest| newest.end.saturating_sub(self.lease).max(now))
    }

    /// The leases that count at `now`, soonest to end first.
    fn live(state: &LeaseState, now: Micros) -> impl DoubleEndedIterator<Item = &Lease> {
        state.leases.iter().filter(move |lease| lease.end > now)
    }

    fn hold(&self, state: &mut LeaseState, id: u128, cost: u64, now: Micros) {
        let now = self.not_before_newest(state, now);
        while state.leases.front().is_some_and(|lease| lease.end <= now) {
            state.leases.pop_front();
        }
        state.leases.push_back(Lease { id, cost, end: now.saturating_add(self.lease) });
    }

    /// Removes the live lease of `id`.
    fn take(&self, state: &mut LeaseState, id: u128, now: Micros) -> Option<Lease> {
        let now = self.not_before_newest(state, now);
        let index = state.leases.iter().position(|lease| lease.id == id && lease.end > now)?;
        state.leases.remove(index)
    }
}

impl Algorithm for Concurrency {
    type State = LeaseState;

    fn peek(&self, state: &LeaseState, cost: Cost, now: Micros) -> Outcome {
        let now = self.not_before_newest(state, now);
        let live = || Concurrency::live(state, now);
        let held = live().map(|lease| lease.cost).sum::<u64>();
        let mut left = held;
        let enough = live().find(|lease| {
            left -= lease.cost;
            left.saturating_add(cost.get()) <= self.limit
        });
        let wait = enough.map_or(Micros::ZERO, |lease| lease.end.saturating_sub(now));
        let last = live().next_back().map_or(Micros::ZERO, |lease| lease.end.saturating_sub(now));
        Look { used: held, wait, last }.answer(self.limit, self.lease, cost)
    }

    /// A charge that names no holder: its lease can only run out.
    fn charge(&self, state: &mut LeaseState, cost: Cost, now: Micros) -> Outcome {
        self.acquire(state, 0, cost, now)
    }

    fn charged_at(&self, state: &LeaseState, now: Micros) -> Micros {
        self.not_before_newest(state, now)
    }

    /// Shortens the nameless leases taken at `charged_at` by `amount`; leases with a name are released by it.
    fn give_back(&self, state: &mut LeaseState, amount: u64, charged_at: Micros, _now: Micros) {
        let end = charged_at.saturating_add(self.lease);
        let mut left = amount;
        for lease in state.leases.iter_mut().filter(|lease| lease.id == 0 && lease.end == end) {
            let returned = left.min(lease.cost);
            lease.cost -= returned;
            left -= returned;
        }
        state.leases.retain(|lease| lease.cost > 0);
    }

    /// Leases belong to their holders and are released, not refunded.
    fn refund(&self, _state: &mut LeaseState, _amount: u64, _now: Micros) {}

    /// Holds `amount` for one lease, whether it fits or not.
    fn debit(&self, state: &mut LeaseState, amount: u64, now: Micros) {
        let held = Concurrency::live(state, self.not_before_newest(state, now)).map(|lease| lease.cost).sum();
        let most = MAX_COUNT.saturating_sub(held);
        if amount > 0 && most > 0 {
            self.hold(state, 0, amount.min(most), now);
        }
    }

    fn is_fresh(&self, state: &LeaseState, now: Micros) -> bool {
        state.leases.back().is_none_or(|newest| newest.end <= now)
    }
}

impl From<Concurrency> for Limit {
    fn from(leases: Concurrency) -> Self {
        Limit::Concurrency(leases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_leases_are_kept_than_must_be() {
        let leases = Concurrency::new(9, Micros::from_secs(30)).unwrap();
        let s = Micros::from_secs;
        let mut state = LeaseState::default();
        assert!(state.is_empty());
        for (id, at) in [(1, 0), (2, 10), (0, 20)] {
            assert!(leases.acquire(&mut state, id, Cost::ONE, s(at)).allowed);
        }
        let ids = |state: &LeaseState| state.leases().map(|lease| lease.id).collect::<Vec<_>>();
        assert!(leases.renew(&mut state, 1, s(20)));
        assert_eq!(ids(&state), [2, 0, 1], "soonest to end first");
        leases.give_back(&mut state, 9, s(20), s(20));
        assert_eq!(ids(&state), [2, 1], "what was given back whole is gone, and only what has no name");
        assert!(leases.acquire(&mut state, 3, Cost::ONE, s(40)).allowed);
        assert_eq!(ids(&state), [1, 3], "so is what ran out");
        assert_eq!(state.len(), 2);
    }

    /// A sum of debts that saturated was taken apart again lease by lease, and fell below zero.
    #[test]
    fn debts_however_large_and_many_are_waited_out() {
        let leases = Concurrency::new(1, Micros::from_secs(30)).unwrap();
        let mut state = LeaseState::default();
        for millis in 0..3_000 {
            leases.debit(&mut state, MAX_COUNT / 2 + 1, Micros::from_millis(millis));
        }
        let outcome = leases.peek(&state, Cost::ONE, Micros::from_secs(3));
        assert!(!outcome.allowed);
        assert_eq!(outcome.retry_after, Some(Micros::from_millis(27_001)));
    }
}
