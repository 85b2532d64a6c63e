//! Background jobs on the page, read from their database, so that all workers are included.
//!
//! The database is read on demand, at most once a second for all viewers, and less often if it is slow: reading never takes more
//! than a twentieth of its time. A database that cannot be read is shown as such, and nothing else depends on it.
//!
//! Without the admin token a viewer sees hashes of job ids, as of all keys, and no reasons of closed keys.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use serde::Serialize;
use tollgate::store::Micros;
use tollgate_jobs::{
    ClosedLabel, HeldUpJob, JobCount, JobCounts, JobHold, JobKey, JobsOverview, JobsReader, Unreadable,
    WaitingJob,
};

use crate::app::{App, State};

/// How long an answer is good for, at least; and how many times as long as it took.
const GOOD_FOR: Duration = Duration::from_secs(1);
const TIMES: u32 = 20;

/// How many minutes of the past are kept, one number each.
const MINUTES: usize = 60;

/// The last reading.
#[derive(Default)]
pub(crate) struct JobsView {
    /// The reader, and the database that it was made for.
    reader: Mutex<Option<(Option<String>, JobsReader)>>,
    /// One reader for all viewers.
    last: tokio::sync::Mutex<Option<Last>>,
    /// How many waited at the end of each minute, by the seconds since 1970.
    past: Mutex<VecDeque<(u64, u64)>>,
}

struct Last {
    at: Instant,
    good_for: Duration,
    text: Texts,
    /// Since when it cannot be read, in seconds since 1970.
    down_since: Option<u64>,
}

/// An answer for everybody, and one for admins.
#[derive(Clone)]
struct Texts {
    for_all: Bytes,
    for_admins: Bytes,
}

impl Texts {
    fn of(mut answer: Answer, app: &App) -> Texts {
        answer.shows_ids = true;
        let for_admins = written(&answer);
        answer.hide(app);
        Texts { for_all: written(&answer), for_admins }
    }

    fn get(&self, shows_ids: bool) -> Bytes {
        if shows_ids { self.for_admins.clone() } else { self.for_all.clone() }
    }
}

#[derive(Serialize)]
struct Answer {
    /// Whether the config says anything of jobs.
    configured: bool,
    /// Whether ids of jobs and reasons are shown as they are.
    shows_ids: bool,
    database: Database,
    /// Where the limits are counted.
    store: &'static str,
    #[serde(flatten)]
    jobs: Jobs,
}

#[derive(Serialize)]
struct Database {
    /// `up`, `down` or `none`.
    state: &'static str,
    since: Option<u64>,
    problem: Option<String>,
}

#[derive(Default, Serialize)]
struct Jobs {
    now_ms: u64,
    waiting: u64,
    is_cut: bool,
    next_slot_ms: Option<u64>,
    backlog_ends_ms: Option<u64>,
    longest_wait_ms: Option<u64>,
    workers: Option<Workers>,
    forecast: Forecast,
    past: Vec<Past>,
    keys: Vec<Key>,
    more_keys: usize,
    holds: Vec<Hold>,
    line: Vec<Waiting>,
    closed: Vec<Closed>,
    hour: Option<Counts>,
    lately: Vec<HeldUp>,
}

/// What became of jobs in the last hour.
#[derive(Serialize)]
struct Counts {
    started: u64,
    delayed: u64,
    rejected: u64,
    skipped: u64,
}

#[derive(Serialize)]
struct Workers {
    known: u64,
    heard_from: u64,
}

#[derive(Default, Serialize)]
struct Forecast {
    step_ms: u64,
    waiting: Vec<u64>,
}

#[derive(Serialize)]
struct Past {
    /// In seconds since 1970.
    at: u64,
    waiting: u64,
}

#[derive(Serialize)]
struct Key {
    key: String,
    on_exceeded: &'static str,
    shadow: bool,
    split_by: Option<String>,
    limits: Vec<Limit>,
    shared: Vec<String>,
    running: Option<u64>,
    waiting: u64,
    next_slot_ms: Option<u64>,
    backlog_ends_ms: Option<u64>,
    delays: u64,
    hour: Option<Counts>,
    closed_ms: Option<u64>,
}

#[derive(Serialize)]
struct Limit {
    limit: String,
    rule: String,
    count: Option<u64>,
    capacity: u64,
    resets_after_ms: Option<u64>,
    concurrency: bool,
}

#[derive(Serialize)]
struct Hold {
    limit: String,
    key: Option<String>,
    jobs: u64,
    ends_ms: u64,
}

#[derive(Serialize)]
struct Waiting {
    job: String,
    job_type: String,
    queue: String,
    waited_ms: u64,
    slot_ms: u64,
    delays: u64,
    limit: String,
    key: Option<String>,
}

#[derive(Serialize)]
struct HeldUp {
    ago_ms: u64,
    job_type: String,
    key: String,
    behavior: String,
    wait_ms: u64,
}

#[derive(Serialize)]
struct Closed {
    key: String,
    by: String,
    #[serde(skip)]
    by_for_all: &'static str,
    opens_in_ms: u64,
    values: u64,
    waiting: u64,
}

impl JobsView {
    /// The reader of the database that the config names now.
    pub(crate) fn reader(&self, state: &State) -> Result<JobsReader, String> {
        let config = &state.config;
        let own = config.jobs.database.clone();
        let mut known = self.reader.lock();
        if let Some((_, reader)) = known.as_ref().filter(|(database, _)| *database == own) {
            return Ok(reader.clone());
        }
        let reader = JobsReader::of(&config.gate, &config.jobs).map_err(|error| error.to_string())?;
        *known = Some((own, reader.clone()));
        Ok(reader)
    }

    /// All there is to see, as JSON, with ids of jobs and reasons or without.
    pub(crate) async fn answer(&self, app: &App, shows_ids: bool) -> Bytes {
        let state = app.state();
        if state.config.jobs.is_empty() {
            return Texts::of(Answer::without("none", None, None, &state), app).get(shows_ids);
        }
        let mut last = self.last.lock().await;
        if let Some(known) = last.as_ref().filter(|last| last.at.elapsed() < last.good_for) {
            return known.text.get(shows_ids);
        }
        let begun = Instant::now();
        let down_since = last.as_ref().and_then(|last| last.down_since);
        let (answer, down_since) = match self.read(&state).await {
            Ok(overview) => {
                if down_since.is_some() {
                    tracing::info!("the jobs' database can be read again");
                }
                (Answer::of(overview, self.past(), &state), None)
            }
            Err(problem) => {
                let since = down_since.unwrap_or_else(|| app.stats.second());
                if down_since.is_none() {
                    tracing::warn!("the jobs' database cannot be read for the page: {problem}");
                }
                (Answer::without("down", Some(since), Some(problem), &state), Some(since))
            }
        };
        let good_for = GOOD_FOR.max(begun.elapsed().saturating_mul(TIMES).min(Duration::from_secs(60)));
        let text = Texts::of(answer, app);
        let shown = text.get(shows_ids);
        *last = Some(Last { at: Instant::now(), good_for, text, down_since });
        shown
    }

    async fn read(&self, state: &State) -> Result<JobsOverview, String> {
        let reader = self.reader(state)?;
        let read = reader.read(&state.gate, &state.config.jobs).await;
        read.map_err(|(why, error)| {
            if why == Unreadable::Other {
                tracing::warn!(%error, "the jobs' database answers with an error");
            }
            why.words().to_owned()
        })
    }

    /// Reads again after a change.
    pub(crate) async fn changed(&self) {
        *self.last.lock().await = None;
    }

    fn past(&self) -> Vec<Past> {
        self.past.lock().iter().map(|(at, waiting)| Past { at: *at, waiting: *waiting }).collect()
    }

    /// Notes how many wait, once a minute. What cannot be read leaves a gap.
    pub(crate) async fn note(app: Arc<App>, second: u64) {
        let state = app.state();
        if state.config.jobs.is_empty() {
            return;
        }
        let Ok(reader) = app.jobs.reader(&state) else { return };
        if let Ok(waiting) = reader.waiting().await {
            let mut past = app.jobs.past.lock();
            past.push_back((second, waiting));
            while past.len() > MINUTES {
                past.pop_front();
            }
        }
    }
}

/// Nothing in it can fail to be written: names are text and numbers are numbers.
fn written(answer: &Answer) -> Bytes {
    serde_json::to_vec(answer).unwrap_or_default().into()
}

/// Rounded up, as everywhere.
fn ms(span: Duration) -> u64 {
    Micros::from(span).get().div_ceil(1_000)
}

impl Answer {
    /// Takes out what only admins see.
    fn hide(&mut self, app: &App) {
        self.shows_ids = false;
        for job in &mut self.jobs.line {
            job.job = app.stats.key_hash(&job.job);
        }
        for closed in &mut self.jobs.closed {
            closed.by = closed.by_for_all.to_owned();
        }
    }

    fn without(state: &'static str, since: Option<u64>, problem: Option<String>, of: &State) -> Answer {
        Answer {
            configured: !of.config.jobs.is_empty(),
            shows_ids: false,
            database: Database { state, since, problem },
            store: of.config.gate.store.mode.name(),
            jobs: Jobs::default(),
        }
    }

    fn of(overview: JobsOverview, past: Vec<Past>, state: &State) -> Answer {
        let steps = u64::try_from(overview.forecast.len().saturating_sub(1)).unwrap_or(u64::MAX).max(1);
        let jobs = Jobs {
            now_ms: overview.now_us / 1_000,
            waiting: overview.waiting,
            is_cut: overview.is_cut,
            next_slot_ms: overview.next_slot.map(ms),
            backlog_ends_ms: overview.backlog_ends.map(ms),
            longest_wait_ms: overview.longest_wait.map(ms),
            workers: overview.workers.map(|of| Workers { known: of.known, heard_from: of.heard_from }),
            forecast: Forecast {
                step_ms: overview.backlog_ends.map_or(0, |ends| ms(ends).div_ceil(steps)),
                waiting: overview.forecast,
            },
            past,
            keys: overview.keys.into_iter().map(Key::of).collect(),
            more_keys: overview.more_keys,
            holds: overview.holds.into_iter().map(Hold::of).collect(),
            line: overview.line.into_iter().map(Waiting::of).collect(),
            closed: overview.closed.into_iter().map(Closed::of).collect(),
            hour: overview.hour.map(Counts::of),
            lately: overview.lately.into_iter().map(HeldUp::of).collect(),
        };
        Answer { jobs, ..Answer::without("up", None, None, state) }
    }
}

impl Counts {
    fn of(counts: JobCounts) -> Counts {
        let JobCounts { started, delayed, rejected, skipped, .. } = counts;
        Counts { started, delayed, rejected, skipped }
    }
}

impl Key {
    fn of(key: JobKey) -> Key {
        Key {
            key: key.key,
            on_exceeded: key.on_exceeded.name(),
            shadow: key.shadow,
            split_by: key.split_by,
            limits: key.limits.into_iter().map(Limit::of).collect(),
            shared: key.shared,
            running: key.running,
            waiting: key.waiting,
            next_slot_ms: key.next_slot.map(ms),
            backlog_ends_ms: key.backlog_ends.map(ms),
            delays: key.delays,
            hour: key.hour.map(Counts::of),
            closed_ms: key.closed.map(ms),
        }
    }
}

impl Limit {
    fn of(count: JobCount) -> Limit {
        Limit {
            limit: count.limit,
            rule: count.rule,
            count: count.count,
            capacity: count.capacity,
            resets_after_ms: count.resets_after.map(ms),
            concurrency: count.is_concurrency,
        }
    }
}

impl Hold {
    fn of(hold: JobHold) -> Hold {
        Hold { limit: hold.limit, key: hold.key, jobs: hold.jobs, ends_ms: ms(hold.ends) }
    }
}

impl Waiting {
    fn of(job: WaitingJob) -> Waiting {
        Waiting {
            job: job.job,
            job_type: job.job_type,
            queue: job.queue,
            waited_ms: ms(job.waited),
            slot_ms: ms(job.slot),
            delays: job.delays,
            limit: job.limit,
            key: job.key,
        }
    }
}

impl HeldUp {
    fn of(job: HeldUpJob) -> HeldUp {
        HeldUp {
            ago_ms: ms(job.ago),
            job_type: job.job_type,
            key: job.key,
            behavior: job.behaviour,
            wait_ms: ms(job.wait),
        }
    }
}

impl Closed {
    fn of(closed: ClosedLabel) -> Closed {
        Closed {
            by_for_all: closed.reason_for_all(),
            key: closed.label,
            by: closed.reason,
            opens_in_ms: ms(closed.wait),
            values: closed.values,
            waiting: closed.waiting,
        }
    }
}
