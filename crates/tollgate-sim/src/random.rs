//! Random numbers from a seed, in whole numbers alone, so that a run is the same on every machine.

/// A stream of numbers that look random (splitmix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// One, in the fixed point of [`Random::exponential`].
const ONE: u64 = 1 << 32;
/// The natural logarithm of two, in the same.
const LN_2: u64 = 2_977_044_472;

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// A stream of its own for one of many.
    pub fn fork(&self, number: u64) -> Random {
        let mut fork = Random(self.0 ^ number.wrapping_mul(0xd6e8_feb8_6659_fd93));
        fork.draw();
        fork
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`; zero if there is none.
    pub fn below(&mut self, end: u64) -> u64 {
        u64::try_from((u128::from(self.draw()) * u128::from(end)) >> 64).unwrap_or(0)
    }

    /// A number from `-most` to `most`.
    pub fn around_zero(&mut self, most: u64) -> i64 {
        self.below(2 * most + 1).cast_signed() - most.cast_signed()
    }

    /// Whether something happens that happens so many times in a million.
    pub fn happens(&mut self, ppm: u64) -> bool {
        ppm > 0 && self.below(1_000_000) < ppm
    }

    /// How long until the next of many things that happen by themselves, this long apart on average.
    pub fn exponential(&mut self, mean: u64) -> u64 {
        // -ln(u) for a u of 32 bits above zero: how many times it is to be doubled until it is one, times ln 2.
        let drawn = (self.draw() >> 32) + 1;
        let doublings = u64::from(drawn.leading_zeros() - 31);
        let mut mantissa = drawn << doublings;
        // The last doubling was part of one: how much of it, bit by bit. Squaring a number doubles its logarithm.
        let mut excess = 0;
        for bit in 1..=32 {
            mantissa = u64::try_from((u128::from(mantissa) * u128::from(mantissa)) >> 32).unwrap_or(u64::MAX);
            if mantissa >= 2 * ONE {
                mantissa >>= 1;
                excess |= ONE >> bit;
            }
        }
        let log_2 = doublings * ONE - excess;
        let natural = (u128::from(log_2) * u128::from(LN_2)) >> 32;
        u64::try_from((natural * u128::from(mean)) >> 32).unwrap_or(u64::MAX)
    }
}

/// Chooses among many, of which the first are chosen more often: the k-th 1/k as often as the first.
#[derive(Clone, Debug)]
pub struct Zipf {
    /// The weights of all up to each.
    up_to: Vec<u64>,
}

impl Zipf {
    /// Among so many, at least one.
    pub fn new(count: usize) -> Zipf {
        const FIRST: u64 = 1 << 40;
        let mut sum = 0;
        let up_to = (1..=count.max(1) as u64).map(|rank| {
            sum += (FIRST / rank).max(1);
            sum
        });
        Zipf { up_to: up_to.collect() }
    }

    /// One of them.
    pub fn draw(&self, random: &mut Random) -> usize {
        let drawn = random.below(self.up_to.last().copied().unwrap_or(1));
        self.up_to.partition_point(|up_to| *up_to <= drawn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_times_have_the_mean_and_the_median_of_their_kind() {
        let mut random = Random::new(7);
        let mut drawn: Vec<u64> = (0..100_000).map(|_| random.exponential(1_000_000)).collect();
        drawn.sort_unstable();
        let mean = drawn.iter().sum::<u64>() / 100_000;
        assert!((990_000..1_010_000).contains(&mean), "{mean}");
        let median = drawn[50_000];
        assert!((683_000..703_000).contains(&median), "ln 2 of the mean: {median}");
        assert!(drawn[99_999] > 8_000_000, "{}", drawn[99_999]);
    }

    #[test]
    fn the_second_of_many_is_chosen_half_as_often_as_the_first() {
        let (zipf, mut random) = (Zipf::new(1_000), Random::new(7));
        let mut counts = vec![0_u64; 1_000];
        (0..200_000).for_each(|_| counts[zipf.draw(&mut random)] += 1);
        let harmonic = 7.485;
        for (rank, expected) in
            [(0, 200_000.0 / harmonic), (1, 100_000.0 / harmonic), (9, 20_000.0 / harmonic)]
        {
            let share = f64::from(u32::try_from(counts[rank]).expect("few")) / expected;
            assert!((0.93..1.07).contains(&share), "{rank}: {share}");
        }
    }
}
