//! What only a memory store has to show: that its cap holds, and that nothing is forgiven or lost on the way to it, over it,
//! and while it forgets.

mod hostile;
mod shared;
mod sweep;
mod threads;

use tollgate_store::{
    Cost, Limit, ManualClock, MemoryLimit, MemoryOptions, MemoryStore, Micros, Outcome, StoredLimit, WhenFull,
};

const SECOND: Micros = Micros::from_secs(1);
const HOUR: Micros = Micros::from_secs(3_600);
const YEAR: Micros = Micros::from_secs(365 * 86_400);

/// Some instant of 2023.
const START: Micros = Micros::from_secs(1_700_000_000);

/// A store without a thread of its own.
fn store(clock: &ManualClock, max_keys: usize, when_full: WhenFull) -> MemoryStore {
    MemoryStore::new(MemoryOptions {
        clock: clock.clock(),
        max_keys,
        when_full,
        sweep_every: None,
        ..MemoryOptions::default()
    })
}

/// A limit of every kind that holds `capacity` and has all of it back within `span`.
fn limits(capacity: u64, span: Micros) -> Vec<StoredLimit> {
    let rate = tollgate_kernel::Rate::new(capacity, span).expect("a rate");
    // A rate that is no simpler than a prime number every so often: more units in a microsecond than fit a store's one word.
    let prime = 10_007;
    let period = (span.get() * prime / capacity).max(2);
    let odd =
        tollgate_kernel::Rate::new(prime, Micros::new(period - u64::from(period.is_multiple_of(prime))));
    let odd = odd.expect("a rate");
    [
        ("token", Limit::token_bucket(rate, capacity)),
        ("token-wide", Limit::token_bucket(odd, capacity)),
        ("leaky", Limit::leaky_bucket(rate, capacity)),
        ("fixed", Limit::fixed_window(capacity, span)),
        ("clock", Limit::clock_window(capacity, span)),
        ("counter", Limit::sliding_window_counter(capacity, span)),
        ("log", Limit::sliding_window(capacity, span)),
        ("leases", Limit::concurrency(capacity, span)),
    ]
    .into_iter()
    .map(|(name, limit)| StoredLimit::new(name, limit.expect("a limit")))
    .collect()
}

/// Whether a limit's state has no fixed size, so that every admission needs room of its own.
fn is_kept_by_entry(limit: &Limit) -> bool {
    matches!(limit, Limit::SlidingWindow(_) | Limit::Concurrency(_))
}

/// How often a key can be charged before it is denied, if that is within `most` times.
fn admitted_of(limit: &MemoryLimit, key: &str, most: u64) -> u64 {
    (0..most).filter(|_| limit.charge(key, Cost::ONE).allowed).count() as u64
}

/// Charges many keys one unit each, in one call for those that are known.
fn charge_many<K: AsRef<str>>(limit: &MemoryLimit, keys: &[K]) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::BLOCKED; keys.len()];
    let slowly =
        |index: usize, outcome: &mut Outcome| *outcome = limit.charge(keys[index].as_ref(), Cost::ONE);
    limit.charge_known_many(keys, Cost::ONE, &mut outcomes, |outcome| outcome, slowly);
    outcomes
}
