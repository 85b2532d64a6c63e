//! What a limit would answer if it remembered everything: the rules of the six strategies, said as plainly as they can be.
//!
//! Shares nothing with the kernels. It keeps every admitted charge with its time, and answers each call by
//! going through all of them; a bucket's level is kept in the units of its first definition, with the rate as it was written
//! and not in lowest terms.

use tollgate_kernel::{Align, Cost, Limit, Micros, Rate};

/// One key that forgets nothing.
#[derive(Clone)]
pub(crate) struct Model {
    limit: Limit,
    /// In the order they were made; for a bucket also what was given back.
    entries: Vec<Entry>,
}

#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    cost: i128,
    /// What was given back into a bucket, in units of 1/period.
    returned: i128,
}

/// Free room, in units of which one of cost takes `scale`.
struct Free {
    units: i128,
    scale: i128,
}

impl Model {
    pub(crate) fn new(limit: Limit) -> Model {
        Model { limit, entries: Vec::new() }
    }

    /// The time that `now` counts as, should the clock have stepped back behind what the key has seen.
    pub(crate) fn counted(&self, now: Micros) -> Micros {
        let newest = self.entries.iter().filter(|entry| entry.cost > 0).map(|entry| entry.at).max();
        let seen = match self.limit {
            Limit::TokenBucket(_) | Limit::LeakyBucket(_) | Limit::Concurrency(_) => None,
            Limit::FixedWindow(window) if window.align() == Align::First => {
                self.opened(window.window().get()).map(|(start, _)| start)
            }
            Limit::FixedWindow(window) => newest.map(|at| at - at % window.window().get()),
            Limit::SlidingWindowCounter(window) => newest.map(|at| at - at % window.window().get()),
            Limit::SlidingWindow(_) => newest,
        };
        now.max(Micros::new(seen.unwrap_or(0)))
    }

    pub(crate) fn fits(&self, cost: Cost, now: Micros) -> bool {
        let free = self.free(now);
        i128::from(cost.get()) * free.scale <= free.units
    }

    pub(crate) fn remaining(&self, now: Micros) -> u64 {
        let free = self.free(now);
        u64::try_from(free.units.max(0) / free.scale).unwrap()
    }

    /// Whether all of the capacity is free.
    pub(crate) fn is_whole(&self, now: Micros) -> bool {
        let free = self.free(now);
        free.units == i128::from(self.limit.capacity()) * free.scale
    }

    /// The time until all that is ahead of a charge has drained; zero except for a leaky bucket.
    pub(crate) fn delay(&self, now: Micros) -> Micros {
        let Limit::LeakyBucket(bucket) = self.limit else { return Micros::ZERO };
        let free = self.free(now);
        let ahead = i128::from(bucket.capacity()) * free.scale - free.units;
        Micros::new(u64::try_from(ahead).unwrap().div_ceil(bucket.rate().count()))
    }

    /// Enters a charge whether it fits or not, and says under which number.
    pub(crate) fn charge(&mut self, cost: u64, now: Micros) -> usize {
        let at = self.counted(now).get();
        self.entries.push(Entry { at, cost: i128::from(cost), returned: 0 });
        self.entries.len() - 1
    }

    /// Into the state it was taken from: the entry itself shrinks, except in a bucket, which is one state for all time and gets
    /// back at most what has not refilled since.
    pub(crate) fn give_back(&mut self, number: usize, amount: u64, now: Micros) {
        let rate = match self.limit {
            Limit::TokenBucket(bucket) => bucket.rate(),
            Limit::LeakyBucket(bucket) => bucket.rate(),
            _ => {
                self.entries[number].cost -= i128::from(amount);
                return;
            }
        };
        let (count, scale) = (i128::from(rate.count()), i128::from(rate.period_us().get()));
        let taken = self.entries[number];
        let refilled = i128::from(now.get() - taken.at) * count;
        let returned = (i128::from(amount) * scale).min((taken.cost * scale - refilled).max(0));
        self.entries.push(Entry { at: now.get(), cost: 0, returned });
    }

    fn free(&self, now: Micros) -> Free {
        let now = self.counted(now).get();
        let capacity = i128::from(self.limit.capacity());
        let counts = |used: i128| Free { units: capacity - used, scale: 1 };
        match self.limit {
            Limit::TokenBucket(bucket) => self.level(bucket.rate(), capacity, now),
            Limit::LeakyBucket(bucket) => self.level(bucket.rate(), capacity, now),
            Limit::FixedWindow(window) => {
                let length = window.window().get();
                counts(match window.align() {
                    Align::First => self
                        .opened(length)
                        .filter(|(start, _)| now - start < length)
                        .map_or(0, |(_, count)| count),
                    Align::Clock => self.sum(|at| at / length == now / length),
                })
            }
            Limit::SlidingWindow(window) => counts(self.sum(|at| now - at < window.window().get())),
            Limit::Concurrency(leases) => counts(self.sum(|at| now - at < leases.lease().get())),
            Limit::SlidingWindowCounter(window) => {
                let length = window.window().get();
                let left = i128::from(length - now % length);
                let current = self.sum(|at| at / length == now / length);
                let previous = self.sum(|at| at / length + 1 == now / length);
                let scale = i128::from(length);
                Free { units: capacity * scale - previous * left - current * scale, scale }
            }
        }
    }

    /// `level = min(B * p, level + elapsed * c)`, from the first entry to `now`.
    fn level(&self, rate: Rate, capacity: i128, now: u64) -> Free {
        let (count, scale) = (i128::from(rate.count()), i128::from(rate.period_us().get()));
        let full = capacity * scale;
        let (mut level, mut last) = (full, 0);
        for entry in &self.entries {
            level = full.min(level + i128::from(entry.at - last) * count);
            level = full.min(level - entry.cost * scale + entry.returned);
            last = entry.at;
        }
        Free { units: full.min(level + i128::from(now - last) * count), scale }
    }

    /// The window that the last charge is in, if each opens at the first charge after the one before has ended: its start
    /// and what is in it.
    fn opened(&self, length: u64) -> Option<(u64, i128)> {
        self.entries.iter().fold(None, |open, entry| match open {
            Some((start, count)) if entry.at - start < length => Some((start, count + entry.cost)),
            _ => Some((entry.at, entry.cost)),
        })
    }

    fn sum(&self, counts: impl Fn(u64) -> bool) -> i128 {
        self.entries.iter().filter(|entry| counts(entry.at)).map(|entry| entry.cost).sum()
    }
}
