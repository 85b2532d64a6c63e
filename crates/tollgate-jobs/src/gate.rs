//! The gate between claiming a job and running it, for any framework.
//!
//! A job's [`Plan`] is charged as one charge: all limits, or none. A job that is denied takes a place in the lines of the limits that
//! denied it and gets a time of its own, by the kernel's `turn`; newcomers who find a line go to its end. A slot is an expectation:
//! when it comes, the job is charged like any other, and what does not fit then keeps its place and gets another time. Short
//! waits are waited for here, with the job claimed, because a reschedule costs more.
//!
//! Nothing here fails because of one job: what cannot be decided is a delay. No arithmetic of limits is done here.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::RwLock;
use sqlx::postgres::PgPool;
use tollgate::telemetry::Source;
use tollgate::{Allowance, Charge, ChargeId, Decision, Key, Limit, Permit, Policy, Reason, Tollgate};
use tollgate_kernel::{Cost, Micros};
use uuid::Uuid;

use crate::decision::{Delay, Held, JobDecision, RunPermit};
use crate::error::Error;
use crate::job::Job;
use crate::limits::{JobScope, JobsConfig, OnExceeded};
use crate::line::{ClosedKey, Line, Look, Taken};
use crate::metrics;
use crate::plan::{Plan, closable};
use crate::policy::Jobs;
use crate::wake::{Wake, Wakes};

/// Waits up to this are waited for with the job claimed.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// How often a job is charged before it is put back: misses are by less than a short wait, and each is followed by its own.
const TRIES: usize = 4;

/// How long a job waits that could not be decided.
const OUTAGE_WAIT: Duration = Duration::from_secs(1);

/// A run that waits for another to end is called when one does; should the call be lost, it looks again after this, and later
/// the more are ahead of it.
const LEASE_WAIT: Duration = Duration::from_secs(1);
const LEASE_WAIT_EACH: Duration = Duration::from_millis(100);

/// How often a charge whose answer was lost is sent again, under the same id.
const SENT: usize = 3;

/// Called jobs come in batches: how long after one the next is called.
const CALLED_EVERY: Duration = Duration::from_millis(200);

/// How long a place is kept whose time has passed.
const KEPT: Duration = Duration::from_secs(86_400);

/// How often gauges are set, and after how many times of that the line is cleaned up.
const GAUGES_EVERY: Duration = Duration::from_secs(15);
const CLEANUP_EVERY: u32 = 40;

/// Builds a [`JobGate`].
#[must_use]
pub struct JobGateBuilder {
    tollgate: Tollgate,
    pool: PgPool,
    jobs: Jobs,
    prefix: String,
}

impl JobGateBuilder {
    /// The policies. Without any, every job runs.
    pub fn jobs(mut self, jobs: Jobs) -> JobGateBuilder {
        self.jobs = jobs;
        self
    }

    /// What the names of the tables begin with; `tollgate_` by default.
    pub fn prefix(mut self, prefix: impl Into<String>) -> JobGateBuilder {
        self.prefix = prefix.into();
        self
    }

    /// Puts the limits into the gate, makes the tables, and answers what is wrong where something is.
    pub async fn connect(self) -> Result<JobGate, Error> {
        let gate = self.attach()?;
        gate.inner.line.migrate().await?;
        tokio::spawn(keep_house(Arc::downgrade(&gate.inner)));
        Ok(gate)
    }

    /// The same for programs that look at jobs and run none: makes no tables, and starts no task.
    pub fn attach(self) -> Result<JobGate, Error> {
        let sound = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if self.prefix.len() > 32
            || !self.prefix.bytes().all(sound)
            || self.prefix.starts_with(|first: char| first.is_ascii_digit())
        {
            return Err(Error::new(format!(
                "prefix {:?}: has at most 32 characters a-z, 0-9 and `_`, and begins with no digit",
                self.prefix
            )));
        }
        let inner = Inner {
            tollgate: self.tollgate,
            line: Line { pool: self.pool, prefix: self.prefix },
            jobs: RwLock::default(),
            wake: RwLock::default(),
            wakes: Wakes::default(),
        };
        let gate = JobGate { inner: Arc::new(inner) };
        gate.apply(self.jobs)?;
        Ok(gate)
    }
}

/// The gate between claiming a job and running it. Cheap to clone.
#[derive(Clone)]
pub struct JobGate {
    inner: Arc<Inner>,
}

struct Inner {
    tollgate: Tollgate,
    line: Line,
    jobs: RwLock<Arc<Jobs>>,
    /// Calls waiting jobs in the framework, if it can.
    wake: RwLock<Option<Arc<dyn Wake>>>,
    wakes: Wakes,
}

/// What a charge came to.
enum Charged {
    Admitted(RunPermit),
    Denied(Decision),
    /// The store could not be asked.
    Unknown,
}

/// What a denial means.
enum Denial {
    /// Only an outage made it.
    Outage(Duration),
    Ends(OnExceeded, usize),
    /// It waits for the limits that are marked; the one with the longest wait is the second.
    Waits(Vec<bool>, usize),
}

/// How long a job has to wait for its turn.
struct Turn {
    /// As the limits reckon it, and as long as it sleeps at most.
    wait: Duration,
    sleep: Duration,
    /// Which charge makes it so long.
    binding: usize,
}

/// What is known of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobStatus {
    /// `job:<type>`, `queue:<name>` or `global`.
    pub key: String,
    /// The limit that is counted.
    pub limit_name: String,
    /// How many count now, of how many, and how many are left.
    pub count: u64,
    /// See `count`.
    pub limit: u64,
    /// See `count`.
    pub remaining: u64,
    /// The time until nothing counts any more.
    pub resets_after: Duration,
    /// How many jobs stand in its line.
    pub waiting: u64,
    /// When the first of them expects its turn.
    pub next_slot: Option<Duration>,
    /// When the last of them does: the end of the backlog.
    pub backlog_ends: Option<Duration>,
}

impl JobGate {
    /// A gate over `tollgate`, whose line is in the database of the jobs.
    pub fn builder(tollgate: Tollgate, pool: PgPool) -> JobGateBuilder {
        JobGateBuilder { tollgate, pool, jobs: Jobs::new(), prefix: "tollgate_".to_owned() }
    }

    /// Puts other policies in place; their limits keep what they have counted. Waiting jobs are called, so that they run sooner where
    /// more is allowed now; where less is, they find out when their time comes. If anything is refused, the old ones stay.
    pub async fn reload(&self, jobs: Jobs) -> Result<(), Error> {
        self.apply(jobs)?;
        self.call_sleepers().await
    }

    /// The same with what a configuration says now, `[limits]` included. Costs, which exist in code alone, stay.
    pub async fn reload_config(
        &self,
        config: &tollgate::config::Config,
        jobs: &JobsConfig,
    ) -> Result<(), Error> {
        let jobs = self.inner.jobs.read().with_config(jobs);
        self.put_in_place(config.policy.clone(), jobs)?;
        self.call_sleepers().await
    }

    fn apply(&self, jobs: Jobs) -> Result<(), Error> {
        let rules = jobs.rules()?;
        let current = self.inner.tollgate.policy();
        check_names(jobs.config(), &current)?;
        let others = current.rules().iter().filter(|rule| !rule.name().starts_with("jobs.")).cloned();
        let policy = Policy::new(others.chain(rules)).map_err(tollgate::Error::from)?;
        self.put_in_place(policy, jobs)
    }

    fn put_in_place(&self, policy: Policy, jobs: Jobs) -> Result<(), Error> {
        self.inner.tollgate.reload(policy)?;
        *self.inner.jobs.write() = Arc::new(jobs);
        Ok(())
    }

    /// Calls all jobs that sleep, first those whose turn comes first, some at a time.
    async fn call_sleepers(&self) -> Result<(), Error> {
        let Some(wake) = self.wake() else { return Ok(()) };
        let mut behind = (i64::MIN, String::new());
        loop {
            let sleepers = self.inner.line.sleepers(behind).await;
            let sleepers = sleepers.map_err(|error| Error::database("calling waiting jobs", error))?;
            let Some((job, slot_us)) = sleepers.last() else { return Ok(()) };
            behind = (*slot_us, job.clone());
            let jobs: Vec<String> = sleepers.into_iter().map(|(job, _)| job).collect();
            wake.wake(&jobs).await;
            self.inner.wakes.push(Duration::ZERO);
            tokio::time::sleep(CALLED_EVERY).await;
        }
    }

    /// Forgets places in line whose time passed a day ago and that nobody came for, and keys that are open again. Answers how many
    /// rows. A task of the gate does so every ten minutes; what was charged is the store's and swept by it.
    pub async fn cleanup(&self) -> Result<u64, Error> {
        let rows = self.inner.line.cleanup(KEPT).await;
        let rows = rows.map_err(|error| Error::database("cleaning up the line", error))?;
        metrics::cleaned(rows);
        if rows > 0 {
            tracing::info!(rows, "old rows of the line removed");
        }
        Ok(rows)
    }

    /// What a job is to be charged; `None` if it meets no policy and may run as it is.
    pub fn plan(&self, job: &Job<'_>) -> Option<Plan> {
        let jobs = self.inner.jobs.read().clone();
        let is_concurrency = |name: &str| {
            let limit = self.inner.tollgate.limit(name);
            limit.is_ok_and(|limit| matches!(limit.allowance(), Allowance::Limited(Limit::Concurrency(_))))
        };
        Plan::of(&jobs, job, is_concurrency)
    }

    /// Asks for leave to run. Never an error: what cannot be decided is a delay.
    pub async fn enter(&self, plan: &Plan) -> JobDecision {
        if let Some(behaviour) = plan.missing_field {
            tracing::warn!(job_type = plan.job_type, "a job lacks the field that its limit is split by");
            let label = plan.charges.first().map_or(plan.job_type.as_str(), |charge| &charge.label);
            // Waiting would not bring the field.
            return self.end(plan, behaviour.max(OnExceeded::Skip), label, true).await;
        }
        let mut look = match self.inner.line.look(plan).await {
            Ok(look) => look,
            Err(error) => {
                tracing::warn!(%error, "the line of waiting jobs cannot be read; jobs go by their limits alone");
                return self.enter_without_line(plan).await;
            }
        };
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
            if may_charge {
                if look.is_waiting() {
                    // Without its place while it is charged: nobody else counts it twice, in line and in the limit.
                    had = self.take(plan).await;
                }
                match self.charge(plan).await {
                    Charged::Admitted(permit) => return JobDecision::Run(permit),
                    Charged::Unknown => return self.put_off_in_line(plan, had, OUTAGE_WAIT).await,
                    Charged::Denied(decision) => match judge(plan, &decision) {
                        Denial::Outage(wait) => return self.put_off_in_line(plan, had, wait).await,
                        Denial::Ends(behaviour, index) => {
                            let label = plan.charges[index].label.clone();
                            return self.end(plan, behaviour, &label, false).await;
                        }
                        Denial::Waits(denying, _) => waits_for = denying,
                    },
                }
            }
            look = match self.inner.line.stand(plan, &waits_for, had).await {
                Ok(look) => look,
                Err(error) => {
                    tracing::warn!(%error, "a place in line cannot be taken");
                    return self.put_off(plan, OUTAGE_WAIT, 0);
                }
            };
            if self.is_given_up(plan, &look) {
                return self.end(plan, OnExceeded::Reject, &plan.charges[0].label.clone(), true).await;
            }
            let Some(turn) = self.turn(plan, &look).await else {
                // No wait helps: it costs more than a limit ever holds.
                return self.end(plan, OnExceeded::Reject, &plan.charges[0].label.clone(), true).await;
            };
            if turn.wait > SHORT_WAIT || look.closed_us.is_some() {
                return self.delay(plan, &look, turn).await;
            }
            tokio::time::sleep(turn.wait).await;
            may_charge = true;
        }
        let turn = Turn { wait: SHORT_WAIT, sleep: SHORT_WAIT, binding: 0 };
        self.delay(plan, &look, turn).await
    }

    /// Closes a key for some time, for all workers: no job that is charged to it starts. A key that is closed already stays
    /// closed for the longer of both. `key` is `job:<type>`, `queue:<name>`, `global`, one value of what splits them
    /// (`job:<type>:<tenant>`), or the key of a limit that jobs share.
    pub async fn close(&self, key: &str, wait: Duration) -> Result<(), Error> {
        let (name, label) = closing(key)?;
        let closed = self.inner.line.close(name, &label, wait, "closed by hand").await;
        closed.map_err(|error| Error::database("closing a key", error))
    }

    /// Opens a key that was closed; false if it was not.
    pub async fn open(&self, key: &str) -> Result<bool, Error> {
        let (name, _) = closing(key)?;
        self.inner.line.open(name).await.map_err(|error| Error::database("opening a key", error))
    }

    /// What is known of a key: `job:<type>`, `queue:<name>` or `global`. Where a field splits its limits, what is counted is that of
    /// jobs without it, and who waits is all of them.
    pub async fn status(&self, key: &str) -> Result<JobStatus, Error> {
        let jobs = self.inner.jobs.read().clone();
        let is_key = |scope: &JobScope<'_>| scope.key().is_ok_and(|own| own.canonical() == key);
        let mut known = Vec::new();
        for (scope, limits) in jobs.config().scopes() {
            known.extend(scope.key().map(Key::into_canonical));
            if !is_key(&scope) {
                continue;
            }
            let Some((limit_name, _)) = limits.named(scope).into_iter().next() else { continue };
            let outcome = self.inner.tollgate.status(&limit_name, key).await?;
            let waiting = self.inner.line.waiting(key).await;
            let waiting = waiting.map_err(|error| Error::database("reading the line", error))?;
            metrics::status(key, outcome.used(), outcome.capacity(), waiting.jobs);
            return Ok(JobStatus {
                key: key.to_owned(),
                limit_name,
                count: outcome.used(),
                limit: outcome.capacity(),
                remaining: outcome.remaining(),
                resets_after: outcome.reset_after(),
                waiting: waiting.jobs,
                next_slot: waiting.next,
                backlog_ends: waiting.last,
            });
        }
        Err(Error::new(format!("no policy counts under {key:?}; known: {}", known.join(", "))))
    }

    /// The status of every key.
    pub async fn statuses(&self) -> Result<Vec<JobStatus>, Error> {
        let jobs = self.inner.jobs.read().clone();
        let mut statuses = Vec::new();
        for (scope, limits) in jobs.config().scopes() {
            if let (Ok(key), false) = (scope.key(), limits.named(scope).is_empty()) {
                statuses.push(self.status(key.canonical()).await?);
            }
        }
        Ok(statuses)
    }

    /// The keys that are closed now.
    pub async fn closed(&self) -> Result<Vec<ClosedKey>, Error> {
        self.inner
            .line
            .closed()
            .await
            .map_err(|error| Error::database("reading which keys are closed", error))
    }

    /// The limits behind it.
    pub fn tollgate(&self) -> &Tollgate {
        &self.inner.tollgate
    }

    pub(crate) fn line(&self) -> &Line {
        &self.inner.line
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn wakes(&self) -> &Wakes {
        &self.inner.wakes
    }

    fn wake(&self) -> Option<Arc<dyn Wake>> {
        self.inner.wake.read().clone()
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn set_wake(&self, wake: Arc<dyn Wake>) {
        *self.inner.wake.write() = Some(wake);
    }

    /// Closes the keys of a job whose remote side asked for that, and puts the job off.
    #[cfg(feature = "apalis")]
    pub(crate) async fn close_for(&self, plan: Option<&Plan>, retry_after: Duration) -> Delay {
        let charge = plan.and_then(|plan| plan.charges.first());
        if let Some(charge) = charge {
            let key = charge.key();
            let closed = self.inner.line.close(
                closable(key),
                &charge.label,
                retry_after,
                "the remote side asked for it",
            );
            if let Err(error) = closed.await {
                tracing::warn!(%error, key = charge.label, "a key cannot be closed");
            }
        }
        let limit = charge.map_or_else(String::new, |charge| charge.limit.clone());
        self.inner.wakes.push(retry_after);
        Delay { wait: retry_after, until_us: None, limit }
    }

    /// Calls the first jobs of these lines: something was released.
    pub(crate) async fn call_next(&self, lines: &[Uuid]) {
        let Some(wake) = self.wake() else { return };
        match self.inner.line.next(lines).await {
            Ok(jobs) if jobs.is_empty() => {}
            Ok(jobs) => {
                wake.wake(&jobs).await;
                self.inner.wakes.push(Duration::ZERO);
            }
            Err(error) => {
                tracing::debug!(%error, "waiting jobs cannot be called; they look again by themselves")
            }
        }
    }

    /// One charge over all limits. Sent again under the same id if its answer is lost.
    async fn charge(&self, plan: &Plan) -> Charged {
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

    /// When it is the turn of a job, from one peek at all its limits; `None` if it never can be.
    async fn turn(&self, plan: &Plan, look: &Look) -> Option<Turn> {
        let start_us = look.closed_us.map_or(0, |until_us| until_us.saturating_sub(look.now_us()));
        let mut turn = Turn {
            wait: Duration::from_micros(start_us),
            sleep: Duration::from_micros(start_us),
            binding: plan.charges.iter().position(|charge| charge.is_closed(&look.closed)).unwrap_or(0),
        };
        let limits: Vec<(usize, Limit)> =
            (0..).zip(&plan.charges).filter_map(|(i, c)| Some((i, self.numbers(c)?))).collect();
        let cost = |index: usize| Cost::new(plan.charges[index].cost).unwrap_or(Cost::ONE);
        let probe = |(index, limit): &(usize, Limit)| {
            let charge = &plan.charges[*index];
            let probe = limit.turn_probe(cost(*index), look.ahead[*index]);
            Charge::new(&charge.limit, charge.key()).cost(probe.get())
        };
        let probes: Vec<Charge<'_>> = limits.iter().map(probe).collect();
        if probes.is_empty() {
            return Some(turn);
        }
        let Ok(decision) = self.inner.tollgate.peek(&probes).await else {
            turn.wait = turn.wait.max(OUTAGE_WAIT);
            turn.sleep = turn.wait;
            return Some(turn);
        };
        for ((index, limit), outcome) in limits.iter().zip(decision.outcomes()) {
            let ahead = look.ahead[*index];
            let wait = limit.turn(outcome.numbers(), cost(*index), ahead, Micros::new(start_us))?;
            let wait = Duration::from(wait);
            // A lease ends when its run does, which nobody knows.
            let sleep = match plan.charges[*index].is_concurrency {
                true => wait.min(LEASE_WAIT.saturating_add(
                    LEASE_WAIT_EACH.saturating_mul(u32::try_from(ahead).unwrap_or(u32::MAX)),
                )),
                false => wait,
            };
            if wait > turn.wait {
                (turn.wait, turn.binding) = (wait, *index);
            }
            turn.sleep = turn.sleep.max(sleep);
        }
        Some(turn)
    }

    /// The numbers that a charge goes by; `None` where nothing is counted, or nobody held up.
    fn numbers(&self, charge: &crate::plan::PlannedCharge) -> Option<Limit> {
        let rule = self.inner.tollgate.find(&charge.limit).ok()?;
        if rule.is_shadow() {
            return None;
        }
        let key = Key::parse(charge.key()).ok()?;
        match rule.allowance_for(&key) {
            Allowance::Limited(limit) => Some(*limit),
            Allowance::Unlimited | Allowance::Blocked => None,
        }
    }

    fn is_given_up(&self, plan: &Plan, look: &Look) -> bool {
        match (plan.give_up_after, look.since_us) {
            (Some(give_up_after), Some(since_us)) => {
                look.now_us() >= since_us.saturating_add(micros(give_up_after))
            }
            _ => false,
        }
    }

    /// Writes when a job expects its turn, and puts it off until then, or as long as it may sleep.
    async fn delay(&self, plan: &Plan, look: &Look, turn: Turn) -> JobDecision {
        let now_us = look.now_us();
        let slot_us = now_us.saturating_add(micros(turn.wait));
        let mut sleep = turn.sleep;
        if sleep > plan.max_delay {
            // Those who sleep as long as they may would all wake at once.
            sleep = plan.max_delay.saturating_add(jitter(&plan.job, plan.max_delay / 10));
        }
        if let (Some(give_up_after), Some(since_us)) = (plan.give_up_after, look.since_us) {
            let ends_us = since_us.saturating_add(micros(give_up_after));
            sleep = sleep.min(Duration::from_micros(ends_us.saturating_sub(now_us)));
        }
        let until_us = now_us.saturating_add(micros(sleep));
        let charge = &plan.charges[turn.binding];
        if let Err(error) = self.inner.line.set_slot(&plan.job, slot_us, until_us, &charge.limit).await {
            tracing::warn!(%error, "a slot cannot be written; the job keeps its place as long as that lasts");
        }
        self.delayed(plan, sleep, Some(until_us), turn.binding)
    }

    /// Takes a job out of its lines while it is charged.
    async fn take(&self, plan: &Plan) -> Taken {
        self.inner.line.take(plan).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "a job cannot be taken out of the line; its place runs out by itself");
            Taken::default()
        })
    }

    /// Puts a job off that could not be decided, and gives it back the place that it had.
    async fn put_off_in_line(&self, plan: &Plan, had: Taken, wait: Duration) -> JobDecision {
        if had.is_some() {
            let nowhere = vec![false; plan.charges.len()];
            if let Err(error) = self.inner.line.stand(plan, &nowhere, had).await {
                tracing::warn!(%error, "a place in line cannot be taken");
            }
        }
        self.put_off(plan, wait, 0)
    }

    /// Puts a job off that has no place in line.
    fn put_off(&self, plan: &Plan, wait: Duration, binding: usize) -> JobDecision {
        let wait = wait.max(SHORT_WAIT).min(plan.max_delay);
        self.delayed(plan, wait.saturating_add(jitter(&plan.job, wait / 4)), None, binding)
    }

    fn delayed(&self, plan: &Plan, wait: Duration, until_us: Option<u64>, binding: usize) -> JobDecision {
        let (limit, label) = match plan.charges.get(binding) {
            Some(charge) => (charge.limit.clone(), charge.label.as_str()),
            None => (String::new(), ""),
        };
        tracing::debug!(job_type = plan.job_type, delay_ms = wait.as_millis(), limit, "job delayed");
        metrics::hit(label, OnExceeded::Delay);
        metrics::delayed(wait);
        self.inner.wakes.push(wait);
        JobDecision::Delay(Delay { wait, until_us, limit })
    }

    /// Ends a job that may not run, and takes it out of its lines.
    async fn end(&self, plan: &Plan, behaviour: OnExceeded, label: &str, is_waiting: bool) -> JobDecision {
        if is_waiting {
            self.leave(plan).await;
        }
        metrics::hit(label, behaviour);
        tracing::debug!(
            job_type = plan.job_type,
            key = label,
            behaviour = behaviour.name(),
            "job over its limit"
        );
        match behaviour {
            OnExceeded::Skip => JobDecision::Skip,
            OnExceeded::Reject | OnExceeded::Delay => JobDecision::Reject,
        }
    }

    async fn leave(&self, plan: &Plan) {
        if let Err(error) = self.inner.line.leave(&plan.job).await {
            tracing::warn!(%error, "a job cannot be taken out of the line; its place runs out by itself");
        }
    }

    /// While the line cannot be read, the limits hold all the same.
    async fn enter_without_line(&self, plan: &Plan) -> JobDecision {
        match self.charge(plan).await {
            Charged::Admitted(permit) => JobDecision::Run(permit),
            Charged::Unknown => self.put_off(plan, OUTAGE_WAIT, 0),
            Charged::Denied(decision) => match judge(plan, &decision) {
                Denial::Outage(wait) => self.put_off(plan, wait, 0),
                Denial::Ends(behaviour, index) => {
                    let label = plan.charges[index].label.clone();
                    self.end(plan, behaviour, &label, false).await
                }
                Denial::Waits(_, binding) => {
                    self.put_off(plan, decision.retry_after().unwrap_or(OUTAGE_WAIT), binding)
                }
            },
        }
    }
}

impl std::fmt::Debug for JobGate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JobGate").field("jobs", &self.inner.jobs.read()).finish_non_exhaustive()
    }
}

/// Sets gauges and cleans up for as long as the gate is there.
async fn keep_house(gate: Weak<Inner>) {
    for round in 1_u32.. {
        tokio::time::sleep(GAUGES_EVERY).await;
        let Some(inner) = gate.upgrade() else { return };
        let gate = JobGate { inner };
        let gauges = gate.statuses().await.map(drop);
        let cleanup = if round % CLEANUP_EVERY == 0 { gate.cleanup().await.map(drop) } else { Ok(()) };
        if let Err(error) = gauges.and(cleanup) {
            tracing::warn!(%error, "the line of waiting jobs cannot be looked after");
        }
    }
}

/// What a denial means: of the limits that deny, the strictest behaviour decides. One that only an outage made is a delay.
fn judge(plan: &Plan, decision: &Decision) -> Denial {
    let outcomes = decision.outcomes().iter().zip(&plan.charges).enumerate();
    let denying: Vec<_> = outcomes.filter(|(_, (outcome, _))| !outcome.is_allowed()).collect();
    let is_outage = |source: Source| source.is_fallback();
    let real = || denying.iter().filter(|(_, (outcome, _))| !is_outage(outcome.source()));
    let Some((index, (_, charge))) = real().max_by_key(|(_, (_, charge))| charge.on_exceeded) else {
        return Denial::Outage(decision.retry_after().unwrap_or(OUTAGE_WAIT));
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

/// The limits that policies name must be there.
fn check_names(jobs: &JobsConfig, policy: &Policy) -> Result<(), Error> {
    for (scope, limits) in jobs.scopes() {
        for name in &limits.limits {
            policy.find(name).map_err(|error| Error::new(format!("{scope}: {error}")))?;
        }
    }
    Ok(())
}

/// The name under which a key is closed, and what is shown of it.
fn closing(key: &str) -> Result<(Uuid, String), Error> {
    let parsed = Key::parse(key).map_err(|error| Error::new(format!("a key to close: {error}")))?;
    let label = match Key::new(&parsed.namespace(), &parsed.key()) {
        Ok(label) if matches!(&*parsed.namespace(), "job" | "queue" | "default") => label.into_canonical(),
        _ => "shared".to_owned(),
    };
    Ok((closable(parsed.canonical()), label))
}

/// A part of `most` that is each job's own.
fn jitter(job: &str, most: Duration) -> Duration {
    let hash = closable(job).as_u128();
    let most = most.as_micros();
    Duration::from_micros(u64::try_from(hash % most.max(1)).unwrap_or(0))
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}
