//! What all the limits of a charge say together.

use std::cmp::Ordering;
use std::fmt;

use smallvec::SmallVec;
use tollgate_kernel::{Micros, Outcome};

use crate::report::Source;

/// What one limit of a charge said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitOutcome<'a> {
    /// The limit's name.
    pub name: &'a str,
    /// Its answer. Under a limit that only watches, the answer it would have given.
    pub outcome: Outcome,
    /// Whether the limit only watches: its refusal does not count.
    pub shadow: bool,
    /// Where the answer came from.
    pub source: Source,
}

impl LimitOutcome<'_> {
    /// Whether this limit holds the charge up.
    pub fn denies(&self) -> bool {
        !self.outcome.allowed && !self.shadow
    }
}

/// The answer to a charge over one or more limits.
///
/// Allowed if every limit allows it, and then all of them are charged; else none is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision<'a> {
    limits: SmallVec<[LimitOutcome<'a>; 4]>,
    binding: usize,
}

impl<'a> Decision<'a> {
    /// From the answers of at least one limit.
    pub(crate) fn new(limits: SmallVec<[LimitOutcome<'a>; 4]>) -> Decision<'a> {
        let mut decision = Decision { limits, binding: 0 };
        decision.close();
        decision
    }

    /// An empty one, to be filled where it stands: moving a full one costs more than filling it.
    #[inline(always)]
    pub(crate) fn open() -> Decision<'a> {
        Decision { limits: SmallVec::new(), binding: 0 }
    }

    /// Adds the answer of a limit.
    #[inline(always)]
    pub(crate) fn add(&mut self, limit: LimitOutcome<'a>) {
        self.limits.push(limit);
    }

    /// Finds the limit that binds, once all answers are there.
    #[inline(always)]
    pub(crate) fn close(&mut self) {
        self.binding = binding(&self.limits);
    }

    /// Whether the charge was admitted.
    pub fn allowed(&self) -> bool {
        !self.limits[self.binding].denies()
    }

    /// The limit that bound: of those that deny, the one that asks for the longest wait; else the one with the smallest share
    /// left.
    pub fn binding(&self) -> &LimitOutcome<'a> {
        &self.limits[self.binding]
    }

    /// Which of the limits that is.
    pub(crate) fn binding_index(&self) -> usize {
        self.binding
    }

    /// How long to wait before the same charge fits, if nothing else comes: zero when allowed, `None` when it never can.
    pub fn retry_after(&self) -> Option<Micros> {
        if self.allowed() { Some(Micros::ZERO) } else { self.binding().outcome.retry_after }
    }

    /// How long an admitted charge should be held back (leaky buckets). A limit that only watches holds nobody back.
    pub fn delay(&self) -> Micros {
        if !self.allowed() {
            return Micros::ZERO;
        }
        let heeded = self.limits.iter().filter(|limit| !limit.shadow);
        heeded.map(|limit| limit.outcome.delay).max().unwrap_or_default()
    }

    /// Whether any limit answered without its store, because that failed: let through or denied uncounted, or counted in this
    /// process alone.
    pub fn degraded(&self) -> bool {
        self.limits.iter().any(|limit| limit.source.is_fallback())
    }

    /// What each limit said, in the order of the charge.
    pub fn limits(&self) -> &[LimitOutcome<'a>] {
        &self.limits
    }
}

/// Which of the limits binds. A limit that only watches does so where all others do too.
fn binding(limits: &[LimitOutcome<'_>]) -> usize {
    let mut best = 0;
    for (index, limit) in limits.iter().enumerate().skip(1) {
        let bound = &limits[best];
        let binds = match limit.shadow.cmp(&bound.shadow) {
            Ordering::Equal if limit.shadow => has_less_left(&limit.outcome, &bound.outcome),
            Ordering::Equal => binds_over(&limit.outcome, &bound.outcome),
            order => order.is_lt(),
        };
        if binds {
            best = index;
        }
    }
    best
}

/// Whether one answer binds rather than another: a denial rather than an admission, of two denials the one that asks for the
/// longer wait, else the one with the smaller share left.
#[inline]
pub(crate) fn binds_over(one: &Outcome, other: &Outcome) -> bool {
    // A wait of `None` is never, the longest of all.
    let wait = |outcome: &Outcome| outcome.retry_after.map_or(u64::MAX, Micros::get);
    match (one.allowed, other.allowed) {
        (false, false) => wait(one) > wait(other),
        (true, true) => has_less_left(one, other),
        (allowed, _) => !allowed,
    }
}

/// Shares are compared without dividing: a/b < c/d iff a*d < c*b.
#[inline]
fn has_less_left(one: &Outcome, other: &Outcome) -> bool {
    let share = |x: &Outcome, y: &Outcome| u128::from(x.remaining) * u128::from(y.capacity);
    share(one, other) < share(other, one)
}

/// `allowed by api, 19 of 20 left` or `denied by login, retry after 30s`.
impl fmt::Display for Decision<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = self.binding();
        if bound.shadow && !bound.outcome.allowed {
            return write!(
                f,
                "allowed by {}, which only watches and would have said: {}",
                bound.name, bound.outcome
            );
        }
        let words = bound.outcome.to_string();
        let (verdict, rest) = words.split_once(',').unwrap_or((&words, ""));
        write!(f, "{verdict} by {},{rest}", bound.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(name: &'static str, remaining: u64, capacity: u64) -> LimitOutcome<'static> {
        let outcome = Outcome { capacity, remaining, ..Outcome::UNLIMITED };
        LimitOutcome { name, outcome, shadow: false, source: Source::Store }
    }

    fn denying(name: &'static str, retry_after: Option<u64>) -> LimitOutcome<'static> {
        let retry_after = retry_after.map(Micros::from_secs);
        let outcome =
            Outcome { allowed: false, retry_after, remaining: 0, capacity: 10, ..Outcome::UNLIMITED };
        LimitOutcome { name, outcome, shadow: false, source: Source::Store }
    }

    fn watching(limit: LimitOutcome<'static>) -> LimitOutcome<'static> {
        LimitOutcome { shadow: true, ..limit }
    }

    #[test]
    fn the_binding_limit_is_the_longest_wait_else_the_smallest_share() {
        for (limits, name, retry_after, words) in [
            (vec![limit("a", 5, 10)], "a", Some(0), "allowed by a, 5 of 10 left"),
            (vec![limit("a", 5, 10), limit("b", 50, 1000)], "b", Some(0), "allowed by b, 50 of 1000 left"),
            (vec![limit("a", 5, 10), limit("b", 1, 2)], "a", Some(0), "allowed by a, 5 of 10 left"),
            (vec![limit("a", 0, 10), denying("b", Some(3))], "b", Some(3), "denied by b, retry after 3s"),
            (vec![denying("a", Some(9)), denying("b", Some(3))], "a", Some(9), "denied by a, retry after 9s"),
            (vec![denying("a", Some(9)), denying("b", None)], "b", None, "denied by b, can never fit"),
            (
                vec![limit("a", 9, 10), watching(denying("b", None))],
                "a",
                Some(0),
                "allowed by a, 9 of 10 left",
            ),
            (
                vec![watching(denying("b", Some(1)))],
                "b",
                Some(0),
                "allowed by b, which only watches and would have said: denied, retry after 1s",
            ),
        ] {
            let decision = Decision::new(limits.into());
            assert_eq!(decision.binding().name, name, "{decision}");
            assert_eq!(decision.retry_after(), retry_after.map(Micros::from_secs), "{decision}");
            assert_eq!(decision.to_string(), words);
            assert_eq!(decision.allowed(), words.starts_with("allowed"));
        }
    }

    #[test]
    fn the_delay_is_the_longest_of_an_admitted_charge() {
        let delayed = |name, ms| {
            let mut limit = limit(name, 1, 2);
            limit.outcome.delay = Micros::from_millis(ms);
            limit
        };
        let decision = Decision::new(vec![delayed("a", 100), delayed("b", 300)].into());
        assert_eq!(decision.delay(), Micros::from_millis(300));
        let watching = LimitOutcome { shadow: true, ..delayed("c", 900) };
        let decision = Decision::new(vec![delayed("a", 100), watching].into());
        assert_eq!(decision.delay(), Micros::from_millis(100), "who only watches holds nobody back");
        let denied = Decision::new(vec![delayed("a", 100), denying("b", Some(1))].into());
        assert_eq!(denied.delay(), Micros::ZERO);
        assert_eq!(denied.limits().len(), 2);
    }
}
