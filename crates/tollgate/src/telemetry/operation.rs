//! Operations on charges after their decision, and on keys: settlements, cancels, resets and refunds.

use std::time::Duration;

use tollgate_kernel::Strategy;
use tollgate_store::{Failure, Settled, Settlement};

use super::{DecisionMeter, EventKey, Meter, Observers, Recorder, Watch};
use crate::error::Error;

/// What became of an [`Operation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OperationOutcome {
    /// It was done.
    Done,
    /// The charge was settled before; nothing changed.
    Already,
    /// There was nothing to do: no such charge, or a key that was not charged.
    Nothing,
    /// It is done in this process, or handed over to the background, and the store follows.
    Pending,
    /// It failed. [`Operation::failure`] says why, if the store failed.
    Failed,
}

impl OperationOutcome {
    /// All of them, in the order of the documentation.
    pub const ALL: [OperationOutcome; 5] = [
        OperationOutcome::Done,
        OperationOutcome::Already,
        OperationOutcome::Nothing,
        OperationOutcome::Pending,
        OperationOutcome::Failed,
    ];

    /// The name used in metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            OperationOutcome::Done => "done",
            OperationOutcome::Already => "already",
            OperationOutcome::Nothing => "nothing",
            OperationOutcome::Pending => "pending",
            OperationOutcome::Failed => "failed",
        }
    }

    pub(crate) fn of_settled(settled: &Result<Settled, Error>) -> OperationOutcome {
        settled.as_ref().map_or(OperationOutcome::Failed, |settled| (*settled).into())
    }
}

impl From<Settled> for OperationOutcome {
    fn from(settled: Settled) -> OperationOutcome {
        match settled {
            Settled::Done => OperationOutcome::Done,
            Settled::Already => OperationOutcome::Already,
            Settled::Unknown => OperationOutcome::Nothing,
            Settled::Pending => OperationOutcome::Pending,
        }
    }
}

/// Something that was done about a charge or a key, and decided nothing: see [`Observer::operated`](super::Observer::operated).
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// The call: `settle`, `cancel`, `renew`, `release`, `reset` or `refund`.
    pub operation: &'static str,
    /// The limit's name. `None` for operations by the id of a charge, which may have several limits.
    pub limiter: Option<&'a str>,
    /// What the limit counts the key by. `None` where no limit is known, and where nothing is counted.
    pub strategy: Option<Strategy>,
    /// The key's namespace; empty where no key is known.
    pub namespace: &'a str,
    /// The key, where one is known.
    pub key: EventKey<'a>,
    /// The amount of a refund, or the total cost of a settlement.
    pub cost: Option<u64>,
    /// What became of it.
    pub outcome: OperationOutcome,
    /// How the store failed, if it did.
    pub failure: Option<Failure>,
    /// Whether it may have been carried out: it was sent, and its answer never came.
    pub is_ambiguous: bool,
    /// How long it took.
    pub duration: Duration,
}

impl Operation<'_> {
    /// A charge was settled, cancelled, renewed or released by its id.
    pub(crate) fn of_settlement(
        settlement: &Settlement,
        outcome: OperationOutcome,
        error: Option<&Error>,
        duration: Duration,
    ) -> Operation<'static> {
        let (operation, cost) = settlement_name(settlement);
        Operation { cost, ..Operation::new(operation, outcome, error, duration) }
    }

    /// An operation of which nothing else is known.
    pub(crate) fn new(
        operation: &'static str,
        outcome: OperationOutcome,
        error: Option<&Error>,
        duration: Duration,
    ) -> Operation<'static> {
        Operation {
            operation,
            limiter: None,
            strategy: None,
            namespace: "",
            key: EventKey::new(None),
            cost: None,
            outcome,
            failure: error.and_then(Error::failure),
            is_ambiguous: error.is_some_and(Error::is_ambiguous),
            duration,
        }
    }

    /// Counts an operation on a charge, and reports it to the observers.
    pub(crate) fn report(&self, watch: &Watch, observers: &Observers) {
        Recorder::operated(watch, self.operation, self.outcome);
        if !observers.is_empty() {
            observers.operated(self);
        }
    }

    /// Counts an operation on a key of a limit, by the meter of that limit, and reports it to the observers.
    pub(crate) fn report_of_limit(&self, meter: &Meter, observers: &Observers) {
        DecisionMeter::operated(meter, self);
        if !observers.is_empty() {
            observers.operated(self);
        }
    }
}

/// The word for a settlement, and the cost that it names, if it is one for everything.
fn settlement_name(settlement: &Settlement) -> (&'static str, Option<u64>) {
    match settlement {
        Settlement::Actual(cost) => ("settle", Some(*cost)),
        Settlement::Each(_) | Settlement::Named(_) => ("settle", None),
        Settlement::Cancel => ("cancel", None),
        Settlement::Release => ("release", None),
        Settlement::Renew => ("renew", None),
    }
}
