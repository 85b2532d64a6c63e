//! What was done about a charge or a key, and decided nothing, is reported: to the observers and to the counters.

use std::time::{Duration, Instant};

use tollgate_store::{Settled, Settlement};

use super::Engine;
use crate::error::Error;
use crate::key::Key;
use crate::policy::entry::{Entry, Resolved};
use crate::telemetry::{EventKey, Operation, OperationOutcome, Recorder, settlement_name};

impl Engine {
    /// The start of an operation, if anybody wants to know how long it takes.
    pub(super) fn operation_started(&self) -> Option<Instant> {
        (!self.observers.is_empty()).then(Instant::now)
    }

    /// A charge was settled, cancelled, renewed or released by its id.
    pub(super) fn report_settled(
        &self,
        settlement: &Settlement,
        settled: &Result<Settled, Error>,
        started: Option<Instant>,
    ) {
        let (operation, cost) = settlement_name(settlement);
        self.operated(Operation {
            cost,
            ..done(operation, OperationOutcome::of_settled(settled), settled.as_ref().err(), took(started))
        });
    }

    /// A key was forgotten, or had nothing to forget.
    pub(super) fn report_reset(
        &self,
        entry: &Entry,
        key: &Key<'_>,
        forgotten: Result<bool, &Error>,
        started: Option<Instant>,
    ) {
        let outcome = match forgotten {
            Ok(true) => OperationOutcome::Done,
            Ok(false) => OperationOutcome::Nothing,
            Err(_) => OperationOutcome::Failed,
        };
        let namespace = key.namespace();
        self.operated(Operation {
            limiter: Some(entry.name),
            namespace: &namespace,
            key: EventKey::new(Some(key.canonical())),
            ..done("reset", outcome, forgotten.err(), took(started))
        });
    }

    /// Each charge of a call was given back, or none was.
    pub(super) fn report_refund(
        &self,
        charges: &[Resolved<'_, '_>],
        refunded: &Result<(), Error>,
        took: Option<Duration>,
    ) {
        if self.observers.is_empty() && self.watch.is_off() {
            return;
        }
        for charge in charges {
            let outcome = match refunded {
                Err(_) => OperationOutcome::Failed,
                Ok(()) if charge.memory_charge().is_none() && charge.stored_charge().is_none() => {
                    OperationOutcome::Nothing
                }
                Ok(()) => OperationOutcome::Done,
            };
            let namespace = charge.key.as_ref().map(Key::namespace).unwrap_or_default();
            self.operated(Operation {
                limiter: Some(charge.entry.name),
                namespace: &namespace,
                key: EventKey::new(charge.canonical()),
                cost: Some(charge.cost.get()),
                ..done("refund", outcome, refunded.as_ref().err(), took.unwrap_or_default())
            });
        }
    }

    fn operated(&self, operation: Operation<'_>) {
        self.watch.operated(operation.operation, operation.outcome);
        if !self.observers.is_empty() {
            self.observers.operated(&operation);
        }
    }
}

/// An operation of which nothing else is known.
fn done(
    operation: &'static str,
    outcome: OperationOutcome,
    error: Option<&Error>,
    duration: Duration,
) -> Operation<'static> {
    Operation {
        operation,
        limiter: None,
        namespace: "",
        key: EventKey::new(None),
        cost: None,
        outcome,
        failure: error.and_then(Error::failure),
        is_ambiguous: error.is_some_and(Error::is_ambiguous),
        duration,
    }
}

fn took(started: Option<Instant>) -> Duration {
    started.map(|started| started.elapsed()).unwrap_or_default()
}
