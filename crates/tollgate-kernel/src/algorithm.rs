//! The six strategies, one file each, and what they have in common.
//!
//! A strategy is a pure function: [`Algorithm::charge`] takes the state it is given, the time it is given and a cost, and
//! answers. Everything it remembers is in the state, everything it may do is in its parameters, and every division says which
//! way it rounds. Beside each `name.rs` stand `name.cases`, the table that people read and every store is held to, and the Lua
//! and SQL twins of the shared stores.
//!
//! Time is expected never to go back (stores see to that); a kernel that is handed an earlier time than its state has seen
//! uses the state's, so that it neither grants nor takes away. Buckets and leases do not know the time that they were last
//! asked at: buckets count the step back as not yet refilled, and leases last longer by it.

mod concurrency;
mod entries;
mod fixed_window;
mod leaky_bucket;
mod sliding_window;
mod sliding_window_counter;
mod token_bucket;
pub(crate) mod turn;

use std::fmt::Debug;

use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

pub use concurrency::{Concurrency, Lease, LeaseState};
pub use fixed_window::{Align, FixedWindow, WindowState};
pub use leaky_bucket::LeakyBucket;
pub use sliding_window::{LogEntry, LogState, SlidingWindow};
pub use sliding_window_counter::{CounterState, Counts, SlidingWindowCounter};
pub use token_bucket::{Bucket, BucketNumbers, BucketState, Changed, Fit, TokenBucket};

/// The tables of expected answers, one for each strategy: (file name, text). The conformance suite replays them through
/// every store.
pub const CASES: [(&str, &str); 6] = [
    ("token_bucket.cases", include_str!("algorithm/token_bucket.cases")),
    ("leaky_bucket.cases", include_str!("algorithm/leaky_bucket.cases")),
    ("fixed_window.cases", include_str!("algorithm/fixed_window.cases")),
    ("sliding_window.cases", include_str!("algorithm/sliding_window.cases")),
    ("sliding_window_counter.cases", include_str!("algorithm/sliding_window_counter.cases")),
    ("concurrency.cases", include_str!("algorithm/concurrency.cases")),
];

/// What a charge took, so that it can be given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// How much.
    pub cost: u64,
    /// The instant that it counts from: [`Algorithm::charged_at`].
    pub at: Micros,
}

/// The operations of every strategy. The default state is the fresh one: a key that was never charged.
pub trait Algorithm {
    /// The state of one key.
    type State: Clone + Default + PartialEq + Debug;

    /// The answer that [`charge`](Self::charge) would give now. Changes nothing.
    fn peek(&self, state: &Self::State, cost: Cost, now: Micros) -> Outcome;

    /// Takes `cost` if it fits, and returns the outcome. A denial takes nothing and [adopts](Self::adopt) the state.
    fn charge(&self, state: &mut Self::State, cost: Cost, now: Micros) -> Outcome;

    /// Converts a state that was written under other numbers to these: what is left refills or stays by them from now on. It
    /// changes no outcome. A charge does so for each of its limits, charged or not.
    fn adopt(&self, _state: &mut Self::State, _now: Micros) {}

    /// The instant that a charge just admitted at `now` counts from: `now`, unless the state has already seen a later time.
    /// A charge that may be given back keeps it as its `charged_at`.
    fn charged_at(&self, state: &Self::State, now: Micros) -> Micros;

    /// Returns `amount` of what a charge by these numbers took, into the state it was taken from: never into a later window,
    /// never above capacity, and nothing that time has brought back already. The state may be written under other numbers by
    /// now, and stays so.
    fn give_back(&self, state: &mut Self::State, taken: Taken, amount: u64, now: Micros);

    /// Returns `amount` of what counts now, whichever caller was charged it and when: the newest first, and never more than there is.
    fn refund(&self, state: &mut Self::State, amount: u64, now: Micros) {
        let taken = Taken { cost: amount, at: self.charged_at(state, now) };
        self.give_back(state, taken, amount, now);
    }

    /// Takes `amount` whether it fits or not; what does not fit is debt that later charges wait out. The numbers that the state
    /// is written under stay.
    fn debit(&self, state: &mut Self::State, amount: u64, now: Micros);

    /// The state for a key that joins a shared state and is charged there as one with the others. It keeps the others' charges
    /// long enough that no caller that was charged under another state before gets more by joining than the strategy allows. Only
    /// windows that start at their first charge need to do anything for that.
    fn joined(&self, state: &Self::State, _now: Micros) -> Self::State {
        state.clone()
    }

    /// Whether the state answers exactly as a fresh one would, now and at any later time: only such a state may be forgotten.
    fn is_fresh(&self, state: &Self::State, now: Micros) -> bool;
}

/// The state before a charge, for strategies with entries that expire: a log, or leases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntriesReading {
    /// The sum of the entries that count now.
    pub used: u64,
    /// The time until the charge would fit, should it not fit now.
    pub wait: Micros,
    /// The time until the last entry has run out.
    pub last: Micros,
}

impl EntriesReading {
    /// The whole answer to a charge under `limit`, whose entry would count for `span`.
    pub(crate) fn answer(self, limit: u64, span: Micros, cost: Cost) -> Outcome {
        let room = limit.saturating_sub(self.used);
        let allowed = cost.get() <= room;
        Outcome {
            allowed,
            capacity: limit,
            remaining: if allowed { room - cost.get() } else { room },
            retry_after: match allowed {
                true => Some(Micros::ZERO),
                false => (cost.get() <= limit).then_some(self.wait),
            },
            reset_after: if allowed { span.max(self.last) } else { self.last },
            delay: Micros::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limit;

    /// Charges of (at, cost), a refund at 2500 ms, and what is then left at that time.
    fn refunded(limit: Limit, charges: &[(u64, u64)], amount: u64, remaining: u64) {
        let mut state = limit.fresh();
        for &(at, cost) in charges {
            let cost = Cost::new(cost).unwrap();
            assert!(limit.charge(&mut state, cost, Micros::from_millis(at)).allowed, "{limit}");
        }
        let now = Micros::from_millis(2_500);
        limit.refund(&mut state, amount, now);
        let left = limit.peek(&state, Cost::MAX, now).remaining;
        assert_eq!(left, remaining, "{limit}: {charges:?} less {amount}");
    }

    #[test]
    fn a_refund_gives_back_the_newest_and_never_more_than_there_is() {
        let second = Micros::from_secs(1);
        let bucket = Limit::token_bucket("1/h", 10).unwrap();
        let leaky = Limit::leaky_bucket("1/h", 10).unwrap();
        let window = Limit::fixed_window(10, second).unwrap();
        let clock = Limit::clock_window(10, second).unwrap();
        let log = Limit::sliding_window(10, second).unwrap();
        let counter = Limit::sliding_window_counter(10, second).unwrap();
        let leases = Limit::concurrency(10, second).unwrap();
        for limit in [bucket, leaky, window, clock, log, counter] {
            refunded(limit, &[], 5, 10);
            refunded(limit, &[(2_100, 4)], 0, 6);
            refunded(limit, &[(2_100, 4)], 3, 9);
            refunded(limit, &[(2_100, 4)], 4, 10);
            refunded(limit, &[(2_100, 4)], u64::MAX, 10);
            refunded(limit, &[(2_100, 4), (2_500, 4)], 5, 7);
        }
        // What has run out counts no more, and cannot be given back either.
        for limit in [window, clock, log] {
            refunded(limit, &[(1_200, 4)], 3, 10);
        }
        refunded(log, &[(1_200, 9), (2_400, 4)], 2, 8);
        // Half of the last window counts still: 4 of its 8, then 3 of the 6 that are left of it.
        refunded(counter, &[(1_000, 8)], 0, 6);
        refunded(counter, &[(1_000, 8), (2_000, 1)], 3, 7);
        // A lease is its holder's.
        refunded(leases, &[(2_100, 4)], 4, 6);
    }

    #[test]
    #[should_panic(expected = "a state of another strategy reached")]
    fn a_state_belongs_to_its_strategy() {
        let window = Limit::fixed_window(5, Micros::from_secs(60)).unwrap();
        let log = Limit::sliding_window(5, Micros::from_secs(60)).unwrap();
        window.peek(&log.fresh(), Cost::ONE, Micros::ZERO);
    }
}
