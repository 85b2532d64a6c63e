//! Leaky bucket: holds up to `capacity` units that drain at `rate`; each admitted charge gets the time to wait for its turn.
//!
//! The arithmetic and the state are the token bucket's, read the other way round: what is missing from a full token bucket is
//! what lies in this one. The delay of an admitted charge is the time until all that was ahead of it has drained, rounded up,
//! so callers who honour it come out one after another at the rate, with no bursts. A full bucket denies.
//!
//! Bounds and rounding: as in token_bucket.rs. Known weakness: the delay is a promise of the caller, not of the limiter; a
//! caller who ignores it sees a token bucket. Twins: leaky_bucket.lua, .sql. Cases: leaky_bucket.cases.

use super::token_bucket::{Bucket, BucketState, Fit, TokenBucket};
use super::{Algorithm, Taken};
use crate::error::LimitError;
use crate::outcome::{Cost, Outcome};
use crate::rate::Rate;
use crate::time::Micros;

/// A leaky bucket: `rate` and `capacity`.
///
/// ```
/// use tollgate_kernel::{Algorithm, BucketState, Cost, LeakyBucket, Micros};
///
/// let bucket = LeakyBucket::new("10/s".parse()?, 3)?;
/// let mut state = BucketState::default();
/// let now = Micros::from_secs(1);
/// assert_eq!(bucket.charge(&mut state, Cost::ONE, now).delay, Micros::ZERO);
/// assert_eq!(bucket.charge(&mut state, Cost::ONE, now).delay, Micros::from_millis(100));
/// assert_eq!(bucket.charge(&mut state, Cost::ONE, now).delay, Micros::from_millis(200));
/// assert!(!bucket.charge(&mut state, Cost::ONE, now).allowed);
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LeakyBucket {
    room: TokenBucket,
}

impl LeakyBucket {
    /// A bucket of `capacity` units that drains at `rate`.
    pub fn new(rate: Rate, capacity: u64) -> Result<Self, LimitError> {
        TokenBucket::with_field("capacity", rate, capacity).map(|room| LeakyBucket { room })
    }

    /// The rate of draining.
    pub const fn rate(&self) -> Rate {
        self.room.rate()
    }

    /// How much a full bucket holds.
    pub const fn capacity(&self) -> u64 {
        self.room.burst()
    }

    /// How long a full bucket takes to drain, rounded up.
    pub const fn time_to_drain(&self) -> Micros {
        self.room.time_to_fill()
    }

    /// See [`TokenBucket::with_max_debt`].
    pub fn with_max_debt(self, max_debt: Micros) -> Result<Self, LimitError> {
        self.room.with_max_debt(max_debt).map(|room| LeakyBucket { room })
    }

    /// See [`TokenBucket::keeping_instant`].
    #[must_use]
    pub const fn keeping_instant(self) -> Self {
        LeakyBucket { room: self.room.keeping_instant() }
    }

    /// The bucket of free room, whose arithmetic this one shares.
    pub const fn room(&self) -> &TokenBucket {
        &self.room
    }

    /// The answer to a charge where so much is ahead; see the token bucket.
    pub(crate) fn outcome_at(&self, ahead: (Micros, u64), cost: Cost) -> Outcome {
        let (outcome, drained) = self.room.outcome_at(ahead, cost);
        self.with_delay(outcome, drained)
    }

    fn with_delay(&self, mut outcome: Outcome, ahead: Micros) -> Outcome {
        if outcome.allowed {
            outcome.delay = ahead;
        }
        outcome
    }
}

impl Bucket for LeakyBucket {
    fn units_per_us(&self) -> u64 {
        self.room.units_per_us()
    }

    #[inline]
    fn charge_short(&self, full_at: &mut u64, cost: Cost, elapsed: Micros) -> Fit {
        self.room.charge_short(full_at, cost, elapsed)
    }

    #[inline]
    fn outcome_of(&self, fit: Fit, cost: Cost) -> Outcome {
        self.with_delay(self.room.outcome_of(fit, cost), self.room.time_to_full_before(fit))
    }
}

impl Algorithm for LeakyBucket {
    type State = BucketState;

    fn peek(&self, state: &BucketState, cost: Cost, now: Micros) -> Outcome {
        self.with_delay(self.room.peek(state, cost, now), self.room.time_to_full(state, now))
    }

    fn charge(&self, state: &mut BucketState, cost: Cost, now: Micros) -> Outcome {
        let ahead = self.room.time_to_full(state, now);
        self.with_delay(self.room.charge(state, cost, now), ahead)
    }

    fn adopt(&self, state: &mut BucketState, now: Micros) {
        self.room.adopt(state, now);
    }

    fn charged_at(&self, _state: &BucketState, now: Micros) -> Micros {
        now
    }

    fn give_back(&self, state: &mut BucketState, taken: Taken, amount: u64, now: Micros) {
        self.room.give_back(state, taken, amount, now);
    }

    fn refund(&self, state: &mut BucketState, amount: u64, now: Micros) {
        self.room.refund(state, amount, now);
    }

    fn debit(&self, state: &mut BucketState, amount: u64, now: Micros) {
        self.room.debit(state, amount, now);
    }

    fn is_fresh(&self, state: &BucketState, now: Micros) -> bool {
        self.room.is_fresh(state, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_the_instant_of_being_empty_in_finer_units() {
        let bucket = LeakyBucket::new("7/s".parse().unwrap(), 14).unwrap();
        let mut state = BucketState::default();
        let now = Micros::from_secs(100);
        assert!(bucket.charge(&mut state, Cost::new(14).unwrap(), now).allowed);
        let empty_at = now.saturating_add(bucket.time_to_drain());
        assert_eq!(empty_at, Micros::from_secs(102));
        assert_eq!(state.full_at, u128::from(empty_at.get()) * u128::from(bucket.units_per_us()));
    }
}
