//! Batches of plain checks in one statement: the [`Carrier`] of `remote/batching.rs` for PostgreSQL.
//!
//! `remote/batching.rs` decides which checks form a batch; `postgres.rs` sends the statement. Batches of charges by the
//! function are in `shared_commit.rs`.
//!
//! A row that another transaction has locked delays the keys in the same statement, for at most a tenth of the deadline: then
//! each of them is sent alone. Tollgate locks a row only for one statement, so this is for rows that other programs lock. Several
//! statements may be in flight, each on its own connection.

use std::sync::Arc;

use tokio::time::Instant;
use tollgate_kernel::Cost;
use uuid::Uuid;

use super::room::no_room;
use super::shared_commit::is_lock_timeout;
use super::statement::Plain;
use super::{Answered, PostgresStore};
use crate::remote::batching::{Answers, Carrier, Locks, Queue, Repeats};
use crate::remote::shares::{Caps, Shares};
use crate::{StoreError, StoredLimit};

/// How many calls may wait for the share of one key or of one limit.
const WAITING: usize = 1_024;

/// How many charges of one key by the function may wait for each other's transaction: then they form a batch.
const BATCHED: usize = 32;

/// One key may use a quarter of the connections and one limit three quarters, and each at least one.
pub(super) fn caps(connections: usize) -> Caps {
    let key = (connections / 4).max(1);
    Caps {
        key,
        batched_key: BATCHED,
        limit: (connections * 3 / 4).max(1),
        server: connections,
        waiting: WAITING,
    }
}

/// What the checks of one statement have in common.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Alike {
    pub(super) plain: Plain,
    pub(super) limit: StoredLimit,
    pub(super) cost: Cost,
}

impl Carrier for PostgresStore {
    type Alike = Alike;
    type Key = Uuid;
    type Answer = Answered;

    /// A statement of sixteen keys takes a server little more than three of one key.
    const MAX_BATCH: usize = 16;

    /// A statement cannot touch a row twice.
    const REPEATS: Repeats = Repeats::Once;

    fn queue(&self) -> &Queue<PostgresStore> {
        &self.inner.queue
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.inner.shares
    }

    /// A connection carries one call, and a limit may use a part of the connections.
    fn ways(&self) -> usize {
        caps(self.inner.pool.most_links()).limit
    }

    fn lane_ways(&self) -> usize {
        caps(self.inner.pool.most_links()).limit
    }

    async fn carry(
        &self,
        alike: &Alike,
        keys: &[Uuid],
        locks: Locks,
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Answers<Answered>, StoreError> {
        let mut sorted = keys.to_vec();
        sorted.sort_unstable();
        let until = super::call::Until { deadline: deadline.into_std(), sent };
        let Alike { plain, limit, cost } = alike;
        if self.refuses_new_keys(&limit.limit) {
            let known = self.known(&sorted, &until).await?;
            sorted.retain(|key| known.contains(key));
        }
        if sorted.is_empty() {
            return Ok(keys.iter().map(|_| Some(Err(no_room()))).collect());
        }
        let mut answered = match self.upsert_each(*plain, limit, *cost, &sorted, locks, &until).await {
            // Nothing was written, because one row is locked. A key that is sent alone waits only for its own row.
            Err(error) if keys.len() > 1 && is_lock_timeout(&error) => {
                return Ok(keys.iter().map(|_| None).collect());
            }
            answered => answered?,
        };
        let unanswered = |key: &Uuid| if sorted.contains(key) { self.late(1) } else { no_room() };
        let mut answer = |key: &Uuid| answered.remove(key).unwrap_or_else(|| Err(unanswered(key)));
        Ok(keys.iter().map(|key| Some(answer(key))).collect())
    }
}
