//! What becomes of a job: it runs, or it waits, or it has ended.

use std::fmt;
use std::time::Duration;

use tollgate::Permit;
use uuid::Uuid;

use super::JobGate;

/// What becomes of a job.
#[derive(Debug)]
#[must_use]
pub enum JobDecision {
    /// It runs. The permit is released when it has ended, however it ended.
    Run(RunPermit),
    /// It goes back, without using up an attempt.
    Delay(Delay),
    /// It fails for good, with the error [`RATE_LIMIT_EXCEEDED`].
    Reject,
    /// It ends without an error.
    Skip {
        /// The limit that skipped it.
        limit: String,
    },
}

impl JobDecision {
    /// The name used in spans: `run`, `delay`, `reject` or `skip`.
    pub fn name(&self) -> &'static str {
        match self {
            JobDecision::Run(_) => "run",
            JobDecision::Delay(_) => "delay",
            JobDecision::Reject => "reject",
            JobDecision::Skip { .. } => "skip",
        }
    }
}

/// The error of a rejected job.
pub const RATE_LIMIT_EXCEEDED: &str = "Rate limit exceeded";

/// When a job is to be looked at again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delay {
    /// How long from now.
    pub wait: Duration,
    /// The same on the database's clock, in µs since 1970, where that could be asked.
    pub until_us: Option<u64>,
    /// The limit that holds it up.
    pub limit: String,
}

/// Leave to run. What limits on starts took stays taken; leases are released by [`release`](Self::release), when it is dropped, and at
/// the latest when they run out.
#[must_use = "a permit that is dropped is released"]
pub struct RunPermit {
    pub(crate) held: Option<Held>,
}

/// The leases of a run, and the lines of the jobs that wait for them.
pub(crate) struct Held {
    pub(crate) gate: JobGate,
    pub(crate) permit: Permit,
    pub(crate) lines: Vec<Uuid>,
}

impl RunPermit {
    /// Nothing is held.
    pub(crate) fn free() -> RunPermit {
        RunPermit { held: None }
    }

    /// Whether a lease of it is gone: another run may take place beside this one.
    pub fn is_lost(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.permit.is_lost())
    }

    /// Releases the leases and wakes the jobs that wait for them. A second release changes nothing: there is no second permit.
    pub async fn release(self) {
        if let Some(Held { gate, permit, lines }) = self.held {
            // If it fails it is tried again in the background, and the leases end by themselves.
            let _ = permit.release().await;
            gate.call_next(&lines).await;
        }
    }
}

impl fmt::Debug for RunPermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunPermit").field("holds", &self.held.is_some()).finish_non_exhaustive()
    }
}
