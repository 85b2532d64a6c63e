//! What a registry's telemetry sees: every decision once it is made, every call to a store elsewhere.
//!
//! Nothing here can change a decision. What the host's subscriber does with an event or a span is its own affair: a panic there
//! is caught, as an observer's is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use tollgate_store::{Clock, StoreError};
use tracing::Span;

use super::key_hash::KeyHasher;
use super::log::DecisionLog;
use super::metrics::Sink;
use super::namespaces::Namespaces;
use super::store_meter::{Reading, StoreMeter};
use super::{DecisionReport, spans};

pub(crate) use super::Telemetry;
pub(crate) use super::meter::{Meter, is_sampled};

/// The telemetry of one registry.
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
        let meter = telemetry.sink().map(|sink| StoreMeter::new(sink.clone(), mode));
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

    /// Lets a namespace of keys be a label of metrics.
    pub(crate) fn declare(&self, namespace: &str) {
        self.namespaces.declare(namespace);
    }

    /// Which namespaces have series of their own.
    pub(crate) fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// Whether there is nobody to tell.
    pub(crate) fn is_off(&self) -> bool {
        self.meter.is_none() && self.allows_fast_path()
    }

    /// Whether a decision may take the fast path, on which there is only counting.
    pub(crate) fn allows_fast_path(&self) -> bool {
        self.log.is_none() && !self.has_spans
    }

    /// Whether nobody wants more of a decision than its count, unless it is a denial.
    pub(crate) fn logs_denials_only(&self) -> bool {
        self.log.as_ref().is_some_and(DecisionLog::logs_denials_only) && !self.has_spans
    }

    /// Whether every decision is to be timed: where a clock costs nothing beside the store, and where lines say how long it took.
    #[inline]
    pub(crate) fn times_all(&self, is_elsewhere: bool) -> bool {
        self.log.is_some() || (is_elsewhere && self.meter.is_some())
    }

    /// Whether one decision in 64 is to be timed at least.
    #[inline]
    pub(crate) fn times_some(&self) -> bool {
        self.meter.is_some()
    }

    pub(crate) fn mode(&self) -> &'static str {
        self.mode
    }

    pub(crate) fn sink(&self) -> Option<&Sink> {
        self.meter.as_ref().map(StoreMeter::sink)
    }

    /// The span of a decision.
    #[inline]
    pub(crate) fn check_span(&self, operation: &'static str) -> Span {
        if self.has_spans { spans::check(operation) } else { Span::none() }
    }

    /// A decision was made; `span` is its own.
    pub(crate) fn report(&self, decision_report: &DecisionReport<'_>, span: &Span, clock: &Clock) {
        let Some(hasher) = &self.hasher else { return };
        let _ = catch_unwind(AssertUnwindSafe(|| {
            spans::conclude(span, decision_report, self.mode, hasher);
            if let Some(log) = &self.log {
                log.write(decision_report, self.mode, hasher, clock.now());
            }
        }));
    }

    /// A call to the store starts.
    pub(crate) fn store_call(&self, operation: &'static str) -> StoreCall<'_> {
        let span = if self.has_spans { spans::store(operation, self.mode) } else { Span::none() };
        let meter = self.meter.as_ref().map(|meter| (meter, Instant::now()));
        StoreCall { operation, span, meter }
    }

    /// A node of the store went, or came back.
    pub(crate) fn store_changed(&self, is_up: bool) {
        if let Some(meter) = &self.meter {
            meter.set_up(is_up);
        }
    }

    /// Sets what nobody tells of by itself.
    pub(crate) fn publish(&self, reading: &Reading, clock: &Clock) {
        if let Some(log) = &self.log {
            log.write_left_out(clock.now());
        }
        if let Some(meter) = &self.meter {
            meter.publish(reading);
        }
    }
}

/// A call to the store, on its way.
pub(crate) struct StoreCall<'a> {
    operation: &'static str,
    span: Span,
    meter: Option<(&'a StoreMeter, Instant)>,
}

impl StoreCall<'_> {
    pub(crate) fn span(&self) -> Span {
        self.span.clone()
    }

    /// It came back.
    pub(crate) fn done(&self, error: Option<&StoreError>) {
        if let Some((meter, started)) = &self.meter {
            meter.called(self.operation, started.elapsed(), error);
        }
        if let Some(failure) = error.and_then(StoreError::failure) {
            self.span.record("failure", failure.name());
        }
    }
}
