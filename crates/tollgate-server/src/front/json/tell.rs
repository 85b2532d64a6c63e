//! A decision as JSON. Milliseconds are rounded up, and what never comes is `null`.

use std::fmt::Write;

use tollgate::{Decision, LimitOutcome, Micros, Outcome};

use crate::app::Decided;

/// `{"allowed":true,"binding":"api",…,"limits":[…]}`. Names of limits need no escaping: they are `[a-z0-9_.-]`.
pub(crate) fn decision(out: &mut String, decided: &Decided<'_>) {
    let Decided { decision, reservation } = decided;
    let _ = write!(out, "{{\"allowed\":{},\"binding\":\"{}\",", decision.allowed(), decision.binding().name);
    out.push_str("\"retry_after_ms\":");
    wait(out, decision.retry_after());
    let _ = write!(out, ",\"delay_ms\":{},\"degraded\":{}", ms(decision.delay()), decision.degraded());
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
    let _ = write!(out, "{{\"limit\":\"{}\",\"allowed\":{},", said.name, !said.denies());
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
        let _ = write!(out, "\"capacity\":{},\"remaining\":{},", said.capacity, said.remaining);
    }
    out.push_str("\"retry_after_ms\":");
    wait(out, said.retry_after);
    let _ = write!(out, ",\"reset_after_ms\":{}", ms(said.reset_after));
}

fn wait(out: &mut String, wait: Option<Micros>) {
    match wait {
        Some(wait) => {
            let _ = write!(out, "{}", ms(wait));
        }
        None => out.push_str("null"),
    }
}

fn ms(span: Micros) -> u64 {
    span.get().div_ceil(1_000)
}
