//! Says whether a limiter kept its promises, from the record of many concurrent calls.
//!
//! Every call is recorded with its start and end on one monotonic clock, its cost and what became of it; in test builds also
//! with the instant at which the store decided and a version of the key's state, both returned by the same atomic step. Each
//! check is a file below, and each is one-sided: it never raises a false alarm, and what it flags is a proof.
//!
//! - **A, exact**: the admissions, at the store's own times, keep the bound of the strategy (`exact.rs`).
//! - **B, black box**: so do the calls that lie wholly inside an interval, without any help from the store (`black_box.rs`).
//! - **C, versions**: no version twice, none missing without an ambiguous call to explain it, order as in real time
//!   (`versions.rs`).
//! - **D, denials**: nobody was turned away for whom there was room (`denials.rs`).
//! - **E, at rest**: what the store holds in the end lies between what was acknowledged and what may have been done; and every
//!   call ended in time, under the right label (`rest.rs`).
//!
//! Upper bounds count definite admissions only; lower bounds add every ambiguous call that may have been carried out. An
//! ambiguous call may take effect at any time after its start, for ever, unless the promises say that it is closed some time
//! after its end.

mod black_box;
mod call;
mod denials;
mod exact;
mod meter;
mod report;
mod rest;
mod versions;

use std::collections::BTreeMap;

pub use call::{Call, Outcome, Recorder, now_us};
pub use report::{Check, Report, Violation};

/// What a strategy promises about the costs that it admits, as the kernel defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Token bucket, and leaky bucket as a meter: at most `burst + count/period_us * t` in any interval t.
    Bucket {
        /// How much at once.
        burst: u64,
        /// How much comes back every period.
        count: u64,
        /// The period.
        period_us: u64,
    },
    /// Sliding window: at most `limit` in any half-open span of `window_us`.
    Window {
        /// How much.
        limit: u64,
        /// In which time.
        window_us: u64,
    },
    /// Fixed windows at multiples of `window_us` of the store's time.
    FixedWindow {
        /// How much.
        limit: u64,
        /// In which time.
        window_us: u64,
    },
    /// Fixed windows that open at the first admission after the last one ended.
    FirstWindow {
        /// How much.
        limit: u64,
        /// In which time.
        window_us: u64,
    },
    /// Sliding window counter: at most `limit` by its estimate from two windows at multiples of `window_us`.
    WindowCounter {
        /// How much.
        limit: u64,
        /// In which time.
        window_us: u64,
    },
}

/// What a history is held to. All keys have the same bound.
///
/// ```
/// use tollgate_testkit::history::{Bound, Promises};
/// let bound = Bound::Window { limit: 50, window_us: 1_000_000 };
/// let promises = Promises::of(bound).losses(1).deadline(100_000, 10_000).ambiguous_close_after(100_000);
/// assert_eq!(promises.bound(), Some(bound));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Promises {
    bound: Option<Bound>,
    losses: u64,
    first_version: Option<u64>,
    ambiguous_close_after_us: Option<u64>,
    at_rest: BTreeMap<u64, u64>,
    deadline_us: Option<(u64, u64)>,
    labels: Option<BTreeMap<String, u64>>,
    denials_are_free: bool,
}

impl Promises {
    /// The bound of a strategy: no state is lost, and versions start at 1.
    pub fn of(bound: Bound) -> Promises {
        Promises { bound: Some(bound), first_version: Some(1), ..Promises::default() }
    }

    /// No bound: only versions, rest, deadlines and labels are checked.
    pub fn without_bound() -> Promises {
        Promises { first_version: Some(1), ..Promises::default() }
    }

    /// The bound.
    pub fn bound(&self) -> Option<Bound> {
        self.bound
    }

    /// Each key's state may have been lost this often (a fail-over, a flush): bounds hold this many times more, and versions
    /// may step back this often.
    #[must_use]
    pub fn losses(mut self, losses: u64) -> Self {
        self.losses = losses;
        self
    }

    /// The version of a key's first admission; `None` if the history began in the middle. 1 by default.
    #[must_use]
    pub fn first_version(mut self, version: Option<u64>) -> Self {
        self.first_version = version;
        self
    }

    /// An ambiguous call can take effect no later than this after its end, because it carries a time after which the store
    /// refuses it. By default it can take effect for ever.
    #[must_use]
    pub fn ambiguous_close_after(mut self, us: u64) -> Self {
        self.ambiguous_close_after_us = Some(us);
        self
    }

    /// What the store holds for a key once all is quiet: the costs of all that it has ever admitted.
    #[must_use]
    pub fn at_rest(mut self, key: u64, stored: u64) -> Self {
        self.at_rest.insert(key, stored);
        self
    }

    /// Every call ends within `deadline_us`, or `slack_us` later, which is for the machine's scheduler.
    #[must_use]
    pub fn deadline(mut self, deadline_us: u64, slack_us: u64) -> Self {
        self.deadline_us = Some((deadline_us, slack_us));
        self
    }

    /// How many calls the caller saw answered under each label: all labels must be there, and no others.
    #[must_use]
    pub fn labels<L: Into<String>>(mut self, counts: impl IntoIterator<Item = (L, u64)>) -> Self {
        self.labels = Some(counts.into_iter().map(|(label, count)| (label.into(), count)).collect());
        self
    }

    /// Denials need no reason, as with limiters that deny on purpose (leases, shadow limits, several limits in one charge).
    #[must_use]
    pub fn denials_need_no_reason(mut self) -> Self {
        self.denials_are_free = true;
        self
    }

    /// After this, an ambiguous call can no longer take effect.
    fn closes_at(&self, call: &Call) -> u64 {
        self.ambiguous_close_after_us.map_or(u64::MAX, |after| call.end_us.saturating_add(after))
    }
}

/// The calls of a test, in no particular order.
#[derive(Clone, Debug, Default)]
pub struct History {
    calls: Vec<Call>,
}

impl FromIterator<Call> for History {
    fn from_iter<I: IntoIterator<Item = Call>>(calls: I) -> Self {
        History { calls: calls.into_iter().collect() }
    }
}

impl Extend<Call> for History {
    fn extend<I: IntoIterator<Item = Call>>(&mut self, calls: I) {
        self.calls.extend(calls);
    }
}

impl History {
    /// The calls.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// A key's admissions in the order of their versions, for replaying them through a model.
    pub fn in_version_order(&self, key: u64) -> Vec<&Call> {
        let admitted =
            |call: &&Call| call.key == key && call.outcome == Outcome::Admitted && call.version.is_some();
        let mut calls: Vec<&Call> = self.calls.iter().filter(admitted).collect();
        calls.sort_by_key(|call| call.version);
        calls
    }

    /// Holds the history to the promises. In O(n log n): 300,000 calls take about a second.
    pub fn check(&self, promises: &Promises) -> Report {
        let mut report = Report::of(&self.calls);
        let mut by_key: BTreeMap<u64, Vec<&Call>> = BTreeMap::new();
        for call in &self.calls {
            by_key.entry(call.key).or_default().push(call);
        }
        report.keys = by_key.len();
        for (key, calls) in &by_key {
            let key = KeyHistory::new(*key, calls);
            if let Some(bound) = promises.bound {
                exact::check(&key, bound, promises, &mut report);
                black_box::check(&key, bound, promises, &mut report);
                if !promises.denials_are_free {
                    denials::check(&key, bound, promises, &mut report);
                }
            }
            versions::check(&key, promises, &mut report);
            rest::check(&key, promises, &mut report);
        }
        rest::check_deadlines(&self.calls, promises, &mut report);
        rest::check_labels(promises, &mut report);
        report
    }
}

/// The calls of one key, sorted out.
struct KeyHistory<'a> {
    key: u64,
    admitted: Vec<&'a Call>,
    denied: Vec<&'a Call>,
    ambiguous: Vec<&'a Call>,
}

impl<'a> KeyHistory<'a> {
    fn new(key: u64, calls: &[&'a Call]) -> KeyHistory<'a> {
        let with = |outcome| calls.iter().copied().filter(|call| call.outcome == outcome).collect();
        KeyHistory {
            key,
            admitted: with(Outcome::Admitted),
            denied: with(Outcome::Denied),
            ambiguous: with(Outcome::Ambiguous),
        }
    }
}

fn total(calls: &[&Call]) -> u64 {
    calls.iter().map(|call| call.cost).sum()
}
