//! What the checker found.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::{Call, Outcome};

/// The checks, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Check {
    /// A: the bound over the store's times.
    Exact,
    /// B: the bound over calls wholly inside an interval.
    BlackBox,
    /// C: versions.
    Versions,
    /// D: denials have a reason.
    Denials,
    /// E: what the store holds at rest.
    Rest,
    /// Calls end in time.
    Deadline,
    /// Every call has one of the expected labels, and the sums are right.
    Labels,
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Check::Exact => "A exact",
            Check::BlackBox => "B black box",
            Check::Versions => "C versions",
            Check::Denials => "D denials",
            Check::Rest => "E at rest",
            Check::Deadline => "deadline",
            Check::Labels => "labels",
        })
    }
}

/// One broken promise: for each check, kind and key the worst case is shown, and how often it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which check found it.
    pub check: Check,
    /// Whose state, if it is about one key.
    pub key: Option<u64>,
    /// How often it was found.
    pub count: u64,
    /// What happened, in words.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.check)?;
        if let Some(key) = self.key {
            write!(f, "key {key}: ")?;
        }
        f.write_str(&self.what)?;
        if self.count > 1 {
            write!(f, " ({} times in all)", self.count)?;
        }
        Ok(())
    }
}

/// What a history looks like, and which promises it breaks.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// All calls.
    pub calls: u64,
    /// How many keys they were for.
    pub keys: usize,
    /// Admitted by the store.
    pub admitted: u64,
    /// Denied by the store.
    pub denied: u64,
    /// Perhaps carried out.
    pub ambiguous: u64,
    /// Failed without effect.
    pub not_applied: u64,
    /// Answered without the store.
    pub fell_back: u64,
    /// Versions that no caller saw, over all keys: ambiguous calls that did take effect.
    pub gaps: u64,
    /// How often the state of keys was lost, at least, as versions show.
    pub losses_seen: u64,
    /// By how much the store holds less at rest than it acknowledged; only after declared losses is that allowed.
    pub lost_cost: u64,
    /// The fullest that any key was by check A: used and allowed.
    pub fullest: Option<(u64, u64)>,
    /// The longest call.
    pub worst_call_us: u64,
    /// How many calls each label has.
    pub labels: BTreeMap<String, u64>,
    /// The broken promises.
    pub violations: Vec<Violation>,
}

impl Report {
    pub(super) fn of(calls: &[Call]) -> Report {
        let mut report = Report::default();
        for call in calls {
            report.calls += 1;
            let count = match call.outcome {
                Outcome::Admitted => &mut report.admitted,
                Outcome::Denied => &mut report.denied,
                Outcome::Ambiguous => &mut report.ambiguous,
                Outcome::NotApplied => &mut report.not_applied,
                Outcome::FellBack => &mut report.fell_back,
            };
            *count += 1;
            report.worst_call_us = report.worst_call_us.max(call.end_us.saturating_sub(call.start_us));
            match report.labels.get_mut(call.label.as_ref()) {
                Some(count) => *count += 1,
                None => drop(report.labels.insert(call.label.clone().into_owned(), 1)),
            }
        }
        report
    }

    pub(super) fn violated(&mut self, check: Check, key: impl Into<Option<u64>>, count: u64, what: String) {
        self.violations.push(Violation { check, key: key.into(), count, what });
    }

    pub(super) fn note_fullest(&mut self, used: u64, allowed: u64) {
        let fuller =
            |(u, a): (u64, u64)| u128::from(used) * u128::from(a) > u128::from(u) * u128::from(allowed);
        if self.fullest.is_none_or(fuller) {
            self.fullest = Some((used, allowed));
        }
    }

    /// Whether every promise was kept.
    pub fn is_clean(&self) -> bool {
        self.violations.is_empty()
    }

    /// The checks that found something.
    pub fn flagged(&self) -> BTreeSet<Check> {
        self.violations.iter().map(|violation| violation.check).collect()
    }

    /// Panics with the whole report if a promise was broken.
    #[track_caller]
    pub fn assert_clean(&self) {
        assert!(self.is_clean(), "{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} calls for {} keys: {} admitted, ", self.calls, self.keys, self.admitted)?;
        write!(f, "{} denied, {} ambiguous, ", self.denied, self.ambiguous)?;
        writeln!(f, "{} not applied, {} fell back", self.not_applied, self.fell_back)?;
        if let Some((used, allowed)) = self.fullest {
            writeln!(f, "fullest: {used} of {allowed}")?;
        }
        write!(f, "gaps {}, losses seen {}, lost cost {}, ", self.gaps, self.losses_seen, self.lost_cost)?;
        writeln!(f, "longest call {} µs", self.worst_call_us)?;
        for (label, count) in &self.labels {
            writeln!(f, "label {label}: {count}")?;
        }
        if self.violations.is_empty() {
            return f.write_str("no violation");
        }
        for (index, violation) in self.violations.iter().enumerate() {
            let separator = if index == 0 { "" } else { "\n" };
            write!(f, "{separator}VIOLATION {violation}")?;
        }
        Ok(())
    }
}
