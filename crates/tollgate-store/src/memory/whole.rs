//! Whole states: states that the numbers of their table do not describe completely, stored in ten words with their own numbers.
//!
//! A bucket that was charged with several rates or bursts has more than one instant for as long as a full bucket takes to fill; a
//! counter that was charged with two windows has two sets of counts. Such keys are few and temporary. They are in one table per
//! limit name, whatever numbers charge them, and move back when one instant or one set of counts is enough (sibling_tables.rs). A
//! limit with too many sets of numbers keeps all further keys here.

use tollgate_kernel::{
    BucketNumbers, BucketState, Changed, Cost, CounterState, Counts, Micros, Outcome, WindowState,
};

use super::cell::{InWords, Packing};
use super::nodes::Nodes;

/// How many words the longest of these states takes.
const WORDS: usize = 10;

/// A whole state, as words; all of them zero for a fresh one.
pub(crate) type Whole = [u64; WORDS];

/// Nodes of whole states: five to 512 bytes.
pub(crate) type WholeNodes = Nodes<WORDS, 5>;

/// How the whole of a state is words.
pub(crate) trait InWhole {
    fn to_whole(&self) -> Whole;
    fn of_whole(words: &Whole) -> Self;
}

fn low(instant: u128) -> u64 {
    u64::try_from(instant & u128::from(u64::MAX)).unwrap_or(u64::MAX)
}

fn high(instant: u128) -> u64 {
    u64::try_from(instant >> 64).unwrap_or(u64::MAX)
}

fn instant(low: u64, high: u64) -> u128 {
    u128::from(low) | (u128::from(high) << 64)
}

impl InWhole for BucketState {
    fn to_whole(&self) -> Whole {
        let (full, wider) = (self.full_at, self.wider_full_at);
        // A rate is at least one in its period, so zeros are no numbers.
        let (tokens, period_us, burst) =
            self.under.map_or((0, 0, 0), |under| (under.tokens, under.period_us, under.burst));
        let (at, faster, faster_us) =
            self.changed.map_or((0, 0, 0), |changed| (changed.at.get(), changed.tokens, changed.period_us));
        let [full_low, full_high, wider_low, wider_high] = [low(full), high(full), low(wider), high(wider)];
        [full_low, full_high, wider_low, wider_high, tokens, period_us, burst, at, faster, faster_us]
    }

    fn of_whole(words: &Whole) -> Self {
        let &[full_low, full_high, wider_low, wider_high, tokens, period_us, burst, at, faster, faster_us] =
            words;
        let changed = Changed { at: Micros::new(at), tokens: faster, period_us: faster_us };
        BucketState {
            full_at: instant(full_low, full_high),
            wider_full_at: instant(wider_low, wider_high),
            under: (tokens > 0).then_some(BucketNumbers { tokens, period_us, burst }),
            changed: (faster > 0).then_some(changed),
        }
    }
}

impl InWhole for CounterState {
    fn to_whole(&self) -> Whole {
        let words = |counts: &Counts| [counts.window.get(), counts.start.get(), counts.prev, counts.cur];
        let mut whole = [0; WORDS];
        whole[..4].copy_from_slice(&words(&self.newer));
        whole[4..8].copy_from_slice(&words(&self.older));
        whole
    }

    fn of_whole(words: &Whole) -> Self {
        let counts = |at: usize| Counts {
            window: Micros::new(words[at]),
            start: Micros::new(words[at + 1]),
            prev: words[at + 2],
            cur: words[at + 3],
        };
        CounterState { newer: counts(0), older: counts(4) }
    }
}

/// Windows do not depend on the numbers, so they are never here.
impl InWhole for WindowState {
    fn to_whole(&self) -> Whole {
        let mut whole = [0; WORDS];
        whole[..3].copy_from_slice(&[self.end.get(), self.count, self.start.get()]);
        whole
    }

    fn of_whole(words: &Whole) -> Self {
        WindowState { end: Micros::new(words[0]), count: words[1], start: Micros::new(words[2]) }
    }
}

/// Ten words, as the state has them.
pub(crate) struct WholeWords;

impl<A: InWords> Packing<A, WORDS> for WholeWords {
    fn pack(&self, _algorithm: &A, state: &A::State) -> Whole {
        state.to_whole()
    }

    fn unpack(&self, _algorithm: &A, words: Whole) -> A::State {
        A::State::of_whole(&words)
    }

    fn fits(&self, _algorithm: &A, _state: &A::State, _now: Micros) -> bool {
        true
    }

    type Decided = Outcome;

    /// A denial may change the words: the state is adopted.
    fn charge(&self, algorithm: &A, words: &mut Whole, cost: Cost, now: Micros) -> (bool, Outcome) {
        let mut state = A::State::of_whole(words);
        let outcome = algorithm.charge(&mut state, cost, now);
        let before = std::mem::replace(words, state.to_whole());
        (before != *words, outcome)
    }

    fn outcome(&self, _algorithm: &A, outcome: Outcome, _cost: Cost) -> Outcome {
        outcome
    }
}
