//! A refund where the counters are elsewhere.
//!
//! A slice that this process has of a key is given back first, so that the store counts what was used and no more: what nobody
//! used is not refunded. Then the store gives back, and if it cannot, nobody stands in for it: whoever asked is told. What other
//! processes have of a key in slices counts as used.

use smallvec::SmallVec;

use super::{InFlight, Missed, Remote};
use crate::error::Error;
use crate::gate::{self, Away, Resolved};
use crate::slices::TakenBack;

impl Remote {
    /// Gives back what counts now. An error means that nothing was given back, unless it is ambiguous.
    pub(crate) async fn refund(&self, asks: &[Resolved<'_, '_>]) -> Result<(), Error> {
        let items = gate::store_items(asks);
        if items.is_empty() {
            return Ok(());
        }
        // However this ends, the keys may have more left than is believed.
        let _in_flight = InFlight::new(self, asks, None);
        self.give_back_slices_of(asks).await.map_err(Missed::into_error)?;
        let nodes = self.nodes_of(&items, None);
        self.call("refund", nodes, |store| store.refund(&items)).await.map_err(Missed::into_error)
    }

    /// Gives back what this process has of the keys in slices; what surely did not get there goes on being used.
    async fn give_back_slices_of(&self, asks: &[Resolved<'_, '_>]) -> Result<(), Missed> {
        let now = self.kept.clock.now();
        let take_back = |(key, _, away): (&str, _, &Away)| {
            away.slice?;
            self.kept.slices.take_back(self.kept.seeds.fingerprint(away.number, key), now)
        };
        let slices: SmallVec<[TakenBack; 1]> =
            asks.iter().filter_map(Resolved::away).filter_map(take_back).collect();
        let mut failed = None;
        for slice in slices {
            if let Err(missed) = self.give_back_one(slice.unused).await {
                if !missed.trouble().is_ambiguous {
                    self.kept.slices.put_back(slice);
                }
                failed = Some(missed);
            }
        }
        failed.map_or(Ok(()), Err)
    }
}
