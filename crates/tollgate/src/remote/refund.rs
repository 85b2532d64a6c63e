//! A refund in a remote store.
//!
//! There is no fallback: if the store cannot refund, the caller gets the error.

use smallvec::SmallVec;
use tollgate_store::StoredCharge;

use super::{InFlight, Missed, Remote};
use crate::error::Error;
use crate::policy::entry::Resolved;

impl Remote {
    /// Gives charges back. An error means that nothing was given back, unless it is ambiguous.
    pub(crate) async fn refund(&self, charges: &[Resolved<'_, '_>]) -> Result<(), Error> {
        let stored: SmallVec<[StoredCharge<'_>; 4]> =
            charges.iter().filter_map(Resolved::stored_charge).collect();
        if stored.is_empty() {
            return Ok(());
        }
        // However this ends, the keys may have more left than the denial cache knows.
        let _in_flight = InFlight::new(self, charges, None);
        let nodes = self.nodes_of(&stored, None);
        let refunded = self.call("refund", nodes, |store| store.refund(&stored)).await;
        if refunded.is_ok() {
            self.changed(charges);
        }
        refunded.map_err(Missed::into_error)
    }
}
