//! What one limit answered: an [`Outcome`], why ([`Reason`]), and where the answer came from ([`Source`]).
//!
//! An outcome holds the numbers of the store; durations and reasons are computed when they are read. `decision.rs` has the answer
//! of all limits together. The engine makes outcomes; APIs and telemetry read them.

use std::fmt;
use std::time::Duration;

use tollgate_kernel as kernel;
use tollgate_kernel::Micros;

/// What to answer when a remote store cannot. The memory store always can.
///
/// An open limit is no limit while the store is down, so an attacker that can bring the store down can pass it: what guards logins or
/// money is better closed, or local with a share of the limit (see
/// [`TollgateBuilder::instances`](crate::TollgateBuilder::instances)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fallback {
    /// Allow, and charge nothing. The answer shows the key as unused.
    Open,
    /// Deny, until the store is tried next.
    Closed,
    /// Counts in the memory of this process until the store is back. The counters start empty: earlier leases and charges are not
    /// known, and the store does not learn of these counts later. This is the default: services stay available, and each process
    /// still bounds abuse.
    #[default]
    Local,
}

impl Fallback {
    /// All three, in the order of the documentation.
    pub const ALL: [Fallback; 3] = [Fallback::Open, Fallback::Closed, Fallback::Local];

    /// The name used in configuration, metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Fallback::Open => "open",
            Fallback::Closed => "closed",
            Fallback::Local => "local",
        }
    }
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Where a limit's answer came from. Every answer has exactly one source, so events counted by source add up to all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Source {
    /// The store counted.
    #[default]
    Store,
    /// The store denied the same charge a moment ago, and the denial still holds; the store was not called again.
    DenialCache,
    /// The store failed, and the limit is set to let everything through then. Nothing was charged.
    FallbackOpen,
    /// The store failed, and the limit is set to let nothing through then.
    FallbackClosed,
    /// The store failed, and the memory of this process counted.
    FallbackLocal,
    /// The limit is set to let everything through.
    Unlimited,
    /// The limit is set to let nothing through.
    Blocked,
    /// The key was empty or malformed; no counter was read.
    Malformed,
    /// A call that holds nothing charged a concurrency limit; no counter was read.
    NeedsPermit,
}

impl Source {
    /// All of them, in the order of the documentation.
    pub const ALL: [Source; 9] = [
        Source::Store,
        Source::DenialCache,
        Source::FallbackOpen,
        Source::FallbackClosed,
        Source::FallbackLocal,
        Source::Unlimited,
        Source::Blocked,
        Source::Malformed,
        Source::NeedsPermit,
    ];

    /// The name used in metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Source::Store => "store",
            Source::DenialCache => "denial_cache",
            Source::FallbackOpen => "fallback_open",
            Source::FallbackClosed => "fallback_closed",
            Source::FallbackLocal => "fallback_local",
            Source::Unlimited => "unlimited",
            Source::Blocked => "blocked",
            Source::Malformed => "malformed",
            Source::NeedsPermit => "needs_permit",
        }
    }

    /// Whether the store should have answered, and could not.
    pub const fn is_fallback(self) -> bool {
        matches!(self, Source::FallbackOpen | Source::FallbackClosed | Source::FallbackLocal)
    }
}

/// Why a limit answered as it did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The limit's numbers, and the earlier charges.
    Limit,
    /// The key, or every key, is set to be blocked.
    Blocked,
    /// The key is empty or malformed. Nothing was charged.
    MalformedKey,
    /// The cost is more than the limit ever holds.
    TooLarge,
    /// The store failed, and the limit's fallback answered.
    Fallback,
    /// The limit is a shadow limit: it would have denied, and denies nothing.
    Shadow,
    /// The limit is a concurrency limit, and the call would have held nothing: use `acquire`.
    NeedsPermit,
}

impl Reason {
    /// All of them, in the order of the documentation.
    pub const ALL: [Reason; 7] = [
        Reason::Limit,
        Reason::Blocked,
        Reason::MalformedKey,
        Reason::TooLarge,
        Reason::Fallback,
        Reason::Shadow,
        Reason::NeedsPermit,
    ];

    /// The name used in JSON, logs and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Reason::Limit => "limit",
            Reason::Blocked => "blocked",
            Reason::MalformedKey => "malformed_key",
            Reason::TooLarge => "too_large",
            Reason::Fallback => "fallback",
            Reason::Shadow => "shadow",
            Reason::NeedsPermit => "needs_permit",
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What one limit answered to one charge.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limit, Limiter, Reason};
///
/// let limiter = Limiter::new(Limit::fixed_window(2, Duration::from_secs(60))?);
/// let outcome = limiter.check("user:42");
/// assert!(outcome.is_allowed());
/// assert_eq!((outcome.remaining(), outcome.capacity()), (1, 2));
///
/// let outcome = limiter.charge("user:42", 3)?;
/// assert!(!outcome.is_allowed());
/// assert_eq!((outcome.reason(), outcome.retry_after()), (Reason::TooLarge, None));
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[must_use = "an outcome says whether the charge was allowed"]
pub struct Outcome {
    /// The numbers of the kernel. Under a shadow limit, the outcome that it would have had.
    numbers: kernel::Outcome,
    limit: &'static str,
    source: Source,
    is_shadow: bool,
}

impl Outcome {
    #[inline(always)]
    pub(crate) const fn new(limit: &'static str, numbers: kernel::Outcome, source: Source) -> Outcome {
        Outcome { numbers, limit, source, is_shadow: false }
    }

    /// The answer of a limit that may be a shadow limit.
    #[inline]
    pub(crate) const fn shadowed(self, is_shadow: bool) -> Outcome {
        Outcome { is_shadow, ..self }
    }

    /// The name of the limit.
    pub fn limit(&self) -> &'static str {
        self.limit
    }

    /// Whether the limit let the charge pass. A shadow limit always does.
    #[inline]
    pub fn is_allowed(&self) -> bool {
        self.numbers.allowed || self.is_shadow
    }

    /// Whether the limit is a shadow limit: it decides and counts, and never denies.
    pub fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    /// Whether the limit is a shadow limit that would have denied the charge.
    pub fn would_deny(&self) -> bool {
        self.is_shadow && !self.numbers.allowed
    }

    /// Whether no limit applies: everything passes, uncounted.
    pub fn is_unlimited(&self) -> bool {
        self.source == Source::Unlimited
    }

    /// The units of the limit when nothing is used: its limit, burst or capacity.
    pub fn capacity(&self) -> u64 {
        self.numbers.capacity
    }

    /// What is left: after this charge if it was allowed, before it if not.
    pub fn remaining(&self) -> u64 {
        self.numbers.remaining
    }

    /// What is used: capacity minus remaining.
    pub fn used(&self) -> u64 {
        self.numbers.used()
    }

    /// How long to wait before the same charge fits, if there are no other charges: zero when allowed, `None` when it never fits.
    pub fn retry_after(&self) -> Option<Duration> {
        if self.is_allowed() { Some(Duration::ZERO) } else { self.numbers.retry_after.map(Duration::from) }
    }

    /// How long until the key has its full capacity again, if there are no other charges.
    pub fn reset_after(&self) -> Duration {
        self.numbers.reset_after.into()
    }

    /// How long an admitted charge should be held back (leaky buckets; otherwise zero).
    pub fn delay(&self) -> Duration {
        self.numbers.delay.into()
    }

    /// Why the limit answered so. An ordinary answer, allowed or denied, has [`Reason::Limit`].
    pub fn reason(&self) -> Reason {
        match self.source {
            Source::Malformed => Reason::MalformedKey,
            Source::NeedsPermit => Reason::NeedsPermit,
            _ if self.would_deny() => Reason::Shadow,
            Source::Blocked => Reason::Blocked,
            _ if !self.numbers.allowed && self.numbers.retry_after.is_none() => Reason::TooLarge,
            Source::FallbackOpen | Source::FallbackClosed | Source::FallbackLocal => Reason::Fallback,
            Source::Store | Source::DenialCache | Source::Unlimited => Reason::Limit,
        }
    }

    /// Where the answer came from.
    pub fn source(&self) -> Source {
        self.source
    }

    /// The numbers as the kernel worked them out, in whole microseconds: for faces that render or compare them exactly. Under a
    /// shadow limit this is the answer that it would have given.
    #[inline]
    pub fn numbers(&self) -> &kernel::Outcome {
        &self.numbers
    }

    /// Where the numbers are written.
    #[inline]
    pub(crate) const fn numbers_mut(&mut self) -> &mut kernel::Outcome {
        &mut self.numbers
    }

    /// The wait of a refusal in whole microseconds; `None` is never.
    pub(crate) fn wait(&self) -> Option<Micros> {
        if self.is_allowed() { Some(Micros::ZERO) } else { self.numbers.retry_after }
    }
}

/// `allowed, 19 of 20 left`, `denied, retry after 200ms` or `denied, blocked`.
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            Reason::Shadow => {
                let numbers = self.numbers.to_string();
                write!(f, "allowed, shadow limit: would be {numbers}")
            }
            Reason::Blocked => f.write_str("denied, blocked"),
            Reason::MalformedKey => f.write_str("denied, the key is malformed"),
            Reason::NeedsPermit => f.write_str("denied, a concurrency limit needs a permit: use acquire"),
            Reason::TooLarge => f.write_str("denied, the cost is more than the limit ever holds"),
            Reason::Limit | Reason::Fallback => self.numbers.fmt(f),
        }
    }
}

impl fmt::Debug for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outcome")
            .field("limit", &self.limit)
            .field("is_allowed", &self.is_allowed())
            .field("remaining", &self.remaining())
            .field("capacity", &self.capacity())
            .field("retry_after", &self.retry_after())
            .field("reset_after", &self.reset_after())
            .field("delay", &self.delay())
            .field("reason", &self.reason())
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENIED: kernel::Outcome = kernel::Outcome {
        allowed: false,
        capacity: 10,
        remaining: 0,
        retry_after: Some(Micros::from_secs(3)),
        reset_after: Micros::from_secs(9),
        delay: Micros::ZERO,
    };

    #[test]
    fn every_answer_says_why_and_reads_as_a_sentence() {
        let never = kernel::Outcome { retry_after: None, ..DENIED };
        let outcome = |numbers, source| Outcome::new("api", numbers, source);
        for (outcome, is_allowed, reason, words) in [
            (outcome(DENIED, Source::Store), false, Reason::Limit, "denied, retry after 3s"),
            (outcome(DENIED, Source::DenialCache), false, Reason::Limit, "denied, retry after 3s"),
            (outcome(DENIED, Source::FallbackClosed), false, Reason::Fallback, "denied, retry after 3s"),
            (
                outcome(never, Source::Store),
                false,
                Reason::TooLarge,
                "denied, the cost is more than the limit ever holds",
            ),
            (outcome(kernel::Outcome::BLOCKED, Source::Blocked), false, Reason::Blocked, "denied, blocked"),
            (
                outcome(kernel::Outcome::BLOCKED, Source::Malformed),
                false,
                Reason::MalformedKey,
                "denied, the key is malformed",
            ),
            (
                outcome(kernel::Outcome::BLOCKED, Source::NeedsPermit),
                false,
                Reason::NeedsPermit,
                "denied, a concurrency limit needs a permit: use acquire",
            ),
            (
                outcome(kernel::Outcome::UNLIMITED, Source::Unlimited),
                true,
                Reason::Limit,
                "allowed, unlimited",
            ),
            (
                outcome(DENIED, Source::Store).shadowed(true),
                true,
                Reason::Shadow,
                "allowed, shadow limit: would be denied, retry after 3s",
            ),
        ] {
            assert_eq!((outcome.is_allowed(), outcome.reason()), (is_allowed, reason), "{outcome:?}");
            assert_eq!(outcome.to_string(), words);
            assert!(Reason::ALL.contains(&reason));
        }
        let shadow = outcome(DENIED, Source::Store).shadowed(true);
        assert_eq!((shadow.retry_after(), shadow.would_deny()), (Some(Duration::ZERO), true));
    }

    #[test]
    fn an_outcome_stays_small() {
        assert!(size_of::<Outcome>() <= 80, "{}", size_of::<Outcome>());
    }
}
