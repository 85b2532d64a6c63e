//! How much of unfinished calls is held at once, over all connections.
//!
//! A call is gathered until it has come whole, and windows of HTTP/2 are given back as it is: without an end to it a peer could
//! have us hold a hundred long calls for each of its connections. So what a call gathers beyond its first 4 KiB comes out of one
//! budget, and goes back when the call is answered or given up; where it is spent, the call ends with RESOURCE_EXHAUSTED. Nearly all
//! calls are shorter than that, and nobody can take the budget from those; how many of them there are is for `seats.rs`. What a call
//! has only announced costs no memory yet.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use hyper::body::{Body, Buf, Frame, SizeHint};
use tokio::sync::Semaphore;
use tonic::Status;

use super::seats::{Row, Seat, refused};

/// What is counted as one.
const UNIT: usize = 4 * 1024;

/// How many units all calls have together: 64 MiB.
const UNITS: usize = 64 * 1024 * 1024 / UNIT;

/// What all calls draw on.
#[derive(Clone)]
pub(super) struct Budget(Arc<Semaphore>);

/// What one call has drawn; given back when its body and its answer are done.
pub(super) struct Drawn {
    budget: Budget,
    units: AtomicUsize,
}

impl Budget {
    pub(super) fn new() -> Budget {
        Budget(Arc::new(Semaphore::new(UNITS)))
    }

    /// For a new call.
    pub(super) fn begin(&self) -> Arc<Drawn> {
        Arc::new(Drawn { budget: self.clone(), units: AtomicUsize::new(0) })
    }
}

impl Drawn {
    /// Draws what is lacking for a call of so many bytes, and says whether it was to be had.
    fn reach(&self, bytes: usize) -> bool {
        // The first unit is everybody's own.
        let needed = bytes.saturating_sub(1) / UNIT;
        let lacking = needed.saturating_sub(self.units.load(Ordering::Relaxed));
        let Ok(permit) = self.budget.0.try_acquire_many(u32::try_from(lacking).unwrap_or(u32::MAX)) else {
            return false;
        };
        permit.forget();
        self.units.fetch_add(lacking, Ordering::Relaxed);
        true
    }
}

impl Drop for Drawn {
    fn drop(&mut self) {
        self.budget.0.add_permits(*self.units.get_mut());
    }
}

/// The body of a call, which draws as it comes.
pub(super) struct Gathered<B> {
    body: B,
    drawn: Arc<Drawn>,
    bytes: usize,
    /// No call is gathered beyond this; what comes after it was read and let go of.
    longest: usize,
    row: Arc<Row>,
    /// Its own, while it is waited for.
    seat: Option<Seat>,
}

impl<B> Gathered<B> {
    pub(super) fn new(body: B, drawn: Arc<Drawn>, longest: usize, row: Arc<Row>) -> Gathered<B> {
        Gathered { body, drawn, bytes: 0, longest, row, seat: None }
    }
}

impl<B> Body for Gathered<B>
where
    B: Body + Unpin,
    B::Error: std::error::Error + Send + Sync + 'static,
{
    type Data = B::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, Status>>> {
        let frame = match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Pending if self.seat.is_some() => return Poll::Pending,
            Poll::Pending => match self.row.take() {
                Ok(seat) => {
                    self.seat = Some(seat);
                    return Poll::Pending;
                }
                Err(status) => return Poll::Ready(Some(Err(status))),
            },
            Poll::Ready(None) => {
                self.seat = None;
                return Poll::Ready(None);
            }
            Poll::Ready(Some(Err(error))) => {
                return Poll::Ready(Some(Err(Status::from_error(Box::new(error)))));
            }
            Poll::Ready(Some(Ok(frame))) => frame,
        };
        let more = frame.data_ref().map_or(0, Buf::remaining);
        self.bytes = self.bytes.saturating_add(more).min(self.longest);
        if self.drawn.reach(self.bytes) {
            return Poll::Ready(Some(Ok(frame)));
        }
        let reported = "too many long calls are being sent at once; try again, or send shorter ones";
        Poll::Ready(Some(Err(refused(reported))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full};
    use tonic::Code;

    use super::super::seats::Seats;
    use super::*;
    use crate::app::tests::ready;

    const LONGEST: usize = 8 * UNIT;

    /// A call of so many bytes, once its body was read.
    fn call(budget: &Budget, bytes: usize) -> Result<Arc<Drawn>, Status> {
        let drawn = budget.begin();
        let row = Seats::of_calls().row(SocketAddr::from(([127, 0, 0, 1], 1)));
        let mut body = Gathered::new(Full::new(Bytes::from(vec![0; bytes])), drawn.clone(), LONGEST, row);
        ready(body.frame()).expect("a frame").map(|_| drawn)
    }

    #[test]
    fn a_call_draws_what_it_gathers_beyond_its_own_and_gives_it_back() {
        for (bytes, units) in
            [(1, 0), (UNIT, 0), (UNIT + 1, 1), (2 * UNIT, 1), (LONGEST, 7), (9 * LONGEST, 7)]
        {
            let budget = Budget::new();
            let drawn = call(&budget, bytes).expect("room");
            assert_eq!(UNITS - budget.0.available_permits(), units, "{bytes} bytes");
            drop(drawn);
            assert_eq!(budget.0.available_permits(), UNITS, "{bytes} bytes");
        }
    }

    #[test]
    fn long_calls_are_refused_when_it_is_spent_and_short_ones_never() {
        let budget = Budget(Arc::new(Semaphore::new(10)));
        let first = call(&budget, LONGEST).expect("room");
        let refused = call(&budget, LONGEST).map(|_| ()).expect_err("it is spent");
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert_eq!(budget.0.available_permits(), 3, "what is refused holds nothing");
        let _second = call(&budget, 4 * UNIT).expect("room for three");
        assert!(call(&budget, UNIT).is_ok());
        assert!(call(&budget, UNIT + 1).is_err());
        drop(first);
        assert!(call(&budget, LONGEST).is_ok());
    }
}
