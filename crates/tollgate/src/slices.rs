//! Slices: units that this process takes from the store in one go and admits from, for a short while, without asking again.
//!
//! A rule with a slice of N units and a time to live takes N units for a key with its first charge there and admits the next
//! N - 1 at no round trip. What the store said of those N is true, only not of when they are used: in any interval t a key is
//! admitted at most what its limit allows in t + ttl. In return up to N units for each process and key may lie idle; they are
//! given back by the key's next charge once the slice has ended, by a refund of the key, or by `Tollgate::give_back_ended_slices`, and are lost (stay
//! charged, as the limit says) if neither comes within ten seconds, or the process ends.
//!
//! Only plain charges on one limit are sliced. While a slice is being taken, other charges on the key go to the store one by
//! one, so that a process never has two. Where the store has less than a slice, charges go one by one as well, and slices are
//! tried again once there may be enough. Which units are whose is all that is known here; the store is asked in `remote.rs`.

use std::collections::HashMap;

use parking_lot::Mutex;
use tollgate_kernel::{Cost, Micros, Outcome};
use tollgate_store::HoldId;

use crate::fingerprint::shard_of;
use crate::policy::Slice;

const SHARDS: usize = 64;
/// How many keys have a slice at most, in each shard; other keys are charged one by one.
const KEYS_IN_A_SHARD: usize = 1_024;

/// How long after its end a slice can be given back.
pub(crate) const GRACE: Micros = Micros::from_secs(10);

/// The slices of one registry.
pub(crate) struct Slices {
    shards: Box<[Mutex<HashMap<u128, Kept>>]>,
}

#[derive(Default)]
struct Kept {
    taken: Option<Taken>,
    /// Whether somebody is asking the store for a slice.
    is_being_taken: bool,
    /// The store has less than a slice until then.
    not_before: Micros,
}

struct Taken {
    hold: HoldId,
    used: u64,
    left: u64,
    end: Micros,
    /// What the store said when it was taken, and when.
    said: Outcome,
    at: Micros,
}

/// Units to be given back: the charge that took them, and how many of them were used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unused {
    /// Of the key that they were taken from.
    pub(crate) fingerprint: u128,
    pub(crate) hold: HoldId,
    pub(crate) used: u64,
}

/// A slice out of its place, on its way back to the store.
pub(crate) struct TakenBack {
    pub(crate) unused: Unused,
    fingerprint: u128,
    taken: Taken,
}

/// The right to take a slice for a key, given up when dropped.
pub(crate) struct Taking<'a> {
    slices: &'a Slices,
    fingerprint: u128,
    slice: Slice,
}

impl Slices {
    pub(crate) fn new() -> Slices {
        Slices { shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }

    fn shard(&self, fingerprint: u128) -> &Mutex<HashMap<u128, Kept>> {
        &self.shards[shard_of(fingerprint, SHARDS)]
    }

    /// Admits a charge from the key's slice, if that has enough left.
    pub(crate) fn admit(&self, fingerprint: u128, cost: Cost, now: Micros) -> Option<Outcome> {
        let mut shard = self.shard(fingerprint).lock();
        let taken = shard.get_mut(&fingerprint)?.taken.as_mut();
        let taken = taken.filter(|taken| now < taken.end && cost.get() <= taken.left)?;
        (taken.left, taken.used) = (taken.left - cost.get(), taken.used + cost.get());
        Some(taken.outcome(now))
    }

    /// The right to take a slice, and what is left of the last one, to be given back first. `None` sends the charge to the store
    /// by itself.
    pub(crate) fn take(
        &self,
        fingerprint: u128,
        slice: Slice,
        cost: Cost,
        now: Micros,
    ) -> Option<(Taking<'_>, Option<Unused>)> {
        let mut shard = self.shard(fingerprint).lock();
        if shard.len() >= KEYS_IN_A_SHARD && !shard.contains_key(&fingerprint) {
            shard.retain(|_, kept| kept.is_of_use(now));
            if shard.len() >= KEYS_IN_A_SHARD {
                return None;
            }
        }
        let kept = shard.entry(fingerprint).or_default();
        if kept.is_being_taken || cost.get() > slice.units() || now < kept.not_before {
            return None;
        }
        kept.is_being_taken = true;
        let unused = kept.taken.take().and_then(|taken| taken.unused(fingerprint, now));
        Some((Taking { slices: self, fingerprint, slice }, unused))
    }

    /// Forgets a key's slice: the key is being reset.
    pub(crate) fn forget(&self, fingerprint: u128) {
        self.shard(fingerprint).lock().remove(&fingerprint);
    }

    /// Takes out what is unused of a key's slice: the key is being refunded, and may have enough for a slice again.
    pub(crate) fn take_back(&self, fingerprint: u128, now: Micros) -> Option<TakenBack> {
        let mut shard = self.shard(fingerprint).lock();
        let kept = shard.get_mut(&fingerprint)?;
        kept.not_before = Micros::ZERO;
        let taken = kept.taken.take_if(|taken| taken.unused(fingerprint, now).is_some())?;
        Some(TakenBack { unused: taken.unused(fingerprint, now)?, fingerprint, taken })
    }

    /// Puts a slice back that could not be given back: it is still paid for. Not if the key was reset or has another by now.
    pub(crate) fn put_back(&self, back: TakenBack) {
        let mut shard = self.shard(back.fingerprint).lock();
        if let Some(kept) = shard.get_mut(&back.fingerprint).filter(|kept| kept.taken.is_none()) {
            kept.taken = Some(back.taken);
        }
    }

    /// Takes out what is unused of the slices that have ended at `now`.
    pub(crate) fn ended(&self, now: Micros) -> Vec<Unused> {
        self.take_out(now, |taken| now >= taken.end)
    }

    /// Takes out what is unused of all slices.
    pub(crate) fn all(&self, now: Micros) -> Vec<Unused> {
        self.take_out(now, |_| true)
    }

    fn take_out(&self, now: Micros, which: impl Fn(&Taken) -> bool) -> Vec<Unused> {
        let mut unused = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock();
            for (fingerprint, kept) in shard.iter_mut() {
                let taken = kept.taken.take_if(|taken| which(taken));
                unused.extend(taken.and_then(|taken| taken.unused(*fingerprint, now)));
            }
            shard.retain(|_, kept| kept.is_of_use(now));
        }
        unused
    }
}

impl Kept {
    fn is_of_use(&self, now: Micros) -> bool {
        let is_taken = self.taken.as_ref().is_some_and(|taken| now < taken.end);
        is_taken || self.is_being_taken || now < self.not_before
    }
}

impl Taken {
    /// What a charge from the slice is told: what the store has left, and what is left here.
    fn outcome(&self, now: Micros) -> Outcome {
        let passed = now.saturating_sub(self.at);
        let remaining = self.said.remaining.saturating_add(self.left).min(self.said.capacity);
        Outcome { remaining, reset_after: self.said.reset_after.saturating_sub(passed), ..self.said }
    }

    fn unused(&self, fingerprint: u128, now: Micros) -> Option<Unused> {
        let can_be_given_back = self.left > 0 && now < self.end.saturating_add(GRACE);
        can_be_given_back.then_some(Unused { fingerprint, hold: self.hold, used: self.used })
    }
}

impl Taking<'_> {
    /// How much to take.
    pub(crate) fn units(&self) -> Cost {
        Cost::new(self.slice.units()).unwrap_or(Cost::ONE)
    }

    /// How long the taken can be given back.
    pub(crate) fn hold_ttl(&self) -> Micros {
        self.slice.ttl().saturating_add(GRACE)
    }

    /// The store gave a slice, asked at `now`, and this charge uses `cost` of it. Returns what the charge is told.
    pub(crate) fn taken(self, hold: HoldId, said: Outcome, cost: Cost, now: Micros) -> Outcome {
        let (used, left) = (cost.get(), self.slice.units().saturating_sub(cost.get()));
        let end = now.saturating_add(self.slice.ttl());
        let taken = Taken { hold, used, left, end, said, at: now };
        let outcome = taken.outcome(now);
        // If the key was reset meanwhile, the slice is of its former life.
        if let Some(kept) = self.slices.shard(self.fingerprint).lock().get_mut(&self.fingerprint) {
            kept.taken = Some(taken);
        }
        outcome
    }

    /// The store has less than a slice, for so long.
    pub(crate) fn refused(self, wait: Option<Micros>, now: Micros) {
        let wait = wait.unwrap_or(self.slice.ttl()).min(self.slice.ttl());
        if let Some(kept) = self.slices.shard(self.fingerprint).lock().get_mut(&self.fingerprint) {
            kept.not_before = now.saturating_add(wait);
        }
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if let Some(kept) = self.slices.shard(self.fingerprint).lock().get_mut(&self.fingerprint) {
            kept.is_being_taken = false;
        }
    }
}
