//! What a gate does beside deciding: calls waiting jobs, sets gauges and removes what was left behind.

use std::time::Duration;

use uuid::Uuid;

use super::{JobGate, WeakGate};
use crate::error::Error;
use crate::metrics;

/// Called jobs come in batches: how long after one the next is called.
const CALLED_EVERY: Duration = Duration::from_millis(200);

/// How long a place is kept whose time has passed.
const RETENTION: Duration = Duration::from_secs(86_400);

/// How often gauges are set, and after how many times of that the line is cleaned up.
const GAUGES_EVERY: Duration = Duration::from_secs(15);
const CLEANUP_EVERY: u32 = 40;

impl JobGate {
    /// Calls all jobs that sleep, first those whose turn comes first, some at a time.
    pub(super) async fn call_sleepers(&self) -> Result<(), Error> {
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
        let rows = self.inner.line.cleanup(RETENTION).await;
        let rows = rows.map_err(|error| Error::database("cleaning up the line", error))?;
        metrics::cleaned(rows);
        if rows > 0 {
            tracing::info!(rows, "old rows of the line removed");
        }
        Ok(rows)
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
}

/// Sets gauges and cleans up for as long as the gate is there.
pub(super) async fn keep_house(gate: WeakGate) {
    for round in 1_u32.. {
        tokio::time::sleep(GAUGES_EVERY).await;
        let Some(gate) = gate.upgrade() else { return };
        let gauges = gate.statuses().await.map(drop);
        let cleanup = if round % CLEANUP_EVERY == 0 { gate.cleanup().await.map(drop) } else { Ok(()) };
        if let Err(error) = gauges.and(cleanup) {
            tracing::warn!(%error, "the line of waiting jobs cannot be looked after");
        }
    }
}
