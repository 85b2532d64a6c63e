//! Counts calls to a store by their result, and publishes the readings of the store.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Label};
use tollgate_store::{Failure, ScriptTime, StoreError};

use super::OperationOutcome;
use super::metrics::{
    ABANDONED_CANCELS, AMBIGUOUS, BACKEND_ERRORS, CONTENTION, KEYS, LEASES_LOST, LOSSES, OPERATIONS,
    PENDING_CANCELS, SCRIPT_CALLS, SCRIPT_TIME, STORE_CALLS, STORE_UP, SUPPRESSED, Sink,
};

/// The calls of a store.
const CALLS: [&str; 5] = ["charge", "settle", "peek", "refund", "forget"];

/// The operations on charges by their id. Those on keys are counted by limit: `meter.rs`.
const OPERATED: [&str; 4] = ["settle", "cancel", "renew", "release"];

/// The counters of one gate's store. Each is made when it first counts.
pub(crate) struct StoreMeter {
    sink: Sink,
    mode: &'static str,
    durations: [OnceLock<Histogram>; CALLS.len()],
    errors: [OnceLock<Counter>; Failure::ALL.len()],
    ambiguous: OnceLock<Counter>,
    operations: [[OnceLock<Counter>; OperationOutcome::ALL.len()]; OPERATED.len()],
    up: OnceLock<Gauge>,
    keys: OnceLock<Gauge>,
    contention: Published,
    losses: Published,
    script_calls: Published,
    script_us: Published,
    leases_lost: Published,
    pending_cancels: OnceLock<Gauge>,
    abandoned_cancels: Published,
}

/// What `Tollgate::publish_metrics` reads.
pub(crate) struct Reading {
    pub(crate) is_up: bool,
    /// The keys of the memory store; other stores do not count theirs.
    pub(crate) keys: Option<usize>,
    pub(crate) contention: Option<u64>,
    /// The losses of a remote store; the memory store has none.
    pub(crate) losses: Option<u64>,
    /// How long scripts ran inside of a store that says so.
    pub(crate) script_time: Option<ScriptTime>,
    pub(crate) leases_lost: u64,
    /// Charges to be cancelled in a remote store: how many are pending, and how many were given up.
    pub(crate) cancels: Option<(u64, u64)>,
}

/// A count of the store, and how much of it the counter has.
#[derive(Default)]
struct Published {
    counter: OnceLock<Counter>,
    reported: AtomicU64,
}

impl Published {
    /// Raises the counter to `count`. Engines may share a counter, so only the difference is added.
    fn bring_up_to(&self, count: u64, counter: impl FnOnce() -> Counter) {
        let before = self.reported.fetch_max(count, Ordering::Relaxed);
        self.counter.get_or_init(counter).increment(count.saturating_sub(before));
    }
}

impl StoreMeter {
    pub(crate) fn new(sink: Sink, mode: &'static str) -> StoreMeter {
        sink.describe();
        StoreMeter {
            sink,
            mode,
            durations: Default::default(),
            errors: Default::default(),
            ambiguous: OnceLock::new(),
            operations: Default::default(),
            up: OnceLock::new(),
            keys: OnceLock::new(),
            contention: Published::default(),
            losses: Published::default(),
            script_calls: Published::default(),
            script_us: Published::default(),
            leases_lost: Published::default(),
            pending_cancels: OnceLock::new(),
            abandoned_cancels: Published::default(),
        }
    }

    pub(crate) fn sink(&self) -> &Sink {
        &self.sink
    }

    /// What counts the lines that the log leaves out.
    pub(crate) fn log_suppressed(&self) -> Counter {
        self.sink.counter(SUPPRESSED, Vec::new())
    }

    fn labels(&self, own: Option<(&'static str, &'static str)>) -> Vec<Label> {
        let mode = Label::from_static_parts("storage_mode", self.mode);
        own.map(|(name, value)| Label::from_static_parts(name, value)).into_iter().chain([mode]).collect()
    }

    fn counter(&self, name: &'static str) -> Counter {
        self.sink.counter(name, self.labels(None))
    }

    /// A call returned, with an answer or an error.
    pub(crate) fn called(&self, operation: &'static str, took: Duration, error: Option<&StoreError>) {
        if let Some(index) = CALLS.iter().position(|known| *known == operation) {
            let labels = || self.labels(Some(("operation", operation)));
            let duration = self.durations[index].get_or_init(|| self.sink.histogram(STORE_CALLS, labels()));
            duration.record(took.as_secs_f64() * 1e3);
        }
        let Some(error) = error else { return };
        if let Some(failure) = error.failure() {
            let labels = || self.labels(Some(("failure", failure.name())));
            let errors = &self.errors[failure as usize];
            errors.get_or_init(|| self.sink.counter(BACKEND_ERRORS, labels())).increment(1);
        }
        if error.is_ambiguous() {
            self.ambiguous.get_or_init(|| self.counter(AMBIGUOUS)).increment(1);
        }
    }

    /// Something was done about a charge.
    pub(crate) fn operated(&self, operation: &'static str, outcome: OperationOutcome) {
        let Some(index) = OPERATED.iter().position(|known| *known == operation) else { return };
        let counter = &self.operations[index][outcome as usize];
        let labels = || {
            let outcome = Label::from_static_parts("outcome", outcome.name());
            [outcome].into_iter().chain(self.labels(Some(("operation", operation)))).collect()
        };
        counter.get_or_init(|| self.sink.counter(OPERATIONS, labels())).increment(1);
    }

    pub(crate) fn set_up(&self, is_up: bool) {
        let up = self.up.get_or_init(|| self.sink.gauge(STORE_UP, self.labels(None)));
        up.set(if is_up { 1.0 } else { 0.0 });
    }

    pub(crate) fn publish(&self, reading: &Reading) {
        self.set_up(reading.is_up);
        if let Some(keys) = reading.keys {
            let gauge = self.keys.get_or_init(|| self.sink.gauge(KEYS, self.labels(None)));
            gauge.set(keys as f64);
        }
        if let Some(count) = reading.contention {
            self.contention.bring_up_to(count, || self.counter(CONTENTION));
        }
        if let Some(count) = reading.losses {
            self.losses.bring_up_to(count, || self.counter(LOSSES));
        }
        if let Some(script_time) = reading.script_time {
            self.script_calls.bring_up_to(script_time.calls, || self.counter(SCRIPT_CALLS));
            self.script_us.bring_up_to(script_time.us, || self.counter(SCRIPT_TIME));
        }
        self.leases_lost.bring_up_to(reading.leases_lost, || self.counter(LEASES_LOST));
        if let Some((pending, abandoned)) = reading.cancels {
            let gauge =
                self.pending_cancels.get_or_init(|| self.sink.gauge(PENDING_CANCELS, self.labels(None)));
            gauge.set(pending as f64);
            self.abandoned_cancels.bring_up_to(abandoned, || self.counter(ABANDONED_CANCELS));
        }
    }
}
