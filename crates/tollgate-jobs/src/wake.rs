//! When the next job is due: what this process knows of it, and how waiting jobs are called before their time.
//!
//! apalis keeps its jobs in the database that has the line, so that they are called by their rows, also by programs that run none.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sqlx::postgres::PgPool;

use crate::error::Error;

/// Makes jobs due now that were put off, in whichever framework has them.
pub trait Wake: Send + Sync {
    /// Those of these jobs that wait are due now. Answers how many.
    fn wake<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<u64, Error>> + Send + 'a>>;

    /// Those of these jobs that a worker has in its hands. It may be about to put them off, for a reason that is gone by now; then they are
    /// called again when it has.
    fn in_hands<'a>(
        &'a self,
        _jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, Error>> + Send + 'a>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// Those of these jobs that are not to run any more: somebody removed or ended them while they waited.
    fn ended<'a>(
        &'a self,
        _jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, Error>> + Send + 'a>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// A job came long before it was to, or some time has passed. The job may have been called; or the framework does not keep the times
    /// that it is given, which is looked into here.
    fn came_early(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}

/// Calls jobs of apalis by their rows.
pub(crate) struct ApalisRows {
    pub(crate) pool: PgPool,
}

impl ApalisRows {
    /// Those of a database, if apalis keeps its jobs there.
    pub(crate) async fn of(pool: &PgPool) -> Result<Option<ApalisRows>, sqlx::Error> {
        let there = "select to_regclass('apalis.jobs') is not null";
        let is_there: bool = sqlx::query_scalar(there).fetch_one(pool).await?;
        Ok(is_there.then(|| ApalisRows { pool: pool.clone() }))
    }
}

impl Wake for ApalisRows {
    fn wake<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<u64, Error>> + Send + 'a>> {
        let text = "update apalis.jobs set run_at = clock_timestamp()
            where id = any($1) and (status = 'Pending' or (status = 'Failed' and attempts < max_attempts)) and run_at > clock_timestamp()";
        Box::pin(async move {
            let called = sqlx::query(text).bind(jobs).execute(&self.pool).await;
            let called = called.map_err(|error| Error::database("calling waiting jobs", error))?;
            Ok(called.rows_affected())
        })
    }

    fn in_hands<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, Error>> + Send + 'a>> {
        let text = "select id from apalis.jobs where id = any($1) and status in ('Queued', 'Running')";
        Box::pin(async move {
            let found = sqlx::query_scalar(text).bind(jobs).fetch_all(&self.pool).await;
            found.map_err(|error| Error::database("looking for jobs that workers have", error))
        })
    }

    fn ended<'a>(
        &'a self,
        jobs: &'a [String],
    ) -> Pin<Box<dyn Future<Output = Result<Vec<String>, Error>> + Send + 'a>> {
        let text = "select u.id from unnest($1::text[]) as u(id) where not exists (select from apalis.jobs j where j.id = u.id
            and (j.status in ('Pending', 'Queued', 'Running') or (j.status = 'Failed' and j.attempts < j.max_attempts)))";
        Box::pin(async move {
            let found = sqlx::query_scalar(text).bind(jobs).fetch_all(&self.pool).await;
            found.map_err(|error| Error::database("looking for jobs that were removed", error))
        })
    }
}

/// How many instants are remembered at most; what is beyond is found by polling.
const MOST: usize = 10_000;

/// Instants at which a job is due that this process put off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wakes {
    instants: Arc<Mutex<BinaryHeap<Reverse<Instant>>>>,
}

impl Wakes {
    /// A job is due after `wait`.
    pub(crate) fn push(&self, wait: Duration) {
        let mut instants = self.instants.lock();
        // A job is due strictly after its time; a little later it surely is.
        if let Some(at) = Instant::now().checked_add(wait.saturating_add(Duration::from_millis(1)))
            && instants.len() < MOST
        {
            instants.push(Reverse(at));
        }
    }

    /// The first instant that is to come. Those that have passed are forgotten.
    #[cfg(feature = "apalis")]
    pub(crate) fn next(&self, now: Instant) -> Option<Instant> {
        let mut instants = self.instants.lock();
        while instants.peek().is_some_and(|first| first.0 <= now) {
            instants.pop();
        }
        instants.peek().map(|first| first.0)
    }
}
