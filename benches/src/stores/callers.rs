//! Callers of a store: what is asked of Redis and PostgreSQL alike, through the public API.

use std::sync::Arc;

use tollgate_store::{ChargeId, Cost, Hold, Micros, Settled, Settlement, Store, StoredCharge, StoredLimit};

use super::load::{Answer, Caller, Draw, Keys};

/// How many keys go into one call.
pub(crate) const MANY: usize = 16;

/// How many keys go into one call when a store is filled.
const FILL: usize = 64;

/// How long the answers to held charges are kept.
const HELD: Micros = Micros::from_secs(1);

/// One check of one limit, and so many limits of one key in one charge.
#[derive(Clone)]
pub(crate) struct Charges {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) limits: Arc<[StoredLimit]>,
}

impl Caller for Charges {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let key = draw.one();
        let item = |limit| StoredCharge { limit, key, cost: Cost::ONE, shadow: false };
        let charged = match &self.limits[..] {
            [limit] => self.store.charge(&[item(limit)], None).await,
            limits => self.store.charge(&limits.iter().map(item).collect::<Vec<_>>(), None).await,
        };
        charged.map(|charged| Answer::one(charged.allowed)).map_err(|error| error.to_string())
    }
}

/// Sixteen keys in one call, each charged for itself.
#[derive(Clone)]
pub(crate) struct ManyCharges {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) limit: Arc<StoredLimit>,
}

impl Caller for ManyCharges {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let limit = &*self.limit;
        let item = |key| StoredCharge { limit, key, cost: Cost::ONE, shadow: false };
        let items = draw.several::<MANY>().map(item);
        let mut denied = 0;
        for outcome in self.store.charge_each(&items).await {
            denied += u64::from(!outcome.map_err(|error| error.to_string())?.allowed);
        }
        Ok(Answer { checks: MANY as u64, astray: denied })
    }
}

/// A charge that is held and then given back: two calls.
#[derive(Clone)]
pub(crate) struct Reserves {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) limit: Arc<StoredLimit>,
}

impl Caller for Reserves {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let item = StoredCharge { limit: &self.limit, key: draw.one(), cost: Cost::ONE, shadow: false };
        let hold = Hold { id: ChargeId::random(), ttl: HELD };
        let held = async {
            let charged = self.store.charge(&[item], Some(hold)).await?;
            let settled = self.store.settle(hold.id, &Settlement::Cancel).await?;
            Ok::<_, tollgate_store::StoreError>(charged.allowed && settled == Settled::Done)
        };
        held.await.map(Answer::one).map_err(|error| error.to_string())
    }
}

/// A charge that is to be held and does not fit.
#[derive(Clone)]
pub(crate) struct Refusals {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) limit: Arc<StoredLimit>,
}

impl Caller for Refusals {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let item = StoredCharge { limit: &self.limit, key: draw.one(), cost: Cost::ONE, shadow: false };
        let hold = Hold { id: ChargeId::random(), ttl: HELD };
        let charged = self.store.charge(&[item], Some(hold)).await;
        charged.map(|charged| Answer::one(!charged.allowed)).map_err(|error| error.to_string())
    }
}

/// Charges every key once, many in a call.
pub(crate) async fn fill(
    store: &dyn Store,
    limit: &StoredLimit,
    keys: &Keys,
    cost: Cost,
) -> Result<(), String> {
    for some in keys.chunks(FILL) {
        let item = |key| StoredCharge { limit, key, cost, shadow: true };
        let items: Vec<StoredCharge<'_>> = some.iter().map(|key| item(key.as_str())).collect();
        store.charge(&items, None).await.map_err(|error| format!("filling `{}`: {error}", limit.name))?;
    }
    Ok(())
}
