//! How far a server's clock is ahead of ours, to send the server the deadline of a call in its own time.
//!
//! A server's time was read before the answer that carries it arrived, so the difference to our clock at the arrival is at most
//! the true offset, and a deadline translated by it is never later than the true deadline: a call may be rejected early by the
//! travel time of an answer, and never late. The largest difference of the last one to two seconds is the most exact. Older ones
//! are dropped, so that a clock that is set back is followed.
//!
//! Redis is asked for its time about once a second, for each connection (`redis/node.rs`, and `simulated.rs` likewise); answers of
//! PostgreSQL carry it (`postgres/call.rs`).

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The shortest time that a difference is remembered, in µs; the longest is twice as long.
const MEMORY_US: i64 = 1_000_000;

/// No difference is known.
const UNKNOWN: i64 = i64::MIN;

/// The year 2255, up to which all times are exact: the deadline of a call while the server's time is unknown.
const NO_BOUND_US: u64 = 1 << 53;

/// The offset of one server's clock.
#[derive(Debug)]
pub(crate) struct Skew {
    /// Where our clock starts. It never goes back.
    origin: Instant,
    seen: Mutex<Seen>,
    /// The largest difference of both spans, for readers.
    ahead_us: AtomicI64,
}

#[derive(Debug)]
struct Seen {
    since_us: i64,
    /// The largest difference since then, and that of the span before.
    largest_us: i64,
    before_us: i64,
}

impl Skew {
    pub(crate) fn new() -> Skew {
        let seen = Seen { since_us: 0, largest_us: UNKNOWN, before_us: UNKNOWN };
        Skew { origin: Instant::now(), seen: Mutex::new(seen), ahead_us: AtomicI64::new(UNKNOWN) }
    }

    /// Records an answer that has just arrived with the server time `server_us`.
    pub(crate) fn saw(&self, server_us: i64) {
        self.saw_at(server_us, self.our_us());
    }

    /// The same, for an answer that arrived at `our_us` by any clock of ours that never goes back.
    pub(crate) fn saw_at(&self, server_us: i64, our_us: i64) {
        let difference_us = server_us.saturating_sub(our_us);
        let mut seen = self.seen.lock();
        if our_us.saturating_sub(seen.since_us) > MEMORY_US {
            *seen = Seen { since_us: our_us, largest_us: UNKNOWN, before_us: seen.largest_us };
        }
        seen.largest_us = seen.largest_us.max(difference_us);
        self.ahead_us.store(seen.largest_us.max(seen.before_us), Ordering::Relaxed);
    }

    /// The server's time in µs after which a call must change nothing that has `left` to go; without a bound before the first
    /// answer.
    pub(crate) fn not_after_us(&self, left: Duration) -> u64 {
        self.not_after_us_at(self.our_us().saturating_add(micros(left)))
    }

    /// The same for a deadline by the clock of [`saw_at`](Self::saw_at).
    pub(crate) fn not_after_us_at(&self, our_us: i64) -> u64 {
        match self.ahead_us.load(Ordering::Relaxed) {
            UNKNOWN => NO_BOUND_US,
            ahead_us => u64::try_from(our_us.saturating_add(ahead_us)).unwrap_or(0),
        }
    }

    fn our_us(&self) -> i64 {
        micros(self.origin.elapsed())
    }
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_answer_counts_and_old_ones_are_let_go() {
        let skew = Skew::new();
        let saw = |server_ms: i64, our_ms: i64| skew.saw_at(server_ms * 1_000, our_ms * 1_000);
        let shown = |our_ms: i64| skew.not_after_us_at(our_ms * 1_000);
        assert_eq!(shown(0), NO_BOUND_US, "no answer yet");
        // The server is five seconds ahead. One answer took 30 ms to arrive, another 1 ms.
        saw(5_000, 30);
        assert_eq!(shown(100), 5_070_000);
        saw(5_039, 40);
        assert_eq!(shown(100), 5_099_000);
        saw(5_040, 60);
        assert_eq!(shown(100), 5_099_000, "a slow answer changes nothing");
        // The server's clock is set back by a second, which is noticed once the old answers are dropped.
        saw(5_140, 1_140);
        assert_eq!(shown(1_140), 6_139_000, "the better of the last two spans");
        saw(6_100, 2_200);
        assert_eq!(shown(2_200), 6_200_000, "the better of the last two spans");
        saw(7_210, 3_210);
        assert_eq!(shown(3_210), 7_210_000);
    }

    /// One answer is known, and the deadline is in the server's time, with what is left until then.
    #[test]
    fn a_deadline_is_translated_and_never_later_than_it_is() {
        let skew = Skew::new();
        let server_us = 1_700_000_000_000_000;
        let before = skew.our_us();
        skew.saw(server_us);
        let not_after = skew.not_after_us(Duration::from_millis(100));
        let elapsed = skew.our_us() - before;
        let late = i64::try_from(not_after).unwrap() - server_us - 100_000;
        assert!((0..=elapsed).contains(&late), "{late} µs later, after {elapsed} µs");
        // A server whose clock stands before 1970 turns every call away.
        let behind = Skew::new();
        behind.saw_at(-5_000_000, 0);
        assert_eq!(behind.not_after_us_at(1_000_000), 0);
    }
}
