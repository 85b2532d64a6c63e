//! Background work in the store: cancels charges without a holder, releases leases of dropped permits, and renews leases of held
//! permits.
//!
//! Inside a tokio runtime one task per store does this. It starts when there is work and ends when there is none; if its runtime
//! ends first, the next call starts another task. A permit may be dropped outside any runtime: then the task runs in the runtime
//! that the engine was built in. Without any runtime, calls that the store answers do some of the work before they return, a few
//! items at a time; leases that are not released expire. `remote/tasks.rs` decides what to do when.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use tollgate_kernel::Micros;
use tollgate_store::{ChargeId, Settlement};

use super::tasks::{Answer, Next};
use super::{Missed, Remote, Shared};
use crate::lease::Lease;
use crate::telemetry::{Operation, OperationOutcome};

/// How much a call does at most, where there is no runtime.
const AT_A_CALL: usize = 4;
/// How many attempts of a flush may fail before it gives up; the rest is done in the background.
const FLUSH_FAILURES: usize = 8;

/// The runtime that the engine was built in, if there was one.
#[cfg(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis"))]
pub(super) struct Runtime(Option<tokio::runtime::Handle>);

#[cfg(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis"))]
impl Runtime {
    pub(super) fn current() -> Runtime {
        Runtime(tokio::runtime::Handle::try_current().ok())
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = tokio::runtime::Handle::try_current().ok().or_else(|| self.0.clone()) {
            runtime.spawn(task);
        }
    }
}

/// Without tokio there is no runtime.
#[cfg(not(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis")))]
pub(super) struct Runtime;

#[cfg(not(any(feature = "http", feature = "otlp", feature = "postgres", feature = "redis")))]
impl Runtime {
    pub(super) fn current() -> Runtime {
        Runtime
    }

    fn spawn(&self, _task: impl Future<Output = ()> + Send + 'static) {}
}

/// The place of the one background task, given back when it is dropped.
struct Running(Option<Arc<Shared>>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(shared) = &self.0 {
            shared.tasks.stop();
        }
    }
}

impl Remote {
    /// Starts the background task, if there is work and no task runs.
    pub(super) fn start_tasks(&self) {
        if self.shared.tasks.count() == 0 || !self.shared.tasks.start() {
            return;
        }
        let (remote, running) = (self.clone(), Running(Some(self.shared.clone())));
        self.shared.runtime.spawn(async move { remote.run_until_done(running).await });
    }

    async fn run_until_done(self, mut running: Running) {
        let tasks = &self.shared.tasks;
        loop {
            match tasks.next(self.shared.clock.now()) {
                Next::WaitUntil(at) => tasks.sleep(&self.shared.clock, at).await,
                Next::Nothing => {
                    if tasks.stop_if_empty() {
                        // Its place is given back already, and may be another's by now.
                        running.0 = None;
                        return;
                    }
                }
                next => {
                    self.run(next).await;
                }
            }
        }
    }

    /// The store answered a call, so it is reachable: continues the work.
    pub(super) async fn answered(&self) {
        if self.shared.tasks.count() > 0 {
            Box::pin(self.run_some()).await;
        }
    }

    #[cold]
    async fn run_some(&self) {
        self.start_tasks();
        // Where no task runs, this call is the place for it.
        if !self.shared.tasks.start() {
            return;
        }
        let _running = Running(Some(self.shared.clone()));
        for _ in 0..AT_A_CALL {
            match self.shared.tasks.next(self.shared.clock.now()) {
                Next::WaitUntil(_) | Next::Nothing => return,
                next => {
                    self.run(next).await;
                }
            }
        }
    }

    /// Does one item; false if the store could not be reached.
    async fn run(&self, next: Next) -> bool {
        let (id, settlement) = match next {
            Next::Cancel(id) => (id, Settlement::Cancel),
            Next::Release(id, settlement) => (id, settlement),
            Next::Renew(id) => (id, Settlement::Renew),
            Next::WaitUntil(_) | Next::Nothing => return true,
        };
        // A charge whose answer was lost is cancelled only in the store: the fallback's charge with the same id stays valid.
        let started = Instant::now();
        let settled = match settlement {
            Settlement::Cancel => self.settle_store(id, &settlement).await,
            _ => self.settle_anywhere(id, &settlement).await,
        };
        let outcome = settled.as_ref().map_or(OperationOutcome::Failed, |settled| (*settled).into());
        let answer = match settled {
            Ok(settled) => Answer::Settled(settled),
            Err(Missed::Wrong(_)) => Answer::Refused,
            Err(Missed::Failed { .. } | Missed::NodeDown(_)) => Answer::Failed,
        };
        let follows = self.shared.tasks.answered(id, answer, self.shared.clock.now());
        for fingerprint in follows.keys {
            self.shared.denials.changed(fingerprint);
        }
        if follows.is_lost {
            self.lost_leases.report();
        }
        if follows.is_final {
            let operation = Operation::of_settlement(&settlement, outcome, None, started.elapsed());
            operation.report(&self.watch, &self.observers);
        }
        if settlement != Settlement::Renew {
            self.lines.nudge();
        }
        !matches!(answer, Answer::Failed)
    }

    /// Renews the leases of a permit for as long as it is held.
    pub(crate) fn keep_renewed(&self, id: ChargeId, lease: Micros, holder: Arc<Lease>) {
        self.shared.tasks.renew(id, lease, holder, self.shared.clock.now());
        self.start_tasks();
    }

    /// Renews the leases of an id no more.
    pub(crate) fn stop_renewing(&self, id: ChargeId) {
        self.shared.tasks.forget(id);
    }

    /// Releases the leases of a permit in the background.
    pub(crate) fn release_later(&self, id: ChargeId, settlement: Settlement, lease: Micros) {
        self.shared.tasks.release(id, settlement, lease, self.shared.clock.now());
        self.start_tasks();
    }

    /// Waits until all pending cancels and releases are done, or the store could not be reached for a while.
    pub(crate) async fn flush(&self) {
        let tasks = &self.shared.tasks;
        let mut failures = 0;
        while tasks.unfinished() > 0 && failures < FLUSH_FAILURES {
            match tasks.next(self.shared.clock.now()) {
                Next::Nothing => return,
                // The background task may be at it, or it is too early to try again.
                Next::WaitUntil(at) => {
                    let soon = self.shared.clock.now().saturating_add(Micros::from_millis(10));
                    self.shared.clock.alarm(at.min(soon)).await;
                }
                next => failures += usize::from(!self.run(next).await),
            }
        }
    }
}
