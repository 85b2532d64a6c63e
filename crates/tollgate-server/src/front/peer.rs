//! How many calls to a shared store one peer has in flight, over all its connections and all faces.
//!
//! A connection has one call in flight by itself, but a peer may have a thousand connections, and each key and each
//! limit has a share of the store of its own, of which a caller can invent or name many. So calls of one peer address, or one /64 of
//! IPv6, have a number of permits. A batch of charges that are each made by themselves counts as that many calls, because the store
//! may have to make as many. A call that finds too few permits waits for the calls of its own peer, in the order of coming and before
//! anything is sent: nothing of the store is taken meanwhile, no timeout of the store runs, and nobody else waits.
//!
//! A proxy speaks for many, so peers that the config trusts are not counted (`trusted_peers`): by default those on this machine.
//! Where the counters are in this process there is nothing to share, and none of this is asked.
//!
//! Which peer a call is of is known where its connection is accepted. It is kept beside the task (`scope`), so that the faces need not
//! hand it down to each place that asks the store (`share`).

use std::collections::HashMap;
use std::future::Future;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::ServerConfig;
use crate::peer_prefix::peer_prefix;

/// How many calls of one peer are in flight, unless the config says: at a millisecond each, tens of thousands a second.
const MOST: usize = 64;

tokio::task_local! {
    static PEER: Arc<Peer>;
}

/// The peers that have connections, and how many calls each may have in flight.
pub(crate) struct Peers {
    most: usize,
    /// Those that are not counted; `None` for those on this machine.
    trusted: Option<Vec<IpAddr>>,
    by_address: Mutex<HashMap<IpAddr, Weak<Peer>>>,
}

/// One peer, for as long as it has a connection.
struct Peer {
    address: IpAddr,
    all: Arc<Peers>,
    calls: Arc<Semaphore>,
}

/// The right to have calls in flight, given back when dropped.
pub(crate) struct Share {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Peers {
    pub(crate) fn of(config: &ServerConfig) -> Arc<Peers> {
        // More than any peer can use, and no more than a semaphore takes at once.
        let most = config.store_calls_per_peer.unwrap_or(MOST).min(u32::MAX as usize >> 4);
        let trusted = config.trusted_peers.as_ref();
        let trusted = trusted.map(|peers| peers.iter().copied().map(peer_prefix).collect());
        Arc::new(Peers { most, trusted, by_address: Mutex::default() })
    }

    /// Runs what a connection of this peer, or one call of it, has to do.
    pub(crate) async fn scope<F: Future>(self: &Arc<Self>, address: IpAddr, work: F) -> F::Output {
        match self.peer(peer_prefix(address)) {
            Some(peer) => PEER.scope(peer, work).await,
            None => work.await,
        }
    }

    /// The peer of an address, unless it is not counted.
    fn peer(self: &Arc<Self>, address: IpAddr) -> Option<Arc<Peer>> {
        let is_trusted = match &self.trusted {
            Some(trusted) => trusted.contains(&address),
            None => address.is_loopback() || address == peer_prefix(std::net::Ipv6Addr::LOCALHOST.into()),
        };
        if is_trusted {
            return None;
        }
        let mut peers = self.by_address.lock();
        let known = peers.get(&address).and_then(Weak::upgrade);
        Some(known.unwrap_or_else(|| {
            let calls = Arc::new(Semaphore::new(self.most));
            let peer = Arc::new(Peer { address, all: self.clone(), calls });
            peers.insert(address, Arc::downgrade(&peer));
            peer
        }))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let mut peers = self.all.by_address.lock();
        // It may have come again meanwhile.
        if peers.get(&self.address).is_some_and(|peer| peer.strong_count() == 0) {
            peers.remove(&self.address);
        }
    }
}

/// Waits until the peer of this task may have one more call in flight. One that is not counted need not wait. A task holds at most
/// one share for each call that it makes, and asks for none while it holds one: it would wait for itself.
pub(crate) async fn share() -> Share {
    share_of(1).await
}

/// The same for a batch of charges, each made by itself. One of more charges than the peer may have calls goes once the peer has
/// nothing else in flight.
pub(crate) async fn share_of(charges: usize) -> Share {
    let Ok((calls, most)) = PEER.try_with(|peer| (peer.calls.clone(), peer.all.most)) else {
        return Share { _permit: None };
    };
    let permits = u32::try_from(charges.min(most)).unwrap_or(u32::MAX);
    // The semaphore is never closed.
    Share { _permit: calls.acquire_many_owned(permits).await.ok() }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    fn peers(most: usize, trusted: Option<&[&str]>) -> Arc<Peers> {
        let trusted_peers = trusted.map(|all| all.iter().map(|text| address(text)).collect());
        let config =
            ServerConfig { store_calls_per_peer: Some(most), trusted_peers, ..ServerConfig::default() };
        Peers::of(&config)
    }

    /// Whether a call of this peer gets its share at once, which it then keeps.
    async fn take(peers: &Arc<Peers>, from: &str, kept: &mut Vec<(Option<Arc<Peer>>, Share)>) -> bool {
        // As long as its connection lasts.
        let peer = peers.peer(peer_prefix(address(from)));
        let taken = peers.scope(address(from), async { share().now_or_never() }).await;
        taken.map(|share| kept.push((peer, share))).is_some()
    }

    #[tokio::test]
    async fn a_peer_waits_for_its_own_calls_and_nobody_elses() {
        let (peers, mut kept) = (peers(2, None), Vec::new());
        assert!(take(&peers, "192.0.2.1", &mut kept).await);
        assert!(take(&peers, "::ffff:192.0.2.1", &mut kept).await, "the same, over another connection");
        assert!(!take(&peers, "192.0.2.1", &mut kept).await, "two are in flight");
        assert!(take(&peers, "192.0.2.2", &mut kept).await, "another peer");
        assert!(take(&peers, "2001:db8::1", &mut kept).await);
        assert!(take(&peers, "2001:db8::2", &mut kept).await);
        assert!(!take(&peers, "2001:db8::3", &mut kept).await, "one /64 is one peer");
        assert!(take(&peers, "2001:db8:0:1::1", &mut kept).await, "another /64");
        kept.remove(0);
        assert!(take(&peers, "192.0.2.1", &mut kept).await, "one has been answered");
        kept.clear();
        assert!(peers.by_address.lock().is_empty(), "nothing is kept of peers that have gone");
    }

    #[tokio::test]
    async fn peers_that_speak_for_others_are_not_counted() {
        let mut kept = Vec::new();
        for (trusted, from, is_counted) in [
            (None, "127.0.0.1", false),
            (None, "::1", false),
            (None, "192.0.2.1", true),
            (Some(&["192.0.2.1"][..]), "192.0.2.1", false),
            (Some(&["192.0.2.1"]), "127.0.0.1", true),
            (Some(&["2001:db8::9"]), "2001:db8::1", false),
            (Some(&[]), "::1", true),
        ] {
            let peers = peers(1, trusted);
            assert!(take(&peers, from, &mut kept).await);
            assert_eq!(take(&peers, from, &mut kept).await, !is_counted, "{trusted:?}, {from}");
        }
    }
}
