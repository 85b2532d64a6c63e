//! Random bytes of the operating system: for keys of hashes, and for ids that must not be guessed. A simulation draws them from a
//! seed instead, thread by thread, so that a run can be repeated.

use std::cell::RefCell;
use std::hash::BuildHasher;

use siphasher::sip::SipHasher13;

/// How many bytes a thread draws at once: 32 ids. A system call for each id would cost more than a reservation does.
const DRAWN: usize = 512;

thread_local! {
    /// Bytes that are drawn and not used, and where they begin.
    static POOL: RefCell<([u8; DRAWN], usize)> = const { RefCell::new(([0; DRAWN], DRAWN)) };
}

/// So many random bytes.
///
/// # Panics
/// If the operating system has none to give, as the standard library does for its maps.
pub(crate) fn bytes<const N: usize>() -> [u8; N] {
    const { assert!(N <= DRAWN, "more than a thread draws at once") };
    POOL.with_borrow_mut(|(pool, start)| {
        if *start + N > DRAWN {
            fill(pool);
            *start = 0;
        }
        let end = *start + N;
        let mut drawn = [0; N];
        drawn.copy_from_slice(&pool[*start..end]);
        // Used bytes do not stay in memory.
        pool[*start..end].fill(0);
        *start = end;
        drawn
    })
}

fn fill(pool: &mut [u8; DRAWN]) {
    #[cfg(feature = "simulation")]
    if seeded::fill(pool) {
        return;
    }
    if let Err(error) = getrandom::fill(pool) {
        panic!("the operating system gives no random bytes: {error}");
    }
}

/// Hashes with a secret key, drawn when it is made: SipHash-1-3, as in the maps of the standard library.
///
/// ```
/// use std::hash::BuildHasher;
/// use tollgate_store::SecretHash;
/// let (one, other) = (SecretHash::random(), SecretHash::random());
/// assert_eq!(one.hash_one("user:42"), one.hash_one("user:42"));
/// assert_ne!(one.hash_one("user:42"), other.hash_one("user:42"));
/// ```
#[derive(Clone)]
pub struct SecretHash(SipHasher13);

impl SecretHash {
    /// With a random key.
    pub fn random() -> SecretHash {
        SecretHash(SipHasher13::new_with_key(&bytes()))
    }
}

impl BuildHasher for SecretHash {
    type Hasher = SipHasher13;

    fn build_hasher(&self) -> SipHasher13 {
        self.0
    }
}

/// Omits the key.
impl std::fmt::Debug for SecretHash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SecretHash").finish_non_exhaustive()
    }
}

#[cfg(feature = "simulation")]
pub(crate) mod seeded {
    //! Bytes from a seed, for simulations.

    use std::cell::Cell;

    use super::{DRAWN, POOL};

    thread_local! {
        static STATE: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// While it lives, the random bytes of this thread come from a seed: the same seed gives the same bytes. Only for simulations:
    /// ids and keys of hashes can be guessed then.
    ///
    /// ```
    /// use tollgate_store::{ChargeId, simulated::SeededThread};
    /// let drawn = |seed| {
    ///     let _seeded = SeededThread::new(seed);
    ///     ChargeId::random()
    /// };
    /// assert_eq!(drawn(7), drawn(7));
    /// assert_ne!(drawn(7), drawn(8));
    /// assert_ne!(ChargeId::random(), ChargeId::random());
    /// ```
    #[derive(Debug)]
    pub struct SeededThread {
        /// Not to be sent to another thread.
        _of_thread: std::marker::PhantomData<*const ()>,
    }

    impl SeededThread {
        /// Seeds this thread.
        pub fn new(seed: u64) -> SeededThread {
            set(Some(seed));
            SeededThread { _of_thread: std::marker::PhantomData }
        }
    }

    impl Drop for SeededThread {
        fn drop(&mut self) {
            set(None);
        }
    }

    fn set(state: Option<u64>) {
        STATE.set(state);
        // Discards what was drawn before.
        POOL.with_borrow_mut(|(pool, start)| (*pool, *start) = ([0; DRAWN], DRAWN));
    }

    /// Fills the pool from the seed of this thread; false if it has none.
    pub(super) fn fill(pool: &mut [u8; DRAWN]) -> bool {
        let Some(mut state) = STATE.get() else { return false };
        for word in pool.as_chunks_mut::<8>().0 {
            // splitmix64
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            *word = (mixed ^ (mixed >> 31)).to_le_bytes();
        }
        STATE.set(Some(state));
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_bytes_are_given_twice() {
        let drawn: HashSet<[u8; 16]> = (0..10_000).map(|_| bytes()).collect();
        assert_eq!(drawn.len(), 10_000);
        let in_other_thread = std::thread::spawn(bytes::<16>).join().expect("a thread");
        assert!(!drawn.contains(&in_other_thread) && in_other_thread != [0; 16]);
    }
}
