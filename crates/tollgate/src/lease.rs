//! The lease of a permit: whether it still exists, and wakers for its loss.
//!
//! A lease is lost if its holder paused for longer than the lease, if the store could not be reached for that long, or if its key
//! was reset. Losses are counted and logged; the holder sees them with `Permit::is_lost`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::quiet::Quiet;

/// Whether one lease is lost.
#[derive(Default)]
pub(crate) struct Lease {
    is_lost: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl Lease {
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Marks the lease as lost; true for the first call.
    pub(crate) fn lose(&self) -> bool {
        let is_first = !self.is_lost.swap(true, Ordering::AcqRel);
        let wakers = std::mem::take(&mut *self.wakers.lock());
        wakers.into_iter().for_each(Waker::wake);
        is_first
    }

    /// Wakes the waiting tasks without marking the lease as lost.
    pub(crate) fn notify(&self) {
        let wakers = std::mem::take(&mut *self.wakers.lock());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ready once it is lost.
    pub(crate) fn poll_lost(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut wakers = self.wakers.lock();
        if self.is_lost() {
            return Poll::Ready(());
        }
        if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            wakers.push(context.waker().clone());
        }
        Poll::Pending
    }
}

/// Counts leases that were gone when their holder renewed them, and logs at most once a second.
#[derive(Default)]
pub(crate) struct LostLeases {
    count: AtomicU64,
    log: Quiet,
}

impl LostLeases {
    /// One more. Omits the key, which must not appear in logs.
    #[cold]
    pub(crate) fn report(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(count) = self.log.count() {
            tracing::warn!(
                count,
                "a lease was gone when it was renewed: its holder stood still for longer than the lease, the store was out of \
                 reach for so long, or its key was reset; another may run beside it"
            );
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}
