//! The gate between claiming a job and running it, for any framework.
//!
//! A job's [`Plan`] is charged as one charge: all limits, or none. A job that is denied takes a place in the lines of the limits that
//! denied it and gets a time of its own, by the kernel's `turn`; newcomers who find a line go to its end, unless a limit that ends jobs
//! denies them now. Where another limit makes it wait much longer its place is parked: it keeps it, and nobody waits for it there. When a
//! place becomes parked and the limit has room, the next in that line are called. A slot is an expectation:
//! when it comes, the job is charged like any other, and what does not fit then keeps its place and gets another time. Those that come at
//! the same time take their places together. Short waits are waited for here, with the job claimed, because a reschedule costs more.
//!
//! Nothing here fails because of one job: what cannot be decided is a delay. No arithmetic of limits is done here.

mod batch;
mod builder;
mod bulk;
mod charge;
pub(crate) mod decision;
mod delay;
mod housekeeping;
mod overrides;
mod spans;
mod status;
mod turn;
mod undeclared;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use sqlx::postgres::PgPool;
use tollgate::{Allowance, Limit, Policy, Tollgate};
use tracing::Instrument;

use self::decision::JobDecision;
use crate::error::Error;
use crate::history::History;
use crate::job::Job;
use crate::limits::{JobsConfig, OnExceeded};
use crate::line::{Line, Taken};
use crate::metrics;
use crate::plan::{Lacks, Plan, PlannedCharge};
use crate::policy::Jobs;
use crate::wake::{Wake, Wakes};

use batch::{Batcher, Placed};
pub use builder::JobGateBuilder;
#[cfg(feature = "apalis")]
pub(crate) use bulk::{PutOff, Sleep, in_few_lines};
use charge::{Charged, Denial, judge};
use delay::Over;
use overrides::{Applied, Overrides, charged};
pub use status::JobStatus;
pub(crate) use status::{closing, held_by};
use turn::{Turn, micros};
use undeclared::Undeclared;

/// Waits up to this are waited for with the job claimed.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// How often a job is charged before it is put back: misses are by less than a short wait, and each is followed by its own.
const TRIES: usize = 4;

/// How long a job waits that could not be decided, and how long at most if a fallback said for how long: the store may be back any moment.
const OUTAGE_WAIT: Duration = Duration::from_secs(1);
const OUTAGE_WAIT_LONGEST: Duration = Duration::from_secs(5);

/// The gate between claiming a job and running it. Cheap to clone.
#[derive(Clone)]
pub struct JobGate {
    inner: Arc<Inner>,
}

struct Inner {
    tollgate: Tollgate,
    line: Line,
    jobs: RwLock<Arc<Jobs>>,
    /// How often policies were put in place.
    version: AtomicU64,
    /// Calls waiting jobs in the framework, if it can.
    wake: RwLock<Option<Arc<dyn Wake>>>,
    wakes: Wakes,
    history: History,
    undeclared: Undeclared,
    batcher: Batcher,
    overrides: Overrides,
    #[cfg(feature = "apalis")]
    ahead: crate::read_ahead::ReadAhead,
}

impl JobGate {
    /// A gate over `tollgate`, whose line is in the database of the jobs.
    pub fn builder(tollgate: Tollgate, pool: PgPool) -> JobGateBuilder {
        JobGateBuilder { tollgate, pool, jobs: Jobs::new(), prefix: "tollgate_".to_owned() }
    }

    /// Puts other policies in place; their limits keep what they have counted. Waiting jobs are called, so that they run sooner where
    /// more is allowed now; where less is, they find out when their time comes. An error means that something was refused, and that the old
    /// ones stay. Jobs that cannot be called are no error: that is logged, and tried again in the background.
    pub async fn reload(&self, jobs: Jobs) -> Result<(), Error> {
        self.apply(jobs)?;
        self.call_all().await;
        Ok(())
    }

    /// The same with what a configuration says now, `[limits]` included. Costs, which exist in code alone, stay. Nobody is called where nothing has
    /// changed that jobs are charged to.
    pub async fn reload_config(
        &self,
        config: &tollgate::config::Config,
        jobs: &JobsConfig,
    ) -> Result<(), Error> {
        let jobs = self.inner.jobs.read().with_config(jobs);
        let before = (self.inner.tollgate.policy(), self.inner.jobs.read().clone());
        self.put_in_place(&mut self.inner.overrides.lock(), config.policy.clone(), jobs)?;
        let (policy, jobs) = (self.inner.tollgate.policy(), self.inner.jobs.read().clone());
        // What only HTTP calls are charged to holds up no job.
        if before.1.config() != jobs.config()
            || charged(jobs.config()).iter().any(|name| before.0.rule(name) != policy.rule(name))
        {
            self.call_all().await;
        }
        Ok(())
    }

    fn apply(&self, jobs: Jobs) -> Result<(), Error> {
        let rules = jobs.rules()?;
        let mut applied = self.inner.overrides.lock();
        let current = self.base(&applied);
        check_names(jobs.config(), &current)?;
        let others = current.rules().iter().filter(|rule| !rule.name().starts_with("jobs.")).cloned();
        let policy = Policy::new(others.chain(rules)).map_err(tollgate::Error::from)?;
        self.put_in_place(&mut applied, policy, jobs)
    }

    /// Puts a policy in place, with what was set at run time over it.
    fn put_in_place(&self, applied: &mut Applied, policy: Policy, jobs: Jobs) -> Result<(), Error> {
        let over = self.inner.overrides.over(&policy);
        self.inner.tollgate.reload(over.clone())?;
        *applied = Some((policy, over));
        let keys = labels(jobs.config());
        let before = std::mem::replace(&mut *self.inner.jobs.write(), Arc::new(jobs));
        // Nobody sets the gauges of a key that has no policy any more.
        labels(before.config()).difference(&keys).for_each(|key| metrics::status(key, 0, 0, 0));
        self.changed();
        Ok(())
    }

    fn changed(&self) {
        self.inner.version.fetch_add(1, Ordering::SeqCst);
    }

    /// What a job is to be charged; `None` if it meets no policy and may run as it is. The log has a warning, once, of a type that no policy names
    /// where other types have policies.
    pub fn plan(&self, job: &Job<'_>) -> Option<Plan> {
        let jobs = self.inner.jobs.read().clone();
        let is_concurrency = |name: &str| {
            let limit = self.inner.tollgate.limit(name);
            limit.is_ok_and(|limit| matches!(limit.allowance(), Allowance::Limited(Limit::Concurrency(_))))
        };
        let plan = Plan::of(&jobs, job, is_concurrency);
        self.inner.undeclared.note(&jobs, job.job_type, plan.is_some());
        plan
    }

    /// Asks for leave to run. Never an error: what cannot be decided is a delay. The decision has a span, `job.enter`, around those of its
    /// charges.
    pub async fn enter(&self, plan: &Plan) -> JobDecision {
        let span = spans::enter(plan);
        let decision = self.decide(plan).instrument(span.clone()).await;
        if matches!(decision, JobDecision::Run(_)) {
            self.inner.history.started(plan);
        }
        spans::conclude(&span, &decision);
        decision
    }

    async fn decide(&self, plan: &Plan) -> JobDecision {
        if let Some(lacks) = &plan.lacks {
            let Lacks { on_exceeded, limit, label, field, fix } = lacks;
            tracing::warn!(
                job_type = plan.job_type,
                field,
                key = label,
                "a job lacks a field that its limits need, and is ended: {fix}"
            );
            // Waiting would not bring the field, and a job that was to wait does not end in silence.
            let behaviour =
                if *on_exceeded == OnExceeded::Skip { OnExceeded::Skip } else { OnExceeded::Reject };
            return self.end(plan, behaviour, Over { limit, label }, true).await;
        }
        if let Some(charge) = self.too_large(plan) {
            let PlannedCharge { limit, cost, .. } = charge;
            tracing::error!(
                job_type = plan.job_type,
                limit,
                cost,
                "a job can never run: it costs more than this limit ever holds"
            );
            return self.end(plan, charge.ends_as(), Over::of(charge), true).await;
        }
        // Whether one that a limit may end is a newcomer is found out by a look.
        if !plan.may_end() && self.inner.batcher.is_crowded(plan) {
            match self.put_off_in_batch(plan, &[]).await {
                Placed::Delayed(delay) => return JobDecision::Delay(delay),
                Placed::Soon(wait) => tokio::time::sleep(wait).await,
                Placed::Alone => {}
            }
        }
        let looked = Instant::now();
        let mut look = match self.inner.line.look(plan).await {
            Ok(look) => look,
            Err(error) => {
                tracing::warn!(%error, "the line of waiting jobs cannot be read; jobs go by their limits alone");
                return self.enter_without_line(plan).await;
            }
        };
        if !look.is_waiting() {
            self.inner.batcher.found(plan, &look.ahead);
        }
        if look.is_early()
            && let Some(wake) = self.wake()
        {
            wake.came_early().await;
        }
        let is_due = look.slot_us.map_or_else(
            || look.ahead.iter().all(|ahead| *ahead == 0),
            |slot_us| slot_us <= look.now_us().saturating_add(micros(SHORT_WAIT)),
        );
        let mut may_charge = look.closed_us.is_none() && is_due;
        for _ in 0..TRIES {
            let mut waits_for: Vec<bool> = look.ahead.iter().map(|ahead| *ahead > 0).collect();
            for (waits, charge) in waits_for.iter_mut().zip(&plan.charges) {
                *waits |= charge.is_closed(&look.closed);
            }
            let mut had = Taken::default();
            let mut denial = None;
            if may_charge {
                let _charging = self.inner.batcher.charging(plan).await;
                if look.is_waiting() {
                    // Without its place while it is charged: nobody else counts it twice, in line and in the limit.
                    had = self.take(plan).await;
                }
                // Another of its key was denied meanwhile: a newcomer stands behind it.
                let denied = self.inner.batcher.denied_since(plan, looked).filter(|_| !look.is_waiting());
                let charged = match denied {
                    Some(denied) => {
                        waits_for = denied;
                        None
                    }
                    None => Some(self.charge(plan).await),
                };
                match charged {
                    None => {}
                    Some(Charged::Admitted(permit)) => return JobDecision::Run(permit),
                    Some(Charged::Unknown) => return self.put_off_in_line(plan, had, OUTAGE_WAIT).await,
                    Some(Charged::Denied(decision)) => match judge(plan, &decision) {
                        Denial::Outage(wait) => return self.put_off_in_line(plan, had, wait).await,
                        Denial::Ends(behaviour, index) => {
                            return self.end(plan, behaviour, Over::of(&plan.charges[index]), false).await;
                        }
                        Denial::Waits(denying, _) => {
                            denial = Some(self.inner.batcher.deny(plan, &denying));
                            waits_for = denying;
                        }
                    },
                }
            }
            if !had.is_some() {
                let was_asked = look.is_waiting() || denial.is_some();
                if !was_asked && let Some((behaviour, index)) = self.ends_newcomer(plan).await {
                    return self.end(plan, behaviour, Over::of(&plan.charges[index]), false).await;
                }
                match self.put_off_in_batch(plan, &waits_for).await {
                    Placed::Delayed(delay) => return JobDecision::Delay(delay),
                    Placed::Soon(wait) => {
                        drop(denial);
                        look.has_stood();
                        tokio::time::sleep(wait).await;
                        may_charge = true;
                        continue;
                    }
                    Placed::Alone => {}
                }
            }
            let was_in_line = had.is_some();
            look = match self.inner.line.stand(plan, &waits_for, had).await {
                Ok(look) => look,
                Err(error) => {
                    tracing::warn!(%error, "a place in line cannot be taken");
                    return self.put_off(plan, OUTAGE_WAIT, 0);
                }
            };
            drop(denial);
            let Some(turn) = self.turn(plan, &look).await else {
                // No wait helps: it costs more than a limit ever holds.
                let charge = self.too_large(plan).unwrap_or(&plan.charges[0]);
                return self.end(plan, OnExceeded::Reject, Over::of(charge), true).await;
            };
            if plan.is_given_up(look.now_us(), look.since_us) {
                let charge = &plan.charges[turn.binding];
                return self.end(plan, OnExceeded::Reject, Over::of(charge), true).await;
            }
            if turn.wait > SHORT_WAIT || look.closed_us.is_some() {
                return self.delay(plan, &look, turn, was_in_line).await;
            }
            tokio::time::sleep(turn.wait).await;
            may_charge = true;
        }
        let turn = Turn { wait: SHORT_WAIT, sleep: SHORT_WAIT, binding: 0, own: Vec::new() };
        self.delay(plan, &look, turn, false).await
    }

    /// A number that is another one when policies have changed. To be read before them.
    #[cfg(feature = "apalis")]
    pub(crate) fn version(&self) -> u64 {
        self.inner.version.load(Ordering::SeqCst)
    }

    /// The limits behind it.
    pub fn tollgate(&self) -> &Tollgate {
        &self.inner.tollgate
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn line(&self) -> &Line {
        &self.inner.line
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn wakes(&self) -> &Wakes {
        &self.inner.wakes
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn read_ahead(&self) -> &crate::read_ahead::ReadAhead {
        &self.inner.ahead
    }

    /// The same gate, without keeping it.
    pub(crate) fn downgrade(&self) -> WeakGate {
        WeakGate(Arc::downgrade(&self.inner))
    }

    fn wake(&self) -> Option<Arc<dyn Wake>> {
        self.inner.wake.read().clone()
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn set_wake(&self, wake: Arc<dyn Wake>) {
        *self.inner.wake.write() = Some(wake);
    }
}

/// A gate that may be gone.
pub(crate) struct WeakGate(Weak<Inner>);

impl WeakGate {
    pub(crate) fn upgrade(&self) -> Option<JobGate> {
        self.0.upgrade().map(|inner| JobGate { inner })
    }
}

impl std::fmt::Debug for JobGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobGate").field("jobs", &self.inner.jobs.read()).finish_non_exhaustive()
    }
}

/// The keys of all policies.
fn labels(jobs: &JobsConfig) -> BTreeSet<String> {
    jobs.scopes().filter_map(|(scope, _)| Some(scope.key().ok()?.into_canonical())).collect()
}

/// The limits that policies name must be there.
fn check_names(jobs: &JobsConfig, policy: &Policy) -> Result<(), Error> {
    for (scope, limits) in jobs.scopes() {
        for name in &limits.limits {
            policy.find(name).map_err(|error| Error::new(format!("{scope}: {error}")))?;
        }
    }
    Ok(())
}
