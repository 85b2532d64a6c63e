//! Check D: nobody was turned away for whom there was room.
//!
//! For each denial, the fullest that the key can have been at that moment is worked out: all that was admitted, as late as it
//! can have been, and every ambiguous call that may have taken effect by then. If the cost would have fitted even so, the
//! denial had no reason. Two estimates are made, one from the calls' own times and one from the store's if there are any; both
//! are upper bounds, and the lower one counts. State that was lost only makes room, so losses change nothing here.

use super::meter::Meter;
use super::report::{Check, Report};
use super::{Bound, Call, KeyHistory, Promises, total};

pub(super) fn check(key: &KeyHistory<'_>, bound: Bound, promises: &Promises, report: &mut Report) {
    if key.denied.is_empty() {
        return;
    }
    let (capacity, per_unit) = {
        let meter = Meter::new(bound, 1);
        (meter.capacity, meter.per_unit)
    };
    let mut denied = key.denied.clone();
    denied.sort_unstable_by_key(|call| call.start_us);
    let by_calls = match bound {
        Bound::Bucket { count, .. } => bucket_by_calls(key, &denied, promises, (count, per_unit, capacity)),
        _ => window_by_calls(key, &denied, promises, span_of(bound), per_unit),
    };
    let by_store = by_store(key, &denied, promises, bound);
    let mut unjustified = Vec::new();
    for ((call, by_calls), by_store) in denied.iter().zip(by_calls).zip(by_store) {
        let level = by_store.map_or(by_calls, |by_store| by_store.min(by_calls));
        if level + i128::from(call.cost) * per_unit <= capacity {
            unjustified.push((level, call));
        }
    }
    if let Some((level, call)) = unjustified.iter().min_by_key(|(level, _)| *level) {
        let (used, allowed) = ((level + per_unit - 1) / per_unit, capacity / per_unit);
        let what = format!(
            "a call of cost {} was denied between {} and {} µs although at most {used} of {allowed} can have been in use",
            call.cost, call.start_us, call.end_us
        );
        report.violated(Check::Denials, key.key, unjustified.len() as u64, what);
    }
}

/// How far back a charge can still count, and a thousandth more, because the store's clock may run at another rate.
fn span_of(bound: Bound) -> u64 {
    let span = match bound {
        Bound::Bucket { .. } => 0,
        Bound::Window { window_us, .. }
        | Bound::FixedWindow { window_us, .. }
        | Bound::FirstWindow { window_us, .. } => window_us,
        // The whole window before the current one counts for something.
        Bound::WindowCounter { window_us, .. } => 2 * window_us,
    };
    span + span / 1000 + 2
}

/// Sums of costs up to a time.
struct Sums {
    times: Vec<u64>,
    sums: Vec<u64>,
}

impl Sums {
    fn new(times: impl Iterator<Item = (u64, u64)>) -> Sums {
        let mut pairs: Vec<(u64, u64)> = times.collect();
        pairs.sort_unstable();
        let mut sum = 0;
        let sums = std::iter::once(0).chain(pairs.iter().map(|(_, cost)| {
            sum += cost;
            sum
        }));
        let sums = sums.collect();
        Sums { times: pairs.into_iter().map(|(time, _)| time).collect(), sums }
    }

    fn up_to(&self, time: u64) -> u64 {
        self.sums[self.times.partition_point(|&at| at <= time)]
    }
}

/// Costs that may count at a moment: those that can have taken effect by then, less those that certainly no longer count.
struct MayCount {
    starts: Sums,
    ends: Sums,
}

impl MayCount {
    fn new(calls: &[&Call], latest: impl Fn(&Call) -> u64) -> MayCount {
        MayCount {
            starts: Sums::new(calls.iter().map(|call| (call.start_us, call.cost))),
            ends: Sums::new(calls.iter().map(|call| (latest(call), call.cost))),
        }
    }

    /// What started by `until` and took effect after `since`, at the latest moment that it can have.
    fn between(&self, since: Option<u64>, until: u64) -> i128 {
        i128::from(self.starts.up_to(until)) - i128::from(since.map_or(0, |since| self.ends.up_to(since)))
    }
}

/// An admission's latest possible moment, rounded up to the microsecond.
fn latest(call: &Call) -> u64 {
    call.end_us + 1
}

fn window_by_calls(
    key: &KeyHistory<'_>,
    denied: &[&Call],
    promises: &Promises,
    span_us: u64,
    per_unit: i128,
) -> Vec<i128> {
    let admitted = MayCount::new(&key.admitted, latest);
    let ambiguous = MayCount::new(&key.ambiguous, |call| promises.closes_at(call));
    let level = |call: &&Call| {
        let since = call.start_us.checked_sub(span_us);
        (admitted.between(since, call.end_us) + ambiguous.between(since, call.end_us)) * per_unit
    };
    denied.iter().map(level).collect()
}

/// The level at a denial's start, of all that had ended by then, and the whole of what may have come since.
fn bucket_by_calls(
    key: &KeyHistory<'_>,
    denied: &[&Call],
    promises: &Promises,
    (count, per_unit, capacity): (u64, i128, i128),
) -> Vec<i128> {
    let closed = key.ambiguous.iter().map(|call| (promises.closes_at(call), call.cost));
    let mut events: Vec<(u64, u64)> =
        key.admitted.iter().map(|call| (latest(call), call.cost)).chain(closed).collect();
    events.sort_unstable();
    let mut events = events.into_iter().peekable();
    let admitted = MayCount::new(&key.admitted, latest);
    let ambiguous = MayCount::new(&key.ambiguous, |call| promises.closes_at(call));
    // In thousandths, so that the bucket can drain by a thousandth more slowly than it should: the store's clock may. A level
    // never passes the capacity, if the limiter is right, and this keeps the slowness from adding up.
    let (mut level, mut at_us) = (0i128, 0);
    let mut advance = |to_us: u64, cost: u64| {
        let drained = i128::from(to_us - at_us) * i128::from(count) * 999;
        at_us = to_us;
        level = (level - drained).max(0) + i128::from(cost) * per_unit * 1000;
        level = level.min(capacity * 1000);
        (level + 999) / 1000
    };
    let mut levels = Vec::with_capacity(denied.len());
    for call in denied {
        while let Some((time, cost)) = events.next_if(|(time, _)| *time <= call.start_us) {
            advance(time, cost);
        }
        let since = Some(call.start_us);
        let recent = admitted.between(since, call.end_us) + ambiguous.between(since, call.end_us);
        levels.push(advance(call.start_us, 0) + recent * per_unit);
    }
    levels
}

/// The level by the store's times: of all that was admitted by the time of the denial, and the whole of every ambiguous call
/// that may count. Only if all admissions have such times.
fn by_store(key: &KeyHistory<'_>, denied: &[&Call], promises: &Promises, bound: Bound) -> Vec<Option<i128>> {
    let mut levels = vec![None; denied.len()];
    let Some(admitted) = key.admitted.iter().map(|call| call.store_time_us).collect::<Option<Vec<u64>>>()
    else {
        return levels;
    };
    let mut admitted: Vec<(u64, u64)> =
        admitted.into_iter().zip(&key.admitted).map(|(time, call)| (time, call.cost)).collect();
    admitted.sort_unstable();
    let mut admitted = admitted.into_iter().peekable();
    let mut order: Vec<(u64, usize)> =
        denied.iter().enumerate().filter_map(|(index, call)| Some((call.store_time_us?, index))).collect();
    order.sort_unstable();
    let ambiguous = MayCount::new(&key.ambiguous, |call| promises.closes_at(call));
    let everything = i128::from(total(&key.ambiguous));
    let mut meter = Meter::new(sliding(bound), 1);
    for (time, index) in order {
        while let Some((time, cost)) = admitted.next_if(|(at, _)| *at <= time) {
            meter.add(time, cost);
        }
        let call = denied[index];
        // A bucket that is never empty remembers for ever.
        let since = match bound {
            Bound::Bucket { .. } => None,
            _ => call.start_us.checked_sub(span_of(bound)),
        };
        let perhaps = ambiguous.between(since, call.end_us).min(everything);
        levels[index] = Some(meter.level(time) + perhaps * meter.per_unit);
    }
    levels
}

/// Where a window that opens at the first admission began is not certain, but it holds no more than the span before now.
fn sliding(bound: Bound) -> Bound {
    match bound {
        Bound::FirstWindow { limit, window_us } => Bound::Window { limit, window_us },
        other => other,
    }
}
