//! How long decisions took in the last minutes: a histogram for each of them, in constant memory.

use std::time::Duration;

use hdrhistogram::Histogram;

/// How many minutes are looked at, that of now among them.
const MINUTES: usize = 5;

/// The longest time that is measured, in nanoseconds; what takes longer counts as this.
const LONGEST_NS: u64 = 60_000_000_000;

/// The last minutes.
pub(crate) struct Latency {
    minutes: [Histogram<u64>; MINUTES],
    /// The minute of now.
    minute: u64,
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
        Latency { minutes: std::array::from_fn(|_| histogram()), minute: second / 60 }
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
        let fresh = (self.minute + 1).max(minute.saturating_sub(MINUTES as u64))..=minute;
        fresh.for_each(|minute| self.minutes[Latency::place(minute)].reset());
        self.minute = self.minute.max(minute);
    }

    pub(crate) fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.minutes[Latency::place(self.minute)].saturating_record(ns.clamp(1, LONGEST_NS));
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
    fn the_last_five_minutes_are_told() {
        let mut latency = Latency::new(0);
        assert!(latency.percentiles().is_none());
        for ms in 1..=100 {
            latency.record(Duration::from_millis(ms));
        }
        latency.turn(240);
        let told = latency.percentiles().expect("some");
        let near = |duration: Duration, ms: u128| duration.as_millis().abs_diff(ms) <= 1;
        assert!(near(told.p50, 50) && near(told.p95, 95) && near(told.p99, 99), "{told:?}");
        assert_eq!(told.samples, 100);
        latency.record(Duration::MAX);
        latency.turn(300);
        assert_eq!(latency.percentiles().expect("one").samples, 1);
        latency.turn(1_000_000);
        assert!(latency.percentiles().is_none());
    }
}
