//! What a gate does beside deciding: calls waiting jobs, sets gauges and removes what was left behind.

use std::collections::BTreeMap;
use std::time::Duration;

use uuid::Uuid;

use super::{JobGate, WeakGate};
use crate::error::Error;
use crate::line::Called;
use crate::metrics;

/// The pause before jobs are called again that could not be called; it doubles up to the longest. And how often that is tried.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
const AGAIN_TIMES: usize = 12;

/// The pause before jobs are called again that a worker had in its hands; it doubles up to the longest. And how often that is tried.
const IN_HANDS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
const IN_HANDS_TIMES: usize = 30;

/// How many of those in line are called for each job before them that does not count any more, and how many at most.
const CALLED_FOR_EACH: usize = 10;
const MOST_CALLED: usize = 1_000;

/// How long a place is kept whose time has passed.
const RETENTION: Duration = Duration::from_secs(86_400);

/// How often what was counted is written down, and after how many times of that gauges are set and the line is cleaned up.
const WRITTEN_EVERY: Duration = Duration::from_secs(5);
const GAUGES_EVERY: u32 = 3;
const CLEANUP_EVERY: u32 = 120;

/// How often it is looked for jobs that were removed while they waited.
const FORGOTTEN_EVERY: Duration = Duration::from_secs(60);

impl JobGate {
    /// Calls all jobs that sleep, because what holds them up has changed. If they cannot be called, that is tried again in the background: the
    /// change itself is made.
    pub(super) async fn call_all(&self) {
        let Err(error) = self.call(&Called::All).await else { return };
        tracing::warn!(%error, "limits have changed, and waiting jobs cannot be called yet; that is tried again");
        let (gate, mut pause) = (self.downgrade(), AGAIN.0);
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

    /// Calls jobs that sleep; answers how many. Nobody is called where the framework is not known. Those that a worker has in its hands are
    /// called when it has put them back: it may do so for a reason that is gone.
    pub(super) async fn call(&self, called: &Called) -> Result<u64, Error> {
        let Some(wake) = self.wake() else { return Ok(0) };
        let (count, in_hands) = self.inner.line.call(called, &*wake).await?;
        self.inner.wakes.push(Duration::ZERO);
        if !in_hands.is_empty() {
            tokio::spawn(call_when_put_back(self.downgrade(), in_hands));
        }
        Ok(count)
    }

    /// Calls these jobs, if limits have changed since `version`: they were put off by the old ones.
    #[cfg(feature = "apalis")]
    pub(crate) async fn call_if_changed(&self, version: u64, jobs: &[String]) {
        if version == self.version() {
            return;
        }
        let Some(wake) = self.wake() else { return };
        match wake.wake(jobs).await {
            Ok(_) => self.inner.wakes.push(Duration::ZERO),
            Err(error) => {
                tracing::warn!(%error, "jobs that were put off while limits changed cannot be called");
            }
        }
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

    /// Forgets jobs that were removed from the framework, or ended there, while they waited in line, and calls those behind them. Answers how
    /// many. A task of the gate does so every minute.
    pub async fn forget_ended(&self) -> Result<u64, Error> {
        let Some(wake) = self.wake() else { return Ok(0) };
        let (count, lines) = self.inner.line.forget_ended(&*wake).await?;
        if count > 0 {
            tracing::info!(
                jobs = count,
                "jobs that were removed, or ended without the gate, are taken out of the line"
            );
            self.call(&Called::Of { lines, label: None }).await?;
        }
        Ok(count)
    }

    /// Calls the first jobs of these lines: something was released.
    pub(crate) async fn call_next(&self, lines: &[Uuid]) {
        self.call_first(lines, 1).await;
    }

    /// Calls the next jobs of these lines, whose limits have room and in each of which so many jobs do not count any more. What held up those
    /// jobs may hold up the next, too, so that more are called than may run.
    pub(super) async fn call_behind(&self, left: &BTreeMap<Uuid, usize>) {
        let Some(most) = left.values().max() else { return };
        let lines: Vec<Uuid> = left.keys().copied().collect();
        let count = most.saturating_mul(CALLED_FOR_EACH).min((MOST_CALLED / lines.len()).max(1));
        self.call_first(&lines, count).await;
    }

    async fn call_first(&self, lines: &[Uuid], count: usize) {
        let Some(wake) = self.wake() else { return };
        match self.inner.line.next(lines, i32::try_from(count).unwrap_or(i32::MAX)).await {
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

/// Calls jobs that workers had in their hands, one after the other as they are put back.
async fn call_when_put_back(gate: WeakGate, mut jobs: Vec<String>) {
    let mut pause = IN_HANDS.0;
    for _ in 0..IN_HANDS_TIMES {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(IN_HANDS.1);
        let Some(gate) = gate.upgrade() else { return };
        let Some(wake) = gate.wake() else { return };
        // First, as above. What cannot be read now is asked for again.
        let in_hands = wake.in_hands(&jobs).await;
        let called = wake.wake(&jobs).await;
        if called.as_ref().is_ok_and(|called| *called > 0) {
            gate.inner.wakes.push(Duration::ZERO);
        }
        match (in_hands, called) {
            (Ok(in_hands), Ok(_)) if in_hands.is_empty() => return,
            (Ok(in_hands), Ok(_)) => jobs = in_hands,
            (Err(error), _) | (_, Err(error)) => {
                tracing::debug!(%error, "waiting jobs cannot be called; that is tried again");
            }
        }
    }
}

/// Takes removed jobs out of the line for as long as the gate is there.
pub(super) async fn forget_ended(gate: WeakGate) {
    loop {
        tokio::time::sleep(FORGOTTEN_EVERY).await;
        let Some(gate) = gate.upgrade() else { return };
        if let Err(error) = gate.forget_ended().await {
            tracing::warn!(%error, "jobs that were removed cannot be taken out of the line; that is tried again");
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
