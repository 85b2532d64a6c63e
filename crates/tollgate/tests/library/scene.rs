//! What the tests set up: a clock to move by hand, limits, and registries on that clock.

use std::time::Duration;
use tollgate::{Charge, Decision, Error, Limit, Limiter, ManualClock, Rule, Tollgate, TollgateBuilder};

use crate::crowd::ready;

/// A clock that stands in the year 2023.
pub(crate) fn hands() -> ManualClock {
    ManualClock::at(Duration::from_secs(1_700_000_000))
}

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) fn bucket(rate: &str, burst: u64) -> Limit {
    Limit::token_bucket(rate, burst).unwrap()
}

/// So many in a window of a minute that opens at the first charge.
pub(crate) fn a_minute(limit: u64) -> Limit {
    Limit::fixed_window(limit, secs(60)).unwrap()
}

/// So many at once, with leases of ten seconds.
pub(crate) fn at_once(limit: u64) -> Limit {
    Limit::concurrency(limit, secs(10)).unwrap()
}

/// Every strategy, each holding `capacity`.
pub(crate) fn every_strategy(capacity: u64) -> Vec<Limit> {
    let rate = "1/s";
    let window = secs(10);
    vec![
        Limit::token_bucket(rate, capacity).unwrap(),
        Limit::leaky_bucket(rate, capacity).unwrap(),
        Limit::fixed_window(capacity, window).unwrap(),
        Limit::clock_window(capacity, window).unwrap(),
        Limit::sliding_window(capacity, window).unwrap(),
        Limit::sliding_window_counter(capacity, window).unwrap(),
        Limit::concurrency(capacity, window).unwrap(),
    ]
}

/// Whether a fresh key under this limit has something to wait for: a window of the clock ends for all keys alike.
pub(crate) fn is_by_the_clock(limit: &Limit) -> bool {
    matches!(limit, Limit::FixedWindow(window) if window.align() == tollgate::store::Align::Clock)
}

/// An empty registry on a clock. Nothing happens in it by itself: no thread sweeps.
pub(crate) fn on(hands: &ManualClock) -> TollgateBuilder {
    Tollgate::builder().clock(hands.clock()).sweep_every(None)
}

/// A registry of these rules on a clock.
pub(crate) fn gate<const N: usize>(hands: &ManualClock, rules: [Rule; N]) -> Tollgate {
    rules.into_iter().fold(on(hands), TollgateBuilder::rule).build().unwrap()
}

/// A limiter of its own on a clock.
pub(crate) fn limiter(hands: &ManualClock, limit: Limit) -> Limiter {
    on(hands).limit("limit", limit).build().unwrap().local("limit").unwrap()
}

/// Numbers that look random and are the same in every run.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    /// A number from 0 to `sides`, not included.
    pub(crate) fn below(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap()]
    }
}

/// The only limit of a gate.
pub(crate) trait Only {
    fn only(&self) -> Limiter;
}

impl Only for Tollgate {
    fn only(&self) -> Limiter {
        self.local(self.policy().rules()[0].name()).unwrap()
    }
}

/// Puts these rules in the place of a gate's own.
pub(crate) fn reload<const N: usize>(gate: &Tollgate, rules: [Rule; N]) {
    gate.reload(tollgate::Policy::new(rules).unwrap()).unwrap();
}

/// One charge, for calls that outlive the line that makes them.
pub(crate) fn one(charge: Charge<'static>) -> &'static [Charge<'static>] {
    Box::leak(Box::new([charge]))
}

fn needs_permit(error: &Error) -> bool {
    error.to_string().contains("use acquire, or reserve")
}

/// Charges; under limits that give leases it reserves, for as long as those last.
pub(crate) fn charged(gate: &Tollgate, charges: &[Charge<'_>]) -> Decision {
    match ready(gate.charge(charges)) {
        Err(error) if needs_permit(&error) => match ready(gate.reserve(charges, Duration::ZERO)).unwrap() {
            Ok(reservation) => reservation.decision().clone(),
            Err(denied) => denied.into_decision(),
        },
        decision => decision.unwrap(),
    }
}

/// Waits, at most an hour; under limits that give leases it waits to reserve.
pub(crate) async fn waited(gate: &Tollgate, charge: Charge<'_>) -> Result<Decision, Error> {
    let (charges, hour) = ([charge], Duration::from_secs(3_600));
    match gate.wait(&charges, hour).await {
        Err(error) if needs_permit(&error) => {
            Ok(match gate.reserve_within(&charges, Duration::ZERO, hour).await? {
                Ok(reservation) => reservation.decision().clone(),
                Err(denied) => denied.into_decision(),
            })
        }
        decision => decision,
    }
}
