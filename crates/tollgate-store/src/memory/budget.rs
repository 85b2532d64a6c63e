//! How much the memory store may remember: one number for all its tables.
//!
//! A key counts one, and so does every entry of a log and every lease; reservations have a budget of their own (holds.rs). What is remembered is only ever
//! given back when it says the same as nothing at all, so an exhausted key cannot be pushed out by a flood of new ones: when
//! the budget is spent it is the newcomers who share one state, or are denied.

use std::sync::atomic::{AtomicUsize, Ordering};

use tollgate_kernel::{Micros, Outcome};

/// What happens to keys that the memory store has no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// All newcomers of a limit share one state, as if they were one key. A key that is remembered later starts from what the
    /// shared state says, so no key ever gets more than its limit; for the same reason nothing that was charged there is given
    /// back. Sliding windows and concurrency limits deny newcomers: each of their admissions needs room of its own.
    #[default]
    Share,
    /// Newcomers are denied until there is room.
    Deny,
}

/// How long a caller who was denied for lack of room is asked to wait.
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
