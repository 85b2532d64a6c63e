//! What we hold our layer to, and whether this run reached it.

use super::Results;
use super::contestant::{
    EMPTY, GOVERNOR, GOVERNOR_SILENT, NONE, TOLLGATE, TOLLGATE_OLD, TOLLGATE_SILENT, TOLLGATE_THREE,
};
use super::rounds::{Cell, find};
use crate::goals::{Goal, Wanted};
use crate::report::spell_ratio;

/// Every goal.
pub(crate) fn judge(results: &Results) -> Vec<Goal> {
    let cost = |what: &str, cells: &[Cell]| Goal {
        what: what.into(),
        wanted: Wanted::AtMost(1.0),
        measured: added_over(cells, TOLLGATE, GOVERNOR),
        beside: format!(
            "X-RateLimit-* alone {}, no headers {}, three limits {}",
            spell_ratio(added_over(cells, TOLLGATE_OLD, GOVERNOR)),
            spell_ratio(added_over(cells, TOLLGATE_SILENT, GOVERNOR_SILENT)),
            spell_ratio(added_over(cells, TOLLGATE_THREE, GOVERNOR)),
        ),
    };
    vec![
        cost("CPU added to a request by five fields, of tower_governor's two", &results.network),
        cost("the same without a network", &results.direct),
        Goal {
            what: "requests/s of no layer, 1,000 keys".into(),
            wanted: Wanted::AtLeast(0.95),
            measured: rate_over(&results.network, TOLLGATE, NONE),
            beside: format!(
                "X-RateLimit-* alone {}, no headers {}, three limits {}, tower_governor {}, empty layer {}",
                spell_ratio(rate_over(&results.network, TOLLGATE_OLD, NONE)),
                spell_ratio(rate_over(&results.network, TOLLGATE_SILENT, NONE)),
                spell_ratio(rate_over(&results.network, TOLLGATE_THREE, NONE)),
                spell_ratio(rate_over(&results.network, GOVERNOR, NONE)),
                spell_ratio(rate_over(&results.network, EMPTY, NONE)),
            ),
        },
    ]
}

/// What one adds to no layer, over what the other does: of the medians, because a difference is too small to divide by in
/// every single round.
pub(crate) fn added_over(cells: &[Cell], name: &str, over: &str) -> Option<f64> {
    let none = find(cells, NONE)?;
    let added = |name| Some(find(cells, name)?.added_to(none)?.median);
    let (one, other) = (added(name)?, added(over)?);
    (other > 0.0).then_some(one / other)
}

/// The median share of requests a second.
pub(crate) fn rate_over(cells: &[Cell], name: &str, over: &str) -> Option<f64> {
    Some(find(cells, name)?.over(find(cells, over)?)?.median)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Grade;
    use crate::http::rounds::tests::cell;

    #[test]
    fn goals_are_judged_by_what_was_measured() {
        let network = vec![
            cell(NONE, &[100.0], &[10_000.0]),
            cell(TOLLGATE, &[96.0], &[10_600.0]),
            cell(GOVERNOR, &[97.0], &[10_500.0]),
        ];
        let direct = vec![cell(NONE, &[], &[100.0]), cell(TOLLGATE, &[], &[500.0])];
        let goals = judge(&Results { network, direct });
        let reported: Vec<_> = goals.iter().map(|goal| (goal.grade(), goal.measured)).collect();
        assert_eq!(
            reported,
            [(Grade::Missed, Some(1.2)), (Grade::NotMeasured, None), (Grade::Reached, Some(0.96))]
        );
    }
}
