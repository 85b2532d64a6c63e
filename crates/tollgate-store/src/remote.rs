//! What the remote stores have in common: how a charge is put to them, and how their answer is read.
//!
//! A charge becomes [`MergedCharges`], one for each pair of limit and key, with repeated pairs added up. What the store's twins found
//! comes back as readings, one for each part, and [`MergedCharges::conclude`] has the kernel work out the answers. A store that says
//! other than the kernel whether the charge passes has a twin that is wrong, and that is an error and never an admission.

pub(crate) mod batching;
pub(crate) mod deadline;
pub(crate) mod each;
pub(crate) mod limit_codec;
pub(crate) mod shares;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, MAX_COUNT, Micros, Outcome, Reading};

use crate::{Charged, Failure, Outcomes, StoreError, StoredCharge};

/// A charge, as a store is asked it.
pub(crate) struct MergedCharges<'a> {
    pub(crate) parts: SmallVec<[StoredCharge<'a>; 4]>,
    /// Which part each item belongs to.
    of_item: SmallVec<[usize; 4]>,
}

impl<'a> MergedCharges<'a> {
    /// One charge for each pair of limit and key. A pair that is charged twice is added up, and is in shadow mode only if both are.
    pub(crate) fn of(items: &[StoredCharge<'a>]) -> MergedCharges<'a> {
        let mut parts: SmallVec<[StoredCharge<'a>; 4]> = SmallVec::new();
        let mut of_item = SmallVec::new();
        for item in items {
            let same = |part: &StoredCharge<'_>| part.limit.name == item.limit.name && part.key == item.key;
            let index = match parts.iter().position(same) {
                Some(index) => {
                    let part = &mut parts[index];
                    part.cost =
                        Cost::new(part.cost.get().saturating_add(item.cost.get())).unwrap_or(Cost::MAX);
                    part.shadow &= item.shadow;
                    index
                }
                None => {
                    let StoredCharge { limit, key, cost, shadow } = *item;
                    parts.push(StoredCharge { limit, key, cost, shadow });
                    parts.len() - 1
                }
            };
            of_item.push(index);
        }
        MergedCharges { parts, of_item }
    }

    /// One part for each item that can be refunded, in their order: leases are released by their holders, and not refunded. No
    /// limit holds more than the largest count, so more than that says no more.
    pub(crate) fn to_refund(items: &[StoredCharge<'a>]) -> MergedCharges<'a> {
        let is_count = |item: &&StoredCharge<'_>| !matches!(item.limit.limit, Limit::Concurrency(_));
        let part = |&StoredCharge { limit, key, cost, shadow }: &StoredCharge<'a>| {
            let cost = Cost::new(cost.get().min(MAX_COUNT)).unwrap_or(cost);
            StoredCharge { limit, key, cost, shadow }
        };
        let parts: SmallVec<[StoredCharge<'a>; 4]> = items.iter().filter(is_count).map(part).collect();
        MergedCharges { of_item: (0..parts.len()).collect(), parts }
    }

    /// What each part says, from what the twins found.
    pub(crate) fn outcomes(&self, readings: impl IntoIterator<Item = Reading>, now: Micros) -> Outcomes {
        let answer =
            |(part, reading): (&StoredCharge<'_>, Reading)| part.limit.limit.answer(&reading, part.cost, now);
        self.parts.iter().zip(readings).map(answer).collect()
    }

    /// What each part came to, from one amount for each item.
    #[cfg(feature = "redis")]
    pub(crate) fn totals(&self, actuals: &[u64]) -> Vec<u64> {
        let mut totals = vec![0_u64; self.parts.len()];
        for (part, actual) in self.of_item.iter().zip(actuals) {
            totals[*part] = totals[*part].saturating_add(*actual);
        }
        totals
    }

    /// The answer for the items of the charge, from one for each part. `passed` is what the store says of the whole charge.
    pub(crate) fn conclude(&self, outcomes: &[Outcome], passed: bool) -> Result<Charged, StoreError> {
        let passes = |(part, outcome): (&StoredCharge<'_>, &Outcome)| outcome.allowed || part.shadow;
        let allowed = self.parts.iter().zip(outcomes).all(passes);
        if outcomes.len() != self.parts.len() || allowed != passed {
            return Err(self.disagreement(passed));
        }
        Ok(Charged { allowed, outcomes: self.of_item.iter().map(|&part| outcomes[part]).collect() })
    }

    /// A twin is wrong, or the answer is not of this question.
    pub(crate) fn disagreement(&self, passed: bool) -> StoreError {
        disagreement(self.parts.len(), passed)
    }
}

/// The store says other than the kernel of a charge of so many limits.
pub(crate) fn disagreement(limits: usize, passed: bool) -> StoreError {
    let said = if passed { "admitted" } else { "refused" };
    let error = StoreError::failed(
        Failure::Reply,
        format!(
            "the store {said} a charge of {limits} limits and the kernel does not agree: please report this"
        ),
    );
    // What the store admitted it has charged, whatever we make of it.
    if passed { error.ambiguous() } else { error }
}

/// The name of a text in a shared store: 128 bits of SHA-256. It has a fixed length whatever callers send, holds none of their
/// bytes, and nobody can make two texts with the same one. It is part of the stored format: see docs/storage.md.
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
        let item =
            |limit, key, units, shadow| StoredCharge { limit, key, cost: Cost::new(units).unwrap(), shadow };
        let items = [item(&api, "a", 1, true), item(&other, "a", 2, false), item(&api, "a", 3, false)];
        let parts = MergedCharges::of(&items);
        let asked: Vec<_> = parts.parts.iter().map(|part| (part.cost.get(), part.shadow)).collect();
        assert_eq!(asked, [(4, false), (2, false)]);
        let outcomes = [Outcome { remaining: 1, ..Outcome::UNLIMITED }, Outcome::UNLIMITED];
        let charged = parts.conclude(&outcomes, true).unwrap();
        assert_eq!(charged.outcomes.to_vec(), [outcomes[0], outcomes[1], outcomes[0]]);
        let most = item(&api, "a", u64::MAX, false);
        assert_eq!(MergedCharges::of(&[most, most]).parts[0].cost, Cost::MAX);
    }

    #[test]
    fn what_is_refunded_twice_is_refunded_twice_and_leases_are_not() {
        let (api, leases) = (limit("api"), Limit::concurrency(5, Micros::from_secs(60)).unwrap());
        let leases = StoredLimit::new("leases", leases);
        let item =
            |limit, units| StoredCharge { limit, key: "a", cost: Cost::new(units).unwrap(), shadow: false };
        let items = [item(&api, 2), item(&leases, 1), item(&api, u64::MAX)];
        let parts = MergedCharges::to_refund(&items);
        let asked: Vec<_> = parts.parts.iter().map(|part| (&*part.limit.name, part.cost.get())).collect();
        assert_eq!(asked, [("api", 2), ("api", MAX_COUNT)]);
    }

    #[test]
    fn a_store_that_disagrees_with_the_kernel_is_not_believed() {
        let api = limit("api");
        let items = [StoredCharge { limit: &api, key: "a", cost: Cost::ONE, shadow: false }];
        let error = MergedCharges::of(&items).conclude(&[Outcome::BLOCKED], true).unwrap_err();
        assert_eq!(error.failure(), Some(Failure::Reply));
        assert!(
            error
                .to_string()
                .contains("the store admitted a charge of 1 limits and the kernel does not agree")
        );
        assert!(MergedCharges::of(&items).conclude(&[], true).is_err(), "an answer is missing");
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
