//! Builds a gate.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::RwLock;
use sqlx::postgres::PgPool;
use tollgate::Tollgate;

use super::{Batcher, Inner, JobGate, Overrides, Undeclared, housekeeping, overrides};
use crate::error::Error;
use crate::history::History;
use crate::line::Line;
use crate::metrics;
use crate::policy::Jobs;
use crate::wake::Wakes;

/// Builds a [`JobGate`].
#[must_use]
pub struct JobGateBuilder {
    pub(super) tollgate: Tollgate,
    pub(super) pool: PgPool,
    pub(super) jobs: Jobs,
    pub(super) prefix: String,
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
        metrics::describe();
        gate.look_at_overrides().await;
        tokio::spawn(housekeeping::keep_house(gate.downgrade()));
        tokio::spawn(housekeeping::forget_ended(gate.downgrade()));
        tokio::spawn(overrides::follow(gate.downgrade()));
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
            version: AtomicU64::new(0),
            wake: RwLock::default(),
            wakes: Wakes::default(),
            history: History::default(),
            undeclared: Undeclared::default(),
            batcher: Batcher::default(),
            overrides: Overrides::default(),
            #[cfg(feature = "apalis")]
            ahead: crate::read_ahead::ReadAhead::default(),
        };
        let gate = JobGate { inner: Arc::new(inner) };
        gate.apply(self.jobs)?;
        Ok(gate)
    }
}
