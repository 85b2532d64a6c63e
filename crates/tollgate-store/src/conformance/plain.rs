//! The plainest store that is right: the model behind one lock. For the suite's own tests, and for authors of stores to read.

use std::sync::{Arc, Mutex, PoisonError};

use super::model::Model;
use crate::records::RecordTable;
use crate::{
    ChargeId, Charged, Clock, Hold, PutRecord, Record, RecordKind, Records, Settled, Settlement, Store,
    StoreError, StoreFuture, StoredCharge, StoredLimit,
};

/// Keeps what the kernel says in a map and answers one caller at a time. Nothing bounds its memory.
///
/// ```
/// use tollgate_store::conformance::PlainStore;
/// use tollgate_store::{ManualClock, Micros};
///
/// let store = PlainStore::new(ManualClock::at(Micros::ZERO).clock());
/// assert_eq!(store.keys(), 0);
/// ```
#[derive(Clone)]
pub struct PlainStore {
    clock: Clock,
    model: Arc<Mutex<Model>>,
    records: Arc<RecordTable>,
}

impl PlainStore {
    /// An empty store that goes by this clock.
    pub fn new(clock: Clock) -> PlainStore {
        PlainStore { clock, model: Arc::default(), records: Arc::default() }
    }

    /// How many keys have a state that says more than none would.
    pub fn keys(&self) -> usize {
        self.with(|model| model.keys(self.clock.now()))
    }

    fn with<R>(&self, run: impl FnOnce(&mut Model) -> R) -> R {
        run(&mut self.model.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Store for PlainStore {
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move {
            self.with(|model| match model.is_id_taken(charges, hold, self.clock.now()) {
                true => Err(StoreError::id_taken()),
                false => Ok(model.charge(charges, hold, self.clock.now())),
            })
        })
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async move {
            let settled = self.with(|model| model.settle(id, settlement, self.clock.now()));
            settled.ok_or_else(|| StoreError::invalid("the reservation holds nothing that this could settle"))
        })
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(async move { Ok(self.with(|model| model.peek(charges, self.clock.now()))) })
    }

    fn refund<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.with(|model| model.refund(charges, self.clock.now()));
            Ok(())
        })
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { Ok(self.with(|model| model.forget(&limit.name, key))) })
    }

    fn records(&self, kind: RecordKind, known: Option<u64>) -> StoreFuture<'_, Records> {
        Box::pin(async move { Ok(self.records.read(kind, known, self.clock.now())) })
    }

    fn put_record<'a>(&'a self, kind: RecordKind, record: &'a Record) -> StoreFuture<'a, PutRecord> {
        Box::pin(async move { self.records.put(kind, record, self.clock.now()) })
    }

    fn remove_record<'a>(&'a self, kind: RecordKind, id: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { self.records.remove(kind, id, self.clock.now()) })
    }
}
