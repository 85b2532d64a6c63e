//! Reports a decision to the meters of its limits, the observers, the log and the trace.

use std::time::{Duration, Instant};

use tollgate_kernel as kernel;
use tollgate_kernel::Cost;

use super::{Backend, Engine};
use crate::decision::Decision;
use crate::key::Key;
use crate::outcome::{Outcome, Source};
use crate::policy::entry::{Entry, Resolved};
use crate::telemetry::{DecisionMeter, Recorder, is_sampled};
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

    /// Updates the metrics that are not set by decisions.
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
                script_time: None,
                leases_lost,
                cancels: None,
            },
            Backend::Remote(remote) => Reading {
                is_up,
                keys: None,
                contention: None,
                losses: Some(remote.losses_possible()),
                script_time: remote.script_time(),
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
            let limit_report = self.report_limit(operation, charge, outcome, trouble, took);
            if index == decision.binding_index() {
                let decision_report = DecisionReport {
                    operation,
                    limiter: outcome.limit(),
                    binding: limit_report,
                    retry_after: decision.wait(),
                    limits: charges.len(),
                    is_degraded,
                    is_first: is_degraded && trouble.is_first,
                };
                self.watch.report(&decision_report, started.span(), &self.clock);
            }
        }
    }

    /// Shows the observers a denial by counters in this process that is counted already, and how long it took if it was sampled.
    pub(super) fn show_denial(
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
    }

    /// Logs a denial: of several limits, the binding one.
    pub(super) fn log_denial(
        &self,
        entry: &Entry,
        key: &str,
        cost: Cost,
        numbers: &kernel::Outcome,
        limits: usize,
        started: Option<Instant>,
    ) {
        self.watch.report_denial(entry.name, key, &self.clock, || DecisionReport {
            operation: "charge",
            limiter: entry.name,
            binding: LimitReport {
                key: Some(key),
                cost: cost.get(),
                strategy: entry.base.strategy(),
                kind: OutcomeKind::Denied,
                source: Source::Store,
                failure: None,
                took: started.map(|started| started.elapsed()),
            },
            retry_after: numbers.retry_after,
            limits,
            is_degraded: false,
            is_first: false,
        });
    }

    /// The key of a decision that is reported as a number, if it is one.
    #[inline]
    fn admission<'a>(
        &self,
        operation: &str,
        entry: &Entry,
        limit_report: &LimitReport<'a>,
    ) -> Option<&'a str> {
        let is_one = entry.meter.is_on()
            && limit_report.kind == OutcomeKind::Allowed
            && limit_report.source == Source::Store
            && limit_report.strategy == entry.base.strategy()
            && self.is_local()
            && operation != "peek";
        limit_report.key.filter(|_| is_one)
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
        let limit_report = LimitReport {
            key: charge.canonical(),
            cost: charge.cost.get(),
            // A malformed key has no counters; it is counted under the strategy of the limit.
            strategy: charge
                .key_limit()
                .map_or_else(|| entry.base.strategy(), |key_limit| key_limit.strategy()),
            kind: OutcomeKind::of(numbers.allowed, outcome.is_shadow()),
            source,
            // The failure of the store is reported only for outcomes of the fallback.
            failure: trouble.failure.filter(|_| source.is_fallback()),
            took,
        };
        if self.observers.take_counts()
            && let Some(key) = self.admission(operation, entry, &limit_report)
        {
            entry.meter.count_fast_path(key, true, took);
            return limit_report;
        }
        if operation != "peek" {
            entry.meter.decided(&limit_report);
        }
        if !self.observers.is_empty() {
            let namespace = charge.key.as_ref().map(Key::namespace).unwrap_or_default();
            self.observers.decided(&Event {
                operation,
                limiter: entry.name,
                strategy: charge.key_limit().and_then(|key_limit| key_limit.strategy()),
                namespace: &namespace,
                key: EventKey::new(limit_report.key),
                cost: limit_report.cost,
                allowed: outcome.is_allowed(),
                shadow: outcome.is_shadow(),
                outcome: *outcome,
                source,
                failure: limit_report.failure,
                is_ambiguous: trouble.is_ambiguous && source.is_fallback(),
                duration: took.unwrap_or_default(),
            });
        }
        limit_report
    }
}

#[cfg(all(test, feature = "telemetry"))]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, OnceLock};

    use parking_lot::Mutex;
    use tollgate_kernel::Limit;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use crate::telemetry::{self, LogDecisions, Observer, Telemetry};
    use crate::{Charge, Tollgate};

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
        let levels = tracing::subscriber::with_default(Lines(lines.clone()), || {
            ["a", "a", "b", "b", "a", "b"].map(|key| {
                let _ = api.check(key);
                lines.load(Ordering::Relaxed)
            })
        });
        assert_eq!(levels, [0, 0, 0, 0, 1, 2]);
    }

    /// Records which limit denied, and reloads meanwhile, as an observer may.
    #[derive(Default)]
    struct Denials {
        gate: OnceLock<Tollgate>,
        seen: Mutex<Vec<(String, String, u64)>>,
    }

    impl Observer for Denials {
        fn decided(&self, event: &telemetry::Event<'_>) {
            if let Some(gate) = self.gate.get().filter(|_| !event.allowed) {
                gate.reload((*gate.policy()).clone()).expect("the same policy");
                let key = event.key.reveal().unwrap_or_default().to_owned();
                self.seen.lock().push((event.limiter.to_owned(), key, event.cost));
            }
        }

        fn takes_counts(&self) -> bool {
            true
        }
    }

    #[test]
    fn a_denial_of_several_limits_is_reported_by_each_that_denied_and_logged_by_the_one_that_bound() {
        let bucket = |burst| Limit::token_bucket("1/h", burst).unwrap();
        let recorder = Arc::new(metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder());
        let telemetry = Telemetry::new().metrics_to(recorder).log(LogDecisions::Denials);
        let denials = Arc::new(Denials::default());
        let gate = Tollgate::builder()
            .limit("all", bucket(100))
            .limit("tenant", bucket(2))
            .limit("user", bucket(1))
            .telemetry(telemetry)
            .observer(denials.clone());
        let gate = gate.build().unwrap();
        assert!(denials.gate.set(gate.clone()).is_ok());
        let all = gate.local("all").unwrap();
        let lines = Arc::new(AtomicUsize::new(0));
        let allowed = tracing::subscriber::with_default(Lines(lines.clone()), || {
            [("a", 1), ("b", 1), ("b", 1)].map(|(user, cost)| {
                let charges = [
                    Charge::new("all", "all").cost(cost),
                    Charge::new("tenant", "t").cost(cost),
                    Charge::new("user", user).cost(cost),
                ];
                all.charge_all(&charges).unwrap().is_allowed()
            })
        });
        assert_eq!((allowed, lines.load(Ordering::Relaxed)), ([true, true, false], 1));
        let denied = |limit: &str, key: &str| (limit.to_owned(), key.to_owned(), 1);
        assert_eq!(*denials.seen.lock(), [denied("tenant", "t"), denied("user", "b")]);
        assert_eq!(all.status("all").used(), 2, "a denied charge takes nothing");
    }
}
