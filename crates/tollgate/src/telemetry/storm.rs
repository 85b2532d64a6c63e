//! Suppresses a storm of denials in the log.
//!
//! A key's first denial in a second is logged; its later ones are counted, and the count is in its next line. All keys share 100
//! lines a second; the lines beyond that are counted in one line once the second is over. The table of keys has a fixed size: a
//! key that needs the slot of another takes it over, and the unreported denials of the other count as left out.
//!
//! A suppressed denial, which in a storm nearly every one is, takes no lock: one load shows that the slot belongs to the key and
//! this second, and one addition counts it. If another key takes the slot between the two, the denial is counted for that key.
//! Seconds are those of the engine's clock.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use foldhash::quality::RandomState;
use parking_lot::Mutex;
use tollgate_kernel::Micros;

/// How many keys are remembered.
const SLOTS: usize = 1_024;

/// How many lines are written in a second by default.
pub(crate) const LINES: u64 = 100;

pub(crate) struct Storm {
    /// How many lines are written in a second; `None` leaves nothing out.
    lines: Option<u64>,
    seed: RandomState,
    slots: Box<[Slot]>,
    total: Mutex<Total>,
}

#[derive(Default)]
struct Slot {
    /// The limit and key that were denied last in this slot, and the second: see [`Stamp`].
    stamp: AtomicU64,
    /// How many of its denials were not logged.
    suppressed: AtomicU64,
    /// Held while a key takes the slot, or a new second begins.
    lock: Mutex<()>,
}

/// A limit and a key, as 40 bits of their hash other than those that choose the slot, and the last 24 bits of a second, which
/// repeat after 194 days.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp(u64);

impl Stamp {
    const SECOND_BITS: u32 = 24;

    fn new(hash: u64, now: Micros) -> Stamp {
        let second = second_of(now) & ((1 << Stamp::SECOND_BITS) - 1);
        Stamp(hash >> Stamp::SECOND_BITS << Stamp::SECOND_BITS | second)
    }

    fn is_of_same_key(self, other: Stamp) -> bool {
        self.0 >> Stamp::SECOND_BITS == other.0 >> Stamp::SECOND_BITS
    }
}

/// Over all keys.
#[derive(Default)]
struct Total {
    second: u64,
    lines: u64,
    left_out: u64,
}

/// A line that may be written.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Line {
    /// How many denials of the same key were suppressed since its last line.
    pub(crate) suppressed: u64,
    /// How many lines were left out in past seconds, if this line reports them.
    pub(crate) left_out: u64,
}

fn second_of(now: Micros) -> u64 {
    now.get() / 1_000_000
}

fn slot_of(hash: u64) -> usize {
    usize::try_from(hash % SLOTS as u64).unwrap_or_default()
}

impl Storm {
    pub(crate) fn new(lines: Option<u64>) -> Storm {
        let slots = (0..SLOTS).map(|_| Slot::default()).collect();
        Storm { lines, seed: RandomState::default(), slots, total: Mutex::default() }
    }

    fn hash(&self, limiter: &str, key: Option<&str>) -> u64 {
        self.seed.hash_one((limiter, key))
    }

    /// Returns a line if a denial is logged now.
    pub(crate) fn denial(&self, limiter: &str, key: Option<&str>, now: Micros) -> Option<Line> {
        if self.lines.is_none() {
            return Some(Line { suppressed: 0, left_out: 0 });
        }
        let hash = self.hash(limiter, key);
        let (slot, stamp) = (&self.slots[slot_of(hash)], Stamp::new(hash, now));
        if slot.stamp.load(Ordering::Relaxed) == stamp.0 {
            slot.suppressed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        self.first_denial(slot, stamp, now)
    }

    /// A key that takes a slot, or its first denial in a second.
    #[cold]
    fn first_denial(&self, slot: &Slot, stamp: Stamp, now: Micros) -> Option<Line> {
        let _locked = slot.lock.lock();
        let before = Stamp(slot.stamp.load(Ordering::Relaxed));
        if before == stamp {
            // Another thread was faster.
            slot.suppressed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        slot.stamp.store(stamp.0, Ordering::Relaxed);
        let suppressed = slot.suppressed.swap(0, Ordering::Relaxed);
        let others = if stamp.is_of_same_key(before) { 0 } else { suppressed };
        let line = self.line(others, now);
        if line.is_none() {
            // This denial is counted as left out; the earlier ones are still reported with the key's next line.
            slot.suppressed.fetch_add(suppressed - others, Ordering::Relaxed);
        }
        line.map(|line| Line { suppressed: suppressed - others, ..line })
    }

    /// Returns a line if a decision other than a denial is logged now.
    pub(crate) fn other(&self, now: Micros) -> Option<Line> {
        self.line(0, now)
    }

    /// One more line, if there is room for it. `others` denials were left out without a line of their own.
    fn line(&self, others: u64, now: Micros) -> Option<Line> {
        let Some(most) = self.lines else { return Some(Line { suppressed: 0, left_out: 0 }) };
        let mut total = self.total.lock();
        let left_out = total.over(now);
        total.left_out += others;
        if total.lines >= most {
            total.left_out += 1;
            return None;
        }
        total.lines += 1;
        Some(Line { suppressed: 0, left_out })
    }

    /// How many lines were left out in past seconds and not reported yet. The caller reports them.
    pub(crate) fn left_out(&self, now: Micros) -> u64 {
        self.total.lock().over(now)
    }
}

impl Total {
    /// Starts a new second if it is one, and returns how many lines were left out before it.
    fn over(&mut self, now: Micros) -> u64 {
        if self.second == second_of(now) {
            return 0;
        }
        let left_out = self.left_out;
        *self = Total { second: second_of(now), lines: 0, left_out: 0 };
        left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A denial of a key at a millisecond, and its line: `suppressed` and `left_out`, or nothing.
    type Denial<'a> = (&'a str, u64, Option<(u64, u64)>);

    fn check(storm: &Storm, denials: &[Denial<'_>]) {
        for (index, (key, millis, expected)) in denials.iter().enumerate() {
            let line = storm.denial("api", Some(key), Micros::from_millis(1_000 + millis));
            let line = line.map(|line| (line.suppressed, line.left_out));
            assert_eq!(line, *expected, "denial {index} of {key} at {millis} ms");
        }
    }

    #[test]
    fn the_first_denial_of_a_key_in_a_second_is_logged_and_the_rest_with_the_next() {
        let storm = Storm::new(Some(LINES));
        let slot = |key: &str| slot_of(storm.hash("api", Some(key)));
        let other = (0..).map(|number: u64| number.to_string()).find(|key| slot(key) != slot("a"));
        let other = other.expect("there are keys enough for two slots");
        check(
            &storm,
            &[
                ("a", 0, Some((0, 0))),
                ("a", 1, None),
                ("a", 999, None),
                (&other, 999, Some((0, 0))),
                ("a", 1_000, Some((2, 0))),
                ("a", 1_001, None),
                ("a", 60_000, Some((1, 0))),
                ("a", 61_000, Some((0, 0))),
            ],
        );
    }

    #[test]
    fn unreported_denials_of_a_displaced_key_count_as_left_out() {
        let storm = Storm::new(Some(LINES));
        let slot = |key: &str| slot_of(storm.hash("api", Some(key)));
        let other = (0..).map(|number: u64| number.to_string()).find(|key| slot(key) == slot("a"));
        let other = other.expect("some key shares the slot");
        check(
            &storm,
            &[("a", 0, Some((0, 0))), ("a", 1, None), (&other, 2, Some((0, 0))), ("a", 1_000, Some((0, 1)))],
        );
    }

    #[test]
    fn there_are_a_hundred_lines_a_second_and_the_rest_is_reported_once() {
        let storm = Storm::new(Some(LINES));
        let second = |second, keys: u64| {
            let at = Micros::from_secs(second);
            let lines = (0..keys).filter_map(|key| storm.denial("api", Some(&key.to_string()), at));
            lines.collect::<Vec<_>>()
        };
        assert_eq!(second(1, 130).len(), 100);
        let lines = second(2, 40);
        assert_eq!((lines.len(), lines[0].left_out), (40, 30));
        assert!(lines[1..].iter().all(|line| line.left_out == 0), "it is logged once");
        assert_eq!(second(3, 130).len(), 100);
        assert_eq!(storm.left_out(Micros::from_secs(3)), 0, "the second is not over");
        assert_eq!(storm.left_out(Micros::from_secs(4)), 30);
        assert_eq!(storm.left_out(Micros::from_secs(4)), 0);
    }

    #[test]
    fn nothing_grows_however_many_keys_there_are_and_all_is_accounted_for() {
        let storm = Storm::new(Some(LINES));
        let (mut lines, mut reported) = (0, 0);
        for number in 0..200_000_u64 {
            // 50,000 keys, each denied four times in a row, over twenty seconds.
            let (key, at) = ((number / 4).to_string(), Micros::from_millis(1_000 + number / 10));
            if let Some(line) = storm.denial("api", Some(&key), at) {
                lines += 1;
                reported += line.suppressed + line.left_out;
            }
        }
        assert_eq!(lines, 100 * 20);
        reported += storm.left_out(Micros::from_secs(60));
        let suppressed: u64 = storm.slots.iter().map(|slot| slot.suppressed.load(Ordering::Relaxed)).sum();
        assert_eq!(lines + reported + suppressed, 200_000);
    }

    #[test]
    fn threads_that_are_denied_at_once_lose_none() {
        let storm = Storm::new(Some(LINES));
        let logged = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for number in 0..20_000_u64 {
                        // Few keys, so that threads contend for them, over a hundred seconds.
                        let (key, at) = ((number % 7).to_string(), Micros::from_millis(1_000 + 5 * number));
                        if let Some(line) = storm.denial("api", Some(&key), at) {
                            logged.fetch_add(1 + line.suppressed + line.left_out, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        let suppressed: u64 = storm.slots.iter().map(|slot| slot.suppressed.load(Ordering::Relaxed)).sum();
        let left_out = storm.left_out(Micros::from_secs(1_000));
        assert_eq!(logged.into_inner() + suppressed + left_out, 80_000);
    }
}
