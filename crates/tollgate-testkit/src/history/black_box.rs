//! Check B: the bound, seen from outside, without any help from the store.
//!
//! Calls that lie wholly inside an interval were decided inside it, in whatever order. If more was admitted in them than the
//! strategy allows in an interval of that length, the bound is broken for certain. Calls that take long compared with the
//! window blind this check; they never mislead it. Intervals are stretched by a thousandth, because the store's clock may run
//! at another rate.

use super::report::{Check, Report};
use super::{Bound, Call, KeyHistory, Promises};

pub(super) fn check(key: &KeyHistory<'_>, bound: Bound, promises: &Promises, report: &mut Report) {
    let mut calls = key.admitted.clone();
    // The last to start comes first: an interval that begins at a call's start holds only calls that come before it here.
    calls.sort_unstable_by_key(|call| std::cmp::Reverse(call.start_us));
    let times = promises.losses + 1;
    let found = match bound {
        Bound::Bucket { burst, count, period_us } => {
            bucket(&calls, burst * times, i128::from(count) * i128::from(times), i128::from(period_us))
        }
        Bound::Window { limit, window_us } => window(&calls, limit * times, window_us),
        // Less than one window's length can touch two windows, and the estimate of two counters admits less than twice.
        Bound::FixedWindow { limit, window_us }
        | Bound::FirstWindow { limit, window_us }
        | Bound::WindowCounter { limit, window_us } => window(&calls, 2 * limit * times, window_us),
    };
    if let Some(found) = found {
        let Found { count, used, from_us, to_us } = found;
        let length = to_us - from_us;
        let what = format!(
            "calls wholly inside the {length} µs from {from_us} µs were admitted {used}, which is too much"
        );
        report.violated(Check::BlackBox, key.key, count, what);
    }
}

struct Found {
    count: u64,
    used: u64,
    from_us: u64,
    to_us: u64,
}

/// A call's end, rounded up to the microsecond.
fn end_of(call: &Call) -> u64 {
    call.end_us + 1
}

fn sorted_ends(calls: &[&Call]) -> Vec<u64> {
    let mut ends: Vec<u64> = calls.iter().map(|call| end_of(call)).collect();
    ends.sort_unstable();
    ends.dedup();
    ends
}

/// For each start, the sum of all that started no earlier and ended less than a window later.
fn window(calls: &[&Call], limit: u64, window_us: u64) -> Option<Found> {
    let ends = sorted_ends(calls);
    let window_us = window_us - window_us / 1000;
    // A tree of prefix sums over the ends (Fenwick).
    let mut tree = vec![0u64; ends.len() + 1];
    let mut worst: Option<Found> = None;
    for (index, call) in calls.iter().enumerate() {
        let mut at = ends.partition_point(|&end| end < end_of(call)) + 1;
        while at < tree.len() {
            tree[at] += call.cost;
            at += at & at.wrapping_neg();
        }
        if calls.get(index + 1).is_some_and(|next| next.start_us == call.start_us) {
            continue;
        }
        let to_us = call.start_us + window_us;
        let mut at = ends.partition_point(|&end| end < to_us);
        let mut used = 0;
        while at > 0 {
            used += tree[at];
            at &= at - 1;
        }
        if used > limit {
            let count = 1 + worst.as_ref().map_or(0, |worst| worst.count);
            let fuller = worst.as_ref().is_none_or(|worst| used > worst.used);
            let found = Found { count, used, from_us: call.start_us, to_us };
            worst = Some(if fuller { found } else { Found { count, ..worst.unwrap_or(found) } });
        }
    }
    worst
}

/// For each start a and end b, the sum of all calls inside may not pass `burst + rate * (b - a)`. Scaled by the period and
/// sorted about: the greatest over b of `sum * period - count * b`, plus `count * a`, may not pass `burst * period`.
fn bucket(calls: &[&Call], burst: u64, count: i128, period: i128) -> Option<Found> {
    let ends = sorted_ends(calls);
    let first = calls.last()?.start_us;
    // Stretched by a thousandth, in units of a thousandth.
    let (count, period) = (count * 1001, period * 1000);
    let since = |time: u64| i128::from(time.saturating_sub(first)) * count;
    // An end counts once a call with this end lies inside: else the interval could end before it begins.
    let mut tree = MaxTree::new(ends.iter().map(|&end| -since(end) - NOT_YET).collect());
    let mut counts = vec![false; ends.len()];
    let mut worst: Option<(i128, u64, u64)> = None;
    let mut violations = 0;
    for (index, call) in calls.iter().enumerate() {
        let from = ends.partition_point(|&end| end < end_of(call));
        if !std::mem::replace(&mut counts[from], true) {
            tree.add_at(from, NOT_YET);
        }
        tree.add_from(from, i128::from(call.cost) * period);
        if calls.get(index + 1).is_some_and(|next| next.start_us == call.start_us) {
            continue;
        }
        let (greatest, at) = tree.greatest();
        let excess = greatest + since(call.start_us) - i128::from(burst) * period;
        if excess > 0 {
            violations += 1;
            if worst.is_none_or(|(worst, _, _)| excess > worst) {
                worst = Some((excess, call.start_us, ends[at]));
            }
        }
    }
    let (_, from_us, to_us) = worst?;
    let inside = |call: &&&Call| call.start_us >= from_us && end_of(call) <= to_us;
    let used = calls.iter().filter(inside).map(|call| call.cost).sum();
    Some(Found { count: violations, used, from_us, to_us })
}

/// Far more than any number that a history can lead to.
const NOT_YET: i128 = 1 << 110;

/// Numbers in a row: add to one, add to all from a place on, ask for the greatest and its place. All in O(log n).
struct MaxTree {
    size: usize,
    /// Of each node, the greatest below it, without what was added above it.
    greatest: Vec<(i128, usize)>,
    /// Of each node, what was added to all below it.
    added: Vec<i128>,
}

impl MaxTree {
    fn new(values: Vec<i128>) -> MaxTree {
        let size = values.len().next_power_of_two();
        let mut greatest = vec![(-2 * NOT_YET, 0); 2 * size];
        for (index, value) in values.into_iter().enumerate() {
            greatest[size + index] = (value, index);
        }
        for node in (1..size).rev() {
            greatest[node] = greatest[2 * node].max(greatest[2 * node + 1]);
        }
        MaxTree { size, greatest, added: vec![0; 2 * size] }
    }

    fn add_at(&mut self, at: usize, value: i128) {
        self.climb(at, value, 0);
    }

    fn add_from(&mut self, from: usize, value: i128) {
        self.climb(from, value, value);
    }

    /// Adds one value to a leaf and another to all that lies to its right, climbing from the leaf to the root.
    fn climb(&mut self, leaf: usize, value: i128, right: i128) {
        let mut node = self.size + leaf;
        self.add_to(node, value);
        while node > 1 {
            if node.is_multiple_of(2) {
                self.add_to(node + 1, right);
            }
            node /= 2;
            let (greatest, at) = self.greatest[2 * node].max(self.greatest[2 * node + 1]);
            self.greatest[node] = (greatest + self.added[node], at);
        }
    }

    fn add_to(&mut self, node: usize, value: i128) {
        self.greatest[node].0 += value;
        self.added[node] += value;
    }

    fn greatest(&self) -> (i128, usize) {
        self.greatest[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Random;
    use crate::history::Outcome;

    fn random_calls(random: &mut Random) -> Vec<Call> {
        let count = 1 + random.below(30);
        let mut call = || {
            let start_us = random.below(20_000);
            let (end_us, cost) = (start_us + random.below(3000), 1 + random.below(5));
            let (outcome, label) = (Outcome::Admitted, "store".into());
            Call { key: 0, start_us, end_us, cost, outcome, version: None, store_time_us: None, label }
        };
        (0..count).map(|_| call()).collect()
    }

    /// The greatest sum inside any interval, less what is allowed in it, by trying all of them.
    fn by_trying(calls: &[&Call], excess: impl Fn(u64, u64) -> i128) -> bool {
        calls.iter().any(|first| {
            calls.iter().any(|last| {
                let (a, b) = (first.start_us, end_of(last));
                let inside = calls.iter().filter(|call| call.start_us >= a && end_of(call) <= b);
                let used: u64 = inside.map(|call| call.cost).sum();
                b > a && excess(used, b - a) > 0
            })
        })
    }

    #[test]
    fn the_quick_way_finds_what_trying_all_intervals_finds() {
        let mut random = Random::seeded(5);
        let (mut broken, mut kept) = (0, 0);
        for _ in 0..3000 {
            let calls = random_calls(&mut random);
            let mut calls: Vec<&Call> = calls.iter().collect();
            calls.sort_unstable_by_key(|call| std::cmp::Reverse(call.start_us));
            let (limit, window_us) = (5 + random.below(40), 1 + random.below(8000));
            let shorter = window_us - window_us / 1000;
            let over =
                |used, length| if length < shorter { i128::from(used) - i128::from(limit) } else { -1 };
            let found = window(&calls, limit, window_us);
            assert_eq!(found.is_some(), by_trying(&calls, over), "{calls:?} {limit} in {window_us}");
            let period = 100 + random.below(1000);
            let over = |used, length| {
                i128::from(used) * i128::from(period) * 1000
                    - i128::from(limit) * i128::from(period) * 1000
                    - i128::from(length) * 1001
            };
            let found = bucket(&calls, limit, 1, i128::from(period));
            assert_eq!(found.is_some(), by_trying(&calls, over), "{calls:?} {limit} and 1 in {period}");
            if let Some(Found { used, from_us, to_us, .. }) = found {
                assert!(over(used, to_us - from_us) > 0);
                broken += 1;
            } else {
                kept += 1;
            }
        }
        assert!(broken > 300 && kept > 300, "{broken} broken, {kept} kept");
    }
}
