//! Held charges: reservations to be settled and leases to be released, by name, until their time runs out.
//!
//! A hold's shard stays locked while its charge or settlement is carried out, so one name is charged once and settled once
//! however often it is sent. The order of locks is always holds first, then tables.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::mem;
use std::sync::Arc;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{MAX_COUNT, Micros, Taken};

use super::budget::Budget;
use super::cell::{Amended, Amendment};
use super::ledger::Ledger;
use super::node::Fingerprint;
use crate::{Charged, Hold, HoldId, Settled, Settlement, StoreError};

const SHARDS: usize = 32;

/// One limit of a held charge.
pub(crate) struct HeldPart {
    pub(crate) name: Arc<str>,
    pub(crate) ledger: Arc<dyn Ledger>,
    /// How long its lease lasts, if it is one.
    pub(crate) lease: Option<Micros>,
    pub(crate) key: Fingerprint,
    /// What was charged, and when; of a lease, when it ends.
    pub(crate) taken: Taken,
    pub(crate) in_shared: bool,
}

struct Held {
    /// None once it is settled.
    parts: SmallVec<[HeldPart; 2]>,
    /// Stays to the end, for a charge that is sent again.
    answer: Charged,
    ttl: Micros,
    end: Micros,
    is_settled: bool,
    /// What it takes of the budget: one for each limit that was asked, because the parts and the answer are as long.
    room: usize,
}

#[derive(Default)]
pub(crate) struct Holds {
    shards: [Mutex<HashMap<u128, Held>>; SHARDS],
}

impl Holds {
    fn shard(&self, id: HoldId) -> &Mutex<HashMap<u128, Held>> {
        let shard = id.get() % (SHARDS as u128);
        &self.shards[usize::try_from(shard).unwrap_or(0)]
    }

    /// Carries out a charge of so many limits and holds what it charged, unless it is held already.
    pub(crate) fn hold(
        &self,
        hold: Hold,
        limits: usize,
        now: Micros,
        budget: &Budget,
        charge: impl FnOnce(&mut dyn FnMut(HeldPart)) -> Charged,
    ) -> Result<Charged, StoreError> {
        let mut shard = self.shard(hold.id).lock();
        if let Some(held) = shard.get(&hold.id.get()).filter(|held| now < held.end) {
            return Ok(held.answer.clone());
        }
        let room = limits.max(1);
        if !budget.take(room) {
            return Err(StoreError::full(
                "no room to remember another reservation; settle open ones, shorten their time to live or raise max_keys",
            ));
        }
        let mut parts = SmallVec::new();
        let answer = charge(&mut |part| parts.push(part));
        if !answer.allowed {
            budget.give_back(room);
            return Ok(answer);
        }
        let longest_lease = parts.iter().filter_map(|part: &HeldPart| part.lease).max();
        let ttl = hold.ttl.max(longest_lease.unwrap_or_default());
        let end = now.saturating_add(ttl);
        let held = Held { parts, answer: answer.clone(), ttl, end, is_settled: false, room };
        if let Some(ended) = shard.insert(hold.id.get(), held) {
            // A hold of the same name had run out and was not yet swept.
            budget.give_back(ended.room);
        }
        Ok(answer)
    }

    pub(crate) fn settle(
        &self,
        id: HoldId,
        settlement: &Settlement,
        now: Micros,
    ) -> Result<Settled, StoreError> {
        let mut shard = self.shard(id).lock();
        let Some(held) = shard.get_mut(&id.get()).filter(|held| now < held.end) else {
            return Ok(Settled::Unknown);
        };
        if held.is_settled {
            return Ok(Settled::Already);
        }
        match settlement {
            Settlement::Renew => Ok(held.renew(id, now)),
            Settlement::Cancel => Ok(held.settle(id, now, |_| Some(0))),
            Settlement::Actual(actual) => {
                held.check_one_actual()?;
                Ok(held.settle(id, now, |_| Some(*actual)))
            }
            Settlement::Each(actuals) => {
                held.check_names(actuals)?;
                Ok(held.settle(id, now, |name| {
                    actuals.iter().find(|(other, _)| other == name).map(|(_, actual)| *actual)
                }))
            }
        }
    }

    /// Ends a hold that nobody will ask for again: its leases are released, what it charged stays as it is, and it is forgotten.
    pub(crate) fn release(&self, id: HoldId, now: Micros, budget: &Budget) {
        let mut shard = self.shard(id).lock();
        let Some(mut held) = shard.remove(&id.get()) else { return };
        if now < held.end && !held.is_settled {
            held.settle(id, now, |_| None);
        }
        budget.give_back(held.room);
    }

    /// Forgets the holds whose time has run out. Returns how many.
    pub(crate) fn sweep(&self, now: Micros, budget: &Budget) -> usize {
        let (mut forgotten, mut room) = (0, 0);
        for shard in &self.shards {
            let mut shard = shard.lock();
            let before = shard.len();
            shard.retain(|_, held| {
                let is_open = now < held.end;
                room += if is_open { 0 } else { held.room };
                is_open
            });
            forgotten += before - shard.len();
            if shard.len() < shard.capacity() / 4 {
                shard.shrink_to_fit();
            }
        }
        budget.give_back(room);
        forgotten
    }
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

    /// Corrects every part. A charge of nothing but leases that are all gone (their key was reset) is not known any more.
    fn settle(&mut self, id: HoldId, now: Micros, actual_of: impl Fn(&str) -> Option<u64>) -> Settled {
        let mut found = self.parts.is_empty();
        for part in mem::take(&mut self.parts) {
            let Taken { cost, at } = part.taken;
            let amend = |amendment| part.ledger.amend(part.key, part.in_shared, amendment, now);
            if part.lease.is_some() {
                found |= amend(Amendment::Release { holder: id.get(), end: at }).is_found();
                continue;
            }
            found = true;
            // No limit holds more than the largest count, so more than that says no more.
            let actual = actual_of(&part.name).unwrap_or(cost).min(MAX_COUNT);
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
        self.is_settled = true;
        if found { Settled::Done } else { Settled::Unknown }
    }

    /// Renews every lease of the charge. If one of them has run out the hold is lost, and none is renewed.
    fn renew(&mut self, id: HoldId, now: Micros) -> Settled {
        let is_live = |part: &HeldPart| part.lease.is_none() || part.taken.at > now;
        if !self.parts.iter().all(is_live) {
            return Settled::Unknown;
        }
        for part in self.parts.iter_mut().filter(|part| part.lease.is_some()) {
            let renewal = Amendment::Renew { holder: id.get(), end: part.taken.at };
            match part.ledger.amend(part.key, part.in_shared, renewal, now) {
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
    use crate::{ManualClock, MemoryItem, MemoryOptions, MemoryStore, StoredLimit, WhenFull};

    /// A reservation of 64 limits took as little of the budget as one of one, and kept all of it after it was settled.
    #[test]
    fn a_reservation_takes_room_for_each_of_its_limits() {
        let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
        let hour = Micros::from_secs(3_600);
        let store = MemoryStore::new(MemoryOptions {
            clock: hands.clock(),
            // One for the key, and ten for reservations.
            max_keys: 11,
            sweep_every: None,
            when_full: WhenFull::Share,
        });
        let api = store.open(&StoredLimit::new("api", Limit::fixed_window(100, hour).unwrap()));
        assert!(api.charge("k", Cost::ONE).allowed);
        let reserve = |id: u128, limits: usize| {
            let hold = Hold { id: HoldId::new(id).unwrap(), ttl: Micros::from_secs(60) };
            let items = vec![MemoryItem { limit: &api, key: "k", cost: Cost::ONE, shadow: false }; limits];
            store.charge_all(&items, Some(hold)).map(|charged| charged.allowed).ok()
        };
        // The name of a reservation, its limits, whether it is made, and the room that is taken then.
        for (id, limits, expected, used) in [
            (1, 6, Some(true), 7),
            (1, 6, Some(true), 7),
            (2, 5, None, 7),
            (2, 4, Some(true), 11),
            (3, 1, None, 11),
            (3, 0, None, 11),
        ] {
            assert_eq!((reserve(id, limits), store.used()), (expected, used), "{id}: {limits}");
        }
        let id = HoldId::new(1).unwrap();
        let parts = || store.inner.holds.shard(id).lock()[&1].parts.len();
        assert_eq!(parts(), 1, "those on one key of one limit are one part");
        assert_eq!(store.settle(id, &Settlement::Cancel).unwrap(), Settled::Done);
        assert_eq!(parts(), 0);
        assert_eq!(store.settle(id, &Settlement::Cancel).unwrap(), Settled::Already);
        assert_eq!(reserve(1, 6), Some(true), "it is answered as before, and not charged again");
        assert_eq!(api.peek("k", Cost::ONE).remaining, 94, "1 and 4 are charged, and 1 would be");
        store.release(HoldId::new(2).unwrap());
        assert_eq!(store.used(), 7);
        hands.advance(Micros::from_secs(60));
        assert_eq!(reserve(1, 2), Some(true), "in the place of one that had run out");
        assert_eq!(store.used(), 3);
        hands.advance(Micros::from_secs(60));
        assert_eq!((store.sweep(), store.used()), (1, 1));
    }
}
