//! Limits on background jobs, by type, by queue and for all of them, between claiming a job and running it.
//!
//! A job is charged to the limits of its type, its queue, all jobs, and any limit that the web tier uses too: all or none. One that
//! does not fit goes back for its own moment, fails, or is skipped; it uses up no attempt, and no herd wakes at once.
//!
//! The path of a job through this crate: what it is (`job.rs`), what it is charged (`policy.rs`, `plan.rs`), the gate (`gate.rs`; read it first),
//! the line of waiting jobs (`line.rs`), the decision (`gate/decision.rs`), and its translation for a framework ([`adapter`], for apalis on
//! PostgreSQL). `tollgate` counts the limits and the kernel computes the turns: nothing here counts.

#[cfg(feature = "apalis")]
pub mod adapter;
mod config;
mod error;
mod follow;
mod gate;
mod history;
mod job;
mod limits;
mod line;
mod metrics;
mod open;
mod overview;
mod plan;
mod policy;
#[cfg(feature = "apalis")]
mod read_ahead;
mod wake;

pub use error::Error;
pub use gate::decision::{Delay, JobDecision, RATE_LIMIT_EXCEEDED, RunPermit};
pub use gate::{JobGate, JobGateBuilder, JobStatus};
pub use history::JobCounts;
pub use job::Job;
pub use limits::{JobLimits, JobScope, JobsConfig, MissingField, OnExceeded};
pub use line::ClosedKey;
pub use metrics::METRICS;
pub use overview::{
    ClosedLabel, HeldUpJob, JobCount, JobHold, JobKey, JobWorkers, JobsOverview, JobsReader, OpenedKey,
    Unreadable, WaitingJob,
};
pub use plan::Plan;
pub use policy::{JobPolicy, Jobs};
pub use wake::Wake;

/// The program of docs/jobs.md is compiled.
#[cfg(all(doctest, feature = "apalis"))]
#[doc = include_str!("../../../docs/jobs.md")]
struct JobsPage;
