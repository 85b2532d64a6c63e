//! All observers of an engine, called one after the other.
//!
//! A panic of an observer is caught here: the decision stands, and the other observers are still called. The first panic is
//! logged, without its message, which may contain anything.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Admissions, Event, Observer, Operation};
use crate::health::StoreChange;

/// The observers of one gate.
#[derive(Default)]
pub(crate) struct Observers {
    all: Vec<Arc<dyn Observer>>,
    take_counts: bool,
    has_panicked: AtomicBool,
}

impl Observers {
    pub(crate) fn add(&mut self, observer: Arc<dyn Observer>) {
        self.take_counts = observer.takes_counts() && (self.all.is_empty() || self.take_counts);
        self.all.push(observer);
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether there are observers, and all of them accept counts.
    #[inline]
    pub(crate) fn take_counts(&self) -> bool {
        self.take_counts
    }

    #[cfg_attr(not(feature = "telemetry"), allow(dead_code, reason = "without the feature nobody counts"))]
    pub(crate) fn admitted(&self, admissions: &Admissions<'_>) {
        self.each(|observer| observer.admitted(admissions));
    }

    pub(crate) fn decided(&self, event: &Event<'_>) {
        self.each(|observer| observer.decided(event));
    }

    pub(crate) fn operated(&self, operation: &Operation<'_>) {
        self.each(|observer| observer.operated(operation));
    }

    pub(crate) fn store_changed(&self, change: &StoreChange) {
        self.each(|observer| observer.store_changed(change));
    }

    fn each(&self, notify: impl Fn(&dyn Observer)) {
        for observer in &self.all {
            let result = catch_unwind(AssertUnwindSafe(|| notify(&**observer)));
            if result.is_err() && !self.has_panicked.swap(true, Ordering::Relaxed) {
                tracing::warn!("an observer panicked; decisions go on, and further panics are not logged");
            }
        }
    }
}
