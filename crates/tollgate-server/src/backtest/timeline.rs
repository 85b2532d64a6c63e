//! Traffic over time: at most forty buckets of a round length that people can name.

use serde::Serialize;

const MOST_BUCKETS: u64 = 40;

const MILLISECOND: u64 = 1_000;
const SECOND: u64 = 1_000_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Lengths of more than a millisecond that read well; shorter and longer ones are made by doubling.
const ROUND: [u64; 33] = [
    MILLISECOND,
    2 * MILLISECOND,
    5 * MILLISECOND,
    10 * MILLISECOND,
    20 * MILLISECOND,
    50 * MILLISECOND,
    100 * MILLISECOND,
    200 * MILLISECOND,
    500 * MILLISECOND,
    SECOND,
    2 * SECOND,
    5 * SECOND,
    10 * SECOND,
    15 * SECOND,
    30 * SECOND,
    MINUTE,
    2 * MINUTE,
    5 * MINUTE,
    10 * MINUTE,
    15 * MINUTE,
    30 * MINUTE,
    HOUR,
    2 * HOUR,
    3 * HOUR,
    6 * HOUR,
    12 * HOUR,
    DAY,
    2 * DAY,
    7 * DAY,
    14 * DAY,
    28 * DAY,
    91 * DAY,
    365 * DAY,
];

/// What happened in one stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Bucket {
    pub(super) start_us: u64,
    pub(super) allowed: u64,
    pub(super) denied: u64,
    /// What shadow limits would have denied; part of `allowed`.
    pub(super) would_deny: u64,
}

/// Stretches of equal length, one after the other; they start at multiples of their length since 1970.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Timeline {
    pub(super) bucket_us: u64,
    pub(super) buckets: Vec<Bucket>,
}

impl Timeline {
    /// Empty buckets from the first instant to the last.
    pub(super) fn over(first_us: u64, last_us: u64) -> Timeline {
        let start = |length: u64| first_us - first_us % length;
        let count = |length: u64| (last_us - start(length)) / length + 1;
        let longer = std::iter::successors(Some(2 * 365 * DAY), |length| length.checked_mul(2));
        let bucket_us = if first_us == last_us {
            SECOND
        } else {
            ROUND.into_iter().chain(longer).find(|&length| count(length) <= MOST_BUCKETS).unwrap_or(u64::MAX)
        };
        let buckets = (0..count(bucket_us))
            .map(|index| Bucket { start_us: start(bucket_us) + index * bucket_us, ..Bucket::default() })
            .collect();
        Timeline { bucket_us, buckets }
    }

    /// The bucket of an instant between the first and the last.
    pub(super) fn at(&mut self, instant_us: u64) -> &mut Bucket {
        let index = (instant_us - self.buckets[0].start_us) / self.bucket_us;
        // There are at most forty.
        &mut self.buckets[usize::try_from(index).unwrap_or(usize::MAX)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_few_and_round() {
        let t = 1_700_000_000 * SECOND;
        for (first, last, bucket_us, count) in [
            (t, t, SECOND, 1),
            (t, t + 1, MILLISECOND, 1),
            (t, t + 39 * MILLISECOND, MILLISECOND, 40),
            (t, t + 40 * MILLISECOND, 2 * MILLISECOND, 21),
            (t, t + 5 * MINUTE, 10 * SECOND, 31),
            (t + 7 * SECOND, t + HOUR, 2 * MINUTE, 31),
            (t, t + 30 * DAY, DAY, 31),
            (0, 253_402_207_200_999_999, 2 * 2 * 2 * 2 * 2 * 2 * 2 * 2 * 365 * DAY, 32),
        ] {
            let mut line = Timeline::over(first, last);
            assert_eq!((line.bucket_us, line.buckets.len()), (bucket_us, count), "{first} to {last}");
            assert!(line.buckets[0].start_us <= first && line.buckets[0].start_us.is_multiple_of(bucket_us));
            line.at(first).allowed += 1;
            line.at(last).denied += 1;
            assert_eq!(line.buckets[0].allowed, 1);
            assert_eq!(line.buckets[count - 1].denied, 1);
        }
    }
}
