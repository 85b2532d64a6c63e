//! How long decisions took: a histogram for each of the last minutes, and percentiles over time, in constant memory.

use std::collections::VecDeque;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

/// How many minutes are looked at, that of now among them.
const MINUTES: usize = 5;

/// The longest time that is measured, in nanoseconds; what takes longer counts as this.
const LONGEST_NS: u64 = 60_000_000_000;

/// How many seconds the shortest step over time has, and how many of each step are kept.
const FIVE: u64 = 5;
const FIVES: usize = 60;
const HOUR: usize = 60;
const QUARTER: u64 = 15;
const QUARTERS: usize = 96;

/// The last minutes, and percentiles over time.
pub(crate) struct Latency {
    minutes: [Histogram<u64>; MINUTES],
    /// The minute of now.
    minute: u64,
    /// What was timed in the five seconds of now, and in the quarter of an hour of now.
    five: Histogram<u64>,
    quarter: Histogram<u64>,
    /// The number of the five seconds of now.
    number: u64,
    over_time: OverTime,
}

/// p50, p95 and p99 in nanoseconds of each step that has ended, oldest first; `None` where nothing was timed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct OverTime {
    fives: VecDeque<Option<[u64; 3]>>,
    minutes: VecDeque<Option<[u64; 3]>>,
    quarters: VecDeque<Option<[u64; 3]>>,
}

fn percentiles_of(histogram: &Histogram<u64>) -> Option<[u64; 3]> {
    let at = |quantile| histogram.value_at_quantile(quantile);
    (!histogram.is_empty()).then(|| [at(0.5), at(0.95), at(0.99)])
}

/// Adds a step, and after it as many empty ones as have passed besides.
fn add(steps: &mut VecDeque<Option<[u64; 3]>>, most: usize, step: Option<[u64; 3]>, passed: u64) {
    let empty = usize::try_from(passed.saturating_sub(1)).unwrap_or(most).min(most);
    for step in std::iter::once(step).chain(std::iter::repeat_n(None, empty)) {
        if steps.len() == most {
            steps.pop_front();
        }
        steps.push_back(step);
    }
}

/// How long half of the decisions took at most, and 95 and 99 in a hundred.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Percentiles {
    pub(crate) samples: u64,
    pub(crate) p50: Duration,
    pub(crate) p95: Duration,
    pub(crate) p99: Duration,
}

fn histogram() -> Histogram<u64> {
    match Histogram::new_with_bounds(1, LONGEST_NS, 2) {
        Ok(histogram) => histogram,
        Err(error) => unreachable!("two digits between these bounds are sound: {error}"),
    }
}

impl Latency {
    pub(crate) fn new(second: u64) -> Latency {
        Latency {
            minutes: std::array::from_fn(|_| histogram()),
            minute: second / 60,
            five: histogram(),
            quarter: histogram(),
            number: second / FIVE,
            over_time: OverTime::default(),
        }
    }

    fn place(minute: u64) -> usize {
        // Less than MINUTES, which is a usize.
        #[allow(clippy::cast_possible_truncation)]
        let place = (minute % MINUTES as u64) as usize;
        place
    }

    /// Forgets the minutes that have passed when `second` begins.
    pub(crate) fn turn(&mut self, second: u64) {
        let minute = second / 60;
        self.step(second, minute);
        let fresh = (self.minute + 1).max(minute.saturating_sub(MINUTES as u64))..=minute;
        fresh.for_each(|minute| self.minutes[Latency::place(minute)].reset());
        self.minute = self.minute.max(minute);
    }

    /// Ends the steps that are over when `second` begins.
    fn step(&mut self, second: u64, minute: u64) {
        let passed = (second / FIVE).saturating_sub(self.number);
        if passed > 0 {
            add(&mut self.over_time.fives, FIVES, percentiles_of(&self.five), passed);
            self.five.reset();
            self.number += passed;
        }
        let passed = minute.saturating_sub(self.minute);
        if passed > 0 {
            let ended = percentiles_of(&self.minutes[Latency::place(self.minute)]);
            add(&mut self.over_time.minutes, HOUR, ended, passed);
        }
        let passed = (minute / QUARTER).saturating_sub(self.minute / QUARTER);
        if passed > 0 {
            add(&mut self.over_time.quarters, QUARTERS, percentiles_of(&self.quarter), passed);
            self.quarter.reset();
        }
    }

    pub(crate) fn over_time(&self) -> OverTime {
        self.over_time.clone()
    }

    pub(crate) fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).clamp(1, LONGEST_NS);
        self.minutes[Latency::place(self.minute)].saturating_record(ns);
        self.five.saturating_record(ns);
        self.quarter.saturating_record(ns);
    }

    /// Nothing, if nothing was timed.
    pub(crate) fn percentiles(&self) -> Option<Percentiles> {
        let mut all = histogram();
        for minute in &self.minutes {
            // They have the same bounds, so each fits into the sum.
            let _ = all.add(minute);
        }
        let at = |quantile| Duration::from_nanos(all.value_at_quantile(quantile));
        let some = Percentiles { samples: all.len(), p50: at(0.5), p95: at(0.95), p99: at(0.99) };
        (!all.is_empty()).then_some(some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_kept_over_time_and_bounded() {
        let mut latency = Latency::new(0);
        latency.record(Duration::from_millis(1));
        latency.turn(4);
        assert_eq!(latency.over_time(), OverTime::default(), "the first step has not ended");
        latency.turn(5);
        latency.record(Duration::from_millis(9));
        latency.turn(20);
        let fives = latency.over_time().fives;
        assert_eq!(fives.len(), 4);
        let p50 = |step: Option<[u64; 3]>| step.map(|[p50, ..]| p50 / 1_000_000);
        assert_eq!(fives.into_iter().map(p50).collect::<Vec<_>>(), [Some(1), Some(9), None, None]);
        latency.turn(60);
        assert_eq!(latency.over_time().minutes.len(), 1);
        latency.turn(1_000_000);
        let all = latency.over_time();
        assert_eq!((all.fives.len(), all.minutes.len(), all.quarters.len()), (FIVES, HOUR, QUARTERS));
    }

    #[test]
    fn the_last_five_minutes_are_reported() {
        let mut latency = Latency::new(0);
        assert!(latency.percentiles().is_none());
        for ms in 1..=100 {
            latency.record(Duration::from_millis(ms));
        }
        latency.turn(240);
        let percentiles = latency.percentiles().expect("some");
        let near = |duration: Duration, ms: u128| duration.as_millis().abs_diff(ms) <= 1;
        assert!(
            near(percentiles.p50, 50) && near(percentiles.p95, 95) && near(percentiles.p99, 99),
            "{percentiles:?}"
        );
        assert_eq!(percentiles.samples, 100);
        latency.record(Duration::MAX);
        latency.turn(300);
        assert_eq!(latency.percentiles().expect("one").samples, 1);
        latency.turn(1_000_000);
        assert!(latency.percentiles().is_none());
    }
}
