//! Tollgate, through the crate that people embed.
//!
//! The answer to a check is the whole outcome: allowed, capacity, what remains, when to retry and reset. Two limits are one
//! charge that takes both or none; sixteen keys are one call of `check_many`.

use std::hint::black_box;
use std::sync::Arc;

use ::tollgate::telemetry::Telemetry;
use ::tollgate::{Clock, Limit, Limiter, Outcome, Rate, TollgateBuilder};
use metrics_exporter_prometheus::PrometheusBuilder;

use super::{BATCH, Contestant, Regime, SHARED_KEY, charge_as_prepared};
use crate::workload::KeySet;

struct Tollgate {
    regime: Regime,
    user: Limiter,
    shared: Limiter,
}

pub(super) fn build(regime: Regime) -> Box<dyn Contestant> {
    build_from(::tollgate::Tollgate::builder(), regime)
}

/// By a reading of the clock that may be a millisecond old, as the tuned governor's is.
pub(super) fn build_coarse(regime: Regime) -> Box<dyn Contestant> {
    build_from(::tollgate::Tollgate::builder().clock(Clock::coarse()), regime)
}

/// With its metrics on, in the recorder that most services have.
pub(super) fn build_metered(regime: Regime) -> Box<dyn Contestant> {
    let recorder = Arc::new(PrometheusBuilder::new().build_recorder());
    let telemetry = Telemetry::new().metrics_to(recorder);
    build_from(::tollgate::Tollgate::builder().telemetry(telemetry), regime)
}

fn build_from(builder: TollgateBuilder, regime: Regime) -> Box<dyn Contestant> {
    let rate = Rate::new(1, regime.interval()).expect("a token every few minutes");
    let limit =
        Limit::token_bucket(rate, regime.burst().get().into()).expect("the regimes are within our bounds");
    let gate = builder.limit("shared", limit).limit("user", limit).build();
    let gate = gate.expect("two limits of different names");
    let limiter = |name| gate.local(name).expect("a limit of that name was just set");
    Box::new(Tollgate { regime, user: limiter("user"), shared: limiter("shared") })
}

impl Contestant for Tollgate {
    fn prepare(&self, keys: KeySet) {
        keys.for_each(|key| charge_as_prepared(self.regime, || self.user.check(key).is_allowed()));
        charge_as_prepared(self.regime, || self.shared.check(SHARED_KEY).is_allowed());
    }

    fn run_slice(&self, keys: &[String]) -> usize {
        keys.iter().filter(|key| black_box(&self.user.check(key.as_str())).is_allowed()).count()
    }

    fn run_batches(&self, keys: &[String]) -> usize {
        let mut outcomes: Vec<Outcome> = Vec::with_capacity(BATCH);
        let mut allowed = 0;
        for batch in keys.chunks(BATCH) {
            outcomes.clear();
            self.user.check_many(batch, &mut outcomes);
            allowed += black_box(&outcomes).iter().filter(|outcome| outcome.is_allowed()).count();
        }
        allowed
    }

    fn run_pairs(&self, keys: &[String]) -> usize {
        let both = |key: &String| {
            let decision = self.user.charge_all(&[self.shared.of(SHARED_KEY), self.user.of(key)]);
            black_box(&decision).as_ref().is_ok_and(|decision| decision.is_allowed())
        };
        keys.iter().filter(|key| both(key)).count()
    }
}
