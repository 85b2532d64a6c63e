//! The work after a request that passed: settle its reservation and release its leases.
//!
//! A reservation is settled once. If a cost depends on the response body, the settlement waits for the end of the body. If not,
//! it is done when the response head is there, before the response is sent, so that the client's next request sees it. If the
//! client disconnects earlier, the reserved amount stays charged and leases are released. A lease is renewed while its request
//! runs; a lost lease is logged and counted. An upgraded connection (101) keeps its lease for as long as its handler keeps the
//! [`Lease`](super::Lease).

use std::future::Future;
use std::sync::Arc;

use smallvec::SmallVec;
use tollgate_store::Settlement;

use super::applied::{AppliedLimit, Which};
use super::charge;
use super::charges::{RouteCharge, RouteCharges};
use super::layer::Inner;
use crate::lease::Lease;
use crate::reservation::Reservation;
use crate::route::{ResponseHead, Settle};

/// The work that is left for a request.
pub(super) struct After {
    inner: Arc<Inner>,
    reservation: Reservation,
    charged: SmallVec<[ChargedLimit; 4]>,
    bytes: u64,
    is_answered: bool,
    is_done: bool,
    /// Whether leases are renewed, as long as this is there.
    is_renewed: bool,
}

/// What follows from the head of an answer.
pub(super) enum Answered<F> {
    /// The body is to be waited for.
    Waits,
    /// Nothing is left to do.
    Settled,
    Settling(F),
}

/// A route limit that was charged.
struct ChargedLimit {
    which: Which,
    reserved: u64,
    /// The actual cost, according to the response head.
    actual: Option<u64>,
}

impl After {
    pub(super) fn new(
        inner: Arc<Inner>,
        reservation: Reservation,
        route_charges: &RouteCharges<'_>,
    ) -> After {
        let limit = |route_charge: &RouteCharge<'_>| ChargedLimit {
            which: route_charge.which(),
            reserved: route_charge.cost.get(),
            actual: None,
        };
        let charged = route_charges.iter().map(limit).collect();
        let is_renewed = reservation.held().lease.is_some() && !inner.gate.engine.is_local();
        if is_renewed {
            inner.gate.engine.keep_renewed(reservation.held(), &Arc::new(Lease::default()));
        }
        After { inner, reservation, charged, bytes: 0, is_answered: false, is_done: false, is_renewed }
    }

    /// The head of the answer is there. Returns what settles it, if there is anything to settle, it need not wait for the body
    /// and it is not done at once.
    pub(super) fn answered(
        &mut self,
        answer: &ResponseHead<'_>,
    ) -> Answered<impl Future<Output = ()> + Send + 'static> {
        let by_head = |limit: &ChargedLimit| self.inner.limits.get(&limit.which).settle.by_head(answer);
        let actuals: SmallVec<[Option<u64>; 4]> = self.charged.iter().map(by_head).collect();
        // Only now: if one of the functions panics, all charges stay as they were reserved.
        self.charged.iter_mut().zip(actuals).for_each(|(limit, actual)| limit.actual = actual);
        self.is_answered = true;
        let waits =
            |applied: &AppliedLimit| applied.lease.is_some() || matches!(applied.settle, Settle::ByBytes);
        if self.charged.iter().any(|limit| waits(self.inner.limits.get(&limit.which))) {
            return Answered::Waits;
        }
        if self.is_in_process() {
            self.settle_local();
            return Answered::Settled;
        }
        self.settling().map_or(Answered::Settled, Answered::Settling)
    }

    /// Whether it holds a lease, which ends when this is dropped.
    pub(super) fn has_lease(&self) -> bool {
        self.charged.iter().any(|limit| self.inner.limits.get(&limit.which).lease.is_some())
    }

    /// So much of the body went out.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }

    /// Whether the counters are in this process, so that it is settled at once.
    pub(super) fn is_in_process(&self) -> bool {
        self.inner.gate.engine.is_local()
    }

    /// What settles it, once and as far as the answer is known.
    fn settling(&mut self) -> Option<impl Future<Output = ()> + Send + 'static> {
        let settlement = self.take_settlement()?;
        let (inner, id) = (self.inner.clone(), self.reservation.id());
        Some(async move { charge::settle(&inner, id, &settlement).await })
    }

    /// The same where the counters are in this process.
    fn settle_local(&mut self) {
        if let Some(settlement) = self.take_settlement() {
            charge::settle_local(&self.inner, self.reservation.id(), &settlement);
        }
    }

    fn take_settlement(&mut self) -> Option<Settlement> {
        if std::mem::replace(&mut self.is_done, true) {
            return None;
        }
        if self.is_renewed {
            self.inner.gate.engine.stop_renewing(self.reservation.id());
        }
        let is_corrected = self.charged.iter().any(|limit| self.actual(limit).is_some());
        let actuals: SmallVec<[u64; 4]> =
            self.charged.iter().map(|limit| self.actual(limit).unwrap_or(limit.reserved)).collect();
        self.reservation.held().each(&actuals).ok().filter(|_| is_corrected)
    }

    /// The actual cost of a charge, if it differs from the reserved cost.
    fn actual(&self, limit: &ChargedLimit) -> Option<u64> {
        let applied = self.inner.limits.get(&limit.which);
        match &applied.settle {
            Settle::Nothing => applied.lease.map(|_| 0),
            Settle::ByStatus(_) | Settle::ByHead(_) => limit.actual,
            Settle::ByBytes => self.is_answered.then_some(self.bytes),
        }
    }
}

impl Drop for After {
    /// The body is complete, or the client or the service has gone away.
    fn drop(&mut self) {
        if self.is_in_process() {
            self.settle_local();
        } else if let Some(settlement) = self.take_settlement() {
            // Sent again until the store answers or the leases have ended.
            self.inner.gate.engine.settle_later(self.reservation.held(), settlement);
        }
    }
}
