//! What became of jobs in the last hour, for people who look.
//!
//! Each gate counts in memory and adds that to a table every few seconds, by minute and label, so that the page has the numbers of all workers.
//! Nothing is decided by them. What a worker had not written when it was killed is missing, and nothing is counted twice.

use std::collections::BTreeMap;

use parking_lot::Mutex;

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

/// What was counted and is not written yet, by label. There are as many labels as policies.
#[derive(Debug, Default)]
pub(crate) struct History {
    counts: Mutex<BTreeMap<String, JobCounts>>,
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

    /// A job was held up by a limit of this label.
    pub(crate) fn held_up(&self, label: &str, behaviour: OnExceeded) {
        let mut counts = self.counts.lock();
        of(&mut counts, ALL).held_up(behaviour);
        if label != ALL {
            of(&mut counts, label).held_up(behaviour);
        }
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
        Ok(())
    }
}

fn of<'a>(counts: &'a mut BTreeMap<String, JobCounts>, label: &str) -> &'a mut JobCounts {
    counts.entry(label.to_owned()).or_default()
}
