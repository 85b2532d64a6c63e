//! From a key's text to the 128 bits that the tables know it by.
//!
//! Two independent 64-bit hashes, each under its own random seed, drawn when the store starts and never shown. Two of a hundred
//! million keys then share a counter with a probability of 10^-23, and an outsider, who sees neither seeds nor hashes, cannot
//! look for such a pair. The hash is fast rather than cryptographic; where that is not enough, limit by something that the
//! caller does not choose.

use std::hash::{BuildHasher, Hasher, RandomState};

use foldhash::SharedSeed;
use foldhash::quality::FoldHasher;

use super::node::Fingerprint;

pub(crate) struct Seeds {
    lo: (u64, SharedSeed),
    hi: (u64, SharedSeed),
}

impl Seeds {
    /// Seeds from the operating system's randomness, by way of the standard library's hasher.
    pub(crate) fn random() -> Self {
        let random = || RandomState::new().hash_one(0u64);
        Seeds {
            lo: (random(), SharedSeed::from_u64(random())),
            hi: (random(), SharedSeed::from_u64(random())),
        }
    }

    #[inline]
    pub(crate) fn fingerprint(&self, key: &str) -> Fingerprint {
        let hash = |(seed, shared): &(u64, SharedSeed)| {
            let mut hasher = FoldHasher::with_seed(*seed, shared);
            hasher.write(key.as_bytes());
            hasher.finish()
        };
        // Zero marks a vacant slot; giving it the value one costs one part in 2^64.
        Fingerprint { lo: hash(&self.lo).max(1), hi: hash(&self.hi) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_differ_have_fingerprints_that_differ() {
        let seeds = Seeds::random();
        let mut seen = std::collections::HashSet::new();
        for index in 0..100_000 {
            let key = seeds.fingerprint(&format!("user:{index}"));
            assert!(seen.insert((key.lo, key.hi)));
        }
        for text in ["", "\0", "\0\0", "a", "a\0", &"a".repeat(1024), &"a".repeat(1025)] {
            let key = seeds.fingerprint(text);
            assert!(seen.insert((key.lo, key.hi)), "{text:?}");
            assert_eq!(key, seeds.fingerprint(text));
        }
        assert_ne!(seeds.fingerprint("a"), Seeds::random().fingerprint("a"), "seeds are drawn anew");
    }
}
