//! The end of an admitted charge: it is settled, cancelled, renewed or released, at once or in the background.

use std::sync::Arc;

#[cfg(feature = "http")]
use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Settled, Settlement};

use super::held::Held;
use super::{Backend, Engine};
use crate::error::Error;
use crate::lease::{Lease, Listener};

/// How long a settlement in the background is tried again.
#[cfg(feature = "http")]
const SETTLED_WITHIN: Micros = Micros::from_secs(30);

impl Engine {
    /// Settles, cancels or renews a charge by its id.
    pub(crate) async fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, Error> {
        if let Some(settled) = self.settle_local(id, settlement) {
            return settled;
        }
        let Backend::Remote(remote) = &self.backend else { return Ok(Settled::Unknown) };
        let is_lease = *settlement == Settlement::Renew && remote.is_lease(id);
        let started = self.operation_started();
        let settled = Box::pin(remote.settle(id, settlement)).await;
        self.report_settled(settlement, &settled, started);
        self.lines.nudge();
        let settled = settled?;
        Box::pin(remote.go_on()).await;
        if is_lease && settled == Settled::Unknown {
            self.lost_leases.report();
        }
        Ok(settled)
    }

    /// The same where it can be done at once: the counters are in this process, or nothing was charged.
    pub(crate) fn settle_local(
        &self,
        id: ChargeId,
        settlement: &Settlement,
    ) -> Option<Result<Settled, Error>> {
        if id.is_of_nothing() {
            return Some(Ok(Settled::Done));
        }
        let Backend::Memory(store) = &self.backend else { return None };
        let started = self.operation_started();
        let settled = store.settle(id, settlement).map_err(Error::from);
        self.lines.nudge();
        self.report_settled(settlement, &settled, started);
        Some(settled)
    }

    /// Forgets a local reservation that will not be settled again: its leases end, its charges stay.
    pub(crate) fn forget_local(&self, id: ChargeId) {
        if let Backend::Memory(store) = &self.backend {
            store.release(id);
            self.lines.nudge();
        }
    }

    /// Keeps the leases of a permit in a remote store renewed. Local leases do not expire while they are held.
    pub(crate) fn keep_renewed(&self, held: &Held, holder: &Arc<Lease>) {
        if let (Backend::Remote(remote), Some(lease)) = (&self.backend, held.lease)
            && !held.is_empty
        {
            remote.keep_renewed(held.id, lease, holder.clone());
        }
    }

    /// Stops renewing the leases of a charge; their holder settles it.
    pub(crate) fn stop_renewing(&self, id: ChargeId) {
        if let Backend::Remote(remote) = &self.backend {
            remote.stop_renewing(id);
        }
    }

    /// Releases the leases of a permit: at once if they are local, in the background if they are remote.
    pub(crate) fn release_later(&self, held: &Held) {
        match (&self.backend, held.lease) {
            (Backend::Memory(_), Some(_)) => {
                self.forget_local(held.id);
                self.report_settled(&Settlement::Release, &Ok(Settled::Done), None);
            }
            (Backend::Remote(remote), Some(lease)) if !held.is_empty => {
                self.report_settled(&Settlement::Release, &Ok(Settled::Pending), None);
                remote.release_later(held.id, Settlement::Release, lease);
            }
            _ => {}
        }
    }

    /// Settles a charge in the background, with retries.
    #[cfg(feature = "http")]
    pub(crate) fn settle_later(&self, held: &Held, settlement: Settlement) {
        if let Backend::Remote(remote) = &self.backend
            && !held.is_empty
        {
            let ttl = held.lease.unwrap_or(SETTLED_WITHIN);
            self.report_settled(&settlement, &Ok(Settled::Pending), self.operation_started());
            remote.release_later(held.id, settlement, ttl);
        }
    }

    /// Releases the leases of a permit. If the store fails, that is tried again in the background.
    pub(crate) async fn release(&self, held: &Held) -> Result<(), Error> {
        let is_held = held.lease.is_some() && !held.is_empty;
        if self.is_local() || !is_held {
            self.release_later(held);
            return Ok(());
        }
        self.stop_renewing(held.id);
        // A caller that drops this future has released it all the same.
        let later = ReleaseOnDrop { engine: self, held: Some(held) };
        let released = self.settle(held.id, &Settlement::Release).await;
        if released.is_ok() {
            later.done();
        }
        released.map(drop)
    }

    /// Whether the local leases of a permit are gone because their key was reset.
    pub(crate) fn is_gone_local(&self, held: &Held) -> bool {
        held.lease.is_some()
            && !held.is_empty
            && matches!(&self.backend, Backend::Memory(store) if !matches!(store.settle(held.id, &Settlement::Renew), Ok(Settled::Done)))
    }

    /// Counts a lease that was found to be lost.
    pub(crate) fn report_lost(&self) {
        self.lost_leases.report();
    }

    /// A task that is woken when a key is reset.
    pub(crate) fn resets(&self) -> Listener<'_> {
        self.resets.listener()
    }

    /// Waits until all pending cancels and releases in a remote store are done.
    pub(crate) async fn flush(&self) {
        if let Backend::Remote(remote) = &self.backend {
            Box::pin(remote.flush()).await;
        }
    }
}

/// Leaves the release of a permit to the background if its own call did not get there.
struct ReleaseOnDrop<'a> {
    engine: &'a Engine,
    held: Option<&'a Held>,
}

impl ReleaseOnDrop<'_> {
    fn done(mut self) {
        self.held = None;
    }
}

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(held) = self.held {
            self.engine.release_later(held);
        }
    }
}
