//! Pings: find out that a node of the store is down, or back up. `breaker.rs` decides when to ping.
//!
//! A ping is a background task of the store. If the store cannot run one, the next caller waits for the ping. Dropping a ping
//! before its answer leaves the node as it was.

use tollgate_store::{NodeId, Scope, StoreTask};

use super::Remote;
use super::breaker::Pinged;

impl Remote {
    /// Pings a node in the background if it is time. Returns the ping if the store cannot run it: to be awaited, or dropped.
    pub(super) fn ping_if_due(&self, node: NodeId) -> Option<StoreTask> {
        if !self.shared.breakers.of(node).begins_ping() {
            return None;
        }
        let ping = Ping { remote: self.clone(), node, is_over: false };
        self.shared.store.spawn(Box::pin(ping.run()))
    }

    /// Pings nodes that are down and get no calls any more, because another node has replaced them.
    #[inline]
    pub(super) fn look_after_nodes(&self) {
        for node in self.shared.breakers.to_look_after().into_iter().flatten() {
            drop(self.ping_if_due(node));
        }
    }
}

/// A ping without an answer yet.
struct Ping {
    remote: Remote,
    node: NodeId,
    is_over: bool,
}

impl Ping {
    async fn run(mut self) {
        let shared = self.remote.shared.clone();
        let breaker = shared.breakers.of(self.node);
        let (notice, error) = loop {
            match shared.store.ping(self.node).await {
                // An error that concerns one call still shows that the node answers.
                Err(error) if error.scope() == Scope::Node => {
                    let Some(failure) = error.failure() else { return };
                    shared.tally.ping_failed(failure);
                    break (breaker.ping_failed(failure, shared.tally.fallen_back()), Some(error));
                }
                Ok(()) | Err(_) => match breaker.ping_answered(shared.tally.fallen_back()) {
                    Pinged::Again => {}
                    Pinged::Up(notice) => break (notice, None),
                },
            }
        };
        self.is_over = true;
        if let Some(notice) = notice {
            self.remote.log_notice(&notice, error.as_ref());
        }
    }
}

impl Drop for Ping {
    fn drop(&mut self) {
        if !self.is_over {
            self.remote.shared.breakers.of(self.node).ping_abandoned();
        }
    }
}
