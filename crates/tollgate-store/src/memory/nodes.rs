//! The nodes of a table: keys to words, growing one node at a time, whatever the words mean.
//!
//! Linear hashing: a key's fingerprint names its home node; when the table is full enough, the next node in turn is split in
//! two, so growth never stops the world and never moves more than one chain of a few keys. A chain is a home node and, rarely,
//! spill nodes behind it. One lock, the home node's, covers a chain: charging a key takes that lock and no other. Nodes never
//! move and are never freed, so a reader without the lock is safe; node.rs says how it knows what to believe.
//!
//! All limits of one name whose states are written alike share their nodes (shape.rs).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use parking_lot::Mutex;
use smallvec::SmallVec;

use super::chunks::Chunks;
use super::contention::Contention;
use super::homes::Homes;
use super::node::{Fingerprint, Guard, Node};

/// Where a key's state is.
#[derive(Clone, Copy)]
pub(super) struct Spot {
    pub(super) home: usize,
    /// The spill node, if it is not in the home node itself.
    pub(super) spill: Option<u32>,
    pub(super) slot: usize,
}

pub(super) type Entries<const W: usize> = SmallVec<[(Fingerprint, [u64; W]); 16]>;

pub(crate) struct Nodes<const W: usize, const S: usize> {
    contention: Arc<Contention>,
    homes: Homes<Node<W, S>>,
    spills: Chunks<Node<W, S>>,
    spill_count: AtomicU32,
    spill_free: Mutex<Vec<u32>>,
    len: AtomicUsize,
    growing: Mutex<()>,
    sweep_next: AtomicUsize,
    /// The state that newcomers share when there is no room, in the first slot.
    pub(super) shared: Node<W, S>,
    pub(super) shared_in_use: AtomicBool,
}

impl<const W: usize, const S: usize> Nodes<W, S> {
    pub(crate) fn new(contention: Arc<Contention>) -> Self {
        Nodes {
            contention,
            homes: Homes::new(),
            spills: Chunks::new(),
            spill_count: AtomicU32::new(0),
            spill_free: Mutex::new(Vec::new()),
            len: AtomicUsize::new(0),
            growing: Mutex::new(()),
            sweep_next: AtomicUsize::new(0),
            shared: Node::default(),
            shared_in_use: AtomicBool::new(false),
        }
    }

    /// How many keys there are.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// How many homes there are.
    pub(super) fn count(&self) -> usize {
        self.homes.count()
    }

    #[inline]
    pub(super) fn home(&self, home: usize) -> &Node<W, S> {
        self.homes.get(home)
    }

    #[inline]
    pub(super) fn home_of(&self, key: Fingerprint) -> usize {
        self.homes.index_of(key.hi)
    }

    /// The first node of the chain that a key would be in.
    #[inline(always)]
    pub(super) fn first_of(&self, key: Fingerprint) -> &Node<W, S> {
        self.homes.of(key.hi)
    }

    /// Locks a node, and counts if that has to be waited for.
    #[inline]
    pub(super) fn lock_node<'a>(&self, node: &'a Node<W, S>) -> Guard<'a> {
        node.version().and_then(|version| node.lock_if_unchanged(version)).unwrap_or_else(|| {
            self.contention.note();
            node.lock()
        })
    }

    /// Nothing, because others were in the way.
    #[cold]
    pub(super) fn disturbed<T>(&self) -> Option<T> {
        self.contention.note();
        None
    }

    /// Locks the home of a key: by the time the lock is held the node may have been split and the key moved.
    #[inline]
    pub(super) fn lock_home(&self, key: Fingerprint) -> (usize, &Node<W, S>, Guard<'_>) {
        loop {
            let home = self.home_of(key);
            let first = self.homes.get(home);
            let guard = self.lock_node(first);
            if self.home_of(key) == home {
                return (home, first, guard);
            }
        }
    }

    #[inline]
    fn node(&self, home: usize, spill: Option<u32>) -> &Node<W, S> {
        match spill {
            None => self.homes.get(home),
            Some(index) => self.spills.get(index as usize),
        }
    }

    /// Finds a key in the chain that starts at `first`: its node, which spill node that is, and the slot. With the chain's lock
    /// the answer is certain.
    #[inline(always)]
    pub(super) fn find<'a>(
        &'a self,
        first: &'a Node<W, S>,
        key: Fingerprint,
    ) -> Option<(&'a Node<W, S>, Option<u32>, usize)> {
        match first.find(key) {
            Some(slot) => Some((first, None, slot)),
            None => self.find_spilled(first, key),
        }
    }

    /// The same in the nodes that follow. Few keys are there, and code for them on the way of all others would cost those more.
    #[inline(never)]
    fn find_spilled<'a>(
        &'a self,
        first: &'a Node<W, S>,
        key: Fingerprint,
    ) -> Option<(&'a Node<W, S>, Option<u32>, usize)> {
        let mut node = first;
        loop {
            let next = node.next()?;
            node = self.spills.get(next as usize);
            if let Some(slot) = node.find(key) {
                return Some((node, Some(next), slot));
            }
        }
    }

    pub(super) fn words(&self, spot: Spot) -> [u64; W] {
        self.node(spot.home, spot.spill).words(spot.slot)
    }

    pub(super) fn set_words(&self, spot: Spot, words: [u64; W]) {
        self.node(spot.home, spot.spill).set_words(spot.slot, words);
    }

    /// Adds a key to a locked chain.
    pub(super) fn insert(&self, home: usize, key: Fingerprint, words: [u64; W]) {
        self.append(home, key, words, &mut SmallVec::new());
        self.len.fetch_add(1, Ordering::Relaxed);
    }

    /// Puts a key into the first vacant slot of a chain, lengthening the chain by one of `spare` or a new node if need be.
    fn append(&self, home: usize, key: Fingerprint, words: [u64; W], spare: &mut SmallVec<[u32; 8]>) {
        let mut node = self.homes.get(home);
        loop {
            if let Some(slot) = node.vacant() {
                return node.fill(slot, key, words);
            }
            node = match node.next() {
                Some(index) => self.spills.get(index as usize),
                None => {
                    let index = spare.pop().or_else(|| self.spill_free.lock().pop()).unwrap_or_else(|| {
                        let index = self.spill_count.fetch_add(1, Ordering::Relaxed);
                        self.spills.ensure(index as usize);
                        index
                    });
                    node.set_next(Some(index));
                    self.spills.get(index as usize)
                }
            };
        }
    }

    /// Empties a chain into `entries`, and its spill nodes into `spare`.
    fn drain(&self, home: usize, entries: &mut Entries<W>, spare: &mut SmallVec<[u32; 8]>) {
        let mut node = self.homes.get(home);
        loop {
            for slot in 0..S {
                if let Some(key) = node.key(slot) {
                    entries.push((key, node.words(slot)));
                    node.clear(slot);
                }
            }
            let next = node.next();
            node.set_next(None);
            let Some(index) = next else { return };
            spare.push(index);
            node = self.spills.get(index as usize);
        }
    }

    /// Splits the next node in turn into itself and a new one at the end.
    fn split(&self) {
        let count = self.homes.count();
        let from = count - (1 << count.ilog2());
        self.homes.ensure(count);
        let (old, new) = (self.homes.get(from), self.homes.get(count));
        let (_old_lock, _new_lock) = (old.lock(), new.lock());
        let (mut entries, mut spare) = (Entries::<W>::new(), SmallVec::new());
        self.drain(from, &mut entries, &mut spare);
        for (key, words) in entries {
            self.append(Homes::<Node<W, S>>::index_among(count + 1, key.hi), key, words, &mut spare);
        }
        self.homes.set_count(count + 1);
        self.spill_free.lock().extend(spare);
    }

    /// Takes the keys of a locked chain out that `is_gone` picks, hands each to `taken`, and returns how many.
    pub(super) fn take_out(
        &self,
        home: usize,
        mut is_gone: impl FnMut(Fingerprint, [u64; W]) -> bool,
        mut taken: impl FnMut(Fingerprint, [u64; W]),
    ) -> usize {
        let (mut entries, mut spare) = (Entries::<W>::new(), SmallVec::<[u32; 8]>::new());
        let mut any_gone = false;
        let mut spill = None;
        loop {
            let node = self.node(home, spill);
            any_gone |= (0..S).any(|slot| node.key(slot).is_some_and(|key| is_gone(key, node.words(slot))));
            match node.next() {
                Some(next) if !any_gone => spill = Some(next),
                _ => break,
            }
        }
        if !any_gone {
            return 0;
        }
        self.drain(home, &mut entries, &mut spare);
        let before = entries.len();
        entries.retain(|(key, words)| {
            let gone = is_gone(*key, *words);
            if gone {
                taken(*key, *words);
            }
            !gone
        });
        let count = before - entries.len();
        for (key, words) in entries {
            self.append(home, key, words, &mut spare);
        }
        self.spill_free.lock().extend(spare);
        self.len.fetch_sub(count, Ordering::Relaxed);
        count
    }

    /// The next `nodes` homes in turn that may hold a key, but none twice.
    pub(super) fn next_homes(&self, nodes: usize) -> impl Iterator<Item = usize> + '_ {
        let count = self.count();
        let start = self.sweep_next.fetch_add(nodes, Ordering::Relaxed);
        let homes = (start..start.saturating_add(nodes.min(count))).map(move |next| next % count);
        homes.filter(|&home| {
            let node = self.homes.get(home);
            (0..S).any(|slot| node.key(slot).is_some()) || node.next().is_some()
        })
    }

    /// Grows if need be. With no home locked.
    pub(super) fn grow_if_needed(&self) {
        // A chain fills three quarters of a node's slots on average: what spills over is little, and so is what is empty.
        let wants_more = || self.len() * 4 > self.homes.count() * (3 * S);
        if wants_more()
            && let Some(_growing) = self.growing.try_lock()
        {
            for _ in 0..2 {
                if wants_more() {
                    self.split();
                }
            }
        }
    }
}
