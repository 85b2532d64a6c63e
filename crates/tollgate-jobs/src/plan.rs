//! What a job is to be charged: the limits of its type, its queue and all jobs, by which keys, and what happens if one denies.
//!
//! A plan is made before anything is asked of a store, and owns all that it needs. A job that meets no policy has none.

use std::time::Duration;

use sha2::{Digest, Sha256};
use tollgate::{Charge, Key};
use tollgate_kernel::Cost;
use uuid::Uuid;

use crate::job::{Job, filled};
use crate::limits::{
    DEFAULT_MAX_DELAY, JobLimits, JobScope, LONGEST_SLEEP, MissingField, OnExceeded, SHARED_KEY,
};
use crate::policy::Jobs;

/// All that one run of a job is charged.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) job: String,
    pub(crate) job_type: String,
    pub(crate) queue: String,
    pub(crate) charges: Vec<PlannedCharge>,
    /// What may be closed: the keys of all charges, and the labels of those that a field splits.
    pub(crate) closable: Vec<Uuid>,
    /// The shortest of the longest sleeps and of the times to give up that policies set.
    pub(crate) max_delay: Duration,
    pub(crate) give_up_after: Option<Duration>,
    /// The field that it lacks, if it ends because of that, whatever the limits say.
    pub(crate) lacks: Option<Lacks>,
    /// What is closed if the remote side asks to be left alone; nothing where its type has no policy.
    #[cfg_attr(not(feature = "apalis"), allow(dead_code, reason = "only the adapter reads it"))]
    pub(crate) closed_by_handler: Option<Closing>,
}

/// A key that a job may close for all of its type, and of nobody else.
#[derive(Clone, Debug)]
pub(crate) struct Closing {
    /// The limit that is charged to it.
    pub(crate) limit: String,
    pub(crate) name: Uuid,
    pub(crate) label: String,
}

impl Closing {
    fn of(limit: &str, key: &str, label: &str) -> Closing {
        Closing { limit: limit.to_owned(), name: closable(key), label: label.to_owned() }
    }
}

/// A field that a job lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lacks {
    /// What happens to a job over the limits that need it, the first of them, and their label.
    pub(crate) on_exceeded: OnExceeded,
    pub(crate) limit: String,
    pub(crate) label: String,
    /// As the policy writes it, and what to do about it.
    pub(crate) field: String,
    pub(crate) fix: &'static str,
}

/// One limit of a plan.
#[derive(Clone, Debug)]
pub(crate) struct PlannedCharge {
    pub(crate) limit: String,
    /// In its canonical form. Not to be shown: it may name a tenant.
    key: Hidden,
    pub(crate) cost: u64,
    /// `job:<type>`, `queue:<name>` or `global`: what metrics show of the key.
    pub(crate) label: String,
    pub(crate) on_exceeded: OnExceeded,
    pub(crate) is_concurrency: bool,
    /// By which its line is known.
    pub(crate) line: Uuid,
    /// What closes it: its key, and its label.
    closed_by: [Uuid; 2],
}

/// A text that `Debug` does not show.
#[derive(Clone)]
struct Hidden(String);

impl std::fmt::Debug for Hidden {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl PlannedCharge {
    pub(crate) fn key(&self) -> &str {
        &self.key.0
    }

    /// Whether one of these keys is what it is charged to.
    pub(crate) fn is_closed(&self, closed: &[Uuid]) -> bool {
        self.is_closed_by(|key| closed.contains(key))
    }

    /// The same, with a predicate.
    pub(crate) fn is_closed_by(&self, closed: impl Fn(&Uuid) -> bool) -> bool {
        self.closed_by.iter().any(closed)
    }

    /// Whether a job over this limit ends, rather than waits.
    pub(crate) fn ends(&self) -> bool {
        self.on_exceeded > OnExceeded::Delay
    }

    /// How a job ends that can never run because of this limit: one that was to wait does not end in silence.
    pub(crate) fn ends_as(&self) -> OnExceeded {
        if self.on_exceeded == OnExceeded::Skip { OnExceeded::Skip } else { OnExceeded::Reject }
    }

    pub(crate) fn charge(&self) -> Charge<'_> {
        Charge::new(&self.limit, self.key()).cost(self.cost)
    }

    pub(crate) fn cost(&self) -> Cost {
        Cost::new(self.cost).unwrap_or(Cost::ONE)
    }
}

impl Plan {
    /// What this job is to be charged; `None` if it meets no policy.
    pub(crate) fn of(jobs: &Jobs, job: &Job<'_>, is_concurrency: impl Fn(&str) -> bool) -> Option<Plan> {
        let mut plan: Option<Plan> = None;
        let (mut cost, mut max_delay) = (None, None);
        for (scope, limits) in jobs.scopes_of(job) {
            let plan = plan.get_or_insert_with(|| Plan::empty(job));
            let cost = *cost.get_or_insert_with(|| jobs.cost_of(job));
            plan.add(scope, limits, job, cost, &is_concurrency);
            max_delay = shortest(max_delay, limits.max_delay);
            plan.max_delay = max_delay.unwrap_or(DEFAULT_MAX_DELAY).min(LONGEST_SLEEP);
        }
        plan
    }

    fn empty(job: &Job<'_>) -> Plan {
        Plan {
            job: job.id.to_owned(),
            job_type: shown(job.job_type),
            queue: job.queue.to_owned(),
            charges: Vec::new(),
            closable: Vec::new(),
            max_delay: DEFAULT_MAX_DELAY,
            give_up_after: None,
            lacks: None,
            closed_by_handler: None,
        }
    }

    fn add(
        &mut self,
        scope: JobScope<'_>,
        limits: &JobLimits,
        job: &Job<'_>,
        cost: u64,
        is_concurrency: &impl Fn(&str) -> bool,
    ) {
        self.give_up_after = shortest(self.give_up_after, limits.give_up_after);
        // A name that is no key was refused when the policies were put together.
        let Ok(label) = scope.key().map(Key::into_canonical) else { return };
        // A value that no key can have (too long, or with control characters) is as good as none.
        let key = match &limits.key {
            None => Some(label.clone()),
            Some(field) => match job.field(field).and_then(|value| split(scope, &value)) {
                None if limits.if_missing == MissingField::Shared => Some(label.clone()),
                key => key,
            },
        };
        self.closable.push(closable(&label));
        let Some(key) = key else {
            self.lack(Lacks {
                on_exceeded: limits.on_exceeded,
                limit: limits.first_name(scope).unwrap_or_default(),
                label,
                field: limits.key.clone().unwrap_or_default(),
                fix: "push it with the field that `key` names, or write if_missing = \"shared\"",
            });
            return;
        };
        if key != label {
            self.closable.push(closable(&key));
        }
        let is_of_type = matches!(scope, JobScope::Type(_));
        for (name, limit) in limits.named(scope) {
            if is_of_type {
                self.closed_by_handler.get_or_insert_with(|| Closing::of(&name, &key, &label));
            }
            let is_concurrency = matches!(limit, tollgate::Limit::Concurrency(_));
            // However much a run costs, it runs once.
            let cost = if is_concurrency { 1 } else { cost };
            self.push(name, key.clone(), cost, &label, limits.on_exceeded, is_concurrency);
        }
        for name in &limits.limits {
            let template = limits.limit_key.as_deref().unwrap_or(SHARED_KEY);
            let shared = || (limits.if_missing == MissingField::Shared).then(|| label.clone());
            let Some(key) = filled(template, job).or_else(shared) else {
                self.lack(Lacks {
                    on_exceeded: limits.on_exceeded,
                    limit: name.clone(),
                    label,
                    field: template.to_owned(),
                    fix: "push it with the fields that `limit_key` names, or write if_missing = \"shared\"",
                });
                return;
            };
            self.closable.push(closable(&key));
            // The default key is that of all jobs.
            let is_of_jobs = key.starts_with("job:") || key.starts_with("queue:");
            if is_of_type && key != SHARED_KEY && !is_of_jobs {
                self.closed_by_handler.get_or_insert_with(|| Closing::of(name, &key, &label));
            }
            let is_concurrency = is_concurrency(name);
            let cost = if is_concurrency { 1 } else { cost };
            self.push(name.clone(), key, cost, &label, limits.on_exceeded, is_concurrency);
        }
        if let Some(first) = limits.limits.first().filter(|_| is_of_type) {
            self.closed_by_handler.get_or_insert_with(|| Closing::of(first, &label, &label));
        }
    }

    /// Of several fields that are missing, the strictest behaviour decides.
    fn lack(&mut self, lacks: Lacks) {
        if self.lacks.as_ref().is_none_or(|other| other.on_exceeded < lacks.on_exceeded) {
            self.lacks = Some(lacks);
        }
    }

    /// Adds a charge; a pair of limit and key that is there already is charged once.
    fn push(
        &mut self,
        limit: String,
        key: String,
        cost: u64,
        label: &str,
        on_exceeded: OnExceeded,
        is_concurrency: bool,
    ) {
        if let Some(same) =
            self.charges.iter_mut().find(|charge| charge.limit == limit && charge.key.0 == key)
        {
            same.on_exceeded = same.on_exceeded.max(on_exceeded);
            return;
        }
        let line = line_of(&limit, &key);
        let closed_by = [closable(&key), closable(label)];
        let (key, label) = (Hidden(key), label.to_owned());
        self.charges.push(PlannedCharge {
            limit,
            key,
            cost,
            label,
            on_exceeded,
            is_concurrency,
            line,
            closed_by,
        });
    }

    /// Whether one of its limits ends a job that is over it.
    pub(crate) fn may_end(&self) -> bool {
        self.charges.iter().any(PlannedCharge::ends)
    }

    /// The same plan for a job that waits, whatever its limits do with jobs that are over them.
    #[cfg(feature = "apalis")]
    pub(crate) fn that_waits(&self) -> Plan {
        let mut plan = self.clone();
        plan.charges.iter_mut().for_each(|charge| charge.on_exceeded = OnExceeded::Delay);
        plan
    }

    /// Whether a job that waits since then is to be given up.
    pub(crate) fn is_given_up(&self, now_us: u64, since_us: Option<u64>) -> bool {
        match (self.give_up_after, since_us) {
            (Some(give_up_after), Some(since_us)) => {
                let after_us = u64::try_from(give_up_after.as_micros()).unwrap_or(u64::MAX);
                now_us >= since_us.saturating_add(after_us)
            }
            _ => false,
        }
    }

    #[cfg(feature = "apalis")]
    pub(crate) fn queue(&self) -> &str {
        &self.queue
    }

    pub(crate) fn lines(&self) -> Vec<Uuid> {
        self.charges.iter().map(|charge| charge.line).collect()
    }
}

/// The shorter of two spans that policies may set.
fn shortest(one: Option<Duration>, other: Option<Duration>) -> Option<Duration> {
    one.into_iter().chain(other).min()
}

/// The key of one value of the field that splits a limit, if there can be one.
fn split(scope: JobScope<'_>, value: &str) -> Option<String> {
    let key = match scope {
        JobScope::Global => return None,
        JobScope::Queue(name) => Key::with_version("queue", name, value),
        JobScope::Type(name) => Key::with_version("job", name, value),
    };
    key.ok().map(Key::into_canonical)
}

/// A type as logs and the line have it. It comes from the arguments, which anybody may have written.
pub(crate) fn shown(job_type: &str) -> String {
    const LONGEST: usize = 100;
    job_type
        .chars()
        .take(LONGEST)
        .map(|letter| if letter.is_control() { '\u{fffd}' } else { letter })
        .collect()
}

/// The name under which a key is closed, whichever limits are charged to it.
pub(crate) fn closable(key: &str) -> Uuid {
    hash(&["closed", key])
}

/// The line of the jobs that wait for a limit under a key.
pub(crate) fn line_of(limit: &str, key: &str) -> Uuid {
    hash(&["line", limit, key])
}

/// No byte of a key reaches the database: names are hashes.
fn hash(parts: &[&str]) -> Uuid {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update(part.len().to_le_bytes());
        digest.update(part.as_bytes());
    }
    let digest = digest.finalize();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    Uuid::from_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::policy::JobPolicy;

    const MINUTE: Duration = Duration::from_secs(60);

    fn charges(jobs: &Jobs, job: &Job<'_>) -> Vec<(String, String, u64)> {
        let plan = Plan::of(jobs, job, |name| name == "slots").unwrap();
        plan.charges.iter().map(|one| (one.limit.clone(), one.key().to_owned(), one.cost)).collect()
    }

    #[test]
    fn a_job_is_charged_to_its_type_its_queue_and_all() {
        let policy = JobPolicy::new().with_rate_limit(10, MINUTE).concurrency(2).cost(|_| 3);
        let jobs = Jobs::new()
            .job(
                "send_email",
                policy.key("tenant").charges("stripe").charges("slots").limit_key("account:{tenant}"),
            )
            .queue(
                "mail",
                JobPolicy::new().with_rate_limit(5, MINUTE).charges("stripe").limit_key("account:{tenant}"),
            )
            .global(JobPolicy::new().with_rate_limit(100, MINUTE));
        let arguments = || json!({"tenant": "a:b"});
        let job = Job::new("1", "send_email", "mail").with_arguments(&arguments);
        let expected = [
            ("jobs.type.send_email", "job:send_email:a%3Ab", 3),
            ("jobs.type.send_email.running", "job:send_email:a%3Ab", 1),
            ("stripe", "account:a%3Ab", 3),
            ("slots", "account:a%3Ab", 1),
            ("jobs.queue.mail", "queue:mail", 3),
            ("jobs.global", "global", 3),
        ];
        assert_eq!(
            charges(&jobs, &job),
            expected.map(|(limit, key, cost)| (limit.to_owned(), key.to_owned(), cost))
        );
        let plan = Plan::of(&jobs, &job, |_| false).unwrap();
        assert!(!format!("{plan:?}").contains("a%3Ab"), "{plan:?}");
    }

    #[test]
    fn a_job_that_meets_no_policy_has_no_plan() {
        let jobs = Jobs::new().job("send_email", JobPolicy::new().with_rate_limit(1, MINUTE));
        assert!(Plan::of(&jobs, &Job::new("1", "other", "mail"), |_| false).is_none());
        assert!(Plan::of(&Jobs::new(), &Job::new("1", "send_email", "mail"), |_| false).is_none());
    }

    #[test]
    fn the_shortest_sleep_that_a_policy_sets_counts_and_no_default() {
        let rate = || JobPolicy::new().with_rate_limit(1, MINUTE);
        let max_delay = |of_type: JobPolicy, of_queue: JobPolicy, global: JobPolicy| {
            let jobs = Jobs::new().job("a", of_type).queue("q", of_queue).global(global);
            Plan::of(&jobs, &Job::new("1", "a", "q"), |_| false).unwrap().max_delay
        };
        let (half, hour) = (30 * MINUTE, 60 * MINUTE);
        assert_eq!(max_delay(rate(), rate(), rate()), 5 * MINUTE);
        assert_eq!(
            max_delay(rate().max_delay(half), rate(), rate()),
            half,
            "longer than the default of the others"
        );
        assert_eq!(max_delay(rate(), rate().max_delay(hour), rate().max_delay(half)), half);
        assert_eq!(max_delay(rate().max_delay(MINUTE), rate(), rate().max_delay(half)), MINUTE);
    }

    #[test]
    fn jobs_without_the_field_share_or_are_denied() {
        let policy = JobPolicy::new().with_rate_limit(1, MINUTE).key("tenant");
        let shared = Jobs::new().job("a", policy.clone());
        assert_eq!(charges(&shared, &Job::new("1", "a", "q"))[0].1, "job:a");
        // What no key can have is as good as none, and does not open the limit.
        for value in ["\u{0}".to_owned(), "a\nb".to_owned(), "x".repeat(100_000), String::new()] {
            let arguments = || json!({"tenant": value});
            let job = Job::new("1", "a", "q").with_arguments(&arguments);
            assert_eq!(charges(&shared, &job)[0].1, "job:a");
        }
        let policy = policy.if_missing(MissingField::Deny).on_exceeded(OnExceeded::Skip);
        let denied = Jobs::new().job("a", policy);
        let plan = Plan::of(&denied, &Job::new("1", "a", "q"), |_| false).unwrap();
        let lacks = plan.lacks.unwrap();
        assert_eq!((lacks.on_exceeded, &*lacks.label, &*lacks.field), (OnExceeded::Skip, "job:a", "tenant"));
        assert_eq!(plan.charges.len(), 0);
        // The same of the key of a shared limit.
        let policy = JobPolicy::new().charges("stripe").limit_key("account:{account}");
        let shared = Jobs::new().job("a", policy.clone());
        let of_empty = || json!({"account": ""});
        assert_eq!(charges(&shared, &Job::new("1", "a", "q"))[0].1, "job:a");
        assert_eq!(charges(&shared, &Job::new("1", "a", "q").with_arguments(&of_empty))[0].1, "job:a");
        let denied = Jobs::new().job("a", policy.if_missing(MissingField::Deny));
        let lacks = Plan::of(&denied, &Job::new("1", "a", "q"), |_| false).unwrap().lacks.unwrap();
        assert_eq!((&*lacks.limit, &*lacks.field), ("stripe", "account:{account}"));
        let hostile = format!("a\u{0}\n{}", "x".repeat(1_000));
        let all = Jobs::new().queue("q", JobPolicy::new().with_rate_limit(1, MINUTE));
        let plan = Plan::of(&all, &Job::new("1", &hostile, "q"), |_| false).unwrap();
        assert!(plan.job_type.starts_with("a\u{fffd}\u{fffd}x") && plan.job_type.chars().count() == 100);
    }

    #[test]
    fn a_429_closes_a_key_of_its_type_and_of_nobody_else() {
        let rate = || JobPolicy::new().with_rate_limit(1, MINUTE);
        let arguments = || json!({"tenant": "acme"});
        let closed = |jobs: Jobs| {
            let jobs = jobs.queue("q", rate()).global(rate());
            let job = Job::new("1", "a", "q").with_arguments(&arguments);
            Plan::of(&jobs, &job, |_| false).unwrap().closed_by_handler.map(|one| (one.name, one.label))
        };
        let expected = |key: &str| Some((closable(key), "job:a".to_owned()));
        let shared = || JobPolicy::new().charges("stripe");
        assert_eq!(closed(Jobs::new()), None, "not the queue, and not all jobs");
        assert_eq!(closed(Jobs::new().job("a", rate())), expected("job:a"));
        assert_eq!(closed(Jobs::new().job("a", rate().key("tenant"))), expected("job:a:acme"));
        assert_eq!(
            closed(Jobs::new().job("a", shared().limit_key("account:{tenant}"))),
            expected("account:acme")
        );
        assert_eq!(closed(Jobs::new().job("a", shared())), expected("job:a"), "the default key is all jobs'");
        for others in ["queue:{tenant}", "job:{tenant}"] {
            assert_eq!(
                closed(Jobs::new().job("a", shared().limit_key(others))),
                expected("job:a"),
                "{others}"
            );
        }
    }
}
