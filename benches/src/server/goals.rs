//! What we hold our server to, and whether this run reached it.

use super::cast::{
    CHECK, CRAB_HTTP, CRAB_RESP, DENIED, GRPC, GRPC_16, GRPC_16_ONE, GRPC_CONSTANT, GRPC_CONSTANT_ONE,
    GRPC_ONE, HTTP, HTTP_16, HTTP_64, HTTP_CONSTANT, INCR, THROTTLE,
};
use super::rounds::{Cell, Sample, find};
use crate::goals::{Goal, Wanted};
use crate::harness::Quartiles;
use crate::report::spell_ratio;

/// What is read from a sample.
type Figure = fn(&Sample) -> f64;

/// Every goal of the protocols that were asked for.
pub(crate) fn judge(cells: &[Cell]) -> Vec<Goal> {
    let goal = |what: &str, wanted, of: Figure, (name, over), beside: &[(&str, &str, &str)]| {
        let ratio = ratio(cells, name, over, of);
        let spread = ratio.map(|ratio| format!("Q1–Q3 {:.2}–{:.2}", ratio.q1, ratio.q3));
        let others = beside.iter().map(|(word, name, over)| {
            format!("{word} {}", spell_ratio(self::ratio(cells, name, over, of).map(|ratio| ratio.median)))
        });
        Goal {
            what: what.into(),
            wanted,
            measured: ratio.map(|ratio| ratio.median),
            beside: spread.into_iter().chain(others).collect::<Vec<_>>().join(", "),
        }
    };
    let (rate, cpu) = (rate as Figure, cpu as Figure);
    let of_incr = [("denied", DENIED, INCR), ("TOLLGATE.CHECK", CHECK, INCR)];
    let of_crab = [("denied", DENIED, CRAB_RESP), ("TOLLGATE.CHECK", CHECK, CRAB_RESP)];
    let has = |name: &str| find(cells, name).is_some();
    let mut goals = Vec::new();
    if has(INCR) {
        goals.extend([
            goal("RESP: requests/s of INCR", Wanted::AtLeast(1.5), rate, (THROTTLE, INCR), &of_incr),
            goal("RESP: CPU of INCR's", Wanted::AtMost(0.6), cpu, (THROTTLE, INCR), &of_incr),
            goal(
                "RESP: CPU of a denied CL.THROTTLE, of an allowed one",
                Wanted::AtMost(1.3),
                cpu,
                (DENIED, THROTTLE),
                &[],
            ),
            goal("RESP: CPU of throttlecrab's", Wanted::AtMost(0.125), cpu, (THROTTLE, CRAB_RESP), &of_crab),
        ]);
    }
    if has(HTTP) {
        goals.extend([
            goal("HTTP: requests/s of throttlecrab", Wanted::AtLeast(1.4), rate, (HTTP, CRAB_HTTP), &[]),
            goal(
                "HTTP: requests/s of a constant axum",
                Wanted::AtLeast(0.95),
                rate,
                (HTTP, HTTP_CONSTANT),
                &[],
            ),
            goal(
                "HTTP: checks/s of 16 in a call, over single",
                Wanted::AtLeast(5.0),
                rate,
                (HTTP_16, HTTP),
                &[("of 64", HTTP_64, HTTP)],
            ),
        ]);
    }
    if has(GRPC) {
        goals.extend([
            goal(
                "Envoy: CPU of a constant tonic's",
                Wanted::AtMost(1.15),
                cpu,
                (GRPC, GRPC_CONSTANT),
                &[("1x64", GRPC_ONE, GRPC_CONSTANT_ONE)],
            ),
            goal(
                "Envoy: checks/s of 16 in a call, over single",
                Wanted::AtLeast(5.0),
                rate,
                (GRPC_16, GRPC),
                &[("1x64", GRPC_16_ONE, GRPC_ONE)],
            ),
        ]);
    }
    goals
}

pub(crate) fn rate(sample: &Sample) -> f64 {
    sample.per_second
}

pub(crate) fn cpu(sample: &Sample) -> f64 {
    sample.server_us
}

/// The quartiles of what one had over what the other had, by name.
pub(crate) fn ratio(
    cells: &[Cell],
    name: &str,
    over: &str,
    of: impl Fn(&Sample) -> f64,
) -> Option<Quartiles> {
    find(cells, name)?.over(find(cells, over)?, of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::goals::Grade;
    use crate::server::rounds::tests::cell;

    #[test]
    fn goals_are_judged_by_what_was_measured() {
        let cells = [
            cell(INCR, &[(100.0, 1.0)]),
            cell(THROTTLE, &[(140.0, 0.5)]),
            cell(DENIED, &[(120.0, 0.7)]),
            cell(GRPC, &[(10.0, 11.0)]),
            cell(GRPC_CONSTANT, &[(10.0, 10.0)]),
        ];
        let goals = judge(&cells);
        let reported: Vec<_> = goals.iter().map(|goal| (goal.grade(), goal.measured)).collect();
        use Grade::{Missed, NotMeasured, Reached};
        let none = (NotMeasured, None);
        let (denied, envoy) = ((Missed, Some(1.4)), (Reached, Some(1.1)));
        assert_eq!(reported, [(Missed, Some(1.4)), (Reached, Some(0.5)), denied, none, envoy, none]);
    }
}
