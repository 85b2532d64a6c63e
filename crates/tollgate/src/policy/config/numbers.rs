//! The numbers of an override that is set at run time: the fields of the config; missing fields keep the limit's value.

use std::fmt;
use std::time::Duration;

use tollgate_kernel::{Limit, LimitError, Micros, Rate};

use super::limits::{Parameters, limit_of, parameters_of};

/// The numbers of an override, field by field as in the config.
///
/// ```
/// use std::time::Duration;
/// use tollgate::Limit;
/// use tollgate::config::OverrideNumbers;
///
/// let numbers = OverrideNumbers { limit: Some(1_000), ..OverrideNumbers::default() };
/// let per_minute = |count| Limit::sliding_window(count, Duration::from_secs(60));
/// assert_eq!(numbers.over(&per_minute(100)?), Ok(per_minute(1_000)?));
/// let error = numbers.over(&Limit::token_bucket("10/s", 20)?).unwrap_err();
/// assert_eq!(error.to_string(), "`limit` does not belong to token_bucket; it takes rate, burst");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverrideNumbers {
    /// Of buckets.
    pub rate: Option<Rate>,
    /// Of token buckets.
    pub burst: Option<u64>,
    /// Of leaky buckets.
    pub capacity: Option<u64>,
    /// Of windows and concurrency.
    pub limit: Option<u64>,
    /// Of windows.
    pub window: Option<Duration>,
    /// Of concurrency.
    pub lease: Option<Duration>,
}

/// Why numbers do not fit a limit: the field, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongNumber {
    field: &'static str,
    why: String,
}

impl WrongNumber {
    /// The field that is wrong.
    pub fn field(&self) -> &'static str {
        self.field
    }
}

impl fmt::Display for WrongNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` {}", self.field, self.why)
    }
}

impl std::error::Error for WrongNumber {}

impl From<LimitError> for WrongNumber {
    fn from(error: LimitError) -> WrongNumber {
        WrongNumber { field: error.field(), why: format!("= {}: {}", error.value(), error.fix()) }
    }
}

impl OverrideNumbers {
    /// The limit with these numbers instead of its own, or what is wrong with them.
    pub fn over(&self, limit: &Limit) -> Result<Limit, WrongNumber> {
        let strategy = limit.strategy();
        let takes: Vec<&str> =
            parameters_of(strategy).iter().copied().filter(|name| !FIXED.contains(name)).collect();
        let given = [
            ("rate", self.rate.is_some()),
            ("burst", self.burst.is_some()),
            ("capacity", self.capacity.is_some()),
            ("limit", self.limit.is_some()),
            ("window", self.window.is_some()),
            ("lease", self.lease.is_some()),
        ];
        if let Some((field, _)) = given.iter().find(|(name, is_given)| *is_given && !takes.contains(name)) {
            let why = format!("does not belong to {strategy}; it takes {}", takes.join(", "));
            return Err(WrongNumber { field, why });
        }
        let own = Parameters::of(limit);
        let with = Parameters {
            rate: self.rate.or(own.rate),
            burst: self.burst.or(own.burst),
            capacity: self.capacity.or(own.capacity),
            limit: self.limit.or(own.limit),
            window: self.window.map(Micros::from).or(own.window),
            lease: self.lease.map(Micros::from).or(own.lease),
            ..own
        };
        match limit_of(strategy, with) {
            Some(built) => Ok(built?),
            // A limit has all the parameters of its strategy.
            None => Ok(*limit),
        }
    }
}

/// Fields that an override at run time cannot change.
const FIXED: [&str; 2] = ["align", "max_debt"];

impl Parameters {
    /// The parameters of a limit.
    fn of(limit: &Limit) -> Parameters {
        let none = Parameters::default();
        match limit {
            Limit::TokenBucket(bucket) => Parameters {
                rate: Some(bucket.rate()),
                burst: Some(bucket.burst()),
                max_debt: Some(bucket.max_debt()),
                ..none
            },
            Limit::LeakyBucket(bucket) => Parameters {
                rate: Some(bucket.rate()),
                capacity: Some(bucket.capacity()),
                max_debt: Some(bucket.room().max_debt()),
                ..none
            },
            Limit::FixedWindow(window) => Parameters {
                limit: Some(window.limit()),
                window: Some(window.window()),
                align: Some(window.align()),
                ..none
            },
            Limit::SlidingWindow(window) => {
                Parameters { limit: Some(window.limit()), window: Some(window.window()), ..none }
            }
            Limit::SlidingWindowCounter(window) => {
                Parameters { limit: Some(window.limit()), window: Some(window.window()), ..none }
            }
            Limit::Concurrency(leases) => {
                Parameters { limit: Some(leases.limit()), lease: Some(leases.lease()), ..none }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::Align;

    use super::*;

    fn numbers(text: &str) -> OverrideNumbers {
        let mut numbers = OverrideNumbers::default();
        for (name, value) in text.split_whitespace().filter_map(|field| field.split_once('=')) {
            let whole = || value.parse().ok();
            match name {
                "rate" => numbers.rate = value.parse().ok(),
                "burst" => numbers.burst = whole(),
                "capacity" => numbers.capacity = whole(),
                "limit" => numbers.limit = whole(),
                "window" => numbers.window = value.parse().ok().map(Micros::into),
                _ => numbers.lease = value.parse().ok().map(Micros::into),
            }
        }
        numbers
    }

    #[test]
    fn what_is_given_replaces_what_the_limit_has_and_the_rest_stays() {
        let minute = Micros::from_secs(60);
        let bucket = Limit::token_bucket("10/s", 20).unwrap().with_max_debt(Micros::from_secs(9)).unwrap();
        for (limit, given, expected) in [
            (bucket, "", "10/s, bursts of 20"),
            (bucket, "rate=100/s", "100/s, bursts of 20"),
            (bucket, "rate=100/s burst=400", "100/s, bursts of 400"),
            (Limit::leaky_bucket("10/s", 20).unwrap(), "capacity=5", "10/s evenly, up to 5 waiting"),
            (Limit::fixed_window(5, minute).unwrap(), "limit=50", "50 per 1m window"),
            (Limit::clock_window(5, minute).unwrap(), "limit=50", "50 per 1m window of the clock"),
            (Limit::sliding_window(5, minute).unwrap(), "window=1h", "5 in any 1h"),
            (Limit::sliding_window_counter(5, minute).unwrap(), "limit=7", "about 7 in any 1m"),
            (Limit::concurrency(5, minute).unwrap(), "limit=7 lease=2m", "7 at once, leases of 2m"),
        ] {
            let over = numbers(given).over(&limit).unwrap();
            assert_eq!((over.strategy(), &*over.to_string()), (limit.strategy(), expected), "{given}");
        }
        let Limit::TokenBucket(kept) = numbers("burst=9").over(&bucket).unwrap() else { panic!("a bucket") };
        assert_eq!(kept.max_debt(), Micros::from_secs(9));
        let clock = numbers("limit=9").over(&Limit::clock_window(5, minute).unwrap()).unwrap();
        assert!(matches!(clock, Limit::FixedWindow(window) if window.align() == Align::Clock));
    }

    #[test]
    fn what_does_not_go_with_the_limit_names_the_field() {
        let minute = Micros::from_secs(60);
        for (limit, given, field, words) in [
            (Limit::sliding_window(5, minute), "burst=5", "burst", "it takes limit, window"),
            (Limit::token_bucket("1/s", 1), "capacity=5", "capacity", "it takes rate, burst"),
            (Limit::concurrency(5, minute), "window=1m", "window", "it takes limit, lease"),
            (Limit::sliding_window(5, minute), "limit=0", "limit", "must be at least 1"),
            (Limit::token_bucket("1/s", 1), "burst=9007199254740993", "burst", "must be at most"),
        ] {
            let error = numbers(given).over(&limit.unwrap()).unwrap_err();
            assert_eq!(error.field(), field);
            assert!(error.to_string().contains(words), "{error}");
        }
    }
}
