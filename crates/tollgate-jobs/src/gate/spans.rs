//! A span around each decision of the gate.

use tracing::Span;
use tracing::field::Empty;

use super::decision::JobDecision;
use crate::plan::Plan;

/// Around a decision; those of the charges are inside it.
pub(super) fn enter(plan: &Plan) -> Span {
    tracing::info_span!(
        target: "tollgate",
        "job.enter",
        job_type = plan.job_type,
        queue = plan.queue,
        decision = Empty,
        limiter = Empty,
        delay_ms = Empty,
    )
}

pub(super) fn conclude(span: &Span, decision: &JobDecision) {
    span.record("decision", decision.name());
    match decision {
        JobDecision::Delay(delay) => {
            span.record("limiter", delay.limit.as_str());
            span.record("delay_ms", u64::try_from(delay.wait.as_millis()).unwrap_or(u64::MAX));
        }
        JobDecision::Skip { limit } => drop(span.record("limiter", limit.as_str())),
        JobDecision::Run(_) | JobDecision::Reject => {}
    }
}
