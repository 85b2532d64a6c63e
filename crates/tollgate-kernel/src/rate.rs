//! A rate: so many every so long, kept as a reduced fraction and never as an interval.
//!
//! An interval would round: 7 a second is not one every 142,857 µs. The fraction `count / period` is divided by its greatest
//! common divisor once, here, and the arithmetic downstream stays in whole numbers.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::time::Duration;

use crate::bounds::{MAX_COUNT, MAX_SPAN};
use crate::error::LimitError;
use crate::time::Micros;

/// `count` units every `period`.
///
/// ```
/// use tollgate_kernel::{Micros, Rate};
/// let rate: Rate = "100/m".parse()?;
/// assert_eq!(rate, Rate::new(100, Micros::from_secs(60))?);
/// assert_eq!(rate, Rate::new(50, Micros::from_secs(30))?);
/// assert_eq!(rate.to_string(), "100/m");
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    count: u64,
    period: Micros,
}

impl Rate {
    /// `count` every `period`; both at least one and within the bounds of exact arithmetic.
    pub fn new(count: u64, period: impl Into<Micros>) -> Result<Rate, LimitError> {
        let period = period.into();
        let shown = || format!("{count} every {period}");
        if count == 0 {
            return Err(LimitError::new(
                "rate",
                shown(),
                "the count must be at least 1; say `unlimited` or `blocked` for no limit or no passage",
            ));
        }
        if count > MAX_COUNT {
            return Err(LimitError::new("rate", shown(), format!("the count may be at most {MAX_COUNT}")));
        }
        if period == Micros::ZERO {
            return Err(LimitError::new("rate", shown(), "the period must be longer than zero"));
        }
        if period > MAX_SPAN {
            return Err(LimitError::new("rate", shown(), format!("the period may be at most {MAX_SPAN}")));
        }
        Ok(Rate { count, period })
    }

    /// `count` every second.
    pub fn per_second(count: u64) -> Result<Rate, LimitError> {
        Rate::new(count, Micros::from_secs(1))
    }

    /// `count` every minute.
    pub fn per_minute(count: u64) -> Result<Rate, LimitError> {
        Rate::new(count, Micros::from_secs(60))
    }

    /// `count` every hour.
    pub fn per_hour(count: u64) -> Result<Rate, LimitError> {
        Rate::new(count, Micros::from_secs(3600))
    }

    /// The count as it was written.
    pub const fn count(self) -> u64 {
        self.count
    }

    /// The period as it was written.
    pub const fn period(self) -> Duration {
        Duration::from_micros(self.period.get())
    }

    /// [`period`](Self::period) in the unit of decisions.
    pub const fn period_us(self) -> Micros {
        self.period
    }

    /// The fraction in lowest terms: (units, every so many µs).
    pub(crate) const fn reduced(self) -> (u64, u64) {
        let (mut a, mut b) = (self.count, self.period.get());
        while b != 0 {
            (a, b) = (b, a % b);
        }
        (self.count / a, self.period.get() / a)
    }
}

/// Two rates are equal when they are the same fraction: 100 a minute is 50 every 30 s.
impl PartialEq for Rate {
    fn eq(&self, other: &Rate) -> bool {
        self.reduced() == other.reduced()
    }
}

impl Eq for Rate {}

impl Hash for Rate {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.reduced().hash(state);
    }
}

/// As `parse` does, for calls that take a rate or its text.
impl TryFrom<&str> for Rate {
    type Error = LimitError;

    fn try_from(text: &str) -> Result<Rate, LimitError> {
        text.parse()
    }
}

/// The same for text that is owned.
impl TryFrom<String> for Rate {
    type Error = LimitError;

    fn try_from(text: String) -> Result<Rate, LimitError> {
        text.parse()
    }
}

/// Reads `10/s`, `100/m`, `5000/h`, `1000000/d`, `3/250ms`.
impl FromStr for Rate {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Rate, LimitError> {
        let fail = || {
            LimitError::new(
                "rate",
                format!("{text:?}"),
                "write count/period, such as 10/s, 100/m, 5000/h, 1000000/d or 3/250ms",
            )
        };
        let (count, period) = text.split_once('/').ok_or_else(fail)?;
        if count.is_empty() || !count.bytes().all(|b| b.is_ascii_digit() || b == b'_') {
            return Err(fail());
        }
        let count = count.replace('_', "").parse().map_err(|_| {
            LimitError::new("rate", format!("{text:?}"), format!("the count may be at most {MAX_COUNT}"))
        })?;
        let period = match Micros::unit(period) {
            Some(unit) => unit,
            None => period.parse().map_err(|_| fail())?,
        };
        Rate::new(count, period)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let period = self.period.to_string();
        let one_of = period.strip_prefix('1').filter(|unit| Micros::unit(unit).is_some());
        write!(f, "{}/{}", self.count, one_of.unwrap_or(&period))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_written() {
        for (text, count, period_us) in [
            ("10/s", 10, 1_000_000),
            ("100/m", 100, 60_000_000),
            ("5000/h", 5000, 3_600_000_000),
            ("1_000_000/d", 1_000_000, 86_400_000_000),
            ("7/w", 7, 604_800_000_000),
            ("3/250ms", 3, 250_000),
            ("1/1h30m", 1, 5_400_000_000),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.count(), rate.period_us().get()), (count, period_us), "{text}");
        }
    }

    #[test]
    fn equal_rates_are_one_in_a_set_and_owned_text_is_read_alike() {
        let rate = |text: &str| Rate::try_from(text.to_owned()).unwrap();
        let rates = ["100/m", "50/30s", "10/6s", "101/m"].map(rate);
        assert_eq!(std::collections::HashSet::from(rates).len(), 2);
        assert_eq!(rates[0], "100/m".parse().unwrap());
        assert_eq!(Rate::try_from(String::from("no rate")), "no rate".parse());
    }

    #[test]
    fn what_is_no_rate_is_refused_with_a_fix() {
        for (text, hint) in [
            ("", "write count/period"),
            ("10", "write count/period"),
            ("/s", "write count/period"),
            ("10/", "write count/period"),
            ("-1/s", "write count/period"),
            ("1.5/s", "write count/period"),
            ("10/fortnight", "write count/period"),
            ("0/s", "at least 1"),
            ("1/0s", "longer than zero"),
            ("99999999999999999999/s", "at most"),
            ("9007199254740992/s", "at most"),
            ("1/99999w", "at most"),
        ] {
            let error = text.parse::<Rate>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text:?}: {error}");
        }
    }

    #[test]
    fn a_rate_is_a_fraction() {
        assert_eq!(Rate::per_second(10).unwrap().reduced(), (1, 100_000));
        assert_eq!(Rate::per_second(7).unwrap().reduced(), (7, 1_000_000));
        assert_eq!(Rate::per_minute(100).unwrap().reduced(), (1, 600_000));
        assert_eq!(Rate::per_hour(3600).unwrap(), Rate::per_second(1).unwrap());
        assert_ne!(Rate::per_second(1).unwrap(), Rate::per_second(2).unwrap());
        for text in ["10/s", "3/250ms", "1/1h30m", "5/d", "9/10s"] {
            assert_eq!(text.parse::<Rate>().unwrap().to_string(), text);
        }
    }
}
