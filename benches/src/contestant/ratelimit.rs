//! ratelimit: a token bucket of a few atomics, not keyed. A DashMap with foldhash makes it keyed, as its users do.
//!
//! The answer is `Ok(())` or how long to wait; it does not tell what remains. Two limits are two calls.

use std::hint::black_box;

use ::ratelimit::{Ratelimiter, TryWaitError};
use dashmap::DashMap;

use super::{Contestant, Regime, SHARED_KEY, charge_as_prepared};
use crate::workload::KeySet;

type Buckets = DashMap<String, Ratelimiter, foldhash::fast::RandomState>;

struct Ratelimit {
    regime: Regime,
    user: Buckets,
    shared: Buckets,
    shared_key: String,
}

pub(super) fn build(regime: Regime) -> Box<dyn Contestant> {
    let (user, shared) = (Buckets::default(), Buckets::default());
    Box::new(Ratelimit { regime, user, shared, shared_key: SHARED_KEY.to_string() })
}

impl Ratelimit {
    fn check(&self, buckets: &Buckets, key: &String) -> Result<(), TryWaitError> {
        if let Some(bucket) = buckets.get(key) {
            return bucket.try_wait();
        }
        buckets.entry(key.clone()).or_insert_with(|| self.full_bucket()).try_wait()
    }

    fn full_bucket(&self) -> Ratelimiter {
        let burst = self.regime.burst().get().into();
        let bucket = Ratelimiter::builder(1).period(self.regime.interval());
        bucket.max_tokens(burst).initial_available(burst).build().expect("the regimes are within its bounds")
    }
}

impl Contestant for Ratelimit {
    fn prepare(&self, keys: KeySet) {
        keys.for_each(|key| charge_as_prepared(self.regime, || self.check(&self.user, key).is_ok()));
        charge_as_prepared(self.regime, || self.check(&self.shared, &self.shared_key).is_ok());
    }

    fn run_slice(&self, keys: &[String]) -> usize {
        keys.iter().filter(|key| black_box(self.check(&self.user, key)).is_ok()).count()
    }

    fn run_pairs(&self, keys: &[String]) -> usize {
        let both = |key| {
            black_box(self.check(&self.shared, &self.shared_key)).is_ok()
                && black_box(self.check(&self.user, key)).is_ok()
        };
        keys.iter().filter(|key| both(key)).count()
    }
}
