//! What goes on behind the callers' backs: charges that nobody counts on are cancelled in the store.
//!
//! Inside a tokio runtime one task for each store does so. It is started when there is something to cancel and ends when nothing
//! is left; if its runtime ends first, the next call starts another. Without a runtime, calls that the store answers do it
//! before they return, a few at a time.

use std::future::Future;
use std::sync::Arc;

use tollgate_store::{HoldId, Settlement};

use super::cancels::{Answer, Next};
use super::{Kept, Missed, Remote};

/// How many charges a call cancels at most, where there is no runtime.
const AT_A_CALL: usize = 4;

/// Has the runtime of the caller run a task, if there is one.
#[cfg(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis"))]
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(task);
    }
}

/// Without tokio there is no runtime.
#[cfg(not(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis")))]
fn spawn(_task: impl Future<Output = ()> + Send + 'static) {}

/// The place of the one background task, given back when it is dropped.
struct Running(Option<Arc<Kept>>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(kept) = &self.0 {
            kept.cancels.stop();
        }
    }
}

impl Remote {
    /// Starts the background task, if there is something to do and nobody does it.
    pub(super) fn start_cancelling(&self) {
        if self.kept.cancels.count() == 0 || !self.kept.cancels.start() {
            return;
        }
        let (remote, running) = (self.clone(), Running(Some(self.kept.clone())));
        spawn(async move { remote.cancel_until_done(running).await });
    }

    async fn cancel_until_done(self, mut running: Running) {
        let cancels = &self.kept.cancels;
        loop {
            match cancels.next(self.kept.clock.now()) {
                Next::Cancel(id) => self.cancel(id).await,
                Next::WaitUntil(at) => cancels.sleep(&self.kept.clock, at).await,
                Next::Nothing => {
                    if cancels.stop_if_empty() {
                        // Its place is given back already, and may be another's by now.
                        running.0 = None;
                        return;
                    }
                }
            }
        }
    }

    /// The store answered a call: what it is to cancel can go on.
    pub(super) async fn answered(&self) {
        if self.kept.cancels.count() > 0 {
            Box::pin(self.cancel_some()).await;
        }
    }

    #[cold]
    async fn cancel_some(&self) {
        self.start_cancelling();
        // Where no task runs, this call is the place for it.
        if !self.kept.cancels.start() {
            return;
        }
        let _running = Running(Some(self.kept.clone()));
        for _ in 0..AT_A_CALL {
            let Next::Cancel(id) = self.kept.cancels.next(self.kept.clock.now()) else { return };
            self.cancel(id).await;
        }
    }

    async fn cancel(&self, id: HoldId) {
        let nodes = self.node_of_hold(id);
        let call = self.call("settle", nodes, |store| store.settle(id, &Settlement::Cancel));
        let answer = match call.await {
            Ok(settled) => Answer::Settled(settled),
            Err(Missed::Wrong(_)) => Answer::Refused,
            Err(Missed::Failed { .. } | Missed::TurnedAway(_)) => Answer::Failed,
        };
        for fingerprint in self.kept.cancels.answered(id, &answer, self.kept.clock.now()) {
            self.kept.denials.changed(fingerprint);
        }
    }
}
