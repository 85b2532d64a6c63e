//! One call of the store, with its bookkeeping: which nodes it needs, whether they are up, and how it ended.
//!
//! Every charge, settlement and status goes through [`Remote::call`], except charges that are each made by themselves: their nodes are
//! admitted, and succeed or fail, one by one in `each.rs`. [`Remote::send`] counts and measures both. `breaker.rs` decides which node is down;
//! `fallback.rs` answers instead. An invalid call is an answer of the store and not a failure.

use std::sync::atomic::Ordering;

use tollgate_kernel::Micros;
use tollgate_store::{Failure, Hold, NodeId, Nodes, Store, StoreError, StoreFuture, StoredCharge};
use tracing::Instrument;

use super::Remote;
use super::breaker::{NodeDown, Notice};
use crate::error::Error;
use crate::health::{StoreChange, StoreHealth, StoreState};
use crate::telemetry::{CallRecorder, Recorder, Trouble};

/// Why the store did not answer.
pub(super) enum Missed {
    /// The call was wrong.
    Wrong(StoreError),
    /// The call failed. `is_first` says whether it is the first failure since the last answer.
    Failed { failure: Failure, error: StoreError, is_first: bool },
    /// A node is down, and was not called.
    NodeDown(NodeDown),
}

impl Missed {
    /// The error for calls without a fallback.
    pub(super) fn into_error(self) -> Error {
        match self {
            Missed::Wrong(error) | Missed::Failed { error, .. } => error.into(),
            Missed::NodeDown(NodeDown { failure, retry_after }) => {
                let message = format!("the store is down ({failure}) and not called again for {retry_after}");
                StoreError::failed(failure, message).into()
            }
        }
    }

    pub(super) fn trouble(&self) -> Trouble {
        match self {
            Missed::Wrong(_) => Trouble::default(),
            Missed::Failed { failure, error, is_first } => {
                Trouble { failure: Some(*failure), is_ambiguous: error.is_ambiguous(), is_first: *is_first }
            }
            Missed::NodeDown(down) => Trouble { failure: Some(down.failure), ..Trouble::default() },
        }
    }

    /// When the store is tried next, if that is known.
    pub(super) fn retry_after(&self) -> Option<Micros> {
        match self {
            Missed::NodeDown(down) => Some(down.retry_after),
            Missed::Wrong(_) | Missed::Failed { .. } => None,
        }
    }
}

impl Remote {
    /// The nodes that a charge needs: those of its keys, and that of its hold.
    pub(super) fn nodes_of(&self, charges: &[StoredCharge<'_>], hold: Option<Hold>) -> Nodes {
        let of_charges = charges.iter().map(|charge| self.shared.store.node_of(charge));
        let of_hold = hold.map(|hold| self.shared.store.node_of_hold(hold.id));
        let mut nodes = Nodes::new();
        for node in of_charges.chain(of_hold) {
            if !nodes.contains(&node) {
                nodes.push(node);
            }
        }
        nodes
    }

    /// Sends a call to the store, unless one of its nodes is down, and records the result.
    pub(super) async fn call<'a, T>(
        &'a self,
        operation: &'static str,
        nodes: Nodes,
        send: impl FnOnce(&'a dyn Store) -> StoreFuture<'a, T>,
    ) -> Result<T, Missed> {
        for node in &nodes {
            self.ping_first(*node).await;
        }
        for node in &nodes {
            self.shared.breakers.of(*node).admit().map_err(Missed::NodeDown)?;
        }
        match self.send(operation, send(&*self.shared.store), |answer| answer.as_ref().err()).await {
            Ok(answer) => {
                self.succeeded(&nodes);
                Ok(answer)
            }
            Err(error) => Err(self.failed(&nodes, error)),
        }
    }

    /// Waits for a call of the store: counted, measured and in a span.
    pub(super) async fn send<A>(
        &self,
        operation: &'static str,
        answer: impl Future<Output = A>,
        failure: impl FnOnce(&A) -> Option<&StoreError>,
    ) -> A {
        self.shared.tally.called();
        let call = self.watch.store_call(operation);
        let answer = answer.instrument(call.span()).await;
        call.done(failure(&answer));
        answer
    }

    /// Where the store cannot run a ping beside its callers, one of them waits for it.
    pub(super) async fn ping_first(&self, node: NodeId) {
        if let Some(ping) = self.ping_if_due(node) {
            ping.await;
        }
    }

    /// Whether a node may be called.
    pub(super) async fn admit(&self, node: NodeId) -> Result<(), Missed> {
        self.ping_first(node).await;
        self.shared.breakers.of(node).admit().map_err(Missed::NodeDown)
    }

    pub(super) fn succeeded(&self, nodes: &Nodes) {
        if self.shared.is_failing.load(Ordering::Relaxed) {
            self.shared.is_failing.store(false, Ordering::Relaxed);
        }
        nodes.iter().for_each(|node| self.shared.breakers.of(*node).answered());
        self.look_after_nodes();
    }

    #[cold]
    pub(super) fn failed(&self, nodes: &Nodes, error: StoreError) -> Missed {
        let Some(failure) = error.failure() else {
            // An invalid call was answered, so the nodes are up.
            nodes.iter().for_each(|node| self.shared.breakers.of(*node).answered());
            return Missed::Wrong(error);
        };
        self.shared.tally.failed(failure, error.is_ambiguous());
        for node in nodes {
            if let Some(notice) = self.shared.breakers.of(*node).failed(failure, error.scope()) {
                self.log_notice(&notice, Some(&error));
            }
            // Where the store cannot run it beside its callers, the next one waits for it: this one has waited enough.
            drop(self.ping_if_due(*node));
        }
        let is_first = !self.shared.is_failing.swap(true, Ordering::Relaxed);
        Missed::Failed { failure, error, is_first }
    }

    /// A call beside charges failed, such as a look at the records: a program that charges nothing is to notice an outage, too. On a
    /// cluster the failed node is not known.
    #[cold]
    pub(crate) fn failed_beside(&self, error: &StoreError) {
        let nodes = self.shared.store.nodes();
        let (Some(failure), [node]) = (error.failure(), &nodes[..]) else { return };
        if let Some(notice) = self.shared.breakers.of(*node).failed(failure, error.scope()) {
            self.log_notice(&notice, Some(error));
        }
        drop(self.ping_if_due(*node));
    }

    /// Reports to the log and the observers, once for each change.
    #[cold]
    pub(super) fn log_notice(&self, notice: &Notice, error: Option<&StoreError>) {
        let error = error.map(ToString::to_string).unwrap_or_default();
        if let Notice::Changed(change) = notice {
            self.shared.breakers.changed(change);
        }
        let StoreHealth { ambiguous, nodes_up, nodes, state, .. } = self.health();
        let change = match notice {
            Notice::Strays { failures, last } => {
                tracing::warn!(failures, %last, ambiguous, error, "the store fails now and then; those calls fell back");
                return;
            }
            Notice::Changed(change) => change,
        };
        match change {
            StoreChange::Down { failure } if nodes == 1 => {
                tracing::warn!(%failure, ambiguous, error, "the store is down; limits fall back until it answers again");
            }
            StoreChange::Down { failure } => {
                tracing::warn!(
                    %failure, ambiguous, error, nodes_up, nodes,
                    "a node of the store is down; its keys fall back until it answers again"
                );
            }
            StoreChange::Up { down_for, fallen_back } if nodes == 1 => {
                let down_for = Micros::from(*down_for);
                tracing::info!(%down_for, fallen_back, ambiguous, "the store answers again");
            }
            StoreChange::Up { down_for, fallen_back } => {
                let down_for = Micros::from(*down_for);
                tracing::info!(
                    %down_for, fallen_back, ambiguous, nodes_up, nodes,
                    "a node of the store answers again, or another has taken its place"
                );
            }
        }
        self.watch.store_changed(state == StoreState::Up);
        self.observers.store_changed(change);
    }
}
