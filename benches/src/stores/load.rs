//! Many callers at once: each makes one call after the other, or calls come at a steady pace whatever became of the last.
//!
//! The first way finds out how much goes through; the second how long a call takes. In the second a latency is counted from
//! when the call was *due*, not from when it was sent, so that calls which had to wait behind a slow one are not left out. How
//! late the thread itself was that sends them on time is shown beside it: that much is the machine's. All else runs on the
//! runtime of one thread. What a call does is the business of a [`Caller`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::workload::{KeySet, Random};

/// After this many calls a caller lets the others run: where answers are at hand, nothing else would make it.
const CALLS_IN_A_ROW: u32 = 64;

/// Who takes part in a cell: makes one call after the other.
pub(crate) trait Caller: Send + 'static {
    /// One call, and what became of its checks.
    fn call(&mut self, draw: &mut Draw) -> impl Future<Output = Result<Answer, String>> + Send;
}

/// What became of the checks of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    pub(crate) checks: u64,
    /// Checks that were not answered as the cell says.
    pub(crate) astray: u64,
}

impl Answer {
    /// Of one check.
    pub(crate) fn one(as_wanted: bool) -> Answer {
        Answer { checks: 1, astray: u64::from(!as_wanted) }
    }
}

/// The texts of the keys.
pub(crate) type Keys = Arc<[String]>;

/// The first `count` keys, each with a prefix.
pub(crate) fn keys(prefix: &str, count: u32) -> Keys {
    let mut keys = Vec::new();
    KeySet { count }.for_each(|key| keys.push(format!("{prefix}{key}")));
    keys.into()
}

/// Chooses keys, all alike often.
pub(crate) struct Draw {
    keys: Keys,
    random: Random,
}

impl Draw {
    pub(crate) fn new(keys: Keys, seed: u64) -> Draw {
        // Seeds in a row would give streams that are shifted by one.
        Draw { keys, random: Random(seed.wrapping_mul(0xD134_2543_DE82_EF95)) }
    }

    fn index(&mut self) -> usize {
        self.random.below(u32::try_from(self.keys.len()).unwrap_or(u32::MAX)) as usize
    }

    pub(crate) fn one(&mut self) -> &str {
        let index = self.index();
        &self.keys[index]
    }

    /// Different keys: neighbours, which no store keeps beside each other.
    pub(crate) fn several<const N: usize>(&mut self) -> [&str; N] {
        let first = self.index();
        std::array::from_fn(|place| self.keys[(first + place) % self.keys.len()].as_str())
    }
}

/// What became of all calls of a turn.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) checks: u64,
    pub(crate) astray: u64,
    /// Calls that could not be decided; each ends its caller's turn.
    pub(crate) failed: u64,
    pub(crate) failure: Option<String>,
    pub(crate) wall: Duration,
}

impl Tally {
    fn add(&mut self, answered: Result<Answer, String>) {
        match answered {
            Ok(answer) => {
                self.checks += answer.checks;
                self.astray += answer.astray;
            }
            Err(failure) => {
                self.failed += 1;
                self.failure.get_or_insert(failure);
            }
        }
    }

    pub(crate) fn join(&mut self, other: Tally) {
        self.checks += other.checks;
        self.astray += other.astray;
        self.failed += other.failed;
        self.failure = self.failure.take().or(other.failure);
        self.wall += other.wall;
    }
}

/// All callers at once, each as fast as it is answered.
pub(crate) async fn closed_loop<C: Caller>(callers: Vec<C>, keys: &Keys, duration: Duration) -> Tally {
    let is_over = Arc::new(AtomicBool::new(false));
    let mut tasks = JoinSet::new();
    let started = Instant::now();
    for (number, mut caller) in callers.into_iter().enumerate() {
        let (is_over, mut draw) = (is_over.clone(), Draw::new(keys.clone(), number as u64));
        tasks.spawn(async move {
            let mut tally = Tally::default();
            let mut calls = 0u32;
            while !is_over.load(Ordering::Relaxed) && tally.failed == 0 {
                tally.add(caller.call(&mut draw).await);
                calls = calls.wrapping_add(1);
                if calls.is_multiple_of(CALLS_IN_A_ROW) {
                    tokio::task::yield_now().await;
                }
            }
            tally
        });
    }
    tokio::time::sleep(duration).await;
    is_over.store(true, Ordering::Relaxed);
    let mut all = Tally::default();
    while let Some(done) = tasks.join_next().await {
        match done {
            Ok(tally) => all.join(tally),
            Err(error) => all.add(Err(format!("a caller panicked: {error}"))),
        }
    }
    all.wall = started.elapsed();
    all
}

/// Latencies in microseconds.
pub(crate) type Latencies = Histogram<u64>;

pub(crate) fn no_latencies() -> Latencies {
    Histogram::new_with_bounds(1, 600_000_000, 3).expect("bounds that a histogram takes")
}

/// What a steady load gave.
pub(crate) struct Paced {
    pub(crate) tally: Tally,
    pub(crate) latencies: Latencies,
    /// How late calls were made, before anybody had a part in them.
    pub(crate) late: Latencies,
}

/// `per_second` calls a second, evenly, each by a caller of its own.
pub(crate) async fn steady_load<C: Caller>(
    make: &dyn Fn() -> C,
    keys: &Keys,
    per_second: u32,
    duration: Duration,
) -> Paced {
    let started = Instant::now();
    let (mut due, pacer) = arrivals(per_second, duration);
    let found = Arc::new(Mutex::new((Tally::default(), no_latencies())));
    let mut tasks = JoinSet::new();
    let mut number = 0;
    while let Some(due) = due.recv().await {
        let (mut caller, mut draw, found) = (make(), Draw::new(keys.clone(), number), found.clone());
        number += 1;
        tasks.spawn(async move {
            let answered = caller.call(&mut draw).await;
            let took_us = in_us(due.elapsed());
            let mut found = found.lock();
            found.0.add(answered);
            found.1.saturating_record(took_us);
        });
        // Done tasks are forgotten on the way.
        while tasks.try_join_next().is_some() {}
    }
    while tasks.join_next().await.is_some() {}
    let mut found = found.lock();
    let mut tally = std::mem::take(&mut found.0);
    tally.wall = started.elapsed();
    let latencies = std::mem::replace(&mut found.1, no_latencies());
    // The channel has ended, and with it the thread.
    Paced { tally, latencies, late: pacer.join().unwrap_or_else(|_| no_latencies()) }
}

/// The times of calls, sent by a thread that sleeps in between: timers of the runtime are too coarse.
fn arrivals(
    per_second: u32,
    duration: Duration,
) -> (mpsc::UnboundedReceiver<Instant>, JoinHandle<Latencies>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let gap = Duration::from_secs(1) / per_second;
    let pacer = std::thread::spawn(move || {
        let mut late = no_latencies();
        let mut due = Instant::now();
        let end = due + duration;
        while due < end {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            late.saturating_record(in_us(due.elapsed()));
            if sender.send(due).is_err() {
                break;
            }
            due += gap;
        }
        late
    });
    (receiver, pacer)
}

fn in_us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Immediate(bool);

    impl Caller for Immediate {
        async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
            let [one, other] = draw.several();
            assert_ne!(one, other);
            if self.0 { Ok(Answer::one(true)) } else { Err("no".into()) }
        }
    }

    fn run<T>(work: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
    }

    #[test]
    fn callers_that_never_wait_are_stopped_too_and_failures_end_a_turn() {
        let keys = keys("", 10);
        let callers = vec![Immediate(true), Immediate(true), Immediate(false)];
        let tally = run(closed_loop(callers, &keys, Duration::from_millis(20)));
        assert!(tally.checks > 0 && tally.astray == 0);
        assert_eq!((tally.failed, tally.failure.as_deref()), (1, Some("no")));
        assert!(tally.wall >= Duration::from_millis(20));
    }

    #[test]
    fn a_steady_load_makes_every_call_that_is_due() {
        let paced = run(steady_load(&|| Immediate(true), &keys("", 10), 1_000, Duration::from_millis(50)));
        assert_eq!((paced.tally.checks, paced.latencies.len(), paced.late.len()), (50, 50, 50));
    }
}
