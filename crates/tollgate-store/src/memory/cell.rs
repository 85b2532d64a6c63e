//! How the state of each strategy is written into the words of a slot. No arithmetic of limits happens here: a cell unpacks
//! the words, asks the kernel, and packs what the kernel left.
//!
//! Buckets take one word (the instant of being full, counted from the store's start), windows and counters three, and logs
//! and leases, which have no fixed size, one word that says where the state is kept (kept.rs).

use tollgate_kernel::{
    Algorithm, Bucket, BucketState, Cost, CounterState, Fit, Micros, Outcome, Taken, WindowState,
};

use super::kin::Carried;

/// A correction to what is remembered about a key.
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

/// A strategy over `W` words. All-zero words are the fresh state.
pub(crate) trait Cell<const W: usize>: Send + Sync {
    /// Whether the words alone are the state, so that a reader without the lock can tell a refusal.
    const PLAIN: bool;

    /// Takes room in the budget for the entry that a charge may add, if there is some. `charge` uses it or gives it back.
    fn take_room(&self) -> bool;

    /// Gives back the room of a charge that is not made after all.
    fn leave_room(&self);

    /// A decided charge, of which the whole answer may be still to work out.
    type Decided: Copy;

    /// Where the words are the state, charges them in place and says whether it fits; elsewhere, only says so. A denial leaves
    /// the words as they are.
    fn decide(&self, words: &mut [u64; W], cost: Cost, now: Micros) -> (bool, Self::Decided);

    /// The whole answer to a decided charge.
    fn outcome(&self, decided: Self::Decided, cost: Cost) -> Outcome;

    /// Charges in place, with room taken; a denial leaves the words as they are. `holder` names a lease.
    fn charge(&self, words: &mut [u64; W], holder: u128, cost: Cost, now: Micros) -> Outcome;

    fn charged_at(&self, words: [u64; W], now: Micros) -> Micros;

    /// Applies a correction.
    fn amend(&self, words: &mut [u64; W], amendment: Amendment, now: Micros) -> Amended;

    fn is_fresh(&self, words: [u64; W], now: Micros) -> bool;

    /// The state for one who joins others in it.
    fn joined(&self, words: [u64; W], now: Micros) -> [u64; W];

    /// Frees what the words refer to.
    fn discard(&self, words: [u64; W]);

    /// How far the strategy looks back, where its state alone does not tell when it has run out.
    fn span(&self) -> Micros;

    /// A bucket's state, for a table that writes it otherwise.
    fn carry(&self, words: [u64; W]) -> Option<Carried>;

    /// The words of a state that comes from a table that writes it otherwise. What is not whole here is rounded up, to a later
    /// instant of being full, so that nothing is made by moving.
    fn receive(&self, carried: Carried) -> [u64; W];
}

/// How the state of a strategy is written as words.
pub(crate) trait Packing<A: Algorithm, const W: usize>: Send + Sync {
    fn pack(&self, state: &A::State) -> [u64; W];
    fn unpack(&self, words: [u64; W]) -> A::State;

    /// A decided charge, of which the whole answer may be still to work out.
    type Decided: Copy;

    /// Charges in place, and says whether it fits; a denial leaves the words as they are.
    fn charge(&self, algorithm: &A, words: &mut [u64; W], cost: Cost, now: Micros) -> (bool, Self::Decided);

    /// The whole answer.
    fn outcome(&self, algorithm: &A, decided: Self::Decided, cost: Cost) -> Outcome;

    /// See [`Cell::carry`].
    fn carry(&self, algorithm: &A, words: [u64; W]) -> Option<Carried>;

    /// See [`Cell::receive`].
    fn receive(&self, algorithm: &A, carried: Carried) -> [u64; W];
}

/// A strategy whose state is its words.
pub(crate) struct PlainCell<A, P> {
    pub(crate) algorithm: A,
    pub(crate) packing: P,
    pub(crate) span: Micros,
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

impl<B: Bucket> Packing<B, 1> for OneWord {
    fn pack(&self, state: &BucketState) -> [u64; 1] {
        // An instant before the start is a full bucket and packs as zero; one that is out of reach stays out of reach.
        [u64::try_from(state.full_at.saturating_sub(self.start_units)).unwrap_or(u64::MAX)]
    }

    fn unpack(&self, words: [u64; 1]) -> BucketState {
        BucketState { full_at: self.start_units + u128::from(words[0]), ..BucketState::default() }
    }

    type Decided = Fit;

    #[inline]
    fn charge(&self, bucket: &B, words: &mut [u64; 1], cost: Cost, now: Micros) -> (bool, Fit) {
        let fit = bucket.charge_short(&mut words[0], cost, now.saturating_sub(self.start));
        (fit.allowed, fit)
    }

    #[inline]
    fn outcome(&self, bucket: &B, fit: Fit, cost: Cost) -> Outcome {
        bucket.outcome_of(fit, cost)
    }

    fn carry(&self, bucket: &B, words: [u64; 1]) -> Option<Carried> {
        let state = Packing::<B, 1>::unpack(self, words);
        Some(Carried { state, units_per_us: bucket.units_per_us() })
    }

    fn receive(&self, bucket: &B, carried: Carried) -> [u64; 1] {
        Packing::<B, 1>::pack(self, &carried.in_units(bucket.units_per_us()))
    }
}

/// Three words, as the state has them.
pub(crate) struct ThreeWords {
    /// How many units of the state one µs is worth, if it is a bucket's; zero if not.
    pub(crate) units_per_us: u64,
}

/// How a state is three words.
pub(crate) trait InThreeWords {
    fn to_words(&self) -> [u64; 3];
    fn of_words(words: [u64; 3]) -> Self;
}

impl<A: Algorithm<State: InThreeWords>> Packing<A, 3> for ThreeWords {
    #[inline]
    fn pack(&self, state: &A::State) -> [u64; 3] {
        state.to_words()
    }

    #[inline]
    fn unpack(&self, words: [u64; 3]) -> A::State {
        A::State::of_words(words)
    }

    type Decided = Outcome;

    #[inline]
    fn charge(&self, algorithm: &A, words: &mut [u64; 3], cost: Cost, now: Micros) -> (bool, Outcome) {
        let mut state = A::State::of_words(*words);
        let outcome = algorithm.charge(&mut state, cost, now);
        if outcome.allowed {
            *words = state.to_words();
        }
        (outcome.allowed, outcome)
    }

    #[inline]
    fn outcome(&self, _algorithm: &A, outcome: Outcome, _cost: Cost) -> Outcome {
        outcome
    }

    fn carry(&self, _algorithm: &A, words: [u64; 3]) -> Option<Carried> {
        let units_per_us = self.units_per_us;
        (units_per_us > 0).then(|| Carried { state: BucketState::of_words(words), units_per_us })
    }

    fn receive(&self, _algorithm: &A, carried: Carried) -> [u64; 3] {
        carried.in_units(self.units_per_us.max(1)).to_words()
    }
}

impl InThreeWords for BucketState {
    fn to_words(&self) -> [u64; 3] {
        let low = u64::try_from(self.full_at & u128::from(u64::MAX)).unwrap_or(u64::MAX);
        [low, u64::try_from(self.full_at >> 64).unwrap_or(u64::MAX), 0]
    }

    fn of_words(words: [u64; 3]) -> Self {
        BucketState { full_at: u128::from(words[0]) | (u128::from(words[1]) << 64), ..BucketState::default() }
    }
}

impl InThreeWords for WindowState {
    fn to_words(&self) -> [u64; 3] {
        [self.end.get(), self.count, self.start.get()]
    }

    fn of_words(words: [u64; 3]) -> Self {
        WindowState { end: Micros::new(words[0]), count: words[1], start: Micros::new(words[2]) }
    }
}

impl InThreeWords for CounterState {
    fn to_words(&self) -> [u64; 3] {
        [self.newer.start.get(), self.newer.prev, self.newer.cur]
    }

    fn of_words(words: [u64; 3]) -> Self {
        let newer = tollgate_kernel::Counts {
            window: Micros::ZERO,
            start: Micros::new(words[0]),
            prev: words[1],
            cur: words[2],
        };
        CounterState { newer, older: Default::default() }
    }
}

impl<A, P, const W: usize> Cell<W> for PlainCell<A, P>
where
    A: Algorithm + Send + Sync,
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
    fn charge(&self, words: &mut [u64; W], _holder: u128, cost: Cost, now: Micros) -> Outcome {
        let (_, decided) = self.decide(words, cost, now);
        self.outcome(decided, cost)
    }

    fn charged_at(&self, words: [u64; W], now: Micros) -> Micros {
        self.algorithm.charged_at(&self.packing.unpack(words), now)
    }

    fn amend(&self, words: &mut [u64; W], amendment: Amendment, now: Micros) -> Amended {
        let mut state = self.packing.unpack(*words);
        match amendment {
            Amendment::GiveBack { taken, amount } => {
                self.algorithm.give_back(&mut state, taken, amount, now);
            }
            Amendment::Refund { amount } => self.algorithm.refund(&mut state, amount, now),
            Amendment::Debit { amount } => self.algorithm.debit(&mut state, amount, now),
            Amendment::Release { .. } | Amendment::Renew { .. } => return Amended::NotFound,
        }
        *words = self.packing.pack(&state);
        Amended::Done
    }

    fn is_fresh(&self, words: [u64; W], now: Micros) -> bool {
        self.algorithm.is_fresh(&self.packing.unpack(words), now)
    }

    fn joined(&self, words: [u64; W], now: Micros) -> [u64; W] {
        self.packing.pack(&self.algorithm.joined(&self.packing.unpack(words), now))
    }

    fn discard(&self, _words: [u64; W]) {}

    fn span(&self) -> Micros {
        self.span
    }

    fn carry(&self, words: [u64; W]) -> Option<Carried> {
        self.packing.carry(&self.algorithm, words)
    }

    fn receive(&self, carried: Carried) -> [u64; W] {
        self.packing.receive(&self.algorithm, carried)
    }
}
