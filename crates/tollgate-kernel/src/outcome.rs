//! What one limit answers to one charge, and what a charge costs.
//!
//! An [`Outcome`] is one limit's answer; what several limits say together is a *decision* and belongs to the library.

use std::fmt;
use std::num::NonZeroU64;

use crate::time::Micros;

/// How much a charge takes: a whole number, at least 1.
///
/// ```
/// use tollgate_kernel::Cost;
/// assert_eq!(Cost::new(3).unwrap().get(), 3);
/// assert!(Cost::new(0).is_none());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cost(NonZeroU64);

impl Cost {
    /// The cost of an ordinary charge.
    pub const ONE: Cost = Cost(NonZeroU64::MIN);

    /// More than any limit holds.
    pub const MAX: Cost = Cost(NonZeroU64::MAX);

    /// A cost of `units`, or `None` for zero: a charge of nothing is a peek.
    pub const fn new(units: u64) -> Option<Cost> {
        match NonZeroU64::new(units) {
            Some(units) => Some(Cost(units)),
            None => None,
        }
    }

    /// The number of units.
    pub const fn get(self) -> u64 {
        self.0.get()
    }

    /// What two charges of one pair of limit and key cost together, at most [`MAX`](Self::MAX).
    #[must_use]
    pub const fn saturating_add(self, other: Cost) -> Cost {
        Cost(self.0.saturating_add(other.get()))
    }
}

/// One limit's answer to one charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the charge fits.
    pub allowed: bool,
    /// What the limit holds when nothing is used: its limit, burst or capacity.
    pub capacity: u64,
    /// What is left: after this charge if it was allowed, else as it stands.
    pub remaining: u64,
    /// How long to wait before the same charge fits if nothing else comes; zero when allowed, `None` when it never can.
    pub retry_after: Option<Micros>,
    /// How long until the key is as if it had never been charged, if nothing else comes.
    pub reset_after: Micros,
    /// How long an admitted charge should be held back (leaky bucket only; otherwise zero).
    pub delay: Micros,
}

impl Outcome {
    /// The answer where no limit applies: always allowed.
    pub const UNLIMITED: Outcome = Outcome {
        allowed: true,
        capacity: u64::MAX,
        remaining: u64::MAX,
        retry_after: Some(Micros::ZERO),
        reset_after: Micros::ZERO,
        delay: Micros::ZERO,
    };

    /// The answer where nothing may pass: denied, and no wait helps.
    pub const BLOCKED: Outcome = Outcome {
        allowed: false,
        capacity: 0,
        remaining: 0,
        retry_after: None,
        reset_after: Micros::ZERO,
        delay: Micros::ZERO,
    };

    /// What is in use: capacity less what remains.
    pub const fn used(&self) -> u64 {
        self.capacity.saturating_sub(self.remaining)
    }
}

/// `allowed, 19 of 20 left` or `denied, retry after 200ms`.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.allowed, self.retry_after) {
            (true, _) if self.capacity == u64::MAX => f.write_str("allowed, unlimited"),
            (true, _) => {
                write!(f, "allowed, {} of {} left", self.remaining, self.capacity)?;
                if self.delay > Micros::ZERO { write!(f, ", delay {}", self.delay) } else { Ok(()) }
            }
            (false, Some(wait)) => write!(f, "denied, retry after {wait}"),
            (false, None) => f.write_str("denied, can never fit"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_at_least_one() {
        assert_eq!(Cost::new(0), None);
        assert_eq!(Cost::new(1), Some(Cost::ONE));
    }

    #[test]
    fn outcomes_read_as_sentences() {
        let outcome = Outcome { capacity: 20, remaining: 19, ..Outcome::UNLIMITED };
        assert_eq!(outcome.to_string(), "allowed, 19 of 20 left");
        assert_eq!((outcome.used(), Outcome { remaining: 5, ..outcome }.used()), (1, 15));
        let delayed = Outcome { delay: Micros::from_millis(100), ..outcome };
        assert_eq!(delayed.to_string(), "allowed, 19 of 20 left, delay 100ms");
        let denied = Outcome { allowed: false, retry_after: Some(Micros::from_millis(200)), ..outcome };
        assert_eq!(denied.to_string(), "denied, retry after 200ms");
        assert_eq!(Outcome::BLOCKED.to_string(), "denied, can never fit");
        assert_eq!(Outcome::UNLIMITED.to_string(), "allowed, unlimited");
    }
}
