//! Concurrency: at most `limit` held at once, each with a lease that expires.
//!
//! State kept: the leases, soonest to end first, as (id, cost, end). A lease counts while `now < end`, so a dead holder's lease
//! is gone at exactly its end; a live holder renews it. Sums are kept by the block (entries.rs), so no charge walks the leases.
//!
//! Change: a lease keeps its end, whatever the lease time is now; a renewal never shortens it. Settlement: a release ends the
//! lease of its holder and no other.
//!
//! Bounds: limit < 2^53, lease ≤ ten years; what is held saturates below 2^53, debts included. No division. Known weakness: a
//! holder that outlives its lease without renewing it is no longer counted. Twins: concurrency.lua, .sql. Cases:
//! concurrency.cases.

use super::entries::{Entries, Entry};
use super::{Algorithm, EntriesReading, Taken};
use crate::bounds::{MAX_COUNT, checked_count, checked_span};
use crate::error::LimitError;
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// The end of a lease that lasts until it is released.
const ENDLESS: Micros = Micros::new(u64::MAX);

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
/// assert!(workers.release(&mut leases, 7, s(30), s(11)), "the lease of 7 that ends at 30");
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
    /// The id of the holder; zero for a charge without one, whose lease can only expire.
    pub id: u128,
    /// How much it holds.
    pub cost: u64,
    /// When it expires.
    pub end: Micros,
}

impl Entry for Lease {
    fn instant(&self) -> Micros {
        self.end
    }

    fn cost(&self) -> u64 {
        self.cost
    }

    fn cost_mut(&mut self) -> &mut u64 {
        &mut self.cost
    }
}

/// The holders of one key.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseState {
    leases: Entries<Lease>,
}

impl LeaseState {
    /// The leases, soonest to end first; some may have ended.
    pub fn leases(&self) -> impl Iterator<Item = Lease> + '_ {
        self.leases.iter()
    }

    /// How many leases are kept: what the state costs in memory.
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.leases.len() == 0
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

    /// When a lease ends that begins at `now`.
    pub fn end(&self, now: Micros) -> Micros {
        now.saturating_add(self.lease)
    }

    /// Takes a lease of `cost` for `id` if it fits, until [`end`](Self::end). A denial leaves the state untouched.
    pub fn acquire(&self, state: &mut LeaseState, id: u128, cost: Cost, now: Micros) -> Outcome {
        self.acquire_until(state, id, cost, self.end(now), now)
    }

    /// Takes a lease that ends at `end`; for holders that cannot die unnoticed. The latest instant means that it lasts until it
    /// is released.
    pub fn acquire_until(
        &self,
        state: &mut LeaseState,
        id: u128,
        cost: Cost,
        end: Micros,
        now: Micros,
    ) -> Outcome {
        let outcome = self.peek(state, cost, now);
        if outcome.allowed {
            Concurrency::hold(state, Lease { id, cost: cost.get(), end }, now);
        }
        outcome
    }

    /// Ends the lease of `id` that was given `end`; false when there is none, or it has run out.
    pub fn release(&self, state: &mut LeaseState, id: u128, end: Micros, now: Micros) -> bool {
        Concurrency::take(state, id, end, now).is_some()
    }

    /// Extends the lease of `id` that was given `end` to a full lease from now, and never to less than it had. Answers the new
    /// end; `None` when there is no such lease, or it has run out.
    pub fn renew(&self, state: &mut LeaseState, id: u128, end: Micros, now: Micros) -> Option<Micros> {
        let lease = Concurrency::take(state, id, end, now)?;
        let end = self.end(now).max(lease.end);
        Concurrency::hold(state, Lease { end, ..lease }, now);
        Some(end)
    }

    fn hold(state: &mut LeaseState, lease: Lease, now: Micros) {
        state.leases.drop_until(now);
        state.leases.insert(lease);
    }

    /// Removes the live lease of `id`.
    fn take(state: &mut LeaseState, id: u128, end: Micros, now: Micros) -> Option<Lease> {
        if end <= now { None } else { state.leases.remove(end, |lease| lease.id == id) }
    }
}

impl Algorithm for Concurrency {
    type State = LeaseState;

    fn peek(&self, state: &LeaseState, cost: Cost, now: Micros) -> Outcome {
        let ended = state.leases.sum_until(now);
        let used = state.leases.total() - ended;
        // The end of a lease without an expiry is not known: the retry time is one lease.
        let until = |end: Micros| if end == ENDLESS { self.lease } else { end.saturating_sub(now) };
        let wait = match cost.get() <= self.limit && cost.get() > self.limit.saturating_sub(used) {
            true => state.leases.first_to_sum(ended + (used + cost.get() - self.limit)),
            false => None,
        };
        let last = state.leases.last().map_or(Micros::ZERO, |lease| until(lease.end));
        EntriesReading { used, wait: wait.map_or(Micros::ZERO, until), last }
            .answer(self.limit, self.lease, cost)
    }

    /// A charge that names no holder: its lease can only run out.
    fn charge(&self, state: &mut LeaseState, cost: Cost, now: Micros) -> Outcome {
        self.acquire(state, 0, cost, now)
    }

    fn charged_at(&self, _state: &LeaseState, now: Micros) -> Micros {
        now
    }

    /// Shortens the nameless leases taken at once with `taken` by `amount`; leases with a name are released by it.
    fn give_back(&self, state: &mut LeaseState, taken: Taken, amount: u64, _now: Micros) {
        let mut left = amount;
        while left > 0 {
            match state.leases.reduce(self.end(taken.at), left, |lease| lease.id == 0) {
                0 => return,
                returned => left -= returned,
            }
        }
    }

    /// Leases belong to their holders and are released, not refunded.
    fn refund(&self, _state: &mut LeaseState, _amount: u64, _now: Micros) {}

    /// Holds `amount` for one lease, whether it fits or not.
    fn debit(&self, state: &mut LeaseState, amount: u64, now: Micros) {
        state.leases.drop_until(now);
        let most = MAX_COUNT.saturating_sub(state.leases.total());
        if amount > 0 && most > 0 {
            Concurrency::hold(state, Lease { id: 0, cost: amount.min(most), end: self.end(now) }, now);
        }
    }

    fn is_fresh(&self, state: &LeaseState, now: Micros) -> bool {
        state.leases.last().is_none_or(|newest| newest.end <= now)
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
        assert_eq!(leases.renew(&mut state, 1, s(30), s(20)), Some(s(50)));
        assert_eq!(ids(&state), [2, 0, 1], "soonest to end first");
        leases.give_back(&mut state, Taken { cost: 1, at: s(20) }, 9, s(20));
        assert_eq!(ids(&state), [2, 1], "what was given back whole is gone, and only what has no name");
        assert!(leases.acquire(&mut state, 3, Cost::ONE, s(40)).allowed);
        assert_eq!(ids(&state), [1, 3], "so is what ran out");
        assert_eq!(state.len(), 2);
    }

    /// A shorter lease time moved the present forward for the whole key: 19 more of 20 were admitted, and live holders could
    /// not renew.
    #[test]
    fn a_lease_keeps_the_end_that_it_was_given() {
        let s = Micros::from_secs;
        let [long, short] = [60, 2].map(|secs| Concurrency::new(20, s(secs)).unwrap());
        let mut state = LeaseState::default();
        for id in 1..=20 {
            assert!(long.acquire(&mut state, id, Cost::ONE, s(100)).allowed);
        }
        let denied = short.acquire(&mut state, 99, Cost::ONE, s(101));
        assert_eq!((denied.allowed, denied.retry_after), (false, Some(s(59))));
        assert_eq!(short.renew(&mut state, 1, s(160), s(101)), Some(s(160)), "never to less than it had");
        assert_eq!(short.renew(&mut state, 2, s(160), s(159)), Some(s(161)));
        assert!(long.release(&mut state, 3, s(160), s(159)) && !long.release(&mut state, 3, s(160), s(159)));
        let allowed = short.acquire(&mut state, 99, Cost::ONE, s(159));
        assert_eq!((allowed.allowed, allowed.reset_after), (true, s(2)));
        assert!(!short.acquire(&mut state, 98, Cost::ONE, s(159)).allowed);
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
        assert_eq!(state.len(), 2, "what cannot be counted is no lease");
    }
}
