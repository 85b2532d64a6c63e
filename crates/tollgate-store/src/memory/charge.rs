//! A charge over several limits: all of them, or none.
//!
//! The fast path reads every key without a lock, decides, and takes the locks only to write; it notices a change in between and
//! tries again. The slow path locks the homes of all keys in one order, prepares all, and then commits or abandons each; it also
//! makes room for new keys. Repeated pairs of limit and key are added up first.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Fit, Micros, Outcome, Taken};

use super::cell::Holder;
use super::holds::{HeldCharge, HoldRequest};
use super::limit_table::{LimitTable, Located};
use super::node::{Fingerprint, Guard};
use super::sibling_tables::{Moving, SiblingTables};
use super::table::{Prepared, Seen};
use super::{Inner, MemoryCharge, MemoryLimit};
use crate::pairs::{self, PairOf};
use crate::{Charged, Outcomes};

/// How often the short path of a charge over several limits is tried before locks are waited for.
const TRIES: usize = 16;

/// Why the fast path failed.
pub(super) enum Missed {
    /// A key was not seen, or two share a chain: trying again does not help.
    Unseen,
    /// Others charged one of the keys meanwhile.
    Disturbed,
}

/// One key of a charge over several limits; repeated pairs of limit and key have been added up.
struct PairCharge<'a> {
    limit: &'a MemoryLimit,
    key: Fingerprint,
    cost: Cost,
    shadow: bool,
}

impl PairOf for PairCharge<'_> {
    #[inline]
    fn is_same(&self, other: &Self) -> bool {
        let is_same_name =
            Arc::ptr_eq(&self.limit.name, &other.limit.name) || self.limit.name == other.limit.name;
        self.key == other.key && is_same_name
    }

    #[inline]
    fn amount(&mut self) -> (&mut Cost, &mut bool) {
        (&mut self.cost, &mut self.shadow)
    }
}

type PairCharges<'a> = SmallVec<[PairCharge<'a>; 4]>;

/// The table that a part is charged in.
struct TargetTable<'a> {
    limit_table: &'a dyn LimitTable,
    /// Identifies the nodes of its table.
    table: usize,
    home: usize,
}

impl TargetTable<'_> {
    /// The order in which locks are taken: by table, then by home.
    fn order(&self) -> (usize, usize) {
        (self.table, self.home)
    }
}

/// For each part the table of whole states, if it is in that one.
type WholeTables = SmallVec<[Option<Arc<dyn LimitTable>>; 4]>;

type TargetTables<'a> = SmallVec<[TargetTable<'a>; 4]>;

impl Inner {
    /// The parts of a charge: one for each pair of limit and key.
    #[inline]
    fn parts<'a>(&self, charges: &[MemoryCharge<'a>], parts: &mut PairCharges<'a>) {
        pairs::merge(charges.iter().map(|charge| self.part(charge)), parts, |_| ());
    }

    /// What identifies a call with these charges, for a hold.
    pub(super) fn request(&self, charges: &[MemoryCharge<'_>]) -> HoldRequest {
        let (mut parts, mut of_charge) = (PairCharges::new(), SmallVec::<[u16; 4]>::new());
        pairs::merge(charges.iter().map(|charge| self.part(charge)), &mut parts, |index| {
            of_charge.push(u16::try_from(index).unwrap_or(u16::MAX));
        });
        let mut hash = DefaultHasher::new();
        for PairCharge { limit, key, cost, .. } in &parts {
            (&*limit.name, key.lo, key.hi, cost.get()).hash(&mut hash);
        }
        of_charge.hash(&mut hash);
        let pair_of =
            if parts.len() == charges.len() { Box::default() } else { of_charge.into_boxed_slice() };
        HoldRequest { limits: charges.len(), pair_of, hash: hash.finish() }
    }

    #[inline]
    fn part<'a>(&self, charge: &MemoryCharge<'a>) -> PairCharge<'a> {
        let key = self.seeds.fingerprint(charge.key);
        PairCharge { limit: charge.limit, key, cost: charge.cost, shadow: charge.shadow }
    }

    /// Answers for charges, from answers for merged charges.
    #[inline]
    fn for_charges(
        &self,
        charges: &[MemoryCharge<'_>],
        parts: &PairCharges<'_>,
        outcomes: Outcomes,
    ) -> Outcomes {
        if charges.len() == parts.len() {
            return outcomes;
        }
        let of_charge = |charge| {
            let part = self.part(charge);
            let index = parts.iter().position(|other| other.is_same(&part));
            index.map_or(Outcome::BLOCKED, |index| outcomes[index])
        };
        charges.iter().map(of_charge).collect()
    }

    /// Finds the table of each part: `None` for its own, the table of whole states for a whole state. An unknown part takes over
    /// a state under other numbers of its limit. While the result is held, no other thread starts or moves a key of those limits.
    fn locate_all<'a>(parts: &PairCharges<'a>, now: Micros) -> (WholeTables, SmallVec<[Moving<'a>; 1]>) {
        let mut whole = WholeTables::new();
        let mut to_ask: SmallVec<[(usize, &'a SiblingTables); 1]> = SmallVec::new();
        for (index, part) in parts.iter().enumerate() {
            whole.push(match part.limit.limit_table.locate(part.key, now) {
                Located::Here => None,
                Located::Whole(table) => Some(table),
                Located::SearchSiblings(siblings) => {
                    to_ask.push((index, siblings));
                    None
                }
            });
        }
        // In one order everywhere, and each once.
        let mut siblings: SmallVec<[&'a SiblingTables; 1]> =
            to_ask.iter().map(|(_, siblings)| *siblings).collect();
        siblings.sort_unstable_by_key(|siblings| std::ptr::from_ref(*siblings));
        siblings.dedup_by_key(|siblings| std::ptr::from_ref(*siblings));
        let moving: SmallVec<[Moving<'a>; 1]> = siblings.into_iter().map(SiblingTables::moving).collect();
        for (index, own) in to_ask {
            if let Some(tables) = moving.iter().find(|tables| tables.are_of(own)) {
                whole[index] = parts[index].limit.limit_table.inherit(parts[index].key, tables, now);
            }
        }
        (whole, moving)
    }

    /// Locks the homes of all parts, in one order everywhere, so that two charges never wait for each other in a ring.
    #[inline]
    fn lock_homes<'b>(parts: &PairCharges<'_>, places: &mut TargetTables<'b>) -> SmallVec<[Guard<'b>; 4]> {
        let mut guards = SmallVec::new();
        loop {
            for (part, place) in parts.iter().zip(places.iter_mut()) {
                place.home = place.limit_table.home(part.key);
            }
            // The next in order, again and again: charges have few parts, and parts with the same home are locked once.
            let mut last = None;
            while let Some(place) =
                places.iter().filter(|place| Some(place.order()) > last).min_by_key(|place| place.order())
            {
                last = Some(place.order());
                guards.push(place.limit_table.lock(place.home));
            }
            if parts
                .iter()
                .zip(places.iter())
                .all(|(part, place)| place.limit_table.home(part.key) == place.home)
            {
                return guards;
            }
            guards.clear();
        }
    }

    /// The fast path of a charge over several limits: decides on unlocked reads, and takes the locks, without waiting for any,
    /// only to write. `None` if a key was not found, two keys share a chain, or other threads interfered each time.
    #[inline]
    pub(super) fn charge_seen(
        &self,
        charges: &[MemoryCharge<'_>],
        now: Micros,
        say: &mut impl FnMut(Outcome),
    ) -> Option<bool> {
        match charges {
            [one, two] => {
                let Some(charged) = self.charge_two_seen(one, two, now) else {
                    return self.try_often(|| self.try_charge_seen(charges, now, say));
                };
                let (is_allowed, fit_one, fit_two) = charged?;
                say(one.limit.bucket_outcome(fit_one, one.cost));
                say(two.limit.bucket_outcome(fit_two, two.cost));
                Some(is_allowed)
            }
            [one, two, three] => self.try_often(|| {
                let Some(charged) = self.charge_three_buckets(&[*one, *two, *three], now) else {
                    return self.try_charge_seen(charges, now, say);
                };
                let (is_allowed, charged) = charged?;
                charged.iter().for_each(|charged| say(charged.outcome()));
                Ok(is_allowed)
            }),
            _ => self.try_often(|| self.try_charge_seen(charges, now, say)),
        }
    }

    /// The same for two token buckets. `None` if they are not both that, `Some(None)` if they cannot be charged so.
    #[inline(always)]
    pub(super) fn charge_two_seen(
        &self,
        one: &MemoryCharge<'_>,
        two: &MemoryCharge<'_>,
        now: Micros,
    ) -> Option<Option<(bool, Fit, Fit)>> {
        for _ in 0..TRIES {
            match self.charge_two_buckets(one, two, now)? {
                Ok(charged) => return Some(Some(charged)),
                Err(Missed::Unseen) => return Some(None),
                Err(Missed::Disturbed) => self.step_aside(),
            }
        }
        Some(None)
    }

    /// Other threads interfered.
    #[cold]
    fn step_aside(&self) {
        self.contention.note();
        std::hint::spin_loop();
    }

    /// Tries the fast path, and again while other threads interfere, a bounded number of times.
    #[inline(always)]
    fn try_often(&self, mut charge: impl FnMut() -> Result<bool, Missed>) -> Option<bool> {
        for _ in 0..TRIES {
            match charge() {
                Ok(allowed) => return Some(allowed),
                Err(Missed::Unseen) => return None,
                Err(Missed::Disturbed) => self.step_aside(),
            }
        }
        None
    }

    #[inline(never)]
    fn try_charge_seen(
        &self,
        charges: &[MemoryCharge<'_>],
        now: Micros,
        say: &mut impl FnMut(Outcome),
    ) -> Result<bool, Missed> {
        let mut seen: SmallVec<[Seen<'_>; 4]> = SmallVec::new();
        let mut allowed = true;
        for (index, charge) in charges.iter().enumerate() {
            let key = self.seeds.fingerprint(charge.key);
            if !charge.limit.limit_table.see(key, charge.cost, now, &mut seen) {
                return Err(Missed::Unseen);
            }
            // Two keys of one chain would need the same lock, and a repeated key needs the sum of its costs.
            let (before, this) = seen.split_at(index);
            if before.iter().any(|other| other.sight.is_of_same_chain(&this[0].sight)) {
                return Err(Missed::Unseen);
            }
            allowed &= this[0].outcome.allowed || charge.shadow;
        }
        if allowed {
            let mut guards: SmallVec<[Guard<'_>; 4]> = SmallVec::new();
            for one in &seen {
                guards.push(one.sight.lock().ok_or(Missed::Disturbed)?);
            }
            seen.iter().filter(|one| one.outcome.allowed).for_each(Seen::commit);
        } else if !seen.iter().all(|one| one.sight.is_unchanged()) {
            return Err(Missed::Disturbed);
        }
        seen.iter().for_each(|one| say(one.outcome));
        Ok(allowed)
    }

    /// Charges all parts or none. If the charge is held, `keep` gets each part that was charged.
    pub(super) fn charge_all(
        &self,
        charges: &[MemoryCharge<'_>],
        now: Micros,
        holder: Holder,
        mut keep: impl FnMut(HeldCharge),
    ) -> Charged {
        let mut parts = PairCharges::new();
        self.parts(charges, &mut parts);
        loop {
            let (whole, moving) = Self::locate_all(&parts, now);
            let mut places: TargetTables<'_> = (parts.iter().zip(&whole))
                .map(|(part, whole)| {
                    let limit_table: &dyn LimitTable = whole.as_deref().unwrap_or(&*part.limit.limit_table);
                    TargetTable { limit_table, table: limit_table.address(), home: 0 }
                })
                .collect();
            let guards = Self::lock_homes(&parts, &mut places);
            // A part that was known may have been taken away before its home was locked.
            let is_there = |(part, place): (&PairCharge<'_>, &TargetTable<'_>)| match part
                .limit
                .limit_table
                .siblings()
            {
                Some(siblings) => {
                    moving.iter().any(|tables| tables.are_of(siblings))
                        || place.limit_table.knows_locked(part.key)
                }
                None => true,
            };
            if parts.iter().zip(&places).all(is_there) {
                let (allowed, outcomes) = Self::charge_locked(&parts, &places, now, holder, &mut keep);
                drop(guards);
                drop(moving);
                if allowed {
                    places.iter().for_each(|place| place.limit_table.grow_if_needed());
                }
                return Charged { allowed, outcomes: self.for_charges(charges, &parts, outcomes) };
            }
        }
    }

    /// Charges all parts or none. With their homes locked.
    fn charge_locked(
        parts: &PairCharges<'_>,
        places: &TargetTables<'_>,
        now: Micros,
        holder: Holder,
        keep: &mut impl FnMut(HeldCharge),
    ) -> (bool, Outcomes) {
        let mut prepared: SmallVec<[Option<Prepared<'_>>; 4]> = parts.iter().map(|_| None).collect();
        let mut outcomes = Outcomes::from_elem(Outcome::BLOCKED, parts.len());
        let mut allowed = true;
        // In the order of the locks: a part without room locks the state that newcomers share.
        let mut order: SmallVec<[usize; 4]> = (0..parts.len()).collect();
        order.sort_unstable_by_key(|&index| places[index].order());
        for index in order {
            let (part, place) = (&parts[index], &places[index]);
            // Whether no other part of the same charge is in the same table.
            let is_alone = places.iter().filter(|other| other.table == place.table).count() == 1;
            let ready = place.limit_table.prepare(part.key, part.cost, now, is_alone);
            allowed &= ready.outcome.allowed || part.shadow;
            outcomes[index] = ready.outcome;
            prepared[index] = Some(ready);
        }
        for (number, ((part, place), ready)) in
            parts.iter().zip(places).zip(prepared.into_iter().flatten()).enumerate()
        {
            if !(allowed && ready.outcome.allowed) {
                place.limit_table.refuse(ready, now);
                continue;
            }
            let committed = place.limit_table.commit(ready, part.key, holder, part.cost, now);
            if holder.id != 0 {
                // A lease counts until its end, and is found by it.
                let lease_end = part.limit.lease.map(|lease| holder.lease_end(lease, now));
                keep(HeldCharge {
                    name: part.limit.name.clone(),
                    number,
                    limit_table: part.limit.limit_table.clone(),
                    lease: part.limit.lease,
                    key: part.key,
                    taken: Taken { cost: part.cost.get(), at: lease_end.unwrap_or(committed.charged_at) },
                    in_shared: committed.in_shared,
                });
            }
        }
        (allowed, outcomes)
    }

    pub(super) fn peek_all(&self, charges: &[MemoryCharge<'_>], now: Micros) -> Charged {
        let mut parts = PairCharges::new();
        self.parts(charges, &mut parts);
        let outcomes: Outcomes =
            parts.iter().map(|part| part.limit.limit_table.peek(part.key, part.cost, now)).collect();
        let allowed = parts.iter().zip(&outcomes).all(|(part, outcome)| outcome.allowed || part.shadow);
        Charged { allowed, outcomes: self.for_charges(charges, &parts, outcomes) }
    }
}
