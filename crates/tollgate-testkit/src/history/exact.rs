//! Check A: the admissions keep the bound at the times at which the store made them.
//!
//! The definite admissions, sorted by the store's time, go through the meter; its level must never pass the capacity. They
//! are only a part of what was admitted, so a level that passes is a proof. Declared losses multiply the bound.

use super::meter::Meter;
use super::report::{Check, Report};
use super::{Bound, KeyHistory, Promises};

pub(super) fn check(key: &KeyHistory<'_>, bound: Bound, promises: &Promises, report: &mut Report) {
    let mut times: Vec<(u64, u64)> =
        key.admitted.iter().filter_map(|call| Some((call.store_time_us?, call.cost))).collect();
    if times.is_empty() {
        return;
    }
    times.sort_unstable();
    let mut meter = Meter::new(upper_bound(bound, !key.ambiguous.is_empty()), promises.losses + 1);
    let (mut fullest, mut over) = (0, Vec::new());
    for (time, cost) in times {
        let level = meter.add(time, cost);
        fullest = fullest.max(level);
        if level > meter.capacity {
            over.push((level, time));
        }
    }
    let allowed = meter.units(meter.capacity);
    report.note_fullest(meter.units(fullest), allowed);
    if let Some((level, time)) = over.iter().max() {
        let used = meter.units(*level);
        let what = format!("{used} of {allowed} were in use at the store's time {time} µs");
        report.violated(Check::Exact, key.key, over.len() as u64, what);
    }
}

/// A window that opens at the first admission may have been opened by an ambiguous call; then only the weaker bound of all
/// fixed windows is certain.
fn upper_bound(bound: Bound, some_ambiguous: bool) -> Bound {
    match bound {
        Bound::FirstWindow { limit, window_us } if some_ambiguous => {
            Bound::Window { limit: 2 * limit, window_us }
        }
        other => other,
    }
}
