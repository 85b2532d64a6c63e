//! What a row of the page shows of a limit at a glance, of the last minutes: how full the fullest key was, and how long decisions took. In constant memory.
//!
//! Admissions that come as numbers (memory store, fast path) say nothing of keys, so of the memory store the fullest key is known once one is denied.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

/// How many minutes are looked at, that of now among them.
const MINUTES: usize = 5;

/// A share is kept in thousandths, beside the minute that it is of.
const WHOLE: u64 = 1_000;
const SHARES: u64 = 1_024;

/// How many buckets a doubling of time has, and how many there are: up to about a minute.
const A_DOUBLING: u32 = 8;
const BUCKETS: usize = 36 * A_DOUBLING as usize;

/// The last minutes of one limit.
#[derive(Default)]
pub(crate) struct Glance {
    /// For each minute, the minute and the largest share: a later minute is always the larger number.
    fullest: [AtomicU64; MINUTES],
    took: Mutex<Took>,
}

/// How long decisions took, in buckets that each are some 9 % longer than the one before. Made once something was timed.
#[derive(Default)]
struct Took(Vec<(u64, Box<[u32; BUCKETS]>)>);

fn place(minute: u64) -> usize {
    // Less than MINUTES, which is a usize.
    #[allow(clippy::cast_possible_truncation)]
    let place = (minute % MINUTES as u64) as usize;
    place
}

impl Glance {
    /// Notes what a key had left of how much. What has no capacity is not full of anything.
    pub(super) fn note(&self, second: u64, remaining: u64, capacity: u64, is_denied: bool) {
        if capacity == 0 || capacity == u64::MAX {
            return;
        }
        let used = u128::from(capacity.saturating_sub(remaining)) * u128::from(WHOLE);
        let share = u64::try_from(used / u128::from(capacity)).unwrap_or(WHOLE).min(WHOLE);
        let share = if is_denied { WHOLE } else { share };
        let minute = second / 60;
        let slot = &self.fullest[place(minute)];
        let noted = minute * SHARES + share;
        if slot.load(Ordering::Relaxed) < noted {
            slot.fetch_max(noted, Ordering::Relaxed);
        }
    }

    /// The share of the fullest key, from 0 to 1; `None` if none is known.
    #[expect(clippy::cast_precision_loss, reason = "a share for people")]
    pub(crate) fn fullest(&self, second: u64) -> Option<f64> {
        let oldest = (second / 60).saturating_sub(MINUTES as u64 - 1).max(1) * SHARES;
        let slots = self.fullest.iter().map(|slot| slot.load(Ordering::Relaxed));
        slots
            .filter(|&noted| noted >= oldest)
            .map(|noted| noted % SHARES)
            .max()
            .map(|share| share as f64 / WHOLE as f64)
    }

    /// Notes how long a decision took.
    pub(super) fn record(&self, second: u64, took: Duration) {
        let minute = second / 60;
        let mut all = self.took.lock();
        if all.0.is_empty() {
            all.0.resize_with(MINUTES, || (0, Box::new([0; BUCKETS])));
        }
        let (number, counts) = &mut all.0[place(minute)];
        if *number != minute {
            (*number, **counts) = (minute, [0; BUCKETS]);
        }
        let count = &mut counts[bucket(took)];
        *count = count.saturating_add(1);
    }

    /// How long 99 of 100 decisions took at most, to the edge of a bucket, in nanoseconds; `None` if none was timed.
    pub(crate) fn p99_ns(&self, second: u64) -> Option<u64> {
        let oldest = (second / 60).saturating_sub(MINUTES as u64 - 1);
        let all = self.took.lock();
        let recent = || all.0.iter().filter(|(number, _)| *number >= oldest && *number > 0);
        let total: u64 = recent().flat_map(|(_, counts)| counts.iter()).map(|&count| u64::from(count)).sum();
        let rank = (total * 99).div_ceil(100);
        let mut seen = 0;
        let is_reached = |index: &usize| {
            seen += recent().map(|(_, counts)| u64::from(counts[*index])).sum::<u64>();
            seen >= rank
        };
        (total > 0).then(|| (0..BUCKETS).find(is_reached).map(upper_edge_ns)).flatten()
    }
}

/// The bucket of a time: eight to a doubling, by its first four binary digits.
fn bucket(took: Duration) -> usize {
    let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(A_DOUBLING.into());
    let doublings = ns.ilog2() - A_DOUBLING.ilog2();
    let within = (ns >> doublings) - u64::from(A_DOUBLING);
    let index = u64::from(doublings) * u64::from(A_DOUBLING) + within;
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The longest time of a bucket.
fn upper_edge_ns(bucket: usize) -> u64 {
    let (doublings, within) = (bucket / A_DOUBLING as usize, bucket % A_DOUBLING as usize);
    ((A_DOUBLING as u64 + within as u64 + 1) << doublings) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_below_the_edge_of_its_bucket_and_near_to_it() {
        for ns in
            (0..40).map(|power| 3u64.pow(power % 24)).chain([0, 7, 8, 15, 16, 17, 1_000_000, 59_000_000_000])
        {
            let edge = upper_edge_ns(bucket(Duration::from_nanos(ns)));
            assert!(edge >= ns && edge <= ns.max(8) * 9 / 8 + 1, "{ns}: {edge}");
        }
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
    }

    #[test]
    fn the_last_minutes_are_shown() {
        let glance = Glance::default();
        assert_eq!((glance.fullest(600), glance.p99_ns(600)), (None, None));
        glance.note(600, 3, 4, false);
        glance.note(601, 9, 10, false);
        for ms in 1..=100 {
            glance.record(600, Duration::from_millis(ms));
        }
        assert_eq!(glance.fullest(601), Some(0.25));
        let p99 = glance.p99_ns(601).expect("some") / 1_000_000;
        assert!((99..=112).contains(&p99), "{p99} ms");
        glance.note(660, 1, 4, true);
        assert_eq!(
            glance.fullest(660),
            Some(1.0),
            "a denied key is full, whatever is left for smaller costs"
        );
        glance.note(661, 0, 0, true);
        glance.note(661, 0, u64::MAX, false);
        glance.note(900, 5, 5, false);
        assert_eq!(glance.fullest(660 + 240), Some(1.0));
        assert_eq!((glance.fullest(660 + 300), glance.p99_ns(660 + 300)), (Some(0.0), None), "minutes pass");
    }
}
