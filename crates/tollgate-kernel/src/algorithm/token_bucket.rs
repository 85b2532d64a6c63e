//! Token bucket: saves up to `burst` tokens, refilled at `rate`; a charge takes its cost in tokens or is denied.
//!
//! State kept: one whole number F, the instant at which the bucket is full again, in units of 1/c µs for a rate of c tokens
//! every p µs (in lowest terms). In these units a token weighs p and time passes at c per µs, so refill and cost are both
//! whole and nothing drifts. A charge of n moves F to `max(F, now*c) + n*p` and fits iff that is at most `now*c + burst*p`.
//! Beside F stand the numbers that it was written under: c, p and the burst.
//!
//! Change: the first charge under other numbers, allowed or not, rewrites the state: the missing tokens stay missing, at most
//! the new burst of them plus any debt, and refill at the new rate. What a smaller burst lets go is kept in a second instant,
//! which every charge moves too: versions of a limit with different bursts that are live at the same time each count all that
//! was charged. A bucket that keeps its instant ([`keeping_instant`](TokenBucket::keeping_instant)) keeps F instead, as redis-cell does.
//!
//! Settlement: a give-back returns at most what has not refilled since the charge, `reserved*p - elapsed*c`, so it cannot be
//! spent twice. What was charged before a change may have refilled faster in between: for as long as a full bucket takes to fill
//! the state keeps when it last changed and the fastest rate before that, and an older charge is reckoned by the fastest of
//! all. A debt takes at most `max_debt` of refill to pay, one day by default. Where a smaller burst has written the state, what it does
//! not count goes to the second instant, up to sixteen times what the larger may miss, so that the larger counts it.
//!
//! Bounds: `burst*p` ≤ 2^62, c ≤ 2^32, an empty bucket is full within 142 years and a debt paid within ten years and within 2^62
//! units, so F fits 128 bits for any clock and the distance from now to F fits 64. The twins keep F as whole µs and a rest below c,
//! both below 2^53 until the year 2065. Rounding: tokens left round down, waits round up, what is missing after a change rounds up
//! (by less than 1 µs of refill). Known weakness: a full bucket may be emptied at once, so an interval t admits up to
//! burst + rate*t. Twins: token_bucket.lua, .sql. Cases: token_bucket.cases.

use super::{Algorithm, Taken};
use crate::bounds::{
    MAX_COUNT, MAX_FILL, MAX_PRODUCT, MAX_RATE_NUMERATOR, checked_count, checked_product, checked_span,
};
use crate::error::LimitError;
use crate::outcome::{Cost, Outcome};
use crate::rate::Rate;
use crate::time::Micros;

/// How long a debt may take to refill by default: one day.
pub(crate) const DEFAULT_MAX_DEBT: Micros = Micros::from_secs(86_400);

/// A debt that a smaller burst does not count is kept for larger ones, up to so many times what they are known to miss.
const WIDER_TIMES: u64 = 16;

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
    /// The longest refill that a debt may take.
    max_debt: Micros,
    /// Whether a change of numbers keeps the instant of being full instead of the missing tokens.
    keeps_instant: bool,
}

/// The numbers that a bucket's state is written under.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BucketNumbers {
    /// c of the module's header.
    pub tokens: u64,
    /// p of the module's header.
    pub period_us: u64,
    /// How many tokens a full bucket holds.
    pub burst: u64,
}

impl BucketNumbers {
    /// The units of a full bucket.
    fn full(self) -> u128 {
        u128::from(self.burst) * u128::from(self.period_us)
    }

    /// An instant in units of 1/c µs.
    fn instant(self, now: Micros) -> u128 {
        u128::from(now.get()) * u128::from(self.tokens)
    }

    fn units(self, tokens: u64) -> u128 {
        u128::from(tokens) * u128::from(self.period_us)
    }
}

/// When the bucket is full again, in units of 1/c µs. Zero, long past, is a full bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketState {
    /// F of the module's header.
    pub full_at: u128,
    /// When a bucket with a larger burst would be full, which also counts what a smaller burst let go. Zero where that is the
    /// same instant.
    pub wider_full_at: u128,
    /// The numbers that both instants are written under; `None` for those of the reader of the state.
    pub under: Option<BucketNumbers>,
    /// The last change of numbers, as long as a charge from before it may still be given back.
    pub changed: Option<Changed>,
}

/// A change of a bucket's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed {
    /// When a charge under other numbers rewrote the state.
    pub at: Micros,
    /// c of the fastest rate that the state had before, since changes were last forgotten.
    pub tokens: u64,
    /// p of the same rate.
    pub period_us: u64,
}

impl Changed {
    /// Whether all that was charged before the change has refilled by the numbers that the state is written under.
    fn is_over(&self, under: BucketNumbers, now: Micros) -> bool {
        u128::from(now.saturating_sub(self.at).get()) * u128::from(under.tokens) >= under.full()
    }
}

impl BucketState {
    /// The same instant where one µs is worth `to` units instead of `from`, rounded up: a bucket whose rate was changed is full
    /// no earlier than it was.
    ///
    /// ```
    /// use tollgate_kernel::BucketState;
    ///
    /// let state = BucketState { full_at: 10, ..BucketState::default() };
    /// assert_eq!(state.in_units(7, 1).full_at, 2);
    /// assert_eq!(state.in_units(1, 7).full_at, 70);
    /// ```
    #[must_use]
    pub fn in_units(self, from: u64, to: u64) -> BucketState {
        let (from, to) = (u128::from(from.max(1)), u128::from(to));
        let (us, rest) = (self.full_at / from, self.full_at % from);
        let full_at = us.saturating_mul(to).saturating_add((rest * to).div_ceil(from));
        BucketState { full_at, ..BucketState::default() }
    }

    /// Whether a single instant under these numbers says all that this state says from `now` on.
    pub fn is_plain_under(&self, numbers: BucketNumbers, now: Micros) -> bool {
        self.wider_full_at <= numbers.instant(now)
            && self.under.is_none_or(|under| under == numbers)
            && self.changed.is_none_or(|changed| changed.is_over(numbers, now))
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
        let per_unit = u64::MAX / period_us;
        let (max_debt, keeps_instant) = (DEFAULT_MAX_DEBT, false);
        Ok(TokenBucket { rate, burst, tokens, period_us, full, per_unit, max_debt, keeps_instant })
    }

    /// The same bucket whose debts take at most `max_debt` of refill to pay; one day by default.
    pub fn with_max_debt(self, max_debt: Micros) -> Result<Self, LimitError> {
        Ok(TokenBucket { max_debt: checked_span("max_debt", max_debt)?, ..self })
    }

    /// The same bucket for numbers that come with every call: charged under other numbers, a key keeps the instant at which it
    /// is full, as redis-cell does, and not the missing tokens.
    #[must_use]
    pub const fn keeping_instant(self) -> Self {
        TokenBucket { keeps_instant: true, ..self }
    }

    /// Whether a change of numbers keeps the instant.
    pub const fn keeps_instant(&self) -> bool {
        self.keeps_instant
    }

    /// The longest refill that a debt may take, as it was set.
    pub const fn max_debt(&self) -> Micros {
        self.max_debt
    }

    /// The numbers that this bucket writes its states under.
    pub const fn numbers(&self) -> BucketNumbers {
        BucketNumbers { tokens: self.tokens, period_us: self.period_us, burst: self.burst }
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

    /// The state as this bucket writes it at `now`: see "Change" in the module's header.
    fn adopted(&self, state: &BucketState, now: Micros) -> BucketState {
        let own = self.numbers();
        let Some(under) = state.under.filter(|under| *under != own) else {
            let changed = state.changed.filter(|changed| !changed.is_over(own, now));
            return BucketState { under: Some(own), changed, ..*state };
        };
        if self.keeps_instant {
            return BucketState { under: Some(own), ..state.in_units(under.tokens, own.tokens) };
        }
        let before = state.changed.filter(|changed| !changed.is_over(under, now));
        let is_faster = |other: &Changed| {
            u128::from(other.tokens) * u128::from(under.period_us)
                > u128::from(under.tokens) * u128::from(other.period_us)
        };
        let (tokens, period_us) = before
            .filter(is_faster)
            .map_or((under.tokens, under.period_us), |before| (before.tokens, before.period_us));
        let then = under.instant(now);
        let missing = state.full_at.saturating_sub(then);
        let total = missing.max(state.wider_full_at.saturating_sub(then));
        let debt = missing.saturating_sub(under.full());
        let carried = |units| carried(units, under, own, Rounding::Up);
        let counted = carried(if own.burst > under.burst { total } else { missing });
        let kept = counted.min(own.full() + carried(debt));
        let (at, now, total) = (now, own.instant(now), carried(total));
        let wider_full_at = if total > kept { now + total } else { 0 };
        let changed = Some(Changed { at, tokens, period_us });
        BucketState { full_at: now + kept, wider_full_at, under: Some(own), changed }
    }

    /// How far the bucket is from full: what was taken and has not come back, in units; above `full` when in debt.
    #[inline]
    fn missing(&self, state: &BucketState, now: Micros) -> u64 {
        let missing = self.adopted(state, now).full_at.saturating_sub(self.instant(now));
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
                Fit { missing, after: missing + price }
            }
            _ => Fit { missing, after: missing },
        }
    }

    /// The whole answer to a charge, once it is known whether it fits.
    #[inline(always)]
    fn outcome(&self, fit: Fit, cost: Cost) -> Outcome {
        let retry_after = if fit.is_allowed() {
            Some(Micros::ZERO)
        } else if cost.get() <= self.burst {
            // Only a clock stepped back by ages makes the sum saturate.
            Some(self.wait(fit.missing.saturating_add(cost.get() * self.period_us) - self.full))
        } else {
            None
        };
        Outcome {
            allowed: fit.is_allowed(),
            capacity: self.burst,
            remaining: self.whole_tokens(self.full.saturating_sub(fit.after)),
            retry_after,
            reset_after: self.wait(fit.after),
            delay: Micros::ZERO,
        }
    }

    /// Whether a denied charge will fit within `time`: whether the wait in its answer is at most that. Without a division, which
    /// the wait itself needs.
    #[inline(always)]
    pub fn fits_within(&self, fit: Fit, cost: Cost, time: Micros) -> bool {
        cost.get() <= self.burst
            && fit.missing.saturating_add(cost.get() * self.period_us) - self.full
                <= time.get().saturating_mul(self.tokens)
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

    #[inline(always)]
    fn charge_short(&self, full_at: &mut u64, cost: Cost, elapsed: Micros) -> Fit {
        let now = elapsed.get().saturating_mul(self.tokens);
        let fit = self.fit(full_at.saturating_sub(now), cost);
        if fit.is_allowed() {
            *full_at = now.saturating_add(fit.after);
        }
        fit
    }

    #[inline(always)]
    fn outcome_of(&self, fit: Fit, cost: Cost) -> Outcome {
        self.outcome(fit, cost)
    }
}

/// Whether a charge fits a bucket, and the units missing before and after it: all that is needed to write the state. The rest
/// of the answer can be worked out later, when others no longer wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fit {
    missing: u64,
    /// More than `missing` if it fits, because a charge takes at least one unit; else the same.
    after: u64,
}

impl Fit {
    /// Whether it fits.
    #[inline(always)]
    pub const fn is_allowed(&self) -> bool {
        self.after != self.missing
    }
}

/// What a bucket adds to an algorithm: a state of 64 bits, for callers that count time from a recent instant, and a charge in two
/// steps, for callers that write the state first.
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
        let mut adopted = self.adopted(state, now);
        let then = self.instant(now);
        let missing = u64::try_from(adopted.full_at.saturating_sub(then)).unwrap_or(u64::MAX);
        let fit = self.fit(missing, cost);
        if fit.is_allowed() {
            let price = u128::from(fit.after - fit.missing);
            adopted.full_at = then + u128::from(fit.after);
            if adopted.wider_full_at > 0 {
                adopted.set_wider(adopted.wider_full_at.max(then) + price, then);
            }
            *state = adopted;
        } else {
            self.adopt(state, now);
        }
        self.outcome(fit, cost)
    }

    fn adopt(&self, state: &mut BucketState, now: Micros) {
        if state.under.is_some() {
            *state = self.adopted(state, now);
        }
    }

    fn charged_at(&self, _state: &BucketState, now: Micros) -> Micros {
        now
    }

    /// Tokens go back into the bucket, up to full, in the units that the state is written in. At most what has not refilled
    /// since the charge, by the numbers of the charge and by those of the state.
    fn give_back(&self, state: &mut BucketState, taken: Taken, amount: u64, now: Micros) {
        let own = self.numbers();
        if self.keeps_instant {
            *state = self.adopted(state, now);
        }
        let under = state.under.unwrap_or(own);
        let elapsed = now.saturating_sub(taken.at);
        let before = state.changed.filter(|changed| taken.at < changed.at);
        let returned = |cost: u64| {
            let not_refilled = |by: BucketNumbers| {
                let left = by.units(cost).saturating_sub(by.instant(elapsed));
                carried(left, by, under, Rounding::Down)
            };
            let by_fastest = before.map_or(u128::MAX, |Changed { tokens, period_us, .. }| {
                not_refilled(BucketNumbers { tokens, period_us, ..under })
            });
            under.units(amount).min(not_refilled(under)).min(not_refilled(own)).min(by_fastest)
        };
        let then = under.instant(now);
        // The second instant counts all of the charge. The first has at most a burst of it, and none of it as long as other charges
        // alone are enough to empty the bucket: what is given back may be what it has let go.
        let wider = state.wider_full_at.saturating_sub(returned(taken.cost)).max(then);
        let moved = state.full_at.saturating_sub(returned(taken.cost.min(under.burst))).max(then);
        let moved =
            if state.wider_full_at > then { moved.max(wider.min(then + under.full())) } else { moved };
        state.full_at = moved.min(state.full_at);
        state.set_wider(wider, then);
    }

    /// In the units that the state is written in, which stay as they are.
    fn debit(&self, state: &mut BucketState, amount: u64, now: Micros) {
        if amount == 0 {
            return;
        }
        let under = if self.keeps_instant { self.numbers() } else { state.under.unwrap_or(self.numbers()) };
        if self.keeps_instant || state.under.is_none() {
            *state = self.adopted(state, now);
        }
        let (then, price) = (under.instant(now), under.units(amount.min(MAX_COUNT)));
        // A debt is bounded, so that nobody is locked out for longer than the limit says, whatever callers settle.
        let debt = debt_units(self.max_debt, under.tokens);
        let total = state.full_at.max(state.wider_full_at);
        let is_wider = state.wider_full_at > then || self.burst > under.burst;
        state.full_at = owed(state.full_at, then, price, under.full() + debt);
        if is_wider && !self.keeps_instant {
            // A larger burst has a larger bound. What it would miss is kept, but not without end.
            let debt = u64::try_from(debt / u128::from(under.period_us)).unwrap_or(MAX_COUNT);
            let tokens = self.burst.max(under.burst).saturating_add(debt).saturating_mul(WIDER_TIMES);
            state.set_wider(owed(total, then, price, under.units(tokens.min(MAX_COUNT))), then);
        }
    }

    fn refund(&self, state: &mut BucketState, amount: u64, now: Micros) {
        self.give_back(state, Taken { cost: amount, at: now }, amount, now);
    }

    fn is_fresh(&self, state: &BucketState, now: Micros) -> bool {
        let under = state.under.unwrap_or(self.numbers());
        state.full_at.max(state.wider_full_at) <= under.instant(now)
            && state.changed.is_none_or(|changed| changed.is_over(under, now))
    }
}

impl BucketState {
    /// Moves the second instant, and drops it where it says no more than the first or the present.
    fn set_wider(&mut self, wider: u128, now: u128) {
        self.wider_full_at = if wider > self.full_at.max(now) { wider } else { 0 };
    }
}

/// An instant of being full, with so much more missing: at most `most`, or what is missing already.
fn owed(full_at: u128, now: u128, price: u128, most: u128) -> u128 {
    full_at.max(now + (full_at.saturating_sub(now) + price).min(most))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounding {
    Up,
    Down,
}

/// So many tokens in other units: units * p' / p.
fn carried(units: u128, from: BucketNumbers, to: BucketNumbers, rounding: Rounding) -> u128 {
    if from.period_us == to.period_us {
        return units;
    }
    let (product, from) = (units * u128::from(to.period_us), u128::from(from.period_us));
    match rounding {
        Rounding::Up => product.div_ceil(from),
        Rounding::Down => product / from,
    }
}

/// The debt that takes so long to refill, in units, and at most 2^62 units.
fn debt_units(max_debt: Micros, tokens: u64) -> u128 {
    let us = max_debt.get().min(MAX_PRODUCT / tokens);
    u128::from(us) * u128::from(tokens)
}

#[cfg(test)]
mod tests;
