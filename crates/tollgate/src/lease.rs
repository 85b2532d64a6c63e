//! The lease of a permit: whether it still exists, and wakers for its loss.
//!
//! A lease is lost if its holder paused for longer than the lease, if the store could not be reached for that long, or if its key
//! was reset. Losses are counted and logged; the holder sees them with `Permit::is_lost`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Waker};

use parking_lot::Mutex;

use crate::quiet::Quiet;

/// Tasks that wait for an event. Each has its own entry, which goes with its [`Listener`]: a task that stops waiting leaves
/// nothing behind.
#[derive(Default)]
pub(crate) struct Listeners {
    state: Mutex<ListenersState>,
}

#[derive(Default)]
struct ListenersState {
    last_id: u64,
    wakers: HashMap<u64, Waker>,
}

impl Listeners {
    /// A task that may wait from now on.
    pub(crate) fn listener(&self) -> Listener<'_> {
        Listener { listeners: self, id: None }
    }

    /// Wakes all that wait.
    pub(crate) fn notify(&self) {
        let wakers = std::mem::take(&mut self.state.lock().wakers);
        wakers.into_values().for_each(Waker::wake);
    }
}

/// One task among [`Listeners`].
pub(crate) struct Listener<'a> {
    listeners: &'a Listeners,
    id: Option<u64>,
}

impl Listener<'_> {
    /// The task of this context is woken at the next event.
    pub(crate) fn listen(&mut self, context: &Context<'_>) {
        let waker = context.waker().clone();
        let mut state = self.listeners.state.lock();
        let id = *self.id.get_or_insert_with(|| {
            state.last_id += 1;
            state.last_id
        });
        let replaced = state.wakers.insert(id, waker);
        // A waker may be the last reference to a task, which is dropped with it: not under the lock.
        drop(state);
        drop(replaced);
    }
}

impl Drop for Listener<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            let waker = self.listeners.state.lock().wakers.remove(&id);
            drop(waker);
        }
    }
}

/// Whether one lease is lost.
#[derive(Default)]
pub(crate) struct Lease {
    is_lost: AtomicBool,
    holders: Listeners,
}

impl Lease {
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    /// Marks the lease as lost; true for the first call.
    pub(crate) fn lose(&self) -> bool {
        let is_first = !self.is_lost.swap(true, Ordering::AcqRel);
        self.holders.notify();
        is_first
    }

    /// A task that waits until it is lost.
    pub(crate) fn listener(&self) -> Listener<'_> {
        self.holders.listener()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: every task that had waited for the loss of its permit stayed in a list until a key was reset, which may be never.
    #[test]
    fn a_task_that_stops_waiting_leaves_nothing_behind() {
        let listeners = Listeners::default();
        let context = Context::from_waker(Waker::noop());
        let waiting = || listeners.state.lock().wakers.len();
        let mut stays = listeners.listener();
        stays.listen(&context);
        for _ in 0..100 {
            let mut leaves = listeners.listener();
            leaves.listen(&context);
            leaves.listen(&context);
            assert_eq!(waiting(), 2);
        }
        assert_eq!(waiting(), 1);
        listeners.notify();
        assert_eq!(waiting(), 0);
        stays.listen(&context);
        drop(stays);
        assert_eq!(waiting(), 0);
    }
}
