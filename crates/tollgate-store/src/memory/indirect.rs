//! Strategies whose states have no fixed size, logs and leases: the state is in a separate list, and a slot has its index.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use tollgate_kernel::{Algorithm, Concurrency, Cost, LeaseState, LogState, Micros, Outcome, SlidingWindow};

use super::budget::Budget;
use super::cell::{Amended, Amendment, Cell, Holder};
use super::chunks::Chunks;
use super::limit_table::LimitTable;
use super::whole::{Whole, WholeNodes};

/// A strategy whose state has no fixed size.
pub(crate) trait Holding: Algorithm + Send + Sync + 'static {
    /// The number of entries of a state: each counts against the budget.
    fn weight(state: &Self::State) -> usize;

    fn charge_for(&self, state: &mut Self::State, holder: Holder, cost: Cost, now: Micros) -> Outcome;

    fn release(&self, state: &mut Self::State, holder: u128, end: Micros, now: Micros) -> bool;

    /// The new end of a lease that was given this end.
    fn renew(&self, state: &mut Self::State, holder: u128, end: Micros, now: Micros) -> Option<Micros>;
}

impl Holding for SlidingWindow {
    fn weight(state: &LogState) -> usize {
        state.len()
    }

    fn charge_for(&self, state: &mut LogState, _holder: Holder, cost: Cost, now: Micros) -> Outcome {
        self.charge(state, cost, now)
    }

    fn release(&self, _state: &mut LogState, _holder: u128, _end: Micros, _now: Micros) -> bool {
        false
    }

    fn renew(&self, _state: &mut LogState, _holder: u128, _end: Micros, _now: Micros) -> Option<Micros> {
        None
    }
}

impl Holding for Concurrency {
    fn weight(state: &LeaseState) -> usize {
        state.len()
    }

    fn charge_for(&self, state: &mut LeaseState, holder: Holder, cost: Cost, now: Micros) -> Outcome {
        self.acquire_until(state, holder.id, cost, holder.lease_end(self.lease(), now), now)
    }

    fn release(&self, state: &mut LeaseState, holder: u128, end: Micros, now: Micros) -> bool {
        Concurrency::release(self, state, holder, end, now)
    }

    fn renew(&self, state: &mut LeaseState, holder: u128, end: Micros, now: Micros) -> Option<Micros> {
        Concurrency::renew(self, state, holder, end, now)
    }
}

/// A strategy with states in a separate list; the word is the index plus one. The lock of the key's node is held around every use
/// except a reader's, and readers are excluded (`PLAIN` is false), so these locks are never waited for long.
pub(crate) struct IndirectCell<A: Algorithm> {
    algorithm: A,
    budget: Arc<Budget>,
    list: Arc<IndirectStates<A::State>>,
}

/// The separate list of states. Limits that share their nodes share it.
pub(crate) struct IndirectStates<T> {
    states: Chunks<Mutex<T>>,
    free: Mutex<Vec<u32>>,
    next: AtomicU32,
}

impl<T: Default> IndirectStates<T> {
    pub(crate) fn new() -> Self {
        IndirectStates { states: Chunks::new(), free: Mutex::new(Vec::new()), next: AtomicU32::new(0) }
    }

    /// A place for a new state, as a word.
    fn keep(&self, state: T) -> u64 {
        let place = self.free.lock().pop().unwrap_or_else(|| self.next.fetch_add(1, Ordering::Relaxed));
        *self.states.ensure(place as usize).lock() = state;
        u64::from(place) + 1
    }
}

impl<A: Holding> IndirectCell<A> {
    pub(crate) fn new(algorithm: A, budget: Arc<Budget>, list: Arc<IndirectStates<A::State>>) -> Self {
        IndirectCell { algorithm, budget, list }
    }

    fn state(&self, words: [u64; 1]) -> Option<&Mutex<A::State>> {
        let place = usize::try_from(words[0].checked_sub(1)?).ok()?;
        Some(self.list.states.get(place))
    }

    /// Runs `use_state` on the state that the words refer to, or on a fresh one; stores a fresh one only if it was changed. Room
    /// for these entries has been `taken`.
    fn with_state<R>(
        &self,
        words: &mut [u64; 1],
        taken: usize,
        use_state: impl FnOnce(&mut A::State) -> R,
    ) -> R {
        if let Some(state) = self.state(*words) {
            let mut state = state.lock();
            let before = A::weight(&state);
            let answer = use_state(&mut state);
            self.account(before + taken, A::weight(&state));
            return answer;
        }
        let mut state = A::State::default();
        let answer = use_state(&mut state);
        self.account(taken, A::weight(&state));
        if state != A::State::default() {
            *words = [self.list.keep(state)];
        }
        answer
    }

    fn account(&self, before: usize, after: usize) {
        if after > before {
            self.budget.take_anyway(after - before);
        } else {
            self.budget.give_back(before - after);
        }
    }
}

impl<A: Holding> Cell<1> for IndirectCell<A>
where
    A::State: Send,
{
    const PLAIN: bool = false;

    fn take_room(&self) -> bool {
        self.budget.take(1)
    }

    fn leave_room(&self) {
        self.budget.give_back(1);
    }

    type Decided = Outcome;

    fn decide(&self, words: &mut [u64; 1], cost: Cost, now: Micros) -> (bool, Outcome) {
        let outcome = match self.state(*words) {
            Some(state) => self.algorithm.peek(&state.lock(), cost, now),
            None => self.algorithm.peek(&A::State::default(), cost, now),
        };
        (outcome.allowed, outcome)
    }

    fn outcome(&self, outcome: Outcome, _cost: Cost) -> Outcome {
        outcome
    }

    fn charge(&self, words: &mut [u64; 1], holder: Holder, cost: Cost, now: Micros) -> Outcome {
        self.with_state(words, 1, |state| self.algorithm.charge_for(state, holder, cost, now))
    }

    fn charged_at(&self, words: [u64; 1], now: Micros) -> Micros {
        self.state(words).map_or(now, |state| self.algorithm.charged_at(&state.lock(), now))
    }

    fn adopt(&self, words: &mut [u64; 1], now: Micros) {
        if let Some(state) = self.state(*words) {
            self.algorithm.adopt(&mut state.lock(), now);
        }
    }

    fn amend(&self, words: &mut [u64; 1], amendment: Amendment, now: Micros) -> Amended {
        self.with_state(words, 0, |state| {
            match amendment {
                Amendment::GiveBack { taken, amount } => self.algorithm.give_back(state, taken, amount, now),
                Amendment::Refund { amount } => self.algorithm.refund(state, amount, now),
                Amendment::Debit { amount } => self.algorithm.debit(state, amount, now),
                Amendment::Release { holder, end } => {
                    if !self.algorithm.release(state, holder, end, now) {
                        return Amended::NotFound;
                    }
                }
                Amendment::Renew { holder, end } => {
                    let renewed = self.algorithm.renew(state, holder, end, now);
                    return renewed.map_or(Amended::NotFound, Amended::Until);
                }
            }
            Amended::Done
        })
    }

    fn is_fresh(&self, words: [u64; 1], now: Micros) -> bool {
        self.state(words).is_none_or(|state| self.algorithm.is_fresh(&state.lock(), now))
    }

    fn joined(&self, words: [u64; 1], _now: Micros) -> [u64; 1] {
        // No key joins a shared state: without room for an entry there is nothing to join for.
        words
    }

    fn discard(&self, words: [u64; 1]) {
        if let (Some(state), Ok(place)) = (self.state(words), u32::try_from(words[0].saturating_sub(1))) {
            let state = std::mem::take(&mut *state.lock());
            self.account(A::weight(&state), 0);
            self.list.free.lock().push(place);
        }
    }

    // These states do not depend on the numbers: limits of one name share their table.

    fn carry(&self, _words: [u64; 1]) -> Option<Whole> {
        None
    }

    fn receive(&self, _whole: &Whole, _now: Micros) -> Option<[u64; 1]> {
        None
    }

    fn approximate(&self, _whole: &Whole, _now: Micros) -> [u64; 1] {
        [0]
    }

    fn is_plain(&self, _words: [u64; 1], _now: Micros) -> bool {
        true
    }

    fn adopt_whole(&self, _whole: &mut Whole, _now: Micros) {}

    fn amend_whole(&self, _whole: &mut Whole, _amendment: Amendment, _now: Micros) -> Amended {
        Amended::NotFound
    }

    fn peek_whole(&self, _whole: &Whole, cost: Cost, now: Micros) -> Outcome {
        self.algorithm.peek(&A::State::default(), cost, now)
    }

    fn whole_table(&self, _budget: &Arc<Budget>, _nodes: Arc<WholeNodes>) -> Option<Arc<dyn LimitTable>> {
        None
    }
}
