//! What was counted under one limit in each of the last seconds.
//!
//! A ring of counters: a second counts in the place of one that is no longer shown, after that was cleared. There are a few
//! places more than are shown, so that a thread that is late by a second or two adds to a second that is over, and not to one that
//! is to come.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// How many seconds are shown.
pub(crate) const SECONDS: u64 = 300;

/// How many there are places for.
pub(crate) const PLACES: u64 = 304;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    Allowed,
    Denied,
    /// The limit is in shadow mode, and would have denied.
    WouldDeny,
    /// Decided without the store, which failed. Counted beside one of the others.
    FellBack,
}

impl Counted {
    /// From what a limit allowed, and whether that let the charge pass.
    #[inline]
    pub(crate) fn of(allowed: bool, passed: bool) -> Counted {
        match (allowed, passed) {
            (true, _) => Counted::Allowed,
            (false, true) => Counted::WouldDeny,
            (false, false) => Counted::Denied,
        }
    }
}

/// The seconds of one limit.
pub(crate) struct Ring(Box<[Second]>);

#[derive(Default)]
struct Second([AtomicU64; 4]);

/// What was counted, oldest first.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Series {
    pub(crate) allowed: Vec<u64>,
    pub(crate) denied: Vec<u64>,
    pub(crate) would_deny: Vec<u64>,
    pub(crate) fell_back: Vec<u64>,
}

impl Default for Ring {
    fn default() -> Ring {
        Ring((0..PLACES).map(|_| Second::default()).collect())
    }
}

impl Ring {
    fn at(&self, second: u64) -> &Second {
        // Less than PLACES.
        #[allow(clippy::cast_possible_truncation)]
        let place = (second % PLACES) as usize;
        &self.0[place]
    }

    #[inline]
    pub(crate) fn count(&self, second: u64, what: Counted) {
        self.add(second, what, 1);
    }

    #[inline]
    pub(crate) fn add(&self, second: u64, what: Counted, count: u64) {
        self.at(second).0[what as usize].fetch_add(count, Ordering::Relaxed);
    }

    /// Makes the place of a second ready for it.
    pub(crate) fn clear(&self, second: u64) {
        self.at(second).0.iter().for_each(|count| count.store(0, Ordering::Relaxed));
    }

    /// What was counted in a second.
    pub(crate) fn counts(&self, second: u64) -> [u64; 4] {
        self.at(second).0.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// The seconds before `second`, at most so many.
    pub(crate) fn before(&self, second: u64, count: u64) -> Series {
        let read = |what: Counted| {
            let seconds = second.saturating_sub(count.min(SECONDS))..second;
            seconds.map(|second| self.at(second).0[what as usize].load(Ordering::Relaxed)).collect()
        };
        Series {
            allowed: read(Counted::Allowed),
            denied: read(Counted::Denied),
            would_deny: read(Counted::WouldDeny),
            fell_back: read(Counted::FellBack),
        }
    }

    /// Whether anything was counted lately.
    pub(crate) fn is_in_use(&self) -> bool {
        self.0.iter().flat_map(|second| &second.0).any(|count| count.load(Ordering::Relaxed) > 0)
    }
}

impl Series {
    /// Adds one entry: allowed, denied, would be denied, fell back.
    pub(crate) fn push(&mut self, [allowed, denied, would_deny, fell_back]: [u64; 4]) {
        self.allowed.push(allowed);
        self.denied.push(denied);
        self.would_deny.push(would_deny);
        self.fell_back.push(fell_back);
    }

    /// Of a limit that nothing was counted of.
    pub(crate) fn zeros(count: u64) -> Series {
        let zeros = || (0..count).map(|_| 0).collect();
        Series { allowed: zeros(), denied: zeros(), would_deny: zeros(), fell_back: zeros() }
    }
}
