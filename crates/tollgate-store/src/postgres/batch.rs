//! Plain checks that come at the same time, in one statement: what `batching.rs` has to know of PostgreSQL.
//!
//! A row that somebody else has locked holds up the keys that go with it. Nobody locks a row for longer than one statement of
//! ours takes, so few keys go together, and several statements may be in flight, each on a connection of its own.

use std::sync::Arc;

use tokio::time::Instant;
use tollgate_kernel::Cost;
use uuid::Uuid;

use super::room::no_room;
use super::statement::Plain;
use super::{Answered, PostgresStore};
use crate::remote::batching::{Carrier, Queue};
use crate::remote::shares::{Caps, Shares};
use crate::{StoreError, StoredLimit};

/// How many calls may wait for the share of one key, or of one limit.
const WAITING: usize = 1_024;

/// Of the connections, one key has a quarter and one limit three quarters, and each at least one.
pub(super) fn caps(connections: usize) -> Caps {
    let key = (connections / 4).max(1);
    Caps { key, batched_key: key, limit: (connections * 3 / 4).max(1), server: connections, waiting: WAITING }
}

/// What checks have in common that go in one statement.
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

    /// One statement of sixteen takes a server little more than three of one.
    const MAX_BATCH: usize = 16;

    /// A statement cannot touch a row twice.
    const ONCE: bool = true;

    fn queue(&self) -> &Queue<PostgresStore> {
        &self.inner.queue
    }

    fn shares(&self) -> &Arc<Shares> {
        &self.inner.shares
    }

    /// A connection carries one call, and a limit has a part of the connections.
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
        deadline: Instant,
        sent: &(dyn Fn() + Send + Sync),
    ) -> Result<Vec<Result<Answered, StoreError>>, StoreError> {
        let mut sorted = keys.to_vec();
        sorted.sort_unstable();
        let until = super::call::Until { deadline: deadline.into_std(), sent };
        let Alike { plain, limit, cost } = alike;
        if self.refuses_new_keys(&limit.limit) {
            let known = self.known(&sorted, &until).await?;
            sorted.retain(|key| known.contains(key));
        }
        if sorted.is_empty() {
            return Ok(keys.iter().map(|_| Err(no_room())).collect());
        }
        let mut answered = self.upsert_each(*plain, limit, *cost, &sorted, &until).await?;
        let unanswered = |key: &Uuid| if sorted.contains(key) { self.late(1) } else { no_room() };
        let answer = |key: &Uuid| answered.remove(key).unwrap_or_else(|| Err(unanswered(key)));
        Ok(keys.iter().map(answer).collect())
    }
}
