//! What an operator sees of jobs at one moment, of all workers together: plain data, for the page, `GET /v1/jobs` and `tollgate jobs status`.
//!
//! `overview/reader.rs` reads it from the jobs' database. No tenant and no key of one is in it: lines are known by the labels `job:<type>`,
//! `queue:<name>` and `global`.

mod line;
mod reader;

use std::time::Duration;

use crate::history::JobCounts;
use crate::limits::OnExceeded;
use crate::line::{BY_HAND, REMOTE_SIDE};

pub use reader::JobsReader;

/// What there is to see at one moment.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobsOverview {
    /// The database's clock, in µs since 1970.
    pub now_us: u64,
    /// How many jobs wait, whatever for.
    pub waiting: u64,
    /// Whether there are more than were looked at.
    pub is_cut: bool,
    /// When the first of them expects its turn, and the last: the end of the backlog.
    pub next_slot: Option<Duration>,
    /// See `next_slot`.
    pub backlog_ends: Option<Duration>,
    /// Since when the one waits that has waited longest.
    pub longest_wait: Option<Duration>,
    /// How many of them will still wait, at evenly spaced moments from now to the end of the backlog, if nothing new comes.
    pub forecast: Vec<u64>,
    /// Each type, queue and all.
    pub keys: Vec<JobKey>,
    /// How many keys there are besides.
    pub more_keys: usize,
    /// What holds jobs up, the one that ends last first.
    pub holds: Vec<JobHold>,
    /// The first of the line.
    pub line: Vec<WaitingJob>,
    /// What is closed.
    pub closed: Vec<ClosedLabel>,
    /// The workers, if the framework keeps a list.
    pub workers: Option<JobWorkers>,
    /// What became of jobs in the last hour, as far as workers have written it down; `None` if they are of a version that does not.
    pub hour: Option<JobCounts>,
    /// The last jobs that were held up, the newest first, as far as workers have written it down.
    pub lately: Vec<HeldUpJob>,
}

/// A job that was held up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HeldUpJob {
    /// How long ago.
    pub ago: Duration,
    /// Its type.
    pub job_type: String,
    /// Whose limit it was: `job:<type>`, `queue:<name>` or `global`; `shared` for a limit that others use too.
    pub key: String,
    /// `delay`, `reject` or `skip`.
    pub behaviour: String,
    /// For how long it was delayed.
    pub wait: Duration,
}

/// One type of job, one queue, or all jobs.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobKey {
    /// `job:<type>`, `queue:<name>` or `global`.
    pub key: String,
    /// What becomes of a job that is over its limits.
    pub on_exceeded: OnExceeded,
    /// Whether its limits are in shadow mode.
    pub shadow: bool,
    /// The field that splits its limits: each of its values is counted by itself, so there is no one count.
    pub split_by: Option<String>,
    /// Its limits. Their counts are missing where a field splits them, and where the store cannot be asked.
    pub limits: Vec<JobCount>,
    /// Limits of `[limits]` that its jobs are charged to too.
    pub shared: Vec<String>,
    /// How many run now, where their number is limited.
    pub running: Option<u64>,
    /// How many jobs stand in its lines.
    pub waiting: u64,
    /// When the first and the last of them expect their turn.
    pub next_slot: Option<Duration>,
    /// See `next_slot`.
    pub backlog_ends: Option<Duration>,
    /// How often the jobs that wait were put off by one of its limits.
    pub delays: u64,
    /// For how long it is closed yet.
    pub closed: Option<Duration>,
    /// What became of its jobs in the last hour: all that started, and those that one of its limits held up.
    pub hour: Option<JobCounts>,
}

/// How one limit stands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobCount {
    /// Its name.
    pub limit: String,
    /// In words.
    pub rule: String,
    /// What it allows.
    pub capacity: u64,
    /// Whether it counts runs at once, which end by themselves.
    pub is_concurrency: bool,
    /// How many count now.
    pub count: Option<u64>,
    /// The time until nothing counts any more.
    pub resets_after: Option<Duration>,
}

/// A limit that holds jobs up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JobHold {
    /// The limit.
    pub limit: String,
    /// Whose it is: `job:<type>`, `queue:<name>` or `global`; `None` for a limit that others use too.
    pub key: Option<String>,
    /// How many jobs wait for it.
    pub jobs: u64,
    /// When the last of them expects its turn.
    pub ends: Duration,
}

/// A job that waits.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WaitingJob {
    /// Its id in the framework.
    pub job: String,
    /// Its type.
    pub job_type: String,
    /// Its queue.
    pub queue: String,
    /// For how long it has waited.
    pub waited: Duration,
    /// When it expects its turn.
    pub slot: Duration,
    /// How often it was put off; a sleep that only went on, because `max_delay` caps one, does not count.
    pub delays: u64,
    /// The limit that holds it up, and whose it is.
    pub limit: String,
    /// See `limit`.
    pub key: Option<String>,
}

/// What is closed under one label.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClosedLabel {
    /// `job:<type>`, `queue:<name>` or `global`; `shared` for keys of limits that others use too.
    pub label: String,
    /// For how long yet.
    pub wait: Duration,
    /// By whom or why.
    pub reason: String,
    /// How many values of the field that splits it are closed, and not the key as a whole.
    pub values: u64,
    /// How many jobs stand in its lines.
    pub waiting: u64,
}

impl ClosedLabel {
    /// Who closed it, without what they wrote.
    pub fn reason_for_all(&self) -> &'static str {
        match self.reason.as_str() {
            REMOTE_SIDE => REMOTE_SIDE,
            BY_HAND => BY_HAND,
            _ => "by an admin",
        }
    }
}

/// What became of opening a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpenedKey {
    /// What is shown of the key.
    pub label: String,
    /// How many were closed: itself, and values of the field that splits it.
    pub opened: u64,
    /// How many of its jobs are due now because of that. `None` if they could not be called: they look again when their slot or their longest sleep
    /// has passed.
    pub called: Option<u64>,
}

/// The workers of a framework.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobWorkers {
    /// How many there were in the last day.
    pub known: u64,
    /// How many of them were heard from lately.
    pub heard_from: u64,
}

/// Why the database could not be read, in words that have no address in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unreadable {
    /// Nobody answers there, or not in time.
    Unreachable,
    /// The tables of the line are not there.
    NoTables,
    /// The role lacks a right, or its password is wrong.
    NoRight,
    /// Anything else; the log has it.
    Other,
}

impl Unreadable {
    /// As a sentence.
    pub const fn words(self) -> &'static str {
        match self {
            Unreadable::Unreachable => "it does not answer",
            Unreadable::NoTables => {
                "the job tables are not there; the first worker makes them, or a look at [store.postgres] prefix helps"
            }
            Unreadable::NoRight => "the database role lacks a right",
            Unreadable::Other => "it answers with an error, which the log has",
        }
    }
}
