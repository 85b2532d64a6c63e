//! The memory store: in this process, for millions of keys, in bounded memory.
//!
//! A limit has a table (table.rs) of the shape that its strategy needs; a key is known there by a fingerprint, 128 bits of a
//! hash under seeds drawn at start, and its text is never kept. A charge on one limit goes straight to the table; charge.rs
//! charges several limits, all or none. Reservations are remembered in holds.rs. A thread wakes up now and then to forget keys that are as good as new.

mod bucket_charge;
mod budget;
mod cell;
mod charge;
mod chunks;
mod contention;
mod fingerprint;
mod holds;
mod homes;
mod indirect;
mod limit_table;
mod node;
mod nodes;
mod shape;
mod sibling_tables;
mod sweep;
mod sync;
mod table;
mod tables;
mod wall;
mod whole;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Fit, Limit, MAX_COUNT, Micros, Outcome};

use self::budget::Budget;
use self::cell::{Amendment, Cell, Holder};
use self::contention::Contention;
use self::fingerprint::Seeds;
use self::holds::{Holds, Keys};
use self::limit_table::LimitTable;
use self::node::Fingerprint;
use self::shape::{Making, TokenTable};
use self::tables::{Opened, Tables};
use self::wall::Wall;
use crate::clock::Clock;
use crate::{
    ChargeId, Charged, Hold, Outcomes, Settled, Settlement, Store, StoreError, StoreFuture, StoredCharge,
    StoredLimit,
};

pub use self::budget::WhenFull;

/// How a memory store is set up.
#[derive(Clone, Debug)]
pub struct MemoryOptions {
    /// Where time comes from.
    pub clock: Clock,
    /// How many keys are remembered at most; every entry of a sliding window's log and every lease counts as one more.
    pub max_keys: usize,
    /// How many bytes reservations and permits take at most, apart from the keys that they charge: about 600 for a reservation of one
    /// limit, and 400 once it is settled. `None` is a quarter of what `max_keys` take at 40 bytes each (100 MB for ten million), and at least 1 MiB. One key
    /// takes at most half of it, and has at most 10,000 reservations open.
    pub reservation_bytes: Option<usize>,
    /// What happens to keys that there is no room for.
    pub when_full: WhenFull,
    /// How often a thread of the store's own forgets what is as good as new: it works through the whole store in ten such
    /// turns. `None` starts no thread; [`MemoryStore::sweep`] does the same by hand.
    pub sweep_every: Option<Duration>,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        MemoryOptions {
            clock: Clock::system(),
            max_keys: 10_000_000,
            reservation_bytes: None,
            when_full: WhenFull::Share,
            sweep_every: Some(Duration::from_secs(1)),
        }
    }
}

/// Remembers in this process. Cheap to clone; clones share what is remembered.
///
/// ```
/// use tollgate_store::{Cost, Limit, MemoryOptions, MemoryStore, StoredLimit};
///
/// let store = MemoryStore::new(MemoryOptions::default());
/// let limit = Limit::token_bucket("10/s", 1).unwrap();
/// let api = store.open(&StoredLimit::new("api", limit));
/// assert!(api.charge("user:42", Cost::ONE).allowed);
/// assert!(!api.charge("user:42", Cost::ONE).allowed);
/// ```
#[derive(Clone)]
pub struct MemoryStore {
    inner: Arc<Inner>,
}

struct Inner {
    clock: Clock,
    seeds: Seeds,
    budget: Arc<Budget>,
    contention: Arc<Contention>,
    making: Making,
    tables: Mutex<Tables>,
    holds: Holds,
}

/// A limit in a memory store: the short way to its table.
#[derive(Clone)]
pub struct MemoryLimit {
    store: MemoryStore,
    name: Arc<str>,
    limit_table: Arc<dyn LimitTable>,
    /// The same by its own type, if it is of the kind that nearly all are.
    token_table: Option<Arc<TokenTable>>,
    /// How long a lease lasts, if the limit gives leases.
    lease: Option<Micros>,
}

/// A charge of a token bucket that was decided and carried out; what else the answer says is worked out when it is asked for.
#[derive(Clone, Copy)]
pub struct ChargedBucket<'a> {
    table: &'a TokenTable,
    fit: Fit,
    cost: Cost,
}

impl ChargedBucket<'_> {
    /// Whether it was admitted.
    #[inline]
    pub fn is_allowed(&self) -> bool {
        self.fit.allowed
    }

    /// The whole answer.
    #[inline(always)]
    pub fn outcome(&self) -> Outcome {
        self.table.cell.outcome(self.fit, self.cost)
    }
}

impl fmt::Debug for ChargedBucket<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ChargedBucket").field(&self.outcome()).finish()
    }
}

/// One limit of a charge on a memory store.
#[derive(Clone, Copy)]
pub struct MemoryCharge<'a> {
    /// Which limit.
    pub limit: &'a MemoryLimit,
    /// Who pays: the key's canonical text.
    pub key: &'a str,
    /// How much.
    pub cost: Cost,
    /// Whether the limit only watches.
    pub shadow: bool,
}

impl MemoryStore {
    /// An empty store.
    pub fn new(options: MemoryOptions) -> MemoryStore {
        MemoryStore::build(options, false)
    }

    /// A store that stands in for another while that is down. It also keeps reservations that charged nothing, so that it knows
    /// which of them are its own.
    pub fn for_fallback(options: MemoryOptions) -> MemoryStore {
        MemoryStore::build(options, true)
    }

    fn build(options: MemoryOptions, keeps_empty: bool) -> MemoryStore {
        let budget = Arc::new(Budget::new(options.max_keys, options.when_full));
        let contention = Arc::<Contention>::default();
        let reservation_bytes = options.reservation_bytes.unwrap_or((options.max_keys / 4 * 40).max(1 << 20));
        let making = Making {
            clock: options.clock.clone(),
            start: options.clock.now(),
            budget: budget.clone(),
            contention: contention.clone(),
            wall: Arc::new(Wall::new(options.clock.clone())),
        };
        let inner = Arc::new(Inner {
            clock: options.clock,
            seeds: Seeds::random(),
            budget,
            contention,
            making,
            tables: Mutex::default(),
            holds: Holds::new(reservation_bytes, keeps_empty),
        });
        if let Some(every) = options.sweep_every {
            sweep::spawn(&inner, every);
        }
        MemoryStore { inner }
    }

    /// The short way to a limit. The same name leads to the same counters, as long as the strategy is the same (a token bucket
    /// may become a leaky one): a limit whose numbers were changed finds what was consumed under the old ones.
    ///
    /// ```
    /// use tollgate_store::{Cost, Limit, MemoryOptions, MemoryStore, Micros, StoredLimit};
    ///
    /// let store = MemoryStore::new(MemoryOptions::default());
    /// let of = |count| StoredLimit::new("api", Limit::fixed_window(count, Micros::from_secs(60)).unwrap());
    /// let five = Cost::new(5).unwrap();
    /// assert_eq!(store.open(&of(10)).charge("user:42", five).remaining, 5);
    /// assert_eq!(store.open(&of(20)).charge("user:42", five).remaining, 10);
    /// ```
    ///
    /// A limit that is held goes on by its own numbers, over the same counters. Buckets of different numbers, and counters of
    /// different windows, hand a key over to its next charge; a key that is begun under the old numbers at the very moment of
    /// a change may be begun under both. A caller that changes limits under load must let nobody charge the old ones meanwhile.
    pub fn open(&self, stored: &StoredLimit) -> MemoryLimit {
        self.open_as(stored, Opened::ToHold)
    }

    fn open_as(&self, stored: &StoredLimit, opened: Opened) -> MemoryLimit {
        let limit_table = self.inner.tables.lock().open(stored, opened, &self.inner.making);
        let lease = match stored.limit {
            Limit::Concurrency(leases) => Some(leases.lease()),
            _ => None,
        };
        let token_table = limit_table.clone().into_any().downcast().ok();
        MemoryLimit {
            store: self.clone(),
            name: stored.name.as_str().into(),
            limit_table,
            token_table,
            lease,
        }
    }

    /// The store's clock.
    pub fn clock(&self) -> &Clock {
        &self.inner.clock
    }

    /// How many keys are remembered.
    pub fn keys(&self) -> usize {
        self.inner.tables.lock().all().map(|limit_table| limit_table.len()).sum()
    }

    /// How much of `max_keys` is used: keys, log entries and leases.
    pub fn used(&self) -> usize {
        self.inner.budget.used()
    }

    /// How many bytes reservations and permits take of `reservation_bytes`.
    pub fn reservation_bytes(&self) -> usize {
        self.inner.holds.bytes()
    }

    /// How often a charge found counters locked or changed under it, and had to wait or to look again.
    pub fn contention(&self) -> u64 {
        self.inner.contention.count()
    }

    /// Forgets every key that is as good as new and every reservation whose time has run out. Returns how many.
    pub fn sweep(&self) -> usize {
        self.inner.sweep_part(1)
    }

    /// Charges all items, or none. With a hold the charge can be settled later.
    pub fn charge_all(&self, items: &[MemoryCharge<'_>], hold: Option<Hold>) -> Result<Charged, StoreError> {
        let Some(hold) = hold else {
            let now = self.inner.clock.now();
            let mut outcomes = Outcomes::new();
            return Ok(match self.inner.charge_seen(items, now, &mut |outcome| outcomes.push(outcome)) {
                Some(allowed) => Charged { allowed, outcomes },
                None => self.inner.charge_all(items, now, Holder::default(), |_| ()),
            });
        };
        let now = self.inner.clock.now();
        let mut keys = Keys::new();
        for item in items.iter().filter(|item| item.limit.lease.is_none()) {
            let key = self.inner.seeds.fingerprint(item.key);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        let holder = Holder { id: hold.id.get(), until_released: hold.ttl == Hold::UNTIL_RELEASED };
        self.inner.holds.hold(hold, items.len(), keys, self.inner.pair_of(items), now, |keep| {
            self.inner.charge_all(items, now, holder, keep)
        })
    }

    /// Charges all items, or none, if all keys are remembered already and it can be done without waiting; hands over what each
    /// limit says, in order, and says whether the charge was admitted. `None`, and nothing charged, if not.
    #[inline]
    pub fn charge_known(&self, items: &[MemoryCharge<'_>], mut say: impl FnMut(Outcome)) -> Option<bool> {
        self.inner.charge_seen(items, self.inner.clock.now(), &mut say)
    }

    /// Answers as [`charge_all`](Self::charge_all) would, and changes nothing.
    pub fn peek_all(&self, items: &[MemoryCharge<'_>]) -> Charged {
        self.inner.peek_all(items, self.inner.clock.now())
    }

    /// Corrects, releases or renews a held charge.
    pub fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        self.inner.holds.settle(id, settlement, self.inner.clock.now())
    }

    /// Releases the leases of a held charge, leaves what else it charged as it is, and forgets it: for a holder who alone
    /// knows its name. A settled charge is remembered until its time is up, and that is room that a busy pool does not have.
    pub fn release(&self, id: ChargeId) {
        self.inner.holds.release(id, self.inner.clock.now());
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("keys", &self.keys())
            .field("used", &self.used())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLimit")
            .field("name", &self.name)
            .field("keys", &self.limit_table.len())
            .finish()
    }
}

impl MemoryLimit {
    /// Charges one key.
    #[inline]
    pub fn charge(&self, key: &str, cost: Cost) -> Outcome {
        let fingerprint = self.store.inner.seeds.fingerprint(key);
        self.limit_table.charge(fingerprint, cost, self.store.inner.clock.now())
    }

    /// Charges a key that is remembered already, if that can be done without waiting, and writes the answer into `outcome`. False,
    /// and nothing is charged, if not. A text that was never charged is never known, so a caller who charges only sound keys need
    /// not look at a known one again.
    pub fn charge_known(&self, key: &str, cost: Cost, outcome: &mut Outcome) -> bool {
        if let Some(charged) = self.charge_known_bucket(key, cost) {
            *outcome = charged.outcome();
            return true;
        }
        let inner = &*self.store.inner;
        self.token_table.is_none()
            && self.limit_table.charge_known(inner.seeds.fingerprint(key), cost, inner.clock.now(), outcome)
    }

    /// [`charge_known`](Self::charge_known) for a token bucket, with the answer still to be worked out. `None`, and nothing is charged,
    /// also for other limits.
    #[inline(always)]
    pub fn charge_known_bucket(&self, key: &str, cost: Cost) -> Option<ChargedBucket<'_>> {
        let table = self.token_table.as_deref()?;
        let inner = &*self.store.inner;
        let fit = table.charge_seen(inner.seeds.fingerprint(key), cost, inner.clock.now())?;
        Some(ChargedBucket { table, fit, cost })
    }

    /// [`charge_known`](Self::charge_known) for many keys, at one reading of the clock, fetched from memory sixteen at a
    /// time. Each answer is written into the numbers of its place in `outcomes`; `otherwise` is handed the place of a key that is not known.
    #[inline]
    pub fn charge_known_many<K: AsRef<str>, O>(
        &self,
        keys: &[K],
        cost: Cost,
        outcomes: &mut [O],
        numbers: impl Fn(&mut O) -> &mut Outcome,
        mut otherwise: impl FnMut(usize, &mut O),
    ) {
        const BATCH: usize = 16;
        let inner = &*self.store.inner;
        let now = inner.clock.now();
        let mut done = 0;
        if let Some(table) = self.token_table.as_deref() {
            let (batches, _) = keys.as_chunks::<BATCH>();
            for batch in batches {
                let fingerprints: [Fingerprint; BATCH] =
                    std::array::from_fn(|index| inner.seeds.fingerprint(batch[index].as_ref()));
                table.charge_seen_many(&fingerprints, cost, now, |index, fit| {
                    let outcome = &mut outcomes[done + index];
                    match fit {
                        Some(fit) => *numbers(outcome) = table.cell.outcome(fit, cost),
                        None => otherwise(done + index, outcome),
                    }
                });
                done += BATCH;
            }
        }
        for (index, (key, outcome)) in keys.iter().zip(outcomes).enumerate().skip(done) {
            let key = inner.seeds.fingerprint(key.as_ref());
            if !self.limit_table.charge_known(key, cost, now, numbers(outcome)) {
                otherwise(index, outcome);
            }
        }
    }

    /// Charges each of many keys `cost`, in order, at one reading of the clock, and adds the answers to `outcomes`. Keys are
    /// fetched from memory together, which is about twice as fast as one by one when there are millions.
    pub fn charge_many<K: AsRef<str>>(&self, keys: &[K], cost: Cost, outcomes: &mut Vec<Outcome>) {
        let start = outcomes.len();
        outcomes.resize(start + keys.len(), Outcome::BLOCKED);
        let slowly = |index: usize, outcome: &mut Outcome| *outcome = self.charge(keys[index].as_ref(), cost);
        self.charge_known_many(keys, cost, &mut outcomes[start..], |outcome| outcome, slowly);
    }

    /// Answers as a charge would, and changes nothing.
    pub fn peek(&self, key: &str, cost: Cost) -> Outcome {
        let fingerprint = self.store.inner.seeds.fingerprint(key);
        self.limit_table.peek(fingerprint, cost, self.store.inner.clock.now())
    }

    /// How a key stands: what is left of how much, for how long, and whether one more unit would fit.
    pub fn status(&self, key: &str) -> Outcome {
        // A charge of everything there could ever be is refused and changes nothing, so its answer shows the key as it stands.
        let standing = self.peek(key, Cost::MAX);
        let one = self.peek(key, Cost::ONE);
        Outcome { allowed: one.allowed, retry_after: one.retry_after, ..standing }
    }

    /// Gives a key `amount` of what counts now back, the newest first and never more than there is; false when nothing was
    /// remembered. What it was charged together with other newcomers, for want of room, is not given back.
    pub fn refund(&self, key: &str, amount: Cost) -> bool {
        let inner = &*self.store.inner;
        // No limit holds more than the largest count, so more than that says no more.
        let amendment = Amendment::Refund { amount: amount.get().min(MAX_COUNT) };
        self.limit_table.amend(inner.seeds.fingerprint(key), false, amendment, inner.clock.now()).is_found()
    }

    /// Forgets a key; false when nothing was remembered.
    pub fn forget(&self, key: &str) -> bool {
        self.limit_table.forget(self.store.inner.seeds.fingerprint(key))
    }

    /// How many keys are remembered under this limit, whatever its numbers are or were when they were charged.
    pub fn keys(&self) -> usize {
        self.store.inner.tables.lock().keys_of(&self.name, &*self.limit_table)
    }
}

/// The memory store as any other, for those who choose a store at start. It answers at once.
impl Store for MemoryStore {
    fn charge<'a>(&'a self, items: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move { self.with_opened(items, |items| self.charge_all(items, hold)) })
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async move { MemoryStore::settle(self, id, settlement) })
    }

    fn peek<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(async move { Ok(self.with_opened(items, |items| self.peek_all(items))) })
    }

    fn refund<'a>(&'a self, items: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        let refund = |item: &MemoryCharge<'_>| {
            item.limit.refund(item.key, item.cost);
        };
        Box::pin(async move {
            self.with_opened(items, |items| items.iter().for_each(refund));
            Ok(())
        })
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { Ok(self.open_as(limit, Opened::ByCall).forget(key)) })
    }

    fn mode(&self) -> &'static str {
        "memory"
    }
}

impl MemoryStore {
    fn with_opened<R>(&self, items: &[StoredCharge<'_>], run: impl FnOnce(&[MemoryCharge<'_>]) -> R) -> R {
        let limits: SmallVec<[MemoryLimit; 4]> =
            items.iter().map(|item| self.open_as(item.limit, Opened::ByCall)).collect();
        let items: SmallVec<[MemoryCharge<'_>; 4]> = (items.iter().zip(&limits))
            .map(|(item, limit)| MemoryCharge { limit, key: item.key, cost: item.cost, shadow: item.shadow })
            .collect();
        run(&items)
    }
}
