//! Token bucket: saves up to `burst` tokens, refilled at `rate`; a charge takes its cost in tokens or is denied.
//!
//! State kept: one whole number F, the instant at which the bucket is full again, in units of 1/c µs for a rate of c tokens
//! every p µs (in lowest terms). In these units a token weighs p and time passes at c per µs, so refill and cost are both
//! whole and nothing drifts. A charge of n moves F to `max(F, now*c) + n*p` and fits iff that is at most `now*c + burst*p`.
//!
//! Bounds: `burst*p` ≤ 2^62, c ≤ 2^32, an empty bucket is full within 142 years and one in debt within 190 (more saturates),
//! so F fits 128 bits for any clock and the distance from now to F fits 64. The twins keep F as whole µs and a rest below c,
//! both below 2^53 until the year 2065. Rounding: tokens left round down, waits round up. Known weaknesses: a full bucket may be emptied at once,
//! so an interval t admits up to burst + rate*t; and one number does not tell how much of an old charge time has refilled, so
//! what is given back late may come back twice, and is bounded by the burst only. Twins: token_bucket.lua, .sql. Cases: token_bucket.cases.

use super::Algorithm;
use crate::limit::{
    LimitError, MAX_COUNT, MAX_DEBT, MAX_FILL, MAX_PRODUCT, MAX_RATE_NUMERATOR, checked_count,
    checked_product,
};
use crate::outcome::{Cost, Outcome};
use crate::rate::Rate;
use crate::time::Micros;

/// A token bucket: `rate` and `burst`.
///
/// ```
/// use tollgate_kernel::{Algorithm, BucketState, Cost, Micros, TokenBucket};
///
/// let bucket = TokenBucket::new("5/s".parse()?, 5)?;
/// let mut state = BucketState::default();
/// let at = Micros::from_secs(1_700_000_000);
/// assert_eq!(bucket.charge(&mut state, Cost::new(5).unwrap(), at).remaining, 0);
/// let denied = bucket.charge(&mut state, Cost::ONE, at);
/// assert_eq!(denied.retry_after, Some(Micros::from_millis(200)));
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TokenBucket {
    rate: Rate,
    burst: u64,
    /// c: units of time per µs, the rate's numerator in lowest terms.
    tokens: u64,
    /// p: units per token, the rate's denominator in lowest terms, in µs.
    period_us: u64,
    /// burst * p: the units of a full bucket.
    full: u64,
    /// (2^64 - 1) / p, rounded down: to divide by p without dividing.
    per_unit: u64,
}

/// When the bucket is full again, in units of 1/c µs. Zero, long past, is a full bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketState {
    /// F of the module's header.
    pub full_at: u128,
}

impl BucketState {
    /// The same instant where one µs is worth `to` units instead of `from`, rounded up: a bucket whose rate was changed is full
    /// no earlier than it was.
    ///
    /// ```
    /// use tollgate_kernel::BucketState;
    ///
    /// let state = BucketState { full_at: 10 };
    /// assert_eq!(state.in_units(7, 1).full_at, 2);
    /// assert_eq!(state.in_units(1, 7).full_at, 70);
    /// ```
    #[must_use]
    pub fn in_units(self, from: u64, to: u64) -> BucketState {
        let (from, to) = (u128::from(from.max(1)), u128::from(to));
        let (us, rest) = (self.full_at / from, self.full_at % from);
        BucketState { full_at: us.saturating_mul(to).saturating_add((rest * to).div_ceil(from)) }
    }
}

impl TokenBucket {
    /// A bucket of `burst` tokens that refills at `rate`.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, LimitError> {
        TokenBucket::with_field("burst", rate, burst)
    }

    /// The same for a caller whose configuration calls the size of the bucket something else.
    pub(super) fn with_field(field: &'static str, rate: Rate, burst: u64) -> Result<Self, LimitError> {
        let burst = checked_count(field, burst)?;
        let (tokens, period_us) = rate.reduced();
        if tokens > MAX_RATE_NUMERATOR {
            return Err(LimitError::new(
                "rate",
                rate,
                format!(
                    "in lowest terms this is {tokens} every {period_us} us, and the count may be at most 2^32; round it"
                ),
            ));
        }
        let full = checked_product(field, burst, period_us)?;
        if full.div_ceil(tokens) > MAX_FILL.get() {
            let most = u128::from(MAX_FILL.get()) * u128::from(tokens) / u128::from(period_us);
            return Err(LimitError::new(
                field,
                burst,
                format!("at {rate} that takes longer than 142 years to refill; at most {most} fits here"),
            ));
        }
        Ok(TokenBucket { rate, burst, tokens, period_us, full, per_unit: u64::MAX / period_us })
    }

    /// The rate of refill.
    pub const fn rate(&self) -> Rate {
        self.rate
    }

    /// How many tokens a full bucket holds.
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// How long an empty bucket takes to fill, rounded up.
    pub const fn time_to_fill(&self) -> Micros {
        Micros::new(self.full.div_ceil(self.tokens))
    }

    /// The answer to a charge of a bucket that is full in so many µs and a rest in units of 1/c µs; and for a leaky bucket,
    /// the time until all that was ahead has drained.
    pub(crate) fn outcome_at(&self, missing: (Micros, u64), cost: Cost) -> (Outcome, Micros) {
        let (us, rest) = missing;
        let missing = us.get().saturating_mul(self.tokens).saturating_add(rest);
        (self.outcome(self.fit(missing, cost), cost), self.wait(missing))
    }

    /// `units` as whole µs and a rest below c.
    pub(crate) fn split(&self, units: u64) -> (u64, u64) {
        (units / self.tokens, units % self.tokens)
    }

    /// What a charge takes, if it can ever fit.
    #[inline]
    pub(crate) fn price(&self, cost: Cost) -> Option<u64> {
        // A cost up to the burst has a price of at most burst * p, so of at most 2^62.
        (cost.get() <= self.burst).then(|| cost.get() * self.period_us)
    }

    /// c and p of the module's header, and the units of a full bucket.
    pub(crate) const fn units(&self) -> (u64, u64, u64) {
        (self.tokens, self.period_us, self.full)
    }

    /// The longest time to full that a debt may come to.
    pub(crate) fn most_missing(&self) -> Micros {
        let units = u128::from(self.full) + u128::from(MAX_PRODUCT);
        let us = u64::try_from(units / u128::from(self.tokens)).unwrap_or(u64::MAX);
        Micros::new(us.min(MAX_DEBT.get()))
    }

    /// How far the bucket is from full: what was taken and has not come back, in units; above `full` when in debt.
    #[inline]
    fn missing(&self, state: &BucketState, now: Micros) -> u64 {
        let missing = state.full_at.saturating_sub(self.instant(now));
        u64::try_from(missing).unwrap_or(u64::MAX)
    }

    /// An instant in units of 1/c µs.
    #[inline]
    fn instant(&self, now: Micros) -> u128 {
        u128::from(now.get()) * u128::from(self.tokens)
    }

    /// How many whole tokens `units` are, at most a full bucket of them: units / p, rounded down. The product is at most one
    /// too small, because units are below 2^63 and `per_unit` is less than one below the true quotient.
    #[inline]
    fn whole_tokens(&self, units: u64) -> u64 {
        let tokens = u64::try_from((u128::from(units) * u128::from(self.per_unit)) >> 64).unwrap_or(u64::MAX);
        tokens + u64::from(units - tokens * self.period_us >= self.period_us)
    }

    /// The wait until `units` have come back, rounded up.
    #[inline]
    fn wait(&self, units: u64) -> Micros {
        Micros::new(if self.tokens == 1 { units } else { units.div_ceil(self.tokens) })
    }

    /// Whether a charge fits where `missing` units are missing.
    #[inline]
    fn fit(&self, missing: u64, cost: Cost) -> Fit {
        match self.price(cost) {
            Some(price) if missing.saturating_add(price) <= self.full => {
                Fit { allowed: true, missing, after: missing + price }
            }
            _ => Fit { allowed: false, missing, after: missing },
        }
    }

    /// The whole answer to a charge, once it is known whether it fits.
    #[inline]
    fn outcome(&self, fit: Fit, cost: Cost) -> Outcome {
        let retry_after = if fit.allowed {
            Some(Micros::ZERO)
        } else if cost.get() <= self.burst {
            // Only a clock stepped back by ages makes the sum saturate.
            Some(self.wait(fit.missing.saturating_add(cost.get() * self.period_us) - self.full))
        } else {
            None
        };
        Outcome {
            allowed: fit.allowed,
            capacity: self.burst,
            remaining: self.whole_tokens(self.full.saturating_sub(fit.after)),
            retry_after,
            reset_after: self.wait(fit.after),
            delay: Micros::ZERO,
        }
    }

    /// How long until more may be charged than now, once `outcome` was this bucket's answer to a charge of `cost`: until the
    /// charge fits (again) or, where it still does, until one token more is there. Zero when full, `None` for never.
    ///
    /// An outcome tells what is missing as the time to full, rounded up to a µs, so the answer is enough and at most 1 µs late.
    pub(crate) fn more_after(&self, outcome: &Outcome, cost: u64) -> Option<Micros> {
        if !outcome.allowed {
            return outcome.retry_after;
        }
        if outcome.capacity != self.burst {
            // Somebody else counted, such as one instance's share of this bucket; when all is back, more is.
            return Some(outcome.reset_after);
        }
        let wanted = if outcome.remaining < cost { cost } else { outcome.remaining.saturating_add(1) };
        if wanted > self.burst {
            return (wanted > cost).then_some(Micros::ZERO);
        }
        // Once the bucket holds what is wanted, this is still missing; it takes the last so many µs, rounded down.
        let still_missing = self.full - wanted * self.period_us;
        Some(outcome.reset_after.saturating_sub(Micros::new(still_missing / self.tokens)))
    }

    /// The time until all that is missing has come back: for a leaky bucket, until all that is ahead has drained.
    pub(super) fn time_to_full(&self, state: &BucketState, now: Micros) -> Micros {
        self.wait(self.missing(state, now))
    }

    /// The same as things stood before a charge.
    #[inline]
    pub(super) fn time_to_full_before(&self, fit: Fit) -> Micros {
        self.wait(fit.missing)
    }
}

impl Bucket for TokenBucket {
    fn units_per_us(&self) -> u64 {
        self.tokens
    }

    #[inline]
    fn charge_short(&self, full_at: &mut u64, cost: Cost, elapsed: Micros) -> Fit {
        let now = elapsed.get().saturating_mul(self.tokens);
        let fit = self.fit(full_at.saturating_sub(now), cost);
        if fit.allowed {
            *full_at = now.saturating_add(fit.after);
        }
        fit
    }

    #[inline]
    fn outcome_of(&self, fit: Fit, cost: Cost) -> Outcome {
        self.outcome(fit, cost)
    }
}

/// Whether a charge fits a bucket, and the units missing before and after it: all that is needed to write the state. The rest
/// of the answer can be worked out later, when others no longer wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Whether it fits.
    pub allowed: bool,
    missing: u64,
    after: u64,
}

/// What a bucket adds to an algorithm: a state of 64 bits, for those who count time from a recent instant, and a charge in two
/// steps, for those who want the state written first.
pub trait Bucket: Algorithm<State = BucketState> {
    /// c of the module's header: how many units of the state one µs is worth.
    fn units_per_us(&self) -> u64;

    /// [`charge`](Algorithm::charge) on a state that counts from an origin: `full_at` and `elapsed` are both since then. Answers
    /// alike as long as `elapsed` times [`units_per_us`](Self::units_per_us) stays below 2^63.
    fn charge_short(&self, full_at: &mut u64, cost: Cost, elapsed: Micros) -> Fit;

    /// The answer to a charge that [`charge_short`](Self::charge_short) has decided.
    fn outcome_of(&self, fit: Fit, cost: Cost) -> Outcome;
}

impl Algorithm for TokenBucket {
    type State = BucketState;

    fn peek(&self, state: &BucketState, cost: Cost, now: Micros) -> Outcome {
        self.outcome(self.fit(self.missing(state, now), cost), cost)
    }

    #[inline]
    fn charge(&self, state: &mut BucketState, cost: Cost, now: Micros) -> Outcome {
        let fit = self.fit(self.missing(state, now), cost);
        if fit.allowed {
            state.full_at = self.instant(now) + u128::from(fit.after);
        }
        self.outcome(fit, cost)
    }

    fn charged_at(&self, _state: &BucketState, now: Micros) -> Micros {
        now
    }

    /// Tokens go back into the bucket up to full.
    fn give_back(&self, state: &mut BucketState, amount: u64, _charged_at: Micros, now: Micros) {
        let returned = u128::from(amount) * u128::from(self.period_us);
        state.full_at = state.full_at.saturating_sub(returned).max(self.instant(now)).min(state.full_at);
    }

    fn debit(&self, state: &mut BucketState, amount: u64, now: Micros) {
        // A debt is bounded so that the state stays within its range whatever callers settle.
        let price = u128::from(amount.min(MAX_COUNT)) * u128::from(self.period_us);
        let missing = u128::from(self.missing(state, now)) + price;
        let most = u128::from(self.most_missing().get()) * u128::from(self.tokens);
        state.full_at = state.full_at.max(self.instant(now) + missing.min(most));
    }

    fn is_fresh(&self, state: &BucketState, now: Micros) -> bool {
        state.full_at <= self.instant(now)
    }
}

impl From<TokenBucket> for crate::limit::Limit {
    fn from(bucket: TokenBucket) -> Self {
        crate::limit::Limit::TokenBucket(bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_the_instant_of_being_full_in_finer_units() {
        let bucket = TokenBucket::new("7/s".parse().unwrap(), 14).unwrap();
        let mut state = BucketState::default();
        let now = Micros::from_secs(100);
        assert!(bucket.charge(&mut state, Cost::new(14).unwrap(), now).allowed);
        let full_at = now.saturating_add(bucket.time_to_fill());
        assert_eq!(full_at, Micros::from_secs(102));
        assert_eq!(state.full_at, u128::from(full_at.get()) * u128::from(bucket.units_per_us()));
    }

    #[test]
    fn a_debt_saturates() {
        let bucket = TokenBucket::new("1/s".parse().unwrap(), 1).unwrap();
        let mut state = BucketState::default();
        for _ in 0..3 {
            bucket.debit(&mut state, u64::MAX, Micros::ZERO);
            // All but 190 years of the debt are let go.
            assert_eq!(state.full_at, u128::from(MAX_DEBT.get()));
        }
    }

    #[test]
    fn whole_tokens_are_the_quotient_rounded_down() {
        for rate in ["1/us", "1000000/s", "7/s", "10/s", "100/m", "999983/d", "7/w", "1/3660d"] {
            for burst in [1, 2, 7, 20_000].into_iter().filter(|burst| *burst < 8 || rate != "1/3660d") {
                let bucket = TokenBucket::new(rate.parse().unwrap(), burst).unwrap();
                let (full, period) = (bucket.full, bucket.period_us);
                let edges = (1..=burst.min(100)).flat_map(|tokens| [tokens * period, tokens * period - 1]);
                for units in edges.chain([0, full, full - 1, full / 2, full / 3]) {
                    assert_eq!(bucket.whole_tokens(units), units / period, "{units} of {bucket:?}");
                }
            }
        }
        let bucket = TokenBucket::new("1/us".parse().unwrap(), MAX_FILL.get()).unwrap();
        assert_eq!(bucket.whole_tokens(MAX_FILL.get()), MAX_FILL.get());
        let per_unit = u64::MAX / MAX_PRODUCT;
        let widest = TokenBucket { period_us: MAX_PRODUCT, full: MAX_PRODUCT, per_unit, ..bucket };
        assert_eq!(
            [0, 1, MAX_PRODUCT - 1, MAX_PRODUCT].map(|units| widest.whole_tokens(units)),
            [0, 0, 0, 1]
        );
    }

    /// The short form, counted from a recent instant, answers as the long one does.
    #[test]
    fn the_short_state_answers_like_the_long_one() {
        for rate in ["10/s", "7/s", "8191/s", "3/250ms", "1/h"] {
            let rate: Rate = rate.parse().unwrap();
            short_answers_like_long(&TokenBucket::new(rate, 9).unwrap());
            short_answers_like_long(&crate::LeakyBucket::new(rate, 9).unwrap());
        }
    }

    fn short_answers_like_long(bucket: &(impl Bucket + std::fmt::Debug)) {
        assert!(bucket.units_per_us() > 0);
        let start = Micros::from_secs(1_700_000_000);
        let (mut long, mut short) = (BucketState::default(), 0);
        for step in 0..500u64 {
            let elapsed = Micros::new(step * step * 37 % 900_001 + step * 1_000);
            let cost = Cost::new(step % 11 + 1).unwrap();
            let expected = bucket.charge(&mut long, cost, start.saturating_add(elapsed));
            let fit = bucket.charge_short(&mut short, cost, elapsed);
            assert_eq!(bucket.outcome_of(fit, cost), expected, "{bucket:?}, step {step}");
        }
    }
}
