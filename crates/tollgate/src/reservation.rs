//! Charges that are not the last word: reservations to be settled, and permits to be given back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tollgate_kernel::Outcome;
use tollgate_store::{HoldId, Settled, Settlement};

use crate::decision::{Decision, LimitOutcome};
use crate::error::Error;
use crate::gate::{Backend, Gate};
use crate::quiet::Quiet;

/// What a reserve call found.
#[derive(Debug)]
pub struct Reserved<'a> {
    /// The decision, as of a charge.
    pub decision: Decision<'a>,
    /// The reservation, if the charge was admitted.
    pub reservation: Option<Reservation>,
}

/// A charge that was estimated and can be settled with the true amount.
///
/// ```
/// use tollgate::{Limit, Limiter, Settled};
///
/// let tokens = Limiter::new(Limit::token_bucket("1000/m", 1000)?);
/// let reservation = tokens.reserve("model:gpt", 600)?.reservation.expect("1000 are there");
/// assert_eq!(tokens.status("model:gpt").remaining, 400);
///
/// assert_eq!(reservation.settle(250)?, Settled::Done);
/// assert_eq!(tokens.status("model:gpt").remaining, 750);
/// assert_eq!(reservation.settle(1)?, Settled::Already);
/// # Ok::<(), tollgate::Error>(())
/// ```
///
/// Dropping it settles nothing: a reservation that is forgotten stays charged as it was estimated.
#[derive(Clone)]
pub struct Reservation {
    gate: Arc<Gate>,
    id: HoldId,
    /// The limits of the charge that took nothing: they count nothing, or only watch and would have refused.
    uncharged: Vec<String>,
}

impl Reservation {
    /// The reservation that an admitted charge made.
    pub(crate) fn new(gate: Arc<Gate>, id: HoldId, decision: &Decision<'_>) -> Reservation {
        let is_charged =
            |limit: &LimitOutcome<'_>| limit.outcome.allowed && limit.outcome != Outcome::UNLIMITED;
        let has_charged =
            |name: &str| decision.limits().iter().any(|limit| limit.name == name && is_charged(limit));
        let names = decision.limits().iter().map(|limit| limit.name);
        let uncharged: Vec<String> = names.filter(|name| !has_charged(name)).map(str::to_owned).collect();
        let id = if uncharged.len() == decision.limits().len() { HoldId::of_nothing() } else { id };
        Reservation { gate, id, uncharged }
    }

    /// A charge under one limit, to be settled by nothing but its release.
    pub(crate) fn unnamed(gate: Arc<Gate>, id: HoldId) -> Reservation {
        Reservation { gate, id, uncharged: Vec::new() }
    }

    /// Its name, under which [`Tollgate::settle`](crate::Tollgate::settle) knows it too.
    pub fn id(&self) -> HoldId {
        self.id
    }

    /// Corrects the charge to what it truly cost. Less gives the difference back, more is taken even if it does not fit.
    pub fn settle(&self, actual: u64) -> Result<Settled, Error> {
        self.apply(&Settlement::Actual(actual))
    }

    /// Corrects the charge under each named limit; under the others it stays as reserved. A limit of the charge that took
    /// nothing (it is unlimited, or only watches and would have refused) has nothing to correct.
    pub fn settle_each(&self, actuals: &[(&str, u64)]) -> Result<Settled, Error> {
        self.apply(&self.each(actuals))
    }

    /// The settlement that corrects each named limit, as far as it was charged.
    pub(crate) fn each(&self, actuals: &[(&str, u64)]) -> Settlement {
        let charged = actuals.iter().filter(|(name, _)| self.uncharged.iter().all(|other| other != name));
        Settlement::Each(charged.map(|&(name, actual)| (name.to_owned(), actual)).collect())
    }

    /// Gives all of it back.
    pub fn cancel(&self) -> Result<Settled, Error> {
        self.apply(&Settlement::Cancel)
    }

    /// Renews its leases and the time to settle it.
    pub fn renew(&self) -> Result<Settled, Error> {
        self.apply(&Settlement::Renew)
    }

    fn apply(&self, settlement: &Settlement) -> Result<Settled, Error> {
        if self.id.is_of_nothing() {
            return Ok(Settled::Done);
        }
        match &self.gate.backend {
            Backend::Memory(store) => {
                let settled = store.settle(self.id, settlement)?;
                self.gate.queues.nudge();
                Ok(settled)
            }
            Backend::Remote(_) => {
                Err(Error::call("this reservation's store is elsewhere; use Tollgate::settle"))
            }
        }
    }
}

impl std::fmt::Debug for Reservation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reservation").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Leave to go on. Under a concurrency limit it is a lease, given back when dropped; under any other limit, what was charged
/// stays charged.
///
/// ```
/// use tollgate::{Limit, Limiter, Micros};
///
/// let workers = Limiter::new(Limit::concurrency(1, Micros::from_secs(30))?);
/// let permit = workers.acquire("pool").expect("nobody is at work");
/// assert!(workers.acquire("pool").is_err());
/// drop(permit);
/// assert!(workers.acquire("pool").is_ok());
/// # Ok::<(), tollgate::Error>(())
/// ```
///
/// In one process a lease does not end while its permit lives, however long the process stands still. It is gone only if its key
/// is reset.
#[derive(Debug)]
pub struct Permit {
    reservation: Reservation,
    outcome: Outcome,
    is_lost: AtomicBool,
}

impl Permit {
    pub(crate) fn new(reservation: Reservation, outcome: Outcome) -> Permit {
        Permit { reservation, outcome, is_lost: AtomicBool::new(false) }
    }

    /// What the limit said.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }

    /// Renews the lease; false when it is gone, and somebody else may hold it. That is logged and counted once.
    pub fn renew(&self) -> bool {
        let is_renewed = matches!(self.reservation.renew(), Ok(Settled::Done));
        if !is_renewed && !self.is_lost.swap(true, Ordering::Relaxed) {
            self.reservation.gate.lost_leases.report();
        }
        is_renewed
    }

    /// Whether a renewal has found the lease gone.
    ///
    /// ```
    /// use tollgate::{Limit, Limiter, Micros};
    ///
    /// let workers = Limiter::new(Limit::concurrency(1, Micros::from_secs(30))?);
    /// let permit = workers.acquire("pool").expect("nobody is at work");
    /// workers.reset("pool");
    /// assert!(!permit.renew() && permit.is_lost());
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Relaxed)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        // Releases leases and leaves charges as they are. A lease that has run out is gone.
        let Reservation { gate, id, .. } = &self.reservation;
        if let Backend::Memory(store) = &gate.backend {
            store.release(*id);
            gate.queues.nudge();
        }
    }
}

/// Leases that were gone when their holder renewed them: counted, and logged at most once a second.
#[derive(Default)]
pub(crate) struct LostLeases {
    count: AtomicU64,
    log: Quiet,
}

impl LostLeases {
    /// One more. Omits the key, which must not appear in logs.
    #[cold]
    pub(crate) fn report(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(count) = self.log.count() {
            tracing::warn!(
                count,
                "a lease was gone when it was renewed: its holder stood still for longer than the lease, or its key was reset; \
                 another may run beside it"
            );
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}
