//! What became of jobs in the last hour, and which were held up last, for people who look.
//!
//! Each gate counts in memory and adds that to a table every few seconds, by minute and label, so that the page has the numbers of all workers.
//! Nothing is decided by them. What a worker had not written when it was killed is missing, and nothing is counted twice.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sqlx::postgres::PgConnection;

use crate::limits::OnExceeded;
use crate::line::Line;
use crate::plan::Plan;

/// What became of jobs: how many started, and how often one was held up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobCounts {
    /// How many started.
    pub started: u64,
    /// How often one was put off; one job may be several times.
    pub delayed: u64,
    /// How many failed because of a limit.
    pub rejected: u64,
    /// How many were skipped.
    pub skipped: u64,
}

impl JobCounts {
    fn held_up(&mut self, behaviour: OnExceeded) {
        match behaviour {
            OnExceeded::Delay => self.delayed += 1,
            OnExceeded::Reject => self.rejected += 1,
            OnExceeded::Skip => self.skipped += 1,
        }
    }
}

/// The label of all jobs together.
pub(crate) const ALL: &str = "";

/// How many of the last jobs that were held up are kept here until they are written, and in the table.
const LATELY: usize = 20;
const LATELY_ROWS: i64 = 50;

/// How much is kept of the name of a type, which anybody may have chosen who pushes jobs.
const LONGEST_TYPE: usize = 64;

/// What was counted and is not written yet, by label. There are as many labels as policies.
#[derive(Debug, Default)]
pub(crate) struct History {
    counts: Mutex<BTreeMap<String, JobCounts>>,
    lately: Mutex<VecDeque<HeldUp>>,
}

/// A job that was held up.
#[derive(Debug)]
struct HeldUp {
    at: Instant,
    job_type: String,
    label: String,
    behaviour: OnExceeded,
    wait: Duration,
}

impl History {
    /// A job started, under each of its labels.
    pub(crate) fn started(&self, plan: &Plan) {
        let mut labels: Vec<&str> = plan.charges.iter().map(|charge| charge.label.as_str()).collect();
        labels.push(ALL);
        labels.sort_unstable();
        labels.dedup();
        let mut counts = self.counts.lock();
        for label in labels {
            of(&mut counts, label).started += 1;
        }
    }

    /// A job was held up by a limit of this label; for so long, if it was delayed.
    pub(crate) fn held_up(&self, plan: &Plan, label: &str, behaviour: OnExceeded, wait: Duration) {
        {
            let mut counts = self.counts.lock();
            of(&mut counts, ALL).held_up(behaviour);
            if label != ALL {
                of(&mut counts, label).held_up(behaviour);
            }
        }
        // No text of PostgreSQL has a NUL, and nobody reads the others.
        let readable = plan.job_type.chars().filter(|letter| !letter.is_control());
        let held_up = HeldUp {
            at: Instant::now(),
            job_type: readable.take(LONGEST_TYPE).collect(),
            label: label.to_owned(),
            behaviour,
            wait,
        };
        let mut lately = self.lately.lock();
        if lately.len() == LATELY {
            lately.pop_front();
        }
        lately.push_back(held_up);
    }

    /// Adds what was counted to the table. Without a connection it is kept; what was sent is not sent again.
    pub(crate) async fn write(&self, line: &Line) -> Result<(), sqlx::Error> {
        if self.counts.lock().is_empty() {
            return Ok(());
        }
        let mut connection = line.pool.acquire().await?;
        let counts = std::mem::take(&mut *self.counts.lock());
        let each = |of: fn(&JobCounts) -> u64| -> Vec<i64> {
            counts.values().map(|counts| i64::try_from(of(counts)).unwrap_or(i64::MAX)).collect()
        };
        let text = "insert into {prefix}job_history as h (minute, label, started, delayed, rejected, skipped)
            select {prefix}job_now_us() / 60000000 * 60, u.* from unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[]) as u
            order by 2
            on conflict (minute, label) do update set started = h.started + excluded.started, delayed = h.delayed + excluded.delayed,
              rejected = h.rejected + excluded.rejected, skipped = h.skipped + excluded.skipped";
        sqlx::query(line.sql(text))
            .bind(counts.keys().cloned().collect::<Vec<_>>())
            .bind(each(|counts| counts.started))
            .bind(each(|counts| counts.delayed))
            .bind(each(|counts| counts.rejected))
            .bind(each(|counts| counts.skipped))
            .execute(&mut *connection)
            .await?;
        self.write_lately(line, &mut connection).await
    }

    /// Adds the last that were held up to the table, and removes those that are not among the last any more.
    async fn write_lately(&self, line: &Line, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let lately = std::mem::take(&mut *self.lately.lock());
        if lately.is_empty() {
            return Ok(());
        }
        let us = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        let text = "with newest as (
              insert into {prefix}job_lately (at_us, job_type, label, behavior, wait_us)
              select {prefix}job_now_us() - u.ago_us, u.job_type, u.label, u.behavior, u.wait_us
              from unnest($1::bigint[], $2::text[], $3::text[], $4::text[], $5::bigint[]) as u(ago_us, job_type, label, behavior, wait_us)
              returning 1)
            delete from {prefix}job_lately where id in (select id from {prefix}job_lately order by at_us desc, id desc
              offset greatest(0, $6 - (select count(*) from newest)))";
        sqlx::query(line.sql(text))
            .bind(lately.iter().map(|one| us(one.at.elapsed())).collect::<Vec<_>>())
            .bind(lately.iter().map(|one| one.job_type.as_str()).collect::<Vec<_>>())
            .bind(lately.iter().map(|one| one.label.as_str()).collect::<Vec<_>>())
            .bind(lately.iter().map(|one| one.behaviour.name()).collect::<Vec<_>>())
            .bind(lately.iter().map(|one| us(one.wait)).collect::<Vec<_>>())
            .bind(LATELY_ROWS)
            .execute(connection)
            .await?;
        Ok(())
    }
}

fn of<'a>(counts: &'a mut BTreeMap<String, JobCounts>, label: &str) -> &'a mut JobCounts {
    counts.entry(label.to_owned()).or_default()
}
