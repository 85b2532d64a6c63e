//! Keeps a storm of denials out of the log.
//!
//! A key's first denial in a second is logged; its later ones are counted, and the count is in its next line. Over all keys there are
//! at most 100 lines a second; what is left out beyond them is counted in one line once the second is over. The table of keys has
//! a fixed size: a key that needs the slot of another takes it over, and what was not yet told of the other counts as left out.
//!
//! Time is the registry's, so seconds are its seconds.

use std::hash::{BuildHasher, RandomState};

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
    slots: Box<[Mutex<Slot>]>,
    total: Mutex<Total>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    /// Of the limit and the key that were denied last here.
    hash: u64,
    second: u64,
    untold: u64,
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
    /// How many denials of the same key were not told since its last line.
    pub(crate) suppressed: u64,
    /// How many lines were left out in seconds that are over, if that is to be told now.
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
        let slots = (0..SLOTS).map(|_| Mutex::default()).collect();
        Storm { lines, seed: RandomState::new(), slots, total: Mutex::default() }
    }

    fn hash(&self, limiter: &str, key: Option<&str>) -> u64 {
        self.seed.hash_one((limiter, key))
    }

    /// Whether a denial is to be told now.
    pub(crate) fn denial(&self, limiter: &str, key: Option<&str>, now: Micros) -> Option<Line> {
        if self.lines.is_none() {
            return Some(Line { suppressed: 0, left_out: 0 });
        }
        let hash = self.hash(limiter, key);
        let mut slot = self.slots[slot_of(hash)].lock();
        let (is_same, is_now) = (slot.hash == hash, slot.second == second_of(now));
        if is_same && is_now {
            slot.untold += 1;
            return None;
        }
        let suppressed = std::mem::take(&mut slot.untold);
        let others = if is_same { 0 } else { suppressed };
        (slot.hash, slot.second) = (hash, second_of(now));
        let line = self.line(others, now);
        if line.is_none() {
            // This one is counted with all that are left out; those before it still with the key's next line.
            slot.untold = suppressed - others;
        }
        line.map(|line| Line { suppressed: suppressed - others, ..line })
    }

    /// Whether a line about anything else than a denial is to be told now.
    pub(crate) fn other(&self, now: Micros) -> Option<Line> {
        self.line(0, now)
    }

    /// One more line, if there may be one; `others` were left out that nobody will tell of.
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

    /// How many lines were left out in seconds that are over and were not told of yet; they are now.
    pub(crate) fn left_out(&self, now: Micros) -> u64 {
        self.total.lock().over(now)
    }
}

impl Total {
    /// Starts a new second if it is one, and says how many lines were left out before it.
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

    /// A denial of a key at a millisecond, and what becomes of it: the line's `suppressed` and `left_out`, or nothing.
    type Denial<'a> = (&'a str, u64, Option<(u64, u64)>);

    fn check(storm: &Storm, denials: &[Denial<'_>]) {
        for (index, (key, millis, expected)) in denials.iter().enumerate() {
            let line = storm.denial("api", Some(key), Micros::from_millis(1_000 + millis));
            let line = line.map(|line| (line.suppressed, line.left_out));
            assert_eq!(line, *expected, "denial {index} of {key} at {millis} ms");
        }
    }

    #[test]
    fn the_first_denial_of_a_key_in_a_second_is_told_and_the_rest_with_the_next() {
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
    fn a_key_that_takes_the_slot_of_another_leaves_out_what_was_not_told_of_it() {
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
    fn there_are_a_hundred_lines_a_second_and_the_rest_is_told_once() {
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
        let (mut lines, mut told) = (0, 0);
        for number in 0..200_000_u64 {
            // 50,000 keys, each denied four times in a row, over twenty seconds.
            let (key, at) = ((number / 4).to_string(), Micros::from_millis(1_000 + number / 10));
            if let Some(line) = storm.denial("api", Some(&key), at) {
                lines += 1;
                told += line.suppressed + line.left_out;
            }
        }
        assert_eq!(lines, 100 * 20);
        told += storm.left_out(Micros::from_secs(60));
        let untold: u64 = storm.slots.iter().map(|slot| slot.lock().untold).sum();
        assert_eq!(lines + told + untold, 200_000);
    }
}
