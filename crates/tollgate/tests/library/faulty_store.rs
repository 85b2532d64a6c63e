//! A remote store: a memory store behind faults that the test switches.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};

use std::time::Duration;
use tollgate::store::{
    Charged, EachFuture, Failure, Hold, MemoryOptions, MemoryStore, NodeId, Store, StoreError, StoreFuture,
    StoredCharge, StoredLimit,
};
use tollgate::{ChargeId, ManualClock, Settled, Settlement};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Nothing is done.
    Fails(Failure),
    /// It is done, and the answer is lost.
    Loses(Failure),
    /// It is not done, or not yet, and nobody can tell.
    Vanishes(Failure),
    /// The call is refused as wrong.
    Invalid,
    /// It is done, and the answer comes once the store is let go.
    Hangs,
    /// It takes one poll to get there and one back.
    Pauses,
}

/// A memory store that passes for a remote one.
pub(crate) struct FaultyStore {
    pub(crate) store: MemoryStore,
    hands: ManualClock,
    fault: Mutex<Fault>,
    /// How long a call takes to get there, and as long back.
    latency: Mutex<Duration>,
    calls: AtomicUsize,
    pings: AtomicUsize,
    /// Whether pings are answered whatever is wrong with calls.
    is_alive: AtomicBool,
    /// The hold of the last charge.
    last_hold: Mutex<Option<Hold>>,
    is_let_go: AtomicBool,
    hanging: Mutex<Vec<Waker>>,
}

/// Is ready when it is polled a second time.
async fn pause() {
    let mut is_polled = false;
    poll_fn(|context| match std::mem::replace(&mut is_polled, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

impl FaultyStore {
    pub(crate) fn new(hands: &ManualClock) -> Arc<FaultyStore> {
        let options = MemoryOptions { clock: hands.clock(), sweep_every: None, ..MemoryOptions::default() };
        Arc::new(FaultyStore {
            store: MemoryStore::new(options),
            hands: hands.clone(),
            fault: Mutex::new(Fault::None),
            latency: Mutex::new(Duration::ZERO),
            calls: 0.into(),
            pings: 0.into(),
            is_alive: false.into(),
            last_hold: Mutex::default(),
            is_let_go: false.into(),
            hanging: Mutex::default(),
        })
    }

    pub(crate) fn fault(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    pub(crate) fn latency(&self, latency: Duration) {
        *self.latency.lock().unwrap() = latency;
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    pub(crate) fn pings(&self) -> usize {
        self.pings.load(Ordering::SeqCst)
    }

    /// Whether pings are answered from now on, so that what is wrong with calls is theirs alone; else they fare as calls do.
    pub(crate) fn answers_pings(&self, is_alive: bool) {
        self.is_alive.store(is_alive, Ordering::SeqCst);
    }

    /// The hold of the last charge, if it had one.
    pub(crate) fn last_hold(&self) -> Option<Hold> {
        *self.last_hold.lock().unwrap()
    }

    /// Answers those who hang.
    pub(crate) fn let_go(&self) {
        self.is_let_go.store(true, Ordering::SeqCst);
        self.hanging.lock().unwrap().drain(..).for_each(Waker::wake);
    }

    fn answer<'a, T: Send + 'a>(
        &'a self,
        work: impl FnOnce() -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        self.carry(work)
    }

    fn carry<'a, T: Send + 'a>(
        &'a self,
        work: impl FnOnce() -> StoreFuture<'a, T> + Send + 'a,
    ) -> StoreFuture<'a, T> {
        let (fault, latency) = (*self.fault.lock().unwrap(), *self.latency.lock().unwrap());
        let fails = |failure| StoreError::failed(failure, "could not ask the store").caused_by("on purpose");
        Box::pin(async move {
            self.hands.advance(latency);
            let answer = match fault {
                Fault::Fails(failure) => Err(fails(failure)),
                Fault::Invalid => Err(StoreError::invalid("the call is wrong")),
                Fault::Vanishes(failure) => Err(fails(failure).ambiguous()),
                Fault::Loses(failure) => work().await.and(Err(fails(failure).ambiguous())),
                Fault::None => work().await,
                Fault::Pauses => {
                    pause().await;
                    let answer = work().await;
                    pause().await;
                    answer
                }
                Fault::Hangs => {
                    let answer = work().await;
                    poll_fn(|context| match self.is_let_go.load(Ordering::SeqCst) {
                        true => Poll::Ready(()),
                        false => {
                            self.hanging.lock().unwrap().push(context.waker().clone());
                            Poll::Pending
                        }
                    })
                    .await;
                    answer
                }
            };
            self.hands.advance(latency);
            answer
        })
    }
}

impl Store for FaultyStore {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        *self.last_hold.lock().unwrap() = hold;
        self.answer(move || Store::charge(&self.store, items, hold))
    }

    fn charge_each<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        Box::pin(async move {
            let charged = self.answer(move || Box::pin(async { Ok(self.store.charge_each(items).await) }));
            match charged.await {
                Ok(outcomes) => outcomes,
                // The whole call failed, so each of its charges did, in the same way.
                Err(error) => items.iter().map(|_| Err(alike(&error))).collect(),
            }
        })
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        self.answer(move || Store::settle(&self.store, id, settlement))
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        self.answer(move || Store::peek(&self.store, items))
    }

    fn refund<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        self.answer(move || Store::refund(&self.store, items))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        self.answer(move || Store::forget(&self.store, limit, key))
    }

    fn ping(&self, _: NodeId) -> StoreFuture<'_, ()> {
        self.pings.fetch_add(1, Ordering::SeqCst);
        match self.is_alive.load(Ordering::SeqCst) {
            true => Box::pin(async { Ok(()) }),
            false => self.carry(|| Box::pin(async { Ok(()) })),
        }
    }
}

/// The same failure, for another charge of the call.
fn alike(error: &StoreError) -> StoreError {
    let alike = match error.failure() {
        Some(failure) => StoreError::failed(failure, error.to_string()),
        None => StoreError::invalid(error.to_string()),
    };
    if error.is_ambiguous() { alike.ambiguous() } else { alike }
}
