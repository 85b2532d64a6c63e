//! The router: every call has one route back to its caller, and every route is answered once.
//!
//! A route that is dropped without an answer, because a transport has panicked, answers with an error, so that no caller waits
//! for ever. Callers that leave cancel calls that were not sent.

use tokio::sync::{mpsc, oneshot, watch};

use super::{CallError, CallErrorKind, CallResult};

/// Whether calls are cancelled.
pub(super) type Cancelled = watch::Receiver<bool>;

/// The way back to a caller.
#[derive(Debug)]
pub(super) struct Route(Option<To>);

#[derive(Debug)]
enum To {
    One(oneshot::Sender<CallResult>),
    Batch(usize, mpsc::UnboundedSender<(usize, CallResult)>),
}

impl Route {
    /// Answers the caller, if it is still there.
    pub(super) fn answer(mut self, result: CallResult) {
        self.give(result);
    }

    fn give(&mut self, result: CallResult) {
        match self.0.take() {
            Some(To::One(to)) => drop(to.send(result)),
            Some(To::Batch(index, to)) => drop(to.send((index, result))),
            None => {}
        }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        self.give(Err(lost()));
    }
}

fn lost() -> CallError {
    CallError::new(CallErrorKind::Unreachable, "the call ended without an answer", 0)
}

/// The result of one call, some time. Dropping it cancels the call, unless it was sent.
#[derive(Debug)]
#[must_use = "a call is cancelled when its pending result is dropped"]
pub struct Pending {
    result: oneshot::Receiver<CallResult>,
    cancel: watch::Sender<bool>,
}

impl Pending {
    pub(super) fn new() -> (Pending, Route, Cancelled) {
        let (to, result) = oneshot::channel();
        let (cancel, cancelled) = watch::channel(false);
        (Pending { result, cancel }, Route(Some(To::One(to))), cancelled)
    }

    /// Waits for the result.
    pub async fn result(self) -> CallResult {
        // The sender of the cancellation lives until the result is there.
        let Pending { result, cancel } = self;
        let result = result.await.unwrap_or_else(|_| Err(lost()));
        drop(cancel);
        result
    }

    /// Waits for the result, and cancels the call if `stop` is ready first. A call that was sent is waited for all the same.
    pub async fn result_or_cancel(mut self, stop: impl Future<Output = ()>) -> CallResult {
        tokio::select! {
            biased;
            result = &mut self.result => return result.unwrap_or_else(|_| Err(lost())),
            () = stop => self.cancel(),
        }
        self.result().await
    }

    /// Cancels the call, unless it was sent.
    pub fn cancel(&self) {
        self.cancel.send_replace(true);
    }
}

/// The results of a batch. Dropping it cancels the calls that were not sent.
#[derive(Debug)]
#[must_use = "a batch is cancelled when it is dropped"]
pub struct Batch {
    size: usize,
    results: mpsc::UnboundedReceiver<(usize, CallResult)>,
    cancel: watch::Sender<bool>,
}

impl Batch {
    pub(super) fn new(size: usize) -> (Batch, Vec<Route>, Cancelled) {
        let (to, results) = mpsc::unbounded_channel();
        let (cancel, cancelled) = watch::channel(false);
        let routes = (0..size).map(|index| Route(Some(To::Batch(index, to.clone())))).collect();
        (Batch { size, results, cancel }, routes, cancelled)
    }

    /// The next result and the index of its call, in the order in which they come; `None` after the last.
    pub async fn next(&mut self) -> Option<(usize, CallResult)> {
        self.results.recv().await
    }

    /// All results, in the order of the calls.
    pub async fn all(mut self) -> Vec<CallResult> {
        let mut results: Vec<Option<CallResult>> = (0..self.size).map(|_| None).collect();
        while let Some((index, result)) = self.next().await {
            results[index] = Some(result);
        }
        results.into_iter().map(|result| result.unwrap_or_else(|| Err(lost()))).collect()
    }

    /// Cancels the calls that were not sent. They end with an error; the others go on.
    pub fn cancel(&self) {
        self.cancel.send_replace(true);
    }
}
