//! Counts of messages that were counted before, in bounded memory.
//!
//! A message is known by a keyed hash of its JSON and its length. Two generations of entries stand in for an order of use: when the
//! young one is full it becomes the old one, and what is found in the old one moves to the young one.

use std::collections::HashMap;
use std::hash::BuildHasher;

use foldhash::quality::RandomState;
use parking_lot::Mutex;

use super::Encoding;

/// How many counts each generation has. An entry is 32 bytes or so.
const GENERATION: usize = 16 * 1024;

/// Shorter messages are counted faster than they are found.
const SHORT: usize = 128;

type Known = HashMap<(u64, usize, Encoding), u64, RandomState>;

#[derive(Debug, Default)]
pub(super) struct Cache {
    hasher: RandomState,
    generations: Mutex<(Known, Known)>,
}

impl Cache {
    /// The count of this JSON, counted if it is not known.
    pub(super) fn count(&self, json: &str, encoding: Encoding, count: impl FnOnce() -> u64) -> u64 {
        if json.len() < SHORT {
            return count();
        }
        let name = (self.hasher.hash_one(json), json.len(), encoding);
        if let Some(known) = self.find(&name) {
            return known;
        }
        let counted = count();
        self.keep(name, counted);
        counted
    }

    fn find(&self, name: &(u64, usize, Encoding)) -> Option<u64> {
        let mut generations = self.generations.lock();
        if let Some(known) = generations.0.get(name) {
            return Some(*known);
        }
        let known = generations.1.remove(name)?;
        drop(generations);
        self.keep(*name, known);
        Some(known)
    }

    fn keep(&self, name: (u64, usize, Encoding), count: u64) {
        let mut generations = self.generations.lock();
        if generations.0.len() >= GENERATION {
            generations.1 = std::mem::take(&mut generations.0);
        }
        generations.0.insert(name, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_counted_once_and_memory_is_bounded() {
        let cache = Cache::default();
        let text = |number: usize| format!("{number:0>200}");
        for number in 0..3 * GENERATION {
            assert_eq!(cache.count(&text(number), Encoding::O200k, || 7), 7);
        }
        let known = |number| cache.count(&text(number), Encoding::O200k, || 8);
        assert_eq!(known(3 * GENERATION - 1), 7);
        assert_eq!(known(0), 8, "it was pushed out");
        assert_eq!(cache.count(&text(1), Encoding::Cl100k, || 9), 9, "another encoding, another count");
        let generations = cache.generations.lock();
        assert!(generations.0.len() <= GENERATION && generations.1.len() <= GENERATION);
    }
}
