//! The charge of a job, and what its denial means. Limits are counted by `tollgate`; nothing here knows the line.

use std::time::Duration;

use tollgate::telemetry::Source;
use tollgate::{Charge, ChargeId, Decision, Permit, Reason};

use super::{JobGate, OUTAGE_WAIT, OUTAGE_WAIT_LONGEST};
use crate::decision::{Held, RunPermit};
use crate::limits::OnExceeded;
use crate::plan::Plan;

/// How often a charge whose answer was lost is sent again, under the same id.
const SENT: usize = 3;

/// What a charge came to.
pub(super) enum Charged {
    Admitted(RunPermit),
    Denied(Decision),
    /// The store could not be asked.
    Unknown,
}

/// What a denial means.
pub(super) enum Denial {
    /// Only an outage made it.
    Outage(Duration),
    Ends(OnExceeded, usize),
    /// It waits for the limits that are marked; the one with the longest wait is the second.
    Waits(Vec<bool>, usize),
}

impl JobGate {
    /// One charge over all limits. Sent again under the same id if its answer is lost.
    pub(super) async fn charge(&self, plan: &Plan) -> Charged {
        let charges: Vec<Charge<'_>> = plan.charges.iter().map(|charge| charge.charge()).collect();
        if charges.is_empty() {
            return Charged::Admitted(RunPermit::free());
        }
        let (gate, id) = (&self.inner.tollgate, ChargeId::random());
        let has_leases = plan.charges.iter().any(|charge| charge.is_concurrency);
        for _ in 0..SENT {
            let answer = match has_leases {
                true => match gate.acquire_all(&charges).id(id).await {
                    Ok(Ok(permit)) => Ok(Charged::Admitted(self.holding(plan, permit))),
                    Ok(Err(denied)) => Ok(Charged::Denied(denied.into_decision())),
                    Err(error) => Err(error),
                },
                false => gate.charge(&charges).id(id).await.map(|decision| match decision.is_allowed() {
                    true => Charged::Admitted(RunPermit::free()),
                    false => Charged::Denied(decision),
                }),
            };
            match answer {
                Ok(charged) => return charged,
                Err(error) if error.is_transient() || error.is_ambiguous() => continue,
                Err(error) => {
                    tracing::error!(%error, job_type = plan.job_type, "a job cannot be charged; it is put off");
                    return Charged::Unknown;
                }
            }
        }
        Charged::Unknown
    }

    fn holding(&self, plan: &Plan, permit: Permit) -> RunPermit {
        let leases = plan.charges.iter().filter(|charge| charge.is_concurrency);
        let lines = leases.map(|charge| charge.line).collect();
        RunPermit { held: Some(Held { gate: self.clone(), permit, lines }) }
    }
}

/// What a denial means: of the limits that deny, the strictest behaviour decides. One that only an outage made is a delay.
pub(super) fn judge(plan: &Plan, decision: &Decision) -> Denial {
    let outcomes = decision.outcomes().iter().zip(&plan.charges).enumerate();
    let denying: Vec<_> = outcomes.filter(|(_, (outcome, _))| !outcome.is_allowed()).collect();
    let is_outage = |source: Source| source.is_fallback();
    let real = || denying.iter().filter(|(_, (outcome, _))| !is_outage(outcome.source()));
    let Some((index, (_, charge))) = real().max_by_key(|(_, (_, charge))| charge.on_exceeded) else {
        return Denial::Outage(decision.retry_after().unwrap_or(OUTAGE_WAIT).min(OUTAGE_WAIT_LONGEST));
    };
    if charge.on_exceeded > OnExceeded::Delay {
        return Denial::Ends(charge.on_exceeded, *index);
    }
    // Neither time nor place helps a charge that is larger than its limit, or a key that no limit takes.
    let never =
        real().find(|(_, (outcome, _))| matches!(outcome.reason(), Reason::TooLarge | Reason::MalformedKey));
    if let Some((index, (outcome, charge))) = never {
        tracing::error!(
            limit = charge.limit,
            cost = charge.cost,
            reason = outcome.reason().name(),
            "a job can never run"
        );
        return Denial::Ends(OnExceeded::Reject, *index);
    }
    let mut waits = vec![false; plan.charges.len()];
    real().for_each(|(index, _)| waits[*index] = true);
    let binding = real().max_by_key(|(_, (outcome, _))| outcome.retry_after()).map_or(0, |(index, _)| *index);
    Denial::Waits(waits, binding)
}
