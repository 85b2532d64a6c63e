//! From a limit and a key to 128 bits, for what this process remembers about keys that are counted in a remote store.
//!
//! Two keys that shared a fingerprint would be taken for each other, so it is 128 bits wide, under two secret keys drawn for
//! each registry: nobody can choose two texts that collide. The text itself is not kept.

use std::hash::{BuildHasher, RandomState};

/// The secret keys of one registry.
pub(crate) struct Seeds(RandomState, RandomState);

impl Seeds {
    pub(crate) fn random() -> Seeds {
        Seeds(RandomState::new(), RandomState::new())
    }

    /// Of a key, by its canonical text, under the limit of this number.
    pub(crate) fn fingerprint(&self, limit: usize, key: &str) -> u128 {
        let [high, low] = [&self.0, &self.1].map(|seed| seed.hash_one((limit, key)));
        u128::from(high) << 64 | u128::from(low)
    }
}

/// Which of so many shards a fingerprint belongs to.
pub(crate) fn shard_of(fingerprint: u128, shards: usize) -> usize {
    usize::try_from(fingerprint % shards as u128).unwrap_or_default()
}
