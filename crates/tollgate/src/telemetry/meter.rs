//! Counts decisions: the counters of one limit, found without hashing and without allocating.
//!
//! A limit has counters for the first sixteen declared namespaces of its keys, in the order of their first use. A key's text is
//! compared with each in turn, and nearly always the first one matches. All other namespaces are counted as `other`, so a client
//! that can invent namespaces cannot create series, not even after a reload (`namespaces.rs`). Malformed keys are counted under
//! `none`. A counter is created at its first count.
//!
//! Decisions on the fast path are summed in stripes, one for each thread, and handed to the counter in batches of 64: see
//! `stripes.rs`. On local counters one decision in 64 is timed, because reading the clock twice costs as much as deciding.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::{Counter, Histogram, Label};
use tollgate_kernel::Strategy;
use tollgate_store::Failure;

use super::metrics::{DECISIONS, FALLBACKS, LATENCY, OPERATIONS, Sink};
use super::namespaces::{DEFAULT, LimitNamespaces, NAMESPACES};
use super::recorder::DecisionMeter;
use super::stripes::Stripes;
use super::watch::Watch;
use super::{
    Admissions, LimitReport, Observers, Operation, OperationOutcome, OutcomeKind, Source, strategy_name,
};
use crate::key::Key;
use crate::outcome::Fallback;

/// Longer namespaces are `other`: a label is no place for a kilobyte.
const LONGEST: usize = 64;

/// One decision in so many is timed where the store is in this process.
const TIMED: u32 = 64;

/// The operations on a key. Those on a charge are counted without a limit: `store_meter.rs`.
const OPERATED: [&str; 2] = ["reset", "refund"];

/// Whether this is the decision in 64 that is timed. The first of a thread is.
#[inline]
pub(crate) fn is_sampled() -> bool {
    thread_local! {
        static COUNT: Cell<u32> = const { Cell::new(0) };
    }
    COUNT.with(|count| {
        let before = count.get();
        count.set(before.wrapping_add(1));
        before % TIMED == 0
    })
}

/// The counters of one limit, if metrics are on. Clones share them.
#[derive(Clone)]
pub(crate) struct Meter(Option<Arc<Counts>>);

struct Counts {
    base: ByNamespace,
    /// The counters of overrides with another strategy than the limit's.
    others: Vec<ByNamespace>,
}

struct ByNamespace {
    strategy: Option<Strategy>,
    source: SeriesSource,
    /// The namespaces with series; those of an earlier engine are kept.
    seen: Arc<LimitNamespaces>,
    known: [OnceLock<Named>; NAMESPACES],
    other: OnceLock<Series>,
    none: OnceLock<Series>,
    /// A namespace that was not declared, and how many were when that was found: most keys of a limit are of one namespace.
    undeclared: OnceLock<(Box<str>, usize)>,
}

/// The labels that all series of a limit share.
#[derive(Clone)]
struct SeriesSource {
    sink: Sink,
    labels: [Label; 3],
    /// Whether the limit is in shadow mode.
    is_shadow: bool,
    /// Observers that accept counts, if there are any.
    observers: Option<Arc<Observers>>,
}

/// A namespace, as the text of its keys begins, and its series. Boxed, so that looking through all names touches little.
struct Named {
    name: Box<str>,
    is_default: bool,
    series: Box<Series>,
}

/// The series of one limit, strategy and namespace.
struct Series {
    source: SeriesSource,
    namespace: Label,
    /// Outcomes on the fast path that are not in `decisions` yet.
    count_fast_path: Stripes,
    decisions: [[OnceLock<Counter>; Source::ALL.len()]; OutcomeKind::ALL.len()],
    fallbacks: [[[OnceLock<Counter>; OutcomeKind::ALL.len()]; Failure::ALL.len()]; Fallback::ALL.len()],
    operations: [[OnceLock<Counter>; OperationOutcome::ALL.len()]; OPERATED.len()],
    latency: OnceLock<Histogram>,
}

impl Meter {
    /// Of a limit that is known by this name and counts in these strategies, its own first.
    pub(super) fn new(
        watch: &Watch,
        observers: &Arc<Observers>,
        limiter: &str,
        strategies: impl IntoIterator<Item = Option<Strategy>>,
        is_shadow: bool,
    ) -> Meter {
        let Some(sink) = watch.sink() else { return Meter(None) };
        let seen = watch.namespaces().of(limiter);
        let table = |strategy: Option<Strategy>| {
            let labels = [
                Label::new("limiter", limiter.to_owned()),
                Label::from_static_parts("strategy", strategy_name(strategy)),
                Label::from_static_parts("storage_mode", watch.mode()),
            ];
            let observers = Some(observers).filter(|observers| observers.take_counts()).cloned();
            ByNamespace::new(
                strategy,
                seen.clone(),
                SeriesSource { sink: sink.clone(), labels, is_shadow, observers },
            )
        };
        let mut strategies = strategies.into_iter();
        let base = table(strategies.next().flatten());
        let mut others: Vec<ByNamespace> = Vec::new();
        for strategy in strategies {
            if strategy != base.strategy && others.iter().all(|other| other.strategy != strategy) {
                others.push(table(strategy));
            }
        }
        Meter(Some(Arc::new(Counts { base, others })))
    }
}

impl DecisionMeter for Meter {
    fn counts(&self, strategies: &[Option<Strategy>], is_shadow: bool) -> bool {
        let Some(counts) = &self.0 else { return true };
        let is_known = |strategy: &Option<Strategy>| {
            counts.base.strategy == *strategy || counts.others.iter().any(|other| other.strategy == *strategy)
        };
        counts.base.source.is_shadow == is_shadow
            && strategies.first() == Some(&counts.base.strategy)
            && strategies.iter().all(is_known)
    }

    fn is_on(&self) -> bool {
        self.0.is_some()
    }

    #[inline]
    fn count_fast_path(&self, key: &str, allowed: bool, took: Option<Duration>) {
        let Some(counts) = &self.0 else { return };
        let series = counts.base.series(key);
        series.add_fast_path(allowed, 1);
        if let Some(took) = took {
            series.time(took);
            if allowed {
                series.report_admissions(0, Some(took));
            }
        }
    }

    fn count_fast_path_many<'k>(
        &self,
        answers: impl Iterator<Item = (&'k str, bool)>,
        took: Option<Duration>,
    ) {
        let Some(counts) = &self.0 else { return };
        let mut run: Option<(&Series, [u64; 2])> = None;
        let count = |(series, [denied, allowed]): (&Series, [u64; 2])| {
            for (is_allowed, count) in [(false, denied), (true, allowed)] {
                if count > 0 {
                    series.add_fast_path(is_allowed, count);
                }
            }
        };
        for (key, allowed) in answers {
            let series = counts.base.series(key);
            match &mut run {
                Some((of, sums)) if std::ptr::eq(*of, series) => sums[usize::from(allowed)] += 1,
                _ => {
                    run.take().into_iter().for_each(count);
                    let mut sums = [0; 2];
                    sums[usize::from(allowed)] = 1;
                    run = Some((series, sums));
                }
            }
        }
        if let (Some((series, _)), Some(took)) = (&run, took) {
            series.time(took);
        }
        run.into_iter().for_each(count);
    }

    fn publish(&self) {
        let Some(counts) = &self.0 else { return };
        let known = counts.base.known.iter().filter_map(|slot| slot.get().map(|named| &*named.series));
        known.chain(counts.base.other.get()).for_each(Series::hand_over);
    }

    fn decided(&self, report: &LimitReport<'_>) {
        let Some(counts) = &self.0 else { return };
        let series = counts.series(report.strategy, report.key);
        series.count(report.kind, report.source, 1);
        let fallback = match report.source {
            Source::FallbackOpen => Some(Fallback::Open),
            Source::FallbackClosed => Some(Fallback::Closed),
            Source::FallbackLocal => Some(Fallback::Local),
            _ => None,
        };
        if let (Some(fallback), Some(failure)) = (fallback, report.failure) {
            series.fell_back(fallback, failure, report.kind);
        }
        if let Some(took) = report.took {
            series.time(took);
        }
    }

    fn count_operation(&self, operation: &Operation<'_>) {
        let Some(counts) = &self.0 else { return };
        counts
            .series(operation.strategy, operation.key.reveal())
            .operated(operation.operation, operation.outcome);
    }
}

impl Counts {
    /// The series of a key that is counted in this strategy; `None` is a malformed key.
    fn series(&self, strategy: Option<Strategy>, key: Option<&str>) -> &Series {
        let is_same = |table: &&ByNamespace| table.strategy == strategy;
        let table = self.others.iter().find(is_same).unwrap_or(&self.base);
        match key {
            Some(key) => table.series(key),
            None => table.none.get_or_init(|| table.source.series("none")),
        }
    }
}

impl ByNamespace {
    fn new(strategy: Option<Strategy>, seen: Arc<LimitNamespaces>, source: SeriesSource) -> ByNamespace {
        let known = [const { OnceLock::new() }; NAMESPACES];
        let (other, none, undeclared) = Default::default();
        ByNamespace { strategy, source, seen, known, other, none, undeclared }
    }

    /// The series of a key, by its canonical text.
    #[inline]
    fn series(&self, key: &str) -> &Series {
        match self.known[0].get() {
            Some(named) if named.is_of(key.as_bytes()) => &named.series,
            None if self.is_undeclared(key.as_bytes()) => self.other(),
            _ => self.series_of_another(key),
        }
    }

    /// Whether a key is of the namespace that was found undeclared first, and none was declared since.
    #[inline]
    fn is_undeclared(&self, key: &[u8]) -> bool {
        let Some((name, declared)) = self.undeclared.get() else { return false };
        key.get(name.len()) == Some(&b':')
            && key[..name.len()] == *name.as_bytes()
            && *declared == self.seen.declared()
    }

    fn series_of_another(&self, key: &str) -> &Series {
        for slot in &self.known {
            match slot.get() {
                Some(named) if named.is_of(key.as_bytes()) => return &named.series,
                Some(_) => {}
                None => return self.newcomer(key),
            }
        }
        self.other()
    }

    fn other(&self) -> &Series {
        self.other.get_or_init(|| self.source.series("other"))
    }

    /// Gives a new namespace its own series, if it is declared and there is room.
    #[cold]
    fn newcomer(&self, key: &str) -> &Series {
        let name = key.split_once(':').map_or(DEFAULT, |(name, _)| name);
        // Read before the lookup, so that a later declaration causes another lookup.
        let declared = self.seen.declared();
        if name.len() > LONGEST || !self.seen.takes_in(name) {
            if name.len() <= LONGEST && key.contains(':') {
                self.undeclared.get_or_init(|| (name.into(), declared));
            }
            return self.other();
        }
        let make = || {
            let label =
                Key::parse(key).map_or_else(|_| "none".to_owned(), |key| key.namespace().into_owned());
            let series = Box::new(self.source.series(label));
            Named { name: name.into(), is_default: name == DEFAULT, series }
        };
        // Another may take a place at the same moment, for this namespace or for another.
        let own = self.known.iter().map(|slot| slot.get_or_init(make)).find(|named| *named.name == *name);
        own.map_or_else(|| self.other(), |named| &named.series)
    }
}

impl Named {
    /// Whether the text of a key starts with this namespace. The end is compared first: names of one program often start alike.
    #[inline]
    fn is_of(&self, key: &[u8]) -> bool {
        let (name, size) = (self.name.as_bytes(), self.name.len());
        let begins = key.get(size) == Some(&b':') && key[size - 1] == name[size - 1] && key[..size] == *name;
        begins || (self.is_default && !key.contains(&b':'))
    }
}

impl SeriesSource {
    fn series(&self, namespace: impl Into<metrics::SharedString>) -> Series {
        Series {
            source: self.clone(),
            namespace: Label::new("namespace", namespace),
            count_fast_path: Stripes::new(),
            decisions: Default::default(),
            fallbacks: Default::default(),
            operations: Default::default(),
            latency: OnceLock::new(),
        }
    }
}

impl Series {
    fn labels(&self, own: &[(&'static str, &'static str)]) -> Vec<Label> {
        let own = own.iter().map(|(name, value)| Label::from_static_parts(name, value));
        own.chain(self.source.labels.iter().cloned()).chain([self.namespace.clone()]).collect()
    }

    /// Counters in this process answered.
    #[inline]
    fn add_fast_path(&self, allowed: bool, count: u64) {
        self.count_fast_path.add(usize::from(allowed), count, |count| self.added_fast_path(allowed, count));
    }

    fn report_admissions(&self, count: u64, duration: Option<Duration>) {
        if let Some(observers) = &self.source.observers {
            let (limiter, namespace) = (self.source.labels[0].value(), self.namespace.value());
            observers.admitted(&Admissions { limiter, namespace, count, duration });
        }
    }

    #[cold]
    fn added_fast_path(&self, allowed: bool, count: u64) {
        self.count(OutcomeKind::of(allowed, false), Source::Store, count);
        if allowed {
            self.report_admissions(count, None);
        }
    }

    fn hand_over(&self) {
        for allowed in [false, true] {
            let count = self.count_fast_path.hand_over(usize::from(allowed));
            if count > 0 {
                self.added_fast_path(allowed, count);
            }
        }
    }

    fn count(&self, kind: OutcomeKind, source: Source, count: u64) {
        let counter = &self.decisions[kind as usize][source as usize];
        counter.get_or_init(|| self.decisions(kind, source)).increment(count);
    }

    #[cold]
    fn decisions(&self, kind: OutcomeKind, source: Source) -> Counter {
        let decision = if source.is_fallback() { "fallback" } else { kind.label() };
        let labels =
            self.labels(&[("decision", decision), ("shadow", self.shadow(kind)), ("source", source.name())]);
        self.source.sink.counter(DECISIONS, labels)
    }

    /// The label for shadow mode. A malformed key is denied by a shadow limit too.
    fn shadow(&self, kind: OutcomeKind) -> &'static str {
        match kind {
            OutcomeKind::Allowed if self.source.is_shadow => "true",
            OutcomeKind::WouldDeny => "true",
            OutcomeKind::Allowed | OutcomeKind::Denied => "false",
        }
    }

    fn fell_back(&self, fallback: Fallback, failure: Failure, kind: OutcomeKind) {
        let counter = &self.fallbacks[fallback as usize][failure as usize][kind as usize];
        let labels = || {
            let (decision, shadow) = (kind.label(), self.shadow(kind));
            let own = [("fallback", fallback.name()), ("reason", failure.name()), ("decision", decision)];
            self.labels(&[&own[..], &[("shadow", shadow)]].concat())
        };
        counter.get_or_init(|| self.source.sink.counter(FALLBACKS, labels())).increment(1);
    }

    fn operated(&self, operation: &'static str, outcome: OperationOutcome) {
        let Some(index) = OPERATED.iter().position(|known| *known == operation) else { return };
        let labels = || self.labels(&[("outcome", outcome.name()), ("operation", operation)]);
        let counter = &self.operations[index][outcome as usize];
        counter.get_or_init(|| self.source.sink.counter(OPERATIONS, labels())).increment(1);
    }

    #[cold]
    fn time(&self, took: Duration) {
        let latency = self.latency.get_or_init(|| self.source.sink.histogram(LATENCY, self.labels(&[])));
        latency.record(took.as_secs_f64() * 1e3);
    }
}

/// Hands over the last counts before the meter goes.
impl Drop for Series {
    fn drop(&mut self) {
        self.hand_over();
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::Destination;
    use super::super::namespaces::Namespaces;
    use super::*;

    fn table(declared: &[&str]) -> ByNamespace {
        let labels = ["limiter", "strategy", "storage_mode"].map(|name| Label::new(name, "x"));
        let namespaces = Namespaces::default();
        declared.iter().for_each(|name| namespaces.declare(name));
        ByNamespace::new(
            None,
            namespaces.of("x"),
            SeriesSource {
                sink: Sink::new(Destination::Facade, &[]),
                labels,
                is_shadow: false,
                observers: None,
            },
        )
    }

    #[test]
    fn a_key_is_counted_in_the_namespace_that_it_has() {
        let long = "n".repeat(LONGEST + 1);
        let declared = ["user", "use", "users", "defaults", "a:b", "ü", "a", "b", &long];
        for (key, namespace) in [
            ("user:42", "user"),
            ("user:42:v2", "user"),
            ("use:42", "use"),
            ("users:42", "users"),
            ("42", "default"),
            ("user", "default"),
            ("default:42:v2", "default"),
            ("defaults", "default"),
            ("defaults:1", "defaults"),
            ("a%3Ab:42", "a:b"),
            ("ü:42", "ü"),
            (&format!("{long}:42"), "other"),
            // A namespace that a client chose must not be shown.
            ("alice@example.com:42", "other"),
            ("userx:42", "other"),
        ] {
            let table = table(&declared);
            for _ in 0..2 {
                assert_eq!(table.series(key).namespace.value(), namespace, "{key}, alone");
            }
            // The same, whichever namespaces came before.
            let table = self::table(&declared);
            for known in ["user:1", "use:1", "1", "users:1", "defaults:1", "a:1", "b:1"] {
                table.series(known);
            }
            assert_eq!(table.series(key).namespace.value(), namespace, "{key}, among others");
        }
    }

    #[test]
    fn the_seventeenth_namespace_and_all_after_it_are_others() {
        let names: Vec<String> = (0..20).map(|number| format!("tenant-{number}")).collect();
        let table = table(&names.iter().map(String::as_str).collect::<Vec<_>>());
        for round in 0..2 {
            for number in 0..10_000 {
                let key = format!("tenant-{number}:x");
                let expected = if number < NAMESPACES { format!("tenant-{number}") } else { "other".into() };
                assert_eq!(table.series(&key).namespace.value(), expected, "round {round}");
            }
        }
    }

    #[test]
    fn one_in_sixty_four_is_timed_and_the_first_of_a_thread_is() {
        let timed: Vec<usize> =
            std::thread::spawn(|| (0..200).filter(|_| is_sampled()).collect()).join().unwrap();
        assert_eq!(timed, [0, 64, 128, 192]);
    }
}
