//! Reports operations that are not decisions (settle, release, reset, refund) to the observers and the meters.

use std::time::{Duration, Instant};

use tollgate_store::{Settled, Settlement};

use super::Engine;
use crate::error::Error;
use crate::key::Key;
use crate::policy::entry::{Entry, Resolved};
use crate::telemetry::{EventKey, Operation, OperationOutcome, Recorder};

impl Engine {
    /// The start time of an operation, if its duration is measured.
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
        let outcome = OperationOutcome::of_settled(settled);
        let operation = Operation::of_settlement(settlement, outcome, settled.as_ref().err(), took(started));
        operation.report(&self.watch, &self.observers);
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
        let operation = Operation {
            limiter: Some(entry.name),
            strategy: entry.key_limit(key).strategy(),
            namespace: &namespace,
            key: EventKey::new(Some(key.canonical())),
            ..Operation::new("reset", outcome, forgotten.err(), took(started))
        };
        operation.report_of_limit(&entry.meter, &self.observers);
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
            let operation = Operation {
                limiter: Some(charge.entry.name),
                strategy: charge
                    .key_limit()
                    .map_or_else(|| charge.entry.base.strategy(), |key_limit| key_limit.strategy()),
                namespace: &namespace,
                key: EventKey::new(charge.canonical()),
                cost: Some(charge.cost.get()),
                ..Operation::new("refund", outcome, refunded.as_ref().err(), took.unwrap_or_default())
            };
            operation.report_of_limit(&charge.entry.meter, &self.observers);
        }
    }
}

fn took(started: Option<Instant>) -> Duration {
    started.map(|started| started.elapsed()).unwrap_or_default()
}
