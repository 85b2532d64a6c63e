//! governor: GCRA on an `AtomicU64` per key, in a DashMap. As it comes, and as its own options let it be tuned.
//!
//! The answer is `Ok(())` or a `NotUntil` that can tell when to come back; it does not tell what remains. Two limits are two
//! calls: nothing is given back when the second denies. A limit shared by all callers is one key of a second keyed limiter,
//! as in the other contestants; `build_direct` uses governor's unkeyed limiter there, which is cheaper but is no answer when
//! the shared limit itself has a key (a tenant, a route).

use std::hash::BuildHasher;
use std::hint::black_box;
use std::time::Duration;

use ::governor::clock::{Clock, DefaultClock, QuantaInstant, QuantaUpkeepClock};
use ::governor::state::keyed::DashMapStateStore;
use ::governor::{DefaultDirectRateLimiter, DefaultKeyedRateLimiter, Quota, RateLimiter};

use super::{Contestant, Regime, SHARED_KEY, charge_as_prepared};
use crate::workload::KeySet;

/// How old the tuned governor's time may be.
const UPKEEP_INTERVAL: Duration = Duration::from_millis(1);

type Keyed<S, C> = RateLimiter<String, DashMapStateStore<String, S>, C>;

struct Governor<S: BuildHasher + Clone, C: Clock<Instant = QuantaInstant>> {
    regime: Regime,
    user: Keyed<S, C>,
    shared: Keyed<S, C>,
    shared_key: String,
}

struct GovernorDirect {
    regime: Regime,
    user: DefaultKeyedRateLimiter<String>,
    shared: DefaultDirectRateLimiter,
}

pub(super) fn build_as_it_comes(regime: Regime) -> Box<dyn Contestant> {
    Box::new(Governor::<_, DefaultClock> {
        regime,
        user: RateLimiter::keyed(quota(regime)),
        shared: RateLimiter::keyed(quota(regime)),
        shared_key: SHARED_KEY.to_string(),
    })
}

pub(super) fn build_tuned(regime: Regime) -> Box<dyn Contestant> {
    let clock = QuantaUpkeepClock::from_interval(UPKEEP_INTERVAL).expect("one upkeep thread at a time");
    let tuned = |clock| {
        let hasher = foldhash::fast::RandomState::default();
        RateLimiter::dashmap_with_clock_and_hasher(quota(regime), clock, hasher)
    };
    Box::new(Governor {
        regime,
        user: tuned(clock.clone()),
        shared: tuned(clock),
        shared_key: SHARED_KEY.to_string(),
    })
}

pub(super) fn build_direct(regime: Regime) -> Box<dyn Contestant> {
    Box::new(GovernorDirect {
        regime,
        user: RateLimiter::keyed(quota(regime)),
        shared: RateLimiter::direct(quota(regime)),
    })
}

fn quota(regime: Regime) -> Quota {
    Quota::with_period(regime.interval()).expect("the interval is not zero").allow_burst(regime.burst())
}

impl<S, C> Contestant for Governor<S, C>
where
    S: BuildHasher + Clone + Send + Sync,
    C: Clock<Instant = QuantaInstant> + Sync,
{
    fn prepare(&self, keys: KeySet) {
        keys.for_each(|key| charge_as_prepared(self.regime, || self.user.check_key(key).is_ok()));
        charge_as_prepared(self.regime, || self.shared.check_key(&self.shared_key).is_ok());
    }

    fn run_slice(&self, keys: &[String]) -> usize {
        keys.iter().filter(|key| black_box(self.user.check_key(key)).is_ok()).count()
    }

    fn run_pairs(&self, keys: &[String]) -> usize {
        let both = |key| {
            black_box(self.shared.check_key(&self.shared_key)).is_ok()
                && black_box(self.user.check_key(key)).is_ok()
        };
        keys.iter().filter(|key| both(key)).count()
    }
}

impl Contestant for GovernorDirect {
    fn prepare(&self, keys: KeySet) {
        keys.for_each(|key| charge_as_prepared(self.regime, || self.user.check_key(key).is_ok()));
        charge_as_prepared(self.regime, || self.shared.check().is_ok());
    }

    fn run_slice(&self, keys: &[String]) -> usize {
        keys.iter().filter(|key| black_box(self.user.check_key(key)).is_ok()).count()
    }

    fn run_pairs(&self, keys: &[String]) -> usize {
        let both =
            |key| black_box(self.shared.check()).is_ok() && black_box(self.user.check_key(key)).is_ok();
        keys.iter().filter(|key| both(key)).count()
    }
}
