//! Without the feature `telemetry` nobody measures, logs or traces decisions: the questions of `watch.rs` and `meter.rs`,
//! answered with nothing, so that what asks them is the same text in either case and costs nothing here.

use std::sync::Arc;
use std::time::Duration;

use tollgate_kernel::Strategy;
use tollgate_store::{Clock, StoreError};
use tracing::Span;

use super::{DecisionReport, LimitReport, Observers};

/// There is none.
pub(crate) type Telemetry = std::convert::Infallible;

pub(crate) struct Watch;

impl Watch {
    pub(crate) fn new(_telemetry: Option<&Telemetry>, _mode: &'static str) -> Watch {
        Watch
    }

    pub(crate) fn declare(&self, _namespace: &str) {}

    pub(crate) const fn is_off(&self) -> bool {
        true
    }

    pub(crate) const fn allows_fast_path(&self) -> bool {
        true
    }

    pub(crate) const fn logs_denials_only(&self) -> bool {
        false
    }

    pub(crate) const fn times_all(&self, _is_elsewhere: bool) -> bool {
        false
    }

    pub(crate) const fn times_some(&self) -> bool {
        false
    }

    pub(crate) const fn check_span(&self, _operation: &'static str) -> Span {
        Span::none()
    }

    pub(crate) const fn store_call(&self, _operation: &'static str) -> StoreCall {
        StoreCall
    }

    pub(crate) fn report(&self, _report: &DecisionReport<'_>, _span: &Span, _clock: &Clock) {}

    pub(crate) fn store_changed(&self, _is_up: bool) {}
}

pub(crate) struct StoreCall;

impl StoreCall {
    pub(crate) const fn span(&self) -> Span {
        Span::none()
    }

    pub(crate) fn done(&self, _error: Option<&StoreError>) {}
}

#[derive(Clone)]
pub(crate) struct Meter;

impl Meter {
    pub(crate) fn new(
        _: &Watch,
        _: &Arc<Observers>,
        _limiter: &str,
        _: impl IntoIterator<Item = Option<Strategy>>,
    ) -> Meter {
        Meter
    }

    pub(crate) const fn counts(&self, _strategies: &[Option<Strategy>]) -> bool {
        true
    }

    pub(crate) const fn is_on(&self) -> bool {
        false
    }

    pub(crate) const fn publish(&self) {}

    pub(crate) fn count_fast_path(&self, _key: &str, _allowed: bool, _took: Option<Duration>) {}

    pub(crate) fn count_fast_path_many<'k>(
        &self,
        _answers: impl Iterator<Item = (&'k str, bool)>,
        _took: Option<Duration>,
    ) {
    }

    pub(crate) fn decided(&self, _told: &LimitReport<'_>) {}
}

pub(crate) const fn is_sampled() -> bool {
    false
}
