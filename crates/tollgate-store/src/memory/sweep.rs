//! Background sweeping: a thread that works through the tables a tenth at a time and ends with its store.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::Inner;

/// How many turns a sweep of the whole store takes.
const TURNS: usize = 10;

/// The shortest rest between two turns: none at all would take a processor.
const LEAST_REST: Duration = Duration::from_millis(1);

/// Starts the thread. It holds the store weakly: when the last user drops the store, the next turn finds it gone and ends.
pub(super) fn spawn(store: &Arc<Inner>, every: Duration) {
    let store = Arc::downgrade(store);
    let run = move || {
        while let Some(inner) = Weak::upgrade(&store) {
            inner.sweep_part(TURNS);
            drop(inner);
            thread::park_timeout(every.max(LEAST_REST));
        }
    };
    // A system that cannot start a thread still limits: new keys that find no room sweep a little themselves.
    let _ = thread::Builder::new().name("tollgate-sweep".into()).spawn(run);
}

impl Inner {
    /// Sweeps one part in `parts` of every table, and the holds. Returns how many keys and holds were forgotten.
    pub(super) fn sweep_part(&self, parts: usize) -> usize {
        let now = self.clock.now();
        let tables: Vec<_> = {
            let mut tables = self.tables.lock();
            tables.tidy();
            tables.all().cloned().collect()
        };
        let keys: usize = tables
            .iter()
            .map(|limit_table| limit_table.sweep(limit_table.nodes().div_ceil(parts), now))
            .sum();
        keys + self.holds.sweep(now)
    }
}
