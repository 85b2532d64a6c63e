//! What is still to be done for a request that was let through: correct what was reserved, and give leases back.
//!
//! A reservation is settled once. If anything depends on the body of the answer, all of it waits for the body; else it is
//! settled as soon as the head is there, before the answer goes out, so that the caller's next request finds it done. Whoever
//! goes away earlier leaves what was reserved, but gives leases back. A lease is renewed for as long as its request takes; if it is
//! gone by then, because the process stood still for longer, that is logged and counted. A request that becomes another protocol
//! (101) keeps its lease for as long as its handler keeps the [`Lease`](super::Lease).

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::task::AbortHandle;
use tollgate_kernel::Micros;
use tollgate_store::{HoldId, Settlement};

use super::applied::{AppliedLimit, Which};
use super::charge;
use super::charges::{Due, Dues};
use super::layer::Inner;
use crate::reservation::Reservation;
use crate::route::{ResponseHead, Settle};

/// What is still to be done for a request.
pub(super) struct After {
    inner: Arc<Inner>,
    reservation: Reservation,
    tolls: SmallVec<[Paid; 4]>,
    bytes: u64,
    is_answered: bool,
    is_done: bool,
    /// Renews leases, as long as this is there.
    renewing: Option<AbortHandle>,
}

/// A toll that was charged.
struct Paid {
    which: Which,
    reserved: u64,
    /// What the head of the answer says that it truly cost.
    actual: Option<u64>,
}

impl After {
    pub(super) fn new(inner: Arc<Inner>, reservation: Reservation, dues: &Dues) -> After {
        let paid = |due: &Due| Paid { which: due.which(), reserved: due.cost.get(), actual: None };
        let tolls = dues.iter().map(paid).collect();
        let lease = dues.iter().filter_map(|due| due.limit(&inner).lease).min();
        let renewing = lease.and_then(|lease| renew(&inner, reservation.id(), lease));
        After { inner, reservation, tolls, bytes: 0, is_answered: false, is_done: false, renewing }
    }

    /// The head of the answer is there. Returns what settles it, if there is anything to settle and it need not wait for the body.
    pub(super) fn answered(
        &mut self,
        answer: &ResponseHead<'_>,
    ) -> Option<impl Future<Output = ()> + Send + 'static> {
        for paid in &mut self.tolls {
            paid.actual = self.inner.limits.get(&paid.which).settle.by_head(answer);
        }
        // Only now: a function that panics has seen nothing answered.
        self.is_answered = true;
        let waits = |post: &AppliedLimit| post.lease.is_some() || matches!(post.settle, Settle::ByBytes);
        if self.tolls.iter().any(|paid| waits(self.inner.limits.get(&paid.which))) {
            return None;
        }
        self.settling()
    }

    /// Whether it holds a lease, which ends when this is dropped.
    pub(super) fn has_lease(&self) -> bool {
        self.tolls.iter().any(|paid| self.inner.limits.get(&paid.which).lease.is_some())
    }

    /// So much of the body went out.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// Whether the counters are in this process, so that it is settled at once.
    pub(super) fn is_in_process(&self) -> bool {
        self.inner.gate.is_in_process()
    }

    /// What settles it, once and as far as the answer is known.
    fn settling(&mut self) -> Option<impl Future<Output = ()> + Send + 'static> {
        if std::mem::replace(&mut self.is_done, true) {
            return None;
        }
        let settlement = self.settlement()?;
        let (inner, id) = (self.inner.clone(), self.reservation.id());
        Some(async move { charge::settle(&inner, id, &settlement).await })
    }

    fn settlement(&self) -> Option<Settlement> {
        let actuals: SmallVec<[(&str, u64); 4]> = self
            .tolls
            .iter()
            .filter_map(|paid| {
                let name = self.name(paid);
                // A settlement knows limits by name. Of two tolls under one, neither may give back what the other has paid.
                let same = || self.tolls.iter().filter(|other| self.name(other) == name);
                same().any(|other| self.actual(other).is_some()).then(|| {
                    let dearest = same().map(|other| self.actual(other).unwrap_or(other.reserved)).max();
                    (name, dearest.unwrap_or_default())
                })
            })
            .collect();
        (!actuals.is_empty()).then(|| self.reservation.each(&actuals))
    }

    fn name<'a>(&'a self, paid: &'a Paid) -> &'a str {
        self.inner.limits.get(&paid.which).entry.rule.name()
    }

    /// What a toll truly cost, if it is not what was reserved.
    fn actual(&self, paid: &Paid) -> Option<u64> {
        let post = self.inner.limits.get(&paid.which);
        match &post.settle {
            Settle::Nothing => post.lease.map(|_| 0),
            Settle::ByStatus(_) | Settle::ByHead(_) => paid.actual,
            Settle::ByBytes => self.is_answered.then_some(self.bytes),
        }
    }
}

/// Renews leases before they run out, for as long as the request takes.
fn renew(inner: &Arc<Inner>, id: HoldId, lease: Micros) -> Option<AbortHandle> {
    let runtime = tokio::runtime::Handle::try_current().ok()?;
    let (inner, every) = (inner.clone(), Duration::from_micros((lease.get() / 3).max(1)));
    let renewing = runtime.spawn(async move {
        loop {
            tokio::time::sleep(every).await;
            match inner.gate.renew_lease(id).await {
                Ok(true) => {}
                // Reported. Nothing brings it back.
                Ok(false) => return,
                Err(error) => {
                    if let Some(count) = inner.unsettled.count() {
                        tracing::warn!(
                            count,
                            "a lease could not be renewed, and may run out before its request is done: {error}"
                        );
                    }
                }
            }
        }
    });
    Some(renewing.abort_handle())
}

impl Drop for After {
    /// The body is out, or somebody has gone away.
    fn drop(&mut self) {
        if let Some(renewing) = &self.renewing {
            renewing.abort();
        }
        let is_in_process = self.is_in_process();
        let Some(settling) = self.settling() else { return };
        if is_in_process {
            charge::at_once(settling);
        } else if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(settling);
        }
    }
}
