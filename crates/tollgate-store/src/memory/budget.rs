//! The capacity of the memory store: one budget for all its tables.
//!
//! A key counts one, and so does every entry of a log and every lease; reservations have a separate budget (holds.rs). State is
//! removed only when it is the same as no state, so a flood of new keys cannot push out an exhausted key: when the budget is used
//! up, new keys share one state, or are denied.

use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_kernel::{Micros, Outcome};

/// What happens to keys that the memory store has no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// All new keys of a limit share one state, as if they were one key. A key that gets its own state later starts from the
    /// shared state, so no key ever gets more than its limit; for the same reason charges of the shared state are not given back.
    /// Sliding windows and concurrency limits deny new keys: each of their admissions needs its own room.
    #[default]
    Share,
    /// Newcomers are denied until there is room.
    Deny,
}

/// The retry time of a denial for lack of room.
const ROOM_AFTER: Micros = Micros::from_secs(1);

pub(crate) struct Budget {
    most: usize,
    used: AtomicUsize,
    when_full: WhenFull,
}

impl Budget {
    pub(crate) fn new(most: usize, when_full: WhenFull) -> Self {
        Budget { most, used: AtomicUsize::new(0), when_full }
    }

    /// Takes room for `count`, or nothing.
    pub(crate) fn take(&self, count: usize) -> bool {
        let take = |used: usize| used.checked_add(count).filter(|used| *used <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }

    /// Records room that is taken whether there is any or not: debts are never refused.
    pub(crate) fn take_anyway(&self, count: usize) {
        self.used.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn give_back(&self, count: usize) {
        self.used.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn when_full(&self) -> WhenFull {
        self.when_full
    }

    /// The answer to a charge that would be admitted if there were room to remember it.
    pub(crate) fn refusal(outcome: Outcome) -> Outcome {
        if !outcome.allowed {
            return outcome;
        }
        Outcome {
            allowed: false,
            remaining: 0,
            retry_after: Some(ROOM_AFTER),
            delay: Micros::ZERO,
            ..outcome
        }
    }
}
