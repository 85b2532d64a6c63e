//! Who asks, and in which order: the keys and the streams of checks, generated before the clock starts.
//!
//! A key is a text of 24 bytes, `tenant-0001:user-0000001`; one more would push every store that keeps the text into the
//! allocator's next size. A stream is a run of ready-made `String`s, read from front to
//! back, so that the text of the next key is in cache as it would be after parsing a request; what a limiter remembers
//! about the key is not. Streams are refilled for every round, in place: a stream that repeated itself would bring its own
//! part of the table into cache and turn a million keys into some tens of thousands.
//!
//! Nothing here knows a limiter. The harness reads the streams, the contestants insert the key set.

use std::fmt::Write;

/// The keys `0..count` that a limiter already knows when a measurement starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeySet {
    pub(crate) count: u32,
}

impl KeySet {
    /// Shows every key once to `visit`, through one buffer, so that only what `visit` keeps takes memory.
    pub(crate) fn for_each(self, mut visit: impl FnMut(&String)) {
        let mut key = String::new();
        for index in 0..self.count {
            write_key(index, &mut key);
            visit(&key);
        }
    }

    /// `1`, `1k`, `1M`, `5M`: the word for this size in the name of a cell.
    pub(crate) fn word(self) -> String {
        match self.count {
            millions if millions >= 1_000_000 && millions % 1_000_000 == 0 => {
                format!("{}M", millions / 1_000_000)
            }
            thousands if thousands >= 1_000 && thousands % 1_000 == 0 => format!("{}k", thousands / 1_000),
            few => few.to_string(),
        }
    }
}

/// How often each key of the set is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spread {
    /// All keys alike.
    Uniform,
    /// The n-th most frequent key in proportion to 1/n.
    Zipf,
}

impl Spread {
    /// The word in the name of a cell.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Spread::Uniform => "uniform",
            Spread::Zipf => "zipf",
        }
    }
}

/// The checks of one thread in one round: a warm-up, then the part that is measured.
pub(crate) struct Stream {
    set: KeySet,
    spread: Spread,
    random: Random,
    warm_up: usize,
    keys: Vec<String>,
}

impl Stream {
    /// A stream of `slice` checks after a warm-up of an eighth as many. Equal seeds give equal streams.
    pub(crate) fn new(set: KeySet, spread: Spread, slice: usize, seed: u64) -> Stream {
        let warm_up = slice / 8;
        let mut keys = vec![String::new(); warm_up + slice];
        // One text after the other, so that the texts lie side by side in the order in which they are read.
        keys.iter_mut().for_each(|key| write_key(0, key));
        Stream { set, spread, random: Random(seed), warm_up, keys }
    }

    /// Draws new keys into the same memory.
    pub(crate) fn refill(&mut self) {
        for key in &mut self.keys {
            let index = match self.spread {
                Spread::Uniform => self.random.below(self.set.count),
                Spread::Zipf => scatter(self.random.zipf_rank(self.set.count), self.set.count),
            };
            write_key(index, key);
        }
    }

    pub(crate) fn warm_up(&self) -> &[String] {
        &self.keys[..self.warm_up]
    }

    pub(crate) fn measured(&self) -> &[String] {
        &self.keys[self.warm_up..]
    }
}

/// A thousand users to a tenant; exactly one colon, and the same length for every key.
fn write_key(index: u32, key: &mut String) {
    key.clear();
    write!(key, "tenant-{:04}:user-{index:07}", index / 1000).expect("a String takes any text");
}

/// Sends frequent ranks to keys far apart. Keys are inserted in order, and neighbours would share cache lines in any store
/// that keeps key text on the heap. The multiplier is a prime above any count, so that no two ranks meet.
fn scatter(rank: u32, count: u32) -> u32 {
    const PRIME: u64 = 2_654_435_761;
    let key = u64::from(rank) * PRIME % u64::from(count);
    u32::try_from(key).expect("a remainder is below its divisor")
}

/// SplitMix64: small, seeded and even enough to choose keys.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub(crate) fn below(&mut self, count: u32) -> u32 {
        let scaled = (self.next() >> 32) * u64::from(count);
        u32::try_from(scaled >> 32).expect("a fraction of a u32")
    }

    /// In [0, 1), with 53 random bits.
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A rank in `0..count` with probability proportional to 1/(rank + 1), by rejection from the curve min(1, 1/x) that lies
    /// over the steps. It needs no table, which for five million keys would take the cache from the contestants.
    pub(crate) fn zipf_rank(&mut self, count: u32) -> u32 {
        let area = 1.0 + f64::from(count).ln();
        loop {
            let below = self.fraction() * area;
            let at = if below <= 1.0 { below } else { (below - 1.0).exp() };
            let step = at.floor() + 1.0;
            let share = if step > 1.0 { at / step } else { 1.0 };
            if step <= f64::from(count) && self.fraction() < share {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "in 1..=count")]
                return step as u32 - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_one_colon_and_one_length() {
        KeySet { count: 1_000_000 }.for_each(|key| {
            assert_eq!((key.len(), key.matches(':').count()), (24, 1), "{key}");
        });
        let mut key = String::new();
        write_key(4_999_999, &mut key);
        assert_eq!(key, "tenant-4999:user-4999999");
    }

    #[test]
    fn scatter_reaches_every_key_once() {
        for count in [1, 1_000, 1_000_000] {
            let mut seen = vec![false; count as usize];
            (0..count).for_each(|rank| seen[scatter(rank, count) as usize] = true);
            assert!(seen.iter().all(|&key| key), "{count}");
        }
    }

    #[test]
    pub(crate) fn zipf_ranks_fall_off_as_one_over_n() {
        const DRAWS: u32 = 1_000_000;
        let mut random = Random(7);
        let mut seen = [0u32; 1_000];
        (0..DRAWS).for_each(|_| seen[random.zipf_rank(1_000) as usize] += 1);
        let harmonic: f64 = (1..=1_000).map(|n| 1.0 / f64::from(n)).sum();
        for rank in [0, 1, 2, 9, 99] {
            let wanted = f64::from(DRAWS) / harmonic / (rank + 1) as f64;
            let ratio = f64::from(seen[rank]) / wanted;
            assert!((0.9..1.1).contains(&ratio), "rank {rank}: {ratio}");
        }
    }

    #[test]
    fn equal_seeds_give_equal_streams_and_refills_differ() {
        let stream = |seed| {
            let mut stream = Stream::new(KeySet { count: 1_000_000 }, Spread::Uniform, 64, seed);
            stream.refill();
            stream
        };
        let (mut first, second) = (stream(1), stream(1));
        assert_eq!(first.measured(), second.measured());
        assert_ne!(first.measured(), stream(2).measured());
        first.refill();
        assert_ne!(first.measured(), second.measured());
        assert_eq!((first.warm_up().len(), first.measured().len()), (8, 64));
    }
}
