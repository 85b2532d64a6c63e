//! A charge that is estimated first and settled with the true amount later.

use std::fmt;
use std::sync::Arc;

use tollgate_store::{ChargeId, Settled, Settlement};

use crate::call::Output;
use crate::decision::{Decision, Denied};
use crate::engine::{Answer, Engine, Held};
use crate::error::Error;

/// A charge that was estimated and can be settled with the true amount, on every store.
///
/// ```
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tollgate::{Charge, Limit, Settled, Tollgate};
///
/// let gate = Tollgate::builder().limit("tokens", Limit::token_bucket("1000/m", 1000)?).build()?;
/// let reservation = gate.reserve(&[Charge::new("tokens", "model:gpt").cost(600)], Duration::from_secs(60)).await??;
/// assert_eq!(gate.status("tokens", "model:gpt").await?.remaining(), 400);
///
/// assert_eq!(reservation.settle(250).await?, Settled::Done);
/// assert_eq!(gate.status("tokens", "model:gpt").await?.remaining(), 750);
/// assert_eq!(reservation.settle(1).await?, Settled::Already);
/// # Ok(())
/// # }
/// # use std::future::Future;
/// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
/// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
/// ```
///
/// Dropping it settles nothing: a reservation that is forgotten stays charged as it was estimated. A settlement that fails can be
/// sent again: a reservation is settled once.
#[derive(Clone)]
#[must_use = "a reservation that is not settled stays charged as it was estimated"]
pub struct Reservation {
    engine: Arc<Engine>,
    held: Box<Held>,
    decision: Decision,
}

impl Reservation {
    /// The id of the charge. [`Tollgate::settle`](crate::Tollgate::settle) accepts it in any process.
    pub fn id(&self) -> ChargeId {
        self.held.id
    }

    /// What each limit answered.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Corrects the charge to its actual cost. A lower cost gives the difference back; a higher cost is charged even if it does
    /// not fit. Only for reservations with the same amount under every limit.
    pub async fn settle(&self, actual: u64) -> Result<Settled, Error> {
        self.apply(&Settlement::Actual(actual)).await
    }

    /// Corrects each charge to its actual cost, in the order of the charges. A charge that took nothing (its key is unlimited, or
    /// a shadow limit would have denied it) has nothing to correct; repeated pairs of limit and key add up.
    pub async fn settle_each(&self, actuals: &[u64]) -> Result<Settled, Error> {
        let settlement = self.held.each(actuals)?;
        self.apply(&settlement).await
    }

    /// Gives all of it back.
    pub async fn cancel(&self) -> Result<Settled, Error> {
        self.apply(&Settlement::Cancel).await
    }

    /// Renews its leases and the time to settle it.
    pub async fn renew(&self) -> Result<Settled, Error> {
        self.apply(&Settlement::Renew).await
    }

    #[cfg(feature = "http")]
    pub(crate) fn held(&self) -> &Held {
        &self.held
    }

    async fn apply(&self, settlement: &Settlement) -> Result<Settled, Error> {
        if self.held.is_empty {
            return Ok(Settled::Done);
        }
        self.engine.settle(self.held.id, settlement).await
    }
}

impl Reservation {
    pub(crate) fn new(engine: Arc<Engine>, held: Box<Held>, decision: Decision) -> Reservation {
        Reservation { engine, held, decision }
    }
}

impl Output for Result<Reservation, Denied> {
    fn of(engine: &Arc<Engine>, answer: Answer) -> Result<Reservation, Denied> {
        match answer.held {
            Some(held) => Ok(Reservation::new(engine.clone(), held, answer.decision)),
            None => Err(Denied::new(answer.decision)),
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("id", &self.held.id).finish_non_exhaustive()
    }
}
