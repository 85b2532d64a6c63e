//! Accepts connections: a bounded number, a bounded share for one peer, and none after the end.
//!
//! Each API has its own connection limit, so that a crowd on one of them does not block the others: health and metrics are
//! answered while RESP is full. Refused connections are counted (`tollgate_connections_refused_total`).

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::config::ServerConfig;
use crate::peer_prefix::peer_prefix;

/// The default number of connections of an API, and of one peer. A gRPC connection may carry a hundred calls at once, so one peer
/// needs fewer of them there and would otherwise use much memory.
const CONNECTIONS: usize = 10_000;
const OF_ONE_PEER: usize = 1_000;
const OF_ONE_PEER_MULTIPLEXED: usize = 100;

/// How many files the process needs beside its connections: logs, stores, the policy.
const OTHER_FILES: usize = 128;

/// How many connections there may be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub(crate) connections: usize,
    pub(crate) of_one_peer: usize,
}

impl Room {
    /// The limits of a config.
    pub(crate) fn of(config: &ServerConfig) -> Room {
        Room::with(config, OF_ONE_PEER)
    }

    /// The same where a connection carries many calls at once.
    pub(crate) fn multiplexed(self, config: &ServerConfig) -> Room {
        let of_one_peer = Room::with(config, OF_ONE_PEER_MULTIPLEXED).of_one_peer.min(self.of_one_peer);
        Room { of_one_peer, ..self }
    }

    fn with(config: &ServerConfig, of_one_peer: usize) -> Room {
        let connections = config.max_connections.unwrap_or(CONNECTIONS);
        let of_one_peer = config.max_connections_per_peer.unwrap_or(of_one_peer).min(connections);
        Room { connections, of_one_peer }
    }

    /// Bounded by the file descriptors of the process, divided among this many APIs. A refused connection costs little; a process
    /// without free descriptors blocks everybody.
    pub(crate) fn within(self, files: usize, faces: usize) -> Room {
        let connections = self.connections.min((files.saturating_sub(OTHER_FILES) / faces.max(1)).max(1));
        Room { connections, of_one_peer: self.of_one_peer.min(connections) }
    }
}

/// How many file descriptors this process may have, if there is a limit. Raises the soft limit to the hard limit: the usual 1,024
/// are for programs that use `select`.
pub(crate) fn files() -> Option<usize> {
    let granted = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: granted.maximum, ..granted };
    // Calls `setrlimit` only if there is something to raise: some sandboxes kill a process that calls it.
    let is_raised = granted.current != granted.maximum && setrlimit(Resource::Nofile, raised).is_ok();
    let files = if is_raised { granted.maximum } else { granted.current };
    files.map(|files| usize::try_from(files).unwrap_or(usize::MAX))
}

/// The open connections.
pub(crate) struct ConnectionLimit {
    room: Room,
    inside: Mutex<Inside>,
    connections: Gauge,
    full: Counter,
    of_peer: Counter,
}

#[derive(Default)]
struct Inside {
    all: usize,
    by_peer: HashMap<IpAddr, usize>,
}

/// A connection permit, released on drop.
pub(crate) struct Entry {
    connections: Arc<ConnectionLimit>,
    peer: IpAddr,
}

impl ConnectionLimit {
    pub(crate) fn new(face: &'static str, room: Room) -> Arc<ConnectionLimit> {
        let refused =
            |why| metrics::counter!("tollgate_connections_refused_total", "face" => face, "reason" => why);
        Arc::new(ConnectionLimit {
            room,
            inside: Mutex::default(),
            connections: metrics::gauge!("tollgate_connections", "face" => face),
            full: refused("full"),
            of_peer: refused("peer"),
        })
    }

    /// Lets a peer in, if there is room.
    pub(crate) fn enter(self: &Arc<Self>, peer: IpAddr) -> Option<Entry> {
        let peer = peer_prefix(peer);
        let mut inside = self.inside.lock();
        if inside.all >= self.room.connections {
            self.full.increment(1);
            return None;
        }
        let of_peer = inside.by_peer.entry(peer).or_default();
        if *of_peer >= self.room.of_one_peer {
            self.of_peer.increment(1);
            return None;
        }
        *of_peer += 1;
        inside.all += 1;
        self.connections.increment(1.0);
        Some(Entry { connections: self.clone(), peer })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut inside = self.connections.inside.lock();
        inside.all -= 1;
        self.connections.connections.decrement(1.0);
        if let Some(of_peer) = inside.by_peer.get_mut(&self.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                inside.by_peer.remove(&self.peer);
            }
        }
    }
}

/// Accepts connections until `closing`, and serves each in its own task.
pub(crate) async fn accept<F>(
    listener: TcpListener,
    connections: Arc<ConnectionLimit>,
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
                // A connection over the limit is closed, which costs next to nothing.
                let Some(entry) = connections.enter(peer.ip()) else { continue };
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

    fn peer(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn there_is_room_for_so_many_and_for_so_many_of_one_peer() {
        let connections = ConnectionLimit::new("test", Room { connections: 3, of_one_peer: 2 });
        let [one, other] = [peer("192.0.2.1"), peer("2001:db8::1")];
        let first = connections.enter(one).expect("room");
        let _second = connections.enter(peer("::ffff:192.0.2.1")).expect("room");
        assert!(connections.enter(one).is_none(), "it has its share");
        let third = connections.enter(other).expect("room");
        assert!(connections.enter(peer("192.0.2.9")).is_none(), "it is full");
        drop(first);
        assert!(connections.enter(one).is_some());
        drop(third);
        drop(_second);
        assert!(connections.inside.lock().by_peer.is_empty());
    }

    #[test]
    fn room_is_what_the_config_says_and_the_system_has() {
        let room = Room { connections: 10_000, of_one_peer: 1_000 };
        for (files, faces, expected) in [
            (65_536, 3, (10_000, 1_000)),
            (1_024, 3, (298, 298)),
            (1_024, 1, (896, 896)),
            (20_000, 3, (6_624, 1_000)),
            (64, 3, (1, 1)),
        ] {
            let Room { connections, of_one_peer } = room.within(files, faces);
            assert_eq!((connections, of_one_peer), expected, "{files} files, {faces} faces");
        }
        assert!(files().is_none_or(|files| files > 0));
        let mut config = ServerConfig::default();
        assert_eq!(room.multiplexed(&config).of_one_peer, 100);
        assert_eq!(room.within(64, 3).multiplexed(&config).of_one_peer, 1, "never more than there are");
        config.max_connections_per_peer = Some(700);
        assert_eq!(
            Room::of(&config).multiplexed(&config).of_one_peer,
            700,
            "what is said holds for all faces"
        );
    }
}
