//! The interface of the twins of the kernel, in Lua and SQL.
//!
//! A remote store keeps the state there and decides there, so each strategy has a twin in the store's language, beside its Rust:
//! `algorithm/name.lua`, `algorithm/name.sql`. A twin gets the limit as a row of whole numbers ([`Parameters`]) and returns what
//! it found before the charge ([`Reading`]). The whole outcome is computed from that here, by the same code as for the memory
//! store. So a twin has little to get right: whether the charge fits, and the next state.

use crate::algorithm::{Algorithm, Align, BucketNumbers, TokenBucket};
use crate::algorithm::{CounterState, EntriesReading, WindowState};
use crate::limit::Limit;
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// The twins in Lua, by file name, in the order in which they use each other. Inert texts here: the Redis store joins them to its
/// scripts, and only those touch data.
pub const LUA: [(&str, &str); 12] = [
    ("whole.lua", include_str!("algorithm/whole.lua")),
    ("token_bucket.lua", include_str!("algorithm/token_bucket.lua")),
    ("token_bucket_change.lua", include_str!("algorithm/token_bucket_change.lua")),
    ("leaky_bucket.lua", include_str!("algorithm/leaky_bucket.lua")),
    ("fixed_window.lua", include_str!("algorithm/fixed_window.lua")),
    ("entries.lua", include_str!("algorithm/entries.lua")),
    ("entries_settle.lua", include_str!("algorithm/entries_settle.lua")),
    ("sliding_window.lua", include_str!("algorithm/sliding_window.lua")),
    ("sliding_window_counter.lua", include_str!("algorithm/sliding_window_counter.lua")),
    ("sliding_window_counter_change.lua", include_str!("algorithm/sliding_window_counter_change.lua")),
    ("sliding_window_counter_settle.lua", include_str!("algorithm/sliding_window_counter_settle.lua")),
    ("concurrency.lua", include_str!("algorithm/concurrency.lua")),
];

/// The twins in SQL, by file name, in the order in which they use each other. Inert texts here, with `{prefix}` where the names of
/// functions begin: the PostgreSQL store creates them beside its own, and only those touch tables.
pub const SQL: [(&str, &str); 6] = [
    ("token_bucket.sql", include_str!("algorithm/token_bucket.sql")),
    ("leaky_bucket.sql", include_str!("algorithm/leaky_bucket.sql")),
    ("fixed_window.sql", include_str!("algorithm/fixed_window.sql")),
    ("sliding_window.sql", include_str!("algorithm/sliding_window.sql")),
    ("sliding_window_counter.sql", include_str!("algorithm/sliding_window_counter.sql")),
    ("concurrency.sql", include_str!("algorithm/concurrency.sql")),
];

/// A limit as the twins get it: whole numbers below 2^53, in the order of the strategy's files.
///
/// | strategy | numbers |
/// |---|---|
/// | `token_bucket`, `leaky_bucket` | c, p, burst, debt_us, keeps_instant (0 or 1) |
/// | `fixed_window` | limit, window_us, align (0 at the first charge, 1 by the clock) |
/// | `sliding_window`, `sliding_window_counter` | limit, window_us |
/// | `concurrency` | limit, lease_us |
///
/// For a bucket of c tokens every p µs, `debt_us` is the longest refill that a debt may take; twins bound it to 2^62 units of 1/c µs
/// of whichever numbers the state is written under.
pub type Parameters = Vec<u64>;

/// What a twin found of a key before a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// The time until the bucket is full (or empty, if it leaks) by the numbers of the charge: whole µs, and a rest in units of
    /// 1/c µs.
    Bucket {
        /// Whole µs.
        us: Micros,
        /// The rest.
        rest: u64,
    },
    /// The open window; an end that has passed means that none is open.
    Window(WindowState),
    /// A look at the log.
    Log(EntriesReading),
    /// The counters, by the last length and by another.
    Counter(CounterState),
    /// A look at the leases.
    Leases(EntriesReading),
}

impl Limit {
    /// The limit as the twins get it.
    pub fn parameters(&self) -> Parameters {
        let bucket = |bucket: &TokenBucket| {
            let BucketNumbers { tokens, period_us, burst } = bucket.numbers();
            vec![tokens, period_us, burst, bucket.max_debt().get(), u64::from(bucket.keeps_instant())]
        };
        match self {
            Limit::TokenBucket(tokens) => bucket(tokens),
            Limit::LeakyBucket(leaky) => bucket(leaky.room()),
            Limit::FixedWindow(window) => {
                vec![window.limit(), window.window().get(), u64::from(window.align() == Align::Clock)]
            }
            Limit::SlidingWindow(window) => vec![window.limit(), window.window().get()],
            Limit::SlidingWindowCounter(window) => vec![window.limit(), window.window().get()],
            Limit::Concurrency(leases) => vec![leases.limit(), leases.lease().get()],
        }
    }

    /// What a charge takes, as the twins get it: whole µs and a rest for a bucket, else units and nothing. `None` if the
    /// charge can never fit.
    pub fn price(&self, cost: Cost) -> Option<(u64, u64)> {
        let of_bucket = |bucket: &TokenBucket| bucket.price(cost).map(|units| bucket.split(units));
        match self {
            Limit::TokenBucket(bucket) => of_bucket(bucket),
            Limit::LeakyBucket(bucket) => of_bucket(bucket.room()),
            _ => (cost.get() <= self.capacity()).then_some((cost.get(), 0)),
        }
    }

    /// The answer to a charge at `now`, from what a twin found before it.
    ///
    /// # Panics
    /// If the reading is of another strategy: a broken invariant of the store, and never an input.
    pub fn answer(&self, reading: &Reading, cost: Cost, now: Micros) -> Outcome {
        match (self, *reading) {
            (Limit::TokenBucket(bucket), Reading::Bucket { us, rest }) => {
                bucket.outcome_at((us, rest), cost).0
            }
            (Limit::LeakyBucket(bucket), Reading::Bucket { us, rest }) => bucket.outcome_at((us, rest), cost),
            (Limit::FixedWindow(window), Reading::Window(state)) => window.peek(&state, cost, now),
            (Limit::SlidingWindow(window), Reading::Log(look)) => {
                look.answer(window.limit(), window.window(), cost)
            }
            (Limit::SlidingWindowCounter(window), Reading::Counter(state)) => window.peek(&state, cost, now),
            (Limit::Concurrency(leases), Reading::Leases(look)) => {
                look.answer(leases.limit(), leases.lease(), cost)
            }
            (limit, reading) => panic!("a reading of another strategy reached {limit:?}: {reading:?}"),
        }
    }

    /// How a key stands, from what a twin found when it was asked for one unit: what is left of it as it is, and whether one more
    /// unit would fit.
    ///
    /// # Panics
    /// As [`answer`](Self::answer).
    pub fn status(&self, reading: &Reading, now: Micros) -> Outcome {
        // A cost that never fits is refused and changes nothing, so its answer shows the key as it stands.
        let standing = self.answer(reading, Cost::MAX, now);
        let one = self.answer(reading, Cost::ONE, now);
        Outcome { allowed: one.allowed, retry_after: one.retry_after, ..standing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twins_get_whole_numbers_below_2_to_the_53() {
        let second = Micros::from_secs(1);
        for (limit, parameters) in [
            (Limit::token_bucket("10/s", 20), vec![1, 100_000, 20, 86_400_000_000, 0]),
            (
                Limit::leaky_bucket("7/s", 3).map(Limit::keeping_instant),
                vec![7, 1_000_000, 3, 86_400_000_000, 1],
            ),
            (Limit::fixed_window(5, second), vec![5, 1_000_000, 0]),
            (Limit::clock_window(5, second), vec![5, 1_000_000, 1]),
            (Limit::sliding_window(5, second), vec![5, 1_000_000]),
            (Limit::sliding_window_counter(5, second), vec![5, 1_000_000]),
            (Limit::concurrency(5, second), vec![5, 1_000_000]),
        ] {
            assert_eq!(limit.unwrap().parameters(), parameters);
        }
        let fast = Limit::token_bucket("4294967291/s", 1 << 40).unwrap().parameters();
        assert!(fast.iter().all(|number| *number < 1 << 53), "{fast:?}");
    }

    #[test]
    fn a_price_has_the_units_of_the_state() {
        let cost = |units| Cost::new(units).unwrap();
        let odd = Limit::token_bucket("7/s", 14).unwrap();
        assert_eq!(odd.price(cost(1)), Some((142_857, 1)));
        assert_eq!(odd.price(cost(14)), Some((2_000_000, 0)));
        assert_eq!(odd.price(cost(15)), None);
        let window = Limit::sliding_window(5, Micros::from_secs(1)).unwrap();
        assert_eq!((window.price(cost(5)), window.price(Cost::MAX)), (Some((5, 0)), None));
    }

    #[test]
    #[should_panic(expected = "a reading of another strategy")]
    fn a_reading_belongs_to_its_strategy() {
        let window = Limit::fixed_window(5, Micros::from_secs(60)).unwrap();
        window.answer(&Reading::Log(EntriesReading::default()), Cost::ONE, Micros::ZERO);
    }
}
