//! The memory store against the suite. What only a memory store has to show, its cap, is in `memory_cap/` and `memory_flood.rs`.

use std::sync::Arc;

use tollgate_store::conformance::{self, Effort, Subject};
use tollgate_store::{ManualClock, MemoryOptions, MemoryStore};

fn store(clock: &ManualClock) -> MemoryStore {
    MemoryStore::new(MemoryOptions { clock: clock.clock(), sweep_every: None, ..MemoryOptions::default() })
}

fn subject(clock: &ManualClock) -> Subject {
    let store = store(clock);
    let counted = store.clone();
    let remembered = Box::new(move || -> conformance::Counting {
        let store = counted.clone();
        Box::pin(async move {
            store.sweep();
            store.keys()
        })
    });
    Subject { store: Arc::new(store), remembered }
}

/// By itself, so that it is quick to run.
#[tokio::test(flavor = "multi_thread")]
async fn records_are_kept_in_memory() {
    conformance::shared_records(async |clock| subject(&clock)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_store_means_what_a_store_must() {
    conformance::run(Effort::default(), async |clock| subject(&clock)).await;
}
