//! What we hold ourselves to, and whether this run reached it.
//!
//! A goal is about Tollgate in one cell, over governor as it comes in the same rounds. Single checks are judged on one thread
//! in the allowed regime; what the same keys give on two threads and denied stands beside it. A missed goal is a finding, and
//! a failure only where `--strict` asks for it ([`strictly`]), as every command knows it; so is a goal that a whole run did not measure. `-- latency` (`stores/latency.rs`) and `-- soak` always
//! fail.

use std::fmt;

use crate::contestant::{COARSE, Call, OURSELVES, Regime, TUNED};
use crate::harness::Measurement;
use crate::report::{Results, spell_ratio};
use crate::scene::{FIVE_MILLION, MILLION, ONE_KEY, Scene, THOUSAND};
use crate::workload::{KeySet, Spread};

/// A bound on a measured ratio, or on a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Wanted {
    AtLeast(f64),
    AtMost(f64),
    BelowMillis(f64),
    AtMostMillis(f64),
    AtLeastAMinute(f64),
    AtMostBytes(f64),
    AtMostMib(f64),
    /// Of what must not happen.
    Never,
}

impl Wanted {
    /// What was measured, in the unit of the bound.
    pub(crate) fn spell(self, measured: Option<f64>) -> String {
        match (self, measured) {
            (Wanted::BelowMillis(_) | Wanted::AtMostMillis(_), Some(millis)) => format!("{millis:.2} ms"),
            (Wanted::AtLeastAMinute(_), Some(count)) => format!("{count:.0} a minute"),
            (Wanted::AtMostBytes(_), Some(bytes)) => format!("{bytes:.0} B"),
            (Wanted::AtMostMib(_), Some(mib)) => format!("{mib:.0} MiB"),
            (Wanted::Never, Some(count)) => format!("{count:.0}"),
            (_, measured) => spell_ratio(measured),
        }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Wanted::AtLeast(ratio) => write!(f, "≥ {ratio}x"),
            Wanted::AtMost(ratio) => write!(f, "≤ {ratio}x"),
            Wanted::BelowMillis(millis) => write!(f, "< {millis} ms"),
            Wanted::AtMostMillis(millis) => write!(f, "≤ {millis} ms"),
            Wanted::AtLeastAMinute(count) => write!(f, "≥ {count} a minute"),
            Wanted::AtMostBytes(bytes) => write!(f, "≤ {bytes} B"),
            Wanted::AtMostMib(mib) => write!(f, "≤ {mib} MiB"),
            Wanted::Never => f.write_str("0"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grade {
    Reached,
    Missed,
    NotMeasured,
}

impl Grade {
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Grade::Reached => "reached",
            Grade::Missed => "missed",
            Grade::NotMeasured => "not measured",
        }
    }
}

/// One goal and what this run says to it.
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) wanted: Wanted,
    pub(crate) measured: Option<f64>,
    /// Related ratios that are not judged.
    pub(crate) beside: String,
}

impl Goal {
    pub(crate) fn grade(&self) -> Grade {
        let reached = self.measured.map(|measured| match self.wanted {
            Wanted::AtLeast(least) | Wanted::AtLeastAMinute(least) => measured >= least,
            Wanted::AtMost(most)
            | Wanted::AtMostBytes(most)
            | Wanted::AtMostMib(most)
            | Wanted::AtMostMillis(most) => measured <= most,
            Wanted::Never => measured == 0.0,
            Wanted::BelowMillis(millis) => measured < millis,
        });
        match reached {
            Some(true) => Grade::Reached,
            Some(false) => Grade::Missed,
            None => Grade::NotMeasured,
        }
    }
}

/// Which goals fail a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strict {
    /// None: a missed goal is a finding.
    Off,
    /// Missed ones. A run of some parts or cells measures only some goals.
    Missed,
    /// Missed ones, and those that were not measured: a peer that could not be built must not make its goals look reached.
    MissedOrNotMeasured,
}

impl Strict {
    /// For a run with or without `--strict`, of everything or only of parts.
    pub(crate) const fn of(is_strict: bool, is_partial: bool) -> Strict {
        match (is_strict, is_partial) {
            (false, _) => Strict::Off,
            (true, true) => Strict::Missed,
            (true, false) => Strict::MissedOrNotMeasured,
        }
    }
}

/// How a run ends: under `--strict` with an error that names the goals that failed it.
pub(crate) fn strictly(strict: Strict, goals: &[Goal]) -> Result<(), String> {
    let of = |grade: Grade, what: &str| {
        let goals: Vec<&str> =
            goals.iter().filter(|goal| goal.grade() == grade).map(|goal| goal.what.as_str()).collect();
        (!goals.is_empty()).then(|| format!("{} goals were {what}: {}", goals.len(), goals.join("; ")))
    };
    let missed = of(Grade::Missed, "missed").filter(|_| strict != Strict::Off);
    let not_measured =
        of(Grade::NotMeasured, "not measured").filter(|_| strict == Strict::MissedOrNotMeasured);
    let failed: Vec<String> = missed.into_iter().chain(not_measured).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join(". ")) }
}

/// Every goal, in the order of the cells.
pub(crate) fn judge(results: &Results) -> Vec<Goal> {
    use Spread::{Uniform, Zipf};

    let mut goals = vec![
        check_goal(results, "one hot key", ONE_KEY, Uniform, 1.9),
        check_goal(results, "1,000 keys", THOUSAND, Uniform, 1.8),
        check_goal(results, "1,000,000 keys, zipf", MILLION, Zipf, 3.0),
        check_goal(results, "1,000,000 keys, uniform", MILLION, Uniform, 3.2),
        check_goal(results, "5,000,000 keys, uniform", FIVE_MILLION, Uniform, 3.5),
    ];

    let many = Scene { call: Call::Many, ..Scene::check(MILLION, Uniform, Regime::Allow) };
    goals.push(Goal {
        what: "check_many of 16, 1,000,000 keys, uniform".into(),
        wanted: Wanted::AtLeast(8.0),
        measured: speed_up(results, many, 1),
        beside: beside(results, [("zipf 1T", Scene { spread: Zipf, ..many }, 1), ("2T", many, 2)]),
    });

    let denied = Scene::check(ONE_KEY, Uniform, Regime::Deny);
    goals.push(Goal {
        what: "one denied key on two threads".into(),
        wanted: Wanted::AtLeast(3.5),
        measured: speed_up(results, denied, 2),
        beside: String::new(),
    });
    goals.push(Goal {
        what: "the same over our own cost on one thread".into(),
        wanted: Wanted::AtMost(1.2),
        measured: median(results, denied, 2).zip(median(results, denied, 1)).map(|(two, one)| two / one),
        beside: String::new(),
    });

    goals.extend([MILLION, FIVE_MILLION].map(|keys| Goal {
        what: format!("bytes per key, {} keys", keys.word()),
        wanted: Wanted::AtMost(0.45),
        measured: {
            let ours =
                results.memory.iter().find(|memory| memory.contestant == OURSELVES && memory.keys == keys);
            ours.and_then(|memory| results.share_of_bytes(memory))
        },
        beside: String::new(),
    }));

    for (threads, of_thousand, of_million) in [(1, 1.6, 2.7), (2, 1.4, 2.5)] {
        let cells =
            [(THOUSAND, Uniform, of_thousand), (MILLION, Uniform, of_million), (MILLION, Zipf, of_million)];
        goals.extend(cells.map(|(keys, spread, least)| Goal {
            what: format!("two limits in one charge, {threads}T, {} {}", keys.word(), spread.word()),
            wanted: Wanted::AtLeast(least),
            measured: {
                let pair = Scene { call: Call::Pair, ..Scene::check(keys, spread, Regime::Allow) };
                speed_up(results, pair, threads)
            },
            beside: String::new(),
        }));
    }

    let coarse_hot = Scene::check(ONE_KEY, Uniform, Regime::Allow);
    goals.push(Goal {
        what: "one hot key, coarse clock".into(),
        wanted: Wanted::AtLeast(2.5),
        measured: of(results, COARSE, coarse_hot, 1).and_then(|coarse| results.speed_up(coarse)),
        beside: String::new(),
    });
    let least = least_over_tuned(results);
    goals.push(Goal {
        what: "coarse clock over tuned governor, in the cell where it is least".into(),
        wanted: Wanted::AtLeast(1.0),
        measured: least.as_ref().map(|(ratio, _)| *ratio),
        beside: least.map(|(_, cell)| cell).unwrap_or_default(),
    });
    goals
}

fn check_goal(results: &Results, what: &str, keys: KeySet, spread: Spread, least: f64) -> Goal {
    let allowed = Scene::check(keys, spread, Regime::Allow);
    let denied = Scene::check(keys, spread, Regime::Deny);
    Goal {
        what: what.into(),
        wanted: Wanted::AtLeast(least),
        measured: speed_up(results, allowed, 1),
        beside: beside(results, [("denied", denied, 1), ("2T", allowed, 2), ("2T denied", denied, 2)]),
    }
}

fn beside<const N: usize>(results: &Results, cells: [(&str, Scene, usize); N]) -> String {
    let measured = cells.into_iter().filter_map(|(name, scene, threads)| {
        speed_up(results, scene, threads).map(|ratio| format!("{name} {}", spell_ratio(Some(ratio))))
    });
    measured.collect::<Vec<_>>().join(", ")
}

fn speed_up(results: &Results, scene: Scene, threads: usize) -> Option<f64> {
    results.speed_up(ours(results, scene, threads)?)
}

fn median(results: &Results, scene: Scene, threads: usize) -> Option<f64> {
    ours(results, scene, threads)?.reported_median()
}

/// How many times faster we are with a coarse clock than the tuned governor, in the cell where that is least, and which that is.
fn least_over_tuned(results: &Results) -> Option<(f64, String)> {
    let coarse = results.measurements.iter().filter(|measurement| measurement.contestant == COARSE);
    let ratios = coarse.filter_map(|coarse| {
        let tuned = of(results, TUNED, coarse.scene, coarse.threads)?;
        Some((tuned.reported_median()? / coarse.reported_median()?, coarse.scene.cell(coarse.threads)))
    });
    ratios.min_by(|one, other| one.0.total_cmp(&other.0))
}

fn ours(results: &Results, scene: Scene, threads: usize) -> Option<&Measurement> {
    of(results, OURSELVES, scene, threads)
}

fn of<'r>(results: &'r Results, contestant: &str, scene: Scene, threads: usize) -> Option<&'r Measurement> {
    let measurements = results.measurements.iter();
    measurements.into_iter().find(|measurement| {
        measurement.contestant == contestant && measurement.scene == scene && measurement.threads == threads
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contestant::BASELINE;
    use crate::harness::Quartiles;
    use crate::memory::BytesPerKey;

    fn measured(contestant: &'static str, threads: usize, median: f64) -> Measurement {
        let scene = Scene::check(ONE_KEY, Spread::Uniform, Regime::Deny);
        let ns = Some(Quartiles { q1: median, median, q3: median });
        Measurement { scene, threads, contestant, ns, rounds: 9, attempts: 9, astray: 0, checks: 1 }
    }

    #[test]
    fn goals_are_judged_on_our_cells_and_the_rest_is_not_measured() {
        let keys = MILLION;
        let goals = judge(&Results {
            measurements: vec![
                measured(OURSELVES, 1, 10.0),
                measured(OURSELVES, 2, 13.0),
                measured(BASELINE, 2, 65.0),
                measured(TUNED, 1, 18.0),
                measured(COARSE, 1, 20.0),
                measured(TUNED, 2, 30.0),
                measured(COARSE, 2, 20.0),
            ],
            memory: vec![
                BytesPerKey { contestant: OURSELVES, keys, bytes: 45.0 },
                BytesPerKey { contestant: BASELINE, keys, bytes: 100.0 },
            ],
        });
        let reported: Vec<(&str, Option<f64>)> = goals
            .iter()
            .filter(|goal| goal.measured.is_some())
            .map(|goal| (goal.grade().word(), goal.measured))
            .collect();
        let [denied, threads, bytes, coarse] =
            [("reached", 5.0), ("missed", 1.3), ("reached", 0.45), ("missed", 0.9)]
                .map(|(word, ratio)| (word, Some(ratio)));
        assert_eq!(reported, [denied, threads, bytes, coarse]);
        assert_eq!(goals.last().map(|goal| &*goal.beside), Some("1T/1/uniform/deny/check"));
        assert_eq!(goals.len(), 18);
        let [off, some, all] = [(false, false), (true, true), (true, false)]
            .map(|(is_strict, is_partial)| Strict::of(is_strict, is_partial));
        assert_eq!(strictly(off, &goals), Ok(()));
        for (strict, parts) in [(some, 1), (all, 2)] {
            let error = strictly(strict, &goals).unwrap_err();
            assert!(error.starts_with("2 goals were missed: ") && error.contains("coarse"), "{error}");
            assert_eq!(error.split(". ").count(), parts, "{error}");
        }
        // A peer that could not be built leaves its goals without a measurement.
        let good = goals.into_iter().filter(|goal| goal.grade() != Grade::Missed).collect::<Vec<_>>();
        assert_eq!(strictly(some, &good), Ok(()), "cells that were not asked for");
        assert!(strictly(all, &good).is_err_and(|error| error.starts_with("14 goals were not measured: ")));
        let reached = good.into_iter().filter(|goal| goal.grade() == Grade::Reached).collect::<Vec<_>>();
        assert_eq!(strictly(all, &reached), Ok(()));
    }
}
