//! Random bytes of the operating system: for keys of hashes, and for ids that nobody may guess.

use std::cell::RefCell;

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
            if let Err(error) = getrandom::fill(pool) {
                panic!("the operating system gives no random bytes: {error}");
            }
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_bytes_are_given_twice() {
        let drawn: HashSet<[u8; 16]> = (0..10_000).map(|_| bytes()).collect();
        assert_eq!(drawn.len(), 10_000);
        let elsewhere = std::thread::spawn(bytes::<16>).join().expect("a thread");
        assert!(!drawn.contains(&elsewhere) && elsewhere != [0; 16]);
    }
}
