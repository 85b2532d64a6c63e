//! Numbers that look random and are the same in every run with the same seed.

/// A small generator (SplitMix64): good enough to choose faults and schedules, and nothing else.
///
/// ```
/// use tollgate_testkit::Random;
/// let mut random = Random::seeded(7);
/// assert!(random.below(10) < 10);
/// assert_eq!(Random::seeded(7).next(), Random::seeded(7).next());
/// ```
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of this seed.
    pub const fn seeded(seed: u64) -> Random {
        Random(seed)
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; 0 if `end` is 0. Slightly uneven for huge ends, which no test minds.
    pub const fn below(&mut self, end: u64) -> u64 {
        let number = self.next();
        if end == 0 { 0 } else { number % end }
    }

    /// True about `per_mille` times in a thousand.
    pub const fn chance(&mut self, per_mille: u16) -> bool {
        self.below(1000) < per_mille as u64
    }
}
