//! The parts that the remote stores share: how a charge is sent, and how the answer is read.
//!
//! A charge becomes [`MergedCharges`], one for each pair of limit and key, with repeated pairs added up. The readings of the
//! store's twins come back, one for each merged charge, and [`MergedCharges::conclude`] has the kernel compute the outcomes. If
//! the store and the kernel disagree whether the charge passes, a twin is wrong; that is an error and never an admission.

pub(crate) mod batching;
pub(crate) mod deadline;
pub(crate) mod each;
pub(crate) mod limit_codec;
pub(crate) mod shares;
pub(crate) mod skew;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, MAX_COUNT, Micros, Outcome, Reading};

use crate::pairs::{self, PairOf};
use crate::{Charged, Failure, Outcomes, StoreError, StoredCharge};

/// A charge in the form that a store receives.
pub(crate) struct MergedCharges<'a> {
    pub(crate) parts: SmallVec<[StoredCharge<'a>; 4]>,
    /// Which part each charge belongs to.
    of_charge: SmallVec<[usize; 4]>,
}

impl PairOf for StoredCharge<'_> {
    fn is_same(&self, other: &Self) -> bool {
        self.limit.name == other.limit.name && self.key == other.key
    }

    fn amount(&mut self) -> (&mut Cost, &mut bool) {
        (&mut self.cost, &mut self.shadow)
    }
}

impl<'a> MergedCharges<'a> {
    /// One charge for each pair of limit and key.
    pub(crate) fn of(charges: &[StoredCharge<'a>]) -> MergedCharges<'a> {
        let (mut parts, mut of_charge) = (SmallVec::new(), SmallVec::new());
        let copy = |&StoredCharge { limit, key, cost, shadow }: &StoredCharge<'a>| StoredCharge {
            limit,
            key,
            cost,
            shadow,
        };
        pairs::merge(charges.iter().map(copy), &mut parts, |part| of_charge.push(part));
        MergedCharges { parts, of_charge }
    }

    /// One merged charge for each charge that can be refunded, in order. Leases are released by their holders and not refunded. No
    /// limit holds more than the largest count, so a larger amount means the same.
    pub(crate) fn to_refund(charges: &[StoredCharge<'a>]) -> MergedCharges<'a> {
        let is_count = |charge: &&StoredCharge<'_>| !matches!(charge.limit.limit, Limit::Concurrency(_));
        let part = |&StoredCharge { limit, key, cost, shadow }: &StoredCharge<'a>| {
            let cost = Cost::new(cost.get().min(MAX_COUNT)).unwrap_or(cost);
            StoredCharge { limit, key, cost, shadow }
        };
        let parts: SmallVec<[StoredCharge<'a>; 4]> = charges.iter().filter(is_count).map(part).collect();
        MergedCharges { of_charge: (0..parts.len()).collect(), parts }
    }

    /// The outcome of each merged charge, from the twins' readings.
    pub(crate) fn outcomes(&self, readings: impl IntoIterator<Item = Reading>, now: Micros) -> Outcomes {
        let answer =
            |(part, reading): (&StoredCharge<'_>, Reading)| part.limit.limit.answer(&reading, part.cost, now);
        self.parts.iter().zip(readings).map(answer).collect()
    }

    /// The actual cost of each merged charge, from one amount for each charge.
    #[cfg(feature = "redis")]
    pub(crate) fn totals(&self, actuals: &[u64]) -> Vec<u64> {
        let mut totals = vec![0_u64; self.parts.len()];
        for (part, actual) in self.of_charge.iter().zip(actuals) {
            totals[*part] = totals[*part].saturating_add(*actual);
        }
        totals
    }

    /// Whether a charge that is held under an id is this one: the same pairs, as far as names and repetitions say, at the same
    /// costs. Limits may have other numbers since.
    #[cfg(feature = "redis")]
    pub(crate) fn is_same_request(&self, held: &MergedCharges<'_>) -> bool {
        let is_same = |(one, other): (&StoredCharge<'_>, &StoredCharge<'_>)| {
            one.limit.name == other.limit.name && one.cost == other.cost
        };
        self.of_charge == held.of_charge && self.parts.iter().zip(&held.parts).all(is_same)
    }

    /// The answer for the charges of the call, from one outcome for each merged charge. `passed` is the store's decision.
    pub(crate) fn conclude(&self, outcomes: &[Outcome], passed: bool) -> Result<Charged, StoreError> {
        let passes = |(part, outcome): (&StoredCharge<'_>, &Outcome)| outcome.allowed || part.shadow;
        let allowed = self.parts.iter().zip(outcomes).all(passes);
        if outcomes.len() != self.parts.len() || allowed != passed {
            return Err(self.disagreement(passed));
        }
        Ok(Charged { allowed, outcomes: self.of_charge.iter().map(|&part| outcomes[part]).collect() })
    }

    /// A twin is wrong, or the answer belongs to another call.
    pub(crate) fn disagreement(&self, passed: bool) -> StoreError {
        disagreement(self.parts.len(), passed)
    }
}

/// The store and the kernel disagree about a charge of this many limits.
pub(crate) fn disagreement(limits: usize, passed: bool) -> StoreError {
    let verb = if passed { "admitted" } else { "refused" };
    let error = StoreError::failed(
        Failure::Reply,
        format!(
            "the store {verb} a charge of {limits} limits and the kernel does not agree: please report this"
        ),
    );
    // If the store admitted the charge, it has charged it, whatever the kernel says.
    if passed { error.ambiguous() } else { error }
}

/// The name of a text in a shared store: 128 bits of SHA-256. It has a fixed length, contains no bytes of the caller's text, and
/// no caller can find two texts with the same name. It is part of the stored format: see docs/storage.md.
pub(crate) fn name_of(texts: &[&str]) -> [u8; 16] {
    let mut hash = Sha256::new();
    for text in texts {
        // Each text with its length before it, so that no two lists run together alike.
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text.as_bytes());
    }
    let digest = hash.finalize();
    let mut name = [0; 16];
    name.copy_from_slice(&digest[..16]);
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoredLimit;

    fn limit(name: &str) -> StoredLimit {
        StoredLimit::new(name, Limit::fixed_window(5, Micros::from_secs(60)).unwrap())
    }

    #[test]
    fn what_is_asked_twice_is_added_up_and_answered_twice() {
        let (api, other) = (limit("api"), limit("other"));
        let charge =
            |limit, key, units, shadow| StoredCharge { limit, key, cost: Cost::new(units).unwrap(), shadow };
        let charges =
            [charge(&api, "a", 1, true), charge(&other, "a", 2, false), charge(&api, "a", 3, false)];
        let parts = MergedCharges::of(&charges);
        let costs: Vec<_> = parts.parts.iter().map(|part| (part.cost.get(), part.shadow)).collect();
        assert_eq!(costs, [(4, false), (2, false)]);
        let outcomes = [Outcome { remaining: 1, ..Outcome::UNLIMITED }, Outcome::UNLIMITED];
        let charged = parts.conclude(&outcomes, true).unwrap();
        assert_eq!(charged.outcomes.to_vec(), [outcomes[0], outcomes[1], outcomes[0]]);
        let most = charge(&api, "a", u64::MAX, false);
        assert_eq!(MergedCharges::of(&[most, most]).parts[0].cost, Cost::MAX);
    }

    #[test]
    fn what_is_refunded_twice_is_refunded_twice_and_leases_are_not() {
        let (api, leases) = (limit("api"), Limit::concurrency(5, Micros::from_secs(60)).unwrap());
        let leases = StoredLimit::new("leases", leases);
        let charge =
            |limit, units| StoredCharge { limit, key: "a", cost: Cost::new(units).unwrap(), shadow: false };
        let charges = [charge(&api, 2), charge(&leases, 1), charge(&api, u64::MAX)];
        let parts = MergedCharges::to_refund(&charges);
        let costs: Vec<_> = parts.parts.iter().map(|part| (&*part.limit.name, part.cost.get())).collect();
        assert_eq!(costs, [("api", 2), ("api", MAX_COUNT)]);
    }

    #[test]
    fn a_store_that_disagrees_with_the_kernel_is_not_believed() {
        let api = limit("api");
        let charges = [StoredCharge { limit: &api, key: "a", cost: Cost::ONE, shadow: false }];
        let error = MergedCharges::of(&charges).conclude(&[Outcome::BLOCKED], true).unwrap_err();
        assert_eq!(error.failure(), Some(Failure::Reply));
        assert!(
            error
                .to_string()
                .contains("the store admitted a charge of 1 limits and the kernel does not agree")
        );
        assert!(MergedCharges::of(&charges).conclude(&[], true).is_err(), "an answer is missing");
    }

    #[test]
    fn names_are_of_the_stored_format_and_do_not_run_together() {
        // The format of docs/storage.md: a change of these bytes is a new version of the stored state.
        let hex = |name: [u8; 16]| name.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(name_of(&["user:42"])), "fbc34785286c8fff4821091540579534");
        assert_ne!(name_of(&["a", "bc"]), name_of(&["ab", "c"]));
        assert_ne!(name_of(&["a"]), name_of(&["a", ""]));
    }
}
