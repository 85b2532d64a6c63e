//! Hashes a limit and a key to 128 bits, for what this process remembers about keys of a remote store.
//!
//! Two keys with the same fingerprint would be confused, so it has 128 bits and uses two secret keys drawn for each engine:
//! no caller can choose two texts that collide. The text itself is not stored.

use std::hash::BuildHasher;

use tollgate_store::SecretHash;

/// The secret keys of one gate.
pub(crate) struct Seeds(SecretHash, SecretHash);

impl Seeds {
    pub(crate) fn random() -> Seeds {
        Seeds(SecretHash::random(), SecretHash::random())
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
