//! The state of a key under a limit, and the operations of [`Algorithm`] on it, whichever the strategy.

use super::Limit;
use crate::algorithm::{Algorithm, BucketState, CounterState, LeaseState, LogState, Taken, WindowState};
use crate::outcome::{Cost, Outcome};
use crate::time::Micros;

/// The state of a key under a limit of any strategy.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// Of a token bucket or a leaky bucket.
    Bucket(BucketState),
    /// Of a fixed window.
    Window(WindowState),
    /// Of a sliding window.
    Log(LogState),
    /// Of a sliding window counter.
    Counter(CounterState),
    /// Of a concurrency limit.
    Leases(LeaseState),
}

/// Calls one method of the right strategy on the right state; a state of another strategy is a broken invariant.
macro_rules! dispatch {
    ($limit:expr, $state:expr, |$algorithm:ident, $inner:ident| $call:expr) => {
        match ($limit, $state) {
            (Limit::TokenBucket($algorithm), State::Bucket($inner)) => $call,
            (Limit::LeakyBucket($algorithm), State::Bucket($inner)) => $call,
            (Limit::FixedWindow($algorithm), State::Window($inner)) => $call,
            (Limit::SlidingWindow($algorithm), State::Log($inner)) => $call,
            (Limit::SlidingWindowCounter($algorithm), State::Counter($inner)) => $call,
            (Limit::Concurrency($algorithm), State::Leases($inner)) => $call,
            (limit, state) => panic!("a state of another strategy reached {limit:?}: {state:?}"),
        }
    };
}

/// The strategies behind one name. Stores that keep one kind of state a table call the strategies themselves.
///
/// # Panics
/// Every method panics when it is handed the state of another strategy than the limit's: states come from
/// [`fresh`](Limit::fresh), so that is a broken invariant of the caller and never an input.
impl Limit {
    /// The state of a key that was never charged.
    pub fn fresh(&self) -> State {
        match self {
            Limit::TokenBucket(_) | Limit::LeakyBucket(_) => State::Bucket(BucketState::default()),
            Limit::FixedWindow(_) => State::Window(WindowState::default()),
            Limit::SlidingWindow(_) => State::Log(LogState::default()),
            Limit::SlidingWindowCounter(_) => State::Counter(CounterState::default()),
            Limit::Concurrency(_) => State::Leases(LeaseState::default()),
        }
    }

    /// See [`Algorithm::peek`].
    pub fn peek(&self, state: &State, cost: Cost, now: Micros) -> Outcome {
        dispatch!(self, state, |algorithm, state| algorithm.peek(state, cost, now))
    }

    /// See [`Algorithm::charge`].
    pub fn charge(&self, state: &mut State, cost: Cost, now: Micros) -> Outcome {
        dispatch!(self, state, |algorithm, state| algorithm.charge(state, cost, now))
    }

    /// See [`Algorithm::adopt`].
    pub fn adopt(&self, state: &mut State, now: Micros) {
        dispatch!(self, state, |algorithm, state| algorithm.adopt(state, now));
    }

    /// See [`Algorithm::charged_at`].
    pub fn charged_at(&self, state: &State, now: Micros) -> Micros {
        dispatch!(self, state, |algorithm, state| algorithm.charged_at(state, now))
    }

    /// See [`Algorithm::give_back`].
    pub fn give_back(&self, state: &mut State, taken: Taken, amount: u64, now: Micros) {
        dispatch!(self, state, |algorithm, state| algorithm.give_back(state, taken, amount, now));
    }

    /// See [`Algorithm::refund`].
    pub fn refund(&self, state: &mut State, amount: u64, now: Micros) {
        dispatch!(self, state, |algorithm, state| algorithm.refund(state, amount, now));
    }

    /// See [`Algorithm::debit`].
    pub fn debit(&self, state: &mut State, amount: u64, now: Micros) {
        dispatch!(self, state, |algorithm, state| algorithm.debit(state, amount, now));
    }

    /// See [`Algorithm::is_fresh`].
    pub fn is_fresh(&self, state: &State, now: Micros) -> bool {
        dispatch!(self, state, |algorithm, state| algorithm.is_fresh(state, now))
    }
}
