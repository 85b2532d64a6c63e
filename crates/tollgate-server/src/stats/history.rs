//! What was counted under one limit in the last hour and the last day: sums of minutes and of quarters of an hour.
//!
//! Filled from the ring of seconds when a second is over for good, so the way of a decision does not know of it.

use super::ring::Series;

/// How long a sum is, in seconds, and how many are kept.
const MINUTE: (u64, usize) = (60, 60);
const QUARTER: (u64, usize) = (900, 96);

/// The sums of one limit.
pub(crate) struct History {
    minutes: Sums,
    quarters: Sums,
}

struct Sums {
    length: u64,
    /// Which sum it is, counted from 1970, and what was counted.
    places: Box<[(u64, [u64; 4])]>,
}

impl Default for History {
    fn default() -> History {
        History { minutes: Sums::new(MINUTE), quarters: Sums::new(QUARTER) }
    }
}

impl History {
    /// Adds what was counted in a second.
    pub(crate) fn add(&mut self, second: u64, counts: [u64; 4]) {
        if counts != [0; 4] {
            self.minutes.add(second, counts);
            self.quarters.add(second, counts);
        }
    }

    /// The minutes of the last hour, that of `second` last.
    pub(crate) fn minutes(&self, second: u64) -> Series {
        self.minutes.series(second)
    }

    /// The quarters of an hour of the last day.
    pub(crate) fn quarters(&self, second: u64) -> Series {
        self.quarters.series(second)
    }

    /// Whether anything was counted in the last day.
    pub(crate) fn is_in_use(&self, second: u64) -> bool {
        let newest = second / self.quarters.length;
        let count = self.quarters.places.len() as u64;
        self.quarters.places.iter().any(|(number, counts)| *counts != [0; 4] && number + count > newest)
    }
}

impl Sums {
    fn new((length, count): (u64, usize)) -> Sums {
        Sums { length, places: vec![(0, [0; 4]); count].into() }
    }

    fn index(&self, number: u64) -> usize {
        usize::try_from(number % self.places.len() as u64).unwrap_or(0)
    }

    fn add(&mut self, second: u64, counts: [u64; 4]) {
        let number = second / self.length;
        let index = self.index(number);
        let place = &mut self.places[index];
        if place.0 != number {
            *place = (number, [0; 4]);
        }
        place.1.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
    }

    fn series(&self, second: u64) -> Series {
        let newest = second / self.length;
        let oldest = (newest + 1).saturating_sub(self.places.len() as u64);
        let mut series = Series::default();
        for number in oldest..=newest {
            let place = self.places[self.index(number)];
            let counts = if place.0 == number { place.1 } else { [0; 4] };
            series.push(counts);
        }
        series
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_add_up_to_minutes_and_quarters_and_pass() {
        const START: u64 = 1_700_000_100; // the first second of a minute, and of a quarter of an hour
        let mut history = History::default();
        for second in 0..120 {
            history.add(START + second, [2, 1, 0, 0]);
        }
        let minutes = history.minutes(START + 119);
        assert_eq!(
            (minutes.allowed.len(), &minutes.allowed[58..], &minutes.denied[58..]),
            (60, &[120, 120][..], &[60, 60][..])
        );
        let quarters = history.quarters(START + 119);
        assert_eq!((quarters.allowed.len(), quarters.allowed[95]), (96, 240));
        assert_eq!(
            history.minutes(START + 3_600).allowed.iter().sum::<u64>(),
            120,
            "the first minute has passed"
        );
        assert_eq!(history.minutes(START + 7_200).allowed.iter().sum::<u64>(), 0);
        assert!(history.is_in_use(START + 23 * 3_600) && !history.is_in_use(START + 25 * 3_600));
    }
}
