//! The interface between engine and telemetry, and the null object without the feature `telemetry`.
//!
//! The methods of these traits do nothing by default, so [`NoTelemetry`] has no code, and calls to it cost nothing. With the
//! feature, `watch.rs` and `meter.rs` implement them. The engine uses the aliases in `telemetry.rs` and is the same code in both
//! cases.

use std::time::Duration;

use tollgate_kernel::Strategy;
use tollgate_store::{Clock, StoreError};
use tracing::Span;

use super::{DecisionReport, LimitReport, Operation, OperationOutcome};

/// The telemetry of one engine: sees every decision once it is made, and every call to a remote store.
pub(crate) trait Recorder {
    /// Lets a namespace of keys be a label of metrics.
    fn declare(&self, _namespace: &str) {}

    /// Whether nothing is measured, logged or traced.
    fn is_off(&self) -> bool {
        true
    }

    /// Whether a decision may take the fast path, on which there is only counting.
    fn allows_fast_path(&self) -> bool {
        true
    }

    /// Whether only the counts of admissions are wanted, but denials are reported.
    fn logs_denials_only(&self) -> bool {
        false
    }

    /// Whether every decision is timed: with a remote store, where a clock costs little beside the call, and if log lines have a
    /// duration.
    fn times_all(&self, _is_remote: bool) -> bool {
        false
    }

    /// Whether one decision in 64 is timed at least.
    fn times_some(&self) -> bool {
        false
    }

    /// The span of a decision.
    fn check_span(&self, _operation: &'static str) -> Span {
        Span::none()
    }

    /// Reports a decision; `span` is its own.
    fn report(&self, _report: &DecisionReport<'_>, _span: &Span, _clock: &Clock) {}

    /// Reports a denial of local counters, which has no span. `report` is called only if a line is written.
    fn report_denial<'a>(
        &self,
        _limiter: &str,
        _key: &str,
        _clock: &Clock,
        _report: impl FnOnce() -> DecisionReport<'a>,
    ) {
    }

    /// Counts an operation on a charge, which may be of several limits.
    fn operated(&self, _operation: &'static str, _outcome: OperationOutcome) {}

    /// Reports that a node of the store went down or came back.
    fn store_changed(&self, _is_up: bool) {}
}

/// A call to a remote store, while it runs.
pub(crate) trait CallRecorder {
    fn span(&self) -> Span {
        Span::none()
    }

    /// The call returned.
    fn done(&self, _error: Option<&StoreError>) {}
}

/// Counts the decisions of one limit.
pub(crate) trait DecisionMeter {
    /// Whether it counts decisions of these strategies, the limit's own first, in or out of shadow mode.
    fn counts(&self, _strategies: &[Option<Strategy>], _is_shadow: bool) -> bool {
        true
    }

    /// Whether it counts anything.
    fn is_on(&self) -> bool {
        false
    }

    /// Counts an outcome of local counters for a key that has counters and is canonical.
    fn count_fast_path(&self, _key: &str, _allowed: bool, _took: Option<Duration>) {}

    /// The same for many keys of one call, which took so long in all.
    fn count_fast_path_many<'k>(
        &self,
        _answers: impl Iterator<Item = (&'k str, bool)>,
        _took: Option<Duration>,
    ) {
    }

    /// Brings the counters up to date.
    fn publish(&self) {}

    /// Counts any other decision.
    fn decided(&self, _report: &LimitReport<'_>) {}

    /// Counts a reset or a refund of a key.
    fn count_operation(&self, _operation: &Operation<'_>) {}
}

/// No telemetry: nothing is measured, logged or traced.
#[cfg(not(feature = "telemetry"))]
mod null {
    use std::convert::Infallible;
    use std::sync::Arc;

    use tollgate_kernel::Strategy;

    use super::{CallRecorder, DecisionMeter, Recorder};
    use crate::telemetry::Observers;

    #[derive(Clone)]
    pub(crate) struct NoTelemetry;

    impl Recorder for NoTelemetry {}
    impl CallRecorder for NoTelemetry {}
    impl DecisionMeter for NoTelemetry {}

    impl NoTelemetry {
        pub(crate) fn new(_settings: Option<&Infallible>, _mode: &'static str) -> NoTelemetry {
            NoTelemetry
        }

        pub(crate) fn store_call(&self, _operation: &'static str) -> NoTelemetry {
            NoTelemetry
        }

        pub(crate) fn meter(
            &self,
            _observers: &Arc<Observers>,
            _limiter: &str,
            _strategies: impl IntoIterator<Item = Option<Strategy>>,
            _is_shadow: bool,
        ) -> NoTelemetry {
            NoTelemetry
        }
    }

    /// No decision is timed.
    pub(crate) const fn is_sampled() -> bool {
        false
    }
}

#[cfg(not(feature = "telemetry"))]
pub(crate) use self::null::{NoTelemetry, is_sampled};
