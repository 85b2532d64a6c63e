//! The thread that forgets in the background: that it does, and that it ends with its store.

use std::thread;
use std::time::{Duration, Instant};

use tollgate_store::{Cost, ManualClock, MemoryOptions, MemoryStore, WhenFull};

use crate::{HOUR, START, YEAR, limits};

/// Waits for a condition, and fails if it takes absurdly long.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what} takes too long");
        thread::yield_now();
    }
}

/// How many threads of this process sweep a store; nothing where the system does not tell.
fn sweepers() -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    tasks.filter_map(name).filter(|name| name.trim_end() == "tollgate-sweep").count()
}

#[test]
fn the_background_thread_forgets_and_ends_with_its_store() {
    let clock = ManualClock::at(START);
    let store = MemoryStore::new(MemoryOptions {
        clock: clock.clock(),
        max_keys: 100_000,
        when_full: WhenFull::Share,
        sweep_every: Some(Duration::from_millis(1)),
        ..MemoryOptions::default()
    });
    let limits: Vec<_> = limits(5, HOUR).iter().map(|limit| store.open(limit)).collect();
    for limit in &limits {
        for key in 0..1_000 {
            assert!(limit.charge(&format!("key:{key}"), Cost::ONE).allowed);
        }
    }
    let clone = store.clone();
    assert_eq!(store.keys(), 1_000 * limits.len(), "nothing is forgotten while it counts");
    clock.advance(YEAR);
    wait_until("forgetting", || store.keys() == 0 && store.used() == 0);

    let was_running = sweepers();
    drop((store, limits));
    assert_eq!(clone.keys(), 0, "a clone keeps it going");
    assert!(was_running == sweepers());
    drop(clone);
    wait_until("the thread's end", || sweepers() == 0);
}
