//! Whether a run was stable: a pure function of its samples.
//!
//! The first third of a run is for warming up and is not judged. The middle third is the plateau, and the last third is compared with it,
//! median against median, so that single intervals in which the machine was busy with something else decide nothing. Only growth fails:
//! memory that is given back and answers that become faster are no harm. What disturbed intervals measured is judged for memory, because a
//! server that keeps what a fault made it allocate leaks, but not for latency.

use std::time::Duration;

use super::Sample;

/// The heap may be above its plateau by this share.
const HEAP_GROWTH: f64 = 0.05;

/// In a short run it may be above it by this much: the page's history of five minutes is still being filled, and the allocator's
/// arenas are. At 600 requests a second that is 58 bytes for each request between the middles of the two thirds of three minutes.
const HEAP_SLACK: f64 = 2_097_152.0;
const SHORT_RUN: Duration = Duration::from_secs(15 * 60);

/// The 95th percentile of waits may be above that of the plateau by this share, or by this much.
const P95_GROWTH: f64 = 0.5;
const P95_SLACK: Duration = Duration::from_millis(2);

/// Outside of faults, at most this share of requests may stay undecided, for a machine that is too busy to keep the deadline of a call.
const UNDECIDED: f64 = 0.01;

/// A third with fewer undisturbed samples than this says nothing.
const FEWEST_SAMPLES: usize = 5;

/// A quantity in the last third of a run, beside the plateau.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Its median in the middle third.
    pub plateau: f64,
    /// Its median in the last third.
    pub last: f64,
    /// What that may be at most.
    pub limit: f64,
}

impl Bound {
    /// Whether it is kept. What is no number keeps nothing.
    pub fn holds(&self) -> bool {
        self.last <= self.limit
    }
}

/// What is to be said of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stability {
    /// Memory of the server, in bytes.
    pub heap: Bound,
    /// The 95th percentile of waits outside of faults, in microseconds.
    pub p95: Bound,
    /// The share of requests outside of faults that could not be decided; the plateau is that of the first two thirds.
    pub undecided: Bound,
    /// Requests that were not answered as they must be.
    pub mistakes: u64,
}

impl Stability {
    /// Whether all of it is as it must be.
    pub fn holds(&self) -> bool {
        self.failures().is_empty()
    }

    /// What is not as it must be, a sentence each.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        if !self.heap.holds() {
            let Bound { plateau, last, limit } = self.heap;
            let [plateau, last, limit] = [plateau, last, limit].map(|bytes| bytes / f64::from(1 << 20));
            failures.push(format!(
                "the heap grew from {plateau:.1} MiB in the middle third to {last:.1} MiB in the last; at most {limit:.1} MiB is asked for"
            ));
        }
        if !self.p95.holds() {
            let Bound { plateau, last, limit } = self.p95;
            failures.push(format!(
                "p95 outside of faults went from {plateau:.0} us in the middle third to {last:.0} us in the last; at most {limit:.0} us is asked for"
            ));
        }
        if !self.undecided.holds() {
            failures.push(format!(
                "{:.2} % of the requests outside of faults were not decided; at most {:.2} % is asked for",
                self.undecided.last * 100.0,
                self.undecided.limit * 100.0
            ));
        }
        if self.mistakes > 0 {
            failures.push(format!("{} requests were not answered as they must be", self.mistakes));
        }
        failures
    }
}

pub(crate) fn judge(samples: &[Sample], mistakes: u64) -> Stability {
    let third = samples.len() / 3;
    let (middle, last) = samples[third..].split_at(third);
    let bytes = |samples: &[Sample]| median(samples.iter().map(|sample| sample.heap_bytes as f64).collect());
    let waits = |samples: &[Sample]| {
        median(undisturbed(samples).map(|sample| sample.p95.as_secs_f64() * 1e6).collect())
    };
    let (heap, p95) = (bytes(middle), waits(middle));
    let slack = P95_SLACK.as_secs_f64() * 1e6;
    let is_short = samples.last().is_none_or(|sample| sample.at < SHORT_RUN);
    let heap_slack = if is_short { HEAP_SLACK } else { 0.0 };
    Stability {
        heap: Bound {
            plateau: heap,
            last: bytes(last),
            limit: (heap * (1.0 + HEAP_GROWTH)).max(heap + heap_slack),
        },
        p95: Bound { plateau: p95, last: waits(last), limit: (p95 * (1.0 + P95_GROWTH)).max(p95 + slack) },
        undecided: Bound {
            plateau: undecided(&samples[..samples.len() - last.len()]),
            last: undecided(last),
            limit: UNDECIDED,
        },
        mistakes,
    }
}

fn undisturbed(samples: &[Sample]) -> impl Iterator<Item = &Sample> {
    samples.iter().filter(|sample| !sample.is_disturbed)
}

fn undecided(samples: &[Sample]) -> f64 {
    let sum = |count: fn(&Sample) -> u64| undisturbed(samples).map(count).sum::<u64>() as f64;
    sum(|sample| sample.undecided) / sum(Sample::requests)
}

/// The median; not a number if there are too few values for one.
fn median(mut values: Vec<f64>) -> f64 {
    if values.len() < FEWEST_SAMPLES {
        return f64::NAN;
    }
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A run whose samples are these functions of their number, of 90; every third is disturbed.
    fn run(heap: fn(u64) -> u64, p95_us: fn(u64) -> u64) -> Vec<Sample> {
        let sample = |number: u64| Sample {
            at: Duration::from_secs(60 * number),
            heap_bytes: heap(number),
            redis_bytes: None,
            cpu: Duration::ZERO,
            allowed: 90,
            denied: 10,
            undecided: 0,
            p50: Duration::ZERO,
            p95: Duration::from_micros(p95_us(number)),
            p99: Duration::ZERO,
            is_disturbed: number.is_multiple_of(3),
        };
        (0..90).map(sample).collect()
    }

    fn check(samples: &[Sample], mistakes: u64, expected: &[&str]) {
        let failures = judge(samples, mistakes).failures();
        assert_eq!(failures.len(), expected.len(), "{failures:?}");
        for (failure, expected) in failures.iter().zip(expected) {
            assert!(failure.contains(expected), "{failure} has not {expected}");
        }
    }

    #[test]
    fn a_run_that_warms_up_and_stays_is_good() {
        check(&run(|n| (20 + n.min(20)) * MIB, |_| 900), 0, &[]);
        // Noise, and spikes of memory and latency in single intervals.
        check(
            &run(|n| 40 * MIB + n % 5 * MIB / 4 + u64::from(n == 80) * 90 * MIB, |n| 900 + n % 7 * 100),
            0,
            &[],
        );
        check(&run(|_| 40 * MIB, |n| if n == 70 { 50_000 } else { 900 }), 0, &[]);
        // What is given back is no failure, nor are answers that become faster.
        check(&run(|n| (90 - n / 2) * MIB, |n| 5_000 - n * 20), 0, &[]);
    }

    #[test]
    fn memory_that_grows_fails() {
        // 40 MiB, and a sixth of that more by the end: 5.5 % between the middles of the two thirds.
        check(
            &run(|n| 40 * MIB + n * MIB * 40 / 6 / 90, |_| 900),
            0,
            &["the heap grew from 43.3 MiB in the middle third to 45.6 MiB"],
        );
        // In a short run two mebibytes are no matter, and three are.
        let short = |samples: Vec<Sample>| -> Vec<Sample> {
            samples.into_iter().map(|sample| Sample { at: sample.at / 60, ..sample }).collect()
        };
        check(&short(run(|n| if n < 65 { 8 * MIB } else { 10 * MIB }, |_| 900)), 0, &[]);
        check(
            &short(run(|n| if n < 65 { 8 * MIB } else { 11 * MIB }, |_| 900)),
            0,
            &["the heap grew from 8.0 MiB"],
        );
        check(&run(|n| if n < 65 { 8 * MIB } else { 9 * MIB }, |_| 900), 0, &["the heap grew from 8.0 MiB"]);
        // In one step, after the plateau.
        check(
            &run(|n| if n < 65 { 40 * MIB } else { 43 * MIB }, |_| 900),
            0,
            &["the heap grew from 40.0 MiB"],
        );
    }

    #[test]
    fn latency_that_grows_outside_of_faults_fails() {
        check(&run(|_| MIB, |n| 900 + n * 100), 0, &["p95 outside of faults went from"]);
        check(
            &run(|_| MIB, |n| if n < 60 { 10_000 } else { 16_000 }),
            0,
            &["10000 us in the middle third to 16000 us"],
        );
        // In faults it may be anything, and two milliseconds are no matter.
        check(&run(|_| MIB, |n| if n % 3 == 0 { n * 10_000 } else { 900 }), 0, &[]);
        check(&run(|_| MIB, |n| if n < 60 { 500 } else { 2_400 }), 0, &[]);
    }

    #[test]
    fn mistakes_and_undecided_requests_fail() {
        check(&run(|_| MIB, |_| 900), 3, &["3 requests were not answered"]);
        let mut samples = run(|_| MIB, |_| 900);
        samples.iter_mut().for_each(|sample| sample.undecided = if sample.is_disturbed { 100 } else { 1 });
        check(&samples, 0, &[]);
        samples.iter_mut().for_each(|sample| sample.undecided = 2);
        check(&samples, 0, &["1.96 % of the requests"]);
    }

    #[test]
    fn a_run_with_too_few_samples_is_no_proof() {
        let failures = judge(&run(|_| MIB, |_| 900)[..12], 0).failures();
        assert_eq!(failures.len(), 2, "{failures:?}");
        assert_eq!(judge(&[], 0).failures().len(), 3);
    }
}
