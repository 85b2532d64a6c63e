//! The memory store: in this process, for millions of keys, in bounded memory.
//!
//! A limit has a table (table.rs) in the layout of its strategy. A table knows a key by its fingerprint, 96 bits of a hash with
//! random seeds; the text is not stored. A charge on one limit goes directly to its table; charge.rs charges several limits, all
//! or none. Reservations are in holds.rs. A thread removes idle keys now and then. The engine calls this module from
//! `engine/fast_path.rs` and `engine/local.rs`.

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
use crate::records::RecordTable;
use crate::{
    ChargeId, Charged, Hold, Outcomes, PutRecord, Record, RecordKind, Records, Settled, Settlement, Store,
    StoreError, StoreFuture, StoredCharge, StoredLimit,
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
    /// How often a background thread removes idle keys: it works through the whole store in ten such turns. `None` starts no
    /// thread; [`MemoryStore::sweep`] does the same by hand.
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

/// Holds the counters in this process. Cheap to clone; clones share the state.
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
    records: RecordTable,
}

/// A limit in a memory store: a direct handle on its table.
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

/// A charge of a token bucket that was carried out; the other fields of its outcome are computed when they are read.
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
        self.fit.is_allowed()
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
    /// The canonical text of the key.
    pub key: &'a str,
    /// How much.
    pub cost: Cost,
    /// Whether this is a shadow limit.
    pub shadow: bool,
}

impl MemoryStore {
    /// An empty store.
    pub fn new(options: MemoryOptions) -> MemoryStore {
        MemoryStore::build(options, false)
    }

    /// A store that replaces another while that is down. It also remembers reservations that charged nothing, so that it knows
    /// which ones are its own.
    pub fn for_fallback(options: MemoryOptions) -> MemoryStore {
        MemoryStore::build(options, true)
    }

    fn build(options: MemoryOptions, keeps_empty: bool) -> MemoryStore {
        let budget = Arc::new(Budget::new(options.max_keys, options.when_full));
        let contention = Arc::<Contention>::default();
        // Where the number of keys is unbounded in practice, so are the bytes.
        let a_quarter = (options.max_keys / 4).saturating_mul(40).max(1 << 20);
        let reservation_bytes = options.reservation_bytes.unwrap_or(a_quarter);
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
            records: RecordTable::default(),
        });
        if let Some(every) = options.sweep_every {
            sweep::spawn(&inner, every);
        }
        MemoryStore { inner }
    }

    /// A direct handle on a limit. The same name has the same counters, as long as the strategy is the same (a token bucket may
    /// become a leaky bucket): a limit with new numbers finds what was consumed under the old ones.
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
    /// A handle keeps its own numbers, over the same counters. Buckets with different numbers, and counters with different
    /// windows, hand a key over at its next charge. A key that starts under the old numbers at the very moment of a change may
    /// start under both. A caller that changes limits under load must prevent charges of the old ones meanwhile.
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

    /// Removes every idle key and every expired reservation. Returns how many.
    pub fn sweep(&self) -> usize {
        self.inner.sweep_part(1)
    }

    /// Makes all charges, or none. With a hold they can be settled later.
    pub fn charge_all(
        &self,
        charges: &[MemoryCharge<'_>],
        hold: Option<Hold>,
    ) -> Result<Charged, StoreError> {
        let Some(hold) = hold else {
            let now = self.inner.clock.now();
            let mut outcomes = Outcomes::new();
            return Ok(match self.inner.charge_seen(charges, now, &mut |outcome| outcomes.push(outcome)) {
                Some(allowed) => Charged { allowed, outcomes },
                None => self.inner.charge_all(charges, now, Holder::default(), |_| ()),
            });
        };
        let now = self.inner.clock.now();
        let mut keys = Keys::new();
        for charge in charges.iter().filter(|charge| charge.limit.lease.is_none()) {
            let key = self.inner.seeds.fingerprint(charge.key);
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
        let holder = Holder { id: hold.id.get(), until_released: hold.ttl == Hold::UNTIL_RELEASED };
        self.inner.holds.hold(hold, self.inner.request(charges), keys, now, |keep| {
            self.inner.charge_all(charges, now, holder, keep)
        })
    }

    /// Makes all charges, or none, if all keys have state already and no lock has to be waited for. Passes on the outcome of each
    /// limit, in order, and returns whether the charge was admitted. `None`, with nothing charged, if this is not possible.
    #[inline]
    pub fn charge_known(&self, charges: &[MemoryCharge<'_>], mut say: impl FnMut(Outcome)) -> Option<bool> {
        self.inner.charge_seen(charges, self.inner.clock.now(), &mut say)
    }

    /// [`charge_known`](Self::charge_known) for two token buckets, with the answers still to be worked out. `None`, and nothing is
    /// charged, also for other limits.
    #[inline(always)]
    pub fn charge_two_known<'a>(
        &self,
        one: &MemoryCharge<'a>,
        two: &MemoryCharge<'a>,
    ) -> Option<[ChargedBucket<'a>; 2]> {
        let inner = &*self.inner;
        let (is_allowed, mut fit_one, mut fit_two) =
            inner.charge_two_seen(one, two, inner.clock.recent())??;
        if !is_allowed && inner.clock.is_coarse() {
            (fit_one, fit_two) = inner.charge_two_again(one, two, fit_one, fit_two)?;
        }
        let (table_one, table_two) = (one.limit.token_table.as_deref()?, two.limit.token_table.as_deref()?);
        Some([
            ChargedBucket { table: table_one, fit: fit_one, cost: one.cost },
            ChargedBucket { table: table_two, fit: fit_two, cost: two.cost },
        ])
    }

    /// Answers as [`charge_all`](Self::charge_all) would, and changes nothing.
    pub fn peek_all(&self, charges: &[MemoryCharge<'_>]) -> Charged {
        self.inner.peek_all(charges, self.inner.clock.now())
    }

    /// Corrects, releases or renews a held charge.
    pub fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, StoreError> {
        self.inner.holds.settle(id, settlement, self.inner.clock.now())
    }

    /// Releases the leases of a reservation, leaves its other charges, and forgets it: for a holder that alone knows its id. A
    /// settled reservation would be remembered until it expires, and a busy pool has no room for that.
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

    /// Charges a key that has state already, if no lock has to be waited for, and writes the answer into `outcome`. False, with
    /// nothing charged, if this is not possible. A key that was never charged has no state, so a caller that charges only valid
    /// keys need not parse a known one again.
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
        let key = inner.seeds.fingerprint(key);
        let mut fit = table.charge_seen(key, cost, inner.clock.recent())?;
        if inner.may_fit_by_now(table, fit, cost) {
            fit = inner.charge_again(table, key, cost)?;
        }
        Some(ChargedBucket { table, fit, cost })
    }

    /// [`charge_known`](Self::charge_known) for many keys, at one reading of the clock, fetched from memory sixteen at a
    /// time. Each answer is written into the numbers of its place in `outcomes`; `unknown` gets the place of a key that is not known.
    #[inline]
    pub fn charge_known_many<K: AsRef<str>, O>(
        &self,
        keys: &[K],
        cost: Cost,
        outcomes: &mut [O],
        numbers: impl Fn(&mut O) -> &mut Outcome,
        mut unknown: impl FnMut(usize, &mut O),
    ) {
        const BATCH: usize = 16;
        let inner = &*self.store.inner;
        let Some(table) = self.token_table.as_deref() else {
            let now = inner.clock.now();
            for (index, (key, outcome)) in keys.iter().zip(outcomes).enumerate() {
                let key = inner.seeds.fingerprint(key.as_ref());
                if !self.limit_table.charge_known(key, cost, now, numbers(outcome)) {
                    unknown(index, outcome);
                }
            }
            return;
        };
        let now = inner.clock.recent();
        let (batches, rest) = keys.as_chunks::<BATCH>();
        for (number, batch) in batches.iter().enumerate() {
            let fingerprints: [Fingerprint; BATCH] =
                std::array::from_fn(|index| inner.seeds.fingerprint(batch[index].as_ref()));
            table.charge_seen_many(&fingerprints, cost, now, |index, mut fit| {
                if fit.is_some_and(|fit| inner.may_fit_by_now(table, fit, cost)) {
                    fit = inner.charge_again(table, fingerprints[index], cost);
                }
                let index = number * BATCH + index;
                let outcome = &mut outcomes[index];
                match fit {
                    Some(fit) => *numbers(outcome) = table.cell.outcome(fit, cost),
                    None => unknown(index, outcome),
                }
            });
        }
        let done = batches.len() * BATCH;
        for (index, (key, outcome)) in rest.iter().zip(&mut outcomes[done..]).enumerate() {
            let key = inner.seeds.fingerprint(key.as_ref());
            let mut fit = table.charge_seen(key, cost, now);
            if fit.is_some_and(|fit| inner.may_fit_by_now(table, fit, cost)) {
                fit = inner.charge_again(table, key, cost);
            }
            match fit {
                Some(fit) => *numbers(outcome) = table.cell.outcome(fit, cost),
                None => unknown(done + index, outcome),
            }
        }
    }

    /// The whole answer to a charge of this limit, which is a token bucket.
    #[inline]
    fn bucket_outcome(&self, fit: Fit, cost: Cost) -> Outcome {
        self.token_table.as_ref().map_or(Outcome::BLOCKED, |table| table.cell.outcome(fit, cost))
    }

    /// Answers as a charge would, and changes nothing.
    pub fn peek(&self, key: &str, cost: Cost) -> Outcome {
        let fingerprint = self.store.inner.seeds.fingerprint(key);
        self.limit_table.peek(fingerprint, cost, self.store.inner.clock.now())
    }

    /// The state of a key: what is left, the capacity, the reset time, and whether one more unit would fit.
    pub fn status(&self, key: &str) -> Outcome {
        // A cost above every limit is refused and changes nothing, so its outcome shows the current state.
        let current = self.peek(key, Cost::MAX);
        let one = self.peek(key, Cost::ONE);
        Outcome { allowed: one.allowed, retry_after: one.retry_after, ..current }
    }

    /// Gives a key `amount` back, newest first and never more than is charged now; false if the key has no state. Charges in the
    /// shared state of a full store are not given back.
    pub fn refund(&self, key: &str, amount: Cost) -> bool {
        let inner = &*self.store.inner;
        // No limit holds more than the largest count, so a larger amount means the same.
        let amendment = Amendment::Refund { amount: amount.get().min(MAX_COUNT) };
        self.limit_table.amend(inner.seeds.fingerprint(key), false, amendment, inner.clock.now()).is_found()
    }

    /// Forgets a key; false when nothing was remembered.
    pub fn forget(&self, key: &str) -> bool {
        self.limit_table.forget(self.store.inner.seeds.fingerprint(key))
    }

    /// The number of keys under this limit, including keys that were charged under other numbers.
    pub fn keys(&self) -> usize {
        self.store.inner.tables.lock().keys_of(&self.name, &*self.limit_table)
    }
}

impl Inner {
    /// Whether a charge was denied by a reading of a coarse clock that may be too old for that.
    #[inline(always)]
    fn may_fit_by_now(&self, table: &TokenTable, fit: Fit, cost: Cost) -> bool {
        let bucket = &table.cell.algorithm;
        !fit.is_allowed() && self.clock.may_have_overtaken(|late| bucket.fits_within(fit, cost, late))
    }

    /// Repeats such a charge with the exact clock. `None` if a lock was taken.
    #[inline(never)]
    fn charge_again(&self, table: &TokenTable, key: Fingerprint, cost: Cost) -> Option<Fit> {
        table.charge_seen(key, cost, self.clock.now())
    }

    /// The same for two.
    #[inline(never)]
    fn charge_two_again(
        &self,
        one: &MemoryCharge<'_>,
        two: &MemoryCharge<'_>,
        fit_one: Fit,
        fit_two: Fit,
    ) -> Option<(Fit, Fit)> {
        let may_fit = |charge: &MemoryCharge<'_>, fit: Fit| {
            let table = charge.limit.token_table.as_deref();
            fit.is_allowed() || table.is_some_and(|table| self.may_fit_by_now(table, fit, charge.cost))
        };
        if !may_fit(one, fit_one) || !may_fit(two, fit_two) {
            return Some((fit_one, fit_two));
        }
        let (_, fit_one, fit_two) = self.charge_two_seen(one, two, self.clock.now())??;
        Some((fit_one, fit_two))
    }
}

/// The memory store as a [`Store`], for callers that choose a store at start. It answers at once.
impl Store for MemoryStore {
    fn charge<'a>(&'a self, charges: &'a [StoredCharge<'a>], hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move { self.with_opened(charges, |charges| self.charge_all(charges, hold)) })
    }

    fn settle<'a>(&'a self, id: ChargeId, settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async move { MemoryStore::settle(self, id, settlement) })
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        Box::pin(async move { Ok(self.with_opened(charges, |charges| self.peek_all(charges))) })
    }

    fn refund<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, ()> {
        let refund = |charge: &MemoryCharge<'_>| {
            charge.limit.refund(charge.key, charge.cost);
        };
        Box::pin(async move {
            self.with_opened(charges, |charges| charges.iter().for_each(refund));
            Ok(())
        })
    }

    fn forget<'a>(&'a self, limit: &'a StoredLimit, key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { Ok(self.open_as(limit, Opened::ByCall).forget(key)) })
    }

    fn records(&self, kind: RecordKind, known: Option<u64>) -> StoreFuture<'_, Records> {
        Box::pin(async move { Ok(self.inner.records.read(kind, known, self.inner.clock.now())) })
    }

    fn put_record<'a>(&'a self, kind: RecordKind, record: &'a Record) -> StoreFuture<'a, PutRecord> {
        Box::pin(async move { self.inner.records.put(kind, record, self.inner.clock.now()) })
    }

    fn remove_record<'a>(&'a self, kind: RecordKind, id: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async move { self.inner.records.remove(kind, id, self.inner.clock.now()) })
    }

    fn mode(&self) -> &'static str {
        "memory"
    }
}

impl MemoryStore {
    fn with_opened<R>(&self, charges: &[StoredCharge<'_>], run: impl FnOnce(&[MemoryCharge<'_>]) -> R) -> R {
        let limits: SmallVec<[MemoryLimit; 4]> =
            charges.iter().map(|charge| self.open_as(charge.limit, Opened::ByCall)).collect();
        let charges: SmallVec<[MemoryCharge<'_>; 4]> = (charges.iter().zip(&limits))
            .map(|(charge, limit)| MemoryCharge {
                limit,
                key: charge.key,
                cost: charge.cost,
                shadow: charge.shadow,
            })
            .collect();
        run(&charges)
    }
}
