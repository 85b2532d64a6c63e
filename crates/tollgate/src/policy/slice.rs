//! How much of a limit is taken from a shared store at a time, and which limits that makes sense for.
//!
//! Data only: what is done with it is in `slices.rs`.

use tollgate_kernel::{Micros, Strategy};

use super::Allowance;

/// How much is taken from a shared store at a time, and for how long: see [`Rule::slice`](crate::Rule::slice).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    pub(super) units: u64,
    pub(super) ttl: Micros,
}

impl Slice {
    /// How long a slice lasts, unless said otherwise.
    pub const TTL: Micros = Micros::from_secs(1);
    /// How long a slice lasts at most.
    pub const LONGEST_TTL: Micros = Micros::from_secs(60);

    /// How much is taken at a time.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// How long it may be used.
    pub fn ttl(&self) -> Micros {
        self.ttl
    }
}

/// What is wrong with a slice: the field of the configuration, and the fix.
pub(super) fn slice_fault(
    allowance: &Allowance,
    shadow: bool,
    units: u64,
    ttl: Micros,
) -> Option<(&'static str, String)> {
    let limit = match allowance {
        Allowance::Limited(limit) => limit,
        other => return Some(("slice", format!("is {other} and has nothing to slice; remove the slice"))),
    };
    let (field, fix) = match limit.strategy() {
        Strategy::LeakyBucket => {
            ("slice", "a leaky_bucket tells each charge its own delay and cannot be sliced".into())
        }
        Strategy::Concurrency => {
            ("slice", "a lease belongs to one holder, so concurrency cannot be sliced".into())
        }
        _ if shadow => ("slice", "a limit that only watches cannot be sliced; remove shadow or slice".into()),
        _ if !(1..=limit.capacity()).contains(&units) => (
            "slice",
            format!("a slice is at least 1 and at most what the limit holds, which is {}", limit.capacity()),
        ),
        _ if ttl == Micros::ZERO || ttl > Slice::LONGEST_TTL => {
            ("slice_ttl", format!("a slice lasts longer than zero and at most {}", Slice::LONGEST_TTL))
        }
        _ => return None,
    };
    Some((field, fix))
}
