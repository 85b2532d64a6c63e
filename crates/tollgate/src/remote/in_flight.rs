//! A charge between sending and answer. If its answer never comes, because the reply was lost or the caller left, the denials of
//! its keys are dropped. If this process chose its id, it is cancelled in the store.

use tollgate_kernel::Micros;
use tollgate_store::Hold;

use super::Remote;
use super::tasks::Fingerprints;
use crate::policy::entry::Resolved;

/// A charge or refund that is on its way, until it is [answered](Self::answered).
pub(super) struct InFlight<'a, 'b> {
    remote: &'a Remote,
    charges: Option<&'a [Resolved<'b, 'b>]>,
    hold: Option<Hold>,
    sent: Micros,
}

impl<'a, 'b> InFlight<'a, 'b> {
    /// A call that is being sent. `hold` is set if this process chose the id, so that no other caller settles it.
    pub(super) fn new(remote: &'a Remote, charges: &'a [Resolved<'b, 'b>], hold: Option<Hold>) -> Self {
        InFlight { remote, charges: Some(charges), hold, sent: remote.shared.clock.now() }
    }

    /// It is known what became of it.
    pub(super) fn answered(mut self) {
        self.charges = None;
    }
}

impl Drop for InFlight<'_, '_> {
    fn drop(&mut self) {
        let Some(charges) = self.charges else { return };
        self.remote.doubted(charges);
        if let Some(hold) = self.hold {
            self.remote.cancel_later(hold, charges, self.sent);
        }
    }
}

/// How long the longest lease of a charge lasts, if it takes any.
pub(super) fn longest_lease(charges: &[Resolved<'_, '_>]) -> Option<Micros> {
    charges.iter().filter_map(Resolved::lease).max()
}

impl Remote {
    /// Schedules a cancel: the store may hold a charge without a holder.
    #[cold]
    fn cancel_later(&self, hold: Hold, charges: &[Resolved<'_, '_>], sent: Micros) {
        // A hold lasts as long as its leases.
        let ttl = longest_lease(charges).map_or(hold.ttl, |lease| lease.max(hold.ttl));
        self.shared.tasks.cancel(
            Hold { ttl, ..hold },
            self.fingerprints(charges),
            sent,
            self.shared.clock.now(),
        );
        self.start_tasks();
    }

    /// The store's next answer for the keys of a charge is not known.
    fn doubted(&self, charges: &[Resolved<'_, '_>]) {
        self.fingerprints(charges).into_iter().for_each(|key| self.shared.denials.doubted(key));
    }

    /// The keys of a charge that may be in the denial cache.
    pub(super) fn fingerprints(&self, charges: &[Resolved<'_, '_>]) -> Fingerprints {
        let is_covered = |charge: &&Resolved<'_, '_>| {
            charge.remote().is_some_and(|(_, stored, _)| self.shared.denials.covers(&stored.limit))
        };
        charges.iter().filter(is_covered).filter_map(|charge| self.fingerprint(charge)).collect()
    }
}
