//! A decision as JSON. Milliseconds are rounded up, and what never comes is `null`.

use std::fmt::Write;

use tollgate::{Decision, LimitOutcome, Micros, Outcome};

use crate::app::Decided;

/// `{"allowed":true,"binding":"api",…,"limits":[…]}`. Names of limits need no escaping: they are `[a-z0-9_.-]`.
pub(crate) fn decision(out: &mut String, decided: &Decided<'_>) {
    let Decided { decision, reservation } = decided;
    out.push_str("{\"allowed\":");
    out.push_str(word(decision.allowed()));
    out.push_str(",\"binding\":\"");
    out.push_str(decision.binding().name);
    out.push_str("\",\"retry_after_ms\":");
    wait(out, decision.retry_after());
    out.push_str(",\"delay_ms\":");
    number(out, ms(decision.delay()));
    out.push_str(",\"degraded\":");
    out.push_str(word(decision.degraded()));
    if let Some(id) = reservation {
        let _ = write!(out, ",\"reservation\":\"{id}\"");
    }
    limits(out, decision);
    out.push('}');
}

fn limits(out: &mut String, decision: &Decision<'_>) {
    out.push_str(",\"limits\":[");
    for (index, said) in decision.limits().iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        limit(out, said);
    }
    out.push(']');
}

fn limit(out: &mut String, said: &LimitOutcome<'_>) {
    out.push_str("{\"limit\":\"");
    out.push_str(said.name);
    out.push_str("\",\"allowed\":");
    out.push_str(word(!said.denies()));
    out.push(',');
    outcome(out, &said.outcome);
    if said.shadow {
        let _ = write!(out, ",\"shadow\":true,\"would_deny\":{}", !said.outcome.allowed);
    }
    out.push('}');
}

/// What a limit says in numbers, without braces.
pub(crate) fn outcome(out: &mut String, said: &Outcome) {
    if *said == Outcome::UNLIMITED {
        out.push_str("\"capacity\":null,\"remaining\":null,");
    } else {
        out.push_str("\"capacity\":");
        number(out, said.capacity);
        out.push_str(",\"remaining\":");
        number(out, said.remaining);
        out.push(',');
    }
    out.push_str("\"retry_after_ms\":");
    wait(out, said.retry_after);
    out.push_str(",\"reset_after_ms\":");
    number(out, ms(said.reset_after));
}

fn wait(out: &mut String, wait: Option<Micros>) {
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

fn ms(span: Micros) -> u64 {
    span.get().div_ceil(1_000)
}
