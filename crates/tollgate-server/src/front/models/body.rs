//! Bodies of calls: up to 32 MiB each, and all of them together within one budget of memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::fault::Fault;

/// The longest body.
pub(super) const MOST_BYTES: usize = 32 * 1024 * 1024;

/// How long a body may take, and how long one piece of it.
const WHOLE: Duration = Duration::from_secs(120);
const PIECE: Duration = Duration::from_secs(10);

/// What a permit stands for.
const UNIT: usize = 4 * 1024;

/// How much of bodies is held at once.
pub(super) struct Budget {
    units: Arc<Semaphore>,
}

/// A body, and its share of the budget.
pub(super) struct HeldBody {
    pub(super) bytes: Bytes,
    _share: OwnedSemaphorePermit,
}

impl Budget {
    pub(super) fn new(bytes: usize) -> Budget {
        // A body of the longest kind always fits.
        let units = (bytes.max(MOST_BYTES) / UNIT).min(Semaphore::MAX_PERMITS);
        Budget { units: Arc::new(Semaphore::new(units)) }
    }

    /// A whole body, if it is not too long, comes in time and there is room.
    pub(super) async fn read(&self, body: Incoming) -> Result<HeldBody, Fault> {
        if body.size_hint().lower() > MOST_BYTES as u64 {
            return Err(Fault::too_large(MOST_BYTES));
        }
        match tokio::time::timeout(WHOLE, self.gather(body)).await {
            Ok(gathered) => gathered,
            Err(_) => Err(Fault::too_slow()),
        }
    }

    async fn gather(&self, mut body: Incoming) -> Result<HeldBody, Fault> {
        let mut share = self.take(1)?;
        let mut whole = BytesMut::new();
        loop {
            let frame = match tokio::time::timeout(PIECE, body.frame()).await {
                Err(_) => return Err(Fault::too_slow()),
                Ok(None) => return Ok(HeldBody { bytes: whole.freeze(), _share: share }),
                Ok(Some(Err(_))) => return Err(Fault::malformed("the body ended early")),
                Ok(Some(Ok(frame))) => frame,
            };
            let Ok(piece) = frame.into_data() else { continue };
            let length = whole.len() + piece.len();
            if length > MOST_BYTES {
                return Err(Fault::too_large(MOST_BYTES));
            }
            let units = length.div_ceil(UNIT).saturating_sub(share.num_permits());
            if units > 0 {
                share.merge(self.take(units)?);
            }
            whole.extend_from_slice(&piece);
        }
    }

    /// Never waits: those who hold the rest may wait for long.
    fn take(&self, units: usize) -> Result<OwnedSemaphorePermit, Fault> {
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        self.units.clone().try_acquire_many_owned(units).map_err(|_| Fault::no_memory())
    }
}
