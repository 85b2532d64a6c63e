//! A charge between sending and answer. If its answer never comes, because the reply was lost or the caller left, nothing is
//! believed of its keys any more, and if it carries an id that this process chose, it is cancelled in the store.

use tollgate_kernel::{Limit, Micros};
use tollgate_store::{Hold, StoredLimit};

use super::Remote;
use super::cancels::Fingerprints;
use crate::gate::Resolved;

/// A charge or refund that is on its way, until it is [answered](Self::answered).
pub(super) struct InFlight<'a, 'b> {
    remote: &'a Remote,
    asks: Option<&'a [Resolved<'b, 'b>]>,
    hold: Option<Hold>,
    sent: Micros,
}

impl<'a, 'b> InFlight<'a, 'b> {
    /// Sent now. A `hold` is one whose id was chosen here, so that nobody else settles it.
    pub(super) fn new(remote: &'a Remote, asks: &'a [Resolved<'b, 'b>], hold: Option<Hold>) -> Self {
        InFlight { remote, asks: Some(asks), hold, sent: remote.kept.clock.now() }
    }

    /// It is known what became of it.
    pub(super) fn answered(mut self) {
        self.asks = None;
    }
}

impl Drop for InFlight<'_, '_> {
    fn drop(&mut self) {
        let Some(asks) = self.asks else { return };
        self.remote.changed(asks);
        if let Some(hold) = self.hold {
            self.remote.cancel_later(hold, asks, self.sent);
        }
    }
}

/// How long the longest lease of a charge lasts, if it takes any.
pub(super) fn longest_lease(asks: &[Resolved<'_, '_>]) -> Option<Micros> {
    let lease = |(_, stored, _): (_, &StoredLimit, _)| match &stored.limit {
        Limit::Concurrency(leases) => Some(leases.lease()),
        _ => None,
    };
    asks.iter().filter_map(Resolved::away).filter_map(lease).max()
}

impl Remote {
    /// Remembers that the store may hold a charge that nobody counts on.
    #[cold]
    fn cancel_later(&self, hold: Hold, asks: &[Resolved<'_, '_>], sent: Micros) {
        // A hold lasts as long as its leases.
        let ttl = longest_lease(asks).map_or(hold.ttl, |lease| lease.max(hold.ttl));
        self.kept.cancels.add(Hold { ttl, ..hold }, self.fingerprints(asks), sent, self.kept.clock.now());
        self.start_cancelling();
    }

    /// The keys of a charge that the denial cache may believe something of.
    pub(super) fn fingerprints(&self, asks: &[Resolved<'_, '_>]) -> Fingerprints {
        let is_covered = |ask: &&Resolved<'_, '_>| {
            ask.away().is_some_and(|(_, stored, _)| self.kept.denials.covers(&stored.limit))
        };
        asks.iter().filter(is_covered).filter_map(|ask| self.fingerprint(ask)).collect()
    }
}
