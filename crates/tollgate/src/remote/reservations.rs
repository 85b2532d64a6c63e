//! The reservations of this process that the store holds: the keys and costs of each, and whether it is a lease.
//!
//! A settlement then removes the cached denials of exactly these keys, and the loss of a lease is noticed. Nothing here decides
//! what a settlement does: the store has its own record. Memory is bounded: when it is full, a new reservation replaces an old
//! one, whose settlement then removes all cached denials.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Hold, Settlement};

use super::tasks::Fingerprints;

const SHARDS: usize = 64;
/// How many reservations are remembered at most, in each shard.
const IN_A_SHARD: usize = 1_024;

pub(super) struct Reservations {
    shards: Box<[Mutex<HashMap<u128, Reserved>>]>,
    /// Counts the registries that were built on this store. Limits may have other numbers in each.
    generation: AtomicU64,
}

struct Reserved {
    charges: ReservedCharges,
    generation: u64,
    is_lease: bool,
    ttl: Micros,
    end: Micros,
}

/// One charge of a reservation.
#[derive(Clone, Debug)]
pub(super) struct ReservedCharge {
    /// The limit's name.
    pub(super) name: &'static str,
    pub(super) cost: u64,
    /// The key, if the denial cache may hold it and the charge took something.
    pub(super) key: Option<u128>,
}

/// The charges of a reservation that have counters, in order.
pub(super) type ReservedCharges = SmallVec<[ReservedCharge; 2]>;

/// The keys that a settlement gives something back to: the costs of one key add up, and so do the amounts.
pub(super) fn given_back(charges: &[ReservedCharge], settlement: &Settlement) -> Fingerprints {
    let total = |key: u128, amount: &dyn Fn(usize, &ReservedCharge) -> u64| {
        let of_key = charges.iter().enumerate().filter(|(_, charge)| charge.key == Some(key));
        of_key.fold(0_u64, |sum, (place, charge)| sum.saturating_add(amount(place, charge)))
    };
    let gets_back = |charge: &ReservedCharge, key: u128| {
        let cost = total(key, &|_, charge| charge.cost);
        match settlement {
            Settlement::Cancel => true,
            Settlement::Release | Settlement::Renew => false,
            Settlement::Actual(actual) => *actual < cost,
            Settlement::Each(actuals) => {
                total(key, &|place, _| actuals.get(place).copied().unwrap_or_default()) < cost
            }
            Settlement::Named(actuals) => {
                actuals.iter().any(|(name, actual)| name == charge.name && *actual < cost)
            }
        }
    };
    let mut keys = Fingerprints::new();
    for charge in charges {
        if let Some(key) = charge.key
            && !keys.contains(&key)
            && gets_back(charge, key)
        {
            keys.push(key);
        }
    }
    keys
}

/// What is known of a reservation.
pub(super) struct Known {
    /// Its charges; `None` if limits have new numbers since.
    pub(super) charges: Option<ReservedCharges>,
    pub(super) is_lease: bool,
}

impl Reservations {
    pub(super) fn new() -> Reservations {
        Reservations {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            generation: AtomicU64::new(0),
        }
    }

    fn shard(&self, id: ChargeId) -> &Mutex<HashMap<u128, Reserved>> {
        &self.shards[usize::try_from(id.get() % SHARDS as u128).unwrap_or_default()]
    }

    /// Limits may have other numbers from now on.
    pub(super) fn renumbered(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Remembers a reservation. `lease` is how long its longest lease lasts, if it has any.
    pub(super) fn add(&self, hold: Hold, charges: ReservedCharges, lease: Option<Micros>, now: Micros) {
        let mut shard = self.shard(hold.id).lock();
        // Expired reservations are removed before the table grows, in bulk.
        if shard.len() >= IN_A_SHARD || shard.len() == shard.capacity() {
            shard.retain(|_, known| now < known.end);
            let most = shard.capacity() / 4 * 3;
            if shard.len() > most && shard.len() < IN_A_SHARD {
                shard.reserve(most);
            }
        }
        // Reservations with a long time to live must not displace all others.
        if shard.len() >= IN_A_SHARD
            && let Some(other) = shard.keys().next().copied()
        {
            shard.remove(&other);
        }
        let ttl = hold.ttl.max(lease.unwrap_or_default());
        let generation = self.generation.load(Ordering::Acquire);
        let known =
            Reserved { charges, generation, is_lease: lease.is_some(), ttl, end: now.saturating_add(ttl) };
        shard.insert(hold.id.get(), known);
    }

    pub(super) fn find(&self, id: ChargeId) -> Option<Known> {
        let shard = self.shard(id).lock();
        let known = shard.get(&id.get())?;
        let is_current = known.generation == self.generation.load(Ordering::Acquire);
        Some(Known { charges: is_current.then(|| known.charges.clone()), is_lease: known.is_lease })
    }

    /// Its time to live begins again.
    pub(super) fn renewed(&self, id: ChargeId, now: Micros) {
        if let Some(known) = self.shard(id).lock().get_mut(&id.get()) {
            known.end = now.saturating_add(known.ttl);
        }
    }

    /// The reservation is settled, or expired.
    pub(super) fn remove(&self, id: ChargeId) {
        self.shard(id).lock().remove(&id.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_room_is_made_by_what_has_run_out() {
        let reservations = Reservations::new();
        let hold = |id: u128| Hold { id: ChargeId::new(id).unwrap(), ttl: Micros::from_secs(10) };
        let most = (SHARDS * IN_A_SHARD) as u128;
        for id in 1..=2 * most {
            reservations.add(hold(id), ReservedCharges::new(), None, Micros::ZERO);
        }
        let known = || reservations.shards.iter().map(|shard| shard.lock().len()).sum::<usize>();
        assert_eq!(known(), SHARDS * IN_A_SHARD);
        assert!(reservations.find(hold(2 * most).id).is_some(), "the newest is known");
        let late = hold(3 * most);
        reservations.add(late, ReservedCharges::new(), None, Micros::from_secs(10));
        assert!(reservations.find(late.id).is_some(), "all others have run out");
        assert!(known() <= SHARDS * IN_A_SHARD);
    }

    /// Regression: up to 65,536 reservations were known, and a server whose clients never settled grew for hours.
    #[test]
    fn those_that_nobody_settles_take_no_more_room_once_they_have_run_out() {
        let reservations = Reservations::new();
        let hold = |id: u128| Hold { id: ChargeId::new(id).unwrap(), ttl: Micros::from_secs(10) };
        // A hundred a second, of which a thousand live at a time.
        for id in 1..=100_000 {
            let now = Micros::new(u64::try_from(id).unwrap() * 10_000);
            reservations.add(hold(id), ReservedCharges::new(), None, now);
        }
        let known: usize = reservations.shards.iter().map(|shard| shard.lock().len()).sum();
        assert!(known <= 4_000, "{known} are known");
    }

    #[test]
    fn the_keys_of_an_older_gate_are_not_known() {
        let reservations = Reservations::new();
        let hold = Hold { id: ChargeId::new(1).unwrap(), ttl: Micros::from_secs(10) };
        reservations.add(hold, ReservedCharges::new(), Some(Micros::from_secs(1)), Micros::ZERO);
        assert!(reservations.find(hold.id).is_some_and(|known| known.charges.is_some() && known.is_lease));
        reservations.renumbered();
        assert!(reservations.find(hold.id).is_some_and(|known| known.charges.is_none() && known.is_lease));
    }

    #[test]
    fn a_settlement_gives_back_where_it_came_to_less_than_was_reserved() {
        let charge = |name, cost, key| ReservedCharge { name, cost, key };
        let charges =
            [charge("a", 3, Some(1)), charge("b", 4, None), charge("a", 3, Some(2)), charge("a", 2, Some(1))];
        let named = |name: &str, amount| Settlement::Named(vec![(name.to_owned(), amount)]);
        for (settlement, expected) in [
            (Settlement::Cancel, &[1, 2][..]),
            (Settlement::Release, &[]),
            (Settlement::Renew, &[]),
            (Settlement::Actual(2), &[1, 2]),
            (Settlement::Actual(3), &[1]),
            (Settlement::Actual(5), &[]),
            (Settlement::Each(vec![3, 0, 3, 2]), &[]),
            (Settlement::Each(vec![5, 0, 3, 0]), &[]),
            (Settlement::Each(vec![3, 9, 2, 2]), &[2]),
            (Settlement::Each(vec![3, 9, 3, 1]), &[1]),
            (named("a", 3), &[1]),
            (named("a", 5), &[]),
            (named("b", 0), &[]),
        ] {
            assert_eq!(given_back(&charges, &settlement)[..], *expected, "{settlement:?}");
        }
    }
}
