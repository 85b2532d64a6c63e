//! Reads the tables of the line: which jobs wait under each label and for what, when the backlog will be done, and what is closed.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};
use tollgate::Key;
use uuid::Uuid;

use super::reader::{JobsReader, MOST_KEYS, MOST_ROWS, unsigned};
use super::{ClosedLabel, JobHold, JobKey, JobsOverview, WaitingJob};
use crate::limits::{JobLimits, JobScope, JobsConfig};
use crate::plan::closable;

/// How many closed keys are shown, and how many jobs of the line.
const MOST_CLOSED: i64 = 50;
const MOST_JOBS: i64 = 40;

/// How many points a forecast has.
const POINTS: usize = 60;

impl JobsReader {
    pub(super) async fn line(
        &self,
        connection: &mut PgConnection,
        jobs: &JobsConfig,
    ) -> Result<JobsOverview, sqlx::Error> {
        let now: i64 = sqlx::query_scalar(self.line.sql("select {prefix}job_now_us()"))
            .fetch_one(&mut *connection)
            .await?;
        let scopes: Vec<(String, &JobLimits)> = jobs
            .scopes()
            .filter_map(|(scope, limits)| Some((scope.key().ok()?.into_canonical(), limits)))
            .collect();
        let more_keys = scopes.len().saturating_sub(MOST_KEYS);
        let mut overview = JobsOverview {
            now_us: unsigned(now),
            waiting: 0,
            is_cut: false,
            next_slot: None,
            backlog_ends: None,
            longest_wait: None,
            forecast: Vec::new(),
            keys: scopes.iter().take(MOST_KEYS).map(|(key, limits)| JobKey::of(key, limits)).collect(),
            more_keys,
            holds: Vec::new(),
            line: Vec::new(),
            closed: Vec::new(),
            workers: None,
            hour: None,
            lately: Vec::new(),
        };
        self.by_label(connection, now, &mut overview.keys).await?;
        self.by_slot(connection, now, jobs, &mut overview).await?;
        overview.line = self.first(connection, now, jobs).await?;
        overview.closed = self.closed(connection, now, &overview.keys).await?;
        for closed in &overview.closed {
            let whole = |key: &&mut JobKey| key.key == closed.label && closed.values == 0;
            overview.keys.iter_mut().filter(whole).for_each(|key| key.closed = Some(closed.wait));
        }
        Ok(overview)
    }

    /// The waiting jobs of each label.
    async fn by_label(
        &self,
        connection: &mut PgConnection,
        now: i64,
        keys: &mut [JobKey],
    ) -> Result<(), sqlx::Error> {
        let labels: Vec<&str> = keys.iter().map(|key| key.key.as_str()).collect();
        let text = "select w.jobs, w.next_us, (select max(l.slot_us) from {prefix}job_line l where l.label = k.label)
            from unnest($1::text[]) with ordinality as k(label, number)
            cross join lateral (
              select count(distinct l.job) as jobs, min(l.slot_us) as next_us from (
                select job, slot_us from {prefix}job_line where label = k.label order by slot_us limit $2) as l) as w
            order by k.number";
        let rows =
            sqlx::query(self.line.sql(text)).bind(labels).bind(MOST_ROWS).fetch_all(&mut *connection).await?;
        for (key, row) in keys.iter_mut().zip(rows) {
            key.waiting = unsigned(row.try_get(0)?);
            key.next_slot = row.try_get::<Option<i64>, _>(1)?.map(|at| after(now, at));
            key.backlog_ends = row.try_get::<Option<i64>, _>(2)?.map(|at| after(now, at));
        }
        Ok(())
    }

    /// The whole line in one look: by what holds jobs up, and by when they expect their turn.
    async fn by_slot(
        &self,
        connection: &mut PgConnection,
        now: i64,
        jobs: &JobsConfig,
        overview: &mut JobsOverview,
    ) -> Result<(), sqlx::Error> {
        let text = "select min(slot_us), max(slot_us) from {prefix}job_waiting";
        let row = sqlx::query(self.line.sql(text)).fetch_one(&mut *connection).await?;
        let (Some(first), Some(last)): (Option<i64>, Option<i64>) = (row.try_get(0)?, row.try_get(1)?) else {
            return Ok(());
        };
        (overview.next_slot, overview.backlog_ends) = (Some(after(now, first)), Some(after(now, last)));
        let points = i64::try_from(POINTS).unwrap_or(i64::MAX);
        let span = last.saturating_sub(now).max(1);
        let text = "select w.binding, w.bucket, count(*), coalesce(sum(w.delays), 0)::bigint, max(w.slot_us), min(w.since_us)
            from (select binding, delays, slot_us, since_us,
                least($4 - 1, greatest(0, slot_us - $2) / greatest(1, $3 / $4))::bigint as bucket
              from {prefix}job_waiting order by slot_us limit $1) as w
            group by grouping sets ((w.binding), (w.bucket))";
        let rows = sqlx::query(self.line.sql(text))
            .bind(MOST_ROWS)
            .bind(now)
            .bind(span)
            .bind(points)
            .fetch_all(&mut *connection)
            .await?;
        let mut buckets = vec![0; POINTS];
        for row in rows {
            let count = unsigned(row.try_get(2)?);
            let since = after(row.try_get(5)?, now);
            if let Some(bucket) = row.try_get::<Option<i64>, _>(1)? {
                let bucket = usize::try_from(bucket).unwrap_or(0).min(POINTS - 1);
                buckets[bucket] += count;
                overview.waiting += count;
                overview.longest_wait = overview.longest_wait.max(Some(since));
                continue;
            }
            let limit: String = row.try_get(0)?;
            let key = key_of(jobs, &limit);
            if let Some(key) = overview.keys.iter_mut().find(|one| Some(&one.key) == key.as_ref()) {
                key.delays += unsigned(row.try_get(3)?);
            }
            // A job that has just come has no binding limit yet.
            if !limit.is_empty() {
                overview.holds.push(JobHold { limit, key, jobs: count, ends: after(now, row.try_get(4)?) });
            }
        }
        overview.holds.sort_by(|one, other| {
            other.ends.cmp(&one.ends).then(other.jobs.cmp(&one.jobs)).then(one.limit.cmp(&other.limit))
        });
        overview.holds.truncate(MOST_KEYS);
        overview.is_cut = overview.waiting >= unsigned(MOST_ROWS);
        let mut left = overview.waiting;
        overview.forecast.push(left);
        for bucket in buckets {
            left -= bucket;
            overview.forecast.push(left);
        }
        Ok(())
    }

    /// The first of the line.
    async fn first(
        &self,
        connection: &mut PgConnection,
        now: i64,
        jobs: &JobsConfig,
    ) -> Result<Vec<WaitingJob>, sqlx::Error> {
        let text =
            "select left(job, 64), left(job_type, 64), left(queue, 64), since_us, slot_us, delays, binding
            from {prefix}job_waiting order by slot_us, job limit $1";
        let rows = sqlx::query(self.line.sql(text)).bind(MOST_JOBS).fetch_all(&mut *connection).await?;
        let read = |row: PgRow| {
            let limit: String = row.try_get(6)?;
            let delays: i32 = row.try_get(5)?;
            Ok(WaitingJob {
                job: row.try_get(0)?,
                job_type: row.try_get(1)?,
                queue: row.try_get(2)?,
                waited: after(row.try_get(3)?, now),
                slot: after(now, row.try_get(4)?),
                delays: u64::try_from(delays).unwrap_or(0),
                key: key_of(jobs, &limit),
                limit,
            })
        };
        rows.into_iter().map(read).collect()
    }

    async fn closed(
        &self,
        connection: &mut PgConnection,
        now: i64,
        keys: &[JobKey],
    ) -> Result<Vec<ClosedLabel>, sqlx::Error> {
        let whole: Vec<Uuid> = keys.iter().map(|key| closable(&key.key)).collect();
        let text = "select label, max(until_us), (array_agg(reason order by until_us desc))[1],
              count(*) filter (where not key = any($3))
            from {prefix}job_closed where until_us > $1 group by label order by 2 desc, 1 limit $2";
        let rows = sqlx::query(self.line.sql(text))
            .bind(now)
            .bind(MOST_CLOSED)
            .bind(whole)
            .fetch_all(&mut *connection)
            .await?;
        let read = |row: PgRow| {
            let label: String = row.try_get(0)?;
            let waiting = keys.iter().find(|key| key.key == label).map_or(0, |key| key.waiting);
            Ok(ClosedLabel {
                wait: after(now, row.try_get(1)?),
                reason: row.try_get(2)?,
                values: unsigned(row.try_get(3)?),
                waiting,
                label,
            })
        };
        rows.into_iter().map(read).collect()
    }
}

impl JobKey {
    fn of(key: &str, limits: &JobLimits) -> JobKey {
        JobKey {
            key: key.to_owned(),
            on_exceeded: limits.on_exceeded,
            shadow: limits.shadow,
            split_by: limits.key.clone(),
            limits: Vec::new(),
            shared: limits.limits.clone(),
            running: None,
            waiting: 0,
            next_slot: None,
            backlog_ends: None,
            delays: 0,
            closed: None,
            hour: None,
        }
    }
}

/// Whose limit this is.
fn key_of(jobs: &JobsConfig, limit: &str) -> Option<String> {
    let is_of = |(scope, _): &(JobScope<'_>, &JobLimits)| {
        let rest = limit.strip_prefix(&scope.limit_name());
        rest.is_some_and(|rest| rest.is_empty() || rest == ".running" || rest.starts_with(".also-"))
    };
    jobs.scopes().find(is_of).and_then(|(scope, _)| scope.key().ok()).map(Key::into_canonical)
}

/// From one instant of the database's clock to another; nothing if that has passed.
fn after(from_us: i64, to_us: i64) -> Duration {
    Duration::from_micros(unsigned(to_us.saturating_sub(from_us)))
}
