//! Bodies of calls: up to 32 MiB each, and all of them together within one budget of memory.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body;
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
    pub(super) async fn read<B: Body<Data = Bytes> + Unpin>(&self, body: B) -> Result<HeldBody, Fault> {
        if body.size_hint().lower() > MOST_BYTES as u64 {
            return Err(Fault::too_large(MOST_BYTES));
        }
        match tokio::time::timeout(WHOLE, self.gather(body)).await {
            Ok(gathered) => gathered,
            Err(_) => Err(Fault::too_slow()),
        }
    }

    async fn gather<B: Body<Data = Bytes> + Unpin>(&self, mut body: B) -> Result<HeldBody, Fault> {
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

    /// Never waits: the holders of the rest may wait for long.
    fn take(&self, units: usize) -> Result<OwnedSemaphorePermit, Fault> {
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        self.units.clone().try_acquire_many_owned(units).map_err(|_| Fault::no_memory())
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{Stream, StreamExt, stream};
    use http::StatusCode;
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use tokio::time::{Instant, sleep};

    use super::*;

    /// A body of these pieces, as they come.
    fn body(
        pieces: impl Stream<Item = usize> + Send + 'static,
    ) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames = pieces.map(|length| Ok(Frame::data(Bytes::from(vec![b'x'; length]))));
        StreamBody::new(Box::pin(frames))
    }

    /// A piece each so many seconds, without end.
    fn trickle(seconds: u64) -> impl Stream<Item = usize> {
        stream::repeat(1).then(move |length| async move {
            sleep(Duration::from_secs(seconds)).await;
            length
        })
    }

    /// How a body is answered, and after how many seconds.
    async fn check(pieces: impl Stream<Item = usize> + Send + 'static) -> (StatusCode, u64) {
        let (budget, began) = (Budget::new(0), Instant::now());
        let fault = budget.read(body(pieces)).await.err().expect("a fault");
        let status = fault.into_response(false, "id").status();
        assert_eq!(budget.units.available_permits(), MOST_BYTES / UNIT, "what it held is free again");
        (status, began.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_trickles_is_given_up() {
        // Nothing for ten seconds, and a byte each nine seconds.
        assert_eq!(check(trickle(11)).await, (StatusCode::REQUEST_TIMEOUT, 10));
        assert_eq!(check(stream::pending()).await, (StatusCode::REQUEST_TIMEOUT, 10));
        assert_eq!(check(trickle(9)).await, (StatusCode::REQUEST_TIMEOUT, 120));
    }

    #[tokio::test]
    async fn a_body_may_have_32_mib_and_no_byte_more() {
        let budget = Budget::new(0);
        let held = budget.read(body(stream::iter([MOST_BYTES - 5, 5]))).await.expect("it fits");
        assert_eq!((held.bytes.len(), budget.units.available_permits()), (MOST_BYTES, 0));
        drop(held);
        let (status, _) = check(stream::iter([MOST_BYTES - 5, 6])).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    }

    /// Each body takes as much as has come of it, and gives it back when its call ends.
    #[tokio::test]
    async fn bodies_share_one_budget() {
        let budget = Budget::new(MOST_BYTES);
        let half = || body(stream::iter([MOST_BYTES / 4, MOST_BYTES / 4]));
        let first = budget.read(half()).await.expect("room");
        let second = budget.read(half()).await.expect("room");
        let refused = budget.read(half()).await.err().expect("no room").into_response(false, "id");
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(refused.headers()["retry-after"], "1");
        drop(first);
        let third = budget.read(half()).await.expect("room again");
        drop((second, third));
        assert_eq!(budget.units.available_permits(), MOST_BYTES / UNIT);
    }
}
