//! Buckets of any units in one table: beside a bucket's instant stands in which units that is.
//!
//! A table for each kind of unit is what a policy wants, which has few. Where numbers come with calls there may be thousands, and
//! whoever is new would have to be looked for in all of them (kin.rs). So all beyond the first few share this one. A key that is
//! charged by other units than the last time is moved in its place, as it would be between tables: rounded up, to a later instant of
//! being full.

use tollgate_kernel::{Bucket, BucketState, Cost, Micros, Outcome};

use super::cell::{InThreeWords, Packing};
use super::kin::Carried;

/// Two words as the state has them, and one for its units; all of them zero for a bucket that is full.
pub(crate) struct MixedUnits {
    /// Those of this bucket.
    pub(crate) units_per_us: u64,
}

impl MixedUnits {
    fn written(&self, state: &BucketState) -> [u64; 3] {
        let [low, high, _] = state.to_words();
        [low, high, self.units_per_us]
    }

    fn read(&self, words: [u64; 3]) -> BucketState {
        let state = BucketState::of_words(words);
        match words[2] {
            units if units == self.units_per_us => state,
            units => state.in_units(units, self.units_per_us),
        }
    }
}

impl<B: Bucket> Packing<B, 3> for MixedUnits {
    fn pack(&self, state: &BucketState) -> [u64; 3] {
        self.written(state)
    }

    fn unpack(&self, words: [u64; 3]) -> BucketState {
        self.read(words)
    }

    type Decided = Outcome;

    fn charge(&self, bucket: &B, words: &mut [u64; 3], cost: Cost, now: Micros) -> (bool, Outcome) {
        let mut state = self.read(*words);
        let outcome = bucket.charge(&mut state, cost, now);
        if outcome.allowed {
            *words = self.written(&state);
        }
        (outcome.allowed, outcome)
    }

    fn outcome(&self, _bucket: &B, outcome: Outcome, _cost: Cost) -> Outcome {
        outcome
    }

    fn carry(&self, _bucket: &B, words: [u64; 3]) -> Option<Carried> {
        Some(Carried { state: self.read(words), units_per_us: self.units_per_us })
    }

    fn receive(&self, _bucket: &B, carried: Carried) -> [u64; 3] {
        self.written(&carried.in_units(self.units_per_us))
    }
}
