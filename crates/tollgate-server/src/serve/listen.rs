//! Accepting connections: no more than there is room for, no more of one peer than its share, and none after the last.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) connections: usize,
    pub(crate) of_one_peer: usize,
}

/// The connections that there are.
pub(crate) struct Door {
    room: Room,
    inside: Mutex<Inside>,
}

#[derive(Default)]
struct Inside {
    all: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// Leave to be connected, given back when dropped.
pub(crate) struct Entry {
    door: Arc<Door>,
    peer: IpAddr,
}

impl Door {
    pub(crate) fn new(room: Room) -> Arc<Door> {
        Arc::new(Door { room, inside: Mutex::default() })
    }

    /// Lets a peer in, if there is room.
    pub(crate) fn enter(self: &Arc<Self>, peer: IpAddr) -> Option<Entry> {
        let peer = peer.to_canonical();
        let mut inside = self.inside.lock();
        if inside.all >= self.room.connections {
            return None;
        }
        let of_peer = inside.by_peer.entry(peer).or_default();
        if *of_peer >= self.room.of_one_peer {
            return None;
        }
        *of_peer += 1;
        inside.all += 1;
        Some(Entry { door: self.clone(), peer })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut inside = self.door.inside.lock();
        inside.all -= 1;
        if let Some(of_peer) = inside.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                inside.by_peer.remove(&self.peer);
            }
        }
    }
}

/// Accepts connections until `closing` says so, and serves each in a task of its own.
pub(crate) async fn accept<F>(
    listener: TcpListener,
    door: Arc<Door>,
    tasks: TaskTracker,
    mut closing: watch::Receiver<bool>,
    serve: impl Fn(TcpStream, SocketAddr) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.wait_for(|closing| *closing) => return,
        };
        match accepted {
            Ok((stream, peer)) => {
                // Whom there is no room for is hung up on, which costs next to nothing.
                let Some(entry) = door.enter(peer.ip()) else { continue };
                let _ = stream.set_nodelay(true);
                let serving = serve(stream, peer);
                tasks.spawn(async move {
                    let _entry = entry;
                    serving.await;
                });
            }
            Err(error) if is_of_the_peer(&error) => {}
            Err(error) => {
                // Out of files or memory: that passes, and trying again at once would only burn the processor.
                tracing::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Whether the peer gave up before it was accepted.
fn is_of_the_peer(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_so_many_and_for_so_many_of_one_peer() {
        let door = Door::new(Room { connections: 3, of_one_peer: 2 });
        let peer = |text: &str| text.parse::<IpAddr>().expect("an address");
        let [one, other] = [peer("192.0.2.1"), peer("2001:db8::1")];
        let first = door.enter(one).expect("room");
        let _second = door.enter(peer("::ffff:192.0.2.1")).expect("room");
        assert!(door.enter(one).is_none(), "it has its share");
        let third = door.enter(other).expect("room");
        assert!(door.enter(peer("192.0.2.9")).is_none(), "it is full");
        drop(first);
        assert!(door.enter(one).is_some());
        drop(third);
        drop(_second);
        assert!(door.inside.lock().by_peer.is_empty());
    }
}
