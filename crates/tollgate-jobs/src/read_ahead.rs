//! What a process knows of its reading ahead in queues (`adapter/ahead.rs`): which queue is being read and when the next may be, and when the
//! planner's statistics of the jobs were renewed. It lives as long as the gate.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The pause after a go that found nothing to put off; it doubles up to the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// After how many jobs that were put off the planner's statistics of apalis's table are renewed, and how often at most. By older ones many
/// jobs are due that sleep again, so that the planner takes the index by priority and each poll reads all jobs that wait, until autovacuum
/// comes round.
const ANALYZE_FROM: usize = 1_000;
pub(crate) const ANALYZE_EVERY: Duration = Duration::from_secs(15);

/// Which queues are being read ahead in by this process, and which are left alone until when.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadAhead {
    queues: Arc<Mutex<HashMap<String, Queue>>>,
    pub(crate) statistics: Arc<Mutex<Statistics>>,
}

/// The planner's statistics: when they were last renewed, how many jobs were put off since, and whether a task is about to renew them.
#[derive(Debug, Default)]
pub(crate) struct Statistics {
    renewed: Option<Instant>,
    put_off: usize,
    is_scheduled: bool,
}

impl Statistics {
    /// Adds jobs that were put off. Answers after which pause this caller renews the statistics, if it is to do so: all changes are
    /// covered, the last ones too.
    pub(crate) fn add(&mut self, put_off: usize, now: Instant) -> Option<Duration> {
        self.put_off = self.put_off.saturating_add(put_off);
        if self.put_off < ANALYZE_FROM || self.is_scheduled {
            return None;
        }
        self.is_scheduled = true;
        let since = self.renewed.map(|renewed| now.duration_since(renewed));
        Some(since.map_or(Duration::ZERO, |since| ANALYZE_EVERY.saturating_sub(since)))
    }

    /// They are renewed now.
    pub(crate) fn renew(&mut self, now: Instant) {
        *self = Statistics { renewed: Some(now), put_off: 0, is_scheduled: false };
    }
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    is_busy: bool,
    /// Not before then, and the pause after the next go that finds nothing.
    after: Instant,
    pause: Duration,
}

impl ReadAhead {
    /// Whether it is this caller who reads now.
    pub(crate) fn begin(&self, queue: &str) -> bool {
        let now = Instant::now();
        let mut queues = self.queues.lock();
        match queues.get_mut(queue) {
            Some(state) if state.is_busy || state.after > now => false,
            Some(state) => {
                state.is_busy = true;
                true
            }
            None => {
                queues.insert(queue.to_owned(), Queue { is_busy: true, after: now, pause: PAUSES.0 });
                true
            }
        }
    }

    pub(crate) fn end(&self, queue: &str, has_put_off: bool) {
        if let Some(state) = self.queues.lock().get_mut(queue) {
            state.is_busy = false;
            state.after = Instant::now() + if has_put_off { Duration::ZERO } else { state.pause };
            state.pause = if has_put_off { PAUSES.0 } else { (state.pause * 2).min(PAUSES.1) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_renewed_after_many_jobs_and_after_the_last_of_them() {
        let (mut statistics, begun) = (Statistics::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!(statistics.add(999, begun), None);
        assert_eq!(statistics.add(1, begun), Some(Duration::ZERO));
        statistics.renew(begun);
        assert_eq!(statistics.add(999, begun + second), None);
        // Too soon for another time: it is done as soon as it may be, by the first task that asks.
        assert_eq!(statistics.add(20_000, begun + 2 * second), Some(13 * second));
        assert_eq!(statistics.add(20_000, begun + 3 * second), None);
        statistics.renew(begun + 15 * second);
        assert_eq!(statistics.add(1_000, begun + 300 * second), Some(Duration::ZERO));
    }
}
