//! The end of a held charge, and a key that is forgotten: the call of the store, and what this process knew of the keys.

use tollgate_kernel::Cost;
use tollgate_store::{ChargeId, Nodes, Settled, Settlement, StoredCharge, StoredLimit};

use super::Remote;
use super::reservations::given_back;
use super::store_call::Missed;
use crate::error::Error;
use crate::policy::entry::RemoteLimit;

impl Remote {
    /// Settles a held charge where it is held.
    ///
    /// A charge whose reply was lost may be held twice: in this process, by the fallback, whose answer the caller has; and in the
    /// store, where it is cancelled as soon as the store answers. Until then it is settled in this process and
    /// [pending](Settled::Pending).
    pub(crate) async fn settle(&self, id: ChargeId, settlement: &Settlement) -> Result<Settled, Error> {
        self.settle_anywhere(id, settlement).await.map_err(Missed::into_error)
    }

    pub(super) async fn settle_anywhere(
        &self,
        id: ChargeId,
        settlement: &Settlement,
    ) -> Result<Settled, Missed> {
        if let Some(settled) = self.shared.fallback.settle(id, settlement) {
            return Ok(match settled.map_err(Missed::Wrong)? {
                Settled::Done if self.shared.tasks.will_cancel(id) => {
                    self.start_tasks();
                    Settled::Pending
                }
                settled => settled,
            });
        }
        let is_renewal = *settlement == Settlement::Renew;
        // The denial cache has no entries for leases, so releases and renewals do not change it.
        let is_of_leases = matches!(settlement, Settlement::Renew | Settlement::Release);
        let known = self.shared.reservations.find(id).and_then(|known| known.charges);
        // However the call ends, the keys of a reservation may have got something back. An id that this process did not make
        // clears no cached denial unless the store knows it, because a client can invent ids.
        let ended = known.filter(|_| !is_of_leases).map(|charges| {
            let keys = charges.iter().filter_map(|charge| charge.key).collect();
            (self.shared.denials.end(keys), given_back(&charges, settlement))
        });
        let settled = self.settle_store(id, settlement).await?;
        match (settled, ended) {
            (Settled::Done, _) if is_renewal => {
                self.shared.reservations.renewed(id, self.shared.clock.now());
            }
            (Settled::Done, None) if !is_of_leases => drop(self.shared.denials.end_all()),
            (Settled::Done, Some((ended, keys))) => ended.given_back(&keys),
            _ => {}
        }
        if !is_renewal || settled != Settled::Done {
            self.shared.reservations.remove(id);
        }
        Ok(settled)
    }

    pub(super) async fn settle_store(
        &self,
        id: ChargeId,
        settlement: &Settlement,
    ) -> Result<Settled, Missed> {
        let nodes = Nodes::from_slice(&[self.shared.store.node_of_hold(id)]);
        self.call("settle", nodes, |store| store.settle(id, settlement)).await
    }

    /// A settlement was answered, so the store is reachable: continues the background work.
    pub(crate) async fn go_on(&self) {
        self.answered().await;
    }

    /// Forgets a key in the store and, once the store has answered, in this process. If the store fails, nothing is forgotten.
    pub(crate) async fn forget(
        &self,
        stored: &StoredLimit,
        remote: &RemoteLimit,
        key: &str,
    ) -> Result<bool, Error> {
        let fingerprint = self.shared.seeds.fingerprint(remote.number, key);
        let ended = self.shared.denials.end([fingerprint].into_iter().collect());
        let charge = StoredCharge { limit: stored, key, cost: Cost::ONE, shadow: false };
        let nodes = self.nodes_of(&[charge], None);
        let forgotten = self.call("forget", nodes, |store| store.forget(stored, key)).await;
        let forgotten = forgotten.map_err(Missed::into_error)?;
        let was_here = self.shared.fallback.forget(remote, key);
        ended.given_back(&[fingerprint]);
        drop(self.shared.denials.end_all());
        self.answered().await;
        Ok(forgotten || was_here)
    }
}
