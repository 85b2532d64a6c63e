//! Settings of telemetry: metrics, the decision log, spans.

use std::fmt;
use std::sync::Arc;

use metrics::Recorder;

use super::KeyHasher;
use super::metrics::{Destination, OWN_LABELS, Sink};

/// Buckets for the two histograms, in milliseconds: they serve memory and shared stores alike, and have edges where the alerts
/// of `deploy/prometheus/` look.
///
/// ```no_run
/// use metrics_exporter_prometheus::PrometheusBuilder;
/// PrometheusBuilder::new().set_buckets(&tollgate::telemetry::BUCKETS_MS)?.install_recorder()?;
/// # Ok::<(), metrics_exporter_prometheus::BuildError>(())
/// ```
pub const BUCKETS_MS: [f64; 17] =
    [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 25.0, 50.0, 75.0, 100.0, 250.0, 1_000.0];

/// How many labels a host may give.
const MOST_LABELS: usize = 16;

/// Which decisions are logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogDecisions {
    /// None.
    #[default]
    Off,
    /// Denials, also those of shadow limits, and the first decision after a failure of the store.
    Denials,
    /// All of them.
    All,
}

/// What an engine measures, logs and traces. Nothing by default.
///
/// ```
/// use tollgate::telemetry::{LogDecisions, Telemetry};
/// use tollgate::{Limit, Tollgate};
///
/// let telemetry = Telemetry::new().metrics().log(LogDecisions::Denials).spans();
/// let gate = Tollgate::builder()
///     .limit("api", Limit::token_bucket("10/s", 20)?)
///     .telemetry(telemetry)
///     .build()?;
/// assert!(gate.local("api")?.check("user:42").is_allowed());
/// gate.publish_metrics(); // before each scrape
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone)]
pub struct Telemetry {
    hasher: KeyHasher,
    destination: Option<Destination>,
    /// Given to all metrics.
    labels: Vec<(String, String)>,
    log: LogDecisions,
    /// How many lines of decisions are written in a second; `None` leaves nothing out.
    log_lines: Option<u64>,
    has_spans: bool,
    /// Namespaces that are labels.
    namespaces: Vec<String>,
}

impl Default for Telemetry {
    fn default() -> Telemetry {
        Telemetry {
            hasher: KeyHasher::from_env(),
            destination: None,
            labels: Vec::new(),
            log: LogDecisions::Off,
            log_lines: Some(super::storm::LINES),
            has_spans: false,
            namespaces: Vec::new(),
        }
    }
}

impl Telemetry {
    /// Nothing yet. Keys will be hashed under the salt `RL_LOG_SALT` of the environment or, if there is none, under one drawn
    /// for the life of this process.
    pub fn new() -> Telemetry {
        Telemetry::default()
    }

    /// The salt for hashes of keys (HMAC-SHA-256, cut to 32 hexadecimal digits). Processes with the same salt show the same hash
    /// for a key. A reader with the salt can test guessed keys against the hashes, so keep it like a password.
    #[must_use]
    pub fn salt(self, salt: impl AsRef<[u8]>) -> Telemetry {
        Telemetry { hasher: KeyHasher::salted(salt.as_ref()), ..self }
    }

    /// Counts through the `metrics` facade, in the recorder that the host has installed; it must be installed before the gate is
    /// built. docs/operations.md has a table of all metrics.
    ///
    /// Labels are the names of limits and fixed words. Of the namespaces, those that are [declared](Self::namespaces) are labels,
    /// at most the first sixteen of each limit, also after a [reload](crate::Tollgate::reload); all others are counted as
    /// `other`. On the memory store one decision in 64 is timed; all are counted.
    #[must_use]
    pub fn metrics(self) -> Telemetry {
        Telemetry { destination: Some(Destination::Facade), ..self }
    }

    /// Namespaces of keys that metrics may show by name, in addition to `default`, the namespaces of overrides, and those of a
    /// configuration and of route limits. Keys of other namespaces are counted as `other`: a name that a client may choose can be
    /// personal data. At most 64 are shown in one process.
    ///
    /// ```
    /// use tollgate::telemetry::Telemetry;
    /// let telemetry = Telemetry::new().metrics().namespaces(["user", "tenant"]);
    /// ```
    #[must_use]
    pub fn namespaces<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Telemetry {
        self.namespaces.extend(names.into_iter().map(Into::into));
        self
    }

    /// Adds this label to every metric, such as the region or the service of the process. A name has ASCII letters, digits and
    /// `_`, does not start with a digit or `__`, and is not one of this crate's labels; if it is invalid, or there are more than
    /// sixteen, building the gate fails.
    ///
    /// ```
    /// use tollgate::telemetry::Telemetry;
    /// let telemetry = Telemetry::new().metrics().label("region", "eu-west").label("service", "checkout");
    /// ```
    #[must_use]
    pub fn label(mut self, name: impl Into<String>, value: impl Into<String>) -> Telemetry {
        self.labels.push((name.into(), value.into()));
        self
    }

    /// Counts in this recorder.
    #[must_use]
    pub fn metrics_to(self, recorder: Arc<dyn Recorder + Send + Sync>) -> Telemetry {
        Telemetry { destination: Some(Destination::Own(recorder)), ..self }
    }

    /// Logs decisions as events of `tracing` with the target `tollgate::decision`: a line for each, by the binding limit. By
    /// default the denials of one key get one line a second, and all decisions a hundred; the next line has the number of
    /// suppressed lines. [`log_lines`](Self::log_lines) sets another number.
    #[must_use]
    pub fn log(self, decisions: LogDecisions) -> Telemetry {
        Telemetry { log: decisions, ..self }
    }

    /// The most lines about decisions in a second; `None` writes every line, also each denial of one key.
    ///
    /// ```
    /// use tollgate::telemetry::{LogDecisions, Telemetry};
    /// let telemetry = Telemetry::new().log(LogDecisions::Denials).log_lines(Some(1_000));
    /// ```
    #[must_use]
    pub fn log_lines(self, a_second: Option<u64>) -> Telemetry {
        Telemetry { log_lines: a_second, ..self }
    }

    /// Makes a span `rate_limit.check` around each decision, and within it `rate_limit.store` around each call to a
    /// remote store.
    #[must_use]
    pub fn spans(self) -> Telemetry {
        Telemetry { has_spans: true, ..self }
    }

    /// The hash by which logs and traces of this telemetry name a key, from its canonical text: for programs that
    /// show the same key in other places.
    ///
    /// ```
    /// use tollgate::telemetry::Telemetry;
    /// let telemetry = Telemetry::new().salt("kept as a password is");
    /// assert_eq!(telemetry.key_hash("user:42").len(), 32);
    /// assert_ne!(telemetry.key_hash("user:42"), telemetry.key_hash("user:43"));
    /// ```
    pub fn key_hash(&self, key: &str) -> String {
        self.hasher.hash(key)
    }

    pub(crate) fn hasher(&self) -> &KeyHasher {
        &self.hasher
    }

    pub(crate) fn sink(&self) -> Option<Sink> {
        self.destination.as_ref().map(|destination| Sink::new(destination.clone(), &self.labels))
    }

    /// What is wrong with the host's labels, if anything.
    pub(crate) fn wrong_label(&self) -> Option<String> {
        if self.labels.len() > MOST_LABELS {
            return Some(format!(
                "metrics get at most {MOST_LABELS} labels of a host, and {} were given",
                self.labels.len()
            ));
        }
        self.labels.iter().enumerate().find_map(|(index, (name, _))| {
            let is_word = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
                && !name.is_empty()
                && !name.starts_with(|letter: char| letter.is_ascii_digit())
                && !name.starts_with("__");
            match () {
                () if !is_word => Some(format!(
                    "a label of metrics cannot be called {name:?}; use letters, digits and `_`, as in `region`"
                )),
                () if OWN_LABELS.contains(&&name[..]) => {
                    Some(format!("the label `{name}` is one of Tollgate's own; choose another name"))
                }
                () if self.labels[..index].iter().any(|(other, _)| other == name) => {
                    Some(format!("the label `{name}` is given twice"))
                }
                () => None,
            }
        })
    }

    pub(crate) fn log_decisions(&self) -> LogDecisions {
        self.log
    }

    pub(crate) fn most_log_lines(&self) -> Option<u64> {
        self.log_lines
    }

    pub(crate) fn has_spans(&self) -> bool {
        self.has_spans
    }

    pub(crate) fn declared(&self) -> &[String] {
        &self.namespaces
    }
}

/// Without the salt.
impl fmt::Debug for Telemetry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Telemetry")
            .field("metrics", &self.destination.is_some())
            .field("log", &self.log)
            .field("spans", &self.has_spans)
            .finish_non_exhaustive()
    }
}
