//! From a key's text to the 96 bits that the tables know it by.
//!
//! Two keys that share a fingerprint share a counter. So a fingerprint is two lanes, one of 64 bits and one that is cut
//! to 32, each the NH hash of UMAC (Black, Halevi,
//! Krawczyk, Krovetz and Rogaway, 1999) under random keys of its own: the text is cut into pairs of words, a key is added to each
//! word, the products of the pairs are summed to 128 bits, and a keyed multiplication folds these to 64. A text of more than one
//! block carries each block's hash into the next. The keys are drawn when the store starts and never leave it.
//!
//! What is proven: whatever two texts a caller chooses, if they have at most one block (240 bytes), their sums in one lane are equal
//! with a probability of at most 2^-63, and in both lanes, whose keys are independent, of at most 2^-126.
//!
//! What is not proven: the fold, and that blocks may share keys. We assume that two different sums fold to the same word as
//! seldom as random ones do, with a probability of about 2^-64, or 2^-32 where half of it is cut off; the tests below look for a bias. Then
//! any two of a hundred million keys share a counter with a probability of some 10^-13, and an outsider, who sees neither keys nor hashes, cannot look for such a pair.
//! A fold with a proof (multiply-shift under 128-bit keys) took 0.5 to 2 ns more for each check and was left out.
//!
//! It is our own because the fast hashers to be had as crates claim less for chosen texts, and take as long: two runs of
//! foldhash or rapidhash were no faster when we tried.

use super::node::Fingerprint;
use crate::random;

/// Pairs of words in a block: 240 bytes, more than nearly every key has.
const PAIRS: usize = 15;

/// Two words: sixteen bytes.
const PAIR: usize = 16;

pub(crate) struct Seeds {
    lo: Lane,
    hi: Lane,
}

struct Lane {
    pairs: [[u64; 2]; PAIRS],
    last: [u64; 2],
}

impl Lane {
    fn random() -> Lane {
        let two_words = || halves(u128::from_ne_bytes(random::bytes()));
        Lane { pairs: std::array::from_fn(|_| two_words()), last: two_words() }
    }

    /// Adds one pair of words to a sum.
    #[inline(always)]
    fn add(&self, sum: u128, pair: usize, [first, second]: [u64; 2]) -> u128 {
        let key = &self.pairs[pair];
        let product = u128::from(first.wrapping_add(key[0])) * u128::from(second.wrapping_add(key[1]));
        sum.wrapping_add(product)
    }

    /// Folds a sum into one word, every bit of which depends on all of it.
    #[inline(always)]
    fn fold(&self, sum: u128) -> u64 {
        let [low, high] = halves(sum);
        let [low, high] = halves(u128::from(low ^ self.last[0]) * u128::from(high ^ self.last[1]));
        low ^ high
    }
}

#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // Cutting in two is the point.
fn halves(wide: u128) -> [u64; 2] {
    [wide as u64, (wide >> 64) as u64]
}

impl Seeds {
    pub(crate) fn random() -> Self {
        Seeds { lo: Lane::random(), hi: Lane::random() }
    }

    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // Half of the second lane is cut off.
    pub(crate) fn fingerprint(&self, key: &str) -> Fingerprint {
        let [lo, hi] = self.lanes(key);
        // Zero marks a vacant slot; giving it the value one costs one part in 2^32.
        Fingerprint { lo, hi: (hi as u32).max(1) }
    }

    #[inline(always)]
    fn lanes(&self, key: &str) -> [u64; 2] {
        let bytes = key.as_bytes();
        let start = [bytes.len() as u64; 2].map(u128::from);
        match (bytes.len(), bytes.first_chunk::<PAIR>(), bytes.last_chunk::<PAIR>()) {
            // Two reads that overlap: for a given length they tell all of the text.
            (17..=32, Some(first), Some(last)) => {
                let sums = self.add(start, 0, words(*first));
                self.fold(self.add(sums, 1, words(*last)))
            }
            (0..=16, ..) => self.fold(self.add(start, 0, short(bytes))),
            _ => self.long(bytes),
        }
    }

    /// The hash of a text of more than two pairs, block by block. Each block starts from the hash of those before it.
    #[inline(never)]
    fn long(&self, bytes: &[u8]) -> [u64; 2] {
        bytes.chunks(PAIR * PAIRS).fold([bytes.len() as u64; 2], |before, block| {
            let mut sums = before.map(u128::from);
            let (pairs, rest) = block.as_chunks::<PAIR>();
            for (pair, chunk) in pairs.iter().enumerate() {
                sums = self.add(sums, pair, words(*chunk));
            }
            if !rest.is_empty() {
                let last = bytes.last_chunk::<PAIR>().map_or_else(|| short(rest), |last| words(*last));
                sums = self.add(sums, pairs.len(), last);
            }
            self.fold(sums)
        })
    }

    #[inline(always)]
    fn add(&self, [lo, hi]: [u128; 2], pair: usize, words: [u64; 2]) -> [u128; 2] {
        [self.lo.add(lo, pair, words), self.hi.add(hi, pair, words)]
    }

    #[inline(always)]
    fn fold(&self, [lo, hi]: [u128; 2]) -> [u64; 2] {
        [self.lo.fold(lo), self.hi.fold(hi)]
    }
}

#[inline(always)]
fn words(pair: [u8; PAIR]) -> [u64; 2] {
    halves(u128::from_le_bytes(pair))
}

/// Up to sixteen bytes as a pair of words: two reads that overlap, of the longest kind that fits; one, two or three bytes in
/// turn.
#[inline(always)]
fn short(bytes: &[u8]) -> [u64; 2] {
    if let (Some(first), Some(last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        return [u64::from_le_bytes(*first), u64::from_le_bytes(*last)];
    }
    if let (Some(first), Some(last)) = (bytes.first_chunk(), bytes.last_chunk()) {
        return [u32::from_le_bytes(*first).into(), u32::from_le_bytes(*last).into()];
    }
    match bytes {
        [] => [0, 0],
        [one] => [u64::from(*one), 0],
        [one, .., last] => [u64::from(*one) | u64::from(bytes[1]) << 8, u64::from(*last)],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Texts of every length up to several blocks, that differ in one place or only in length, and very many that differ in a
    /// digit: no two share even one lane.
    #[test]
    fn texts_that_differ_have_fingerprints_that_differ() {
        let seeds = Seeds::random();
        let (mut lo, mut hi) = (HashSet::new(), HashSet::new());
        let mut check = |text: &str| {
            let lanes = seeds.lanes(text);
            assert_eq!(lanes, seeds.lanes(text));
            assert!(lo.insert(lanes[0]) && hi.insert(lanes[1]), "{} bytes: {text:?}", text.len());
            assert_eq!(seeds.fingerprint(text).lo, lanes[0]);
        };
        for length in 0..600 {
            check(&"\0".repeat(length));
            for at in (0..length).step_by(1 + length / 20) {
                let mut text = vec![b'x'; length];
                text[at] = b'y';
                check(std::str::from_utf8(&text).expect("ASCII"));
            }
        }
        (0..300_000).for_each(|number| check(&format!("user:{number}")));
        check(&"a".repeat(1 << 20));
        check(&"a".repeat((1 << 20) + 1));
        assert_ne!(seeds.fingerprint("a"), Seeds::random().fingerprint("a"), "keys are drawn anew");
    }

    /// Any bit of a text changes about half of the bits of each lane, and no bit of a lane stays as it is.
    #[test]
    fn every_bit_of_a_text_stirs_every_bit_of_a_lane() {
        let seeds = Seeds::random();
        let mut changes = [[0u32; 64]; 2];
        let mut trials = 0;
        for number in 0..2_000u32 {
            let text = format!("tenant-0001:user-{number:07}");
            let before = seeds.lanes(&text);
            for bit in 0..4 {
                let mut bytes = text.clone().into_bytes();
                bytes[number as usize % 24] ^= 1 << bit;
                let after = seeds.lanes(std::str::from_utf8(&bytes).expect("ASCII"));
                trials += 1;
                let stirred = [before[0] ^ after[0], before[1] ^ after[1]];
                for (counts, stirred) in changes.iter_mut().zip(stirred) {
                    for (place, count) in counts.iter_mut().enumerate() {
                        *count += u32::from(stirred >> place & 1 == 1);
                    }
                }
            }
        }
        // Half of 8,000 trials, give or take six standard deviations.
        for (lane, counts) in changes.iter().enumerate() {
            for (place, &count) in counts.iter().enumerate() {
                assert!(count.abs_diff(trials / 2) < 270, "lane {lane}, bit {place}: {count} of {trials}");
            }
        }
    }
}
