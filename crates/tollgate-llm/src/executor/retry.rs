//! When a call is sent again.
//!
//! | the attempt | is |
//! |---|---|
//! | refused for want of money (billing) | never sent again |
//! | refused because it is wrong | not sent again, except where the provider asks for it (`x-should-retry: true`) |
//! | refused with `x-should-retry: false` | not sent again |
//! | limited, overloaded, failed or lost | sent again, after the provider's hint, else after a back-off |
//!
//! A 429 with a hint does not use up an attempt. A provider that answers nothing else is asked after twice the time each time, up to the longest
//! back-off.
//!
//! A hint is never shortened: up to a tenth of it, and at most a second, is added at random, so that calls that were refused together do not
//! come back together. Without a hint the wait doubles with each attempt, and up to a quarter is taken away at random. Whole microseconds.

use std::time::Duration;

use tollgate::store::Micros;

use crate::provider::{Failure, Hints};

/// How often and after how long a call is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How often a call is sent at most, the first time included; 5 by default. A 429 that says when to come back does not count: the call
    /// is sent again until the executor's `max_wait` is over, though not if this is 1.
    pub attempts: u32,
    /// The wait after the first attempt, if the provider gives no hint; 500 ms by default.
    pub first: Duration,
    /// The longest wait without a hint; 60 s by default.
    pub longest: Duration,
    /// The longest hint that is waited for; 10 minutes by default. A call whose provider asks for more fails.
    pub longest_hint: Duration,
}

impl Default for RetryPolicy {
    fn default() -> RetryPolicy {
        RetryPolicy {
            attempts: 5,
            first: Duration::from_millis(500),
            longest: Duration::from_secs(60),
            longest_hint: Duration::from_secs(600),
        }
    }
}

impl RetryPolicy {
    /// Sends nothing twice.
    pub const fn never() -> RetryPolicy {
        RetryPolicy {
            attempts: 1,
            first: Duration::ZERO,
            longest: Duration::ZERO,
            longest_hint: Duration::ZERO,
        }
    }

    /// After how long an attempt that failed is followed by another; `None` if it is not. `random` is any number.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate_llm::executor::RetryPolicy;
    /// use tollgate_llm::provider::{Failure, Hints};
    ///
    /// let policy = RetryPolicy::default();
    /// let asked = Hints { retry_after: Some(Duration::from_secs(2)), ..Hints::default() };
    /// assert_eq!(policy.wait(1, Failure::Limited, &asked, 0), Some(Duration::from_secs(2)));
    /// assert_eq!(policy.wait(1, Failure::Billing, &asked, 0), None);
    /// ```
    pub fn wait(&self, attempt: u32, failure: Failure, hints: &Hints, random: u64) -> Option<Duration> {
        let may_retry = match (failure, hints.should_retry) {
            (Failure::Billing, _) => false,
            // A gateway that says when to come back tells SDKs not to wait that long. An executor can.
            (Failure::Limited, Some(false)) if hints.retry_after.is_some() => true,
            (_, Some(false)) => false,
            (_, Some(true)) => true,
            _ => failure.may_retry(),
        };
        if !may_retry || attempt >= self.attempts {
            return None;
        }
        // When a limit is full again says nothing about a provider that failed for another reason.
        let hint = if failure == Failure::Limited { hints.wait() } else { hints.retry_after };
        if let Some(hint) = hint {
            let spread = (Micros::from(hint).get() / 10).min(1_000_000);
            let wait = hint.saturating_add(Duration::from_micros(random % (spread + 1)));
            return (hint <= self.longest_hint).then_some(wait);
        }
        Some(self.back_off(attempt, random))
    }

    /// The wait after so many attempts, without a hint.
    pub(super) fn back_off(&self, attempt: u32, random: u64) -> Duration {
        let doubled = 1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX);
        let wait = Micros::from(self.first.saturating_mul(doubled).min(self.longest)).get();
        Duration::from_micros(wait - random % (wait / 4 + 1))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn asked(wait: Duration) -> Hints {
        Hints { retry_after: Some(wait), ..Hints::default() }
    }

    #[test]
    fn d2_billing_is_never_sent_again_even_if_the_provider_asks_for_it() {
        let policy = RetryPolicy::default();
        let hints = Hints { should_retry: Some(true), ..asked(Duration::from_secs(1)) };
        assert_eq!(policy.wait(1, Failure::Billing, &hints, 0), None);
        assert!(policy.wait(1, Failure::Refused, &hints, 0).is_some(), "the provider asks for it");
        assert_eq!(policy.wait(1, Failure::Refused, &Hints::default(), 0), None);
        let against = Hints { should_retry: Some(false), ..Hints::default() };
        assert_eq!(policy.wait(1, Failure::Overloaded, &against, 0), None);
    }

    #[test]
    fn the_wait_doubles_and_ends() {
        let policy = RetryPolicy { attempts: 100, ..RetryPolicy::default() };
        let waits = (1..=9).map(|attempt| policy.wait(attempt, Failure::Failed, &Hints::default(), 0));
        let waits: Vec<u128> = waits.map(|wait| wait.map_or(0, |wait| wait.as_millis())).collect();
        assert_eq!(waits, [500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000]);
        assert!(policy.wait(99, Failure::Failed, &Hints::default(), 0).is_some());
        assert_eq!(policy.wait(100, Failure::Failed, &Hints::default(), 0), None);
        assert_eq!(RetryPolicy::never().wait(1, Failure::Limited, &Hints::default(), 0), None);
    }

    #[test]
    fn a_hint_that_is_too_long_is_not_waited_for() {
        let policy = RetryPolicy::default();
        assert!(policy.wait(1, Failure::Limited, &asked(Duration::from_secs(600)), 9).is_some());
        assert_eq!(policy.wait(1, Failure::Limited, &asked(Duration::from_secs(601)), 9), None);
    }

    proptest! {
        #[test]
        fn d1_a_hint_is_never_shortened(millis in 1_u64..600_000, attempt in 1_u32..5, random: u64) {
            let hint = Duration::from_millis(millis);
            let wait = RetryPolicy::default().wait(attempt, Failure::Limited, &asked(hint), random).unwrap();
            prop_assert!(wait >= hint && wait <= hint + Duration::from_secs(1) && wait <= hint.mul_f64(1.11), "{:?}", wait);
        }

        #[test]
        fn a_back_off_keeps_three_quarters(attempt in 1_u32..5, random: u64) {
            let wait = RetryPolicy::default().wait(attempt, Failure::Failed, &Hints::default(), random).unwrap();
            let full = Duration::from_millis(500 << (attempt - 1));
            prop_assert!(wait <= full && wait >= full * 3 / 4, "{:?}", wait);
        }
    }
}
