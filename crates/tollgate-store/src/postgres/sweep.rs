//! The cleanup: deletes expired rows, a batch at a time, and never delays a call.
//!
//! A task of the store runs it at an interval ([`PostgresOptions::cleanup_every`](crate::PostgresOptions)); the server skips
//! locked rows (cleanup.sql).

use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};

use super::Inner;
use super::codec::{column, nonsense};
use super::fault::{Fault, Stage};
use super::pool::{BEGIN_CHORE, Session, in_transaction};
use super::statement::with_prefix;
use crate::StoreError;

/// How many rows one statement checks.
const BATCH: i32 = 1_000;

/// The time limit of one statement: the server gives up before; if it does not report that, it is gone.
const TIMEOUT: Duration = Duration::from_secs(330);

/// How many rows a cleanup deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cleaned {
    /// Keys whose state equals no state.
    pub states: u64,
    /// Chunks of tracked executions of such keys: up to 64 executions each.
    pub executions: u64,
    /// Leases of such keys.
    pub leases: u64,
    /// Expired holds.
    pub holds: u64,
}

impl Cleaned {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.states + self.executions + self.leases + self.holds
    }
}

impl AddAssign for Cleaned {
    fn add_assign(&mut self, other: Cleaned) {
        self.states += other.states;
        self.executions += other.executions;
        self.leases += other.leases;
        self.holds += other.holds;
    }
}

/// The rows deleted since the store was created.
#[derive(Debug, Default)]
pub(super) struct Totals {
    states: AtomicU64,
    executions: AtomicU64,
    leases: AtomicU64,
    holds: AtomicU64,
}

impl Totals {
    fn add(&self, cleaned: Cleaned) {
        self.states.fetch_add(cleaned.states, Ordering::Relaxed);
        self.executions.fetch_add(cleaned.executions, Ordering::Relaxed);
        self.leases.fetch_add(cleaned.leases, Ordering::Relaxed);
        self.holds.fetch_add(cleaned.holds, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Cleaned {
        Cleaned {
            states: self.states.load(Ordering::Relaxed),
            executions: self.executions.load(Ordering::Relaxed),
            leases: self.leases.load(Ordering::Relaxed),
            holds: self.holds.load(Ordering::Relaxed),
        }
    }
}

/// Deletes all expired rows.
pub(super) async fn cleanup(inner: &Inner) -> Result<Cleaned, StoreError> {
    let pool = &inner.pool;
    let failed = |error| Fault::of(error, Stage::Looking, "cleaning up", &pool.place).error;
    let link = pool.open(Session::Chores).await.map_err(|fault| fault.error)?;
    let text = with_prefix("select * from {prefix}cleanup($1, $2)", &pool.prefix);
    let begin = format!("{BEGIN_CHORE}; set local synchronous_commit = off");
    let mut cleaned = Cleaned::default();
    loop {
        let clock_us = inner.clock_us();
        let values: [(&(dyn ToSql + Sync), Type); 2] = [(&BATCH, Type::INT4), (&clock_us, Type::INT8)];
        let rows = in_transaction(&link.client, &begin, &text, &values);
        let answer = tokio::time::timeout(TIMEOUT, rows).await;
        let mut rows = answer
            .map_err(|_| Fault::timeout(Stage::Looking, "cleaning up", &pool.place).error)?
            .map_err(failed)?;
        let row = rows.pop().ok_or_else(|| nonsense("no row"))?;
        let count = |index| column::<i64>(&row, index).map(|count| u64::try_from(count).unwrap_or(0));
        let looked = count(0)?;
        let batch = Cleaned { states: count(1)?, executions: count(2)?, leases: count(3)?, holds: count(4)? };
        cleaned += batch;
        inner.cleaned.add(batch);
        if looked < u64::from(BATCH.unsigned_abs()) {
            return Ok(cleaned);
        }
        tracing::debug!(?batch, "a batch of the cleanup");
    }
}

/// Starts the task that cleans up at an interval, as long as the store lives.
pub(super) fn spawn(inner: &Arc<Inner>, every: Duration) {
    let inner = Arc::downgrade(inner);
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(every).await;
            let Some(inner) = inner.upgrade() else { return };
            match cleanup(&inner).await {
                Ok(cleaned) if cleaned.total() == 0 => tracing::debug!("the cleanup found nothing to delete"),
                Ok(Cleaned { states, executions, leases, holds }) => {
                    tracing::info!(
                        states,
                        executions,
                        leases,
                        holds,
                        "the cleanup deleted what says nothing any more"
                    );
                }
                Err(error) => tracing::warn!(%error, "the cleanup did not get through; it will try again"),
            }
        }
    });
}
