//! Job limits as ordinary limits.
//!
//! What a type of job, a queue or all jobs together may do is a handful of limits with names of their own
//! (`jobs.type.NAME`, `jobs.queue.NAME`, `jobs.global`), so that validation, reload, overrides, shadow, fallback, metrics and the
//! page treat them as they treat every limit. The rest (behaviour, delays) is data for the gate, which charges them. Nothing here
//! counts, decides or waits.
//!
//! Built in code by `policy.rs`, or read from `[jobs]` by `config.rs`.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use tollgate::config::excerpt;
use tollgate::store::Subject;
use tollgate::{Allowance, Fallback, Key, Limit, Rule};

use crate::error::Error;
use crate::job::template_fault;

/// How long a delayed job sleeps at most by default before it is looked at again.
pub(crate) const DEFAULT_MAX_DELAY: Duration = Duration::from_secs(300);

/// No sleep and no closed key lasts longer, whatever a policy or the remote side says: times beyond what PostgreSQL has would fail every
/// ack, and with it the worker.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_secs(366 * 86_400);

/// How long a lease of a running job lasts by default if it is not renewed.
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(30);

/// The key that limits of `[limits]` are charged to by default.
pub(crate) const SHARED_KEY: &str = "global";

/// What becomes of a job that is over a limit. Later ones are stricter: of several limits that deny, the strictest decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OnExceeded {
    /// It goes back for its own moment, without using up an attempt.
    #[default]
    Delay,
    /// It ends without an error, and without having run.
    Skip,
    /// It fails for good, with the error `Rate limit exceeded`.
    Reject,
}

impl OnExceeded {
    /// All three, in the order of the documentation.
    pub const ALL: [OnExceeded; 3] = [OnExceeded::Delay, OnExceeded::Reject, OnExceeded::Skip];

    /// The name used in configuration, metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            OnExceeded::Delay => "delay",
            OnExceeded::Skip => "skip",
            OnExceeded::Reject => "reject",
        }
    }
}

impl fmt::Display for OnExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What becomes of a job whose arguments and metadata lack a field that its key needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MissingField {
    /// All such jobs share one counter.
    #[default]
    Shared,
    /// It is over the limit, and nothing is charged.
    Deny,
}

/// Whose limits these are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum JobScope<'a> {
    /// All jobs.
    Global,
    /// The jobs of a queue.
    Queue(&'a str),
    /// The jobs of a type.
    Type(&'a str),
}

impl JobScope<'_> {
    /// The name of the first limit of this scope, with which those of the others begin.
    pub fn limit_name(&self) -> String {
        match self {
            JobScope::Global => "jobs.global".to_owned(),
            JobScope::Queue(name) => format!("jobs.queue.{name}"),
            JobScope::Type(name) => format!("jobs.type.{name}"),
        }
    }

    /// What the limits are charged to, unless a field splits them: `job:<type>`, `queue:<name>` or `global`.
    pub fn key(&self) -> Result<Key<'static>, Error> {
        let key = match self {
            JobScope::Global => Key::parse("global"),
            JobScope::Queue(name) => Key::new("queue", name),
            JobScope::Type(name) => Key::new("job", name),
        };
        key.map(Key::into_owned).map_err(|error| Error::new(format!("{self}: {error}")))
    }
}

/// `all jobs`, `the queue `mail`` or `the job type `send_email``.
impl fmt::Display for JobScope<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobScope::Global => f.write_str("all jobs"),
            JobScope::Queue(name) => write!(f, "the queue `{}`", excerpt(name)),
            JobScope::Type(name) => write!(f, "the job type `{}`", excerpt(name)),
        }
    }
}

/// What one scope may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobLimits {
    /// How many may start.
    pub limit: Option<Limit>,
    /// Further limits on starts, charged together with the first.
    pub also: Vec<Limit>,
    /// How many may run at once: a concurrency limit.
    pub concurrency: Option<Limit>,
    /// What becomes of a job that is over one of them.
    pub on_exceeded: OnExceeded,
    /// The longest sleep of a delayed job before it is looked at again; it keeps its place in line. Of the scopes of a job that set one, the
    /// shortest counts; `None`, for five minutes, sets none.
    pub max_delay: Option<Duration>,
    /// After how long in delays a job is rejected; `None` for never.
    pub give_up_after: Option<Duration>,
    /// The field of the arguments or the metadata that splits the limits: each of its values is counted by itself.
    pub key: Option<String>,
    /// What becomes of a job without that field, or without one that `limit_key` names.
    pub if_missing: MissingField,
    /// Limits of `[limits]` that a run charges too.
    pub limits: Vec<String>,
    /// The key that those are charged to; `{name}` stands for a field of the arguments or metadata. By default `global`. A job that lacks the field
    /// is charged to the key of the scope, such as `job:<type>`, unless `if_missing` denies it.
    pub limit_key: Option<String>,
    /// Whether the limits of this scope are in shadow mode: they decide and count, and never deny.
    pub shadow: bool,
    /// Their own answer to a failing store.
    pub fallback: Option<Fallback>,
    /// What the first limit is for single keys.
    pub overrides: Vec<(Key<'static>, Allowance)>,
}

impl JobLimits {
    /// The names of the limits of a scope, in the order in which they are charged, each with its numbers.
    pub fn named(&self, scope: JobScope<'_>) -> Vec<(String, Limit)> {
        let name = scope.limit_name();
        let first = self.limit.map(|limit| (name.clone(), limit));
        let also = (1..).zip(&self.also).map(|(number, limit)| (format!("{name}.also-{number}"), *limit));
        let running = self.concurrency.map(|limit| (format!("{name}.running"), limit));
        first.into_iter().chain(also).chain(running).collect()
    }

    /// The name of the first limit that its jobs are charged: one of the scope, or else one of `limits`.
    pub fn first_name(&self, scope: JobScope<'_>) -> Option<String> {
        let own = self.named(scope).into_iter().map(|(name, _)| name).next();
        own.or_else(|| self.limits.first().cloned())
    }

    /// The key that `limits` are charged to; `None` if each job names its own.
    pub(crate) fn shared_key(&self) -> Option<&str> {
        let template = self.limit_key.as_deref().unwrap_or(SHARED_KEY);
        (!template.contains('{')).then_some(template)
    }

    /// What is wrong with it as a whole, as what to do about it.
    pub fn fault(&self, scope: JobScope<'_>) -> Option<String> {
        if self.limit.is_none()
            && self.also.is_empty()
            && self.concurrency.is_none()
            && self.limits.is_empty()
        {
            return Some("limits nothing; write a limit with its window, concurrency or limits".to_owned());
        }
        let max_delay = self.max_delay.unwrap_or(DEFAULT_MAX_DELAY);
        if max_delay.is_zero() {
            return Some("max_delay must be longer than 0".to_owned());
        }
        if let Some(give_up_after) = self.give_up_after.filter(|give_up_after| *give_up_after < max_delay) {
            return Some(format!(
                "max_delay ({max_delay:?}) is longer than give_up_after ({give_up_after:?}), so a job would be given up in its first \
                 sleep; write a shorter max_delay or a longer give_up_after"
            ));
        }
        if self.key.is_some() && scope == JobScope::Global {
            return Some("is not split by a field; remove `key`, or split a type or a queue".to_owned());
        }
        if self.limit_key.is_some() && self.limits.is_empty() {
            return Some("limit_key names the key of `limits`, and there are none".to_owned());
        }
        let template = self.limit_key.as_deref().unwrap_or(SHARED_KEY);
        if let Some(fault) = template_fault(template) {
            return Some(format!(
                "limit_key {:?} is not a key: {fault}; write limit_key = \"account:{{tenant}}\", where {{tenant}} is a field, or \
                 another namespace:key",
                excerpt(template).to_string()
            ));
        }
        None
    }
}

/// The section `[jobs]`, which [`Config::parse_with`](tollgate::config::Config::parse_with) reads into it.
///
/// It has `database`, `global`, `[jobs.queues.NAME]` and `[jobs.types.NAME]`. Their limits are limits
/// like others, called `jobs.global`, `jobs.queue.NAME` and `jobs.type.NAME`.
///
/// | of a type, a queue or `global` | says | by default |
/// |---|---|---|
/// | `limit`, `window`, or the fields of another `strategy` | how many may start | |
/// | `also` | a list of further limits on starts, charged together | none |
/// | `concurrency`, `lease` | how many run at once, and how long a dead worker's place is kept | none, `30s` |
/// | `on_exceeded` | `delay`, `reject` or `skip` | `delay` |
/// | `max_delay` | the longest sleep of a delayed job before it is looked at again; the shortest that its scopes set | `5m` |
/// | `give_up_after` | after how long in delays a job is rejected | never |
/// | `key`, `if_missing` | the field that splits the limit, and what becomes of jobs without it (`shared`, `deny`) | one limit for all, `shared` |
/// | `limits`, `limit_key` | limits of `[limits]` that a run charges too, and their key | none, `global` |
/// | `shadow`, `fallback`, `overrides` | as of every limit | |
///
/// ```
/// use std::time::Duration;
/// use tollgate::Limit;
/// use tollgate_jobs::{JobLimits, JobsConfig};
///
/// let mut send_email = JobLimits::default();
/// send_email.limit = Some(Limit::sliding_window(100, Duration::from_secs(3_600))?);
/// let mut jobs = JobsConfig::default();
/// jobs.types.push(("send_email".to_owned(), send_email));
/// let rules = jobs.rules()?;
/// assert_eq!(rules[0].name(), "jobs.type.send_email");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobsConfig {
    /// The database that has the jobs, if it is not the store's.
    pub database: Option<String>,
    /// What all jobs together may do.
    pub global: Option<JobLimits>,
    /// What the jobs of a queue may do, by its name.
    pub queues: Vec<(String, JobLimits)>,
    /// What the jobs of a type may do, by its name.
    pub types: Vec<(String, JobLimits)>,
}

impl JobsConfig {
    /// Each scope with its limits: types, then queues, then all.
    pub fn scopes(&self) -> impl Iterator<Item = (JobScope<'_>, &JobLimits)> {
        let types = self.types.iter().map(|(name, limits)| (JobScope::Type(name), limits));
        let queues = self.queues.iter().map(|(name, limits)| (JobScope::Queue(name), limits));
        types.chain(queues).chain(self.global.iter().map(|limits| (JobScope::Global, limits)))
    }

    /// The rules of all scopes, to be put beside others in a policy.
    pub fn rules(&self) -> Result<Vec<Rule>, Error> {
        let mut names = BTreeSet::new();
        let mut scopes = BTreeSet::new();
        let mut rules = Vec::new();
        for (scope, limits) in self.scopes() {
            if !scopes.insert(scope) {
                return Err(Error::new(format!("there are two policies for {scope}; keep one of them")));
            }
            if let Some(fault) = limits.fault(scope) {
                return Err(Error::new(format!("{scope}: {fault}")));
            }
            for (index, (name, limit)) in limits.named(scope).into_iter().enumerate() {
                if let Some(fix) = Rule::name_fault(&name) {
                    return Err(Error::new(format!(
                        "{scope}: is not a name for the limit `{}`: {fix}",
                        excerpt(&name)
                    )));
                }
                if !names.insert(name.clone()) {
                    return Err(Error::new(format!(
                        "{scope}: the limit `{name}` is also that of another type or queue; give one of them another name"
                    )));
                }
                // All charges of a run are one step, on Redis Cluster too.
                let rule = Rule::new(name, limit).map_err(tollgate::Error::from)?;
                let mut rule = rule.with_subject(Subject::All);
                if let Some(fallback) = limits.fallback {
                    rule = rule.fallback(fallback);
                }
                if limits.shadow {
                    rule = rule.shadow();
                }
                let overrides =
                    if index == 0 && limits.limit.is_some() { limits.overrides.as_slice() } else { &[] };
                for (key, allowance) in overrides {
                    rule = rule.with_override(key.clone(), *allowance).map_err(tollgate::Error::from)?;
                }
                rules.push(rule);
            }
        }
        Ok(rules)
    }

    /// Whether there are no limits.
    pub fn is_empty(&self) -> bool {
        self.scopes().next().is_none()
    }
}

/// Omits the database, whose address may have a password in it.
impl fmt::Debug for JobsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JobsConfig { global, queues, types, .. } = self;
        let mut config = f.debug_struct("JobsConfig");
        config.field("global", global).field("queues", queues).field("types", types).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limited(count: u64) -> JobLimits {
        let limit = Limit::sliding_window(count, Duration::from_secs(1)).unwrap();
        JobLimits { limit: Some(limit), ..JobLimits::default() }
    }

    fn config(types: Vec<(&str, JobLimits)>) -> JobsConfig {
        let types = types.into_iter().map(|(name, limits)| (name.to_owned(), limits)).collect();
        JobsConfig { types, ..JobsConfig::default() }
    }

    #[test]
    fn scopes_become_limits_with_names_of_their_own() {
        let mut email = limited(100);
        email.also = vec![Limit::sliding_window(2, Duration::from_secs(1)).unwrap()];
        email.concurrency = Some(Limit::concurrency(5, DEFAULT_LEASE).unwrap());
        email.shadow = true;
        email.fallback = Some(Fallback::Closed);
        let mut jobs = config(vec![("send_email", email)]);
        jobs.queues.push(("external-api".to_owned(), limited(30)));
        jobs.global = Some(limited(1_000));
        let rules = jobs.rules().unwrap();
        let names: Vec<_> = rules.iter().map(|rule| (rule.name(), rule.is_shadow())).collect();
        assert_eq!(
            names,
            [
                ("jobs.type.send_email", true),
                ("jobs.type.send_email.also-1", true),
                ("jobs.type.send_email.running", true),
                ("jobs.queue.external-api", false),
                ("jobs.global", false),
            ]
        );
        assert!(rules[..3].iter().all(|rule| rule.own_fallback() == Some(Fallback::Closed)));
        // One slot of a Redis Cluster has them all, so that a charge over them is one step.
        assert!(rules.iter().all(|rule| rule.subject() == Subject::All));
        let key = |scope: JobScope<'_>| scope.key().unwrap().canonical().to_owned();
        assert_eq!(key(JobScope::Type("send_email")), "job:send_email");
        assert_eq!(key(JobScope::Queue("mail")), "queue:mail");
        assert_eq!(key(JobScope::Global), "global");
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let nothing = JobLimits::default();
        let mut gives_up = limited(1);
        gives_up.give_up_after = Some(Duration::from_secs(60));
        let mut also = limited(1);
        also.also = vec![Limit::sliding_window(2, Duration::from_secs(1)).unwrap()];
        for (types, message) in [
            (vec![("a", limited(1)), ("a", limited(2))], "there are two policies for the job type `a`"),
            (vec![("a", nothing)], "the job type `a`: limits nothing"),
            (vec![("a", gives_up)], "max_delay (300s) is longer than give_up_after (60s)"),
            (vec![("SendEmail", limited(1))], "has only the characters a-z"),
            (
                vec![("a", also), ("a.also-1", limited(1))],
                "the limit `jobs.type.a.also-1` is also that of another",
            ),
        ] {
            let error = config(types).rules().unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
        let mut split = limited(1);
        split.key = Some("tenant".to_owned());
        let jobs = JobsConfig { global: Some(split), ..JobsConfig::default() };
        assert!(jobs.rules().unwrap_err().to_string().starts_with("all jobs: is not split"));
    }
}
