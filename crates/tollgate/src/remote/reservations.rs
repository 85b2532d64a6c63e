//! The reservations of this process that the store holds: which keys each one charged, so that its settlement ends what the denial
//! cache believes about those keys and no others, and whether it is a lease, so that its loss is noticed.
//!
//! Nothing here decides what a settlement does: the store knows its holds by itself. Memory is bounded: when it is used up, a
//! newcomer takes the place of another, whose keys are then not known, so that its settlement ends all that is believed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Hold};

use super::tasks::Fingerprints;

const SHARDS: usize = 64;
/// How many reservations are remembered at most, in each shard.
const IN_A_SHARD: usize = 1_024;

pub(super) struct Reservations {
    shards: Box<[Mutex<HashMap<u128, Kept>>]>,
    /// Counts the registries that were built on this store. Limits may have other numbers in each.
    generation: AtomicU64,
}

struct Kept {
    keys: Fingerprints,
    generation: u64,
    is_lease: bool,
    ttl: Micros,
    end: Micros,
}

/// What is known of a reservation.
pub(super) struct Known {
    /// The keys it charged; `None` if limits have other numbers by now.
    pub(super) keys: Option<Fingerprints>,
    pub(super) is_lease: bool,
}

impl Reservations {
    pub(super) fn new() -> Reservations {
        Reservations {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            generation: AtomicU64::new(0),
        }
    }

    fn shard(&self, id: ChargeId) -> &Mutex<HashMap<u128, Kept>> {
        &self.shards[usize::try_from(id.get() % SHARDS as u128).unwrap_or_default()]
    }

    /// Limits may have other numbers from now on.
    pub(super) fn renumbered(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }

    /// Remembers a reservation. `lease` is how long its longest lease lasts, if it has any.
    pub(super) fn add(&self, hold: Hold, keys: Fingerprints, lease: Option<Micros>, now: Micros) {
        let mut shard = self.shard(hold.id).lock();
        if shard.len() >= IN_A_SHARD {
            shard.retain(|_, kept| now < kept.end);
        }
        // Long ones that are kept open must not keep all others out.
        if shard.len() >= IN_A_SHARD
            && let Some(other) = shard.keys().next().copied()
        {
            shard.remove(&other);
        }
        let ttl = hold.ttl.max(lease.unwrap_or_default());
        let generation = self.generation.load(Ordering::Acquire);
        let kept = Kept { keys, generation, is_lease: lease.is_some(), ttl, end: now.saturating_add(ttl) };
        shard.insert(hold.id.get(), kept);
    }

    pub(super) fn find(&self, id: ChargeId) -> Option<Known> {
        let shard = self.shard(id).lock();
        let kept = shard.get(&id.get())?;
        let is_current = kept.generation == self.generation.load(Ordering::Acquire);
        Some(Known { keys: is_current.then(|| kept.keys.clone()), is_lease: kept.is_lease })
    }

    /// Its time to live begins again.
    pub(super) fn renewed(&self, id: ChargeId, now: Micros) {
        if let Some(kept) = self.shard(id).lock().get_mut(&id.get()) {
            kept.end = now.saturating_add(kept.ttl);
        }
    }

    /// It is settled, or gone.
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
            reservations.add(hold(id), Fingerprints::new(), None, Micros::ZERO);
        }
        let kept = || reservations.shards.iter().map(|shard| shard.lock().len()).sum::<usize>();
        assert_eq!(kept(), SHARDS * IN_A_SHARD);
        assert!(reservations.find(hold(2 * most).id).is_some(), "the newest is known");
        let late = hold(3 * most);
        reservations.add(late, Fingerprints::new(), None, Micros::from_secs(10));
        assert!(reservations.find(late.id).is_some(), "all others have run out");
        assert!(kept() <= SHARDS * IN_A_SHARD);
    }

    #[test]
    fn the_keys_of_an_older_registry_are_not_known() {
        let reservations = Reservations::new();
        let hold = Hold { id: ChargeId::new(1).unwrap(), ttl: Micros::from_secs(10) };
        reservations.add(hold, Fingerprints::from_slice(&[7]), Some(Micros::from_secs(1)), Micros::ZERO);
        assert!(reservations.find(hold.id).is_some_and(|known| known.keys.is_some() && known.is_lease));
        reservations.renumbered();
        assert!(reservations.find(hold.id).is_some_and(|known| known.keys.is_none() && known.is_lease));
    }
}
