//! One call of the engine, as data: the charges, the mode, what the caller keeps, the id, how long the call may wait; and its
//! answer.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tollgate_kernel::Micros;
use tollgate_store::ChargeId;

use super::held::Held;
use crate::charge::Charge;
use crate::decision::Decision;
use crate::error::Error;
use crate::outcome::Outcome;

/// What is done with the charges of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// All are charged, or none.
    AllOrNone,
    /// Charges each charge separately, in order.
    Each,
    /// Answered as a charge would be, and nothing is changed.
    Peek,
    /// Given back, of what counts now.
    Refund,
}

/// What the caller keeps of an admitted charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Take {
    Nothing,
    /// It can be settled for so long.
    Reservation(Micros),
    /// Leases are held until they are released.
    Permit,
}

/// The charges of a request.
pub(crate) enum Charges<'a> {
    One(Charge<'a>),
    All(&'a [Charge<'a>]),
}

impl<'a> Charges<'a> {
    #[inline]
    pub(super) fn as_slice(&self) -> &[Charge<'a>] {
        match self {
            Charges::One(charge) => std::slice::from_ref(charge),
            Charges::All(charges) => charges,
        }
    }

    pub(super) fn take(&mut self) -> Charges<'a> {
        std::mem::replace(self, Charges::All(&[]))
    }
}

/// One call of the engine.
pub(crate) struct Request<'a> {
    pub(crate) charges: Charges<'a>,
    pub(crate) mode: Mode,
    pub(crate) take: Take,
    /// Chosen by the caller.
    pub(crate) id: Option<ChargeId>,
    /// How long to wait for room, if at all.
    pub(crate) within: Option<Duration>,
}

impl<'a> Request<'a> {
    pub(crate) fn new(charges: Charges<'a>, mode: Mode) -> Request<'a> {
        Request { charges, mode, take: Take::Nothing, id: None, within: None }
    }

    /// The word for it in events, logs and spans.
    pub(super) fn operation(&self) -> &'static str {
        match (self.mode, self.take) {
            _ if self.within.is_some() => "wait",
            (Mode::Peek, _) => "peek",
            (Mode::Refund, _) => "refund",
            (_, Take::Nothing) => "charge",
            (_, Take::Reservation(_)) => "reserve",
            (_, Take::Permit) => "acquire",
        }
    }

    /// An error if the call has an id and cannot use it: to be sent twice and charged once, it must be one charge.
    pub(super) fn check_id(&self) -> Result<(), Error> {
        let call = match (self.mode, self.id) {
            (_, None) | (Mode::AllOrNone | Mode::Peek, _) => return Ok(()),
            (Mode::Each, _) => "charge_each",
            (Mode::Refund, _) => "refund",
        };
        Err(Error::call(format!(
            "{call} takes no id and would be carried out again; an id is for charge, reserve, acquire and the calls that wait for them"
        )))
    }

    /// The call to name where a concurrency limit is charged and nothing would be held; `None` if something is.
    pub(super) fn holds_nothing(&self) -> Option<&'static str> {
        match (self.mode, self.take) {
            (Mode::AllOrNone | Mode::Each, Take::Nothing) if self.within.is_some() => Some("waiting"),
            (Mode::AllOrNone | Mode::Each, Take::Nothing) => Some("a plain charge"),
            _ => None,
        }
    }
}

/// The answer to a request.
pub(crate) struct Answer {
    /// Under [`Mode::Each`] and [`Mode::Refund`] without outcomes.
    pub(crate) decision: Decision,
    /// What the caller keeps, if the charge was admitted and the caller asked to keep something.
    pub(crate) held: Option<Box<Held>>,
    /// Under [`Mode::Each`], the outcome or the error of each charge.
    pub(crate) each: Vec<Result<Outcome, Error>>,
}

impl Answer {
    /// A decision without anything to keep.
    pub(super) fn of(decision: Decision) -> Answer {
        Answer { decision, held: None, each: Vec::new() }
    }
}

/// The state of a request after its first step.
pub(crate) enum Step<'a> {
    Done(Result<Answer, Error>),
    Waits(Pin<Box<dyn Future<Output = Result<Answer, Error>> + Send + 'a>>),
}
