//! Who takes part, and what each of them promises the harness.
//!
//! A contestant is one limiter set up the way its documentation shows, with one limit for all keys. Everything in it is its
//! own public API: no clock is shared, no key is hashed ahead, and the whole answer to every check goes through `black_box`.
//! How often and in which order they run is the harness's business.

mod governor;
mod ratelimit;
mod throttlecrab;
mod tollgate;

use std::num::NonZeroU32;
use std::time::Duration;

use crate::workload::KeySet;

/// The name of the contestant that all others are compared with.
pub(crate) const BASELINE: &str = "governor";

/// Our own name.
pub(crate) const OURSELVES: &str = "tollgate";

/// Ourselves with a coarse clock, and who has one as well.
pub(crate) const COARSE: &str = "tollgate-coarse";
pub(crate) const TUNED: &str = "governor-tuned";

/// The key of the limit that every caller shares in [`Call::Pair`].
const SHARED_KEY: &str = "all";

/// One limiter, shared by the threads that measure it.
pub(crate) trait Contestant: Sync {
    /// Inserts every key; in the denied regime, charges each until it is denied.
    fn prepare(&self, keys: KeySet);

    /// Checks each key once; returns how many were allowed.
    fn run_slice(&self, keys: &[String]) -> usize;

    /// The same in batches of [`BATCH`], for who has a call for it.
    fn run_batches(&self, keys: &[String]) -> usize {
        self.run_slice(keys)
    }

    /// Charges a limit shared by all and the key's own limit; returns how many passed both.
    fn run_pairs(&self, keys: &[String]) -> usize;
}

/// The keys in one call of [`Call::Many`].
pub(crate) const BATCH: usize = 16;

/// What is asked of a contestant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// One key, one limit.
    Check,
    /// Sixteen keys in one call, or sixteen single checks.
    Many,
    /// Two limits: one call that charges both or none, or two calls.
    Pair,
}

impl Call {
    /// The word in the name of a cell.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Call::Check => "check",
            Call::Many => "many16",
            Call::Pair => "pair",
        }
    }

    /// Runs the call over all keys; returns how many were allowed.
    pub(crate) fn run(self, contestant: &dyn Contestant, keys: &[String]) -> usize {
        match self {
            Call::Check => contestant.run_slice(keys),
            Call::Many => contestant.run_batches(keys),
            Call::Pair => contestant.run_pairs(keys),
        }
    }
}

/// Whether the limit lets everything through or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Regime {
    /// A bucket too deep to empty.
    Allow,
    /// A bucket that is empty for the next hour.
    Deny,
}

impl Regime {
    /// The word in the name of a cell.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Regime::Allow => "allow",
            Regime::Deny => "deny",
        }
    }

    /// One token comes back after this long. It is slow in both regimes, so that a key once charged stays charged for the
    /// whole run: a store that drops full buckets would otherwise be measured on inserting keys, not on finding them.
    const fn interval(self) -> Duration {
        match self {
            Regime::Allow => Duration::from_secs(180),
            Regime::Deny => Duration::from_secs(3600),
        }
    }

    /// The size of the bucket. Twenty million charges are several times what a run of nine rounds makes of one key, and 180 s
    /// for each of them still fit the 63 bits of nanoseconds that throttlecrab counts in. A run that empties it anyway warns.
    const fn burst(self) -> NonZeroU32 {
        match self {
            Regime::Allow => NonZeroU32::new(20_000_000).unwrap(),
            Regime::Deny => NonZeroU32::new(2).unwrap(),
        }
    }
}

/// A contestant that can be built, and the calls it takes part in.
pub(crate) struct Entrant {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) calls: &'static [Call],
    pub(crate) build: fn(Regime) -> Box<dyn Contestant>,
}

const ALL_CALLS: &[Call] = &[Call::Check, Call::Many, Call::Pair];

/// Everyone, in the order of the tables.
pub(crate) const ENTRANTS: &[Entrant] = &[
    Entrant {
        name: OURSELVES,
        about: "this repository, public API",
        calls: ALL_CALLS,
        build: tollgate::build,
    },
    Entrant {
        name: COARSE,
        about: "the same with its coarse clock of 1 ms",
        calls: ALL_CALLS,
        build: tollgate::build_coarse,
    },
    Entrant {
        name: "tollgate-metrics",
        about: "the same with metrics on, in the recorder of metrics-exporter-prometheus 0.18",
        calls: ALL_CALLS,
        build: tollgate::build_metered,
    },
    Entrant {
        name: BASELINE,
        about: "governor 0.10 as it comes: keyed DashMap, SipHash, its own clock; two calls for two limits, and a denial keeps the first",
        calls: ALL_CALLS,
        build: governor::build_as_it_comes,
    },
    Entrant {
        name: TUNED,
        about: "governor 0.10 with foldhash and its upkeep clock of 1 ms; of two limits a denial keeps the first",
        calls: ALL_CALLS,
        build: governor::build_tuned,
    },
    Entrant {
        name: "governor-direct",
        about: "governor 0.10 as it comes, with an unkeyed limiter for the shared limit; a denial keeps the first",
        calls: &[Call::Pair],
        build: governor::build_direct,
    },
    Entrant {
        name: "throttlecrab",
        about: "throttlecrab 0.4, PeriodicStore, behind a parking_lot mutex; of two limits a denial keeps the first",
        calls: ALL_CALLS,
        build: throttlecrab::build,
    },
    Entrant {
        name: "ratelimit",
        about: "ratelimit 2.0 in a DashMap with foldhash; of two limits a denial keeps the first",
        calls: ALL_CALLS,
        build: ratelimit::build,
    },
];

/// Charges a key as `prepare` promises. `charge` says whether it was allowed.
fn charge_as_prepared(regime: Regime, mut charge: impl FnMut() -> bool) {
    match regime {
        Regime::Allow => assert!(charge(), "the first charge of a deep bucket is allowed"),
        Regime::Deny => {
            let tries = regime.burst().get() + 1;
            assert!(
                (0..tries).any(|_| !charge()),
                "a bucket of {} is empty after {tries} charges",
                tries - 1
            );
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use parking_lot::{Mutex, MutexGuard};

    use super::*;

    static TURN: Mutex<()> = Mutex::new(());

    /// Held by tests that build contestants: the clock of the tuned governor is one thread of the process.
    pub(crate) fn turn() -> MutexGuard<'static, ()> {
        TURN.lock()
    }

    #[test]
    fn everyone_answers_as_the_regime_says() {
        let _turn = turn();
        let keys = KeySet { count: 1_024 };
        let mut asked = Vec::new();
        keys.for_each(|key| asked.push(key.clone()));
        for entrant in ENTRANTS {
            for (regime, wanted) in [(Regime::Allow, asked.len()), (Regime::Deny, 0)] {
                let contestant = (entrant.build)(regime);
                contestant.prepare(keys);
                for &call in entrant.calls {
                    assert_eq!(
                        call.run(&*contestant, &asked),
                        wanted,
                        "{} {regime:?} {call:?}",
                        entrant.name
                    );
                }
            }
        }
    }

    /// What is found here stands in `about`, beside the speed.
    #[test]
    fn in_a_race_everyone_admits_the_burst_and_no_more() {
        let _turn = turn();
        let (racers, asked) = (8, vec!["one".to_owned(); 50]);
        for entrant in ENTRANTS.iter().filter(|entrant| entrant.calls.contains(&Call::Check)) {
            let contestant = (entrant.build)(Regime::Deny);
            let admitted: usize = std::thread::scope(|scope| {
                let racer = |_| scope.spawn(|| contestant.run_slice(&asked));
                let all: Vec<_> = (0..racers).map(racer).collect();
                all.into_iter().map(|racer| racer.join().expect("no panic")).sum()
            });
            assert_eq!(admitted, Regime::Deny.burst().get() as usize, "{}", entrant.name);
        }
    }

    /// Charges of two limits that the second denies: whether the first keeps what it was charged.
    #[test]
    fn who_keeps_the_charge_of_one_limit_that_the_other_denies() {
        let _turn = turn();
        let (empty, full) = (["empty".to_owned()], ["full".to_owned()]);
        for entrant in ENTRANTS {
            let contestant = (entrant.build)(Regime::Deny);
            // Empties the key's own limit; the shared one is full.
            while contestant.run_slice(&empty) > 0 {}
            for _ in 0..5 {
                assert_eq!(contestant.run_pairs(&empty), 0, "{}", entrant.name);
            }
            let keeps_the_first = contestant.run_pairs(&full) == 0;
            assert_eq!(
                entrant.about.contains("a denial keeps the first"),
                keeps_the_first,
                "{}",
                entrant.name
            );
        }
    }
}
