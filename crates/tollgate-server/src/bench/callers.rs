//! Callers of a shared store: tasks that each make one call after the other, and remove at the end what they wrote.
//!
//! They call the gate, as a service would. Only what the store itself has answered counts as a check and has a latency; what
//! a fallback answered, at the speed of this process, is counted apart, and so is what nobody answered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;
use tollgate::telemetry::Source;
use tollgate::{Charge, Error, Outcome, Tollgate};

use super::load::{Keys, Latency, Picks, empty, per_second, record};

/// How long a caller waits when the store has failed it: what follows may fail at once, and would be asked in a circle.
const BREATH: Duration = Duration::from_millis(10);

/// How many tasks remove keys at once.
const REMOVERS: usize = 16;

/// After so many failures a task removes no more: the store is not there.
const MOST_FAILURES: u32 = 3;

/// What all callers share.
pub(super) struct Scene {
    pub(super) gate: Tollgate,
    pub(super) limit: String,
    keys: Keys,
    /// Which keys may have been written.
    written: Box<[AtomicBool]>,
    is_stopped: AtomicBool,
}

/// What to do: check keys below `size`, `group` at a time.
#[derive(Clone, Copy)]
pub(super) struct Load {
    pub(super) size: u32,
    pub(super) group: usize,
}

/// What was done.
pub(super) struct Measured {
    /// Answered by the store.
    pub(super) checks: u64,
    pub(super) checks_per_second: u64,
    pub(super) calls_per_second: u64,
    /// Checks that were answered without the store.
    pub(super) fallbacks: u64,
    /// Checks that were not answered.
    pub(super) errors: u64,
    pub(super) error: Option<Error>,
    pub(super) latency: Latency,
}

/// What became of the keys.
pub(super) struct Removed {
    pub(super) written: u64,
    pub(super) left: u64,
}

/// What one caller did.
struct Part {
    checks: u64,
    fallbacks: u64,
    errors: u64,
    error: Option<Error>,
    latencies: Histogram<u64>,
}

impl Scene {
    pub(super) fn new(gate: Tollgate, limit: String, keys: u32) -> Scene {
        let written = (0..keys).map(|_| AtomicBool::new(false)).collect();
        Scene { gate, limit, keys: Keys::new(keys), written, is_stopped: AtomicBool::new(false) }
    }

    /// Has the callers finish what they are at, and begin nothing more.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Has `callers` callers at it for `time`.
    pub(super) async fn run(self: &Arc<Scene>, load: Load, callers: u16, time: Duration) -> Measured {
        let calls_before = self.gate.store_health().calls;
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for number in 0..callers {
            let scene = self.clone();
            tasks.spawn(async move { scene.turn(load, number, started + time).await });
        }
        let mut all = Part::new();
        while let Some(done) = tasks.join_next().await {
            // A caller does not panic; if one did, the others' figures still stand.
            if let Ok(part) = done {
                all.join(part);
            }
        }
        let wall = started.elapsed();
        Measured {
            checks: all.checks,
            checks_per_second: per_second(all.checks, wall),
            calls_per_second: per_second(self.gate.store_health().calls - calls_before, wall),
            fallbacks: all.fallbacks,
            errors: all.errors,
            error: all.error,
            latency: Latency::of(&all.latencies),
        }
    }

    /// One caller's turn.
    async fn turn(&self, load: Load, number: u16, until: Instant) -> Part {
        let mut picks = Picks::new(number, load.size);
        let mut part = Part::new();
        while Instant::now() < until && !self.is_stopped() {
            let keys = self.neighbours(picks.next(), load);
            let before = Instant::now();
            let answered = self.call(&keys).await;
            let took = before.elapsed();
            let by_store = *answered.as_ref().unwrap_or(&0);
            part.checks += by_store;
            match answered {
                Ok(_) if by_store == keys.len() as u64 => record(&mut part.latencies, took),
                Ok(_) => part.fallbacks += keys.len() as u64 - by_store,
                Err(error) => {
                    part.errors += keys.len() as u64;
                    part.error.get_or_insert(error);
                }
            }
            if by_store == 0 {
                tokio::time::sleep(BREATH).await;
            }
        }
        part
    }

    /// The keys of one call: neighbours, which are different and which no store keeps beside each other.
    fn neighbours(&self, first: u32, load: Load) -> Vec<&str> {
        let numbers = (first..=u32::MAX).take(load.group).map(|number| number % load.size);
        numbers
            .map(|number| {
                self.written[number as usize].store(true, Ordering::Relaxed);
                self.keys.get(number)
            })
            .collect()
    }

    /// One call, and how many of its checks the store has answered.
    async fn call(&self, keys: &[&str]) -> Result<u64, Error> {
        let by_store = |outcomes: &[Outcome]| {
            outcomes.iter().filter(|outcome| outcome.source() == Source::Store).count() as u64
        };
        match keys {
            [key] => self.gate.check(&self.limit, *key).await.map(|decision| by_store(decision.outcomes())),
            several => {
                let charges: Vec<Charge<'_>> =
                    several.iter().map(|key| Charge::new(&self.limit, *key)).collect();
                let outcomes: Result<Vec<Outcome>, Error> =
                    self.gate.charge_each(&charges).await?.into_iter().collect();
                outcomes.map(|outcomes| by_store(&outcomes))
            }
        }
    }

    /// Removes every key that may have been written.
    pub(super) async fn remove(self: &Arc<Scene>) -> Removed {
        let numbers = (0..).zip(&self.written).filter(|(_, is_written)| is_written.load(Ordering::Relaxed));
        let written: Arc<[u32]> = numbers.map(|(number, _)| number).collect();
        let next = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for _ in 0..REMOVERS {
            let (scene, written, next) = (self.clone(), written.clone(), next.clone());
            tasks.spawn(async move {
                let (mut removed, mut failures) = (0, 0);
                while failures < MOST_FAILURES {
                    let Some(number) = written.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                    match scene.gate.reset(&scene.limit, scene.keys.get(*number)).await {
                        Ok(_) => removed += 1,
                        Err(_) => failures += 1,
                    }
                }
                removed
            });
        }
        let mut removed = 0u64;
        while let Some(done) = tasks.join_next().await {
            removed += done.unwrap_or(0);
        }
        let written = written.len() as u64;
        Removed { written, left: written.saturating_sub(removed) }
    }
}

impl Part {
    fn new() -> Part {
        Part { checks: 0, fallbacks: 0, errors: 0, error: None, latencies: empty() }
    }

    fn join(&mut self, other: Part) {
        self.checks += other.checks;
        self.fallbacks += other.fallbacks;
        self.errors += other.errors;
        self.error = self.error.take().or(other.error);
        self.latencies += &other.latencies;
    }
}
