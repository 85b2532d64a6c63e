//! Pings: how a node of the store is found to be down, and to be back. When one is due is decided in `breaker.rs`.
//!
//! A ping is a task that the store runs beside its callers. A store that cannot do so has the next caller wait for it. Dropping
//! a ping before its answer came leaves the node as it was.

use tollgate_store::{NodeId, Scope, StoreTask};

use super::Remote;
use super::breaker::Pinged;

impl Remote {
    /// Pings a node beside the callers if that is due. Returns the ping if the store cannot do that: to be awaited, or dropped.
    pub(super) fn ping_if_due(&self, node: NodeId) -> Option<StoreTask> {
        if !self.shared.breakers.of(node).begins_ping() {
            return None;
        }
        let ping = Ping { remote: self.clone(), node, is_over: false };
        self.shared.store.spawn(Box::pin(ping.run()))
    }

    /// Pings nodes that are down and that nobody asks any more, because another has taken their place.
    #[inline]
    pub(super) fn look_after_nodes(&self) {
        for node in self.shared.breakers.to_look_after().into_iter().flatten() {
            drop(self.ping_if_due(node));
        }
    }
}

/// A ping on its way.
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
                // What concerns one call alone came from a node that answers.
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
            self.remote.tell(&notice, error.as_ref());
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
