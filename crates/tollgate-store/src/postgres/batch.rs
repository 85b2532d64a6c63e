//! Plain checks that come at the same time, in one statement: what `shared/together.rs` is told about PostgreSQL.
//!
//! A row that somebody else has locked holds up the keys that go with it. Nobody locks a row for longer than one statement of
//! ours takes, so few keys go together, and several statements may be on their way: one for each connection.

use std::collections::HashMap;

use tokio::time::Instant;
use tollgate_kernel::Cost;
use uuid::Uuid;

use super::statement::Plain;
use super::{Answered, PostgresStore};
use crate::shared::together::{Carrier, Queue};
use crate::{StoreError, StoredLimit};

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
    const TOGETHER: usize = 16;

    /// A statement cannot touch a row twice.
    const ONCE: bool = true;

    /// A connection carries one call.
    const APART: bool = false;

    fn queue(&self) -> &Queue<PostgresStore> {
        &self.inner.queue
    }

    fn ways(&self) -> usize {
        self.inner.pool.most_links()
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
        let answered: HashMap<Uuid, Answered> =
            self.upsert(*plain, limit, *cost, &sorted, &until).await?.into_iter().collect();
        let answer = |key: &Uuid| answered.get(key).copied().ok_or_else(|| self.late(1));
        Ok(keys.iter().map(answer).collect())
    }
}
