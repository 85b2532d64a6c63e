//! Saying a thing at most once a second, with how often it happened.

use std::sync::atomic::{AtomicU64, Ordering};

use tollgate_store::Clock;

/// Counts what need not be said each time.
#[derive(Default)]
pub(crate) struct Quiet {
    unsaid: AtomicU64,
    /// When it was said last, in µs.
    last: AtomicU64,
}

impl Quiet {
    /// Once more: how often it has happened since it was said, if it is time to say so.
    #[cold]
    pub(crate) fn count(&self) -> Option<u64> {
        self.unsaid.fetch_add(1, Ordering::Relaxed);
        let now = Clock::system().now().get();
        let last = self.last.load(Ordering::Relaxed);
        let is_due = now.saturating_sub(last) >= 1_000_000;
        let is_mine = || self.last.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        (is_due && is_mine()).then(|| self.unsaid.swap(0, Ordering::Relaxed))
    }
}
