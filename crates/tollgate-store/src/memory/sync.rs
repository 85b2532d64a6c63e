//! The primitives that a node is made of, in one place, so that the model checker can put its own in their stead.

pub(crate) use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

/// A lock of one byte, so that every node carries its own.
#[derive(Default)]
pub(crate) struct Lock(parking_lot::Mutex<()>);

/// Proof that a lock is held; it opens when dropped.
pub(crate) type Guard<'a> = parking_lot::MutexGuard<'a, ()>;

impl Lock {
    #[inline]
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.0.lock()
    }
}
