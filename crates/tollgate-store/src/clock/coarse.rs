//! The coarse clock: one thread reads a clock every millisecond, and fast paths use the last reading, which costs one load.
//!
//! A reading may be a millisecond old, or older on a busy machine; it is never early and never goes back. A decision by a reading
//! is a decision as if the charge had come that much earlier. An admission then also fits the true time. A denial need not: a
//! caller that has waited for the returned time must be admitted. So a denial is final only if its wait is longer than the thread
//! can be late, [`MOST_LATE`]; all others are decided again with the exact clock. A wait that is computed from an old reading is
//! long enough, because the caller counts it from now.
//!
//! Only checks of token buckets in memory use readings (`Clock::recent`); windows, logs, leases, waiting and sweeping use the
//! exact clock. The thread ends with the last coarse clock of the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use tollgate_kernel::Micros;

use super::Clock;

/// How often the clock is read.
const EVERY: Duration = Duration::from_millis(1);

/// The thread is assumed to be less late than this: a denial with a longer wait is final.
pub(crate) const MOST_LATE: Micros = Micros::from_secs(10);

/// A clock and its last reading.
#[derive(Debug)]
pub(crate) struct CoarseClock {
    clock: Clock,
    latest_us: AtomicU64,
}

/// That of the process, while there is one.
static OF_PROCESS: Mutex<Weak<CoarseClock>> = Mutex::new(Weak::new());

impl CoarseClock {
    /// The system clock, read by a thread. `None` if the system can start no thread.
    pub(super) fn of_process() -> Option<Arc<CoarseClock>> {
        let mut of_process = OF_PROCESS.lock();
        if let Some(known) = of_process.upgrade() {
            return Some(known);
        }
        let coarse = CoarseClock::over(Clock::system());
        let read = Arc::downgrade(&coarse);
        let reader = thread::Builder::new().name("tollgate-clock".into()).spawn(move || {
            while let Some(coarse) = read.upgrade() {
                coarse.read();
                drop(coarse);
                thread::sleep(EVERY);
            }
        });
        reader.ok()?;
        *of_process = Arc::downgrade(&coarse);
        Some(coarse)
    }

    /// A clock that is read by hand.
    pub(super) fn over(clock: Clock) -> Arc<CoarseClock> {
        let latest_us = AtomicU64::new(clock.now().get());
        Arc::new(CoarseClock { clock, latest_us })
    }

    /// Reads the clock.
    pub(super) fn read(&self) {
        self.latest_us.fetch_max(self.clock.now().get(), Ordering::Relaxed);
    }

    /// The last reading.
    #[inline(always)]
    pub(super) fn latest(&self) -> Micros {
        Micros::new(self.latest_us.load(Ordering::Relaxed))
    }

    /// The clock that is read.
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;
    use tollgate_kernel::{Cost, Limit};

    use super::*;
    use crate::clock::Source;
    use crate::{ManualClock, MemoryCharge, MemoryOptions, MemoryStore, StoredLimit};

    impl Clock {
        fn over(coarse: Arc<CoarseClock>) -> Clock {
            Clock { source: Source::Coarse(coarse) }
        }
    }

    #[test]
    fn a_thread_reads_the_clock_for_as_long_as_it_is_wanted() {
        let clock = Clock::coarse();
        let other = Clock::coarse();
        let (start, began) = (clock.recent(), Instant::now());
        while clock.recent() == start {
            assert!(began.elapsed() < Duration::from_secs(60), "nobody reads the clock");
            let (recent, now) = (clock.recent(), clock.now());
            assert!(recent <= now, "early");
            thread::yield_now();
        }
        assert!(other.recent() > start, "there is one for all");
        let Source::Coarse(coarse) = &clock.source else { panic!("the system starts one thread") };
        let read = Arc::downgrade(coarse);
        drop((clock, other));
        while read.strong_count() > 0 {
            assert!(began.elapsed() < Duration::from_secs(60), "the thread goes on");
            thread::yield_now();
        }
    }

    /// What happens next.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// Time passes, in µs, and the thread does not run.
        Pass(u64),
        /// The thread reads the clock.
        Read,
        /// A charge of one of the limits, or of both.
        Charge(usize, u64),
        ChargeBoth(u64),
        /// Sixteen charges in one call.
        ChargeMany,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..2_000_u64).prop_map(Step::Pass),
            (0..3_000_000_u64).prop_map(Step::Pass),
            Just(Step::Read),
            (0..2_usize, 1..4_u64).prop_map(|(limit, cost)| Step::Charge(limit, cost)),
            (1..4_u64).prop_map(Step::ChargeBoth),
            Just(Step::ChargeMany),
        ];
        prop::collection::vec(step, 1..60)
    }

    proptest! {
        /// Every admission fits the true time. After the wait of a denial, by the true time, the charge fits, whether or not the
        /// thread has run, as long as it is less late than assumed.
        #[test]
        fn a_coarse_clock_is_never_early_and_its_waits_are_enough(steps in steps()) {
            let hands = ManualClock::at(Micros::from_secs(1_700_000_000));
            let coarse = CoarseClock::over(hands.clock());
            let clock = Clock::over(coarse.clone());
            let store = MemoryStore::new(MemoryOptions { clock: clock.clone(), sweep_every: None, ..Default::default() });
            let limits = [("a", "5/s", 5), ("b", "1/s", 3)].map(|(name, rate, burst)| {
                store.open(&StoredLimit::new(name, Limit::token_bucket(rate, burst).unwrap()))
            });
            // The admissions of each limit, as (true time, units).
            let mut admitted = [Vec::new(), Vec::new()];
            let cost = |units| Cost::new(units).unwrap();
            for step in steps {
                if hands.now().saturating_sub(clock.recent()) > Micros::from_secs(6) {
                    coarse.read();
                }
                let before = clock.recent();
                match step {
                    Step::Pass(us) => hands.advance(Micros::new(us)),
                    Step::Read => coarse.read(),
                    Step::Charge(index, units) => {
                        let outcome = charge(&limits[index], cost(units));
                        if outcome.allowed {
                            admitted[index].push((hands.now(), units));
                        } else if let Some(wait) = outcome.retry_after {
                            hands.advance(wait);
                            prop_assert!(charge(&limits[index], cost(units)).allowed, "{wait} was not enough");
                            admitted[index].push((hands.now(), units));
                        }
                    }
                    Step::ChargeBoth(units) => {
                        let both_charges = limits.each_ref().map(|limit| MemoryCharge {
                            limit, key: "k", cost: cost(units), shadow: false,
                        });
                        let both = || match store.charge_two_known(&both_charges[0], &both_charges[1]) {
                            Some(charged) => charged.map(|charged| charged.outcome()),
                            None => {
                                let charged = store.charge_all(&both_charges, None).unwrap();
                                [charged.outcomes[0], charged.outcomes[1]]
                            }
                        };
                        let mut outcomes = both();
                        if let [Some(one), Some(two)] = outcomes.map(|outcome| outcome.retry_after)
                            && outcomes.iter().any(|outcome| !outcome.allowed)
                        {
                            hands.advance(one.max(two));
                            outcomes = both();
                            prop_assert!(outcomes.iter().all(|outcome| outcome.allowed), "{one}, {two}");
                        }
                        if outcomes.iter().all(|outcome| outcome.allowed) {
                            admitted.iter_mut().for_each(|admitted| admitted.push((hands.now(), units)));
                        }
                    }
                    Step::ChargeMany => {
                        let mut outcomes = [tollgate_kernel::Outcome::BLOCKED; 16];
                        let slowly = |_, outcome: &mut _| *outcome = limits[0].charge("k", Cost::ONE);
                        limits[0].charge_known_many(&["k"; 16], Cost::ONE, &mut outcomes, |one| one, slowly);
                        let units = outcomes.iter().filter(|outcome| outcome.allowed).count() as u64;
                        admitted[0].push((hands.now(), units));
                        let wait = outcomes.last().and_then(|outcome| outcome.retry_after).unwrap();
                        hands.advance(wait);
                        prop_assert!(charge(&limits[0], Cost::ONE).allowed, "{wait} was not enough");
                        admitted[0].push((hands.now(), 1));
                    }
                }
                prop_assert!(clock.recent() <= hands.now(), "early");
                prop_assert!(clock.recent() >= before, "went back");
            }
            // From the start to any instant, never more than the burst and what was refilled by the true time.
            for (admitted, (per_second, burst)) in admitted.iter().zip([(5, 5), (1, 3)]) {
                let mut sum = 0;
                for (at, units) in admitted {
                    sum += units;
                    let passed = at.get() - 1_700_000_000_000_000;
                    prop_assert!(sum <= burst + per_second * passed / 1_000_000, "{sum} after {passed} us");
                }
            }
        }
    }

    /// By the fast path if the key is known.
    fn charge(limit: &crate::MemoryLimit, cost: Cost) -> tollgate_kernel::Outcome {
        let mut outcome = tollgate_kernel::Outcome::BLOCKED;
        if !limit.charge_known("k", cost, &mut outcome) {
            outcome = limit.charge("k", cost);
        }
        outcome
    }
}
