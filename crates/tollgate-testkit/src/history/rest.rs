//! Check E, and what needs no theory: the store at rest, deadlines, labels.

use super::report::{Check, Report};
use super::{Call, KeyHistory, Promises, total};

/// When all is quiet: acknowledged ≤ stored ≤ acknowledged + ambiguous. Declared losses excuse the lower bound only.
pub(super) fn check(key: &KeyHistory<'_>, promises: &Promises, report: &mut Report) {
    let Some(&stored) = promises.at_rest.get(&key.key) else { return };
    let (acknowledged, ambiguous) = (total(&key.admitted), total(&key.ambiguous));
    report.lost_cost += acknowledged.saturating_sub(stored);
    if stored < acknowledged && promises.losses == 0 {
        let what = format!("the store holds {stored}, but {acknowledged} were acknowledged");
        report.violated(Check::Rest, key.key, 1, what);
    }
    if stored > acknowledged + ambiguous {
        let what = format!(
            "the store holds {stored}, but only {acknowledged} were acknowledged and {ambiguous} ambiguous: \
             some call was carried out twice, or one that was denied was charged"
        );
        report.violated(Check::Rest, key.key, 1, what);
    }
}

pub(super) fn check_deadlines(calls: &[Call], promises: &Promises, report: &mut Report) {
    let Some((deadline_us, slack_us)) = promises.deadline_us else { return };
    let took = |call: &Call| call.end_us.saturating_sub(call.start_us);
    let late = calls.iter().filter(|call| took(call) > deadline_us + slack_us).count();
    if late > 0 {
        let worst = report.worst_call_us;
        let what = format!("a call took {worst} µs; allowed are {deadline_us} and {slack_us} of slack");
        report.violated(Check::Deadline, None, late as u64, what);
    }
}

pub(super) fn check_labels(promises: &Promises, report: &mut Report) {
    let Some(expected) = &promises.labels else { return };
    let names: std::collections::BTreeSet<String> =
        expected.keys().chain(report.labels.keys()).cloned().collect();
    for name in names {
        let (seen, reported) = (report.labels.get(&name).copied(), expected.get(&name).copied());
        let (seen, reported) = (seen.unwrap_or(0), reported.unwrap_or(0));
        if seen != reported {
            let what = format!("{seen} calls are labelled `{name}`, but the caller saw {reported}");
            report.violated(Check::Labels, None, seen.abs_diff(reported), what);
        }
    }
}
