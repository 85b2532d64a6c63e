//! throttlecrab: GCRA over a HashMap with an expiry per entry. Its limiter takes `&mut self`, so threads share it through a
//! mutex; the time it wants is read before the lock is taken.
//!
//! The answer is whether the charge is allowed, the limit, what remains, and when to retry and reset. Two limits are two
//! charges under one lock.

use std::hint::black_box;
use std::time::SystemTime;

use ::throttlecrab::{PeriodicStore, RateLimiter};
use parking_lot::Mutex;

use super::{Contestant, Regime, SHARED_KEY, charge_as_prepared};
use crate::workload::KeySet;

struct Throttlecrab {
    regime: Regime,
    limiter: Mutex<RateLimiter<PeriodicStore>>,
    burst: i64,
    interval_seconds: i64,
}

pub(super) fn build(regime: Regime) -> Box<dyn Contestant> {
    Box::new(Throttlecrab {
        regime,
        limiter: Mutex::new(RateLimiter::new(PeriodicStore::new())),
        burst: regime.burst().get().into(),
        interval_seconds: regime.interval().as_secs().try_into().expect("an hour at most"),
    })
}

impl Throttlecrab {
    fn charge(&self, limiter: &mut RateLimiter<PeriodicStore>, key: &str, now: SystemTime) -> bool {
        let answer = limiter.rate_limit(key, self.burst, 1, self.interval_seconds, 1, now);
        black_box(answer).is_ok_and(|(allowed, _)| allowed)
    }
}

impl Contestant for Throttlecrab {
    fn prepare(&self, keys: KeySet) {
        let mut limiter = self.limiter.lock();
        keys.for_each(|key| {
            charge_as_prepared(self.regime, || self.charge(&mut limiter, key, SystemTime::now()));
        });
        charge_as_prepared(self.regime, || self.charge(&mut limiter, SHARED_KEY, SystemTime::now()));
    }

    fn run_slice(&self, keys: &[String]) -> usize {
        let allowed = |key: &String| {
            let now = SystemTime::now();
            self.charge(&mut self.limiter.lock(), key, now)
        };
        keys.iter().filter(|key| allowed(key)).count()
    }

    fn run_pairs(&self, keys: &[String]) -> usize {
        let both = |key: &String| {
            let now = SystemTime::now();
            let mut limiter = self.limiter.lock();
            self.charge(&mut limiter, SHARED_KEY, now) && self.charge(&mut limiter, key, now)
        };
        keys.iter().filter(|key| both(key)).count()
    }
}
