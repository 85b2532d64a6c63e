//! Logs an event at most once a second, with the number of times it happened.

use std::sync::atomic::{AtomicU64, Ordering};

use tollgate_store::Clock;

/// Counts events that need not be logged each time.
#[derive(Default)]
pub(crate) struct Quiet {
    suppressed: AtomicU64,
    /// The time of the last log line, in µs.
    last: AtomicU64,
}

impl Quiet {
    /// Counts one event. Returns the number of events since the last line, if a line may be logged now.
    #[cold]
    pub(crate) fn count(&self) -> Option<u64> {
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        let now = Clock::system().now().get();
        let last = self.last.load(Ordering::Relaxed);
        let is_due = now.saturating_sub(last) >= 1_000_000;
        let is_mine = || self.last.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        (is_due && is_mine()).then(|| self.suppressed.swap(0, Ordering::Relaxed))
    }
}
