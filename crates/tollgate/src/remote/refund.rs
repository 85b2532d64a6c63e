//! A refund where the counters are in a remote store.
//!
//! The store gives back, and if it cannot, nothing answers in its place: the caller sees the error.

use smallvec::SmallVec;
use tollgate_store::StoredCharge;

use super::{InFlight, Missed, Remote};
use crate::error::Error;
use crate::policy::entry::Resolved;

impl Remote {
    /// Gives back what counts now. An error means that nothing was given back, unless it is ambiguous.
    pub(crate) async fn refund(&self, charges: &[Resolved<'_, '_>]) -> Result<(), Error> {
        let items: SmallVec<[StoredCharge<'_>; 4]> =
            charges.iter().filter_map(Resolved::stored_charge).collect();
        if items.is_empty() {
            return Ok(());
        }
        // However this ends, the keys may have more left than is believed.
        let _in_flight = InFlight::new(self, charges, None);
        let nodes = self.nodes_of(&items, None);
        self.call("refund", nodes, |store| store.refund(&items)).await.map_err(Missed::into_error)
    }
}
