//! The load: keys, and threads that check them for a while. `callers.rs` takes its keys and its way to tell latency from here.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde::Serialize;
use tollgate::{Limiter, Outcome};

/// One call in so many is timed. Primes, so that no rhythm of the load falls in step with them; a call for a group takes
/// longer, and so may be timed more often.
pub(super) const fn sampled_every(group: usize) -> u32 {
    if group == 1 { 101 } else { 11 }
}

/// The longest latency that is measured: a minute, in ns.
const LONGEST_NS: u64 = 60_000_000_000;

/// Texts of 24 bytes, one after the other, as long as real keys are.
pub(super) struct Keys {
    text: String,
}

const KEY_BYTES: usize = 24;

impl Keys {
    pub(super) fn new(count: u32) -> Keys {
        use std::fmt::Write;
        let mut text = String::with_capacity(count as usize * KEY_BYTES);
        for number in 0..count {
            // Writing to a String does not fail.
            let _ = write!(text, "user:{number:019}");
        }
        Keys { text }
    }

    pub(super) fn get(&self, number: u32) -> &str {
        let start = number as usize * KEY_BYTES;
        &self.text[start..start + KEY_BYTES]
    }

    /// Calls with every key once.
    pub(super) fn each(&self, mut call: impl FnMut(&str)) {
        for start in (0..self.text.len()).step_by(KEY_BYTES) {
            call(&self.text[start..start + KEY_BYTES]);
        }
    }
}

/// The latency of one call at several percentiles, in ns.
#[derive(Debug, Serialize)]
pub(super) struct Latency {
    pub(super) samples: u64,
    pub(super) p50: u64,
    pub(super) p95: u64,
    pub(super) p99: u64,
    pub(super) p999: u64,
    pub(super) max: u64,
}

impl Latency {
    pub(super) fn of(all: &Histogram<u64>) -> Latency {
        Latency {
            samples: all.len(),
            p50: all.value_at_quantile(0.5),
            p95: all.value_at_quantile(0.95),
            p99: all.value_at_quantile(0.99),
            p999: all.value_at_quantile(0.999),
            max: all.max(),
        }
    }
}

/// What to do: check keys below `size`, `group` at a time.
pub(super) struct Load<'a> {
    pub(super) limiter: &'a Limiter,
    pub(super) keys: &'a Keys,
    pub(super) size: u32,
    pub(super) group: usize,
}

/// What was done.
pub(super) struct Measured {
    pub(super) checks: u64,
    /// Spent on checks by all threads together.
    pub(super) busy: Duration,
    pub(super) checks_per_second: u64,
    pub(super) latency: Latency,
}

/// What one thread did.
struct Part {
    checks: u64,
    busy: Duration,
    latencies: Histogram<u64>,
}

impl Load<'_> {
    /// Has `threads` threads at it for `time`.
    pub(super) fn run(&self, threads: u16, time: Duration) -> Measured {
        let start_together = Barrier::new(usize::from(threads));
        let parts: Vec<Part> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|number| {
                    let start_together = &start_together;
                    scope.spawn(move || {
                        start_together.wait();
                        self.work(number, time)
                    })
                })
                .collect();
            // A worker does not panic; if one did, the others' figures still stand.
            workers.into_iter().filter_map(|worker| worker.join().ok()).collect()
        });
        let mut all = empty();
        for part in &parts {
            all += &part.latencies;
        }
        Measured {
            checks: parts.iter().map(|part| part.checks).sum(),
            busy: parts.iter().map(|part| part.busy).sum(),
            checks_per_second: parts.iter().map(|part| per_second(part.checks, part.busy)).sum(),
            latency: Latency::of(&all),
        }
    }

    /// One thread's part: rounds of calls of which the last is timed alone, until the time is up. The keys of a round are laid
    /// out beforehand, while the clock does not count: a program has its key at hand, fresh from a request.
    fn work(&self, number: u16, time: Duration) -> Part {
        let mut picks = Picks::new(number, self.size);
        let calls = sampled_every(self.group) as usize;
        let mut text = String::with_capacity(calls * self.group * KEY_BYTES);
        let mut outcomes = Vec::with_capacity(self.group);
        let mut part = Part { checks: 0, busy: Duration::ZERO, latencies: empty() };
        let started = Instant::now();
        while started.elapsed() < time {
            text.clear();
            (0..calls * self.group).for_each(|_| text.push_str(self.keys.get(picks.next())));
            let keys: Vec<&str> =
                (0..text.len()).step_by(KEY_BYTES).map(|start| &text[start..start + KEY_BYTES]).collect();
            let (untimed, timed) = keys.split_at(keys.len() - self.group);
            let first = Instant::now();
            for group in untimed.chunks(self.group) {
                self.call(group, &mut outcomes);
            }
            let before = Instant::now();
            self.call(timed, &mut outcomes);
            let after = Instant::now();
            record(&mut part.latencies, after - before);
            part.checks += keys.len() as u64;
            part.busy += after - first;
        }
        part
    }

    fn call(&self, group: &[&str], outcomes: &mut Vec<Outcome>) {
        match group {
            [key] => {
                let _ = std::hint::black_box(self.limiter.check(*key));
            }
            several => {
                outcomes.clear();
                self.limiter.check_many(several, outcomes);
                std::hint::black_box(&*outcomes);
            }
        }
    }
}

/// Notes how long a call took.
pub(super) fn record(latencies: &mut Histogram<u64>, took: Duration) {
    latencies.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1));
}

pub(super) fn per_second(checks: u64, busy: Duration) -> u64 {
    let nanos = busy.as_nanos().max(1);
    u64::try_from(u128::from(checks) * 1_000_000_000 / nanos).unwrap_or(u64::MAX)
}

pub(super) fn empty() -> Histogram<u64> {
    // Constants that the crate accepts: from 1 ns to a minute, two digits exact.
    Histogram::new_with_bounds(1, LONGEST_NS, 2).expect("the bounds of the histogram are sound")
}

/// Which key comes next: uniform, the same on every run, different for every thread or caller (xorshift64*).
pub(super) struct Picks {
    state: u64,
    size: u64,
}

impl Picks {
    pub(super) fn new(worker: u16, size: u32) -> Picks {
        Picks { state: 0x9e37_79b9_7f4a_7c15 ^ (u64::from(worker) + 1) << 32, size: u64::from(size) }
    }

    pub(super) fn next(&mut self) -> u32 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let random = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        // Below 2^32 times a size below 2^32: the upper half is below the size.
        u32::try_from((random * self.size) >> 32).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_distinct_and_of_equal_length() {
        let keys = Keys::new(1000);
        assert_eq!(keys.get(7), "user:0000000000000000007");
        assert_eq!(keys.get(999).len(), KEY_BYTES);
        let mut seen = std::collections::HashSet::new();
        keys.each(|key| assert!(seen.insert(key.to_string())));
        assert_eq!(seen.len(), 1000);
    }

    #[test]
    fn a_rate_is_checks_by_time() {
        assert_eq!(per_second(500, Duration::from_millis(250)), 2_000);
        assert_eq!(per_second(1, Duration::ZERO), 1_000_000_000);
    }

    #[test]
    fn picks_cover_all_keys_evenly() {
        let mut picks = Picks::new(0, 10);
        let mut counts = [0u32; 10];
        for _ in 0..10_000 {
            counts[picks.next() as usize] += 1;
        }
        assert!(counts.iter().all(|count| (800..1200).contains(count)), "{counts:?}");
        assert_eq!(Picks::new(3, 1).next(), 0);
    }
}
