//! Check C: the versions of a key's state, of which each admission makes the next.
//!
//! Three things can be wrong. A version that two admissions got, or one that is not above that of a call which had ended
//! before: the state was lost, or was never decided on atomically; this is allowed as often as losses were declared. And a
//! version that no caller saw: some call took effect without an answer, and there must be an ambiguous call, for each gap
//! another, that can have been it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::report::{Check, Report};
use super::{Call, KeyHistory, Promises};

pub(super) fn check(key: &KeyHistory<'_>, promises: &Promises, report: &mut Report) {
    let mut versioned: Vec<(u64, &Call)> =
        key.admitted.iter().filter_map(|call| Some((call.version?, *call))).collect();
    if versioned.is_empty() {
        return;
    }
    versioned.sort_unstable_by_key(|(version, call)| (*version, call.end_us));
    check_losses(key, &versioned, promises, report);
    check_gaps(key, &versioned, promises, report);
}

/// How often the state must have been lost at least, to explain what was seen.
fn check_losses(key: &KeyHistory<'_>, versioned: &[(u64, &Call)], promises: &Promises, report: &mut Report) {
    let same = versioned.chunk_by(|a, b| a.0 == b.0).max_by_key(|same| same.len()).unwrap_or(&[]);
    let repeats = versioned.len() - versioned.chunk_by(|a, b| a.0 == b.0).count();
    let steps = steps_back(versioned);
    let losses = (same.len() as u64).saturating_sub(1).max(steps.count);
    report.losses_seen += losses;
    if losses <= promises.losses {
        return;
    }
    let declared = promises.losses;
    if let [(version, _), _, ..] = same {
        let what =
            format!("{} admissions made the same version {version}; {declared} losses declared", same.len());
        report.violated(Check::Versions, key.key, repeats as u64, what);
    }
    if let Some([before, after]) = steps.example {
        let what = format!(
            "an admission that ended at {} µs made version {}, one that started later, at {} µs, made version {}; \
             the state was lost {losses} times at least, {declared} losses declared",
            before.1.end_us, before.0, after.1.start_us, after.0
        );
        report.violated(Check::Versions, key.key, steps.count, what);
    }
}

struct Steps<'a> {
    count: u64,
    /// Two calls, one after the other, with the versions that they made.
    example: Option<[(u64, &'a Call); 2]>,
}

/// The longest row of calls of which each ended before the next started, and made a version not below the next one's: each
/// step in it needs a loss of its own.
fn steps_back<'a>(versioned: &[(u64, &'a Call)]) -> Steps<'a> {
    // Events in the order of time: a call's row is known at its start and can be continued from its end on. Starts come first
    // among equals, because calls that touch may have overlapped.
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * versioned.len());
    for (index, (_, call)) in versioned.iter().enumerate() {
        events.push((call.start_us, false, index));
        events.push((call.end_us, true, index));
    }
    events.sort_unstable();
    // For versions from some place on, the longest row that has ended and its last call (a Fenwick tree of maxima, turned
    // about). Equal versions must find each other, so places are those of the first of equals.
    let count = versioned.len();
    let place = |index: usize| versioned.partition_point(|(version, _)| *version < versioned[index].0);
    let mut longest: Vec<(u64, usize)> = vec![(0, usize::MAX); count + 1];
    let mut rows: Vec<(u64, usize)> = vec![(0, usize::MAX); count];
    for (_, ended, index) in events {
        let mut at = count - place(index);
        if ended {
            let row = (rows[index].0, index);
            while at <= count {
                longest[at] = longest[at].max(row);
                at += at & at.wrapping_neg();
            }
        } else {
            let mut before = (0, usize::MAX);
            while at > 0 {
                before = before.max(longest[at]);
                at &= at - 1;
            }
            rows[index] = (before.0 + 1, before.1);
        }
    }
    let Some((last, row)) = rows.iter().enumerate().max_by_key(|(_, row)| row.0) else {
        return Steps { count: 0, example: None };
    };
    let example = versioned.get(row.1).map(|before| [*before, versioned[last]]);
    Steps { count: row.0.saturating_sub(1), example }
}

/// A version that no caller saw was made between the start of every call that made a lower one and the end of every call
/// that made a higher one. Across losses versions tell nothing about time, and then only the numbers must agree.
fn check_gaps(key: &KeyHistory<'_>, versioned: &[(u64, &Call)], promises: &Promises, report: &mut Report) {
    let in_order = promises.losses == 0;
    let mut earliest_end: Vec<u64> =
        versioned.iter().map(|(_, call)| if in_order { call.end_us } else { u64::MAX }).collect();
    for index in (1..earliest_end.len()).rev() {
        earliest_end[index - 1] = earliest_end[index - 1].min(earliest_end[index]);
    }
    let mut ambiguous = key.ambiguous.clone();
    ambiguous.sort_unstable_by_key(|call| call.start_us);
    let mut waiting = ambiguous.into_iter().peekable();
    // Those that have started, the first to be closed on top: both ends of the gaps only ever grow, so taking it first is
    // best.
    let mut open: BinaryHeap<Reverse<u64>> = BinaryHeap::new();
    let (mut gaps, mut unexplained) = (0u64, Vec::new());
    let mut next = promises.first_version.unwrap_or(versioned[0].0);
    let mut latest_start = 0;
    for (index, (version, call)) in versioned.iter().enumerate() {
        let missing = version.saturating_sub(next);
        gaps += missing;
        while let Some(started) = waiting.next_if(|call| call.start_us <= earliest_end[index]) {
            open.push(Reverse(promises.closes_at(started)));
        }
        while in_order && open.peek().is_some_and(|Reverse(closes)| *closes < latest_start) {
            open.pop();
        }
        let explained = usize::try_from(missing).unwrap_or(usize::MAX).min(open.len());
        for _ in 0..explained {
            open.pop();
        }
        if (explained as u64) < missing {
            unexplained.push((next, missing - explained as u64));
        }
        next = next.max(version.saturating_add(1));
        latest_start = latest_start.max(call.start_us);
    }
    report.gaps += gaps;
    if let Some((version, _)) = unexplained.first() {
        let count = unexplained.iter().map(|(_, missing)| missing).sum();
        let what = format!(
            "no caller saw version {version}, and no ambiguous call can have made it; \
             {gaps} versions are missing, {} calls were ambiguous",
            key.ambiguous.len()
        );
        report.violated(Check::Versions, key.key, count, what);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;
    use crate::history::Outcome;

    /// The longest row of steps back, by trying all that can come before each.
    fn by_trying(versioned: &[(u64, &Call)]) -> u64 {
        let mut order: Vec<_> = versioned.to_vec();
        order.sort_unstable_by_key(|(_, call)| call.start_us);
        let mut rows: Vec<u64> = Vec::new();
        for (version, call) in &order {
            let before = order
                .iter()
                .zip(&rows)
                .filter(|((before, other), _)| other.end_us < call.start_us && before >= version);
            rows.push(1 + before.map(|(_, row)| *row).max().unwrap_or(0));
        }
        rows.into_iter().max().unwrap_or(0).saturating_sub(1)
    }

    #[test]
    fn the_quick_way_finds_the_longest_row_of_steps_back() {
        let mut random = Random::seeded(6);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3000 {
            let count = 1 + random.below(25);
            let mut call = || {
                let start_us = random.below(300);
                let (end_us, version) = (start_us + random.below(40), Some(1 + random.below(30)));
                let (outcome, label) = (Outcome::Admitted, "store".into());
                Call { key: 0, start_us, end_us, cost: 1, outcome, version, store_time_us: None, label }
            };
            let calls: Vec<Call> = (0..count).map(|_| call()).collect();
            let mut versioned: Vec<(u64, &Call)> =
                calls.iter().map(|call| (call.version.unwrap_or(0), call)).collect();
            versioned.sort_unstable_by_key(|(version, call)| (*version, call.end_us));
            let steps = steps_back(&versioned);
            assert_eq!(steps.count, by_trying(&versioned), "{calls:?}");
            if let Some([before, after]) = steps.example {
                assert!(before.1.end_us < after.1.start_us && before.0 >= after.0);
            }
            seen.insert(steps.count);
        }
        assert!(seen.len() > 5);
    }
}
