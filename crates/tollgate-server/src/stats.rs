//! What the page shows of decisions: how many a second under each limit, who is denied most, how long they take.
//!
//! An observer of the gate, so it sees every decision of every face and can change none. Admissions by counters in this
//! process reach it as numbers, 64 at a time, so that a check costs what it does without a page; a denial costs one hash of its key, one lock that few threads
//! share (`striped.rs`), a look through 64 numbers and no allocation. The current second is set once a second from outside ([`Stats::tick`]), not read from a
//! clock, after the gate was asked to hand over what it had counted. Everything is bounded: five minutes of seconds (`ring.rs`), an hour of
//! minutes and a day of quarters of an hour (`history.rs`), so many keys a limit
//! (`offenders.rs`), the last decisions about keys (`recent.rs`), a few histograms (`latency.rs`), what a row shows at a glance (`glance.rs`). The metrics are in the library, and are the ones to keep.

pub(crate) mod glance;
pub(crate) mod history;
pub(crate) mod latency;
pub(crate) mod namespaces;
pub(crate) mod offenders;
pub(crate) mod recent;
pub(crate) mod ring;
mod striped;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::{fast, quality};
use parking_lot::{Mutex, RwLock};
use tollgate::telemetry::Telemetry;
use tollgate::telemetry::{Admissions, Event, Observer};

use self::glance::Glance;
use self::history::History;
use self::latency::Latency;
use self::namespaces::{Namespaces, OfNamespace};
use self::offenders::{LastOutcome, Offender, Offenders, Who};
use self::recent::{Decisions, Retained};
use self::ring::{Counted, PLACES, Ring, SECONDS, Series};
use self::striped::Striped;

use crate::config::Config;

/// Keys longer than this are shown by their hash only.
const LONGEST_SHOWN: usize = 256;

/// What is counted of all limits.
pub(crate) struct Stats {
    /// The second that is being counted, since 1970.
    second: AtomicU64,
    started: u64,
    /// Locked after a table of `noted`, never before one.
    limits: RwLock<HashMap<Arc<str>, Arc<OfLimit>, fast::RandomState>>,
    latency: Mutex<Latency>,
    telemetry: Telemetry,
    /// Tells keys apart. Seeded at random: a caller that makes keys up would have to guess which of them are taken for one.
    hashes: quality::RandomState,
    noted: Striped<Noted>,
    settings: Settings,
}

/// How it is counted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Whether keys are shown as they are.
    pub(crate) shows_keys: bool,
}

impl Settings {
    /// As a config has it.
    pub(crate) fn of(config: &Config) -> Settings {
        Settings { shows_keys: config.server.show_keys }
    }
}

struct OfLimit {
    name: Arc<str>,
    ring: Ring,
    history: Mutex<History>,
    glance: Glance,
}

impl OfLimit {
    fn new(name: Arc<str>) -> OfLimit {
        OfLimit { name, ring: Ring::default(), history: Mutex::default(), glance: Glance::default() }
    }
}

/// What is noted of single decisions, by some of the threads.
#[derive(Default)]
struct Noted {
    limits: HashMap<Arc<str>, NotedOfLimit, fast::RandomState>,
    namespaces: Namespaces,
    decisions: Decisions,
}

struct NotedOfLimit {
    counts: Arc<OfLimit>,
    offenders: Offenders,
}

/// Delay in seconds before a second enters the history, so that late events are still counted.
const LATE: u64 = 2;

impl Stats {
    /// Keys are named by the hashes of `telemetry`, so that they are found again in its log.
    pub(crate) fn new(telemetry: Telemetry, settings: Settings, second: u64) -> Arc<Stats> {
        Arc::new(Stats {
            second: AtomicU64::new(second),
            started: second,
            limits: RwLock::default(),
            latency: Mutex::new(Latency::new(second)),
            telemetry,
            hashes: quality::RandomState::default(),
            noted: Striped::default(),
            settings,
        })
    }

    /// The second that is being counted.
    pub(crate) fn second(&self) -> u64 {
        self.second.load(Ordering::Relaxed)
    }

    pub(crate) fn shows_keys(&self) -> bool {
        self.settings.shows_keys
    }

    /// A new second begins. To be called by one at a time.
    pub(crate) fn tick(&self, second: u64) {
        let last = self.second();
        if second <= last {
            return;
        }
        let fresh = (last + 1).max(second.saturating_sub(PLACES - 1))..=second;
        {
            let limits = self.limits.read();
            for limit in limits.values() {
                let mut history = limit.history.lock();
                // Nothing was counted after `last`, however long that is ago.
                let ended = last.saturating_sub(LATE)..second.saturating_sub(LATE).min(last + 1);
                ended.for_each(|second| history.add(second, limit.ring.counts(second)));
                drop(history);
                fresh.clone().for_each(|second| limit.ring.clear(second));
            }
        }
        self.latency.lock().turn(second);
        self.second.store(second, Ordering::Relaxed);
        // A limit that a reload has taken away is forgotten once there is nothing to show of it.
        if last / SECONDS != second / SECONDS {
            // All tables are locked, so that none goes on with counts that are forgotten.
            let mut tables: Vec<_> = self.noted.each().collect();
            let mut limits = self.limits.write();
            limits.retain(|_, limit| limit.ring.is_in_use() || limit.history.lock().is_in_use(second));
            tables.iter_mut().for_each(|table| table.limits.retain(|name, _| limits.contains_key(name)));
        }
    }

    /// What was counted under a limit in the last seconds, at most so many, that of `second` not among them.
    pub(crate) fn series(&self, limit: &str, second: u64, count: u64) -> Series {
        match self.limits.read().get(limit) {
            Some(limit) => limit.ring.before(second, count),
            None => Series::zeros(count.min(SECONDS)),
        }
    }

    /// The minutes of the last hour of a limit, and the quarters of an hour of the last day.
    pub(crate) fn history(&self, limit: &str, second: u64) -> (Series, Series) {
        match self.limits.read().get(limit) {
            Some(limit) => {
                let history = limit.history.lock();
                (history.minutes(second), history.quarters(second))
            }
            None => (History::default().minutes(second), History::default().quarters(second)),
        }
    }

    /// What all limits decided a second, over the last few: allowed, denied, would have denied, fell back.
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    pub(crate) fn rates(&self, second: u64, count: u64) -> [f64; 4] {
        let limits = self.limits.read();
        let mut sums = [0; 4];
        for limit in limits.values() {
            for at in second.saturating_sub(count)..second {
                limit.ring.counts(at).iter().zip(&mut sums).for_each(|(one, sum)| *sum += one);
            }
        }
        sums.map(|sum| sum as f64 / count.max(1) as f64)
    }

    /// What each of the busiest limits decided a second, over the last few: allowed, denied, would have denied; at most so many.
    #[expect(clippy::cast_precision_loss, reason = "rates for people")]
    pub(crate) fn rates_by_limit(&self, second: u64, count: u64, most: usize) -> Vec<(String, [f64; 3])> {
        let limits = self.limits.read();
        let sums = limits.iter().map(|(name, limit)| {
            let mut sums = [0; 3];
            for at in second.saturating_sub(count)..second {
                limit.ring.counts(at).iter().zip(&mut sums).for_each(|(one, sum)| *sum += one);
            }
            (name, sums)
        });
        let mut busy: Vec<(&Arc<str>, [u64; 3])> =
            sums.filter(|(_, sums)| sums.iter().any(|&sum| sum > 0)).collect();
        busy.sort_by_key(|&(name, sums)| (std::cmp::Reverse(sums.iter().sum::<u64>()), name));
        busy.truncate(most);
        let rates = |sums: [u64; 3]| sums.map(|sum| sum as f64 / count.max(1) as f64);
        busy.into_iter().map(|(name, sums)| (name.to_string(), rates(sums))).collect()
    }

    /// Limits that were decided without the store in the last few seconds, by name, at most so many.
    pub(crate) fn falling_back(&self, second: u64, count: u64, most: usize) -> Vec<String> {
        let limits = self.limits.read();
        let falls = |limit: &OfLimit| {
            (second.saturating_sub(count)..second)
                .any(|at| limit.ring.counts(at)[Counted::FellBack as usize] > 0)
        };
        let mut names: Vec<String> =
            limits.iter().filter(|(_, limit)| falls(limit)).map(|(name, _)| name.to_string()).collect();
        names.sort();
        names.truncate(most);
        names
    }

    /// How full the fullest key of a limit was in the last minutes, from 0 to 1, and how long 99 of 100 of its decisions took at most, in
    /// nanoseconds; `None` where that is not known.
    pub(crate) fn glance(&self, limit: &str, second: u64) -> (Option<f64>, Option<u64>) {
        let limits = self.limits.read();
        let glance = limits.get(limit).map(|limit| &limit.glance);
        glance.map_or((None, None), |glance| (glance.fullest(second), glance.p99_ns(second)))
    }

    /// Whether anything was counted under a limit lately.
    pub(crate) fn is_in_use(&self, limit: &str) -> bool {
        self.limits.read().get(limit).is_some_and(|limit| limit.ring.is_in_use())
    }

    /// Who was denied most under a limit in the last minutes, at most so many.
    pub(crate) fn offenders(&self, limit: &str, count: usize) -> Vec<Offender> {
        let second = self.second();
        // Keys are hashed only when read: most are evicted before.
        let who = |key: &str| Who {
            hash: self.telemetry.key_hash(key),
            key: (self.settings.shows_keys && key.len() <= LONGEST_SHOWN).then(|| key.to_owned()),
        };
        let mut all = Vec::new();
        for mut table in self.noted.each() {
            if let Some(noted) = table.limits.get_mut(limit) {
                noted.offenders.add_to(&mut all, second, &who);
            }
        }
        offenders::most_denied(all, count)
    }

    /// The key of a hash, if it is among those that were denied most in the last minutes: only of these is the text kept.
    pub(crate) fn key_of(&self, hash: &str) -> Option<String> {
        let second = self.second();
        let mut all = HashSet::new();
        for table in self.noted.each() {
            table.limits.values().for_each(|noted| noted.offenders.add_keys_to(&mut all, second));
        }
        // Hashing is slow, and decisions wait for the tables: so not under their locks.
        all.into_iter().find(|key| self.telemetry.key_hash(key) == hash)
    }

    /// The hash under which the log has a key, by its canonical text.
    pub(crate) fn key_hash(&self, key: &str) -> String {
        self.telemetry.key_hash(key)
    }

    /// The last decisions about a key, by its canonical text, newest first.
    pub(crate) fn retained(&self, key: &str) -> Retained {
        let mark = self.hashes.hash_one(key);
        let (mut all, mut since_us) = (Vec::new(), self.started * 1_000_000);
        for table in self.noted.each() {
            table.decisions.add_to(&mut all, mark);
            since_us = since_us.max(table.decisions.complete_since(mark).unwrap_or(0));
        }
        Retained::newest(all, since_us)
    }

    /// Counts these namespaces by name from now on.
    pub(crate) fn show_namespaces<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let names: Vec<String> = names.map(str::to_owned).collect();
        self.noted.each().for_each(|mut table| table.namespaces.show(&names));
    }

    /// What was decided for keys of each namespace in the last minutes.
    pub(crate) fn namespaces(&self, second: u64) -> Vec<OfNamespace> {
        let mut sums = BTreeMap::new();
        self.noted.each().for_each(|table| table.namespaces.add_to(&mut sums, second));
        namespaces::most_denied(sums)
    }

    /// How long decisions took, over time.
    pub(crate) fn latency_over_time(&self) -> latency::OverTime {
        self.latency.lock().over_time()
    }

    /// How long decisions took in the last minutes.
    pub(crate) fn latency(&self) -> Option<latency::Percentiles> {
        self.latency.lock().percentiles()
    }

    /// What is counted of a limit, which is made if there is none.
    fn limit(&self, name: &str) -> Arc<OfLimit> {
        if let Some(limit) = self.limits.read().get(name) {
            return limit.clone();
        }
        let name: Arc<str> = name.into();
        let mut limits = self.limits.write();
        limits.entry(name.clone()).or_insert_with(|| Arc::new(OfLimit::new(name))).clone()
    }

    /// Does something with what is counted of a limit, which is made if there is none.
    fn with_limit(&self, name: &str, work: impl FnOnce(&OfLimit)) {
        if let Some(limit) = self.limits.read().get(name) {
            return work(limit);
        }
        work(&self.limit(name));
    }
}

impl Noted {
    /// Notes a decision, in the table of this thread.
    fn decided(&mut self, stats: &Stats, event: &Event<'_>) {
        let second = stats.second();
        let numbers = event.outcome.numbers();
        let counted = Counted::of(numbers.allowed, event.allowed);
        let noted = match self.limits.get_mut(event.limiter) {
            Some(noted) => noted,
            None => {
                let counts = stats.limit(event.limiter);
                let name = counts.name.clone();
                self.limits.entry(name).or_insert(NotedOfLimit { counts, offenders: Offenders::default() })
            }
        };
        let limit = &*noted.counts;
        limit.ring.count(second, counted);
        limit.glance.note(second, numbers.remaining, numbers.capacity, !numbers.allowed);
        if !event.duration.is_zero() {
            limit.glance.record(second, event.duration);
        }
        if event.source.is_fallback() {
            limit.ring.count(second, Counted::FellBack);
        }
        self.namespaces.add(event.namespace, second, counted, 1);
        let Some(key) = event.key.reveal() else { return };
        let mark = stats.hashes.hash_one(key);
        if counted == Counted::Allowed {
            self.decisions.note(mark, &limit.name, event);
            return;
        }
        let standing = LastOutcome {
            capacity: event.outcome.capacity(),
            remaining: event.outcome.remaining(),
            reset_after: numbers.reset_after,
            second,
        };
        let rows = noted.offenders.note(mark, key, standing);
        self.decisions.note_denial(mark, &limit.name, event, second, rows);
    }
}

impl Observer for Stats {
    fn decided(&self, event: &Event<'_>) {
        if event.operation == "peek" {
            return;
        }
        self.noted.own().decided(self, event);
        if !event.duration.is_zero() {
            self.latency.lock().record(event.duration);
        }
    }

    fn takes_counts(&self) -> bool {
        true
    }

    fn admitted(&self, admissions: &Admissions<'_>) {
        if admissions.count > 0 {
            let second = self.second();
            self.with_limit(admissions.limiter, |limit| {
                limit.ring.add(second, Counted::Allowed, admissions.count);
            });
            let count = admissions.count;
            self.noted.own().namespaces.add(admissions.namespace, second, Counted::Allowed, count);
        }
        if let Some(took) = admissions.duration {
            let second = self.second();
            self.with_limit(admissions.limiter, |limit| limit.glance.record(second, took));
            self.latency.lock().record(took);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tollgate::store::Micros;
    use tollgate::{Charge, Limit, Rule, Tollgate};

    use super::*;
    use crate::app::tests::ready;

    const START: u64 = 1_700_000_000;

    fn watched(shows_keys: bool) -> (Tollgate, Arc<Stats>) {
        let telemetry = Telemetry::new().salt("pepper");
        let stats = Stats::new(telemetry, Settings { shows_keys }, START);
        let limit = |count| Limit::fixed_window(count, Micros::from_secs(3_600)).expect("a limit");
        let gate = Tollgate::builder()
            .limit("api", limit(2))
            .rule(Rule::new("watching", limit(1)).expect("a rule").shadow())
            .observer(stats.clone())
            .build();
        (gate.expect("a gate"), stats)
    }

    fn ask(gate: &Tollgate, limit: &str, key: &str, times: usize) {
        for _ in 0..times {
            let _ = ready(gate.check(limit, key)).expect("a decision");
        }
    }

    #[test]
    fn each_second_of_each_limit_is_counted_by_outcome() {
        let (gate, stats) = watched(false);
        ask(&gate, "api", "user:1", 5);
        ask(&gate, "watching", "user:1", 3);
        stats.tick(START + 1);
        ask(&gate, "api", "user:2", 1);
        let _ = ready(gate.peek(&[Charge::new("api", "user:2")])).expect("a look");
        // A second that has not ended is not shown: it would look like a dip.
        let seen = |limit: &str, second| {
            let series = stats.series(limit, second, 2);
            [series.allowed, series.denied, series.would_deny]
        };
        assert_eq!(seen("api", START + 1), [vec![0, 2], vec![0, 3], vec![0, 0]]);
        stats.tick(START + 2);
        assert_eq!(seen("api", START + 2), [vec![2, 1], vec![3, 0], vec![0, 0]]);
        assert_eq!(seen("watching", START + 2), [vec![1, 0], vec![0, 0], vec![2, 0]]);
        let busiest = |most| stats.rates_by_limit(START + 2, 2, most);
        let [api, watching] = [("api", [1.5, 1.5, 0.0]), ("watching", [0.5, 0.0, 1.0])];
        let named = |(name, rates): (&str, [f64; 3])| (name.to_owned(), rates);
        assert_eq!(busiest(9), [named(api), named(watching)]);
        assert_eq!(busiest(1), [named(api)]);
        assert_eq!(seen("nobody", START + 2), [vec![0, 0], vec![0, 0], vec![0, 0]]);
    }

    /// As the server runs it: metrics are on, so admissions come as numbers, by whichever road they were made.
    #[test]
    fn admissions_that_come_as_numbers_are_counted_in_their_second() {
        let recorder = Arc::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder());
        let telemetry = Telemetry::new().metrics_to(recorder).namespaces(["user"]);
        let stats = Stats::new(telemetry.clone(), Settings { shows_keys: false }, START);
        stats.show_namespaces(["user"].into_iter());
        let limit = Limit::token_bucket("1/h", 150).expect("a bucket");
        let gate = Tollgate::builder().limit("api", limit).telemetry(telemetry).observer(stats.clone());
        let gate = gate.build().expect("a gate");
        let api = gate.local("api").expect("a limit");
        for _ in 0..100 {
            let _ = api.check("user:1");
            let _ = ready(gate.check("api", "user:1")).expect("a decision");
        }
        gate.hand_over_counts();
        stats.tick(START + 1);
        let series = stats.series("api", START + 1, 1);
        assert_eq!((series.allowed, series.denied), (vec![150], vec![50]));
        let user = &stats.namespaces(START + 1)[0];
        assert_eq!((&*user.namespace, user.allowed, user.denied), ("user", 150, 50));
        assert_eq!(stats.offenders("api", 1)[0].denials, 50);
        assert!(stats.latency().is_some(), "one in 64 was timed");
    }

    #[test]
    fn what_is_older_than_five_minutes_is_gone_however_the_seconds_went_by() {
        for step in [1, 7, 299, 300, 301, 100_000] {
            let (gate, stats) = watched(false);
            ask(&gate, "api", "user:1", 2);
            let mut second = START;
            while second < START + 2 * SECONDS {
                second += step;
                stats.tick(second);
            }
            stats.tick(START);
            assert_eq!(stats.second(), second, "time does not go back");
            let series = stats.series("api", second, SECONDS);
            assert_eq!(series.allowed.iter().sum::<u64>(), 0, "steps of {step}");
            assert_eq!(series.allowed.len(), 300);
            for hours in [1, 25] {
                stats.tick(second + hours * 3_600);
            }
            assert!(stats.limits.read().is_empty(), "steps of {step}: what is idle for a day is not kept");
        }
    }

    #[test]
    fn who_is_denied_is_shown_by_hash_unless_keys_are_to_be_shown() {
        for shows_keys in [false, true] {
            let (gate, stats) = watched(shows_keys);
            ask(&gate, "api", "user:alice", 6);
            ask(&gate, "api", "user:bob", 3);
            ask(&gate, "api", "", 3);
            let top = stats.offenders("api", 10);
            let hash = Telemetry::new().salt("pepper").key_hash("user:alice");
            assert_eq!(top.iter().map(|one| one.denials).collect::<Vec<_>>(), [4, 1]);
            assert_eq!((&top[0].who.hash, top[0].standing.capacity), (&hash, 2));
            assert_eq!(top[0].who.key.as_deref(), shows_keys.then_some("user:alice"));
            assert_eq!(stats.offenders("api", 1).len(), 1);
            assert_eq!(stats.key_of(&hash).as_deref(), Some("user:alice"), "for admins, whatever others see");
            assert_eq!(stats.key_of(&Telemetry::new().salt("pepper").key_hash("user:carol")), None);
            assert!(stats.offenders("nobody", 1).is_empty());
        }
        let (gate, stats) = watched(true);
        let long = "k".repeat(LONGEST_SHOWN + 1);
        ask(&gate, "api", &long, 3);
        assert_eq!(stats.offenders("api", 1)[0].who.key, None, "a long key is shown by its hash");
    }

    #[test]
    fn decisions_are_timed_now_and_then() {
        let (gate, stats) = watched(false);
        assert!(stats.latency().is_none());
        ask(&gate, "api", "user:1", 640);
        let percentiles = stats.latency().expect("some were timed");
        assert_eq!(percentiles.samples, 10);
        assert!(percentiles.p50 <= percentiles.p99 && percentiles.p99 < Duration::from_secs(60));
    }
}
