//! The table in miniature: two homes, one spill node, and what the table does with them, step for step as in `table.rs`.

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::node::{Fingerprint, Guard, Node, Sight};
use crate::sync::{self, AtomicU64};

/// A key whose home, once there are two, is `home`. The half of a fingerprint that names the home is never zero.
pub(crate) const fn key(number: u64, home: u32) -> Fingerprint {
    Fingerprint { lo: number, hi: home + 1 }
}

/// The home of a key, once there are two.
const fn home_of_two(key: Fingerprint) -> usize {
    if key.hi == 2 { 1 } else { 0 }
}

/// What a reader without the lock has seen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen<const W: usize> {
    /// The key, and its state.
    State([u64; W]),
    /// No such key here.
    Nothing,
    /// Somebody was writing: what was seen may not be believed.
    Disturbed,
}

/// A charge that was looked at without a lock: what it would leave behind, if it fits.
pub(crate) struct Sighted<'a, const W: usize> {
    pub(crate) sight: Sight<'a>,
    pub(crate) after: Option<[u64; W]>,
    cells: &'a [AtomicU64],
}

impl<const W: usize> Sighted<'_, W> {
    /// Carries the charge out. With the lock of the sight held.
    pub(crate) fn commit(&self) {
        for (cell, word) in self.cells.iter().zip(self.after.into_iter().flatten()) {
            cell.store(word, sync::Ordering::Relaxed);
        }
    }
}

pub(crate) struct Chain<const W: usize> {
    homes: [Node<W, 1>; 2],
    home_count: AtomicUsize,
    spill: Node<W, 1>,
    /// Whether the spill node's memory is there: the table makes nodes as it grows, and fails if one is used before that.
    spill_is_made: AtomicBool,
}

impl<const W: usize> Chain<W> {
    /// An empty chain: one home, no spill node.
    pub(crate) fn new() -> Self {
        Chain {
            homes: [Node::default(), Node::default()],
            home_count: AtomicUsize::new(1),
            spill: Node::default(),
            spill_is_made: AtomicBool::new(false),
        }
    }

    fn home_of(&self, key: Fingerprint) -> usize {
        let homes = self.home_count.load(Ordering::Acquire);
        if homes == 2 { home_of_two(key) } else { 0 }
    }

    fn spill(&self) -> &Node<W, 1> {
        assert!(self.spill_is_made.load(Ordering::Acquire), "a node is used before it was made");
        &self.spill
    }

    pub(crate) fn find<'a>(
        &'a self,
        first: &'a Node<W, 1>,
        key: Fingerprint,
    ) -> Option<(&'a Node<W, 1>, usize)> {
        if let Some(slot) = first.find(key) {
            return Some((first, slot));
        }
        first.next()?;
        let spill = self.spill();
        spill.find(key).map(|slot| (spill, slot))
    }

    /// What can be seen of a key without the lock.
    pub(crate) fn look(&self, key: Fingerprint) -> Seen<W> {
        let first = &self.homes[self.home_of(key)];
        let Some(version) = first.version() else { return Seen::Disturbed };
        let state = self.find(first, key).map(|(node, slot)| node.words(slot));
        match (first.unchanged_since(version), state) {
            (false, _) => Seen::Disturbed,
            (true, Some(words)) => Seen::State(words),
            (true, None) => Seen::Nothing,
        }
    }

    /// Charges a key: `fits` says what its state would be after a charge, or nothing if the charge is refused. On what can be
    /// seen without the lock if that is undisturbed, and else under it. `None` if there is no such key.
    pub(crate) fn charge(
        &self,
        key: Fingerprint,
        fits: impl Fn([u64; W]) -> Option<[u64; W]>,
    ) -> Option<bool> {
        if let Some(admitted) = self.charge_seen(key, &fits) {
            return Some(admitted);
        }
        let (first, _lock) = self.lock_home(key);
        let (node, slot) = self.find(first, key)?;
        let after = fits(node.words(slot));
        if let Some(words) = after {
            node.set_words(slot, words);
        }
        Some(after.is_some())
    }

    fn charge_seen(&self, key: Fingerprint, fits: impl Fn([u64; W]) -> Option<[u64; W]>) -> Option<bool> {
        let first = &self.homes[self.home_of(key)];
        let version = first.version()?;
        let (node, slot) = self.find(first, key)?;
        let Some(words) = fits(node.words(slot)) else {
            return first.unchanged_since(version).then_some(false);
        };
        let _lock = first.lock_if_unchanged(version)?;
        node.set_words(slot, words);
        Some(true)
    }

    /// Looks at a key without the lock, for a charge over several chains.
    pub(crate) fn see(
        &self,
        key: Fingerprint,
        fits: impl Fn([u64; W]) -> Option<[u64; W]>,
    ) -> Option<Sighted<'_, W>> {
        let first = &self.homes[self.home_of(key)];
        let version = first.version()?;
        let (node, slot) = self.find(first, key)?;
        Some(Sighted { sight: first.sight(version), cells: node.cells(slot), after: fits(node.words(slot)) })
    }

    pub(crate) fn lock_home(&self, key: Fingerprint) -> (&Node<W, 1>, Guard<'_>) {
        loop {
            let home = self.home_of(key);
            let guard = self.homes[home].lock();
            if self.home_of(key) == home {
                return (&self.homes[home], guard);
            }
        }
    }

    /// Adds a key, which must not be there.
    pub(crate) fn insert(&self, key: Fingerprint, words: [u64; W]) {
        let (first, _lock) = self.lock_home(key);
        self.append(first, key, words);
    }

    fn append(&self, first: &Node<W, 1>, key: Fingerprint, words: [u64; W]) {
        if let Some(slot) = first.vacant() {
            return first.fill(slot, key, words);
        }
        if first.next().is_none() {
            self.spill_is_made.store(true, Ordering::Release);
            first.set_next(Some(0));
        }
        let slot = self.spill.vacant().expect("the model's chain holds two keys");
        self.spill.fill(slot, key, words);
    }

    /// Takes a key out and puts another in its place, under one lock.
    pub(crate) fn replace(&self, old: Fingerprint, new: Fingerprint, words: [u64; W]) {
        let (first, _lock) = self.lock_home(old);
        let (node, slot) = self.find(first, old).expect("the key to be replaced");
        node.clear(slot);
        node.fill(slot, new, words);
    }

    /// Splits the only home in two; the spill node, if there was one, is free again.
    pub(crate) fn split(&self) {
        let [old, new] = &self.homes;
        let (_old_lock, _new_lock) = (old.lock(), new.lock());
        let mut entries = Vec::new();
        let mut node = old;
        loop {
            if let Some(key) = node.key(0) {
                entries.push((key, node.words(0)));
                node.clear(0);
            }
            let next = node.next();
            node.set_next(None);
            if next.is_none() {
                break;
            }
            node = &self.spill;
        }
        for (key, words) in entries {
            self.append(&self.homes[home_of_two(key)], key, words);
        }
        self.home_count.store(2, Ordering::Release);
    }
}
