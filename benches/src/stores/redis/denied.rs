//! One hot key that is denied, through a gate: with and without its denial cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate::Tollgate;
use tollgate_store::{
    ChargeId, Charged, Hold, Limit, Settled, Settlement, Store, StoreFuture, StoredCharge, StoredLimit,
};

use crate::stores::load::{Answer, Caller, Draw};

/// How long a denial is believed: the gate's own default.
const BELIEVED: Duration = Duration::from_millis(100);

/// Whether the gate keeps denials in its denial cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cache {
    On,
    Off,
}

/// A gate whose only limit lets one through in an hour, and how often it asks its store.
#[derive(Clone)]
pub(super) struct Denied {
    gate: Arc<Tollgate>,
    store: Arc<Counted>,
}

impl Denied {
    pub(super) fn new(store: Arc<dyn Store>, cache: Cache) -> Result<Denied, String> {
        let store = Arc::new(Counted { store, charges: AtomicU64::new(0) });
        let limit = Limit::token_bucket("1/h", 1).map_err(|error| error.to_string())?;
        let believed = if cache == Cache::On { BELIEVED } else { Duration::ZERO };
        let gate =
            Tollgate::builder().limit("hot", limit).store(store.clone()).denial_cache(believed).build();
        Ok(Denied { gate: Arc::new(gate.map_err(|error| error.to_string())?), store })
    }

    /// Takes the one that there is.
    pub(super) async fn empty(&self) -> Result<(), String> {
        self.gate.check("hot", KEY).await.map(drop).map_err(|error| error.to_string())
    }

    pub(super) fn charges(&self) -> u64 {
        self.store.charges.load(Ordering::Relaxed)
    }
}

const KEY: &str = "tenant-0001:user-0000001";

impl Caller for Denied {
    async fn call(&mut self, _: &mut Draw) -> Result<Answer, String> {
        let decision = self.gate.check("hot", KEY).await.map_err(|error| error.to_string())?;
        // A fallback would deny or allow at no cost, and is not what is measured.
        if decision.is_degraded() {
            return Err("the store did not answer, and the gate fell back".into());
        }
        Ok(Answer::one(!decision.is_allowed()))
    }
}

/// A store that counts the charges that it is asked for.
struct Counted {
    store: Arc<dyn Store>,
    charges: AtomicU64,
}

impl Store for Counted {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        self.charges.fetch_add(1, Ordering::Relaxed);
        self.store.charge(items, hold)
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        self.store.settle(id, settlement)
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        self.store.peek(items)
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        self.store.forget(limit, key)
    }
}
