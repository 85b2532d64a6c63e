//! What is done about charges after they were decided, and about keys: settlements, cancels, resets and refunds.

use std::time::Duration;

use tollgate_store::{Failure, Settled, Settlement};

use super::EventKey;
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
    /// It could not be done. [`Operation::failure`] says why, where that was the store.
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
        match settled {
            Ok(Settled::Done) => OperationOutcome::Done,
            Ok(Settled::Already) => OperationOutcome::Already,
            Ok(Settled::Unknown) => OperationOutcome::Nothing,
            Ok(Settled::Pending) => OperationOutcome::Pending,
            Err(_) => OperationOutcome::Failed,
        }
    }
}

/// Something that was done about a charge or a key, and decided nothing: see [`Observer::operated`](super::Observer::operated).
#[derive(Clone, Copy, Debug)]
pub struct Operation<'a> {
    /// What was done: `settle`, `cancel`, `renew`, `release`, `reset` or `refund`.
    pub operation: &'static str,
    /// The limit's name. `None` for what is done by the id of a charge, which may be of several limits.
    pub limiter: Option<&'a str>,
    /// The key's namespace; empty where no key is known.
    pub namespace: &'a str,
    /// The key, where one is known.
    pub key: EventKey<'a>,
    /// What a refund gives back, or what a settlement says that everything cost.
    pub cost: Option<u64>,
    /// What became of it.
    pub outcome: OperationOutcome,
    /// How the store failed, if it did.
    pub failure: Option<Failure>,
    /// Whether it may have been done all the same: it was sent, and its answer never came.
    pub is_ambiguous: bool,
    /// How long it took.
    pub duration: Duration,
}

/// The word for a settlement, and the cost that it names, if it is one for everything.
pub(crate) fn settlement_name(settlement: &Settlement) -> (&'static str, Option<u64>) {
    match settlement {
        Settlement::Actual(cost) => ("settle", Some(*cost)),
        Settlement::Each(_) | Settlement::Named(_) => ("settle", None),
        Settlement::Cancel => ("cancel", None),
        Settlement::Release => ("release", None),
        Settlement::Renew => ("renew", None),
    }
}
