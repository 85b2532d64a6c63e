//! Ten million keys against a cap of one million. Alone in its process, because it measures the memory of the process.

use std::fmt::Write;

use tollgate_store::{Cost, Limit, ManualClock, MemoryOptions, MemoryStore, Micros, StoredLimit, WhenFull};

const KEYS: usize = 10_000_000;
const CAP: usize = 1_000_000;
const EXHAUSTED: usize = 1_000;

/// What the store may take for each key of the cap. A bucket takes 28 bytes, and what a table has in hand an eighth more.
const MOST_BYTES_PER_KEY: usize = 100;

#[test]
fn a_flood_of_keys_stays_under_the_cap_and_forgives_nobody() {
    for when_full in [WhenFull::Share, WhenFull::Deny] {
        flood(when_full);
    }
}

fn flood(when_full: WhenFull) {
    let clock = ManualClock::at(Micros::from_secs(1_700_000_000));
    let options = MemoryOptions {
        clock: clock.clock(),
        max_keys: CAP,
        when_full,
        sweep_every: None,
        ..MemoryOptions::default()
    };
    let before = resident_bytes();
    let store = MemoryStore::new(options);
    let hourly = Limit::token_bucket("5/h", 5).expect("a limit");
    let limit = store.open(&StoredLimit::new("hourly", hourly));
    let all = Cost::new(5).expect("a cost");
    let mut key = String::new();
    let name = |key: &mut String, kind: &str, number: usize| {
        key.clear();
        write!(key, "{kind}:{number:017}").expect("written to memory");
    };

    for number in 0..EXHAUSTED {
        name(&mut key, "exhausted", number);
        assert!(limit.charge(&key, all).allowed);
    }
    let mut admitted = 0;
    for number in 0..KEYS {
        name(&mut key, "flood", number);
        admitted += usize::from(limit.charge(&key, Cost::ONE).allowed);
        if number % 1_000 == 0 {
            assert!(
                store.used() <= CAP && store.keys() <= CAP,
                "{} keys, {} used",
                store.keys(),
                store.used()
            );
        }
    }

    assert_eq!((store.keys(), store.used()), (CAP, CAP), "all the room is used");
    let shared = if when_full == WhenFull::Share { 5 } else { 0 };
    assert_eq!(
        admitted,
        CAP - EXHAUSTED + shared,
        "one of each that found room, and what those without share"
    );
    for number in 0..EXHAUSTED {
        name(&mut key, "exhausted", number);
        assert!(!limit.charge(&key, Cost::ONE).allowed, "{key} is forgiven");
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < CAP * MOST_BYTES_PER_KEY, "{grown} bytes for {CAP} keys");

    clock.advance(Micros::from_secs(3_600));
    assert_eq!(store.sweep(), CAP);
    assert_eq!((store.keys(), store.used()), (0, 0));
}

/// The memory that the process has in hand; nothing where the system does not tell.
fn resident_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let resident = pages.and_then(|pages| pages.split(' ').nth(1)?.parse::<usize>().ok());
    resident.map_or(0, |pages| pages * 4_096)
}
