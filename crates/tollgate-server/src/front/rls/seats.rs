//! How many calls are waited for at once, over all connections.
//!
//! A call whose message has not come whole holds a stream, a task and what it has sent so far (some 12 KiB with its first 4 KiB), and
//! so does one that streams answers for as long as it likes (health, reflection). A peer may have a hundred of them on each of its
//! connections. So a call that is waited for takes a seat: first one of the few that each connection has for itself, then one of those
//! for all, of which one peer has a quarter at most. Streams may last for an hour and have a
//! separate limit, so they cannot block incomplete calls. Calls of honest peers come whole or nearly so, and leave their seat at once: those few are
//! enough for them, whichever others have seats. A call that waits for its store takes none.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tonic::Status;

use crate::peer_prefix::peer_prefix;

/// How many seats there are for all, and beyond those for each connection.
const FOR_ALL: usize = 1_024;
const OF_EACH: usize = 8;

/// The same for streams: a watch for each connection and a check beside it, and a hundred of one connection.
const FOR_ALL_ASIDE: usize = 512;
const OF_EACH_ASIDE: usize = 2;

/// How many peers it takes to have all that are for all.
const PEERS: usize = 4;

/// The seats of all connections, for one kind of calls.
pub(super) struct Seats {
    for_all: usize,
    of_each: usize,
    taken: AtomicUsize,
    peers: Mutex<HashMap<IpAddr, Weak<Peer>>>,
}

/// One peer, for as long as it has a connection, and how many it has of the seats for all.
struct Peer {
    address: IpAddr,
    all: Arc<Seats>,
    taken: AtomicUsize,
}

/// The seats of one connection.
pub(super) struct Row {
    peer: Arc<Peer>,
    taken: AtomicUsize,
}

/// One of them, left when dropped.
pub(super) struct Seat {
    row: Arc<Row>,
    is_for_all: bool,
}

impl Seats {
    /// For calls of which more is to come.
    pub(super) fn of_calls() -> Arc<Seats> {
        Seats::new(FOR_ALL, OF_EACH)
    }

    /// For streams.
    pub(super) fn aside() -> Arc<Seats> {
        Seats::new(FOR_ALL_ASIDE, OF_EACH_ASIDE)
    }

    fn new(for_all: usize, of_each: usize) -> Arc<Seats> {
        Arc::new(Seats { for_all, of_each, taken: AtomicUsize::new(0), peers: Mutex::default() })
    }

    /// For a new connection of a peer.
    pub(super) fn row(self: &Arc<Self>, peer: SocketAddr) -> Arc<Row> {
        let address = peer_prefix(peer.ip());
        let mut peers = self.peers.lock();
        let known = peers.get(&address).and_then(Weak::upgrade);
        let peer = known.unwrap_or_else(|| {
            let peer = Arc::new(Peer { address, all: self.clone(), taken: AtomicUsize::new(0) });
            peers.insert(address, Arc::downgrade(&peer));
            peer
        });
        Arc::new(Row { peer, taken: AtomicUsize::new(0) })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut peers = self.all.peers.lock();
        // It may have come again meanwhile.
        if peers.get(&self.address).is_some_and(|peer| peer.strong_count() == 0) {
            peers.remove(&self.address);
        }
    }
}

impl Row {
    /// A seat, if there is one for this connection.
    pub(super) fn take(self: &Arc<Self>) -> Result<Seat, Status> {
        let all = &self.peer.all;
        let seat = |is_for_all| Ok(Seat { row: self.clone(), is_for_all });
        if one_more(&self.taken, all.of_each) {
            return seat(false);
        }
        if one_more(&self.peer.taken, all.for_all / PEERS) {
            if one_more(&all.taken, all.for_all) {
                return seat(true);
            }
            self.peer.taken.fetch_sub(1, Ordering::Relaxed);
        }
        Err(refused("too many calls are waited for at once; send them whole, or later"))
    }
}

/// Counts one more, unless there are as many as there may be.
fn one_more(taken: &AtomicUsize, most: usize) -> bool {
    let more = |taken| (taken < most).then_some(taken + 1);
    taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Row { peer, taken } = &*self.row;
        if self.is_for_all {
            peer.all.taken.fetch_sub(1, Ordering::Relaxed);
            peer.taken.fetch_sub(1, Ordering::Relaxed);
        } else {
            taken.fetch_sub(1, Ordering::Relaxed);
        }
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

    fn row(seats: &Arc<Seats>, peer: &str) -> Arc<Row> {
        seats.row(SocketAddr::new(peer.parse().expect("an address"), 1))
    }

    /// All that there are for a connection.
    fn all_of(row: &Arc<Row>) -> Vec<Seat> {
        (0..10 * FOR_ALL).map_while(|_| row.take().ok()).collect()
    }

    #[test]
    fn a_peer_may_have_a_quarter_and_each_connection_a_few() {
        for (seats, for_all, of_each) in
            [(Seats::of_calls(), FOR_ALL, OF_EACH), (Seats::aside(), FOR_ALL_ASIDE, OF_EACH_ASIDE)]
        {
            let quarter = for_all / 4;
            let greedy = ["192.0.2.1", "::ffff:192.0.2.1"].map(|peer| row(&seats, peer));
            let [many, few] = [&greedy[0], &greedy[1]].map(all_of);
            assert_eq!((many.len(), few.len()), (quarter + of_each, of_each), "it is one peer");
            let honest = row(&seats, "192.0.2.2");
            assert_eq!(all_of(&honest).len(), quarter + of_each, "whatever another has");

            let others = ["192.0.2.3", "192.0.2.4", "2001:db8::1"].map(|peer| row(&seats, peer));
            let theirs = others.each_ref().map(all_of);
            assert!(theirs.iter().all(|seats| seats.len() == quarter + of_each));
            assert_eq!(all_of(&honest).len(), of_each, "those are its own");
            drop(many);
            assert_eq!(all_of(&honest).len(), quarter + of_each);
            assert_eq!(all_of(&greedy[1]).len(), quarter, "it has its few");

            drop((theirs, few));
            assert_eq!(seats.taken.load(Ordering::Relaxed), 0, "what was refused holds nothing");
            drop((greedy, honest));
            assert_eq!(seats.peers.lock().len(), others.len(), "who has gone is forgotten");
        }
    }

    #[test]
    fn a_peer_is_known_until_its_last_seat_is_left() {
        let seats = Seats::of_calls();
        let held = all_of(&row(&seats, "192.0.2.1"));
        let again = row(&seats, "192.0.2.1");
        assert_eq!(all_of(&again).len(), OF_EACH, "its quarter is taken");
        drop(held);
        assert_eq!(all_of(&again).len(), FOR_ALL / PEERS + OF_EACH);
    }
}
