//! What all the limits of a charge answered together.

use std::fmt;
use std::time::Duration;

use smallvec::SmallVec;
use tollgate_kernel as kernel;
use tollgate_kernel::Micros;

use crate::outcome::Outcome;

/// The outcomes of one charge; two fit without allocating.
pub(crate) type Outcomes = SmallVec<[Outcome; 2]>;

/// The answer to a charge over one or more limits.
///
/// The charge is allowed if every limit allows it; then all limits are charged. If one limit denies it, none is charged.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a decision says whether the charge was allowed"]
pub struct Decision {
    outcomes: Outcomes,
    binding: usize,
}

/// The decision of a single limit.
impl From<Outcome> for Decision {
    fn from(outcome: Outcome) -> Decision {
        Decision::new(std::iter::once(outcome).collect())
    }
}

impl Decision {
    /// From the answers of at least one limit.
    pub(crate) fn new(outcomes: Outcomes) -> Decision {
        let binding = binding(&outcomes);
        Decision { outcomes, binding }
    }

    /// From the answers of two limits, neither of them a shadow limit; made where the caller wants it.
    #[inline(always)]
    pub(crate) fn of_two(one: Outcome, two: Outcome) -> Decision {
        let binding = usize::from(binds_over(two.numbers(), one.numbers()));
        Decision { outcomes: Outcomes::from_buf([one, two]), binding }
    }

    /// For [`push`](Self::push): the caller adds the outcomes, then calls [`bind`](Self::bind).
    #[inline]
    pub(crate) fn empty() -> Decision {
        Decision { outcomes: Outcomes::new(), binding: 0 }
    }

    /// Makes room for the answers of so many limits.
    #[inline]
    pub(crate) fn reserve(&mut self, limits: usize) {
        if limits > self.outcomes.inline_size() {
            self.outcomes.reserve_exact(limits);
        }
    }

    /// Adds the answer of a limit, in place: a decision is large to move.
    #[inline]
    pub(crate) fn push(&mut self, outcome: Outcome) {
        self.outcomes.push(outcome);
    }

    /// Finds the limit that binds.
    #[inline]
    pub(crate) fn bind(&mut self) {
        if self.outcomes.len() > 1 {
            self.binding = binding(&self.outcomes);
        }
    }

    /// Whether the charge was admitted.
    #[inline]
    pub fn is_allowed(&self) -> bool {
        self.outcomes[self.binding].is_allowed()
    }

    /// The outcome of the binding limit: of the limits that deny, the one with the longest wait; if none denies, the one with the
    /// smallest share left.
    pub fn binding(&self) -> &Outcome {
        &self.outcomes[self.binding]
    }

    /// Which of the outcomes that is.
    pub(crate) fn binding_index(&self) -> usize {
        self.binding
    }

    /// How long to wait before the same charge fits, if there are no other charges: zero when allowed, `None` when it never fits.
    pub fn retry_after(&self) -> Option<Duration> {
        self.binding().retry_after()
    }

    /// The same in whole microseconds.
    pub(crate) fn wait(&self) -> Option<Micros> {
        self.binding().wait()
    }

    /// How long to delay an admitted charge (leaky buckets). A shadow limit never delays.
    pub fn delay(&self) -> Duration {
        if !self.is_allowed() {
            return Duration::ZERO;
        }
        let heeded = self.outcomes.iter().filter(|outcome| !outcome.is_shadow());
        heeded.map(Outcome::delay).max().unwrap_or_default()
    }

    /// Whether any limit answered without its store, because that failed: let through or denied uncounted, or counted in this
    /// process alone.
    pub fn is_degraded(&self) -> bool {
        self.outcomes.iter().any(|outcome| outcome.source().is_fallback())
    }

    /// What each limit answered, in the order of the charge.
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// The decision if it allows the charge, the refusal as an error if not: for callers that propagate refusals with `?`.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::{Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("api", Limit::token_bucket("1/h", 1)?).build()?;
    /// gate.check("api", "user:42").await?.into_result()?;
    /// let denied = gate.check("api", "user:42").await?.into_result().unwrap_err();
    /// assert!(denied.to_string().starts_with("denied by api, retry after"), "{denied}");
    /// # Ok(())
    /// # }
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// # use std::future::Future;
    /// ```
    pub fn into_result(self) -> Result<Decision, Denied> {
        if self.is_allowed() { Ok(self) } else { Err(Denied(Box::new(self))) }
    }
}

/// A refusal, where there was something to hold. Eight bytes; the decision is inside.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct Denied(Box<Decision>);

impl Denied {
    pub(crate) fn new(decision: Decision) -> Denied {
        Denied(Box::new(decision))
    }

    /// What each limit answered.
    pub fn decision(&self) -> &Decision {
        &self.0
    }

    /// How long to wait before the same call may succeed; `None` when it never can.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after()
    }

    /// The decision, with the outcome of each limit.
    pub fn into_decision(self) -> Decision {
        *self.0
    }
}

impl fmt::Display for Denied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Denied {}

/// Which of the outcomes binds. One of a shadow limit does so where all others are of shadow limits too.
#[inline]
pub(crate) fn binding(outcomes: &[Outcome]) -> usize {
    let mut best = 0;
    for (index, outcome) in outcomes.iter().enumerate().skip(1) {
        let bound = &outcomes[best];
        let binds = match (outcome.is_shadow(), bound.is_shadow()) {
            (true, true) => has_less_left(outcome.numbers(), bound.numbers()),
            (false, false) => binds_over(outcome.numbers(), bound.numbers()),
            (is_shadow, _) => !is_shadow,
        };
        if binds {
            best = index;
        }
    }
    best
}

/// Whether one outcome binds rather than another: a denial rather than an admission; of two denials, the longer wait; of two
/// admissions, the smaller share left.
#[inline]
pub(crate) fn binds_over(one: &kernel::Outcome, other: &kernel::Outcome) -> bool {
    // A wait of `None` is never, the longest of all.
    let wait = |outcome: &kernel::Outcome| outcome.retry_after.map_or(u64::MAX, Micros::get);
    match (one.allowed, other.allowed) {
        (false, false) => wait(one) > wait(other),
        (true, true) => has_less_left(one, other),
        (allowed, _) => !allowed,
    }
}

/// Shares are compared without dividing: a/b < c/d iff a*d < c*b.
#[inline]
fn has_less_left(one: &kernel::Outcome, other: &kernel::Outcome) -> bool {
    let share = |x: &kernel::Outcome, y: &kernel::Outcome| u128::from(x.remaining) * u128::from(y.capacity);
    share(one, other) < share(other, one)
}

/// `allowed by api, 19 of 20 left` or `denied by login, retry after 30s`.
impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = self.binding();
        let words = bound.to_string();
        let (word, rest) = words.split_once(',').unwrap_or((&words, ""));
        write!(f, "{word} by {},{rest}", bound.limit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outcome::Source;

    fn limit(name: &'static str, remaining: u64, capacity: u64) -> Outcome {
        let numbers = kernel::Outcome { capacity, remaining, ..kernel::Outcome::UNLIMITED };
        Outcome::new(name, numbers, Source::Store)
    }

    fn denying(name: &'static str, retry_after: Option<u64>) -> Outcome {
        let retry_after = retry_after.map(Micros::from_secs);
        let numbers = kernel::Outcome {
            allowed: false,
            retry_after,
            remaining: 0,
            capacity: 10,
            ..kernel::Outcome::UNLIMITED
        };
        Outcome::new(name, numbers, Source::Store)
    }

    fn shadow(outcome: Outcome) -> Outcome {
        outcome.shadowed(true)
    }

    #[test]
    fn the_binding_limit_is_the_longest_wait_else_the_smallest_share() {
        let never = "denied by b, the cost is more than the limit ever holds";
        for (outcomes, name, retry_after, words) in [
            (vec![limit("a", 5, 10)], "a", Some(0), "allowed by a, 5 of 10 left"),
            (vec![limit("a", 5, 10), limit("b", 50, 1000)], "b", Some(0), "allowed by b, 50 of 1000 left"),
            (vec![limit("a", 5, 10), limit("b", 1, 2)], "a", Some(0), "allowed by a, 5 of 10 left"),
            (vec![limit("a", 0, 10), denying("b", Some(3))], "b", Some(3), "denied by b, retry after 3s"),
            (vec![denying("a", Some(9)), denying("b", Some(3))], "a", Some(9), "denied by a, retry after 9s"),
            (vec![denying("a", Some(9)), denying("b", None)], "b", None, never),
            (vec![limit("a", 9, 10), shadow(denying("b", None))], "a", Some(0), "allowed by a, 9 of 10 left"),
            (
                vec![shadow(denying("b", Some(1)))],
                "b",
                Some(0),
                "allowed by b, shadow limit: would be denied, retry after 1s",
            ),
        ] {
            let decision = Decision::new(outcomes.into());
            assert_eq!(decision.binding().limit(), name, "{decision}");
            assert_eq!(decision.retry_after(), retry_after.map(Duration::from_secs), "{decision}");
            assert_eq!(decision.to_string(), words);
            assert_eq!(decision.is_allowed(), words.starts_with("allowed"));
            assert_eq!(decision.clone().into_result().is_ok(), decision.is_allowed());
        }
    }

    #[test]
    fn the_delay_is_the_longest_of_an_admitted_charge() {
        let delayed = |name, ms| {
            let numbers = kernel::Outcome { delay: Micros::from_millis(ms), ..*limit(name, 1, 2).numbers() };
            Outcome::new(name, numbers, Source::Store)
        };
        let decision = Decision::new(vec![delayed("a", 100), delayed("b", 300)].into());
        assert_eq!(decision.delay(), Duration::from_millis(300));
        let decision = Decision::new(vec![delayed("a", 100), shadow(delayed("c", 900))].into());
        assert_eq!(decision.delay(), Duration::from_millis(100), "a shadow limit holds nobody back");
        let denied = Decision::new(vec![delayed("a", 100), denying("b", Some(1))].into());
        assert_eq!(denied.delay(), Duration::ZERO);
        assert_eq!(denied.outcomes().len(), 2);
    }

    #[test]
    fn a_refusal_is_one_pointer() {
        assert_eq!(size_of::<Denied>(), size_of::<usize>());
    }
}
