//! The server's clock as seen from here, to tell the server until when a call may take effect.
//!
//! Every answer carries the server's time. It was read before the answer arrived, so the difference to our clock at that moment
//! is at most the true one, and a deadline translated by it is at most the true deadline: it errs on the side of too early. The
//! largest difference of the last seconds is the nearest to the truth. Old ones are let go, so a server whose clock is set back
//! is followed.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

/// How long a difference is remembered, at least; twice as long at most.
const MEMORY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct Skew {
    origin: Instant,
    seen: Mutex<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    since: Instant,
    /// The largest difference since then, in µs, and that of the span before.
    largest: Option<i64>,
    before: Option<i64>,
}

impl Skew {
    pub(super) fn new() -> Skew {
        let origin = Instant::now();
        Skew { origin, seen: Mutex::new(Seen { since: origin, largest: None, before: None }) }
    }

    /// An answer has just arrived in which the server's clock showed `server_us`.
    pub(super) fn saw(&self, server_us: i64) {
        self.saw_at(server_us, Instant::now());
    }

    fn saw_at(&self, server_us: i64, now: Instant) {
        let difference = server_us - self.since_origin(now);
        let mut seen = self.seen.lock();
        if now.duration_since(seen.since) > MEMORY {
            *seen = Seen { since: now, largest: None, before: seen.largest.or(seen.before) };
        }
        seen.largest = Some(seen.largest.map_or(difference, |largest| largest.max(difference)));
    }

    /// What the server's clock shows at `instant`, or a little before. Without any answer yet there is no telling, and no bound.
    pub(super) fn server_time(&self, instant: Instant) -> SystemTime {
        let seen = *self.seen.lock();
        match seen.largest.max(seen.before) {
            Some(difference) => {
                let us = self.since_origin(instant).saturating_add(difference);
                UNIX_EPOCH + Duration::from_micros(u64::try_from(us).unwrap_or(0))
            }
            // The year 2255, up to which all times are exact.
            None => UNIX_EPOCH + Duration::from_micros(1 << 53),
        }
    }

    fn since_origin(&self, instant: Instant) -> i64 {
        i64::try_from(instant.saturating_duration_since(self.origin).as_micros()).unwrap_or(i64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_answer_counts_and_old_ones_are_let_go() {
        let skew = Skew::new();
        let at = |ms| skew.origin + Duration::from_millis(ms);
        let shown = |ms| skew.server_time(at(ms)).duration_since(UNIX_EPOCH).unwrap().as_micros();
        assert_eq!(shown(0), 1 << 53, "no answer yet");
        // The server is five seconds ahead. One answer took 30 ms to arrive, another 1 ms.
        skew.saw_at(5_000_000, at(30));
        assert_eq!(shown(100), 5_070_000);
        skew.saw_at(5_039_000, at(40));
        assert_eq!(shown(100), 5_099_000);
        skew.saw_at(5_040_000, at(60));
        assert_eq!(shown(100), 5_099_000, "a slow answer changes nothing");
        // The server's clock is set back by a second: known once the old answers are forgotten.
        skew.saw_at(6_040_000, at(2_100));
        assert_eq!(shown(2_100), 7_099_000);
        skew.saw_at(8_040_000, at(4_200));
        assert_eq!(shown(4_200), 8_140_000, "the better of the last two spans");
    }
}
