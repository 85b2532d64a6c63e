//! Reservations to be settled and leases to be released, by id, until they expire.
//!
//! The shard of a hold stays locked while its charge or settlement is carried out, so one id is charged once and settled once
//! however often it is sent. The order of locks is always holds first, then tables.
//!
//! Holds have a separate budget, in bytes, so that reservations never take the room of keys. A hold stays until it expires,
//! settled or not, because a second settlement must be recognised. So the holds of one key are bounded as well, by the room that
//! is still free, and a client with some keys cannot use up the room of others. A charge over several keys is refused only if all
//! of them are at their bounds: a key that all clients share must not block them.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{self, AtomicUsize};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{MAX_COUNT, Micros, Outcome, Taken};

use super::cell::{Amended, Amendment};
use super::limit_table::LimitTable;
use super::node::Fingerprint;
use crate::{ChargeId, Charged, Hold, Outcomes, Settled, Settlement, StoreError};

const SHARDS: usize = 32;

/// The most open reservations of one key. A key with ten thousand concurrent calls is not one client any more; and it is a
/// twentieth of the default budget. Leases are not counted: their limit bounds them.
pub(crate) const MOST_OPEN_PER_KEY: usize = 10_000;

/// One limit of a held charge.
pub(crate) struct HeldCharge {
    pub(crate) name: Arc<str>,
    /// Which pair of the charge it is, in their order: some may have taken nothing.
    pub(crate) number: usize,
    pub(crate) limit_table: Arc<dyn LimitTable>,
    /// How long its lease lasts, if it is one.
    pub(crate) lease: Option<Micros>,
    pub(crate) key: Fingerprint,
    /// The charge and its time; for a lease, its end.
    pub(crate) taken: Taken,
    pub(crate) in_shared: bool,
}

/// What identifies a held charge: the same id with another request is another charge.
pub(crate) struct HoldRequest {
    /// How many charges the call has.
    pub(crate) limits: usize,
    /// The pair of each charge of the call; empty if no pair is repeated.
    pub(crate) pair_of: Box<[u16]>,
    /// Of its pairs of limit and key, and their costs, in order. Keys are hashed under secret keys.
    pub(crate) hash: u64,
}

/// A charge that can be settled.
struct Held {
    parts: SmallVec<[HeldCharge; 1]>,
    /// The pair of each charge of the call; empty if no pair is repeated.
    pair_of: Box<[u16]>,
    /// The outcome of each limit, for a charge that is sent again.
    answer: SmallVec<[Outcome; 1]>,
    /// Of its request.
    hash: u64,
    /// The keys that it is counted for.
    keys: Keys,
    ttl: Micros,
    end: Micros,
    bytes: usize,
}

/// A charge that was settled, until its time runs out.
struct Done {
    answer: Box<[Outcome]>,
    hash: u64,
    keys: Keys,
    end: Micros,
}

impl Done {
    fn bytes(&self) -> usize {
        settled_bytes_of(self.answer.len(), self.keys.len())
    }
}

/// The entry of an id. An open one is boxed, because most are settled and small.
enum Entry {
    Open(Box<Held>),
    Settled(Done),
}

impl Entry {
    fn end(&self) -> Micros {
        match self {
            Entry::Open(held) => held.end,
            Entry::Settled(done) => done.end,
        }
    }

    fn hash(&self) -> u64 {
        match self {
            Entry::Open(held) => held.hash,
            Entry::Settled(done) => done.hash,
        }
    }

    /// The outcomes of the charge.
    fn answer(&self) -> &[Outcome] {
        match self {
            Entry::Open(held) => &held.answer,
            Entry::Settled(done) => &done.answer,
        }
    }
}

type Shard = HashMap<u128, Entry>;

/// Keys, each once.
pub(crate) type Keys = SmallVec<[Fingerprint; 1]>;

/// The counts of one key.
#[derive(Default)]
struct PerKey {
    open: usize,
    bytes: usize,
}

/// For keys that are a keyed hash already: half of a fingerprint is its hash.
#[derive(Default)]
struct HashedAlready(u64);

impl Hasher for HashedAlready {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = self.0.rotate_left(8) ^ u64::from(byte));
    }

    fn write_u64(&mut self, lo: u64) {
        // The low bits chose the shard.
        self.0 = lo.rotate_left(32);
    }

    /// `lo` is enough to hash.
    fn write_u32(&mut self, _hi: u32) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The counts of each key, by its fingerprint.
type PerKeys = HashMap<(u64, u32), PerKey, BuildHasherDefault<HashedAlready>>;

pub(crate) struct Holds {
    shards: [Mutex<Shard>; SHARDS],
    per_key: [Mutex<PerKeys>; SHARDS],
    most_bytes: usize,
    bytes: AtomicUsize,
    /// Whether holds that charged nothing are remembered.
    keeps_empty: bool,
}

/// The bytes of an entry in a map that has just doubled.
const fn in_map<T>() -> usize {
    size_of::<T>() * 5 / 2
}

/// The bytes of a hold of this many limits, counted for this many keys: its slot in a map, and its box.
fn bytes_of(limits: usize, keys: usize) -> usize {
    // A list that does not fit in its place has room for up to twice as many, and costs its allocation.
    let aside = |count: usize, size: usize| if count > 1 { 2 * count * size + 32 } else { 0 };
    in_map::<(u128, Entry)>()
        + size_of::<Held>()
        + 16
        + aside(limits, size_of::<HeldCharge>())
        + aside(limits, size_of::<Outcome>())
        + aside(limits, size_of::<u16>())
        + bytes_of_keys(keys)
}

/// The same once it is settled, which is always less.
fn settled_bytes_of(limits: usize, keys: usize) -> usize {
    in_map::<(u128, Entry)>() + limits * size_of::<Outcome>() + 32 + bytes_of_keys(keys)
}

fn bytes_of_keys(keys: usize) -> usize {
    let aside = if keys > 1 { 2 * keys * size_of::<Fingerprint>() + 32 } else { 0 };
    keys * in_map::<((u64, u32), PerKey)>() + aside
}

impl Holds {
    pub(crate) fn new(most_bytes: usize, keeps_empty: bool) -> Holds {
        Holds {
            shards: Default::default(),
            per_key: Default::default(),
            most_bytes,
            bytes: AtomicUsize::new(0),
            keeps_empty,
        }
    }

    fn shard(&self, id: ChargeId) -> &Mutex<Shard> {
        let shard = id.get() % (SHARDS as u128);
        &self.shards[usize::try_from(shard).unwrap_or(0)]
    }

    /// How many bytes are taken.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.load(atomic::Ordering::Relaxed)
    }

    fn take_bytes(&self, bytes: usize) -> bool {
        let take = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.most_bytes);
        self.bytes.fetch_update(atomic::Ordering::Relaxed, atomic::Ordering::Relaxed, take).is_ok()
    }

    fn with_key<R>(&self, key: Fingerprint, run: impl FnOnce(&mut PerKey) -> R) -> R {
        let shard = usize::try_from(key.lo % (SHARDS as u64)).unwrap_or(0);
        let mut shard = self.per_key[shard].lock();
        let per_key = shard.entry((key.lo, key.hi)).or_default();
        let answer = run(per_key);
        if per_key.open == 0 && per_key.bytes == 0 {
            shard.remove(&(key.lo, key.hi));
            if shard.len() < shard.capacity() / 4 {
                shard.shrink_to_fit();
            }
        }
        answer
    }

    /// Counts a hold for its keys, unless all of them are at their bound: each may use as much as is still free for all. So a
    /// single key may use half of the room, and a key with few holds always finds some.
    fn count(&self, keys: &Keys, bytes: usize) -> bool {
        let mut has_room = keys.is_empty();
        let free = self.most_bytes.saturating_sub(self.bytes());
        for &key in keys {
            has_room |= self.with_key(key, |per_key| {
                per_key.open += 1;
                per_key.bytes += bytes;
                per_key.open <= MOST_OPEN_PER_KEY && per_key.bytes <= free
            });
        }
        if !has_room {
            self.uncount(keys, 1, bytes);
        }
        has_room
    }

    fn uncount(&self, keys: &Keys, open: usize, bytes: usize) {
        for &key in keys {
            self.with_key(key, |per_key| {
                per_key.open -= open;
                per_key.bytes -= bytes;
            });
        }
    }

    /// Gives back the room of a forgotten hold: this many open ones, and this many bytes.
    fn forget(&self, keys: &Keys, open: usize, bytes: usize) {
        self.uncount(keys, open, bytes);
        self.bytes.fetch_sub(bytes, atomic::Ordering::Relaxed);
    }

    fn forget_entry(&self, entry: &Entry) {
        match entry {
            Entry::Open(held) => self.forget(&held.keys, 1, held.bytes),
            Entry::Settled(done) => self.forget(&done.keys, 0, done.bytes()),
        }
    }

    /// Carries out a charge and holds it, unless its id is held already. It is counted for `keys`. If nothing was charged, nothing is
    /// held, unless the store is a fallback.
    pub(crate) fn hold(
        &self,
        hold: Hold,
        HoldRequest { limits, pair_of, hash }: HoldRequest,
        keys: Keys,
        now: Micros,
        charge: impl FnOnce(&mut dyn FnMut(HeldCharge)) -> Charged,
    ) -> Result<Charged, StoreError> {
        let mut shard = self.shard(hold.id).lock();
        if let Some(entry) = shard.get(&hold.id.get()).filter(|entry| now < entry.end()) {
            if entry.hash() != hash {
                return Err(StoreError::id_taken());
            }
            return Ok(Charged { allowed: true, outcomes: Outcomes::from_slice(entry.answer()) });
        }
        let bytes = bytes_of(limits, keys.len());
        if !self.take_bytes(bytes) {
            return Err(StoreError::full(
                "no room to remember another reservation; settle open ones, shorten their time to live or raise reservation_bytes",
            ));
        }
        if !self.count(&keys, bytes) {
            self.bytes.fetch_sub(bytes, atomic::Ordering::Relaxed);
            return Err(StoreError::full(format!(
                "the key has {MOST_OPEN_PER_KEY} reservations open, or as much of the room as is left for all; settle some, or shorten their time to live"
            )));
        }
        let mut parts = SmallVec::new();
        let answer = charge(&mut |part| parts.push(part));
        let longest_lease = parts.iter().filter_map(|part: &HeldCharge| part.lease).max();
        let ttl = match hold.ttl {
            Hold::UNTIL_RELEASED => hold.ttl,
            ttl => ttl.min(Hold::MAX_TTL).max(longest_lease.unwrap_or_default()),
        };
        if !answer.allowed || parts.is_empty() && !self.keeps_empty {
            self.forget(&keys, 1, bytes);
            return Ok(answer);
        }
        let (outcomes, end) = (SmallVec::from_slice(&answer.outcomes), now.saturating_add(ttl));
        let held = Box::new(Held { parts, pair_of, answer: outcomes, hash, keys, ttl, end, bytes });
        if let Some(ended) = shard.insert(hold.id.get(), Entry::Open(held)) {
            // A hold of the same name had run out and was not yet swept.
            self.forget_entry(&ended);
        }
        Ok(answer)
    }

    pub(crate) fn settle(
        &self,
        id: ChargeId,
        settlement: &Settlement,
        now: Micros,
    ) -> Result<Settled, StoreError> {
        let mut shard = self.shard(id).lock();
        let Some(entry) = shard.get_mut(&id.get()).filter(|entry| now < entry.end()) else {
            return Ok(Settled::Unknown);
        };
        let Entry::Open(held) = entry else { return Ok(Settled::Already) };
        let settled = match settlement {
            Settlement::Renew => return Ok(held.renew(id, now)),
            Settlement::Cancel => held.settle(id, now, |_| Some(0)),
            Settlement::Actual(actual) => {
                held.check_one_actual()?;
                held.settle(id, now, |_| Some(*actual))
            }
            Settlement::Each(actuals) => {
                held.check_count(actuals.len())?;
                let pair_of = mem::take(&mut held.pair_of);
                held.settle(id, now, |part| Some(total(actuals, &pair_of, part.number)))
            }
            Settlement::Named(actuals) => {
                held.check_names(actuals)?;
                held.settle(id, now, |part| {
                    actuals.iter().find(|(name, _)| **name == *part.name).map(|(_, actual)| *actual)
                })
            }
            Settlement::Release => held.settle(id, now, |_| None),
        };
        let bytes = settled_bytes_of(held.answer.len(), held.keys.len());
        self.forget(&held.keys, 1, held.bytes - bytes);
        let (answer, hash, end) = (Box::from(&*held.answer), held.hash, held.end);
        let keys = mem::take(&mut held.keys);
        *entry = Entry::Settled(Done { answer, hash, keys, end });
        Ok(settled)
    }

    /// Ends a hold that will not be settled again: its leases are released, its charges stay, and it is forgotten.
    pub(crate) fn release(&self, id: ChargeId, now: Micros) {
        let mut shard = self.shard(id).lock();
        let Some(entry) = shard.remove(&id.get()) else { return };
        self.forget_entry(&entry);
        if let Entry::Open(mut held) = entry
            && now < held.end
        {
            held.settle(id, now, |_| None);
        }
    }

    /// Removes expired holds. Returns how many.
    pub(crate) fn sweep(&self, now: Micros) -> usize {
        let mut forgotten = 0;
        for shard in &self.shards {
            let mut shard = shard.lock();
            let before = shard.len();
            shard.retain(|_, entry| {
                let stays = now < entry.end();
                if !stays {
                    self.forget_entry(entry);
                }
                stays
            });
            forgotten += before - shard.len();
            if shard.len() < shard.capacity() / 4 {
                shard.shrink_to_fit();
            }
        }
        forgotten
    }
}

/// The actual cost of one pair.
fn total(actuals: &[u64], pair_of: &[u16], pair: usize) -> u64 {
    if pair_of.is_empty() {
        return actuals.get(pair).copied().unwrap_or_default();
    }
    let of_pair = actuals.iter().zip(pair_of).filter(|(_, other)| usize::from(**other) == pair);
    of_pair.fold(0, |sum, (actual, _)| sum.saturating_add(*actual))
}

impl Held {
    /// One number settles a charge only if it can mean the same under each of its limits.
    fn check_one_actual(&self) -> Result<(), StoreError> {
        let mut costs = self.parts.iter().filter(|part| part.lease.is_none()).map(|part| part.taken.cost);
        let first = costs.next();
        if costs.all(|cost| Some(cost) == first) {
            return Ok(());
        }
        let reserved: Vec<String> =
            self.parts.iter().map(|part| format!("{} {}", part.name, part.taken.cost)).collect();
        Err(StoreError::invalid(format!(
            "one actual amount cannot settle limits that reserved different amounts ({}); give one for each limit",
            reserved.join(", ")
        )))
    }

    /// One amount for each charge of the call.
    fn check_count(&self, count: usize) -> Result<(), StoreError> {
        match self.answer.len() == count {
            true => Ok(()),
            false => Err(StoreError::wrong_count(self.answer.len(), count)),
        }
    }

    fn check_names(&self, actuals: &[(String, u64)]) -> Result<(), StoreError> {
        let known = |name: &str| self.parts.iter().any(|part| *part.name == *name);
        match actuals.iter().find(|(name, _)| !known(name)) {
            None => Ok(()),
            Some((name, _)) => {
                let names: Vec<&str> = self.parts.iter().map(|part| &*part.name).collect();
                Err(StoreError::invalid(format!(
                    "this reservation holds nothing under the limit `{name}`; it holds {}",
                    names.join(", ")
                )))
            }
        }
    }

    /// Corrects every part. A charge of leases that are all gone (their key was reset) is no longer known.
    fn settle(
        &mut self,
        id: ChargeId,
        now: Micros,
        actual_of: impl Fn(&HeldCharge) -> Option<u64>,
    ) -> Settled {
        let mut found = self.parts.is_empty();
        for part in mem::take(&mut self.parts) {
            let Taken { cost, at } = part.taken;
            let amend = |amendment| part.limit_table.amend(part.key, part.in_shared, amendment, now);
            if part.lease.is_some() {
                found |= amend(Amendment::Release { holder: id.get(), end: at }).is_found();
                continue;
            }
            found = true;
            // No limit holds more than the largest count, so a larger amount means the same.
            let actual = actual_of(&part).unwrap_or(cost).min(MAX_COUNT);
            match actual.cmp(&cost) {
                Ordering::Less => {
                    amend(Amendment::GiveBack { taken: part.taken, amount: cost - actual });
                }
                Ordering::Greater => {
                    amend(Amendment::Debit { amount: actual - cost });
                }
                Ordering::Equal => {}
            }
        }
        if found { Settled::Done } else { Settled::Unknown }
    }

    /// Renews every lease of the charge. If one of them has run out the hold is lost, and none is renewed.
    fn renew(&mut self, id: ChargeId, now: Micros) -> Settled {
        let is_live = |part: &HeldCharge| part.lease.is_none() || part.taken.at > now;
        if !self.parts.iter().all(is_live) {
            return Settled::Unknown;
        }
        for part in self.parts.iter_mut().filter(|part| part.lease.is_some()) {
            let renewal = Amendment::Renew { holder: id.get(), end: part.taken.at };
            match part.limit_table.amend(part.key, part.in_shared, renewal, now) {
                Amended::Until(end) => part.taken.at = end,
                _ => return Settled::Unknown,
            }
        }
        self.end = now.saturating_add(self.ttl);
        Settled::Done
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Cost, Limit};

    use super::*;
    use crate::{ManualClock, MemoryCharge, MemoryOptions, MemoryStore, StoredLimit, WhenFull};

    fn store(reservation_bytes: usize) -> (MemoryStore, ManualClock) {
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let store = MemoryStore::new(MemoryOptions {
            clock: hands.clock(),
            max_keys: 1,
            reservation_bytes: Some(reservation_bytes),
            sweep_every: None,
            when_full: WhenFull::Share,
        });
        (store, hands)
    }

    fn hold(id: u128, secs: u64) -> Option<Hold> {
        Some(Hold { id: ChargeId::new(id).unwrap(), ttl: Micros::from_secs(secs) })
    }

    /// A reservation counted as one key of 40 bytes, and took 725 to 900: reservations pushed out keys, and memory had no bound.
    #[test]
    fn reservations_have_a_budget_of_their_own() {
        let one = bytes_of(1, 1);
        assert!((450..1_000).contains(&one), "{one} bytes");
        assert!(settled_bytes_of(1, 1) < 400, "{} bytes", settled_bytes_of(1, 1));
        for (limits, keys) in [(0, 0), (1, 0), (1, 1), (2, 1), (2, 2), (3, 3), (64, 1), (64, 64)] {
            assert!(settled_bytes_of(limits, keys) < bytes_of(limits, keys), "{limits} limits, {keys} keys");
        }
        let (store, hands) = store(7 * one);
        let api =
            store.open(&StoredLimit::new("api", Limit::fixed_window(100, Micros::from_secs(3_600)).unwrap()));
        let reserve = |id: u128, key: &str, limits: usize| {
            let charges = vec![MemoryCharge { limit: &api, key, cost: Cost::ONE, shadow: false }; limits];
            store.charge_all(&charges, hold(id, 60)).map(|charged| charged.allowed).ok()
        };
        // The name of a reservation, its limits, whether it is made, and the reservations' worth of bytes that are taken then.
        for (id, limits, expected, taken) in [
            (1, 1, Some(true), 1),
            (1, 1, Some(true), 1),
            (2, 1, Some(true), 2),
            (3, 1, Some(true), 3),
            (4, 1, None, 3),
        ] {
            let got = (reserve(id, "k", limits), store.inner.holds.bytes());
            assert_eq!(got, (expected, taken * one), "{id}: half of the room for one key");
        }
        assert_eq!(store.used(), 1, "the key, and nothing of the reservations");
        assert_eq!(reserve(9, "other", 64), None, "64 limits take more room than one");
        assert!(reserve(4, "other", 1).is_some());
        let id = ChargeId::new(1).unwrap();
        let before = store.reservation_bytes();
        assert_eq!(store.settle(id, &Settlement::Cancel).unwrap(), Settled::Done);
        assert!(store.reservation_bytes() < before, "what is settled takes less");
        assert_eq!(store.settle(id, &Settlement::Cancel).unwrap(), Settled::Already);
        assert_eq!(reserve(1, "k", 1), Some(true), "it is answered as before, and not charged again");
        store.release(ChargeId::new(2).unwrap());
        hands.advance(Micros::from_secs(60));
        assert_eq!(reserve(1, "k", 1), Some(true), "in the place of one that had run out");
        hands.advance(Micros::from_secs(60));
        store.sweep();
        assert_eq!(store.inner.holds.bytes(), 0);
        assert!(store.inner.holds.per_key.iter().all(|shard| shard.lock().is_empty()));
    }

    /// 46 keys used up the room of all: a key that has none of it yet found none.
    #[test]
    fn keys_that_take_much_leave_some_for_a_key_that_has_none() {
        let (store, _) = store(1 << 20);
        let limit = store.open(&StoredLimit::new("api", Limit::token_bucket("1/s", 1_000_000).unwrap()));
        let reserve = |key: &str, id: u128| {
            let charge = MemoryCharge { limit: &limit, key, cost: Cost::ONE, shadow: false };
            store.charge_all(&[charge], hold(id, 86_400)).is_ok()
        };
        let mut id = 0;
        let mut flood = |key: &str| {
            id += 1;
            reserve(key, id)
        };
        let keys: Vec<String> = (0..46).map(|number| format!("key {number}")).collect();
        while keys.iter().filter(|key| flood(key)).count() > 0 {}
        let found = (0..1_000).take_while(|_| flood("somebody else")).count();
        assert!(found >= 10, "{found}");
    }

    /// Regression: reservations that charged nothing (a shadow limit that denies, or no limit at all) were kept for their time to
    /// live.
    #[test]
    fn nothing_is_kept_where_there_is_nothing_to_settle() {
        let (store, _) = store(1 << 20);
        let api =
            store.open(&StoredLimit::new("api", Limit::fixed_window(1, Micros::from_secs(60)).unwrap()));
        assert!(api.charge("k", Cost::ONE).allowed);
        let watched = [MemoryCharge { limit: &api, key: "k", cost: Cost::ONE, shadow: true }];
        for charges in [&watched[..], &[]] {
            for id in 1..1_000 {
                assert!(store.charge_all(charges, hold(id, 86_400)).unwrap().allowed);
            }
        }
        assert_eq!(store.inner.holds.bytes(), 0);
    }

    #[test]
    fn one_key_has_so_many_open_and_others_are_not_held_to_it() {
        let (store, _) = store(1 << 30);
        let hour = Micros::from_secs(3_600);
        let [user, all] = ["user", "all"]
            .map(|name| store.open(&StoredLimit::new(name, Limit::fixed_window(1 << 40, hour).unwrap())));
        let workers = store.open(&StoredLimit::new("workers", Limit::concurrency(1 << 40, hour).unwrap()));
        let reserve = |id: u128, key: &str| {
            let charge = |limit, key| MemoryCharge { limit, key, cost: Cost::ONE, shadow: false };
            store.charge_all(&[charge(&user, key), charge(&all, "all")], hold(id, 60))
        };
        for id in 1..=MOST_OPEN_PER_KEY {
            assert!(reserve(id as u128, "attacker").unwrap().allowed);
        }
        let refused = reserve(1 << 64, "attacker").unwrap_err();
        assert_eq!(refused.failure(), Some(crate::Failure::Full), "{refused}");
        assert!(reserve(1 << 65, "bystander").unwrap().allowed, "one key is everybody's");
        let lease = [MemoryCharge { limit: &workers, key: "attacker", cost: Cost::ONE, shadow: false }];
        assert!(store.charge_all(&lease, hold(1 << 66, 0)).is_ok(), "a lease is bounded by its limit");
        let id = ChargeId::new(1).unwrap();
        assert_eq!(store.settle(id, &Settlement::Actual(1)).unwrap(), Settled::Done);
        assert!(reserve(1 << 67, "attacker").unwrap().allowed, "one of them is not open any more");
        assert!(reserve(1 << 68, "attacker").is_err());
    }

    /// Regression: a process that paused for longer than its leases found them given to others, and exceeded its limit.
    #[test]
    fn a_lease_that_is_held_until_released_does_not_end() {
        let (store, hands) = store(1 << 20);
        let leases = Limit::concurrency(1, Micros::from_secs(2)).unwrap();
        // The budget has no room for an entry: max_keys is for a key and its lease.
        let store = MemoryStore::new(MemoryOptions {
            clock: store.clock().clone(),
            sweep_every: None,
            ..MemoryOptions::default()
        });
        let workers = store.open(&StoredLimit::new("workers", leases));
        let charge = [MemoryCharge { limit: &workers, key: "k", cost: Cost::ONE, shadow: false }];
        let id = ChargeId::new(7).unwrap();
        let held = Some(Hold { id, ttl: Hold::UNTIL_RELEASED });
        assert!(store.charge_all(&charge, held).unwrap().allowed);
        hands.advance(Micros::from_secs(100 * 365 * 86_400));
        store.sweep();
        assert!(!workers.charge("k", Cost::ONE).allowed);
        assert_eq!(store.settle(id, &Settlement::Renew).unwrap(), Settled::Done);
        assert!(!workers.charge("k", Cost::ONE).allowed);
        store.release(id);
        assert!(workers.charge("k", Cost::ONE).allowed);
        assert_eq!(store.inner.holds.bytes(), 0);
        // Any other time to live ends.
        let long = Some(Hold { id, ttl: Micros::new(u64::MAX - 1) });
        hands.advance(Micros::from_secs(2));
        assert!(store.charge_all(&charge, long).unwrap().allowed);
        hands.advance(Hold::MAX_TTL);
        assert_eq!(store.settle(id, &Settlement::Cancel).unwrap(), Settled::Unknown);
    }
}
