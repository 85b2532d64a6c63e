//! The names of all metrics, and the recorder that counts them: the one that the host has installed for the `metrics` facade, or
//! a separate one.
//!
//! A host may add its own labels to all of them. Our labels never hold text from a client, except for the namespace of a key, of
//! which each limit has at most sixteen: see `meter.rs`.

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};

pub(crate) const DECISIONS: &str = "rate_limiter_decisions_total";
pub(crate) const OPERATIONS: &str = "rate_limiter_operations_total";
pub(crate) const LATENCY: &str = "rate_limiter_latency_ms";
pub(crate) const BACKEND_ERRORS: &str = "rate_limiter_backend_errors_total";
pub(crate) const FALLBACKS: &str = "rate_limiter_fallback_total";
pub(crate) const CONTENTION: &str = "rate_limiter_lock_contention_total";
pub(crate) const STORE_CALLS: &str = "rate_limiter_script_duration_ms";
pub(crate) const SCRIPT_CALLS: &str = "rate_limiter_store_script_calls_total";
pub(crate) const SCRIPT_TIME: &str = "rate_limiter_store_script_us_total";
pub(crate) const STORE_UP: &str = "rate_limiter_store_up";
pub(crate) const KEYS: &str = "rate_limiter_keys";
pub(crate) const AMBIGUOUS: &str = "rate_limiter_ambiguous_total";
pub(crate) const LOSSES: &str = "rate_limiter_state_losses_total";
pub(crate) const LEASES_LOST: &str = "rate_limiter_leases_lost_total";
pub(crate) const PENDING_CANCELS: &str = "rate_limiter_pending_cancels";
pub(crate) const ABANDONED_CANCELS: &str = "rate_limiter_abandoned_cancels_total";
pub(crate) const SUPPRESSED: &str = "rate_limiter_log_suppressed_total";

/// What each counter, gauge and histogram means, in the words that an exporter shows.
const COUNTERS: [(&str, &str); 12] = [
    (DECISIONS, "The outcome of each limit of each decision (allow, deny, or fallback), by source"),
    (OPERATIONS, "Settlements, cancels, renewals, releases, resets and refunds, by result"),
    (BACKEND_ERRORS, "Failed calls to the store, by failure"),
    (FALLBACKS, "Outcomes of single limits without the store, by fallback and failure"),
    (CONTENTION, "How often a charge found its counters locked or changed by another"),
    (AMBIGUOUS, "Failed calls that may still have been charged"),
    (
        SCRIPT_CALLS,
        "Scripts that the store (Redis) ran since this process first looked, those of all programs on its servers",
    ),
    (
        SCRIPT_TIME,
        "Microseconds that those scripts took inside of the store; the rate of it over the rate of the calls is their mean time",
    ),
    (LOSSES, "How often the store is known to have lost counters, or may have"),
    (LEASES_LOST, "Leases that were gone when their holder renewed them"),
    (ABANDONED_CANCELS, "Charges without a holder that could not be cancelled in the store"),
    (SUPPRESSED, "Suppressed lines of the decision log"),
];
const GAUGES: [(&str, &str); 3] = [
    (STORE_UP, "1 while the store is up, 0 while it is down and not called"),
    (KEYS, "Keys in the memory store"),
    (PENDING_CANCELS, "Charges without a holder that are still to be cancelled in the store"),
];
const HISTOGRAMS: [(&str, &str); 2] = [
    (LATENCY, "Duration of decisions; in memory, of one in 64"),
    (STORE_CALLS, "Duration of calls to the store, including the network"),
];

/// Label names that this crate or a scraper of histograms uses: a host cannot set them.
pub(crate) const OWN_LABELS: [&str; 15] = [
    "decision",
    "failure",
    "fallback",
    "le",
    "limiter",
    "namespace",
    "operation",
    "outcome",
    "quantile",
    "reason",
    "shadow",
    "source",
    "storage_mode",
    "strategy",
    "key",
];

/// The module that the metrics are of, for recorders that filter.
const METADATA: Metadata<'static> = Metadata::new("tollgate", Level::INFO, Some("tollgate"));

/// Which recorder metrics go to.
#[derive(Clone)]
pub(crate) enum Destination {
    /// The recorder that the host has installed.
    Facade,
    /// This one.
    Own(Arc<dyn Recorder + Send + Sync>),
}

/// Where metrics go, and the labels that the host gives all of them.
#[derive(Clone)]
pub(crate) struct Sink {
    destination: Destination,
    labels: Arc<[Label]>,
}

impl Sink {
    pub(crate) fn new(destination: Destination, labels: &[(String, String)]) -> Sink {
        let labels = labels.iter().map(|(name, value)| Label::new(name.clone(), value.clone())).collect();
        Sink { destination, labels }
    }

    fn with<T>(&self, work: impl FnOnce(&dyn Recorder) -> T) -> T {
        match &self.destination {
            Destination::Facade => metrics::with_recorder(work),
            Destination::Own(recorder) => work(&**recorder),
        }
    }

    /// A series with these labels, followed by those of the host.
    fn key(&self, name: &'static str, mut labels: Vec<Label>) -> Key {
        labels.extend(self.labels.iter().cloned());
        Key::from_parts(name, labels)
    }

    /// Registers the description of every metric.
    pub(crate) fn describe(&self) {
        self.with(|recorder| {
            for (name, words) in COUNTERS {
                recorder.describe_counter(name.into(), None, words.into());
            }
            for (name, words) in GAUGES {
                recorder.describe_gauge(name.into(), None, words.into());
            }
            for (name, words) in HISTOGRAMS {
                recorder.describe_histogram(name.into(), Some(Unit::Milliseconds), words.into());
            }
        });
    }

    pub(crate) fn counter(&self, name: &'static str, labels: Vec<Label>) -> Counter {
        self.with(|recorder| recorder.register_counter(&self.key(name, labels), &METADATA))
    }

    pub(crate) fn gauge(&self, name: &'static str, labels: Vec<Label>) -> Gauge {
        self.with(|recorder| recorder.register_gauge(&self.key(name, labels), &METADATA))
    }

    pub(crate) fn histogram(&self, name: &'static str, labels: Vec<Label>) -> Histogram {
        self.with(|recorder| recorder.register_histogram(&self.key(name, labels), &METADATA))
    }
}
