//! A permit: the leases of an admitted charge, renewed while it lives and released when it is dropped.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use tollgate_store::ChargeId;

use crate::call::Output;
use crate::decision::{Decision, Denied};
use crate::engine::{Answer, Engine, Held};
use crate::error::Error;
use crate::lease::Lease;

/// Permission to go on. Under concurrency limits it holds leases, which are released when it is dropped; charges under other
/// limits stay charged.
///
/// ```
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tollgate::{Limit, Tollgate};
///
/// let gate = Tollgate::builder().limit("workers", Limit::concurrency(1, Duration::from_secs(30))?).build()?;
/// let permit = gate.acquire("workers", "pool").await??;
/// assert!(gate.acquire("workers", "pool").await?.is_err());
/// drop(permit);
/// gate.acquire("workers", "pool").await??.release().await?;
/// # Ok(())
/// # }
/// # use std::future::Future;
/// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
/// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
/// ```
///
/// On a remote store a background task renews its leases for as long as it lives, and releases them after it is dropped;
/// [`release`](Self::release) waits for the store. A process that pauses for longer than a lease, or that cannot reach the store
/// for that long, loses the lease: see [`is_lost`](Self::is_lost). A local lease does not expire while its permit lives; it is
/// lost only if its key is reset.
#[must_use = "a permit that is dropped is released"]
pub struct Permit {
    engine: Arc<Engine>,
    held: Box<Held>,
    decision: Decision,
    lease: Arc<Lease>,
    is_released: bool,
}

impl Permit {
    fn new(engine: Arc<Engine>, held: Box<Held>, decision: Decision) -> Permit {
        let lease = Arc::new(Lease::default());
        engine.keep_renewed(&held, &lease);
        Permit { engine, held, decision, lease, is_released: false }
    }

    /// The id of the charge.
    pub fn id(&self) -> ChargeId {
        self.held.id
    }

    /// What each limit answered.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    /// Releases the leases and waits for the store. If the store fails, the release is repeated in the background, and the leases
    /// expire at the latest at the end of their time.
    pub async fn release(mut self) -> Result<(), Error> {
        self.is_released = true;
        self.engine.release(&self.held).await
    }

    /// Whether a lease is lost, so that another holder may run at the same time. A loss is logged and counted once.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tollgate::{Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("workers", Limit::concurrency(1, Duration::from_secs(30))?).build()?;
    /// let permit = gate.acquire("workers", "pool").await??;
    /// assert!(!permit.is_lost());
    /// gate.reset("workers", "pool").await?;
    /// assert!(permit.is_lost());
    /// # Ok(())
    /// # }
    /// # use std::future::Future;
    /// # let done = std::pin::pin!(run()).as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    /// # assert!(matches!(done, std::task::Poll::Ready(Ok(()))));
    /// ```
    pub fn is_lost(&self) -> bool {
        if self.lease.is_lost() {
            return true;
        }
        let is_gone = self.engine.is_gone_local(&self.held);
        if is_gone && self.lease.lose() {
            self.engine.report_lost();
        }
        is_gone
    }

    /// Waits until a lease is lost: for holders that must stop working then.
    pub async fn lost(&self) {
        let (mut losses, mut resets) = (self.lease.listener(), self.engine.resets());
        poll_fn(|context| {
            // Before it looks, so that a loss in between is not missed.
            losses.listen(context);
            resets.listen(context);
            if self.is_lost() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.is_released {
            self.engine.release_later(&self.held);
        }
    }
}

impl Output for Result<Permit, Denied> {
    fn of(engine: &Arc<Engine>, answer: Answer) -> Result<Permit, Denied> {
        match answer.held {
            Some(held) => Ok(Permit::new(engine.clone(), held, answer.decision)),
            None => Err(Denied::new(answer.decision)),
        }
    }
}

impl fmt::Debug for Permit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permit").field("id", &self.held.id).finish_non_exhaustive()
    }
}
