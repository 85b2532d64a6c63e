//! The charge of a job, and what its denial means. Limits are counted by `tollgate`; nothing here knows the line.

use std::time::Duration;

use tollgate::telemetry::Source;
use tollgate::{Charge, ChargeId, Decision, Permit, Reason};

use super::decision::{Held, RunPermit};
use super::{JobGate, OUTAGE_WAIT, OUTAGE_WAIT_LONGEST};
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
        for sent in 1..=SENT {
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
                // The answer may be lost, and not the charge: one under another id, when the job comes again, would be a second.
                Ok(Charged::Denied(decision)) if sent < SENT && is_of_outage(&decision) => continue,
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

    /// Which limit ends a job that is about to take a place behind others, and how, if one does. A newcomer that finds a line is not
    /// charged; but it would only lengthen the line if another of its limits, which does not delay, denies it now. Limits that cannot be
    /// asked end nothing.
    pub(super) async fn ends_newcomer(&self, plan: &Plan) -> Option<(OnExceeded, usize)> {
        if !plan.may_end() {
            return None;
        }
        let charges: Vec<Charge<'_>> = plan.charges.iter().map(|charge| charge.charge()).collect();
        let decision = self.inner.tollgate.peek(&charges).await.ok()?;
        match decision.is_allowed() {
            true => None,
            false => match judge(plan, &decision) {
                Denial::Ends(behaviour, index) => Some((behaviour, index)),
                Denial::Outage(_) | Denial::Waits(..) => None,
            },
        }
    }

    fn holding(&self, plan: &Plan, permit: Permit) -> RunPermit {
        let leases = plan.charges.iter().filter(|charge| charge.is_concurrency);
        let lines = leases.map(|charge| charge.line).collect();
        RunPermit { held: Some(Held { gate: self.clone(), permit, lines }) }
    }
}

/// Whether a denial is not the store's.
fn is_of_outage(decision: &Decision) -> bool {
    decision.outcomes().iter().any(|outcome| outcome.source().is_fallback())
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::Mutex;
    use sqlx::postgres::PgPool;
    use tollgate::store::{
        Charged as StoreCharged, Failure, Hold, MemoryOptions, MemoryStore, Store, StoreError, StoreFuture,
        StoredCharge, StoredLimit,
    };
    use tollgate::{Fallback, Policy, Settled, Settlement, Tollgate, TollgateBuilder};

    use super::*;
    use crate::job::Job;
    use crate::policy::{JobPolicy, Jobs};

    const HOUR: Duration = Duration::from_secs(3_600);

    /// What is charged in the order of a plan.
    const LIMITS: [(&str, &str); 3] =
        [("jobs.type.a", "job:a"), ("jobs.queue.q", "queue:q"), ("jobs.global", "global")];

    /// A job under a limit of one an hour of its type, its queue and all jobs, with these behaviours.
    fn policies(behaviours: [OnExceeded; 3]) -> (Jobs, Plan) {
        let [of_type, of_queue, global] =
            behaviours.map(|behaviour| JobPolicy::new().with_rate_limit(1, HOUR).on_exceeded(behaviour));
        let jobs = Jobs::new().job("a", of_type).queue("q", of_queue).global(global);
        let plan = Plan::of(&jobs, &Job::new("1", "a", "q"), |_| false).unwrap();
        (jobs, plan)
    }

    /// What it means if those of the limits deny that are `full`.
    async fn judged(behaviours: [OnExceeded; 3], full: [bool; 3], builder: TollgateBuilder) -> Denial {
        let (jobs, plan) = policies(behaviours);
        let gate = builder.policy(Policy::new(jobs.rules().unwrap()).unwrap()).build().unwrap();
        for ((limit, key), _) in LIMITS.iter().zip(full).filter(|(_, is_full)| *is_full) {
            assert!(gate.charge(&[Charge::new(limit, *key)]).await.unwrap().is_allowed());
        }
        let charges: Vec<Charge<'_>> = plan.charges.iter().map(|charge| charge.charge()).collect();
        let decision = gate.charge(&charges).await.unwrap();
        assert!(!decision.is_allowed());
        judge(&plan, &decision)
    }

    #[tokio::test]
    async fn the_strictest_behaviour_of_those_that_deny_decides() {
        use OnExceeded::{Delay, Reject, Skip};
        for (behaviours, full, ends) in [
            ([Delay, Delay, Delay], [false, true, true], None),
            ([Skip, Delay, Delay], [true, true, false], Some((Skip, 0))),
            ([Delay, Delay, Skip], [true, true, true], Some((Skip, 2))),
            ([Skip, Delay, Reject], [true, true, true], Some((Reject, 2))),
            ([Reject, Delay, Skip], [true, false, true], Some((Reject, 0))),
            // A limit that does not deny has no say.
            ([Reject, Skip, Delay], [false, true, true], Some((Skip, 1))),
            ([Reject, Delay, Skip], [false, true, false], None),
        ] {
            let denial = judged(behaviours, full, Tollgate::builder()).await;
            match (denial, ends) {
                (Denial::Ends(behaviour, index), Some(expected)) => assert_eq!((behaviour, index), expected),
                (Denial::Waits(waits, _), None) => assert_eq!(waits, full, "{behaviours:?}"),
                _ => panic!("{behaviours:?} and {full:?}: not {ends:?}"),
            }
        }
    }

    /// A store that nobody reaches.
    struct Nowhere;

    fn fails<'a, T>() -> StoreFuture<'a, T> {
        Box::pin(async { Err(StoreError::failed(Failure::Connection, "there is nothing there")) })
    }

    impl Store for Nowhere {
        fn charge<'a>(&'a self, _: &'a [StoredCharge<'a>], _: Option<Hold>) -> StoreFuture<'a, StoreCharged> {
            fails()
        }
        fn settle<'a>(&'a self, _: ChargeId, _: &'a Settlement) -> StoreFuture<'a, Settled> {
            fails()
        }
        fn peek<'a>(&'a self, _: &'a [StoredCharge<'a>]) -> StoreFuture<'a, StoreCharged> {
            fails()
        }
        fn forget<'a>(&'a self, _: &'a StoredLimit, _: &'a str) -> StoreFuture<'a, bool> {
            fails()
        }
    }

    #[tokio::test]
    async fn what_only_an_outage_denies_waits() {
        let nowhere = Tollgate::builder().store(Nowhere).fallback(Fallback::Closed);
        let denial =
            judged([OnExceeded::Reject, OnExceeded::Skip, OnExceeded::Delay], [false; 3], nowhere).await;
        assert!(matches!(denial, Denial::Outage(wait) if wait <= OUTAGE_WAIT_LONGEST));
    }

    /// A memory store that charges, and loses its first answers.
    struct Forgetful {
        memory: MemoryStore,
        lost: AtomicUsize,
        ids: Arc<Mutex<Vec<ChargeId>>>,
    }

    impl Store for Forgetful {
        fn charge<'a>(
            &'a self,
            charges: &'a [StoredCharge<'a>],
            hold: Option<Hold>,
        ) -> StoreFuture<'a, StoreCharged> {
            Box::pin(async move {
                self.ids.lock().extend(hold.map(|hold| hold.id));
                let charged = Store::charge(&self.memory, charges, hold).await;
                match self.lost.fetch_sub(1, Ordering::SeqCst) {
                    1.. => Err(StoreError::failed(Failure::Timeout, "its answer is lost").ambiguous()),
                    0 => charged,
                }
            })
        }
        fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
            Store::settle(&self.memory, id, settlement)
        }
        fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, StoreCharged> {
            Store::peek(&self.memory, charges)
        }
        fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
            Store::forget(&self.memory, limit, key)
        }
    }

    #[tokio::test]
    async fn a_charge_whose_answers_are_lost_is_sent_again_under_its_id() {
        let ids = Arc::<Mutex<Vec<ChargeId>>>::default();
        let store = Forgetful {
            memory: MemoryStore::new(MemoryOptions::default()),
            lost: AtomicUsize::new(2),
            ids: ids.clone(),
        };
        let jobs = Jobs::new().job("a", JobPolicy::new().with_rate_limit(1, HOUR).concurrency(1));
        let plan = Plan::of(&jobs, &Job::new("1", "a", "q"), |_| false).unwrap();
        let tollgate = Tollgate::builder().store(store).fallback(Fallback::Closed).build().unwrap();
        let pool = PgPool::connect_lazy("postgres://nobody@127.0.0.1:1/nothing").unwrap();
        let gate = JobGate::builder(tollgate, pool).jobs(jobs).attach().unwrap();
        let charged = gate.charge(&plan).await;
        assert!(matches!(charged, Charged::Admitted(_)), "both limits have room for one");
        let ids = ids.lock().clone();
        assert_eq!((ids.len(), ids.iter().collect::<HashSet<_>>().len()), (3, 1), "{ids:?}");
        let used = gate.tollgate().status("jobs.type.a", "job:a").await.unwrap().used();
        assert_eq!(used, 1, "it is charged once");
    }
}
