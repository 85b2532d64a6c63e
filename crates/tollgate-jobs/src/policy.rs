//! Policies in code: what a type of job, a queue or all jobs may do.
//!
//! A [`JobPolicy`] is written fluently and becomes the same data that `[jobs]` of a configuration file is read into; only the cost of
//! a job, a function of it, exists in code alone. Numbers that cannot be are reported when the policies are put together, with
//! the name of the type or queue.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tollgate::{Fallback, Limit, Rule};

use crate::error::Error;
use crate::job::Job;
use crate::limits::{DEFAULT_LEASE, JobLimits, JobScope, JobsConfig, MissingField, OnExceeded};

/// What a run of a job costs.
pub(crate) type CostFn = Arc<dyn Fn(&Job<'_>) -> u64 + Send + Sync>;

/// What a type of job, a queue or all jobs may do.
///
/// ```
/// use std::time::Duration;
/// use tollgate_jobs::{JobPolicy, OnExceeded};
///
/// let hour = Duration::from_secs(3_600);
/// let policy = JobPolicy::new()
///     .with_rate_limit(100, hour)
///     .on_exceeded(OnExceeded::Delay)
///     .max_delay(Duration::from_secs(1_800))
///     .cost(|job| job.arguments()["recipients"].as_u64().unwrap_or(1));
/// # let _ = policy;
/// ```
#[derive(Clone, Default)]
#[must_use]
pub struct JobPolicy {
    limits: JobLimits,
    cost: Option<CostFn>,
    /// How many run at once, and the lease of each.
    concurrency: Option<u64>,
    lease: Option<Duration>,
    /// The first number that cannot be.
    fault: Option<String>,
}

impl JobPolicy {
    /// A policy that limits nothing yet.
    pub fn new() -> JobPolicy {
        JobPolicy::default()
    }

    /// At most so many starts in any window, exactly.
    pub fn with_rate_limit(self, limit: u64, window: Duration) -> JobPolicy {
        self.first(Limit::sliding_window(limit, window))
    }

    /// A limit of another strategy on starts, such as a token bucket.
    pub fn with_limit(mut self, limit: Limit) -> JobPolicy {
        self.limits.limit = Some(limit);
        self
    }

    /// A further window, charged together with the first limit.
    pub fn also(mut self, limit: u64, window: Duration) -> JobPolicy {
        match Limit::sliding_window(limit, window) {
            Ok(limit) => self.limits.also.push(limit),
            Err(error) => self = self.faulty(error),
        }
        self
    }

    /// At most so many running at once.
    pub fn concurrency(mut self, limit: u64) -> JobPolicy {
        self.concurrency = Some(limit);
        self
    }

    /// How long the place of a dead worker is kept; 30 s by default.
    pub fn lease(mut self, lease: Duration) -> JobPolicy {
        self.lease = Some(lease);
        self
    }

    /// What becomes of a job that is over a limit; it is delayed by default.
    pub fn on_exceeded(mut self, on_exceeded: OnExceeded) -> JobPolicy {
        self.limits.on_exceeded = on_exceeded;
        self
    }

    /// The longest sleep of a delayed job before it is looked at again; 5 minutes by default. It keeps its place in line. Of several that are
    /// set for its type, its queue and all jobs, the shortest counts.
    pub fn max_delay(mut self, max_delay: Duration) -> JobPolicy {
        self.limits.max_delay = Some(max_delay);
        self
    }

    /// After how long in delays a job is rejected; never by default.
    pub fn give_up_after(mut self, give_up_after: Duration) -> JobPolicy {
        self.limits.give_up_after = Some(give_up_after);
        self
    }

    /// Splits the limits by a field of the arguments or metadata, such as `tenant`.
    pub fn key(mut self, field: impl Into<String>) -> JobPolicy {
        self.limits.key = Some(field.into());
        self
    }

    /// What becomes of jobs without that field, or without one that `limit_key` names; they share one counter by default.
    pub fn if_missing(mut self, if_missing: MissingField) -> JobPolicy {
        self.limits.if_missing = if_missing;
        self
    }

    /// A limit of the gate that a run charges too, such as one that HTTP requests are charged to.
    pub fn charges(mut self, limit: impl Into<String>) -> JobPolicy {
        self.limits.limits.push(limit.into());
        self
    }

    /// The key of those limits; `{name}` stands for a field of the arguments or metadata. By default `global`.
    pub fn limit_key(mut self, key: impl Into<String>) -> JobPolicy {
        self.limits.limit_key = Some(key.into());
        self
    }

    /// What a run costs; one unit by default, and never less.
    pub fn cost(mut self, cost: impl Fn(&Job<'_>) -> u64 + Send + Sync + 'static) -> JobPolicy {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Decides and counts, and holds up nobody.
    pub fn shadow(mut self) -> JobPolicy {
        self.limits.shadow = true;
        self
    }

    /// What happens when the store cannot answer.
    pub fn fallback(mut self, fallback: Fallback) -> JobPolicy {
        self.limits.fallback = Some(fallback);
        self
    }

    fn first(mut self, limit: Result<Limit, impl fmt::Display>) -> JobPolicy {
        match limit {
            Ok(limit) => self.limits.limit = Some(limit),
            Err(error) => self = self.faulty(error),
        }
        self
    }

    fn faulty(mut self, error: impl fmt::Display) -> JobPolicy {
        self.fault.get_or_insert(error.to_string());
        self
    }

    /// The limits, or what is wrong with the numbers.
    fn finish(mut self) -> Result<(JobLimits, Option<CostFn>), String> {
        match self.concurrency.map(|limit| Limit::concurrency(limit, self.lease.unwrap_or(DEFAULT_LEASE))) {
            Some(Ok(limit)) => self.limits.concurrency = Some(limit),
            Some(Err(error)) => self = self.faulty(error),
            None => {}
        }
        match self.fault {
            Some(fault) => Err(fault),
            None => Ok((self.limits, self.cost)),
        }
    }
}

impl fmt::Debug for JobPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobPolicy").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// All policies of a program: by job type, by queue, and for all jobs.
///
/// ```
/// use std::time::Duration;
/// use tollgate_jobs::{JobPolicy, Jobs};
///
/// let minute = Duration::from_secs(60);
/// let jobs = Jobs::new()
///     .job("send_email", JobPolicy::new().with_rate_limit(100, 60 * minute))
///     .job("call_api", JobPolicy::new().with_rate_limit(60, minute).max_delay(10 * minute))
///     .queue("external-api", JobPolicy::new().with_rate_limit(30, minute))
///     .global(JobPolicy::new().with_rate_limit(1_000, minute));
/// assert_eq!(jobs.rules()?.len(), 4);
/// # Ok::<(), tollgate_jobs::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Jobs {
    config: JobsConfig,
    costs: Costs,
    faults: Vec<String>,
}

/// The costs of jobs by the name of the type, where a policy has a function for it.
#[derive(Clone, Default)]
struct Costs(BTreeMap<String, CostFn>);

impl fmt::Debug for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Jobs {
    /// No policies: every job runs, without a call to the store.
    pub fn new() -> Jobs {
        Jobs::default()
    }

    /// What `[jobs]` of a configuration says.
    pub fn from_config(config: &JobsConfig) -> Jobs {
        Jobs { config: config.clone(), ..Jobs::default() }
    }

    /// What the jobs of a type may do.
    pub fn job(mut self, job_type: impl Into<String>, policy: JobPolicy) -> Jobs {
        let job_type = job_type.into();
        if let Some((limits, cost)) = self.finished(JobScope::Type(&job_type), policy) {
            if let Some(cost) = cost {
                self.costs.0.insert(job_type.clone(), cost);
            }
            self.config.types.push((job_type, limits));
        }
        self
    }

    /// What the jobs of a queue may do.
    pub fn queue(mut self, queue: impl Into<String>, policy: JobPolicy) -> Jobs {
        let queue = queue.into();
        if let Some((limits, _)) = self.finished(JobScope::Queue(&queue), policy) {
            self.config.queues.push((queue, limits));
        }
        self
    }

    /// What all jobs together may do.
    pub fn global(mut self, policy: JobPolicy) -> Jobs {
        if self.config.global.is_some() {
            self.faults.push("there are two policies for all jobs; keep one of them".to_owned());
        }
        if let Some((limits, _)) = self.finished(JobScope::Global, policy) {
            self.config.global = Some(limits);
        }
        self
    }

    fn finished(&mut self, scope: JobScope<'_>, policy: JobPolicy) -> Option<(JobLimits, Option<CostFn>)> {
        match policy.finish() {
            Ok((_, Some(_))) if !matches!(scope, JobScope::Type(_)) => {
                self.faults.push(format!("{scope}: a cost is a job type's; move it there"));
                None
            }
            Ok(finished) => Some(finished),
            Err(fault) => {
                self.faults.push(format!("{scope}: {fault}"));
                None
            }
        }
    }

    /// The limits that these policies are, or what is wrong with them.
    pub fn rules(&self) -> Result<Vec<Rule>, Error> {
        if !self.faults.is_empty() {
            return Err(Error::new(self.faults.join("\n")));
        }
        self.config.rules().map_err(|error| Error::new(error.to_string()))
    }

    /// The same with what another configuration says; costs, which exist in code alone, stay.
    pub(crate) fn with_config(&self, config: &JobsConfig) -> Jobs {
        Jobs { config: config.clone(), costs: self.costs.clone(), faults: Vec::new() }
    }

    pub(crate) fn config(&self) -> &JobsConfig {
        &self.config
    }

    pub(crate) fn cost_of(&self, job: &Job<'_>) -> u64 {
        self.costs.0.get(job.job_type).map_or(1, |cost| cost(job)).max(1)
    }

    /// The limits of the scopes that a job is in: of its type, its queue, and of all.
    pub(crate) fn scopes_of<'a>(
        &'a self,
        job: &Job<'a>,
    ) -> impl Iterator<Item = (JobScope<'a>, &'a JobLimits)> {
        let find = |list: &'a [(String, JobLimits)], name: &str| {
            list.iter().find(|(other, _)| other == name).map(|(_, limits)| limits)
        };
        let of_type =
            find(&self.config.types, job.job_type).map(|limits| (JobScope::Type(job.job_type), limits));
        let of_queue =
            find(&self.config.queues, job.queue).map(|limits| (JobScope::Queue(job.queue), limits));
        let of_all = self.config.global.as_ref().map(|limits| (JobScope::Global, limits));
        [of_type, of_queue, of_all].into_iter().flatten()
    }
}
