//! How many calls are waited for at once, over all connections.
//!
//! A call whose message has not come whole holds a stream, a task and what it has sent so far (some 12 KiB with its first 4 KiB), and
//! so does one that is told things for as long as it likes (health, reflection). A peer may have a hundred of them on each of its
//! connections. So whoever is waited for takes a seat: there are so many for all, and beyond those a few for each connection. Calls
//! of honest peers come whole or nearly so, and leave their seat at once: those few are enough for them, whoever else sits there.
//! A call that waits for its store takes none.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use tonic::Status;

/// How many seats there are for all, and beyond those for each connection.
const FOR_ALL: usize = 1_024;
const OF_EACH: usize = 4;

/// The seats of all connections.
#[derive(Default)]
pub(super) struct Seats(AtomicUsize);

/// Those of one connection.
pub(super) struct Row {
    all: Arc<Seats>,
    taken: AtomicUsize,
}

/// One of them, left when dropped.
pub(super) struct Seat(Arc<Row>);

impl Seats {
    /// For a new connection.
    pub(super) fn row(self: &Arc<Self>) -> Arc<Row> {
        Arc::new(Row { all: self.clone(), taken: AtomicUsize::new(0) })
    }
}

impl Row {
    /// A seat, if there is one for this connection.
    pub(super) fn take(self: &Arc<Self>) -> Result<Seat, Status> {
        let own = self.taken.fetch_add(1, Ordering::Relaxed);
        let all = self.all.0.fetch_add(1, Ordering::Relaxed);
        // Left again if it is not to be had.
        let seat = Seat(self.clone());
        match own < OF_EACH || all < FOR_ALL {
            true => Ok(seat),
            false => Err(refused("too many calls are waited for at once; send them whole, or later")),
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
        self.0.all.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Turns a call away of which there is too much, and counts it.
pub(super) fn refused(why: &'static str) -> Status {
    metrics::counter!("tollgate_envoy_calls_total", "code" => "error").increment(1);
    Status::resource_exhausted(why)
}

/// An answer whose call keeps its seat for as long as it goes on.
pub(super) struct Seated<B> {
    pub(super) body: B,
    pub(super) _seat: Seat,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Seated<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
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
    use super::*;

    fn taken(row: &Arc<Row>, count: usize) -> Vec<Seat> {
        (0..count).map_while(|_| row.take().ok()).collect()
    }

    #[test]
    fn one_connection_may_have_what_is_free_and_all_others_a_few() {
        let seats = Arc::new(Seats::default());
        let [greedy, honest, other] = [(); 3].map(|()| seats.row());
        let many = taken(&greedy, 10 * FOR_ALL);
        assert_eq!(many.len(), FOR_ALL);
        let few = taken(&honest, 10 * FOR_ALL);
        assert_eq!(few.len(), OF_EACH, "those are its own");
        assert_eq!(taken(&other, 1).len(), 1);
        drop(few);
        assert_eq!(taken(&honest, 10 * FOR_ALL).len(), OF_EACH);
        drop(many);
        assert_eq!(taken(&honest, 10 * FOR_ALL).len(), FOR_ALL);
        assert_eq!(seats.0.load(Ordering::Relaxed), 0, "what was refused holds nothing");
    }
}
