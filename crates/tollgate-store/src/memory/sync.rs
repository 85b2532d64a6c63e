//! The primitives of nodes and of the array of homes, in one place, so that the model checker can replace them.

pub(crate) use std::sync::OnceLock;
pub(crate) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// How often a waiting thread looks again at once before it lets others run.
const LOOKS: u32 = 64;

/// Passes a moment of waiting; `round` counts them.
#[cold]
pub(crate) fn pause(round: u32) {
    if round < LOOKS {
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}
