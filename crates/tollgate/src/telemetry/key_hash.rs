//! A hash of the key for logs and traces: an HMAC-SHA-256 under a salt.
//!
//! With the same salt in every process the same key has the same hash, so lines can be correlated. A reader without
//! the salt cannot test guessed keys against the hashes, which a plain hash would allow.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Hashes keys under one salt.
#[derive(Clone)]
pub(crate) struct KeyHasher(Hmac<Sha256>);

/// The environment's name for the salt.
const SALT: &str = "RL_LOG_SALT";

impl KeyHasher {
    /// Under the salt of the environment; if it has none, under one drawn for the life of this process.
    pub(crate) fn from_env() -> KeyHasher {
        match std::env::var_os(SALT) {
            Some(salt) if !salt.is_empty() => KeyHasher::salted(salt.as_encoded_bytes()),
            _ => KeyHasher::salted(&random_salt()),
        }
    }

    pub(crate) fn salted(salt: &[u8]) -> KeyHasher {
        match Hmac::new_from_slice(salt) {
            Ok(hmac) => KeyHasher(hmac),
            Err(error) => unreachable!("an HMAC takes keys of any length: {error}"),
        }
    }

    /// The first 16 bytes, as 32 hexadecimal digits, of the hash of a key's canonical text.
    pub(crate) fn hash(&self, key: &str) -> String {
        let mut hmac = self.0.clone();
        hmac.update(key.as_bytes());
        let digits =
            |byte: &u8| [byte >> 4, byte & 15].map(|half| char::from(b"0123456789abcdef"[usize::from(half)]));
        hmac.finalize().into_bytes()[..16].iter().flat_map(digits).collect()
    }
}

/// Random bytes of the operating system.
fn random_salt() -> [u8; 32] {
    let mut salt = [0; 32];
    if let Err(error) = getrandom::fill(&mut salt) {
        panic!("the operating system gives no random bytes: {error}");
    }
    salt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_the_start_of_the_hmac_that_others_compute() {
        // RFC 4231, test cases 1 and 2.
        for (salt, text, hash) in [
            (&[0x0b; 20][..], "Hi There", "b0344c61d8db38535ca8afceaf0bf12b"),
            (b"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c7"),
        ] {
            assert_eq!(KeyHasher::salted(salt).hash(text), hash);
        }
    }

    #[test]
    fn without_a_salt_nobody_gets_the_same_hash_again() {
        let [one, other] = [(); 2].map(|()| KeyHasher::salted(&random_salt()).hash("user:42"));
        assert_ne!(one, other);
        assert_ne!(one, KeyHasher::salted(b"").hash("user:42"));
    }
}
