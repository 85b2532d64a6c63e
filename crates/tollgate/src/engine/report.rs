//! A decision is made; now it is reported: to the counters of its limits, the observers, the log and the trace.

use std::time::Duration;

use tollgate_kernel as kernel;
use tollgate_kernel::Cost;
use tracing::Span;

use super::{Backend, Engine};
use crate::decision::Decision;
use crate::key::Key;
use crate::outcome::{Outcome, Source};
use crate::policy::entry::{Entry, Resolved};
use crate::telemetry::watch::is_sampled;
use crate::telemetry::{DecisionReport, Event, EventKey, LimitReport, OutcomeKind, Started, Trouble};

impl Engine {
    /// The start of a decision.
    #[inline]
    pub(super) fn started(&self, operation: &'static str) -> Started {
        let is_remote = matches!(self.backend, Backend::Remote(_));
        let observed = !self.observers.is_empty();
        let all = observed && (is_remote || !self.observers.take_counts());
        let is_timed =
            all || self.watch.times_all(is_remote) || ((observed || self.watch.times_some()) && is_sampled());
        Started::new(is_timed, self.watch.check_span(operation))
    }

    /// Lets namespaces of keys be labels of metrics.
    pub(crate) fn show_namespaces<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) {
        names.into_iter().for_each(|name| self.watch.declare(name.as_ref()));
    }

    /// Sets the metrics that no decision sets by itself.
    #[cfg(feature = "telemetry")]
    pub(crate) fn publish_metrics(&self) {
        use crate::health::StoreState;
        use crate::telemetry::Reading;
        let health = self.health();
        let (is_up, leases_lost) = (health.state == StoreState::Up, health.leases_lost);
        let reading = match &self.backend {
            Backend::Memory(store) => Reading {
                is_up,
                keys: Some(store.keys()),
                contention: Some(store.contention()),
                losses: None,
                leases_lost,
                cancels: None,
            },
            Backend::Remote(remote) => Reading {
                is_up,
                keys: None,
                contention: None,
                losses: Some(remote.losses_possible()),
                leases_lost,
                cancels: Some((health.pending_cancels, health.abandoned_cancels)),
            },
        };
        self.watch.publish(&reading, &self.clock);
    }

    /// Reports every limit of a decision, and the whole.
    pub(super) fn report(
        &self,
        operation: &'static str,
        charges: &[Resolved<'_, '_>],
        decision: &Decision,
        trouble: Trouble,
        started: &Started,
    ) {
        if self.observers.is_empty() && self.watch.is_off() {
            return;
        }
        let took = started.took();
        let is_degraded = decision.is_degraded();
        for (index, (charge, outcome)) in charges.iter().zip(decision.outcomes()).enumerate() {
            let told = self.report_limit(operation, charge, outcome, trouble, took);
            if index == decision.binding_index() {
                let decision_report = DecisionReport {
                    operation,
                    limiter: outcome.limit(),
                    told,
                    retry_after: decision.wait(),
                    limits: charges.len(),
                    is_degraded,
                    is_first: is_degraded && trouble.is_first,
                };
                self.watch.report(&decision_report, started.span(), &self.clock);
            }
        }
    }

    /// Reports a denial by counters in this process that is counted already.
    #[cold]
    pub(super) fn report_denial(
        &self,
        entry: &Entry,
        key: &str,
        cost: Cost,
        numbers: &kernel::Outcome,
        took: Option<Duration>,
    ) {
        if !self.observers.is_empty() {
            let namespace = Key::namespace_of(key);
            self.observers.decided(&Event {
                operation: "charge",
                limiter: entry.name,
                strategy: entry.base.strategy(),
                namespace: &namespace,
                key: EventKey::new(Some(key)),
                cost: cost.get(),
                allowed: false,
                shadow: false,
                outcome: Outcome::new(entry.name, *numbers, Source::Store),
                source: Source::Store,
                failure: None,
                is_ambiguous: false,
                duration: took.unwrap_or_default(),
            });
        }
        let told = LimitReport {
            key: Some(key),
            strategy: entry.base.strategy(),
            verdict: OutcomeKind::Denied,
            source: Source::Store,
            failure: None,
            took,
        };
        let decision_report = DecisionReport {
            operation: "charge",
            limiter: entry.name,
            told,
            retry_after: numbers.retry_after,
            limits: 1,
            is_degraded: false,
            is_first: false,
        };
        self.watch.report(&decision_report, &Span::none(), &self.clock);
    }

    /// The key of a decision that is reported as a number, if it is one.
    #[inline]
    fn admission<'a>(&self, operation: &str, entry: &Entry, told: &LimitReport<'a>) -> Option<&'a str> {
        let is_one = entry.meter.is_on()
            && told.verdict == OutcomeKind::Allowed
            && told.source == Source::Store
            && told.strategy == entry.base.strategy()
            && self.is_local()
            && operation != "peek";
        told.key.filter(|_| is_one)
    }

    /// Counts one limit of a decision, and shows it to the observers.
    fn report_limit<'a>(
        &self,
        operation: &'static str,
        charge: &'a Resolved<'_, '_>,
        outcome: &Outcome,
        trouble: Trouble,
        took: Option<Duration>,
    ) -> LimitReport<'a> {
        let entry = &*charge.entry;
        let (numbers, source) = (*outcome.numbers(), outcome.source());
        let told = LimitReport {
            key: charge.canonical(),
            // A malformed key meets nothing; it is counted where it would have.
            strategy: charge.key_limit().map_or_else(|| entry.base.strategy(), |place| place.strategy()),
            verdict: OutcomeKind::of(numbers.allowed, outcome.is_shadow()),
            source,
            // What was answered without the store, or meets no counters, did not depend on it.
            failure: trouble.failure.filter(|_| source.is_fallback()),
            took,
        };
        if self.observers.take_counts()
            && let Some(key) = self.admission(operation, entry, &told)
        {
            entry.meter.count_fast_path(key, true, took);
            return told;
        }
        if operation != "peek" {
            entry.meter.decided(&told);
        }
        if !self.observers.is_empty() {
            let namespace = charge.key.as_ref().map(Key::namespace).unwrap_or_default();
            self.observers.decided(&Event {
                operation,
                limiter: entry.name,
                strategy: charge.key_limit().and_then(|place| place.strategy()),
                namespace: &namespace,
                key: EventKey::new(told.key),
                cost: charge.cost.get(),
                allowed: outcome.is_allowed(),
                shadow: outcome.is_shadow(),
                outcome: *outcome,
                source,
                failure: told.failure,
                is_ambiguous: trouble.is_ambiguous && source.is_fallback(),
                duration: took.unwrap_or_default(),
            });
        }
        told
    }
}

#[cfg(all(test, feature = "telemetry"))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tollgate_kernel::Limit;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use crate::Tollgate;
    use crate::telemetry::{LogDecisions, Telemetry};

    /// Counts the lines of the decision log.
    struct Lines(Arc<AtomicUsize>);

    impl Subscriber for Lines {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.target() == "tollgate::decision"
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_denial_on_the_fast_path_is_logged_and_an_admission_is_not() {
        let limit = Limit::token_bucket("1/h", 2).unwrap();
        let telemetry = Telemetry::new().log(LogDecisions::Denials);
        let gate = Tollgate::builder().limit("api", limit).telemetry(telemetry).build().unwrap();
        let api = gate.local("api").unwrap();
        let lines = Arc::new(AtomicUsize::new(0));
        let told = tracing::subscriber::with_default(Lines(lines.clone()), || {
            ["a", "a", "b", "b", "a", "b"].map(|key| {
                let _ = api.check(key);
                lines.load(Ordering::Relaxed)
            })
        });
        assert_eq!(told, [0, 0, 0, 0, 1, 2]);
    }
}
