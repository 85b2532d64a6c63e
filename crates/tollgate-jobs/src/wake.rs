//! When the next job is due: what this process knows of it, and how waiting jobs are called before their time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Makes jobs due now that were put off, in whichever framework has them.
pub trait Wake: Send + Sync {
    /// Those of these jobs that wait are due now.
    fn wake<'a>(&'a self, jobs: &'a [String]) -> Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

    /// A job came long before it was to. It may have been called; or the framework does not keep the times that it is given, which
    /// is looked into here.
    fn came_early(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(std::future::ready(()))
    }
}

/// How many instants are remembered at most; what is beyond is found by polling.
const MOST: usize = 10_000;

/// Instants at which a job is due that this process put off.
#[derive(Clone, Debug, Default)]
pub(crate) struct Wakes {
    instants: Arc<Mutex<BinaryHeap<Reverse<Instant>>>>,
}

impl Wakes {
    /// A job is due after `wait`.
    pub(crate) fn push(&self, wait: Duration) {
        let mut instants = self.instants.lock();
        // A job is due strictly after its time; a little later it surely is.
        if let Some(at) = Instant::now().checked_add(wait.saturating_add(Duration::from_millis(1)))
            && instants.len() < MOST
        {
            instants.push(Reverse(at));
        }
    }

    /// The first instant that is to come. Those that have passed are forgotten.
    #[cfg(feature = "apalis")]
    pub(crate) fn next(&self, now: Instant) -> Option<Instant> {
        let mut instants = self.instants.lock();
        while instants.peek().is_some_and(|first| first.0 <= now) {
            instants.pop();
        }
        instants.peek().map(|first| first.0)
    }
}
