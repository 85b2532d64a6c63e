//! Many callers, one fault after another, and the judge of histories afterwards. What the faults are is in `faults.rs` and
//! `faults_cluster.rs`.
//!
//! There are three kinds of limits. Under the *counted* ones nobody is ever refused, and what an admission is told to be in use
//! is the version of the key's state: one that is told twice, or never and unexplained, shows a call that was lost or done twice.
//! Under the *tight* ones most are refused, and the bound of the strategy is what counts. *Spread* ones are charged two keys at a
//! time, which on a cluster are on different servers, and must agree with what was acknowledged when all is quiet.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tollgate_store::{Limit, Micros, RedisStore, Store, StoredLimit};
use tollgate_testkit::Random;
use tollgate_testkit::history::{Bound, Call, Outcome, Promises, Recorder, Report, now_us};

use super::{HOUR, item, used};

/// The deadline of every call.
pub(crate) const DEADLINE: Duration = Duration::from_millis(100);

/// How many calls are under way at a time.
const CALLERS: u64 = 32;

/// What the machine's scheduler may add to a deadline while it runs servers, proxies and callers on few cores. A call that was hung would
/// take seconds, and nearly all must be back within 10 ms (`assert_clean`).
const SLACK_US: u64 = 1_000_000;

/// How long an ambiguous call may still take effect after its end: a connection may break at once, and the call carries its
/// deadline. The rest is for the two clocks.
const CLOSES_AFTER_US: u64 = 130_000;

/// So much that nobody is refused.
const PLENTY: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Counted,
    Tight,
    Spread,
}

struct Family {
    kind: Kind,
    limit: StoredLimit,
    bound: Bound,
    keys: Vec<String>,
    recorder: Recorder,
    /// When each key last got an answer.
    answered_us: Vec<AtomicU64>,
}

impl Family {
    fn new(kind: Kind, name: &str, limit: Limit, bound: Bound, keys: usize) -> Family {
        Family {
            kind,
            limit: StoredLimit::new(name, limit),
            bound,
            keys: (0..keys).map(|key| format!("{name} {key}")).collect(),
            recorder: Recorder::new(),
            answered_us: (0..keys).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

fn families(is_spread: bool) -> Vec<Family> {
    let sound = |limit: Result<Limit, _>| limit.unwrap_or_else(|error| panic!("{error}"));
    let (half, second) = (Micros::from_millis(500), Micros::from_secs(1));
    let hourly = "1/h";
    let fast = "400/s";
    let counted = Bound::FirstWindow { limit: PLENTY, window_us: HOUR.get() };
    let bucket = |burst, count, period: Micros| Bound::Bucket { burst, count, period_us: period.get() };
    let mut families = vec![
        Family::new(Kind::Counted, "counted-window", sound(Limit::fixed_window(PLENTY, HOUR)), counted, 6),
        Family::new(
            Kind::Counted,
            "counted-bucket",
            sound(Limit::token_bucket(hourly, PLENTY)),
            bucket(PLENTY, 1, HOUR),
            6,
        ),
        Family::new(
            Kind::Tight,
            "tight-window",
            sound(Limit::sliding_window(150, half)),
            Bound::Window { limit: 150, window_us: half.get() },
            3,
        ),
        Family::new(
            Kind::Tight,
            "tight-bucket",
            sound(Limit::token_bucket(fast, 50)),
            bucket(50, 400, second),
            3,
        ),
    ];
    if is_spread {
        let bound = Bound::FirstWindow { limit: PLENTY, window_us: HOUR.get() };
        families.push(Family::new(
            Kind::Spread,
            "spread",
            sound(Limit::fixed_window(PLENTY, HOUR)),
            bound,
            4,
        ));
    }
    families
}

/// The traffic of a test.
pub(crate) struct Traffic {
    store: RedisStore,
    families: Vec<Family>,
    answered: AtomicU64,
    stop: AtomicBool,
    /// How often each failure was seen, by its name.
    failures: Mutex<BTreeMap<String, u64>>,
    recoveries: Mutex<Vec<(String, Duration)>>,
}

impl Traffic {
    /// Makes calls while `faults` runs, and judges what came of them. State may have been lost `losses` times, no more. `aside`
    /// reaches the same state by a way that nothing is wrong with.
    pub(crate) async fn run(
        store: RedisStore,
        aside: &RedisStore,
        is_spread: bool,
        losses: u64,
        faults: impl AsyncFnOnce(&Traffic),
    ) -> Judged {
        let traffic = Arc::new(Traffic {
            store,
            families: families(is_spread),
            answered: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failures: Mutex::default(),
            recoveries: Mutex::default(),
        });
        let start = Instant::now();
        let callers: Vec<_> = (0..CALLERS)
            .map(|seed| {
                let traffic = traffic.clone();
                tokio::spawn(async move { traffic.call(seed).await })
            })
            .collect();
        traffic.recovered("the start", Duration::from_secs(5)).await;
        faults(&traffic).await;
        traffic.stop.store(true, Ordering::Relaxed);
        for caller in callers {
            caller.await.expect("a caller");
        }
        // What may still take effect has done so by then, and what is undone beside the calls is undone.
        tokio::time::sleep(Duration::from_millis(700)).await;
        let judged = traffic.judge(aside, losses).await;
        println!("{judged}{:?} in all", start.elapsed());
        judged
    }

    async fn call(&self, seed: u64) {
        let mut random = Random::seeded(seed);
        while !self.stop.load(Ordering::Relaxed) {
            let family =
                &self.families[usize::try_from(random.below(self.families.len() as u64)).unwrap_or(0)];
            let first = usize::try_from(random.below(family.keys.len() as u64)).unwrap_or(0);
            // Two of them, for charges that are spread.
            let both = [first, (first + 1) % family.keys.len()];
            let keys = if family.kind == Kind::Spread { &both[..] } else { &both[..1] };
            let items: Vec<_> = keys.iter().map(|key| item(&family.limit, &family.keys[*key])).collect();
            let start_us = now_us();
            let charged = self.store.charge(&items, None).await;
            let end_us = now_us();
            let (outcome, label) = match &charged {
                Ok(charged) if charged.allowed => (Outcome::Admitted, Cow::Borrowed("store")),
                Ok(_) => (Outcome::Denied, Cow::Borrowed("store")),
                Err(error) => {
                    let name = error.failure().map_or("invalid", |failure| failure.name());
                    *self.failures.lock().entry(name.to_owned()).or_default() += 1;
                    let ambiguous = error.is_ambiguous();
                    (
                        if ambiguous { Outcome::Ambiguous } else { Outcome::NotApplied },
                        Cow::Owned(name.to_owned()),
                    )
                }
            };
            for (index, key) in keys.iter().enumerate() {
                let is_versioned = family.kind == Kind::Counted && outcome == Outcome::Admitted;
                let version = charged.as_ref().ok().map(|charged| charged.outcomes[index].used());
                let version = version.filter(|_| is_versioned);
                let (key_number, label) = (*key as u64, label.clone());
                let call = Call {
                    key: key_number,
                    start_us,
                    end_us,
                    cost: 1,
                    outcome,
                    version,
                    store_time_us: None,
                    label,
                };
                family.recorder.record(call);
                if charged.is_ok() {
                    family.answered_us[*key].fetch_max(start_us, Ordering::Relaxed);
                }
            }
            if charged.is_ok() {
                self.answered.fetch_add(1, Ordering::Relaxed);
            } else {
                // Failures that come at once are not worth a storm of them.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    }

    /// One fault: it comes, lasts, and goes; the store recovers within `recovery`, and some healthy calls follow.
    pub(crate) async fn fault(
        &self,
        name: &str,
        lasts: Duration,
        recovery: Duration,
        come: impl AsyncFnOnce(),
        go: impl AsyncFnOnce(),
    ) {
        come().await;
        tokio::time::sleep(lasts).await;
        go().await;
        self.recovered(name, recovery).await;
    }

    /// Waits until a call for each key that began after this moment has been answered.
    async fn recovered(&self, after: &str, within: Duration) {
        let (start, start_us) = (Instant::now(), now_us());
        let families = || self.families.iter().flat_map(|family| &family.answered_us);
        while families().any(|answered| answered.load(Ordering::Relaxed) < start_us) {
            assert!(
                start.elapsed() < within,
                "no recovery from {after} in {within:?}: {:?}",
                self.failures.lock()
            );
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.recoveries.lock().push((after.to_owned(), start.elapsed()));
    }

    /// Lets so many calls pass with nothing wrong.
    pub(crate) async fn healthy(&self, calls: u64) {
        let (start, end) = (Instant::now(), self.answered.load(Ordering::Relaxed) + calls);
        while self.answered.load(Ordering::Relaxed) < end {
            assert!(start.elapsed() < Duration::from_secs(60), "{calls} calls take more than a minute");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// How often the store noticed that state may be lost.
    pub(crate) fn losses_noticed(&self) -> u64 {
        self.store.losses_possible()
    }

    async fn judge(&self, aside: &RedisStore, losses: u64) -> Judged {
        let mut reports = Vec::new();
        let mut took_us = Vec::new();
        for family in &self.families {
            let mut promises = Promises::of(family.bound)
                .losses(losses)
                .deadline(u64::try_from(DEADLINE.as_micros()).unwrap_or(0), SLACK_US)
                .ambiguous_close_after(CLOSES_AFTER_US);
            if family.kind != Kind::Tight {
                for (key, name) in family.keys.iter().enumerate() {
                    promises = promises.at_rest(key as u64, used(aside, &family.limit, name).await);
                }
            }
            let history = family.recorder.take();
            took_us.extend(history.calls().iter().map(|call| call.end_us.saturating_sub(call.start_us)));
            reports.push((family.limit.name.clone(), history.check(&promises)));
        }
        took_us.sort_unstable();
        let failures = self.failures.lock().clone();
        Judged { reports, took_us, failures, recoveries: self.recoveries.lock().clone() }
    }
}

/// What the judge says.
pub(crate) struct Judged {
    reports: Vec<(String, Report)>,
    took_us: Vec<u64>,
    failures: BTreeMap<String, u64>,
    recoveries: Vec<(String, Duration)>,
}

impl Judged {
    pub(crate) fn sum(&self, of: impl Fn(&Report) -> u64) -> u64 {
        self.reports.iter().map(|(_, report)| of(report)).sum()
    }

    /// All promises were kept, and nearly all calls were back in time.
    pub(crate) fn assert_clean(&self) {
        for (name, report) in &self.reports {
            assert!(report.is_clean(), "{name}: {report}");
        }
        let late = self.took_us.iter().filter(|took| **took > 110_000).count();
        assert!(
            late * 100 <= self.took_us.len(),
            "{late} of {} calls took more than 110 ms",
            self.took_us.len()
        );
    }

    /// Each of these was seen at least once; otherwise the test has not tried what it is there to try.
    pub(crate) fn assert_seen(&self, failures: &[&str]) {
        for failure in failures {
            assert!(self.failures.contains_key(*failure), "no {failure} was seen, only {:?}", self.failures);
        }
    }
}

impl std::fmt::Display for Judged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (name, report) in &self.reports {
            writeln!(f, "{name}: {report}\n")?;
        }
        let at = |per_mille: usize| self.took_us[(self.took_us.len() - 1) * per_mille / 1000];
        writeln!(
            f,
            "{} calls: median {} us, 99 % {} us, 99.9 % {} us, longest {} us",
            self.took_us.len(),
            at(500),
            at(990),
            at(999),
            at(1000)
        )?;
        writeln!(f, "failures {:?}", self.failures)?;
        for (after, took) in &self.recoveries {
            writeln!(f, "recovered from {after} in {took:?}")?;
        }
        Ok(())
    }
}
