//! What is known of the keys of jobs, and closing and opening them.

use std::time::Duration;

use tollgate::Key;
use tollgate::config::{excerpt, nearest};
use uuid::Uuid;

use super::JobGate;
use crate::error::Error;
use crate::limits::{JobScope, JobsConfig, LONGEST_SLEEP};
use crate::line::{BY_HAND, Called, ClosedKey};
use crate::metrics;
use crate::plan::{closable, line_of};

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
    /// Closes a key for some time, for all workers: no job that is charged to it starts. A key that is closed already stays
    /// closed for the longer of both, of 366 days at most. `key` is `job:<type>`, `queue:<name>`, `global`, one value of what splits them
    /// (`job:<type>:<tenant>`), or the key of a limit that jobs share. A type or a queue that no policy names is an error. Answers for how long it
    /// is closed now.
    pub async fn close(&self, key: &str, wait: Duration) -> Result<Duration, Error> {
        let (name, label) = closing(key)?;
        self.inner.jobs.read().config().check_key(key)?;
        if wait > LONGEST_SLEEP {
            let days = LONGEST_SLEEP.as_secs() / 86_400;
            return Err(Error::new(format!(
                "a key is closed for {days} days at most, and can be closed again"
            )));
        }
        let closed = self.inner.line.close(name, &label, wait, BY_HAND).await;
        closed.map_err(|error| Error::database("closing a key", error))
    }

    /// Opens a key that was closed; false if it was not. Its jobs are called, so that they do not sleep on until their slots.
    pub async fn open(&self, key: &str) -> Result<bool, Error> {
        let (name, _) = closing(key)?;
        let opened = self.inner.line.open(name).await;
        let opened = opened.map_err(|error| Error::database("opening a key", error))?;
        if opened {
            let called = held_by(key, self.inner.jobs.read().config())?;
            if let Err(error) = self.call(&called).await {
                tracing::warn!(%error, "a key was opened, and its jobs cannot be called; they look again by themselves");
            }
        }
        Ok(opened)
    }

    /// What is known of a key: `job:<type>`, `queue:<name>` or `global`. Where a field splits its limits, what is counted is that of
    /// jobs without it, and the waiting jobs are all of them. Where it has no limit of its own and shares some of `[limits]`, the first of
    /// those is counted, under `limit_key`; if that has fields, it is counted under the key itself, where nothing is charged.
    pub async fn status(&self, key: &str) -> Result<JobStatus, Error> {
        let jobs = self.inner.jobs.read().clone();
        let is_key = |scope: &JobScope<'_>| scope.key().is_ok_and(|own| own.canonical() == key);
        let mut known = Vec::new();
        for (scope, limits) in jobs.config().scopes() {
            known.extend(scope.key().map(Key::into_canonical));
            if !is_key(&scope) {
                continue;
            }
            let Some(limit_name) = limits.first_name(scope) else { continue };
            let is_shared = limits.named(scope).is_empty();
            let counted = limits.shared_key().filter(|_| is_shared).unwrap_or(key);
            let outcome = self.inner.tollgate.status(&limit_name, counted).await?;
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
            if let (Ok(key), Some(_)) = (scope.key(), limits.first_name(scope)) {
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
}

impl JobsConfig {
    /// Whether jobs may have this key. One of a type or a queue that no policy names is an error with those that are known: nothing would be
    /// charged to it.
    pub fn check_key(&self, key: &str) -> Result<(), Error> {
        let key = Key::parse(key).map_err(|error| Error::new(format!("a key of jobs: {error}")))?;
        let known: Vec<Key<'_>> = self.scopes().filter_map(|(scope, _)| scope.key().ok()).collect();
        let is_same = |one: &Key<'_>| one.namespace() == key.namespace() && one.key() == key.key();
        if !matches!(&*key.namespace(), "job" | "queue") || known.iter().any(is_same) {
            return Ok(());
        }
        let names = known.iter().map(|key| key.canonical());
        let fix = match nearest(key.canonical(), names.clone()) {
            Some(guess) => format!("did you mean {guess}?"),
            None => format!("known: {}", names.collect::<Vec<_>>().join(", ")),
        };
        Err(Error::new(format!("no policy of jobs has the key {}; {fix}", excerpt(key.canonical()))))
    }
}

/// The jobs that wait because a key is closed: all under its label, and those in line for a limit that is charged to it.
pub(crate) fn held_by(key: &str, jobs: &JobsConfig) -> Result<Called, Error> {
    let key = Key::parse(key).map_err(|error| Error::new(format!("a key to open: {error}")))?;
    let key = key.canonical();
    let (mut lines, mut label) = (Vec::new(), None);
    for (scope, limits) in jobs.scopes() {
        if scope.key().is_ok_and(|own| own.canonical() == key) {
            label = Some(key.to_owned());
        }
        let own = limits.named(scope).into_iter().map(|(name, _)| name);
        lines.extend(own.chain(limits.limits.iter().cloned()).map(|limit| line_of(&limit, key)));
    }
    Ok(Called::Of { lines, label })
}

/// The name under which a key is closed, and what is shown of it.
pub(crate) fn closing(key: &str) -> Result<(Uuid, String), Error> {
    let parsed = Key::parse(key).map_err(|error| Error::new(format!("a key to close: {error}")))?;
    let label = match Key::new(&parsed.namespace(), &parsed.key()) {
        Ok(label) if matches!(&*parsed.namespace(), "job" | "queue" | "default") => label.into_canonical(),
        _ => "shared".to_owned(),
    };
    Ok((closable(parsed.canonical()), label))
}
