//! A few tables of one kind, each for some of the threads, so that threads that deny at the same time seldom wait for each other.
//! What they hold is put together when it is read.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// How many tables there are.
pub(super) const STRIPES: usize = 4;

#[derive(Default)]
pub(crate) struct Striped<T>([Aligned<T>; STRIPES]);

/// On cache lines of its own.
#[derive(Default)]
#[repr(align(128))]
struct Aligned<T>(Mutex<T>);

impl<T> Striped<T> {
    /// The table of this thread.
    #[inline]
    pub(super) fn own(&self) -> MutexGuard<'_, T> {
        self.0[stripe()].0.lock()
    }

    /// Each table in turn, locked while it is looked at.
    pub(super) fn each(&self) -> impl Iterator<Item = MutexGuard<'_, T>> {
        self.0.iter().map(|table| table.0.lock())
    }
}

/// Which table this thread has.
fn stripe() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: Cell<Option<usize>> = const { Cell::new(None) };
    }
    STRIPE.get().unwrap_or_else(|| {
        let stripe = THREADS.fetch_add(1, Ordering::Relaxed) % STRIPES;
        STRIPE.set(Some(stripe));
        stripe
    })
}
