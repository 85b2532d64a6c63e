//! Repeated pairs of limit and key add up: the one place that says how, for all stores.
//!
//! `memory/charge.rs` merges fingerprints, `remote.rs` texts.

use smallvec::SmallVec;
use tollgate_kernel::Cost;

/// A charge of one pair of limit and key, to which another one of the same pair can be added.
pub(crate) trait PairOf {
    /// Whether both have the same key and the same limit, whatever its numbers.
    fn is_same(&self, other: &Self) -> bool;

    /// The cost, and whether the limit is in shadow mode.
    fn amount(&mut self) -> (&mut Cost, &mut bool);
}

/// Adds charges to `merged`, which has one for each pair of limit and key. A pair that is charged twice is added up, and is in
/// shadow mode only if both are. `of_charge` gets the index of the pair of each charge.
#[inline]
pub(crate) fn merge<P: PairOf>(
    charges: impl Iterator<Item = P>,
    merged: &mut SmallVec<[P; 4]>,
    mut of_charge: impl FnMut(usize),
) {
    for mut charge in charges {
        match merged.iter().position(|pair| pair.is_same(&charge)) {
            Some(index) => {
                let (more, more_shadow) = charge.amount();
                let (cost, shadow) = merged[index].amount();
                *cost = cost.saturating_add(*more);
                *shadow &= *more_shadow;
                of_charge(index);
            }
            None => {
                merged.push(charge);
                of_charge(merged.len() - 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named(&'static str, Cost, bool);

    impl PairOf for Named {
        fn is_same(&self, other: &Self) -> bool {
            self.0 == other.0
        }

        fn amount(&mut self) -> (&mut Cost, &mut bool) {
            (&mut self.1, &mut self.2)
        }
    }

    #[test]
    fn repeated_pairs_add_up_and_are_in_shadow_mode_only_together() {
        let cost = |units| Cost::new(units).unwrap();
        let charges = [
            Named("a", cost(1), true),
            Named("b", cost(2), true),
            Named("a", cost(4), false),
            Named("b", cost(8), true),
            Named("c", cost(u64::MAX), false),
            Named("c", cost(16), false),
        ];
        let (mut merged, mut pairs) = (SmallVec::new(), Vec::new());
        merge(charges.into_iter(), &mut merged, |pair| pairs.push(pair));
        let merged: Vec<_> =
            merged.into_iter().map(|Named(name, cost, shadow)| (name, cost.get(), shadow)).collect();
        assert_eq!(merged, [("a", 5, false), ("b", 10, true), ("c", u64::MAX, false)]);
        assert_eq!(pairs, [0, 1, 0, 1, 2, 2]);
    }
}
