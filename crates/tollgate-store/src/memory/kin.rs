//! Kin: the tables of one limit whose states are written in different units, and how a key moves between them.
//!
//! A bucket's state is an instant in units that its rate chooses. Where a limit's rate was changed, or a key has an override,
//! there is one table for each kind of unit, and a key is in at most one of them: where it was charged last. Whoever does not
//! find a key in its own table asks the others, under the one lock of all kin, and takes over what it finds; nobody begins a
//! new key before that. So nothing is lost, counted twice or begun twice, and only keys that are not known pay for it, and
//! only while there are several tables. Moving keeps the room that a key takes: it is in one table before and after.
//!
//! The order of locks: holds, then kin (several in the order of their addresses), then homes.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use tollgate_kernel::{BucketState, Micros};

use super::cell::{Amended, Amendment, Cell};
use super::ledger::Ledger;
use super::node::Fingerprint;
use super::table::Table;

/// A bucket on its way from one table to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Carried {
    pub(crate) state: BucketState,
    pub(crate) units_per_us: u64,
}

impl Carried {
    /// The state in other units, rounded up.
    pub(crate) fn in_units(self, units_per_us: u64) -> BucketState {
        self.state.in_units(self.units_per_us, units_per_us)
    }
}

/// The tables of one limit's buckets.
#[derive(Default)]
pub(crate) struct Kin {
    /// Whether there is more than one, to be read without the lock.
    several: AtomicBool,
    tables: Mutex<Vec<Weak<dyn Ledger>>>,
}

/// The tables, while nobody else begins or moves a key in them.
pub(crate) struct Moving<'a> {
    kin: &'a Kin,
    tables: MutexGuard<'a, Vec<Weak<dyn Ledger>>>,
}

impl Kin {
    #[inline]
    pub(crate) fn are_several(&self) -> bool {
        self.several.load(Ordering::Acquire)
    }

    /// With no home locked.
    pub(crate) fn moving(&self) -> Moving<'_> {
        Moving { kin: self, tables: self.tables.lock() }
    }
}

impl Moving<'_> {
    pub(crate) fn are_of(&self, kin: &Kin) -> bool {
        std::ptr::eq(self.kin, kin)
    }

    /// Says which tables there are.
    pub(crate) fn set(&mut self, tables: Vec<Weak<dyn Ledger>>) {
        self.kin.several.store(tables.len() > 1, Ordering::Release);
        *self.tables = tables;
    }

    /// Takes a key out of whichever table has it, other than the one at `address`.
    pub(crate) fn take(&self, key: Fingerprint, address: usize) -> Option<Carried> {
        let others = self.tables.iter().filter_map(Weak::upgrade).filter(|table| table.address() != address);
        others.into_iter().find_map(|table| table.take(key))
    }

    /// Forgets a key wherever it is.
    pub(crate) fn forget(&self, key: Fingerprint) -> bool {
        let forgotten = self.tables.iter().filter_map(Weak::upgrade).filter(|table| table.forget_here(key));
        forgotten.count() > 0
    }

    /// Moves all keys of one table into another.
    pub(crate) fn merge(&self, from: &dyn Ledger, into: &dyn Ledger) {
        for home in 0..from.nodes() {
            for (key, carried) in from.take_all(home) {
                into.put(key, carried);
            }
        }
        self.share(from, into);
    }

    /// Has the newcomers of one table start from what those of another share.
    pub(crate) fn share(&self, from: &dyn Ledger, into: &dyn Ledger) {
        if let Some(carried) = from.shared() {
            into.join_shared(carried);
        }
    }
}

/// What a table can be asked by its kin.
pub(crate) trait Movable {
    /// Takes a key out, with the room that it takes.
    fn take(&self, key: Fingerprint) -> Option<Carried>;

    /// Takes all keys of a home out.
    fn take_all(&self, home: usize) -> Vec<(Fingerprint, Carried)>;

    /// Puts a key in, with the room that it takes.
    fn put(&self, key: Fingerprint, carried: Carried);

    /// Changes a key where it is; false if it is not here.
    fn change(&self, key: Fingerprint, change: &mut dyn FnMut(Carried) -> Carried) -> bool;

    /// Corrects a key by this table's numbers in whichever other table it is.
    fn amend_elsewhere(
        &self,
        key: Fingerprint,
        tables: &Moving<'_>,
        amendment: Amendment,
        now: Micros,
    ) -> Option<Amended>;

    /// Forgets a key in this table alone.
    fn forget_here(&self, key: Fingerprint) -> bool;

    /// The state that newcomers share, while they do.
    fn shared(&self) -> Option<Carried>;

    /// Has newcomers share at least so much.
    fn join_shared(&self, carried: Carried);
}

impl<C: Cell<W>, const W: usize, const S: usize> Table<C, W, S> {
    /// When a bucket is full: of two states the one with the later instant says more.
    fn full_at(&self, words: [u64; W]) -> Option<u128> {
        self.cell.carry(words).map(|carried| carried.state.full_at)
    }
}

impl<C: Cell<W>, const W: usize, const S: usize> Movable for Table<C, W, S> {
    fn take(&self, key: Fingerprint) -> Option<Carried> {
        let (home, _, _lock) = self.nodes.lock_home(key);
        let mut taken = None;
        let moved = |_, words| taken = self.cell.carry(words);
        self.nodes.take_out(home, |other, _| other == key, moved);
        taken
    }

    fn take_all(&self, home: usize) -> Vec<(Fingerprint, Carried)> {
        let _lock = self.nodes.home(home).lock();
        let mut taken = Vec::new();
        let moved = |key, words| taken.extend(self.cell.carry(words).map(|carried| (key, carried)));
        self.nodes.take_out(home, |_, _| true, moved);
        taken
    }

    fn put(&self, key: Fingerprint, carried: Carried) {
        let words = self.cell.receive(carried);
        let (home, first, lock) = self.nodes.lock_home(key);
        match self.nodes.find(first, key) {
            // Begun here by one who did not know of the others yet: the one of both that says more is kept.
            Some((node, _, slot)) => {
                if self.full_at(words) > self.full_at(node.words(slot)) {
                    node.set_words(slot, words);
                }
                self.budget.give_back(1);
            }
            None => self.nodes.insert(home, key, words),
        }
        drop(lock);
        self.nodes.grow_if_needed();
    }

    fn change(&self, key: Fingerprint, change: &mut dyn FnMut(Carried) -> Carried) -> bool {
        let (_, first, _lock) = self.nodes.lock_home(key);
        let Some((node, _, slot)) = self.nodes.find(first, key) else { return false };
        let Some(carried) = self.cell.carry(node.words(slot)) else { return false };
        node.set_words(slot, self.cell.receive(change(carried)));
        true
    }

    fn amend_elsewhere(
        &self,
        key: Fingerprint,
        tables: &Moving<'_>,
        amendment: Amendment,
        now: Micros,
    ) -> Option<Amended> {
        let mut applied = Amended::NotFound;
        let mut amend = |carried| {
            let mut words = self.cell.receive(carried);
            applied = self.cell.amend(&mut words, amendment, now);
            self.cell.carry(words).unwrap_or(carried)
        };
        let others = tables.tables.iter().filter_map(Weak::upgrade);
        let found = others
            .filter(|table| table.address() != self.address())
            .any(|table| table.change(key, &mut amend));
        found.then_some(applied)
    }

    fn forget_here(&self, key: Fingerprint) -> bool {
        let (home, _, _lock) = self.nodes.lock_home(key);
        let discard = |_, words| self.cell.discard(words);
        let forgotten = self.nodes.take_out(home, |other, _| other == key, discard);
        self.budget.give_back(forgotten);
        forgotten > 0
    }

    fn shared(&self) -> Option<Carried> {
        let _lock = self.nodes.shared.lock();
        let is_in_use = self.nodes.shared_in_use.load(Ordering::Acquire);
        is_in_use.then(|| self.cell.carry(self.nodes.shared.words(0))).flatten()
    }

    fn join_shared(&self, carried: Carried) {
        let _lock = self.nodes.shared.lock();
        let is_in_use = self.nodes.shared_in_use.load(Ordering::Acquire);
        let before = self.nodes.shared.words(0);
        let words = self.cell.receive(carried);
        if !is_in_use || self.full_at(words) > self.full_at(before) {
            self.nodes.shared.set_words(0, words);
            self.nodes.shared_in_use.store(true, Ordering::Release);
        }
    }
}
