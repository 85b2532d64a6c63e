//! Which keys are denied most under one limit, in constant memory, however many keys there are.
//!
//! Space-saving (Metwally, Agrawal and El Abbadi, 2005) for each of the last five minutes: 64 keys have a count of their own,
//! and a newcomer takes the place of the least and goes on from its count, which it remembers as what it may owe to others.
//! A key with more than a 64th of a minute's denials is among them. What is shown is what a key has for certain, so a flood of
//! names that come once does not look like a crowd of offenders.
//!
//! Each stripe of threads (`striped.rs`) has such a table for each limit. What the tables have for certain adds up; a key with more than a 64th of
//! all denials has as much in one of them.

use std::collections::HashSet;

use tollgate::store::Micros;

use super::recent::Rows;

/// How many keys are counted in a minute.
const KEYS: usize = 64;

/// How many minutes are remembered, that of now among them.
const MINUTES: u64 = 5;

/// Who somebody is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Who {
    /// 32 hexadecimal digits, as in the log.
    pub(crate) hash: String,
    /// The key itself, where that is to be shown.
    pub(crate) key: Option<String>,
}

/// How a key stood when it was last denied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastOutcome {
    pub(crate) capacity: u64,
    pub(crate) remaining: u64,
    pub(crate) reset_after: Micros,
    /// When that was, in seconds since 1970.
    pub(crate) second: u64,
}

/// Somebody who was denied.
#[derive(Clone, Debug)]
pub(crate) struct Offender {
    pub(crate) who: Who,
    /// How often, at least.
    pub(crate) denials: u64,
    pub(crate) standing: LastOutcome,
}

/// The keys that one limit denied in some of the threads.
#[derive(Default)]
pub(super) struct Offenders {
    minutes: Vec<Minute>,
}

/// The tags and the counts of all are by themselves, because a denial looks through all of them.
struct Minute {
    number: u64,
    /// The low half of each mark.
    tags: [u32; KEYS],
    hashes: Vec<u64>,
    counts: Vec<u64>,
    known: Vec<Known>,
    /// No count is below this, and none before that place is as low: counts only rise.
    least: u64,
    place: usize,
}

/// A key that is counted. It has no `Debug`: it holds the key's text.
struct Known {
    key: String,
    /// How much of its count may be others'.
    inherited: u64,
    standing: LastOutcome,
    rows: Rows,
    /// Once somebody has asked.
    who: Option<Who>,
}

/// The keys with most denials first, at most `count`.
pub(super) fn most_denied(mut all: Vec<Offender>, count: usize) -> Vec<Offender> {
    all.sort_by(|one, other| {
        let by_denials = other.denials.cmp(&one.denials);
        by_denials.then_with(|| one.who.hash.cmp(&other.who.hash))
    });
    all.truncate(count);
    all
}

impl Offenders {
    /// A key was denied. `mark` tells it apart. Returns which of its denials are listed.
    pub(super) fn note(&mut self, mark: u64, key: &str, standing: LastOutcome) -> &mut Rows {
        let minute = self.minute(standing.second / 60);
        let at = minute.note(mark, key, standing);
        &mut minute.known[at].rows
    }

    fn minute(&mut self, number: u64) -> &mut Minute {
        let at = match self.minutes.iter().position(|minute| minute.number == number) {
            Some(at) => at,
            None => {
                self.minutes.retain(|minute| minute.number + MINUTES > number);
                self.minutes.push(Minute::new(number));
                self.minutes.len() - 1
            }
        };
        &mut self.minutes[at]
    }

    /// Adds the texts of the keys that were denied in the last minutes.
    pub(super) fn add_keys_to(&self, all: &mut HashSet<String>, second: u64) {
        let recent = self.minutes.iter().filter(|minute| minute.number + MINUTES > second / 60);
        all.extend(recent.flat_map(|minute| &minute.known).map(|one| one.key.clone()));
    }

    /// Adds the keys that were denied in the last minutes.
    pub(super) fn add_to(&mut self, all: &mut Vec<Offender>, second: u64, who: &impl Fn(&str) -> Who) {
        for minute in self.minutes.iter_mut().filter(|minute| minute.number + MINUTES > second / 60) {
            for (one, of_one) in minute.known.iter_mut().zip(&minute.counts) {
                let denials = of_one - one.inherited;
                let Known { key, standing, .. } = one;
                let who = one.who.get_or_insert_with(|| who(key));
                match all.iter_mut().find(|other| other.who.hash == who.hash) {
                    Some(other) => {
                        other.denials += denials;
                        if standing.second >= other.standing.second {
                            other.standing = *standing;
                        }
                    }
                    None => all.push(Offender { who: who.clone(), denials, standing: *standing }),
                }
            }
        }
    }
}

impl Minute {
    fn new(number: u64) -> Minute {
        let room = || Vec::with_capacity(KEYS);
        let known = Vec::with_capacity(KEYS);
        Minute { number, tags: [0; KEYS], hashes: room(), counts: room(), known, least: 1, place: 0 }
    }

    /// Returns the place of the key.
    fn note(&mut self, mark: u64, key: &str, standing: LastOutcome) -> usize {
        if let Some(at) = self.place_of(mark) {
            self.counts[at] += 1;
            self.known[at].standing = standing;
            return at;
        }
        if self.known.len() < KEYS {
            self.tags[self.known.len()] = tag_of(mark);
            self.hashes.push(mark);
            self.counts.push(1);
            let rows = Rows::default();
            self.known.push(Known { key: key.to_owned(), inherited: 0, standing, rows, who: None });
            return self.known.len() - 1;
        }
        let at = self.place_of_least();
        let least = self.counts[at];
        (self.tags[at], self.hashes[at]) = (tag_of(mark), mark);
        self.counts[at] = least + 1;
        let known = &mut self.known[at];
        // Into the same memory: a caller that makes names up makes many.
        known.key.clear();
        known.key.push_str(key);
        (known.inherited, known.standing, known.who) = (least, standing, None);
        known.rows = Rows::default();
        at
    }

    fn place_of(&self, mark: u64) -> Option<usize> {
        let tag = tag_of(mark);
        let (sixteens, _) = self.tags.as_chunks::<16>();
        for (index, sixteen) in sixteens.iter().enumerate() {
            if sixteen.iter().fold(false, |found, known| found | (*known == tag)) {
                // Another may have the same tag, and places that nobody has yet have one too.
                let hashes = self.hashes.get(16 * index..).unwrap_or_default();
                if let Some(after) = hashes.iter().take(16).position(|known| *known == mark) {
                    return Some(16 * index + after);
                }
            }
        }
        None
    }

    /// Where the count is lowest, when there are as many as there may be.
    fn place_of_least(&mut self) -> usize {
        if let Some(after) = self.counts[self.place..].iter().position(|count| *count == self.least) {
            self.place += after;
        } else {
            self.least = self.counts.iter().copied().min().unwrap_or_default();
            self.place = self.counts.iter().position(|count| *count == self.least).unwrap_or_default();
        }
        self.place
    }
}

/// What is compared first: sixteen of them at a time, which processors do at once.
#[expect(clippy::cast_possible_truncation, reason = "the low half")]
const fn tag_of(mark: u64) -> u32 {
    mark as u32
}

#[cfg(test)]
mod tests {
    use super::super::striped::{STRIPES, Striped};
    use super::*;

    const NOW: u64 = 1_700_000_040;

    fn note(offenders: &Striped<Offenders>, name: u64, second: u64) {
        let standing = LastOutcome { capacity: 5, remaining: 0, reset_after: Micros::from_secs(9), second };
        offenders.own().note(name, &format!("{name:032x}"), standing);
    }

    fn top(offenders: &Striped<Offenders>, second: u64, count: usize) -> Vec<Offender> {
        let mut all = Vec::new();
        offenders.each().for_each(|mut table| table.add_to(&mut all, second, &who));
        most_denied(all, count)
    }

    fn who(key: &str) -> Who {
        Who { hash: key.to_owned(), key: None }
    }

    fn check(offenders: &Striped<Offenders>, second: u64, expected: &[(u64, u64)]) {
        let top = top(offenders, second, expected.len().max(1));
        let seen: Vec<(String, u64)> = top.into_iter().map(|one| (one.who.hash, one.denials)).collect();
        let expected: Vec<(String, u64)> =
            expected.iter().map(|(name, denials)| (format!("{name:032x}"), *denials)).collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn few_keys_are_counted_exactly() {
        let offenders = Striped::default();
        for (name, times) in [(1, 3), (2, 7), (3, 1)] {
            (0..times).for_each(|_| note(&offenders, name, NOW));
        }
        check(&offenders, NOW, &[(2, 7), (1, 3), (3, 1)]);
        check(&offenders, NOW, &[(2, 7)]);
    }

    #[test]
    fn minutes_add_up_and_pass() {
        let offenders = Striped::default();
        for minute in 0..10 {
            (0..=minute).for_each(|_| note(&offenders, 1, NOW + 60 * minute));
        }
        assert_eq!(offenders.own().minutes.len(), 5);
        check(&offenders, NOW + 60 * 9, &[(1, 10 + 9 + 8 + 7 + 6)]);
        check(&offenders, NOW + 60 * 12, &[(1, 10 + 9)]);
        check(&offenders, NOW + 60 * 14, &[]);
        assert_eq!(top(&offenders, NOW + 60 * 9, 1)[0].standing.second, NOW + 60 * 9);
    }

    #[test]
    fn a_flood_of_names_hides_no_offender_and_is_none() {
        let offenders = Striped::default();
        for name in 0..100_000 {
            note(&offenders, 1_000_000 + name, NOW);
            if name % 20 == 0 {
                note(&offenders, 7, NOW);
            }
        }
        assert_eq!(offenders.own().minutes[0].counts.len(), KEYS);
        let top = top(&offenders, NOW, 3);
        // One in 21 of all was its own, which is more than one in 64: it has a place, and keeps it from early on.
        assert_eq!(top[0].who.hash, format!("{:032x}", 7));
        assert!((4_900..=5_000).contains(&top[0].denials), "{}", top[0].denials);
        assert_eq!(top[1].denials, 1, "nobody is accused of what others did");
    }

    #[test]
    fn what_threads_deny_adds_up() {
        let offenders = Striped::default();
        std::thread::scope(|scope| {
            for thread in 0..2 * STRIPES as u64 {
                let offenders = &offenders;
                scope.spawn(move || {
                    (0..100).for_each(|_| note(offenders, 7, NOW));
                    // Marks that differ in their high half alone are different keys, and so is one that is 0.
                    note(offenders, 1 << 32 | 7, NOW);
                    (0..=thread).for_each(|_| note(offenders, 0, NOW));
                });
            }
        });
        let threads = 2 * STRIPES as u64;
        check(
            &offenders,
            NOW,
            &[(7, 100 * threads), (0, threads * (threads + 1) / 2), (1 << 32 | 7, threads)],
        );
    }
}
