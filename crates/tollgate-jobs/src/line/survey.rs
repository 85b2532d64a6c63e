//! The line as seen by many jobs at once, and their places and slots written at once.

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use sqlx::postgres::PgConnection;
use uuid::Uuid;

use super::{GRACE, Line, micros, signed};
use crate::plan::{Plan, PlannedCharge};

/// What many jobs find.
#[derive(Debug)]
pub(crate) struct Survey {
    /// The database's clock, and ours when it answered.
    now_us: u64,
    at: Instant,
    /// The lines of their charges that somebody stands in.
    pub(crate) lines: HashMap<Uuid, LineEnd>,
    /// Those of their keys that are closed, and until when.
    pub(crate) closed: HashMap<Uuid, u64>,
    /// Those of them that wait.
    pub(crate) waiting: HashMap<String, Waits>,
    /// The places of each that waits, by line.
    pub(crate) places_of: HashMap<String, HashMap<Uuid, LinePlace>>,
}

/// A place that a job has in a line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinePlace {
    pub(crate) place: u64,
    /// Whether it does not count for those behind it.
    pub(crate) is_parked: bool,
    /// The units ahead of it.
    pub(crate) ahead: u64,
}

/// The end of a line: its last place, and the units that stand in it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LineEnd {
    pub(crate) last: u64,
    pub(crate) ahead: u64,
}

/// Since when a job waits, when it expects its turn, and the limit that holds it up.
#[derive(Clone, Debug)]
pub(crate) struct Waits {
    pub(crate) since_us: u64,
    pub(crate) slot_us: u64,
    pub(crate) binding: String,
}

/// A place that a job takes.
pub(crate) struct NewPlace<'a> {
    pub(crate) job: &'a str,
    pub(crate) charge: &'a PlannedCharge,
    pub(crate) place: u64,
}

/// When a job expects its turn, and until when it sleeps.
pub(crate) struct NewSlot<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) slot_us: u64,
    pub(crate) until_us: u64,
    pub(crate) binding: String,
    /// The lines in which its place is parked.
    pub(crate) parked: Vec<Uuid>,
}

impl Survey {
    /// The place that a job has in a line.
    pub(crate) fn place_of(&self, plan: &Plan, line: Uuid) -> Option<&LinePlace> {
        self.places_of.get(&plan.job)?.get(&line)
    }

    /// The place that a job takes at the end of a line.
    pub(crate) fn take_place<'a>(&mut self, plan: &'a Plan, charge: &'a PlannedCharge) -> NewPlace<'a> {
        let line = self.lines.entry(charge.line).or_default();
        line.last = line.last.saturating_add(charge.cost);
        line.ahead = line.ahead.saturating_add(charge.cost);
        NewPlace { job: &plan.job, charge, place: line.last }
    }

    /// The database's clock now.
    pub(crate) fn now_us(&self) -> u64 {
        self.now_us.saturating_add(u64::try_from(self.at.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

fn lines_of(plans: &[Plan]) -> Vec<Uuid> {
    let charges = plans.iter().flat_map(|plan| &plan.charges);
    charges.map(|charge| charge.line).collect::<BTreeSet<_>>().into_iter().collect()
}

fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

impl Line {
    /// Locks the lines of these jobs, and then looks at them, in statements of their own: what was there when the locks were had is seen.
    pub(crate) async fn survey(
        &self,
        connection: &mut PgConnection,
        plans: &[Plan],
    ) -> Result<Survey, sqlx::Error> {
        let lines = lines_of(plans);
        let lock = sqlx::query_scalar(self.sql("select {prefix}job_lock_lines($1)")).bind(&lines);
        let now_us: i64 = lock.fetch_one(&mut *connection).await?;
        self.read(connection, plans, &lines, now_us).await
    }

    /// Locks those of these lines that nobody else has locked, and answers which.
    pub(crate) async fn try_lock(
        &self,
        connection: &mut PgConnection,
        lines: &[Uuid],
    ) -> Result<Vec<Uuid>, sqlx::Error> {
        let lock = sqlx::query_scalar(self.sql("select {prefix}job_try_lock_lines($1)")).bind(lines);
        lock.fetch_all(connection).await
    }

    /// Looks at the lines of these jobs without locks: others may take places in them.
    #[cfg(feature = "apalis")]
    pub(crate) async fn glance(
        &self,
        connection: &mut PgConnection,
        plans: &[Plan],
    ) -> Result<Survey, sqlx::Error> {
        let now = sqlx::query_scalar(self.sql("select {prefix}job_now_us()"));
        let now_us: i64 = now.fetch_one(&mut *connection).await?;
        self.read(connection, plans, &lines_of(plans), now_us).await
    }

    async fn read(
        &self,
        connection: &mut PgConnection,
        plans: &[Plan],
        lines: &[Uuid],
        now_us: i64,
    ) -> Result<Survey, sqlx::Error> {
        let at = Instant::now();
        let jobs: Vec<&str> = plans.iter().map(|plan| plan.job.as_str()).collect();
        let closable = plans.iter().flat_map(|plan| plan.closable.iter().copied());
        let closable: Vec<Uuid> = closable.collect::<BTreeSet<_>>().into_iter().collect();
        let ends = sqlx::query_as(self.sql("select key, last, ahead from {prefix}job_line_ends($1, $2)"));
        let ends: Vec<(Uuid, i64, i64)> =
            ends.bind(lines).bind(micros(GRACE)).fetch_all(&mut *connection).await?;
        let closed = "select key, until_us from {prefix}job_closed where key = any($1) and until_us > $2";
        let closed: Vec<(Uuid, i64)> =
            sqlx::query_as(self.sql(closed)).bind(&closable).bind(now_us).fetch_all(&mut *connection).await?;
        let waiting = "select job, since_us, slot_us, binding from {prefix}job_waiting where job = any($1)";
        let waiting: Vec<(String, i64, i64, String)> =
            sqlx::query_as(self.sql(waiting)).bind(&jobs).fetch_all(&mut *connection).await?;
        let mut places_of: HashMap<String, HashMap<Uuid, LinePlace>> = HashMap::new();
        if !waiting.is_empty() {
            let places = "select job, key, place, parked, ahead from {prefix}job_ahead_of($1, $2)";
            let places: Vec<(String, Uuid, i64, bool, i64)> = sqlx::query_as(self.sql(places))
                .bind(&jobs)
                .bind(micros(GRACE))
                .fetch_all(&mut *connection)
                .await?;
            for (job, key, place, is_parked, ahead) in places {
                let place = LinePlace { place: unsigned(place), is_parked, ahead: unsigned(ahead) };
                places_of.entry(job).or_default().insert(key, place);
            }
        }
        let end = |(key, last, ahead)| (key, LineEnd { last: unsigned(last), ahead: unsigned(ahead) });
        let waits = |(job, since_us, slot_us, binding)| {
            (job, Waits { since_us: unsigned(since_us), slot_us: unsigned(slot_us), binding })
        };
        Ok(Survey {
            now_us: unsigned(now_us),
            at,
            lines: ends.into_iter().map(end).collect(),
            closed: closed.into_iter().map(|(key, until_us)| (key, unsigned(until_us))).collect(),
            waiting: waiting.into_iter().map(waits).collect(),
            places_of,
        })
    }

    /// Writes the slots of many jobs, and their new places.
    pub(crate) async fn write(
        &self,
        connection: &mut PgConnection,
        slots: &[NewSlot<'_>],
        places: &[NewPlace<'_>],
    ) -> Result<(), sqlx::Error> {
        fn each<'a, T: 'a, V>(of: &'a [T], value: impl Fn(&'a T) -> V) -> Vec<V> {
            of.iter().map(value).collect()
        }
        let text = "select {prefix}job_put_off($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";
        let parked = slots.iter().flat_map(|slot| {
            let job = slot.plan.job.as_str();
            slot.parked.iter().map(move |line| (job, *line))
        });
        let (parked_jobs, parked_lines): (Vec<&str>, Vec<Uuid>) = parked.unzip();
        sqlx::query(self.sql(text))
            .bind(each(slots, |slot| slot.plan.job.as_str()))
            .bind(each(slots, |slot| slot.plan.queue.as_str()))
            .bind(each(slots, |slot| slot.plan.job_type.as_str()))
            .bind(each(slots, |slot| signed(slot.slot_us)))
            .bind(each(slots, |slot| signed(slot.until_us)))
            .bind(each(slots, |slot| slot.binding.as_str()))
            .bind(each(places, |place| place.job))
            .bind(each(places, |place| place.charge.line))
            .bind(each(places, |place| signed(place.place)))
            .bind(each(places, |place| place.charge.label.as_str()))
            .bind(each(places, |place| signed(place.charge.cost)))
            .bind(parked_jobs)
            .bind(parked_lines)
            .execute(connection)
            .await?;
        Ok(())
    }
}
