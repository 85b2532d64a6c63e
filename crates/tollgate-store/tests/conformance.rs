//! The suite itself: it passes a store that is right and catches each of these that are wrong, every one in a single way that a
//! real store has been wrong before.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::runtime::Handle;
use tokio::task::{spawn_blocking, yield_now};
use tollgate_store::conformance::{self, Counting, Effort, PlainStore, Subject, Traces};
use tollgate_store::{
    ChargeId, Charged, Cost, Hold, ManualClock, Micros, PutRecord, Record, RecordKind, Records, Settled,
    Settlement, Store, StoreError, StoreFuture, StoredCharge, StoredLimit,
};

/// Enough to catch what is below, each in about a second.
const EFFORT: Effort = Effort { traces: Traces { seeds: 3, steps: 3_000 }, racers: 8, charges_each: 800 };

/// What is wrong with a store.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// Nothing.
    None,
    /// A charge that is sent again under the same name is charged again.
    ChargesTheSameNameAgain,
    /// A charge over several limits charges them one after another, until one refuses.
    HalfCharges,
    /// A shadow limit denies the charge.
    EnforcesWhatOnlyWatches,
    /// A shadow limit is not charged.
    NeverChargesWhatOnlyWatches,
    /// A reservation whose time has run out is given back, and so is what was charged since.
    GivesBackTooLate,
    /// One more is said to be left than there is.
    CountsOneTooMany,
    /// Every thousandth charge is answered and forgotten.
    DropsAThousandth,
    /// Looks first and charges later, and goes by what it saw.
    ChecksThenActs,
    /// A key that is forgotten is not.
    NeverForgets,
    /// A peek is a charge.
    ChargesOnPeek,
    /// The first key is remembered for ever.
    KeepsAnIdleKey,
    /// A refund is answered and not made.
    NeverRefunds,
    /// A refund of several is made of the first.
    RefundsTheFirst,
    /// A refund of what is more than there is forgets the key, window and all.
    RefundsByForgetting,
    /// A record that has ended is still read.
    KeepsEndedRecords,
    /// A record that is removed is not.
    NeverRemovesRecords,
}

const FAULTS: [Fault; 16] = [
    Fault::ChargesTheSameNameAgain,
    Fault::HalfCharges,
    Fault::EnforcesWhatOnlyWatches,
    Fault::NeverChargesWhatOnlyWatches,
    Fault::GivesBackTooLate,
    Fault::CountsOneTooMany,
    Fault::DropsAThousandth,
    Fault::ChecksThenActs,
    Fault::NeverForgets,
    Fault::ChargesOnPeek,
    Fault::KeepsAnIdleKey,
    Fault::NeverRefunds,
    Fault::RefundsTheFirst,
    Fault::RefundsByForgetting,
    Fault::KeepsEndedRecords,
    Fault::NeverRemovesRecords,
];

/// A store with a fault.
struct Faulty {
    inner: PlainStore,
    fault: Fault,
    charges: AtomicU64,
    /// What each name was charged for, and the name that the store knows it by.
    holds: Mutex<HashMap<ChargeId, (StoredLimit, String, ChargeId)>>,
}

impl Faulty {
    async fn charge(&self, items: &[StoredCharge<'_>], hold: Option<Hold>) -> Result<Charged, StoreError> {
        let number = self.charges.fetch_add(1, Ordering::Relaxed) + 1;
        let hold = hold.map(|hold| self.renamed(items, hold));
        // Answers to charges that are not held come from the store itself, so that only what is remembered is wrong.
        match self.fault {
            Fault::HalfCharges if hold.is_none() => {
                let answer = Store::peek(&self.inner, items).await?;
                for item in items {
                    if !Store::charge(&self.inner, &[*item], None).await?.allowed {
                        break;
                    }
                }
                Ok(answer)
            }
            Fault::EnforcesWhatOnlyWatches => {
                let firm: Vec<StoredCharge<'_>> =
                    items.iter().map(|item| StoredCharge { shadow: false, ..*item }).collect();
                Store::charge(&self.inner, &firm, hold).await
            }
            Fault::NeverChargesWhatOnlyWatches if hold.is_none() => {
                let answer = Store::peek(&self.inner, items).await?;
                let firm: Vec<StoredCharge<'_>> = items.iter().filter(|item| !item.shadow).copied().collect();
                Store::charge(&self.inner, &firm, None).await?;
                Ok(answer)
            }
            Fault::DropsAThousandth if hold.is_none() && number.is_multiple_of(1_000) => {
                Store::peek(&self.inner, items).await
            }
            Fault::ChecksThenActs if hold.is_none() => {
                let seen = Store::peek(&self.inner, items).await?;
                yield_now().await;
                Store::charge(&self.inner, items, None).await?;
                Ok(seen)
            }
            _ => Store::charge(&self.inner, items, hold).await,
        }
    }

    /// The hold as the store is reported of it.
    fn renamed(&self, items: &[StoredCharge<'_>], hold: Hold) -> Hold {
        let is_new = self.fault == Fault::ChargesTheSameNameAgain;
        let id = if is_new { ChargeId::random() } else { hold.id };
        if let Some(first) = items.first() {
            let held = (first.limit.clone(), first.key.to_owned(), id);
            self.holds.lock().expect("no fault is a panic").insert(hold.id, held);
        }
        Hold { id, ..hold }
    }

    async fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        let held = self.holds.lock().expect("no fault is a panic").get(&id).cloned();
        let Some((limit, key, id)) = held else { return Store::settle(&self.inner, id, settlement).await };
        let settled = Store::settle(&self.inner, id, settlement).await?;
        if self.fault == Fault::GivesBackTooLate
            && (settled, settlement) == (Settled::Unknown, &Settlement::Cancel)
        {
            Store::forget(&self.inner, &limit, &key).await?;
        }
        Ok(settled)
    }

    async fn peek(&self, items: &[StoredCharge<'_>]) -> Result<Charged, StoreError> {
        match self.fault {
            Fault::ChargesOnPeek => Store::charge(&self.inner, items, None).await,
            _ => Store::peek(&self.inner, items).await,
        }
    }

    async fn refund(&self, items: &[StoredCharge<'_>]) -> Result<(), StoreError> {
        match self.fault {
            Fault::NeverRefunds => Ok(()),
            Fault::RefundsTheFirst => Store::refund(&self.inner, &items[..items.len().min(1)]).await,
            Fault::RefundsByForgetting => {
                for item in items {
                    let all = [StoredCharge { cost: Cost::MAX, ..*item }];
                    let used = Store::peek(&self.inner, &all).await?.outcomes[0].used();
                    match used <= item.cost.get() {
                        true => drop(Store::forget(&self.inner, item.limit, item.key).await?),
                        false => Store::refund(&self.inner, &[*item]).await?,
                    }
                }
                Ok(())
            }
            _ => Store::refund(&self.inner, items).await,
        }
    }
}

impl Store for Faulty {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move {
            let mut charged = Faulty::charge(self, items, hold).await?;
            if self.fault == Fault::CountsOneTooMany {
                charged.outcomes.iter_mut().for_each(|outcome| outcome.remaining += 1);
            }
            Ok(charged)
        })
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(Faulty::settle(self, id, settlement))
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(Faulty::peek(self, items))
    }

    fn refund<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        Box::pin(Faulty::refund(self, items))
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        match self.fault {
            Fault::NeverForgets => Box::pin(async { Ok(true) }),
            _ => self.inner.forget(limit, key),
        }
    }

    fn records(&self, kind: RecordKind, known: Option<u64>) -> StoreFuture<'_, Records> {
        self.inner.records(kind, known)
    }

    fn put_record<'a>(&'a self, kind: RecordKind, record: &'a Record) -> StoreFuture<'a, PutRecord> {
        Box::pin(async move {
            let mut record = record.clone();
            if self.fault == Fault::KeepsEndedRecords {
                record.ends = record.ends.map(|ends| ends.saturating_add(Micros::from_secs(1)));
            }
            self.inner.put_record(kind, &record).await
        })
    }

    fn remove_record<'a>(&'a self, kind: RecordKind, id: &'a str) -> StoreFuture<'a, bool> {
        match self.fault {
            Fault::NeverRemovesRecords => Box::pin(async { Ok(true) }),
            _ => self.inner.remove_record(kind, id),
        }
    }
}

fn subject(clock: &ManualClock, fault: Fault) -> Subject {
    let inner = PlainStore::new(clock.clock());
    let counted = inner.clone();
    let remembered = Box::new(move || -> Counting {
        let keys = counted.keys().max(usize::from(fault == Fault::KeepsAnIdleKey));
        Box::pin(async move { keys })
    });
    let store = Faulty { inner, fault, charges: AtomicU64::new(0), holds: Mutex::default() };
    Subject { store: Arc::new(store), remembered }
}

/// Whether the suite passes a store.
async fn passes(fault: Fault) -> bool {
    let suite = spawn_blocking(move || {
        Handle::current().block_on(conformance::run(EFFORT, async |clock| subject(&clock, fault)))
    });
    match suite.await {
        Ok(()) => true,
        Err(error) => {
            assert!(error.is_panic(), "{fault:?}: {error}");
            false
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_suite_passes_what_is_right_and_catches_what_is_wrong() {
    assert!(passes(Fault::None).await, "a store without a fault");
    for fault in FAULTS {
        assert!(!passes(fault).await, "{fault:?} was not caught");
    }
}
