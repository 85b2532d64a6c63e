//! The number of keys in the database, estimated about once a second while there is traffic, and whether it accepts more.
//!
//! The estimate comes from the server's statistics; counting the rows would read the table. The statistics are some seconds late
//! and lose recent changes in a crash, so the larger of two estimates is used: inserted less deleted rows (`n_live_tup`), and the
//! result of the last vacuum (`reltuples`). Held charges count too.
//!
//! Near the maximum only keys that clients can invent are refused: those under limits whose numbers come with the call. Such a
//! key is then looked up before it is charged, which is a second round trip for these calls only. Redis has the same rule
//! (`redis/watch.rs`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio_postgres::types::ToSql;
use tollgate_kernel::Limit;
use uuid::Uuid;

use super::PostgresStore;
use super::call::{Resend, Until};
use super::codec::column;
use super::pool::{Pool, in_transaction};
use super::statement::{Verb, with_prefix};
use crate::{Clock, Failure, StoreError};

/// How often the number of rows is read, in us.
const LOOK_EVERY_US: u64 = 1_000_000;

/// The time limit of one read, so that there is never more than one. No caller waits for it.
const LOOK_WITHIN: Duration = Duration::from_secs(1);

/// An estimate of the rows of both tables, by name, so that it never locks or reads a table.
const ESTIMATE: &str = "select coalesce(sum(greatest(c.reltuples::bigint, pg_stat_get_live_tuples(c.oid), 0)), 0)::bigint \
     from unnest(array['{prefix}state', '{prefix}hold']) as name, pg_class as c where c.oid = to_regclass(name)";

pub(super) struct Room {
    max_keys: Option<u64>,
    due_us: AtomicU64,
    takes_new_keys: AtomicBool,
}

impl Room {
    pub(super) fn new(max_keys: Option<u64>) -> Room {
        Room { max_keys, due_us: AtomicU64::new(0), takes_new_keys: AtomicBool::new(true) }
    }

    /// Whether there is room for new keys, as of the last read.
    pub(super) fn takes_new_keys(&self) -> bool {
        self.takes_new_keys.load(Ordering::Relaxed)
    }

    /// Reads the number of rows, if there is a maximum and the last read is a while ago. This is a background task on a
    /// connection of the pool.
    pub(super) fn look_now_and_then(self: &Arc<Self>, pool: &Arc<Pool>) {
        let Some(max_keys) = self.max_keys else { return };
        let (now_us, due_us) = (Clock::system().now().get(), self.due_us.load(Ordering::Relaxed));
        let next_us = now_us + LOOK_EVERY_US;
        let is_due = now_us >= due_us
            && self.due_us.compare_exchange(due_us, next_us, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !is_due {
            return;
        }
        let (room, pool) = (self.clone(), pool.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(LOOK_WITHIN, estimate(&pool)).await {
                Ok(Some(keys)) => room.saw(keys, max_keys),
                _ => tracing::debug!(place = %pool.place, "could not ask PostgreSQL how many keys it has"),
            }
        });
    }

    fn saw(&self, keys: u64, max_keys: u64) {
        let takes = keys < max_keys;
        match (self.takes_new_keys.swap(takes, Ordering::Relaxed), takes) {
            (true, false) => tracing::warn!(
                keys,
                max_keys,
                "PostgreSQL has as many keys as it may; keys that callers invent are refused until there is room"
            ),
            (false, true) => tracing::info!(keys, max_keys, "PostgreSQL has room for new keys again"),
            _ => {}
        }
    }
}

/// The number of keys and held charges in the server's statistics. If the server does not report it, the next read tries again.
async fn estimate(pool: &Arc<Pool>) -> Option<u64> {
    let mut borrowed = pool.take().await.ok()?;
    borrowed.is_spent = true;
    let text = with_prefix(ESTIMATE, &pool.prefix);
    let rows = in_transaction(&borrowed.link()?.client, &pool.begin(), &text, &[]).await.ok()?;
    borrowed.is_spent = false;
    u64::try_from(column::<i64>(rows.first()?, 0).ok()?).ok()
}

impl PostgresStore {
    /// Whether the database has room for new keys: fewer than [`PostgresOptions::max_keys`](crate::PostgresOptions::max_keys), as
    /// of the last seconds of traffic.
    pub fn takes_new_keys(&self) -> bool {
        self.inner.room.takes_new_keys()
    }

    /// Whether new keys under this limit are refused for now: its numbers come with the call, so clients can invent its keys, and
    /// the room is for the keys of others.
    pub(super) fn refuses_new_keys(&self, limit: &Limit) -> bool {
        !self.takes_new_keys() && keeps_instant(limit)
    }

    /// Which of these keys exist. For limits that refuse new ones.
    pub(super) async fn known(&self, keys: &[Uuid], until: &Until<'_>) -> Result<Vec<Uuid>, StoreError> {
        // It changes nothing, so it is not reported as sent.
        let until = Until { deadline: until.deadline, sent: &|| {} };
        let values: &[&(dyn ToSql + Sync)] = &[&keys];
        let rows = self.call(Verb::Known, Resend::Once, values, &until).await?;
        rows.iter().map(|row| column(row, 0)).collect()
    }
}

/// Whether the numbers of a limit come with the call, which is the last of a bucket's five parameters.
fn keeps_instant(limit: &Limit) -> bool {
    limit.parameters().get(4) == Some(&1)
}

/// A new key, and no room for it. Existing keys are charged as usual.
pub(super) fn no_room() -> StoreError {
    StoreError::failed(
        Failure::Full,
        "PostgreSQL has as many keys as it may (store.max_keys) and takes no new ones under numbers that come with the call",
    )
}
