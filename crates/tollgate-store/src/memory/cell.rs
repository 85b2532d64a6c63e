//! How the state of each strategy is stored in the words of a slot. This module has no limiter arithmetic: a cell unpacks the
//! words, calls the kernel, and packs the result.
//!
//! A bucket takes one word (the instant at which it is full, counted from the store's start), windows and counters three, as long
//! as the numbers of the table describe the rest. With a history of other numbers they are stored whole (whole.rs). Logs and
//! leases have no fixed size and take one word, an index (indirect.rs).

use std::sync::Arc;

use tollgate_kernel::{
    Algorithm, Bucket, BucketNumbers, BucketState, Cost, CounterState, Counts, Fit, LeakyBucket, Micros,
    Outcome, SlidingWindowCounter, Taken, TokenBucket,
};

use super::budget::Budget;
use super::limit_table::LimitTable;
use super::table::Table;
use super::whole::{InWhole, Whole, WholeNodes, WholeWords};

/// A correction of a key's state.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Amendment {
    GiveBack {
        taken: Taken,
        amount: u64,
    },
    Refund {
        amount: u64,
    },
    Debit {
        amount: u64,
    },
    /// Ends the lease of a holder that was given this end.
    Release {
        holder: u128,
        end: Micros,
    },
    Renew {
        holder: u128,
        end: Micros,
    },
}

/// What became of a correction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amended {
    /// There was nothing to correct.
    NotFound,
    Done,
    /// A lease was renewed, and ends then.
    Until(Micros),
}

impl Amended {
    pub(crate) fn is_found(self) -> bool {
        self != Amended::NotFound
    }
}

/// The holder of a lease.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Holder {
    /// Its id; zero for none.
    pub(crate) id: u128,
    /// Whether its lease does not expire.
    pub(crate) until_released: bool,
}

impl Holder {
    /// When a lease of this holder ends.
    pub(crate) fn lease_end(self, lease: Micros, now: Micros) -> Micros {
        if self.until_released { Micros::new(u64::MAX) } else { now.saturating_add(lease) }
    }
}

/// A strategy over `W` words. All-zero words are the fresh state.
pub(crate) trait Cell<const W: usize>: Send + Sync + 'static {
    /// Whether the words alone are the state, so that a reader without the lock can detect a refusal.
    const PLAIN: bool;

    /// Takes room in the budget for the entry that a charge may add, if there is some. `charge` uses it or gives it back.
    fn take_room(&self) -> bool;

    /// Gives back the room of a charge that is not made after all.
    fn leave_room(&self);

    /// A decided charge, of which the whole answer may be still to work out.
    type Decided: Copy;

    /// If the words are the state, charges them in place and returns whether they changed; if not, only decides.
    fn decide(&self, words: &mut [u64; W], cost: Cost, now: Micros) -> (bool, Self::Decided);

    /// The whole answer to a decided charge.
    fn outcome(&self, decided: Self::Decided, cost: Cost) -> Outcome;

    /// Charges in place, with room taken.
    fn charge(&self, words: &mut [u64; W], holder: Holder, cost: Cost, now: Micros) -> Outcome;

    fn charged_at(&self, words: [u64; W], now: Micros) -> Micros;

    /// Writes what these numbers make of a state that was written under others.
    fn adopt(&self, words: &mut [u64; W], now: Micros);

    /// Applies a correction.
    fn amend(&self, words: &mut [u64; W], amendment: Amendment, now: Micros) -> Amended;

    fn is_fresh(&self, words: [u64; W], now: Micros) -> bool;

    /// The state for a key that joins a shared state.
    fn joined(&self, words: [u64; W], now: Micros) -> [u64; W];

    /// Frees the state that the words refer to.
    fn discard(&self, words: [u64; W]);

    // Only where limits of one name may have their states in several tables.

    /// The whole state, for a table that writes it otherwise.
    fn carry(&self, words: [u64; W]) -> Option<Whole>;

    /// The words of a whole state, if these numbers and the words can describe it completely.
    fn receive(&self, whole: &Whole, now: Micros) -> Option<[u64; W]>;

    /// The words that come closest to a whole state, as these numbers count it.
    fn approximate(&self, whole: &Whole, now: Micros) -> [u64; W];

    /// Whether the words and these numbers describe a state completely, once it is adopted.
    fn is_plain(&self, words: [u64; W], now: Micros) -> bool;

    fn adopt_whole(&self, whole: &mut Whole, now: Micros);

    fn amend_whole(&self, whole: &mut Whole, amendment: Amendment, now: Micros) -> Amended;

    fn peek_whole(&self, whole: &Whole, cost: Cost, now: Micros) -> Outcome;

    /// The table of the same limit over the nodes of whole states.
    fn whole_table(&self, budget: &Arc<Budget>, nodes: Arc<WholeNodes>) -> Option<Arc<dyn LimitTable>>;
}

/// A strategy whose states are a few words, as long as they were written under its own numbers.
pub(crate) trait InWords: Algorithm<State: InWhole> + Clone + Send + Sync + 'static {
    /// The words of a state that is plain.
    fn to_words(&self, state: &Self::State) -> [u64; 3];

    fn of_words(&self, words: [u64; 3]) -> Self::State;

    /// Whether the words and these numbers describe it completely from `now` on.
    fn is_plain(&self, state: &Self::State, now: Micros) -> bool;

    /// The plain state that comes closest, once adopted.
    fn made_plain(&self, state: &Self::State, now: Micros) -> Self::State;
}

/// A bucket of either kind.
pub(crate) trait Numbered: Bucket + Clone + Send + Sync + 'static {
    fn numbers(&self) -> BucketNumbers;
}

impl Numbered for TokenBucket {
    fn numbers(&self) -> BucketNumbers {
        TokenBucket::numbers(self)
    }
}

impl Numbered for LeakyBucket {
    fn numbers(&self) -> BucketNumbers {
        self.room().numbers()
    }
}

impl<B: Numbered> InWords for B {
    #[inline]
    fn to_words(&self, state: &BucketState) -> [u64; 3] {
        let low = u64::try_from(state.full_at & u128::from(u64::MAX)).unwrap_or(u64::MAX);
        [low, u64::try_from(state.full_at >> 64).unwrap_or(u64::MAX), 0]
    }

    #[inline]
    fn of_words(&self, words: [u64; 3]) -> BucketState {
        let full_at = u128::from(words[0]) | (u128::from(words[1]) << 64);
        BucketState { full_at, under: Some(self.numbers()), ..BucketState::default() }
    }

    #[inline]
    fn is_plain(&self, state: &BucketState, now: Micros) -> bool {
        state.is_plain_under(self.numbers(), now)
    }

    fn made_plain(&self, state: &BucketState, _now: Micros) -> BucketState {
        BucketState { full_at: state.full_at, under: Some(self.numbers()), ..BucketState::default() }
    }
}

impl InWords for SlidingWindowCounter {
    #[inline]
    fn to_words(&self, state: &CounterState) -> [u64; 3] {
        [state.newer.start.get(), state.newer.prev, state.newer.cur]
    }

    #[inline]
    fn of_words(&self, words: [u64; 3]) -> CounterState {
        let newer =
            Counts { window: self.window(), start: Micros::new(words[0]), prev: words[1], cur: words[2] };
        CounterState { newer, older: Counts::default() }
    }

    #[inline]
    fn is_plain(&self, state: &CounterState, now: Micros) -> bool {
        let older = CounterState { newer: state.older, older: Counts::default() };
        state.newer.window == self.window() && self.is_fresh(&older, now)
    }

    /// What counts by other lengths counts as if it had been charged just now.
    fn made_plain(&self, state: &CounterState, now: Micros) -> CounterState {
        if self.is_plain(state, now) {
            return CounterState { older: Counts::default(), ..*state };
        }
        let start = Micros::new(now.get() - now.get() % self.window().get());
        let newer =
            Counts { window: self.window(), start, prev: 0, cur: self.peek(state, Cost::MAX, now).used() };
        CounterState { newer, older: Counts::default() }
    }
}

/// How the state of a strategy is written as words.
pub(crate) trait Packing<A: InWords, const W: usize>: Send + Sync + 'static {
    /// The words of a state that fits them.
    fn pack(&self, algorithm: &A, state: &A::State) -> [u64; W];

    fn unpack(&self, algorithm: &A, words: [u64; W]) -> A::State;

    /// Whether the words describe a state completely from `now` on.
    fn fits(&self, algorithm: &A, state: &A::State, now: Micros) -> bool;

    /// A decided charge, of which the whole answer may be still to work out.
    type Decided: Copy;

    /// Charges in place, and returns whether the words changed.
    fn charge(&self, algorithm: &A, words: &mut [u64; W], cost: Cost, now: Micros) -> (bool, Self::Decided);

    /// The whole answer.
    fn outcome(&self, algorithm: &A, decided: Self::Decided, cost: Cost) -> Outcome;
}

/// A strategy whose state is its words.
pub(crate) struct PlainCell<A, P> {
    pub(crate) algorithm: A,
    pub(crate) packing: P,
}

/// A bucket's instant of being full, less the store's start, in one word.
pub(crate) struct OneWord {
    /// The store's start.
    start: Micros,
    /// The same in the bucket's units.
    start_units: u128,
}

impl OneWord {
    /// Up to this many units per µs, one word lasts for 35 years of uptime and any debt besides.
    const MOST_UNITS_PER_US: u64 = 1 << 13;

    /// One word for a bucket, if that is enough.
    pub(crate) fn new(bucket: &impl Bucket, start: Micros) -> Option<OneWord> {
        let units = bucket.units_per_us();
        let start_units = u128::from(start.get()) * u128::from(units);
        (units <= Self::MOST_UNITS_PER_US).then_some(OneWord { start, start_units })
    }
}

impl<B: Numbered> Packing<B, 1> for OneWord {
    #[inline]
    fn pack(&self, _bucket: &B, state: &BucketState) -> [u64; 1] {
        // An instant before the start is a full bucket and packs as zero; an instant out of range stays out of range.
        [u64::try_from(state.full_at.saturating_sub(self.start_units)).unwrap_or(u64::MAX)]
    }

    #[inline]
    fn unpack(&self, bucket: &B, words: [u64; 1]) -> BucketState {
        let full_at = self.start_units + u128::from(words[0]);
        BucketState { full_at, under: Some(bucket.numbers()), ..BucketState::default() }
    }

    fn fits(&self, bucket: &B, state: &BucketState, now: Micros) -> bool {
        bucket.is_plain(state, now)
    }

    type Decided = Fit;

    #[inline]
    fn charge(&self, bucket: &B, words: &mut [u64; 1], cost: Cost, now: Micros) -> (bool, Fit) {
        let fit = bucket.charge_short(&mut words[0], cost, now.saturating_sub(self.start));
        (fit.is_allowed(), fit)
    }

    #[inline]
    fn outcome(&self, bucket: &B, fit: Fit, cost: Cost) -> Outcome {
        bucket.outcome_of(fit, cost)
    }
}

/// Three words, as the state has them.
pub(crate) struct ThreeWords;

impl<A: InWords> Packing<A, 3> for ThreeWords {
    #[inline]
    fn pack(&self, algorithm: &A, state: &A::State) -> [u64; 3] {
        algorithm.to_words(state)
    }

    #[inline]
    fn unpack(&self, algorithm: &A, words: [u64; 3]) -> A::State {
        algorithm.of_words(words)
    }

    fn fits(&self, algorithm: &A, state: &A::State, now: Micros) -> bool {
        algorithm.is_plain(state, now)
    }

    type Decided = Outcome;

    #[inline]
    fn charge(&self, algorithm: &A, words: &mut [u64; 3], cost: Cost, now: Micros) -> (bool, Outcome) {
        let mut state = algorithm.of_words(*words);
        let outcome = algorithm.charge(&mut state, cost, now);
        if outcome.allowed {
            *words = algorithm.to_words(&state);
        }
        (outcome.allowed, outcome)
    }

    #[inline]
    fn outcome(&self, _algorithm: &A, outcome: Outcome, _cost: Cost) -> Outcome {
        outcome
    }
}

fn amend<A: Algorithm>(algorithm: &A, state: &mut A::State, amendment: Amendment, now: Micros) -> Amended {
    match amendment {
        Amendment::GiveBack { taken, amount } => algorithm.give_back(state, taken, amount, now),
        Amendment::Refund { amount } => algorithm.refund(state, amount, now),
        Amendment::Debit { amount } => algorithm.debit(state, amount, now),
        Amendment::Release { .. } | Amendment::Renew { .. } => return Amended::NotFound,
    }
    Amended::Done
}

impl<A, P, const W: usize> Cell<W> for PlainCell<A, P>
where
    A: InWords,
    P: Packing<A, W>,
{
    const PLAIN: bool = true;

    #[inline]
    fn take_room(&self) -> bool {
        true
    }

    #[inline]
    fn leave_room(&self) {}

    type Decided = P::Decided;

    #[inline]
    fn decide(&self, words: &mut [u64; W], cost: Cost, now: Micros) -> (bool, P::Decided) {
        self.packing.charge(&self.algorithm, words, cost, now)
    }

    #[inline]
    fn outcome(&self, decided: P::Decided, cost: Cost) -> Outcome {
        self.packing.outcome(&self.algorithm, decided, cost)
    }

    #[inline]
    fn charge(&self, words: &mut [u64; W], _holder: Holder, cost: Cost, now: Micros) -> Outcome {
        let (_, decided) = self.decide(words, cost, now);
        self.outcome(decided, cost)
    }

    #[inline]
    fn charged_at(&self, words: [u64; W], now: Micros) -> Micros {
        self.algorithm.charged_at(&self.packing.unpack(&self.algorithm, words), now)
    }

    fn adopt(&self, words: &mut [u64; W], now: Micros) {
        let mut state = self.packing.unpack(&self.algorithm, *words);
        self.algorithm.adopt(&mut state, now);
        *words = self.packing.pack(&self.algorithm, &state);
    }

    fn amend(&self, words: &mut [u64; W], amendment: Amendment, now: Micros) -> Amended {
        let mut state = self.packing.unpack(&self.algorithm, *words);
        let amended = amend(&self.algorithm, &mut state, amendment, now);
        *words = self.packing.pack(&self.algorithm, &state);
        amended
    }

    fn is_fresh(&self, words: [u64; W], now: Micros) -> bool {
        self.algorithm.is_fresh(&self.packing.unpack(&self.algorithm, words), now)
    }

    fn joined(&self, words: [u64; W], now: Micros) -> [u64; W] {
        let state = self.packing.unpack(&self.algorithm, words);
        self.packing.pack(&self.algorithm, &self.algorithm.joined(&state, now))
    }

    fn discard(&self, _words: [u64; W]) {}

    fn carry(&self, words: [u64; W]) -> Option<Whole> {
        Some(self.packing.unpack(&self.algorithm, words).to_whole())
    }

    fn receive(&self, whole: &Whole, now: Micros) -> Option<[u64; W]> {
        let state = A::State::of_whole(whole);
        let fits = self.packing.fits(&self.algorithm, &state, now);
        fits.then(|| self.packing.pack(&self.algorithm, &state))
    }

    fn approximate(&self, whole: &Whole, now: Micros) -> [u64; W] {
        let mut state = A::State::of_whole(whole);
        self.algorithm.adopt(&mut state, now);
        if !self.packing.fits(&self.algorithm, &state, now) {
            state = self.algorithm.made_plain(&state, now);
        }
        self.packing.pack(&self.algorithm, &state)
    }

    #[inline]
    fn is_plain(&self, words: [u64; W], now: Micros) -> bool {
        let mut state = self.packing.unpack(&self.algorithm, words);
        self.algorithm.adopt(&mut state, now);
        self.algorithm.is_plain(&state, now)
    }

    fn adopt_whole(&self, whole: &mut Whole, now: Micros) {
        let mut state = A::State::of_whole(whole);
        self.algorithm.adopt(&mut state, now);
        *whole = state.to_whole();
    }

    fn amend_whole(&self, whole: &mut Whole, amendment: Amendment, now: Micros) -> Amended {
        let mut state = A::State::of_whole(whole);
        let amended = amend(&self.algorithm, &mut state, amendment, now);
        *whole = state.to_whole();
        amended
    }

    fn peek_whole(&self, whole: &Whole, cost: Cost, now: Micros) -> Outcome {
        self.algorithm.peek(&A::State::of_whole(whole), cost, now)
    }

    fn whole_table(&self, budget: &Arc<Budget>, nodes: Arc<WholeNodes>) -> Option<Arc<dyn LimitTable>> {
        let cell = PlainCell { algorithm: self.algorithm.clone(), packing: WholeWords };
        Some(Arc::new(Table::new(cell, budget.clone(), nodes, None)))
    }
}
