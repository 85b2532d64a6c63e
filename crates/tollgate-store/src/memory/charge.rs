//! A charge over several limits: all of them, or none.
//!
//! The short path looks at every key without a lock, decides, and takes the locks only to write; what changed meanwhile it
//! notices, and tries again. The long path locks the homes of all keys in one order, prepares all, and then commits or abandons
//! each; it also makes room for keys that are new. Repeated pairs of limit and key are added up before anything is asked.

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome, Taken};

use super::holds::HeldPart;
use super::kin::{Kin, Moving};
use super::ledger::Ledger;
use super::node::{Fingerprint, Guard};
use super::table::{Prepared, Seen};
use super::{Inner, MemoryItem, MemoryLimit};
use crate::{Charged, Outcomes};

/// How often the short path of a charge over several limits is tried before locks are waited for.
const TRIES: usize = 16;

/// Why the short path came to nothing.
enum Missed {
    /// A key was not seen, or two share a chain: trying again does not help.
    Unseen,
    /// Others charged one of the keys meanwhile.
    Disturbed,
}

/// One key of a charge over several limits; repeated pairs of limit and key have been added up.
struct Part<'a> {
    limit: &'a MemoryLimit,
    key: Fingerprint,
    cost: Cost,
    shadow: bool,
    /// The nodes that it is in.
    table: usize,
    home: usize,
}

impl<'a> Part<'a> {
    fn ledger(&self) -> &'a dyn Ledger {
        &*self.limit.ledger
    }

    /// The order in which locks are taken: by table, then by home.
    fn order(&self) -> (usize, usize) {
        (self.table, self.home)
    }

    fn is_same_table(&self, other: &Part<'_>) -> bool {
        self.table == other.table
    }

    fn is_same(&self, other: &Part<'_>) -> bool {
        self.key == other.key && self.is_same_table(other)
    }
}

type Parts<'a> = SmallVec<[Part<'a>; 4]>;

impl Inner {
    /// The parts of a charge: one for each pair of limit and key, repeated pairs added up.
    #[inline]
    fn parts<'a>(&self, items: &[MemoryItem<'a>], parts: &mut Parts<'a>) {
        for item in items {
            let part = self.part(item);
            match parts.iter_mut().find(|other| other.is_same(&part)) {
                Some(other) => {
                    let sum = other.cost.get().saturating_add(part.cost.get());
                    other.cost = Cost::new(sum).unwrap_or(part.cost);
                    // Who is to be held to a limit once is held to it.
                    other.shadow &= part.shadow;
                }
                None => parts.push(part),
            }
        }
    }

    #[inline]
    fn part<'a>(&self, item: &MemoryItem<'a>) -> Part<'a> {
        let key = self.seeds.fingerprint(item.key);
        let table = item.limit.ledger.address();
        Part { limit: item.limit, key, cost: item.cost, shadow: item.shadow, table, home: 0 }
    }

    /// Answers for items, from answers for parts.
    #[inline]
    fn for_items(&self, items: &[MemoryItem<'_>], parts: &Parts<'_>, outcomes: Outcomes) -> Outcomes {
        if items.len() == parts.len() {
            return outcomes;
        }
        let of_item = |item| {
            let part = self.part(item);
            let index = parts.iter().position(|other| other.is_same(&part));
            index.map_or(Outcome::BLOCKED, |index| outcomes[index])
        };
        items.iter().map(of_item).collect()
    }

    /// Has every part that is not known take over what is known of it under other numbers of its limit. While the answer is
    /// held, nobody else begins or moves a key of those limits.
    fn inherit_all<'a>(parts: &Parts<'a>) -> SmallVec<[Moving<'a>; 1]> {
        let mut kin: SmallVec<[&'a Kin; 1]> =
            parts.iter().filter_map(|part| part.ledger().kin_to_ask(part.key)).collect();
        if kin.is_empty() {
            return SmallVec::new();
        }
        // In one order everywhere, and each once.
        kin.sort_unstable_by_key(|kin| std::ptr::from_ref(*kin));
        kin.dedup_by_key(|kin| std::ptr::from_ref(*kin));
        let moving: SmallVec<[Moving<'a>; 1]> = kin.into_iter().map(Kin::moving).collect();
        for part in parts {
            let own = part.ledger().kin_to_ask(part.key);
            if let Some(tables) = own.and_then(|own| moving.iter().find(|tables| tables.are_of(own))) {
                part.ledger().inherit(part.key, tables);
            }
        }
        moving
    }

    /// Locks all that a charge needs: the homes of its parts, and the kin of those that are not known.
    fn lock_all<'a>(parts: &mut Parts<'a>) -> (SmallVec<[Guard<'a>; 4]>, SmallVec<[Moving<'a>; 1]>) {
        loop {
            let moving = Self::inherit_all(parts);
            let mut guards = SmallVec::new();
            Self::lock_homes(parts, &mut guards);
            // A part that was known may have been taken away before its home was locked.
            let mut to_ask = parts.iter().filter_map(|part| part.ledger().kin_to_ask_locked(part.key));
            if to_ask.all(|kin| moving.iter().any(|tables| tables.are_of(kin))) {
                return (guards, moving);
            }
        }
    }

    /// Locks the homes of all parts, in one order everywhere, so that two charges never wait for each other in a ring.
    #[inline]
    fn lock_homes<'a>(parts: &mut Parts<'a>, guards: &mut SmallVec<[Guard<'a>; 4]>) {
        loop {
            for part in parts.iter_mut() {
                part.home = part.ledger().home(part.key);
            }
            // The next in order, again and again: charges have few parts, and parts with the same home are locked once.
            let mut last = None;
            while let Some(part) =
                parts.iter().filter(|part| Some(part.order()) > last).min_by_key(|part| part.order())
            {
                last = Some(part.order());
                guards.push(part.ledger().lock(part.home));
            }
            if parts.iter().all(|part| part.ledger().home(part.key) == part.home) {
                return;
            }
            guards.clear();
        }
    }

    /// The short path of a charge over several limits: decides on what can be seen without locks, and takes the locks, without
    /// waiting for any, only to write. `None` if a key was not seen, two are too close, or others were in the way each time.
    #[inline]
    pub(super) fn charge_seen(
        &self,
        items: &[MemoryItem<'_>],
        now: Micros,
        say: &mut impl FnMut(Outcome),
    ) -> Option<bool> {
        for _ in 0..TRIES {
            match self.try_charge_seen(items, now, say) {
                Ok(allowed) => return Some(allowed),
                Err(Missed::Unseen) => return None,
                Err(Missed::Disturbed) => {
                    self.contention.met();
                    std::hint::spin_loop();
                }
            }
        }
        None
    }

    #[inline]
    fn try_charge_seen(
        &self,
        items: &[MemoryItem<'_>],
        now: Micros,
        say: &mut impl FnMut(Outcome),
    ) -> Result<bool, Missed> {
        let mut seen: SmallVec<[Seen<'_>; 4]> = SmallVec::new();
        let mut allowed = true;
        for (index, item) in items.iter().enumerate() {
            let key = self.seeds.fingerprint(item.key);
            if !item.limit.ledger.see(key, item.cost, now, &mut seen) {
                return Err(Missed::Unseen);
            }
            // Two keys of one chain would need one lock, and one key asked twice has its costs added up.
            let (before, this) = seen.split_at(index);
            if before.iter().any(|other| other.sight.is_of_same_chain(&this[0].sight)) {
                return Err(Missed::Unseen);
            }
            allowed &= this[0].outcome.allowed || item.shadow;
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

    /// Charges all parts or none. What is charged is handed to `keep`, part by part, if it is to be held.
    pub(super) fn charge_all(
        &self,
        items: &[MemoryItem<'_>],
        now: Micros,
        holder: u128,
        mut keep: impl FnMut(HeldPart),
    ) -> Charged {
        let mut parts = Parts::new();
        self.parts(items, &mut parts);
        let (guards, moving) = Self::lock_all(&mut parts);
        let mut prepared: SmallVec<[Option<Prepared<'_>>; 4]> = parts.iter().map(|_| None).collect();
        let mut outcomes = Outcomes::from_elem(Outcome::BLOCKED, parts.len());
        let mut allowed = true;
        // In the order of the locks: a part without room locks the state that newcomers share.
        let mut order: SmallVec<[usize; 4]> = (0..parts.len()).collect();
        order.sort_unstable_by_key(|&index| parts[index].order());
        for index in order {
            let part = &parts[index];
            let ready = part.ledger().prepare(part.key, part.cost, now, Self::is_alone(&parts, index));
            allowed &= ready.outcome.allowed || part.shadow;
            outcomes[index] = ready.outcome;
            prepared[index] = Some(ready);
        }
        for (part, ready) in parts.iter().zip(prepared.into_iter().flatten()) {
            if !(allowed && ready.outcome.allowed) {
                part.ledger().abandon(ready);
                continue;
            }
            let committed = part.ledger().commit(ready, part.key, holder, part.cost, now);
            if holder != 0 {
                keep(HeldPart {
                    name: part.limit.name.clone(),
                    ledger: part.limit.ledger.clone(),
                    lease: part.limit.lease,
                    key: part.key,
                    taken: Taken {
                        cost: part.cost.get(),
                        // A lease counts until its end, and is found by it.
                        at: part.limit.lease.map_or(committed.charged_at, |lease| now.saturating_add(lease)),
                    },
                    in_shared: committed.in_shared,
                });
            }
        }
        drop(guards);
        drop(moving);
        if allowed {
            parts.iter().for_each(|part| part.ledger().grow_if_needed());
        }
        Charged { allowed, outcomes: self.for_items(items, &parts, outcomes) }
    }

    /// Whether no other part of the same charge is in the same table.
    fn is_alone(parts: &Parts<'_>, index: usize) -> bool {
        parts.iter().enumerate().all(|(other, part)| other == index || !part.is_same_table(&parts[index]))
    }

    pub(super) fn peek_all(&self, items: &[MemoryItem<'_>], now: Micros) -> Charged {
        let mut parts = Parts::new();
        self.parts(items, &mut parts);
        let outcomes: Outcomes =
            parts.iter().map(|part| part.ledger().peek(part.key, part.cost, now)).collect();
        let allowed = parts.iter().zip(&outcomes).all(|(part, outcome)| outcome.allowed || part.shadow);
        Charged { allowed, outcomes: self.for_items(items, &parts, outcomes) }
    }
}
