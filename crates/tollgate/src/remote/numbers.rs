//! Numbers that identify limits in what this process remembers about keys of a remote store.
//!
//! A limit that a reload does not change keeps its number, and with it the cached denials of its keys. A limit that changed gets
//! a new number, because what was known about its keys may no longer hold.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tollgate_store::StoredLimit;

/// By name: the limits of one gate, overrides included, and their numbers.
type Known = HashMap<String, Vec<(StoredLimit, usize)>>;

/// The state that outlives a reload.
#[derive(Default)]
pub(crate) struct Numbers {
    last: AtomicUsize,
    known: Mutex<Arc<Known>>,
}

/// The numbers of a gate that is being built.
pub(crate) struct Numbering<'a> {
    numbers: &'a Numbers,
    before: Arc<Known>,
    now: Known,
}

impl Numbers {
    pub(crate) fn begin(&self) -> Numbering<'_> {
        Numbering { numbers: self, before: self.known.lock().clone(), now: Known::new() }
    }
}

impl Numbering<'_> {
    /// The number of a limit.
    pub(crate) fn of(&mut self, stored: &StoredLimit) -> usize {
        let find = |known: &Known| {
            let limits = known.get(&stored.name)?;
            limits.iter().find(|(other, _)| other == stored).map(|(_, number)| *number)
        };
        if let Some(number) = find(&self.now) {
            return number;
        }
        let next = || self.numbers.last.fetch_add(1, Ordering::Relaxed) + 1;
        let number = find(&self.before).unwrap_or_else(next);
        self.now.entry(stored.name.clone()).or_default().push((stored.clone(), number));
        number
    }

    /// The gate is built.
    pub(crate) fn done(self) {
        *self.numbers.known.lock() = Arc::new(self.now);
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Limit, Micros};

    use super::*;

    #[test]
    fn what_is_unchanged_keeps_its_number_and_no_number_is_given_twice() {
        let numbers = Numbers::default();
        let build = |limits: &[(&str, u64)]| -> Vec<usize> {
            let mut numbering = numbers.begin();
            let of = |&(name, most): &(&str, u64)| {
                let limit = Limit::fixed_window(most, Micros::from_secs(60)).unwrap();
                numbering.of(&StoredLimit::new(name, limit))
            };
            let given = limits.iter().map(of).collect();
            numbering.done();
            given
        };
        assert_eq!(build(&[("a", 5), ("b", 5), ("a", 9), ("a", 5)]), [1, 2, 3, 1]);
        assert_eq!(build(&[("a", 6), ("b", 5)]), [4, 2]);
        assert_eq!(build(&[("a", 5), ("b", 5)]), [5, 2], "what was known of it is from before");
        let refused = StoredLimit::new("c", Limit::fixed_window(1, Micros::from_secs(60)).unwrap());
        assert_eq!(numbers.begin().of(&refused), 6);
        assert_eq!(build(&[("a", 5), ("c", 1)]), [5, 7], "a gate that was refused is not continued");
    }
}
