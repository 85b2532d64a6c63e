//! What calls have shown about a model: how many tokens its tokenizer makes of a text, how much of its input a cache exempts, and
//! how long its answers are.
//!
//! Each is a quantile of the last few calls, in whole numbers. A quantile follows a change within a few calls, and one outlier
//! does not move it. All factors are bounded: an upstream that lies about usage cannot make estimates absurd.

/// What one is, in factors.
const ONE: u64 = 10_000;

/// The factor that o200k counts are multiplied by while nothing is known of a model whose vocabulary is not public.
const FIRST_FACTOR: u64 = 12_000;

/// The bounds of that factor.
const FACTORS: std::ops::RangeInclusive<u64> = 2_500..=40_000;

/// How many calls are remembered.
const REMEMBERED: usize = 32;

/// The number of answers after which their length is used.
const ENOUGH: usize = 8;

/// The newest values, so many of them, in a ring.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ring<const MOST: usize = REMEMBERED> {
    values: Vec<u64>,
    next: usize,
}

impl<const MOST: usize> Ring<MOST> {
    pub(crate) fn push(&mut self, value: u64) {
        if self.values.len() < MOST {
            self.values.push(value);
        } else {
            self.values[self.next] = value;
        }
        self.next = (self.next + 1) % MOST;
    }

    /// The values, smallest first.
    pub(crate) fn sorted(&self) -> Vec<u64> {
        let mut sorted = self.values.clone();
        sorted.sort_unstable();
        sorted
    }

    /// The value that so many of ten are not above.
    fn quantile(&self, of_ten: usize) -> Option<u64> {
        let sorted = self.sorted();
        let last = sorted.len().checked_sub(1)?;
        Some(sorted[last * of_ten / 10])
    }
}

/// What is known of one model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Learned {
    factors: Ring,
    charged: Ring,
    outputs: Ring,
}

impl Learned {
    /// How many input tokens the provider will report for so many counted ones.
    pub(crate) fn input(&self, counted: u64, is_exact: bool) -> u64 {
        match is_exact {
            true => counted,
            false => times(counted, self.factor()),
        }
    }

    /// How many of so many input tokens will count against limits.
    pub(crate) fn charged(&self, input: u64) -> u64 {
        times(input, self.charged.quantile(9).unwrap_or(ONE)).max(1)
    }

    /// How many tokens an answer will have, if calls so far say.
    pub(crate) fn output(&self) -> Option<u64> {
        self.outputs.quantile(9).filter(|_| self.outputs.values.len() >= ENOUGH)
    }

    /// By how much o200k counts are multiplied, in parts of 10,000.
    pub(crate) fn factor(&self) -> u64 {
        self.factors.quantile(7).unwrap_or(FIRST_FACTOR)
    }

    /// A call has ended, and its provider has reported.
    pub(crate) fn learn(&mut self, counted: u64, input: u64, charged: u64, output: Option<u64>) {
        if counted > 0 && input > 0 {
            self.factors.push(ratio(input, counted).clamp(*FACTORS.start(), *FACTORS.end()));
        }
        if input > 0 {
            self.charged.push(ratio(charged, input).min(ONE));
        }
        if let Some(output) = output {
            self.outputs.push(output);
        }
    }
}

/// Rounded up: an estimate that is short by one is an overshoot.
fn times(count: u64, factor: u64) -> u64 {
    u64::try_from((u128::from(count) * u128::from(factor)).div_ceil(u128::from(ONE))).unwrap_or(u64::MAX)
}

fn ratio(part: u64, whole: u64) -> u64 {
    u64::try_from(u128::from(part) * u128::from(ONE) / u128::from(whole.max(1))).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g5_an_estimate_is_within_five_percent_after_twenty_calls() {
        for tenths in [10, 13, 20, 7] {
            let mut learned = Learned::default();
            for call in 0..20 {
                let counted = 500 + 37 * call;
                learned.learn(counted, counted * tenths / 10, counted, Some(10));
            }
            let (estimate, truth) = (learned.input(10_000, false), 1_000 * tenths);
            assert!(estimate.abs_diff(truth) * 20 <= truth, "{tenths}: {estimate}");
            assert_eq!(learned.input(10_000, true), 10_000, "an exact count stays");
        }
    }

    #[test]
    fn b7_what_a_cache_exempts_is_learned_and_unlearned() {
        let mut learned = Learned::default();
        assert_eq!(learned.charged(1_000), 1_000);
        (0..REMEMBERED).for_each(|_| learned.learn(1_000, 1_000, 200, None));
        assert_eq!(learned.charged(1_000), 200);
        (0..5).for_each(|_| learned.learn(1_000, 1_000, 1_000, None));
        assert_eq!(learned.charged(1_000), 1_000, "a few calls are enough to be careful again");
    }

    #[test]
    fn an_upstream_that_lies_moves_nothing_beyond_its_bounds() {
        let mut learned = Learned::default();
        (0..99).for_each(|_| learned.learn(1, u64::MAX, u64::MAX, Some(1)));
        assert_eq!(learned.input(100, false), 400);
        (0..99).for_each(|_| learned.learn(u64::MAX, 1, 1, Some(1)));
        assert_eq!(learned.input(100, false), 25);
        learned.learn(0, 0, 0, None);
        assert_eq!(learned.charged(0), 1, "a charge is of at least one token");
    }

    #[test]
    fn the_length_of_answers_is_believed_after_a_few() {
        let mut learned = Learned::default();
        (1..ENOUGH as u64).for_each(|_| learned.learn(1, 1, 1, Some(50)));
        assert_eq!(learned.output(), None);
        learned.learn(1, 1, 1, Some(50));
        assert_eq!(learned.output(), Some(50));
    }
}
