//! A node: a handful of keys in two cache lines, written under its lock and read without it.
//!
//! The rule for writers: hold the lock of the chain's first node; bracket every change that a reader could mistake (a key
//! moving in or out, a state of several words) with `begin_change` and `end_change`. A state of one word is written whole, so
//! it needs no bracket. The rule for readers: take the first node's version, look, and believe what was seen only if
//! `unchanged_since` agrees. A reader that was disturbed takes the lock; it never waits and never writes.
//!
//! Only refusals are ever decided from such a read: an admission is written, and so takes the lock. The version has 16 bits;
//! a reader that sleeps through an exact multiple of 32,768 changes of one node could at worst refuse once too often.
//!
//! `model/` checks this very file under every interleaving: it mounts it beside its own `sync`.

use super::sync::{AtomicU16, AtomicU32, AtomicU64, Guard, Lock, Ordering, fence};

/// A key, as the store knows it: 128 bits of a keyed hash. The low half is never zero; zero marks a vacant slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint {
    pub(crate) lo: u64,
    pub(crate) hi: u64,
}

struct Slot<const W: usize> {
    lo: AtomicU64,
    hi: AtomicU64,
    words: [AtomicU64; W],
}

/// `S` slots, each for one key and its state of `W` words.
#[repr(align(128))]
pub(crate) struct Node<const W: usize, const S: usize> {
    version: AtomicU16,
    lock: Lock,
    /// The next node of the chain, plus one; zero at its end.
    next: AtomicU32,
    slots: [Slot<W>; S],
}

impl<const W: usize, const S: usize> Default for Node<W, S> {
    fn default() -> Self {
        Node {
            version: AtomicU16::new(0),
            lock: Lock::default(),
            next: AtomicU32::new(0),
            slots: std::array::from_fn(|_| Slot {
                lo: AtomicU64::new(0),
                hi: AtomicU64::new(0),
                words: std::array::from_fn(|_| AtomicU64::new(0)),
            }),
        }
    }
}

impl<const W: usize, const S: usize> Node<W, S> {
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.lock.lock()
    }

    // For readers.

    /// The version to look under, or `None` while a change is going on.
    #[inline]
    pub(crate) fn version(&self) -> Option<u16> {
        let version = self.version.load(Ordering::Acquire);
        (version & 1 == 0).then_some(version)
    }

    /// Whether all that was read since `version` was taken may be believed.
    #[inline]
    pub(crate) fn unchanged_since(&self, version: u16) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    /// The slot of a key.
    #[inline]
    pub(crate) fn find(&self, key: Fingerprint) -> Option<usize> {
        self.slots.iter().position(|slot| {
            slot.lo.load(Ordering::Relaxed) == key.lo && slot.hi.load(Ordering::Relaxed) == key.hi
        })
    }

    /// The state in a slot.
    #[inline]
    pub(crate) fn words(&self, slot: usize) -> [u64; W] {
        std::array::from_fn(|word| self.slots[slot].words[word].load(Ordering::Relaxed))
    }

    /// The next node of the chain.
    #[inline]
    pub(crate) fn next(&self) -> Option<u32> {
        self.next.load(Ordering::Relaxed).checked_sub(1)
    }

    // For the holder of the lock.

    /// Announces a change that readers must not see half done.
    #[inline]
    pub(crate) fn begin_change(&self) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// Ends what `begin_change` announced.
    #[inline]
    pub(crate) fn end_change(&self) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1), Ordering::Release);
    }

    /// Writes the state of a slot.
    #[inline]
    pub(crate) fn set_words(&self, slot: usize, words: [u64; W]) {
        for (cell, word) in self.slots[slot].words.iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
    }

    /// The key in a slot, if there is one.
    pub(crate) fn key(&self, slot: usize) -> Option<Fingerprint> {
        let lo = self.slots[slot].lo.load(Ordering::Relaxed);
        (lo != 0).then(|| Fingerprint { lo, hi: self.slots[slot].hi.load(Ordering::Relaxed) })
    }

    /// A slot without a key.
    pub(crate) fn vacant(&self) -> Option<usize> {
        self.slots.iter().position(|slot| slot.lo.load(Ordering::Relaxed) == 0)
    }

    /// Puts a key into a slot.
    pub(crate) fn fill(&self, slot: usize, key: Fingerprint, words: [u64; W]) {
        self.set_words(slot, words);
        self.slots[slot].hi.store(key.hi, Ordering::Relaxed);
        self.slots[slot].lo.store(key.lo, Ordering::Relaxed);
    }

    /// Takes the key out of a slot.
    pub(crate) fn clear(&self, slot: usize) {
        self.slots[slot].lo.store(0, Ordering::Relaxed);
    }

    pub(crate) fn set_next(&self, next: Option<u32>) {
        self.next.store(next.map_or(0, |index| index + 1), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_two_cache_lines() {
        assert_eq!(size_of::<Node<1, 5>>(), 128);
        assert_eq!(size_of::<Node<3, 3>>(), 128);
    }
}
