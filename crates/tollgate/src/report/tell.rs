//! A decision is made; now whoever wants to know is told: the meters of its limits, the observers, the log and the trace.

use std::time::Duration;

use tollgate_kernel::{Cost, Micros, Outcome};
use tracing::Span;

use super::watch::is_sampled;
use super::{Concluded, Event, LimitTold, Payer, Source, Started, Trouble, Verdict};
use crate::decision::Decision;
use crate::gate::{Backend, Entry, Gate, Place, Resolved};
use crate::key::Key;

/// What is told of one limit, beside what was asked.
pub(crate) struct Told {
    pub(crate) outcome: Outcome,
    pub(crate) source: Source,
    pub(crate) trouble: Trouble,
    /// How long the whole decision took, if it was timed.
    pub(crate) took: Option<Duration>,
}

impl Told {
    /// Of an answer that no store had a part in failing.
    pub(crate) fn plain(outcome: Outcome, source: Source, took: Option<Duration>) -> Told {
        Told { outcome, source, trouble: Trouble::default(), took }
    }
}

impl Gate {
    /// The start of a decision.
    #[inline]
    pub(crate) fn started(&self, operation: &'static str) -> Started {
        let is_elsewhere = matches!(self.backend, Backend::Remote(_));
        let observed = !self.observers.is_empty();
        let all = observed && (is_elsewhere || !self.observers.take_counts());
        let is_timed = all
            || self.watch.times_all(is_elsewhere)
            || ((observed || self.watch.times_some()) && is_sampled());
        Started::new(is_timed, self.watch.check_span(operation))
    }

    fn has_nobody_to_tell(&self) -> bool {
        self.observers.is_empty() && self.watch.is_off()
    }

    /// Tells of every limit of a decision, and of the whole.
    pub(crate) fn tell_all(
        &self,
        operation: &'static str,
        asks: &[Resolved<'_, '_>],
        decision: &Decision<'_>,
        trouble: Trouble,
        started: &Started,
    ) {
        if self.has_nobody_to_tell() {
            return;
        }
        let took = started.took();
        let is_degraded = decision.degraded();
        for (index, (ask, limit)) in asks.iter().zip(decision.limits()).enumerate() {
            let met = ask.met.as_ref().map(|(key, place)| (key, *place));
            let told = Told { outcome: limit.outcome, source: limit.source, trouble, took };
            let counted = self.tell_limit(operation, ask.entry, met, ask.cost, &told);
            if index == decision.binding_index() {
                let concluded = Concluded {
                    operation,
                    limiter: limit.name,
                    told: counted,
                    retry_after: decision.retry_after(),
                    limits: asks.len(),
                    is_degraded,
                    is_first: is_degraded && trouble.is_first,
                };
                self.watch.concluded(&concluded, started.span(), &self.clock);
            }
        }
    }

    /// Tells of a decision over one limit.
    pub(crate) fn tell(
        &self,
        operation: &'static str,
        entry: &Entry,
        met: Option<(&Key<'_>, &Place)>,
        cost: Cost,
        told: &Told,
        started: &Started,
    ) {
        if self.has_nobody_to_tell() {
            return;
        }
        let counted = self.tell_limit(operation, entry, met, cost, told);
        let is_degraded = told.source.is_fallback();
        let retry_after = match counted.verdict {
            Verdict::Denied => told.outcome.retry_after,
            Verdict::Allowed | Verdict::WouldDeny => Some(Micros::ZERO),
        };
        let concluded = Concluded {
            operation,
            limiter: entry.rule.name(),
            told: counted,
            retry_after,
            limits: 1,
            is_degraded,
            is_first: is_degraded && told.trouble.is_first,
        };
        self.watch.concluded(&concluded, started.span(), &self.clock);
    }

    /// Tells of a denial by counters in this process that is counted already.
    #[cold]
    pub(crate) fn tell_denial(
        &self,
        entry: &Entry,
        key: &str,
        cost: Cost,
        outcome: &Outcome,
        took: Option<Duration>,
    ) {
        if !self.observers.is_empty() {
            let namespace = Key::namespace_of(key);
            self.observers.decided(&Event {
                operation: "charge",
                limiter: entry.rule.name(),
                strategy: entry.base.strategy(),
                namespace: &namespace,
                payer: Payer::new(Some(key)),
                cost: cost.get(),
                allowed: false,
                shadow: false,
                outcome: *outcome,
                source: Source::Store,
                failure: None,
                is_ambiguous: false,
                duration: took.unwrap_or_default(),
            });
        }
        let told = LimitTold {
            key: Some(key),
            strategy: entry.base.strategy(),
            verdict: Verdict::Denied,
            source: Source::Store,
            failure: None,
            took,
        };
        let concluded = Concluded {
            operation: "charge",
            limiter: entry.rule.name(),
            told,
            retry_after: outcome.retry_after,
            limits: 1,
            is_degraded: false,
            is_first: false,
        };
        self.watch.concluded(&concluded, &Span::none(), &self.clock);
    }

    /// The key of a decision that is told as a number, if it is one.
    #[inline]
    fn admission<'a>(&self, operation: &str, entry: &Entry, told: &LimitTold<'a>) -> Option<&'a str> {
        let is_one = entry.meter.is_on()
            && told.verdict == Verdict::Allowed
            && told.source == Source::Store
            && told.strategy == entry.base.strategy()
            && matches!(self.backend, Backend::Memory(_))
            && operation != "peek";
        told.key.filter(|_| is_one)
    }

    /// Counts one limit of a decision, and tells the observers of it.
    fn tell_limit<'a>(
        &self,
        operation: &'static str,
        entry: &Entry,
        met: Option<(&'a Key<'_>, &Place)>,
        cost: Cost,
        told: &Told,
    ) -> LimitTold<'a> {
        let Told { outcome, source, trouble, took } = *told;
        let shadow = entry.rule.is_shadow() && met.is_some();
        let counted = LimitTold {
            key: met.map(|(key, _)| key.canonical()),
            // A malformed key meets nothing; it is counted where it would have.
            strategy: met.map_or_else(|| entry.base.strategy(), |(_, place)| place.strategy()),
            verdict: Verdict::of(outcome.allowed, shadow),
            source,
            // What was answered from here, or meets no counters, did not depend on the store.
            failure: trouble.failure.filter(|_| source.is_fallback()),
            took,
        };
        if self.observers.take_counts()
            && let Some(key) = self.admission(operation, entry, &counted)
        {
            entry.meter.straight(key, true, took);
            return counted;
        }
        if operation != "peek" {
            entry.meter.decided(&counted);
        }
        if !self.observers.is_empty() {
            let namespace = met.map(|(key, _)| key.namespace()).unwrap_or_default();
            self.observers.decided(&Event {
                operation,
                limiter: entry.rule.name(),
                strategy: met.and_then(|(_, place)| place.strategy()),
                namespace: &namespace,
                payer: Payer::new(counted.key),
                cost: cost.get(),
                allowed: outcome.allowed || shadow,
                shadow,
                outcome,
                source,
                failure: counted.failure,
                is_ambiguous: trouble.is_ambiguous && source.is_fallback(),
                duration: took.unwrap_or_default(),
            });
        }
        counted
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
    fn a_denial_on_the_straight_way_is_told_and_an_admission_is_not() {
        let limit = Limit::token_bucket("1/h", 2).unwrap();
        let telemetry = Telemetry::new().log(LogDecisions::Denials);
        let gate = Tollgate::builder().limit("api", limit).telemetry(telemetry).build().unwrap();
        let api = gate.limiter("api").unwrap();
        let lines = Arc::new(AtomicUsize::new(0));
        let told = tracing::subscriber::with_default(Lines(lines.clone()), || {
            ["a", "a", "b", "b", "a", "b"].map(|key| {
                api.check(key);
                lines.load(Ordering::Relaxed)
            })
        });
        assert_eq!(told, [0, 0, 0, 0, 1, 2]);
    }
}
