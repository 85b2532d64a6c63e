//! Sibling tables: the tables of one limit whose states are stored under different numbers, and how a key moves between them.
//!
//! The words of a bucket or a counter do not contain the numbers that they are stored under; the table has them. After a change
//! of a limit's numbers, or with an override, there is one table for each set of numbers and one of whole states (whole.rs). A
//! key is in at most one of them. A charge that finds the key neither in its own table nor in the whole one searches the
//! siblings, under one lock for all of them. It converts what it finds to its own numbers, and stores it in its own table if that
//! can describe it completely, whole if not. No new key starts before that. So nothing is lost, counted twice or started twice.
//! Only new keys pay for it, and only while there are several tables. A move keeps the room of a key.
//!
//! A key that is stored whole is charged where it is, under the lock of its node alone. The order of locks: holds, then siblings
//! (several in the order of their addresses), then homes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard, RwLock};
use tollgate_kernel::{Cost, Micros};

use super::cell::Cell;
use super::limit_table::LimitTable;
use super::node::Fingerprint;
use super::table::Table;
use super::whole::{Whole, WholeNodes};

/// The tables of one limit's buckets, or of its counters.
#[derive(Default)]
pub(crate) struct SiblingTables {
    /// Whether there is more than one, to be read without the lock.
    several: AtomicBool,
    tables: Mutex<Vec<Weak<dyn LimitTable>>>,
    /// The table of whole states; present whenever there are several tables.
    whole: RwLock<Option<Arc<WholeNodes>>>,
}

/// The tables, while no other thread starts or moves a key in them.
pub(crate) struct Moving<'a> {
    siblings: &'a SiblingTables,
    tables: MutexGuard<'a, Vec<Weak<dyn LimitTable>>>,
}

/// What became of a key that was to be changed in its place.
pub(crate) enum Change {
    NotHere,
    Done,
    /// The words of the table cannot describe the new state: it was taken out.
    Left(Whole),
}

impl SiblingTables {
    #[inline]
    pub(crate) fn are_several(&self) -> bool {
        self.several.load(Ordering::Acquire)
    }

    /// Where states are written whole.
    pub(crate) fn whole(&self) -> Option<Arc<WholeNodes>> {
        self.whole.read().clone()
    }

    /// With no home locked.
    pub(crate) fn moving(&self) -> Moving<'_> {
        Moving { siblings: self, tables: self.tables.lock() }
    }
}

impl Moving<'_> {
    pub(crate) fn are_of(&self, siblings: &SiblingTables) -> bool {
        std::ptr::eq(self.siblings, siblings)
    }

    /// Sets the tables, with the one of whole states, if there is one.
    pub(crate) fn set(&mut self, tables: Vec<Weak<dyn LimitTable>>, whole: Option<Arc<WholeNodes>>) {
        let several = tables.len() > 1;
        *self.siblings.whole.write() = whole;
        self.siblings.several.store(several, Ordering::Release);
        *self.tables = tables;
    }

    /// Those other than the one at `address`.
    fn others(&self, address: usize) -> impl Iterator<Item = Arc<dyn LimitTable>> + '_ {
        self.tables.iter().filter_map(Weak::upgrade).filter(move |table| table.address() != address)
    }

    /// Takes a key out of the table that has it, other than the one at `address`.
    pub(crate) fn take(&self, key: Fingerprint, address: usize) -> Option<Whole> {
        self.others(address).find_map(|table| table.take(key))
    }

    /// The state of a key in any table other than the one at `address`.
    pub(crate) fn look(&self, key: Fingerprint, address: usize) -> Option<Whole> {
        self.others(address).find_map(|table| table.look(key))
    }

    /// Changes a key in the table that has it, other than the one at `address`.
    pub(crate) fn change(
        &self,
        key: Fingerprint,
        address: usize,
        now: Micros,
        change: &mut dyn FnMut(&mut Whole),
    ) -> Change {
        for table in self.others(address) {
            match table.change(key, now, change) {
                Change::NotHere => {}
                changed => return changed,
            }
        }
        Change::NotHere
    }

    /// Forgets a key wherever it is.
    pub(crate) fn forget(&self, key: Fingerprint) -> bool {
        let forgotten = self.tables.iter().filter_map(Weak::upgrade).filter(|table| table.forget_here(key));
        forgotten.count() > 0
    }

    /// Moves all keys of one table, as they are, into that of whole states.
    pub(crate) fn merge(&self, from: &dyn LimitTable, whole: &dyn LimitTable, now: Micros) {
        for home in 0..from.nodes() {
            for (key, state) in from.take_all(home) {
                whole.put(key, &state, now);
            }
        }
        self.share(from, whole, now);
    }

    /// Makes the new keys of one table start from the shared state of another.
    pub(crate) fn share(&self, from: &dyn LimitTable, into: &dyn LimitTable, now: Micros) {
        if let Some(state) = from.shared() {
            into.join_shared(&state, now);
        }
    }
}

/// What siblings can call on a table.
pub(crate) trait Movable {
    /// Takes a key out, with the room that it takes.
    fn take(&self, key: Fingerprint) -> Option<Whole>;

    /// Takes all keys of a home out.
    fn take_all(&self, home: usize) -> Vec<(Fingerprint, Whole)>;

    /// Inserts a key, with the room that it takes.
    fn put(&self, key: Fingerprint, state: &Whole, now: Micros);

    /// The state of a key in this table.
    fn look(&self, key: Fingerprint) -> Option<Whole>;

    /// Changes a key where it is.
    fn change(&self, key: Fingerprint, now: Micros, change: &mut dyn FnMut(&mut Whole)) -> Change;

    /// Forgets a key in this table alone.
    fn forget_here(&self, key: Fingerprint) -> bool;

    /// The state that newcomers share, while they do.
    fn shared(&self) -> Option<Whole>;

    /// Has newcomers share at least so much.
    fn join_shared(&self, state: &Whole, now: Micros);
}

impl<C: Cell<W>, const W: usize, const S: usize> Table<C, W, S> {
    /// Which of two states holds more: the one that is idle later.
    fn says_more(&self, words: [u64; W], than: [u64; W], now: Micros) -> bool {
        let reset_after = |mut words: [u64; W]| {
            let (_, decided) = self.cell.decide(&mut words, Cost::MAX, now);
            self.cell.outcome(decided, Cost::MAX).reset_after
        };
        reset_after(words) > reset_after(than)
    }

    /// Inserts a key, with the room that it takes.
    pub(super) fn put_words(&self, key: Fingerprint, words: [u64; W], now: Micros) {
        let (home, first, lock) = self.nodes.lock_home(key);
        match self.nodes.find(first, key) {
            // Started here by a thread that did not know the siblings yet: the state that holds more stays.
            Some((node, _, slot)) => {
                if self.says_more(words, node.words(slot), now) {
                    node.set_words(slot, words);
                }
                self.budget.give_back(1);
            }
            None => self.nodes.insert(home, key, words),
        }
        drop(lock);
        self.nodes.grow_if_needed();
    }
}

impl<C: Cell<W>, const W: usize, const S: usize> Movable for Table<C, W, S> {
    fn take(&self, key: Fingerprint) -> Option<Whole> {
        let (home, _, _lock) = self.nodes.lock_home(key);
        let mut taken = None;
        let moved = |_, words| taken = self.cell.carry(words);
        self.nodes.take_out(home, |other, _| other == key, moved);
        taken
    }

    fn take_all(&self, home: usize) -> Vec<(Fingerprint, Whole)> {
        let _lock = self.nodes.home(home).lock();
        let mut taken = Vec::new();
        let moved = |key, words| taken.extend(self.cell.carry(words).map(|state| (key, state)));
        self.nodes.take_out(home, |_, _| true, moved);
        taken
    }

    fn put(&self, key: Fingerprint, state: &Whole, now: Micros) {
        let words = self.cell.receive(state, now).unwrap_or_else(|| self.cell.approximate(state, now));
        self.put_words(key, words, now);
    }

    fn look(&self, key: Fingerprint) -> Option<Whole> {
        let (_, first, _lock) = self.nodes.lock_home(key);
        let (node, _, slot) = self.nodes.find(first, key)?;
        self.cell.carry(node.words(slot))
    }

    fn change(&self, key: Fingerprint, now: Micros, change: &mut dyn FnMut(&mut Whole)) -> Change {
        let (home, first, _lock) = self.nodes.lock_home(key);
        let Some((node, _, slot)) = self.nodes.find(first, key) else { return Change::NotHere };
        let Some(mut state) = self.cell.carry(node.words(slot)) else { return Change::NotHere };
        change(&mut state);
        match self.cell.receive(&state, now) {
            Some(words) => {
                node.set_words(slot, words);
                Change::Done
            }
            None => {
                self.nodes.take_out(home, |other, _| other == key, |_, _| ());
                Change::Left(state)
            }
        }
    }

    fn forget_here(&self, key: Fingerprint) -> bool {
        let (home, _, _lock) = self.nodes.lock_home(key);
        let discard = |_, words| self.cell.discard(words);
        let forgotten = self.nodes.take_out(home, |other, _| other == key, discard);
        self.budget.give_back(forgotten);
        forgotten > 0
    }

    fn shared(&self) -> Option<Whole> {
        let _lock = self.nodes.shared.lock();
        let is_in_use = self.nodes.shared_in_use.load(Ordering::Acquire);
        is_in_use.then(|| self.cell.carry(self.nodes.shared.words(0))).flatten()
    }

    fn join_shared(&self, state: &Whole, now: Micros) {
        let _lock = self.nodes.shared.lock();
        let is_in_use = self.nodes.shared_in_use.load(Ordering::Acquire);
        let before = self.nodes.shared.words(0);
        let words = self.cell.approximate(state, now);
        if !is_in_use || self.says_more(words, before, now) {
            self.nodes.shared.set_words(0, words);
            self.nodes.shared_in_use.store(true, Ordering::Release);
        }
    }
}
