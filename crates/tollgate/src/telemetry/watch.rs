//! The telemetry of one engine: metrics, log and spans of every decision after it is made, and of every call to a remote store.
//!
//! Nothing here can change a decision. A panic in the host's subscriber is caught, like a panic of an observer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use tollgate_kernel::Strategy;
use tollgate_store::{Clock, StoreError};
use tracing::Span;

use super::key_hash::KeyHasher;
use super::log::DecisionLog;
use super::meter::Meter;
use super::metrics::Sink;
use super::namespaces::Namespaces;
use super::recorder::{CallRecorder, Recorder};
use super::store_meter::{Reading, StoreMeter};
use super::{DecisionReport, Observers, OperationOutcome, Telemetry, spans};

/// The telemetry of one engine.
#[derive(Default)]
pub(crate) struct Watch {
    mode: &'static str,
    hasher: Option<KeyHasher>,
    meter: Option<StoreMeter>,
    log: Option<DecisionLog>,
    has_spans: bool,
    namespaces: Arc<Namespaces>,
}

impl Watch {
    /// As the host wants it, over a store of this mode.
    pub(crate) fn new(telemetry: Option<&Telemetry>, mode: &'static str) -> Watch {
        let Some(telemetry) = telemetry else { return Watch::default() };
        let meter = telemetry.sink().map(|sink| StoreMeter::new(sink, mode));
        let suppressed = meter.as_ref().map(StoreMeter::log_suppressed);
        let watch = Watch {
            mode,
            hasher: Some(telemetry.hasher().clone()),
            log: DecisionLog::new(telemetry.log_decisions(), telemetry.most_log_lines(), suppressed),
            has_spans: telemetry.has_spans(),
            meter,
            namespaces: Arc::default(),
        };
        telemetry.declared().iter().for_each(|name| watch.declare(name));
        watch
    }

    /// Which namespaces have their own series.
    pub(crate) fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    pub(crate) fn mode(&self) -> &'static str {
        self.mode
    }

    pub(crate) fn sink(&self) -> Option<&Sink> {
        self.meter.as_ref().map(StoreMeter::sink)
    }

    /// A call to the store starts.
    pub(crate) fn store_call(&self, operation: &'static str) -> StoreCall<'_> {
        let span = if self.has_spans { spans::store(operation, self.mode) } else { Span::none() };
        let meter = self.meter.as_ref().map(|meter| (meter, Instant::now()));
        StoreCall { operation, span, meter }
    }

    /// Updates the metrics that are not set by decisions.
    pub(crate) fn publish(&self, reading: &Reading, clock: &Clock) {
        if let Some(log) = &self.log {
            log.write_left_out(clock.now());
        }
        if let Some(meter) = &self.meter {
            meter.publish(reading);
        }
    }

    /// Counts the decisions of a limit that is known by this name and counts in these strategies, its own first.
    pub(crate) fn meter(
        &self,
        observers: &Arc<Observers>,
        limiter: &str,
        strategies: impl IntoIterator<Item = Option<Strategy>>,
        is_shadow: bool,
    ) -> Meter {
        Meter::new(self, observers, limiter, strategies, is_shadow)
    }
}

impl Recorder for Watch {
    fn declare(&self, namespace: &str) {
        self.namespaces.declare(namespace);
    }

    fn is_off(&self) -> bool {
        self.meter.is_none() && self.allows_fast_path()
    }

    fn allows_fast_path(&self) -> bool {
        self.log.is_none() && !self.has_spans
    }

    fn logs_denials_only(&self) -> bool {
        self.log.as_ref().is_some_and(DecisionLog::logs_denials_only) && !self.has_spans
    }

    #[inline]
    fn times_all(&self, is_remote: bool) -> bool {
        self.log.is_some() || (is_remote && self.meter.is_some())
    }

    #[inline]
    fn times_some(&self) -> bool {
        self.meter.is_some()
    }

    #[inline]
    fn check_span(&self, operation: &'static str) -> Span {
        if self.has_spans { spans::check(operation) } else { Span::none() }
    }

    fn report(&self, decision_report: &DecisionReport<'_>, span: &Span, clock: &Clock) {
        let Some(hasher) = &self.hasher else { return };
        let _ = catch_unwind(AssertUnwindSafe(|| {
            spans::conclude(span, decision_report, self.mode, hasher);
            if let Some(log) = &self.log {
                log.write(decision_report, self.mode, hasher, clock.now());
            }
        }));
    }

    fn report_denial<'a>(
        &self,
        limiter: &str,
        key: &str,
        clock: &Clock,
        report: impl FnOnce() -> DecisionReport<'a>,
    ) {
        let (Some(hasher), Some(log)) = (&self.hasher, &self.log) else { return };
        let _ = catch_unwind(AssertUnwindSafe(|| {
            log.write_denial(limiter, key, report, self.mode, hasher, clock.now());
        }));
    }

    fn operated(&self, operation: &'static str, outcome: OperationOutcome) {
        if let Some(meter) = &self.meter {
            meter.operated(operation, outcome);
        }
    }

    fn store_changed(&self, is_up: bool) {
        if let Some(meter) = &self.meter {
            meter.set_up(is_up);
        }
    }
}

/// A call to the store, while it runs.
pub(crate) struct StoreCall<'a> {
    operation: &'static str,
    span: Span,
    meter: Option<(&'a StoreMeter, Instant)>,
}

impl CallRecorder for StoreCall<'_> {
    fn span(&self) -> Span {
        self.span.clone()
    }

    fn done(&self, error: Option<&StoreError>) {
        if let Some((meter, started)) = &self.meter {
            meter.called(self.operation, started.elapsed(), error);
        }
        if let Some(failure) = error.and_then(StoreError::failure) {
            self.span.record("failure", failure.name());
        }
    }
}
