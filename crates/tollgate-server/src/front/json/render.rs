//! Renders a decision as JSON. Milliseconds are rounded up; `null` means never.

use std::fmt::Write;
use std::time::Duration;

use tollgate::{ChargeId, Decision, Outcome};

/// `{"allowed":true,"binding":"api",…,"limits":[…]}`. Names of limits need no escaping: they are `[a-z0-9_.-]`.
pub(crate) fn decision(out: &mut String, decision: &Decision, reservation: Option<ChargeId>) {
    out.push_str("{\"allowed\":");
    out.push_str(word(decision.is_allowed()));
    out.push_str(",\"binding\":\"");
    out.push_str(decision.binding().limit());
    out.push_str("\",\"retry_after_ms\":");
    wait(out, decision.retry_after());
    out.push_str(",\"delay_ms\":");
    number(out, ms(decision.delay()));
    out.push_str(",\"degraded\":");
    out.push_str(word(decision.is_degraded()));
    if !decision.is_allowed() {
        reason(out, decision.binding());
    }
    if let Some(id) = reservation {
        let _ = write!(out, ",\"reservation\":\"{id}\"");
    }
    limits(out, decision);
    out.push('}');
}

fn limits(out: &mut String, decision: &Decision) {
    out.push_str(",\"limits\":[");
    for (index, outcome) in decision.outcomes().iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        limit(out, outcome);
    }
    out.push(']');
}

fn limit(out: &mut String, answered: &Outcome) {
    out.push_str("{\"limit\":\"");
    out.push_str(answered.limit());
    out.push_str("\",\"allowed\":");
    out.push_str(word(answered.is_allowed()));
    out.push(',');
    outcome(out, answered);
    if !answered.is_allowed() || answered.would_deny() {
        reason(out, answered);
    }
    if answered.is_shadow() {
        let _ = write!(out, ",\"shadow\":true,\"would_deny\":{}", answered.would_deny());
    }
    out.push('}');
}

/// Why a limit denies, or would.
fn reason(out: &mut String, outcome: &Outcome) {
    out.push_str(",\"reason\":\"");
    out.push_str(outcome.reason().name());
    out.push('"');
}

/// The numbers of an outcome, without braces.
pub(crate) fn outcome(out: &mut String, outcome_of_limit: &Outcome) {
    let numbers = outcome_of_limit.numbers();
    if outcome_of_limit.is_unlimited() {
        out.push_str("\"capacity\":null,\"remaining\":null,");
    } else {
        out.push_str("\"capacity\":");
        number(out, numbers.capacity);
        out.push_str(",\"remaining\":");
        number(out, numbers.remaining);
        out.push(',');
    }
    out.push_str("\"retry_after_ms\":");
    wait(out, numbers.retry_after.map(Duration::from));
    out.push_str(",\"reset_after_ms\":");
    number(out, ms(outcome_of_limit.reset_after()));
}

fn wait(out: &mut String, wait: Option<Duration>) {
    match wait {
        Some(wait) => number(out, ms(wait)),
        None => out.push_str("null"),
    }
}

const fn word(is_so: bool) -> &'static str {
    if is_so { "true" } else { "false" }
}

fn number(out: &mut String, number: u64) {
    out.push_str(itoa::Buffer::new().format(number));
}

fn ms(span: Duration) -> u64 {
    u64::try_from(span.as_micros().div_ceil(1_000)).unwrap_or(u64::MAX)
}
