//! A node: a handful of keys in two cache lines, written under its lock and read without it.
//!
//! Lock and version are one word: odd while the lock is held, and two more each time it is released. A reader that finds the same
//! even version before and after a read has seen a consistent state. A writer that swaps that version for the next odd one has
//! the lock *and* the proof that nothing changed since the read: an admission costs one atomic exchange and a refusal none.
//!
//! The rule for writers: hold the lock of the chain's first node. The rule for readers: take the first node's version, read, and
//! trust the result only if `unchanged_since` agrees or `lock_if_unchanged` succeeds. A reader whose read was disturbed takes the
//! lock. The lock is held for some tens of nanoseconds; a waiting thread spins a few times and then yields.
//!
//! The version has 32 bits: to be fooled, a reader must pause for an exact multiple of 2^31 changes of one node. `model/` checks
//! this very file under every interleaving, with its own `sync`.

use super::sync::{AtomicU32, AtomicU64, Ordering, fence, pause};

/// A key, as the store knows it: 96 bits of a keyed hash. `hi` picks the home and the slot, and `lo` confirms the slot. `hi` is never
/// zero: zero marks a vacant slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    pub(crate) lo: u64,
    pub(crate) hi: u32,
}

struct Slot<const W: usize> {
    lo: AtomicU64,
    words: [AtomicU64; W],
}

/// The lock of a node, held; it is given up, and the version moved on, when this is dropped.
pub(crate) struct Guard<'a> {
    version: &'a AtomicU32,
    odd: u32,
}

impl<'a> Guard<'a> {
    #[inline]
    fn take(word: &'a AtomicU32, version: u32) -> Option<Guard<'a>> {
        let odd = version.wrapping_add(1);
        word.compare_exchange(version, odd, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // No write of the holder may be seen under the even version: the exchange above is ordered only before what reads.
        fence(Ordering::Release);
        Some(Guard { version: word, odd })
    }
}

/// A look at a chain, whatever the shape of its nodes.
#[derive(Clone, Copy)]
pub(crate) struct Sight<'a> {
    version: &'a AtomicU32,
    seen: u32,
}

impl<'a> Sight<'a> {
    /// Whether both look at the same chain.
    #[inline]
    pub(crate) fn is_of_same_chain(&self, other: &Sight<'_>) -> bool {
        std::ptr::eq(self.version, other.version)
    }

    /// Whether all reads since the version was taken are consistent.
    #[inline]
    pub(crate) fn is_unchanged(&self) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == self.seen
    }

    /// Takes the chain's lock if nothing has changed since the look. It never waits, so the order of several does not matter.
    #[inline]
    pub(crate) fn lock(&self) -> Option<Guard<'a>> {
        Guard::take(self.version, self.seen)
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.version.store(self.odd.wrapping_add(1), Ordering::Release);
    }
}

/// `S` slots, each for one key and its state of `W` words.
#[repr(C, align(128))]
pub(crate) struct Node<const W: usize, const S: usize> {
    version: AtomicU32,
    /// The next node of the chain, plus one; zero at its end.
    next: AtomicU32,
    /// `hi` of the key in each slot, side by side, so that all of them are compared at once.
    his: [AtomicU32; S],
    slots: [Slot<W>; S],
}

impl<const W: usize, const S: usize> Default for Node<W, S> {
    fn default() -> Self {
        Node {
            version: AtomicU32::new(0),
            next: AtomicU32::new(0),
            his: std::array::from_fn(|_| AtomicU32::new(0)),
            slots: std::array::from_fn(|_| Slot {
                lo: AtomicU64::new(0),
                words: std::array::from_fn(|_| AtomicU64::new(0)),
            }),
        }
    }
}

impl<const W: usize, const S: usize> Node<W, S> {
    /// The version to look under, or `None` while the lock is held.
    #[inline]
    pub(crate) fn version(&self) -> Option<u32> {
        let version = self.version.load(Ordering::Acquire);
        (version & 1 == 0).then_some(version)
    }

    /// Whether all reads since `version` was taken are consistent.
    #[inline]
    pub(crate) fn unchanged_since(&self, version: u32) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    /// Takes the lock if nothing has changed since `version` was taken; the reads since then are then consistent and stay valid.
    #[inline]
    pub(crate) fn lock_if_unchanged(&self, version: u32) -> Option<Guard<'_>> {
        Guard::take(&self.version, version)
    }

    /// What was seen of a slot since `version` was taken, for a charge over several nodes.
    #[inline]
    pub(crate) fn sight(&self, version: u32) -> Sight<'_> {
        Sight { version: &self.version, seen: version }
    }

    /// The cells of a slot's state.
    #[inline]
    pub(crate) fn cells(&self, slot: usize) -> &[AtomicU64] {
        &self.slots[slot].words
    }

    /// Takes the lock, waiting for it.
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_> {
        let mut round = 0;
        loop {
            if let Some(version) = self.version()
                && let Some(guard) = self.lock_if_unchanged(version)
            {
                return guard;
            }
            pause(round);
            round = round.saturating_add(1);
        }
    }

    /// The slot of a key. All slots are compared, without a branch for each: which one it is cannot be foretold.
    #[inline(always)]
    pub(crate) fn find(&self, key: Fingerprint) -> Option<usize> {
        let mut found = S;
        for (slot, hi) in self.his.iter().enumerate() {
            if hi.load(Ordering::Relaxed) == key.hi {
                found = slot;
            }
        }
        let slot = self.slots.get(found)?;
        if slot.lo.load(Ordering::Relaxed) == key.lo { Some(found) } else { self.find_among_alike(key) }
    }

    /// The same where a slot has the `hi` of a key and not its `lo`: another slot may have both.
    #[cold]
    fn find_among_alike(&self, key: Fingerprint) -> Option<usize> {
        (0..S).find(|&slot| self.key(slot) == Some(key))
    }

    /// The state in a slot.
    #[inline]
    pub(crate) fn words(&self, slot: usize) -> [u64; W] {
        std::array::from_fn(|word| self.slots[slot].words[word].load(Ordering::Relaxed))
    }

    /// The next node of the chain. A reader that sees a link also sees that the node it leads to was made.
    #[inline]
    pub(crate) fn next(&self) -> Option<u32> {
        self.next.load(Ordering::Acquire).checked_sub(1)
    }

    // For the holder of the lock.

    /// Writes the state of a slot.
    #[inline]
    pub(crate) fn set_words(&self, slot: usize, words: [u64; W]) {
        for (cell, word) in self.slots[slot].words.iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
    }

    /// The key in a slot, if there is one.
    pub(crate) fn key(&self, slot: usize) -> Option<Fingerprint> {
        let hi = self.his[slot].load(Ordering::Relaxed);
        (hi != 0).then(|| Fingerprint { lo: self.slots[slot].lo.load(Ordering::Relaxed), hi })
    }

    /// A slot without a key.
    pub(crate) fn vacant(&self) -> Option<usize> {
        self.his.iter().position(|hi| hi.load(Ordering::Relaxed) == 0)
    }

    /// Puts a key into a slot.
    pub(crate) fn fill(&self, slot: usize, key: Fingerprint, words: [u64; W]) {
        self.set_words(slot, words);
        self.slots[slot].lo.store(key.lo, Ordering::Relaxed);
        self.his[slot].store(key.hi, Ordering::Relaxed);
    }

    /// Takes the key out of a slot.
    pub(crate) fn clear(&self, slot: usize) {
        self.his[slot].store(0, Ordering::Relaxed);
    }

    pub(crate) fn set_next(&self, next: Option<u32>) {
        self.next.store(next.map_or(0, |index| index + 1), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_two_cache_lines() {
        assert_eq!(size_of::<Node<1, 6>>(), 128);
        assert_eq!(size_of::<Node<3, 3>>(), 128);
    }
}
