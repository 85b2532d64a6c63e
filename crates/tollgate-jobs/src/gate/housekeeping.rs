//! What a gate does beside deciding: calls waiting jobs, sets gauges and removes what was left behind.

use std::time::Duration;

use uuid::Uuid;

use super::{JobGate, WeakGate};
use crate::error::Error;
use crate::line::Called;
use crate::metrics;

/// The pause before jobs are called again that could not be called; it doubles up to the longest. And how often that is tried.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
const AGAIN_TIMES: usize = 12;

/// How long after a change all are called a second time.
const LATER: Duration = Duration::from_secs(5);

/// How long a place is kept whose time has passed.
const RETENTION: Duration = Duration::from_secs(86_400);

/// How often what was counted is written down, and after how many times of that gauges are set and the line is cleaned up.
const WRITTEN_EVERY: Duration = Duration::from_secs(5);
const GAUGES_EVERY: u32 = 3;
const CLEANUP_EVERY: u32 = 120;

impl JobGate {
    /// Calls all jobs that sleep, because what holds them up has changed; and once more some seconds later, for those whose delay was being
    /// written by the old limits. If they cannot be called, that is tried again in the background: the change itself is made.
    pub(super) async fn call_all(&self) {
        let mut pause = LATER;
        if let Err(error) = self.call(&Called::All).await {
            tracing::warn!(%error, "limits have changed, and waiting jobs cannot be called yet; that is tried again");
            pause = AGAIN.0;
        }
        let gate = self.downgrade();
        tokio::spawn(async move {
            for _ in 0..AGAIN_TIMES {
                tokio::time::sleep(pause).await;
                let Some(gate) = gate.upgrade() else { return };
                match gate.call(&Called::All).await {
                    Ok(called) => return tracing::debug!(called, "waiting jobs were called"),
                    Err(_) => pause = (pause * 2).min(AGAIN.1),
                }
            }
        });
    }

    /// Calls jobs that sleep; answers how many. Nobody is called where the framework is not known.
    pub(super) async fn call(&self, called: &Called) -> Result<u64, Error> {
        let Some(wake) = self.wake() else { return Ok(0) };
        let count = self.inner.line.call(called, &*wake).await?;
        self.inner.wakes.push(Duration::ZERO);
        Ok(count)
    }

    /// Forgets places in line whose time passed a day ago and that nobody came for, keys that are open again, and what was counted a day
    /// ago. Answers how many rows. A task of the gate does so every ten minutes; what was charged is the store's and swept by it.
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
            Ok(jobs) => match wake.wake(&jobs).await {
                Ok(_) => self.inner.wakes.push(Duration::ZERO),
                Err(error) => {
                    tracing::debug!(%error, "waiting jobs cannot be called; they look again by themselves");
                }
            },
            Err(error) => {
                tracing::debug!(%error, "waiting jobs cannot be called; they look again by themselves");
            }
        }
    }
}

/// Writes down what was counted, sets gauges and cleans up for as long as the gate is there.
pub(super) async fn keep_house(gate: WeakGate) {
    for round in 1_u32.. {
        tokio::time::sleep(WRITTEN_EVERY).await;
        let Some(gate) = gate.upgrade() else { return };
        let written = gate.inner.history.write(&gate.inner.line).await;
        let written = written.map_err(|error| Error::database("counting what became of jobs", error));
        let gauges = if round % GAUGES_EVERY == 0 { gate.statuses().await.map(drop) } else { Ok(()) };
        // A trigger that is gone is noticed by jobs that come early, if any does: those that are put off together do not come.
        if let Some(wake) = gate.wake().filter(|_| round % GAUGES_EVERY == 0) {
            wake.came_early().await;
        }
        let cleanup = if round % CLEANUP_EVERY == 0 { gate.cleanup().await.map(drop) } else { Ok(()) };
        if let Err(error) = written.and(gauges).and(cleanup) {
            tracing::warn!(%error, "the line of waiting jobs cannot be looked after");
        }
    }
}
