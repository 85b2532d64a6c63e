//! Counts contention between charges: only where a charge had to wait or to read again, so that the others do not pay for it.

use std::sync::atomic::{AtomicU64, Ordering};

/// A count over all tables of a store.
#[derive(Default)]
pub(crate) struct Contention(AtomicU64);

impl Contention {
    /// Counters were locked, or changed while they were looked at.
    #[cold]
    pub(crate) fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Cost, Limit, Micros};

    use crate::memory::{MemoryCharge, MemoryLimit, MemoryOptions, MemoryStore};
    use crate::{ManualClock, StoredLimit};

    fn store() -> MemoryStore {
        let clock = ManualClock::at(Micros::from_secs(1_700_000_000)).clock();
        MemoryStore::new(MemoryOptions { clock, sweep_every: None, ..MemoryOptions::default() })
    }

    fn limits(store: &MemoryStore) -> [MemoryLimit; 2] {
        let window = Micros::from_secs(60);
        [("counter", Limit::fixed_window(9, window)), ("log", Limit::sliding_window(9, window))]
            .map(|(name, limit)| store.open(&StoredLimit::new(name, limit.unwrap())))
    }

    fn both(limits: &[MemoryLimit; 2]) -> [MemoryCharge<'_>; 2] {
        limits.each_ref().map(|limit| MemoryCharge { limit, key: "k", cost: Cost::ONE, shadow: false })
    }

    #[test]
    fn who_is_alone_meets_nobody() {
        let store = store();
        let limits = limits(&store);
        for _ in 0..20 {
            let _ = limits.each_ref().map(|limit| limit.charge("k", Cost::ONE));
            store.charge_all(&both(&limits), None).unwrap();
        }
        assert_eq!(store.contention(), 0);
    }

    #[test]
    fn who_finds_the_lock_held_is_counted_on_every_road() {
        type Road = fn(&MemoryStore, &[MemoryLimit; 2]) -> bool;
        let roads: [(&str, Road); 4] = [
            ("short", |_, [counter, _]| counter.charge("k", Cost::ONE).allowed),
            ("long", |_, [_, log]| log.charge("k", Cost::ONE).allowed),
            ("several", |store, limits| store.charge_all(&both(limits), None).unwrap().allowed),
            ("several, short", |store, limits| store.charge_all(&both(limits)[..1], None).unwrap().allowed),
        ];
        for (road, walk) in roads {
            let store = store();
            let limits = limits(&store);
            store.charge_all(&both(&limits), None).unwrap();
            std::thread::scope(|scope| {
                let held: Vec<_> = limits.iter().map(|limit| limit.limit_table.lock(0)).collect();
                let waiter = scope.spawn(|| walk(&store, &limits));
                while store.contention() == 0 {
                    std::thread::yield_now();
                }
                drop(held);
                assert!(waiter.join().unwrap(), "{road}");
            });
        }
    }
}
