//! Spans: one around each decision, one around each call to a remote store.
//!
//! A span that the host's subscriber does not enable is not made, and nothing is hashed for it.

use tollgate_kernel::Micros;
use tracing::Span;
use tracing::field::Empty;

use super::{DecisionReport, KeyHasher, strategy_name};

/// A span around a decision. Its fields are recorded after the decision: for several limits those of the binding one; for many
/// keys in one call the limit and the number of keys.
pub(crate) fn check(operation: &'static str) -> Span {
    tracing::info_span!(
        target: "tollgate",
        "rate_limit.check",
        operation,
        limiter = Empty,
        strategy = Empty,
        storage_mode = Empty,
        key_hash = Empty,
        decision = Empty,
        source = Empty,
        retry_after_ms = Empty,
        limits = Empty,
        keys = Empty,
    )
}

/// Around a call to the store.
pub(crate) fn store(operation: &'static str, storage_mode: &'static str) -> Span {
    tracing::info_span!(target: "tollgate", "rate_limit.store", operation, storage_mode, failure = Empty)
}

pub(crate) fn conclude(
    span: &Span,
    decision_report: &DecisionReport<'_>,
    mode: &'static str,
    hasher: &KeyHasher,
) {
    if span.is_disabled() {
        return;
    }
    let binding = &decision_report.binding;
    span.record("limiter", decision_report.limiter);
    span.record("strategy", strategy_name(binding.strategy));
    span.record("storage_mode", mode);
    if let Some(key) = binding.key {
        span.record("key_hash", hasher.hash(key));
    }
    span.record("decision", binding.kind.name());
    span.record("source", binding.source.name());
    if let Some(wait) = decision_report.retry_after {
        span.record("retry_after_ms", millis(wait));
    }
    span.record("limits", decision_report.limits);
}

/// Whole milliseconds, rounded up, so that waiting that long is enough.
pub(crate) fn millis(wait: Micros) -> u64 {
    wait.get().div_ceil(1_000)
}
