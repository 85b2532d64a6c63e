//! The limits that a connection used last, so that the next command finds them without a lock.
//!
//! They follow reloads by themselves; but a limit that a reload left out must not be found any more, so all are looked up again
//! when there is another policy.

use std::sync::Arc;

use tollgate::{Limiter, NamedLimit, Policy, Tollgate};

use super::request::{Bucket, Mistake, THROTTLE};
use super::undecided;
use crate::app::Bounds;

/// How many of each kind. Few connections use more, and those pay a look-up for it.
const MOST: usize = 8;

pub(super) struct LimiterCache {
    bounds: Bounds,
    gate: Option<(Tollgate, Arc<Policy>)>,
    buckets: Vec<(Bucket, Limiter)>,
    limits: Vec<Limiter>,
    next: usize,
}

impl LimiterCache {
    pub(super) fn new(bounds: Bounds) -> LimiterCache {
        LimiterCache { bounds, gate: None, buckets: Vec::new(), limits: Vec::new(), next: 0 }
    }

    /// How long what callers choose may last.
    pub(super) fn bounds(&self) -> Bounds {
        self.bounds
    }

    /// From here on they lead to this gate, as its policy is now.
    pub(super) fn follow(&mut self, gate: &Tollgate) {
        let policy = gate.policy();
        if !self.gate.as_ref().is_some_and(|(_, known)| Arc::ptr_eq(known, &policy)) {
            *self = LimiterCache { gate: Some((gate.clone(), policy)), ..LimiterCache::new(self.bounds) };
        }
    }

    /// The limiter by the numbers of a `CL.THROTTLE`.
    #[inline]
    pub(super) fn bucket(&mut self, bucket: &Bucket) -> Result<&Limiter, Mistake> {
        let known = self.buckets.iter().position(|(known, _)| known == bucket);
        let index = match known {
            Some(index) => index,
            None => {
                let opened = open(self.gate()?, self.bounds, bucket)?;
                let opened = self.gate()?.local(&opened).map_err(undecided)?;
                put(&mut self.buckets, &mut self.next, (*bucket, opened))
            }
        };
        Ok(&self.buckets[index].1)
    }

    /// The limiter of this name.
    #[inline]
    pub(super) fn limit(&mut self, name: &str) -> Result<&Limiter, Mistake> {
        let known = self.limits.iter().position(|known| known.name() == name);
        let index = match known {
            Some(index) => index,
            None => {
                let limiter = self.gate()?.local(name).map_err(undecided)?;
                put(&mut self.limits, &mut self.next, limiter)
            }
        };
        Ok(&self.limits[index])
    }

    fn gate(&self) -> Result<&Tollgate, Mistake> {
        self.gate.as_ref().map(|(gate, _)| gate).ok_or(Mistake::Borrowed("TRYAGAIN there is no gate yet"))
    }
}

/// Puts one more in, in the place of another if there are enough, and says where.
fn put<T>(all: &mut Vec<T>, next: &mut usize, one: T) -> usize {
    if all.len() < MOST {
        all.push(one);
        return all.len() - 1;
    }
    *next = (*next + 1) % MOST;
    all[*next] = one;
    *next
}

/// The bucket by the numbers of a `CL.THROTTLE`.
pub(super) fn open(gate: &Tollgate, bounds: Bounds, bucket: &Bucket) -> Result<NamedLimit, Mistake> {
    let limit = bucket.limit().map_err(undecided)?;
    bounds.check_period(&limit).map_err(|why| Mistake::from(format!("ERR the period is too long: {why}")))?;
    gate.ad_hoc(THROTTLE, limit).map_err(undecided)
}
