//! What operators see: an event for every limit of every decision, and an event whenever the store goes down or comes back.
//!
//! An [`Observer`] gets them all, in the thread that decided, after the decision is made: it cannot change it. Events show a
//! key's namespace; an observer that uses it as a label must still bound the number of labels. The key itself is only available
//! through [`EventKey::reveal`]. The health of the store is in `health.rs`.
//!
//! With the feature `telemetry` decisions are also measured, logged and traced (`watch.rs`; without the feature `recorder.rs` has
//! the null object): metrics in `meter.rs` and `store_meter.rs`, the decision log in `log.rs`, spans in `spans.rs`. `settings.rs`
//! has the host's choices. The output goes through the facades of the host: `metrics` for metrics, `tracing` for log lines and
//! spans. With the feature `otlp`, [`json_lines`] writes the output of `tracing` as JSON to standard output, and [`otlp`] sends
//! spans to a collector.
//!
//! Telemetry never changes a decision, never delays one for long, and never shows a key. What callers see is in `response/`.
//! `engine/report.rs` calls this module.

mod event_key;
#[cfg(feature = "otlp")]
mod json_lines;
#[cfg(feature = "telemetry")]
mod key_hash;
#[cfg(feature = "telemetry")]
mod log;
#[cfg(feature = "telemetry")]
mod meter;
#[cfg(feature = "telemetry")]
mod metrics;
#[cfg(feature = "telemetry")]
mod namespaces;
mod observers;
mod operation;
#[cfg(feature = "otlp")]
mod otlp;
mod recorder;
#[cfg(feature = "telemetry")]
mod settings;
#[cfg(feature = "telemetry")]
mod spans;
mod started;
#[cfg(feature = "telemetry")]
mod store_meter;
#[cfg(feature = "telemetry")]
mod storm;
#[cfg(feature = "telemetry")]
mod stripes;
#[cfg(feature = "telemetry")]
mod watch;

use std::time::Duration;

use tollgate_kernel::{Micros, Strategy};
use tollgate_store::Failure;

use crate::health::StoreChange;
use crate::outcome::Outcome;
pub use crate::outcome::Source;

pub use self::event_key::EventKey;
#[cfg(feature = "otlp")]
pub use self::json_lines::{DroppedLines, JsonLines, JsonLinesGuard, json_lines, json_lines_to};
#[cfg(feature = "telemetry")]
pub(crate) use self::key_hash::KeyHasher;
pub(crate) use self::observers::Observers;
pub use self::operation::{Operation, OperationOutcome};
pub(crate) use self::recorder::{CallRecorder, DecisionMeter, Recorder};
// The types that the engine uses: the telemetry of one engine and the meter of one limit, or the null object for both.
#[cfg(feature = "telemetry")]
pub(crate) use self::meter::{Meter, is_sampled};
#[cfg(not(feature = "telemetry"))]
pub(crate) use self::recorder::{NoTelemetry as Meter, NoTelemetry as Watch, is_sampled};
#[cfg(feature = "telemetry")]
pub(crate) use self::watch::Watch;

/// Without the feature there are no settings.
#[cfg(not(feature = "telemetry"))]
pub(crate) type Telemetry = std::convert::Infallible;
#[cfg(feature = "otlp")]
pub use self::otlp::{Otlp, OtlpGuard, otlp};
#[cfg(feature = "telemetry")]
pub use self::settings::{BUCKETS_MS, LogDecisions, Telemetry};
pub(crate) use self::started::Started;
#[cfg(feature = "telemetry")]
pub(crate) use self::store_meter::Reading;

/// The failure of the store during a decision, if any.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Trouble {
    pub(crate) failure: Option<Failure>,
    pub(crate) is_ambiguous: bool,
    /// Whether this is the first failure since the store last answered.
    pub(crate) is_first: bool,
}

/// The outcome of a limit, for metrics and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutcomeKind {
    Allowed,
    Denied,
    /// The limit is in shadow mode, and would have denied.
    WouldDeny,
}

impl OutcomeKind {
    #[cfg(feature = "telemetry")]
    pub(crate) const ALL: [OutcomeKind; 3] =
        [OutcomeKind::Allowed, OutcomeKind::Denied, OutcomeKind::WouldDeny];

    #[inline]
    pub(crate) const fn of(allowed: bool, shadow: bool) -> OutcomeKind {
        match (allowed, shadow) {
            (true, _) => OutcomeKind::Allowed,
            (false, false) => OutcomeKind::Denied,
            (false, true) => OutcomeKind::WouldDeny,
        }
    }

    #[cfg(feature = "telemetry")]
    pub(crate) const fn name(self) -> &'static str {
        match self {
            OutcomeKind::Allowed => "allowed",
            OutcomeKind::Denied => "denied",
            OutcomeKind::WouldDeny => "would_deny",
        }
    }

    /// The label of metrics: the limit's outcome, in shadow mode too.
    #[cfg(feature = "telemetry")]
    pub(crate) const fn label(self) -> &'static str {
        match self {
            OutcomeKind::Allowed => "allow",
            OutcomeKind::Denied | OutcomeKind::WouldDeny => "deny",
        }
    }
}

/// The outcome of one limit of a decision, for metrics.
#[cfg_attr(not(feature = "telemetry"), allow(dead_code, reason = "without the feature nobody reads it"))]
pub(crate) struct LimitReport<'a> {
    /// The canonical text of its key, if that makes sense.
    pub(crate) key: Option<&'a str>,
    pub(crate) cost: u64,
    pub(crate) strategy: Option<Strategy>,
    pub(crate) kind: OutcomeKind,
    pub(crate) source: Source,
    pub(crate) failure: Option<Failure>,
    /// How long the whole decision took, if it was timed.
    pub(crate) took: Option<Duration>,
}

/// A whole decision, for the log and the trace: by the binding limit.
#[cfg_attr(not(feature = "telemetry"), allow(dead_code, reason = "without the feature nobody reads it"))]
pub(crate) struct DecisionReport<'a> {
    pub(crate) operation: &'static str,
    pub(crate) limiter: &'a str,
    pub(crate) binding: LimitReport<'a>,
    /// How long to wait; `None` is never.
    pub(crate) retry_after: Option<Micros>,
    /// How many limits there were.
    pub(crate) limits: usize,
    /// Whether any of them answered without the store because that failed.
    pub(crate) is_degraded: bool,
    /// Whether this decision was the first one with that failure.
    pub(crate) is_first: bool,
}

/// The name of a strategy in metrics, logs and traces; a limit that is unlimited or blocked has none.
#[cfg(feature = "telemetry")]
pub(crate) fn strategy_name(strategy: Option<Strategy>) -> &'static str {
    strategy.map_or("none", Strategy::name)
}

/// One limit's part in one decision.
#[derive(Clone, Copy, Debug)]
pub struct Event<'a> {
    /// The call: `charge`, `peek`, `reserve`, `acquire` or `wait`.
    pub operation: &'static str,
    /// The limit's name.
    pub limiter: &'a str,
    /// Its strategy; `None` for a limit that is unlimited or blocked.
    pub strategy: Option<Strategy>,
    /// The key's namespace; empty when the key is malformed.
    pub namespace: &'a str,
    /// The key that was charged.
    pub key: EventKey<'a>,
    /// The cost of the charge.
    pub cost: u64,
    /// Whether this limit allows it; a limit in shadow mode always does.
    pub allowed: bool,
    /// Whether the limit is in shadow mode.
    pub shadow: bool,
    /// What the limit answered.
    pub outcome: Outcome,
    /// Where the answer came from.
    pub source: Source,
    /// Why the store did not answer: the failure of this call or, while the store is down and not called, of an earlier one.
    pub failure: Option<Failure>,
    /// Whether the failed call may have been charged: it was sent, and its answer never came.
    pub is_ambiguous: bool,
    /// How long the whole decision took.
    pub duration: Duration,
}

/// Admissions of one limit, reported in bulk: see [`Observer::takes_counts`].
#[derive(Clone, Copy, Debug)]
pub struct Admissions<'a> {
    /// The limit's name.
    pub limiter: &'a str,
    /// The namespace of the keys if it has been declared ([`Telemetry::namespaces`]), else `other`.
    pub namespace: &'a str,
    /// How many there were.
    pub count: u64,
    /// How long one of them took, if it was timed.
    pub duration: Option<Duration>,
}

/// Sees every decision.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tollgate::telemetry::{Event, Observer};
/// use tollgate::{Limit, Tollgate};
///
/// #[derive(Default)]
/// struct Denials(AtomicU64);
///
/// impl Observer for Denials {
///     fn decided(&self, event: &Event<'_>) {
///         self.0.fetch_add(u64::from(!event.allowed), Ordering::Relaxed);
///     }
/// }
///
/// let denials = Arc::new(Denials::default());
/// let limit = Limit::token_bucket("1/h", 1)?;
/// let gate = Tollgate::builder().limit("api", limit).observer(denials.clone()).build()?;
/// let api = gate.local("api")?;
/// api.check("user:42");
/// api.check("user:42");
/// assert_eq!(denials.0.load(Ordering::Relaxed), 1);
/// # Ok::<(), tollgate::Error>(())
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Called once for each limit of each decision.
    fn decided(&self, event: &Event<'_>);

    /// Whether this observer accepts counts instead of events for plain admissions on local counters, which are nearly all
    /// events. If decisions are counted for metrics, such admissions are then reported through [`admitted`](Self::admitted), many
    /// at once, and a check costs the same as without an observer. Everything else still has an event. Events of decisions that
    /// were not timed (one in 64 is) have no duration then. All observers of an engine must agree, or nothing changes.
    fn takes_counts(&self) -> bool {
        false
    }

    /// Called now and then, and by [`Tollgate::hand_over_counts`](crate::Tollgate::hand_over_counts), if it takes counts.
    fn admitted(&self, admissions: &Admissions<'_>) {
        let _ = admissions;
    }

    /// Called once for each settlement, cancel, renewal, release and reset, and for each charge of a refund, once it is done or
    /// has failed. The default does nothing.
    fn operated(&self, operation: &Operation<'_>) {
        let _ = operation;
    }

    /// Called once when the store goes down, and once when it is back. The default does nothing.
    fn store_changed(&self, change: &StoreChange) {
        let _ = change;
    }
}
