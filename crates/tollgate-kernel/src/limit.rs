//! A limit that cannot be built wrong.
//!
//! Every constructor here and in `algorithm/` refuses what the arithmetic could not keep exact on every store (`bounds.rs`), with a
//! message that names the field, the value and the fix. Past this file a zero limit, an empty window or an overflowing product is
//! unrepresentable, so no kernel ever checks for one. `limit/state.rs` calls the strategy of a limit, and `limit/turn.rs` the
//! queue arithmetic of its strategy.

mod state;
mod turn;

use std::fmt;
use std::time::Duration;

use crate::algorithm::{
    Align, Concurrency, FixedWindow, LeakyBucket, SlidingWindow, SlidingWindowCounter, TokenBucket,
};
use crate::error::LimitError;
use crate::outcome::Outcome;
use crate::rate::Rate;
use crate::time::Micros;

pub use state::State;

/// The name of a strategy, as configuration writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Saves up to `burst` units and refills at `rate`.
    TokenBucket,
    /// Holds up to `capacity` units, drains at `rate` and returns the delay of each charge.
    LeakyBucket,
    /// At most `limit` in each window.
    FixedWindow,
    /// At most `limit` in any window, from an exact log.
    SlidingWindow,
    /// At most `limit` by an estimate from two counters.
    SlidingWindowCounter,
    /// At most `limit` holders at once.
    Concurrency,
}

impl Strategy {
    /// All six, in the order of the documentation.
    pub const ALL: [Strategy; 6] = [
        Strategy::TokenBucket,
        Strategy::LeakyBucket,
        Strategy::FixedWindow,
        Strategy::SlidingWindow,
        Strategy::SlidingWindowCounter,
        Strategy::Concurrency,
    ];

    /// The name used in configuration, metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::TokenBucket => "token_bucket",
            Strategy::LeakyBucket => "leaky_bucket",
            Strategy::FixedWindow => "fixed_window",
            Strategy::SlidingWindow => "sliding_window",
            Strategy::SlidingWindowCounter => "sliding_window_counter",
            Strategy::Concurrency => "concurrency",
        }
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How much is allowed: one of the six strategies with its parameters, proven sound.
///
/// ```
/// use std::time::Duration;
/// use tollgate_kernel::{Limit, Rate};
///
/// let api = Limit::token_bucket(Rate::per_second(10)?, 20)?;
/// let login = Limit::fixed_window(5, Duration::from_secs(60))?;
/// assert_eq!(api.to_string(), "10/s, bursts of 20");
/// assert_eq!(login.to_string(), "5 per 1m window");
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    /// See [`TokenBucket`].
    TokenBucket(TokenBucket),
    /// See [`LeakyBucket`].
    LeakyBucket(LeakyBucket),
    /// See [`FixedWindow`].
    FixedWindow(FixedWindow),
    /// See [`SlidingWindow`].
    SlidingWindow(SlidingWindow),
    /// See [`SlidingWindowCounter`].
    SlidingWindowCounter(SlidingWindowCounter),
    /// See [`Concurrency`].
    Concurrency(Concurrency),
}

impl Limit {
    /// Up to `burst` at once, refilled at `rate`: a [`Rate`], or its text.
    ///
    /// ```
    /// use tollgate_kernel::{Limit, Rate};
    /// assert_eq!(Limit::token_bucket("10/s", 20)?, Limit::token_bucket(Rate::per_second(10)?, 20)?);
    /// assert!(Limit::token_bucket("10 a second", 20).is_err());
    /// # Ok::<(), tollgate_kernel::LimitError>(())
    /// ```
    pub fn token_bucket(
        rate: impl TryInto<Rate, Error: Into<LimitError>>,
        burst: u64,
    ) -> Result<Limit, LimitError> {
        TokenBucket::new(rate.try_into().map_err(Into::into)?, burst).map(Limit::TokenBucket)
    }

    /// Up to `capacity` waiting, let out at `rate`: a [`Rate`], or its text.
    pub fn leaky_bucket(
        rate: impl TryInto<Rate, Error: Into<LimitError>>,
        capacity: u64,
    ) -> Result<Limit, LimitError> {
        LeakyBucket::new(rate.try_into().map_err(Into::into)?, capacity).map(Limit::LeakyBucket)
    }

    /// Up to `limit` in a window that opens at the first charge.
    pub fn fixed_window(limit: u64, window: impl Into<Micros>) -> Result<Limit, LimitError> {
        FixedWindow::new(limit, window.into(), Align::First).map(Limit::FixedWindow)
    }

    /// Up to `limit` in each window of the clock: windows start at multiples of `window` since 1970.
    pub fn clock_window(limit: u64, window: impl Into<Micros>) -> Result<Limit, LimitError> {
        FixedWindow::new(limit, window.into(), Align::Clock).map(Limit::FixedWindow)
    }

    /// Up to `limit` in any span of `window`, exactly.
    pub fn sliding_window(limit: u64, window: impl Into<Micros>) -> Result<Limit, LimitError> {
        SlidingWindow::new(limit, window.into()).map(Limit::SlidingWindow)
    }

    /// Up to `limit` in a span of `window`, by an estimate from two counters.
    pub fn sliding_window_counter(limit: u64, window: impl Into<Micros>) -> Result<Limit, LimitError> {
        SlidingWindowCounter::new(limit, window.into()).map(Limit::SlidingWindowCounter)
    }

    /// Up to `limit` holders at once, each for at most `lease` unless renewed.
    pub fn concurrency(limit: u64, lease: impl Into<Micros>) -> Result<Limit, LimitError> {
        Concurrency::new(limit, lease.into()).map(Limit::Concurrency)
    }

    /// The same limit whose debts take at most `max_debt` of refill to pay; one day by default. Only buckets have such debts: those
    /// of a window end with it.
    pub fn with_max_debt(self, max_debt: impl Into<Micros>) -> Result<Limit, LimitError> {
        let max_debt = max_debt.into();
        match self {
            Limit::TokenBucket(bucket) => bucket.with_max_debt(max_debt).map(Limit::TokenBucket),
            Limit::LeakyBucket(bucket) => bucket.with_max_debt(max_debt).map(Limit::LeakyBucket),
            other => Err(LimitError::new(
                "max_debt",
                max_debt,
                format!(
                    "belongs to token_bucket and leaky_bucket; a debt under {} ends with its window",
                    other.strategy()
                ),
            )),
        }
    }

    /// The same limit for numbers that come with every call: see [`TokenBucket::keeping_instant`]. Other strategies keep what
    /// they count in any case.
    #[must_use]
    pub const fn keeping_instant(self) -> Limit {
        match self {
            Limit::TokenBucket(bucket) => Limit::TokenBucket(bucket.keeping_instant()),
            Limit::LeakyBucket(bucket) => Limit::LeakyBucket(bucket.keeping_instant()),
            other => other,
        }
    }

    /// Which strategy this is.
    pub const fn strategy(&self) -> Strategy {
        match self {
            Limit::TokenBucket(_) => Strategy::TokenBucket,
            Limit::LeakyBucket(_) => Strategy::LeakyBucket,
            Limit::FixedWindow(_) => Strategy::FixedWindow,
            Limit::SlidingWindow(_) => Strategy::SlidingWindow,
            Limit::SlidingWindowCounter(_) => Strategy::SlidingWindowCounter,
            Limit::Concurrency(_) => Strategy::Concurrency,
        }
    }

    /// The units of the limit when nothing is used.
    pub const fn capacity(&self) -> u64 {
        match self {
            Limit::TokenBucket(bucket) => bucket.burst(),
            Limit::LeakyBucket(bucket) => bucket.capacity(),
            Limit::FixedWindow(window) => window.limit(),
            Limit::SlidingWindow(window) => window.limit(),
            Limit::SlidingWindowCounter(window) => window.limit(),
            Limit::Concurrency(leases) => leases.limit(),
        }
    }

    /// The span over which the capacity is renewed: the window, the lease, or the time a bucket takes to fill, rounded up.
    pub fn window(&self) -> Duration {
        self.window_us().into()
    }

    /// [`window`](Self::window) in the unit of decisions.
    pub fn window_us(&self) -> Micros {
        match self {
            Limit::TokenBucket(bucket) => bucket.time_to_fill(),
            Limit::LeakyBucket(bucket) => bucket.time_to_drain(),
            Limit::FixedWindow(window) => window.window(),
            Limit::SlidingWindow(window) => window.window(),
            Limit::SlidingWindowCounter(window) => window.window(),
            Limit::Concurrency(leases) => leases.lease(),
        }
    }

    /// How long until more may be charged than now, after `outcome` was the answer to a charge of `cost`, if there are no other
    /// charges.
    ///
    /// For buckets that is the next token that makes a difference: until the charge fits (again) or, if it still does, until
    /// there is one more unit. Windows and leases give back much at once: a denied charge waits until it fits; after an admission
    /// it is the reset. `None` is never.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate_kernel::{Cost, Limit, Micros};
    ///
    /// let limit = Limit::token_bucket("10/s", 20)?;
    /// let outcome = limit.charge(&mut limit.fresh(), Cost::new(15).unwrap(), Micros::from_secs(1));
    /// assert_eq!((outcome.remaining, outcome.reset_after), (5, Micros::from_millis(1500)));
    /// assert_eq!(limit.more_after(&outcome, 1), Some(Duration::from_millis(100))); // a sixth unit
    /// assert_eq!(limit.more_after(&outcome, 15), Some(Duration::from_secs(1))); // the same charge again
    /// assert_eq!(limit.more_after(&outcome, 21), None);
    /// # Ok::<(), tollgate_kernel::LimitError>(())
    /// ```
    pub fn more_after(&self, outcome: &Outcome, cost: u64) -> Option<Duration> {
        self.more_after_us(outcome, cost).map(Duration::from)
    }

    /// [`more_after`](Self::more_after) in the unit of decisions.
    pub fn more_after_us(&self, outcome: &Outcome, cost: u64) -> Option<Micros> {
        match self {
            Limit::TokenBucket(bucket) => bucket.more_after(outcome, cost),
            Limit::LeakyBucket(bucket) => bucket.room().more_after(outcome, cost),
            _ if outcome.allowed => Some(outcome.reset_after),
            _ => outcome.retry_after.or(Some(outcome.reset_after)),
        }
    }
}

macro_rules! from_strategies {
    ($($strategy:ident),*) => { $(
        impl From<$strategy> for Limit {
            fn from(strategy: $strategy) -> Limit {
                Limit::$strategy(strategy)
            }
        }
    )* };
}

from_strategies!(TokenBucket, LeakyBucket, FixedWindow, SlidingWindow, SlidingWindowCounter, Concurrency);

/// The limit in words, for people.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::TokenBucket(bucket) => write!(f, "{}, bursts of {}", bucket.rate(), bucket.burst()),
            Limit::LeakyBucket(bucket) => {
                write!(f, "{} evenly, up to {} waiting", bucket.rate(), bucket.capacity())
            }
            Limit::FixedWindow(window) => match window.align() {
                Align::First => write!(f, "{} per {} window", window.limit(), window.window()),
                Align::Clock => write!(f, "{} per {} window of the clock", window.limit(), window.window()),
            },
            Limit::SlidingWindow(window) => write!(f, "{} in any {}", window.limit(), window.window()),
            Limit::SlidingWindowCounter(window) => {
                write!(f, "about {} in any {}", window.limit(), window.window())
            }
            Limit::Concurrency(leases) => {
                write!(f, "{} at once, leases of {}", leases.limit(), leases.lease())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::MAX_COUNT;

    const MINUTE: Micros = Micros::from_secs(60);

    fn rate(text: &str) -> Rate {
        text.parse().unwrap()
    }

    #[test]
    fn everyday_limits_are_accepted_under_every_strategy() {
        let day = Micros::from_secs(86_400);
        for (count, window) in
            [(1_000_000, day), (10_000_000, MINUTE), (7, Micros::from_secs(604_800)), (999_983, day)]
        {
            let rate = Rate::new(count, window).unwrap();
            for limit in [
                Limit::token_bucket(rate, count),
                Limit::leaky_bucket(rate, count),
                Limit::fixed_window(count, window),
                Limit::clock_window(count, window),
                Limit::sliding_window(count, window),
                Limit::sliding_window_counter(count, window),
                Limit::concurrency(count, window),
            ] {
                let limit = limit.unwrap();
                assert_eq!(limit.capacity(), count, "{limit}");
                assert_eq!((limit.window_us(), limit.window()), (window, window.into()), "{limit}");
            }
        }
    }

    #[test]
    fn only_buckets_have_a_longest_debt_and_keep_an_instant() {
        for bucket in [Limit::token_bucket("10/s", 20), Limit::leaky_bucket("10/s", 20)] {
            let bucket = bucket.unwrap();
            assert_eq!(bucket.with_max_debt(MINUTE).unwrap().parameters()[3], MINUTE.get());
            assert_eq!((bucket.parameters()[4], bucket.keeping_instant().parameters()[4]), (0, 1));
            assert_eq!(bucket.with_max_debt(Micros::ZERO).unwrap_err().field(), "max_debt");
        }
        for window in [
            Limit::fixed_window(5, MINUTE),
            Limit::sliding_window(5, MINUTE),
            Limit::sliding_window_counter(5, MINUTE),
            Limit::concurrency(5, MINUTE),
        ] {
            let window = window.unwrap();
            let error = window.with_max_debt(MINUTE).unwrap_err();
            assert_eq!((error.field(), error.value()), ("max_debt", "1m"));
            assert!(error.fix().contains(window.strategy().name()), "{error}");
            assert_eq!(window.keeping_instant(), window);
        }
    }

    #[test]
    fn what_cannot_be_kept_exact_is_refused_by_field() {
        let too_many = MAX_COUNT + 1;
        for (limit, field, hint) in [
            (Limit::token_bucket(rate("10/s"), 0), "burst", "at least 1"),
            (Limit::token_bucket(rate("10/s"), too_many), "burst", "at most"),
            (Limit::token_bucket(rate("1/d"), MAX_COUNT), "burst", "2^62"),
            (Limit::token_bucket(rate("7/w"), 1_000_000), "burst", "at most 52124 fits here"),
            (Limit::token_bucket(rate("8589934591/s"), 1), "rate", "2^32"),
            (Limit::leaky_bucket(rate("10/s"), 0), "capacity", "at least 1"),
            (Limit::leaky_bucket(rate("1/d"), MAX_COUNT), "capacity", "2^62"),
            (Limit::fixed_window(0, MINUTE), "limit", "at least 1"),
            (Limit::fixed_window(5, Micros::ZERO), "window", "longer than zero"),
            (Limit::clock_window(5, Micros::new(u64::MAX)), "window", "at most"),
            (Limit::sliding_window(0, MINUTE), "limit", "at least 1"),
            (Limit::sliding_window(5, Micros::ZERO), "window", "longer than zero"),
            (Limit::sliding_window_counter(0, MINUTE), "limit", "at least 1"),
            (Limit::sliding_window_counter(5, Micros::ZERO), "window", "longer than zero"),
            (Limit::sliding_window_counter(MAX_COUNT, MINUTE), "limit", "2^62"),
            (Limit::concurrency(0, MINUTE), "limit", "at least 1"),
            (Limit::concurrency(5, Micros::ZERO), "lease", "longer than zero"),
        ] {
            let error = limit.unwrap_err();
            assert_eq!(error.field(), field, "{error}");
            assert!(error.to_string().contains(hint), "{error}");
            assert!(error.to_string().contains(error.value()) && error.to_string().contains(error.fix()));
        }
    }

    #[test]
    fn every_strategy_is_a_limit() {
        let tens = rate("10/s");
        let pairs: [(Limit, _); 7] = [
            (TokenBucket::new(tens, 5).unwrap().into(), Limit::token_bucket(tens, 5)),
            (LeakyBucket::new(tens, 5).unwrap().into(), Limit::leaky_bucket(tens, 5)),
            (FixedWindow::new(5, MINUTE, Align::First).unwrap().into(), Limit::fixed_window(5, MINUTE)),
            (FixedWindow::new(5, MINUTE, Align::Clock).unwrap().into(), Limit::clock_window(5, MINUTE)),
            (SlidingWindow::new(5, MINUTE).unwrap().into(), Limit::sliding_window(5, MINUTE)),
            (SlidingWindowCounter::new(5, MINUTE).unwrap().into(), Limit::sliding_window_counter(5, MINUTE)),
            (Concurrency::new(5, MINUTE).unwrap().into(), Limit::concurrency(5, MINUTE)),
        ];
        for (limit, same) in pairs {
            assert_eq!(Ok(limit), same);
        }
    }

    #[test]
    fn more_comes_with_a_token_a_window_or_a_lease() {
        let secs = Micros::from_secs;
        let allowed = |remaining, reset| Outcome {
            capacity: 5,
            remaining,
            reset_after: secs(reset),
            ..Outcome::UNLIMITED
        };
        let denied = |retry: Option<u64>, reset| Outcome {
            allowed: false,
            retry_after: retry.map(secs),
            ..allowed(0, reset)
        };
        let shared_out = Outcome { capacity: 2, ..allowed(1, 9) };
        let (token, leaky) = (Limit::token_bucket(rate("1/s"), 5), Limit::leaky_bucket(rate("1/s"), 5));
        let (fixed, held) = (Limit::fixed_window(5, MINUTE), Limit::concurrency(5, MINUTE));
        let (log, counter) = (Limit::sliding_window(5, MINUTE), Limit::sliding_window_counter(5, MINUTE));
        for (limit, outcome, cost, more) in [
            (&token, allowed(4, 1), 1, Some(1)),
            (&token, allowed(5, 0), 1, Some(0)), // full, as when nothing was counted
            (&token, allowed(0, 5), 1, Some(1)),
            (&token, allowed(0, 5), 5, Some(5)),
            (&token, allowed(1, 4), 3, Some(2)),
            (&token, allowed(1, 4), 6, None),
            (&token, denied(Some(3), 5), 3, Some(3)),
            (&token, denied(None, 5), 6, None),
            (&token, shared_out, 1, Some(9)),
            (&leaky, allowed(1, 4), 3, Some(2)),
            (&leaky, denied(None, 5), 6, None),
            (&fixed, allowed(4, 50), 1, Some(50)),
            (&fixed, denied(Some(40), 40), 1, Some(40)),
            (&fixed, denied(None, 40), 6, Some(40)),
            (&log, allowed(4, 60), 1, Some(60)),
            (&log, denied(Some(7), 60), 1, Some(7)),
            (&counter, denied(Some(7), 90), 1, Some(7)),
            (&held, allowed(4, 60), 1, Some(60)),
            (&held, denied(Some(7), 60), 1, Some(7)),
        ] {
            let limit = limit.as_ref().unwrap();
            assert_eq!(limit.more_after_us(&outcome, cost), more.map(secs), "{limit}: {outcome:?}, {cost}");
        }
    }

    #[test]
    fn limits_read_as_sentences() {
        for (limit, strategy, words) in [
            (Limit::token_bucket(rate("10/s"), 20), Strategy::TokenBucket, "10/s, bursts of 20"),
            (Limit::leaky_bucket(rate("10/s"), 20), Strategy::LeakyBucket, "10/s evenly, up to 20 waiting"),
            (Limit::fixed_window(5, MINUTE), Strategy::FixedWindow, "5 per 1m window"),
            (Limit::clock_window(5, MINUTE), Strategy::FixedWindow, "5 per 1m window of the clock"),
            (Limit::sliding_window(5, MINUTE), Strategy::SlidingWindow, "5 in any 1m"),
            (Limit::sliding_window_counter(5, MINUTE), Strategy::SlidingWindowCounter, "about 5 in any 1m"),
            (Limit::concurrency(5, MINUTE), Strategy::Concurrency, "5 at once, leases of 1m"),
        ] {
            let limit = limit.unwrap();
            assert_eq!(limit.to_string(), words);
            assert_eq!(limit.strategy(), strategy);
            assert!(Strategy::ALL.contains(&strategy));
            assert_eq!(strategy.to_string(), strategy.name());
        }
    }
}
