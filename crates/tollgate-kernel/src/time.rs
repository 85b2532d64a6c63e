//! Whole microseconds, the only unit of time in a decision.
//!
//! A [`Micros`] is an instant (since 1970, or since whatever origin a store chose) or a span; both are the same whole
//! number, and no rounding happens until a front turns one into milliseconds or seconds, always upwards. Microseconds since
//! 1970 stay below 2^53 until the year 2255, so the Lua and SQL twins can hold them exactly.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::LimitError;

/// A whole number of microseconds: an instant or a span.
///
/// ```
/// use tollgate_kernel::Micros;
/// assert_eq!("1m30s".parse::<Micros>()?, Micros::from_secs(90));
/// assert_eq!(Micros::from_millis(1500).as_secs_ceil(), 2);
/// assert_eq!(Micros::from_millis(1500).to_string(), "1.5s");
/// # Ok::<(), tollgate_kernel::LimitError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(u64);

/// The units a duration may be written in, largest first, in microseconds.
const UNITS: [(&str, u64); 7] = [
    ("w", 7 * 86_400_000_000),
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
];

impl Micros {
    /// No time at all.
    pub const ZERO: Micros = Micros(0);

    /// From whole microseconds.
    pub const fn new(micros: u64) -> Self {
        Micros(micros)
    }

    /// From whole milliseconds; saturates.
    pub const fn from_millis(millis: u64) -> Self {
        Micros(millis.saturating_mul(1_000))
    }

    /// From whole seconds; saturates.
    pub const fn from_secs(secs: u64) -> Self {
        Micros(secs.saturating_mul(1_000_000))
    }

    /// The number of microseconds.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Seconds, rounded up, so that waiting them out is enough.
    pub const fn as_secs_ceil(self) -> u64 {
        self.0.div_ceil(1_000_000)
    }

    /// The sum, or the largest value there is.
    pub const fn saturating_add(self, other: Micros) -> Micros {
        Micros(self.0.saturating_add(other.0))
    }

    /// The difference, or zero.
    pub const fn saturating_sub(self, other: Micros) -> Micros {
        Micros(self.0.saturating_sub(other.0))
    }

    /// One of the units of [`Rate`](crate::Rate) and duration texts, by name.
    pub(crate) fn unit(name: &str) -> Option<Micros> {
        UNITS.iter().find(|(unit, _)| *unit == name).map(|&(_, micros)| Micros(micros))
    }
}

impl From<Micros> for Duration {
    fn from(span: Micros) -> Duration {
        Duration::from_micros(span.0)
    }
}

/// A duration finer than a microsecond is rounded up: a limit is never looser than it was written.
impl From<Duration> for Micros {
    fn from(span: Duration) -> Micros {
        Micros(u64::try_from(span.as_nanos().div_ceil(1_000)).unwrap_or(u64::MAX))
    }
}

/// Reads `250ms`, `1s`, `1h30m`, `7d`: a whole number and a unit (`us ms s m h d w`), repeated, largest unit first.
impl FromStr for Micros {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Micros, LimitError> {
        let fail = |fix: &str| Err(LimitError::new("duration", format!("{text:?}"), fix));
        let mut rest = text;
        let mut total = 0u64;
        let mut last_unit = u64::MAX;
        if text.is_empty() {
            return fail("write a whole number and a unit, such as 250ms, 1s, 5m, 1h30m or 7d");
        }
        while !rest.is_empty() {
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let (number, tail) = rest.split_at(digits);
            let letters = tail.len() - tail.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
            let (unit, tail) = tail.split_at(letters);
            if number.is_empty() {
                return fail("write a whole number and a unit, such as 250ms, 1s, 5m, 1h30m or 7d");
            }
            let Some(Micros(unit_us)) = Micros::unit(unit) else {
                return fail("use one of the units us, ms, s, m, h, d, w");
            };
            if unit_us >= last_unit {
                return fail("write the largest unit first and each unit once, as in 1h30m");
            }
            let Some(sum) = number
                .parse::<u64>()
                .ok()
                .and_then(|n| n.checked_mul(unit_us))
                .and_then(|n| n.checked_add(total))
            else {
                return fail("the number is too large to count in microseconds; use a shorter time");
            };
            (total, last_unit, rest) = (sum, unit_us, tail);
        }
        Ok(Micros(total))
    }
}

/// Prints the shortest exact text: `250ms`, `1.5s`, `1h30m`, `0s`.
impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0;
        if us == 0 {
            return f.write_str("0s");
        }
        if us < 1_000 {
            return write!(f, "{us}us");
        }
        if us < 1_000_000 {
            return decimal(f, us, 1_000, "ms");
        }
        if us < 60_000_000 || !us.is_multiple_of(1_000_000) {
            return decimal(f, us, 1_000_000, "s");
        }
        let mut rest = us;
        for (unit, size) in &UNITS[1..5] {
            if rest >= *size {
                write!(f, "{}{unit}", rest / size)?;
                rest %= size;
            }
        }
        Ok(())
    }
}

/// `us / scale` with as many decimals as it needs.
fn decimal(f: &mut fmt::Formatter<'_>, us: u64, scale: u64, unit: &str) -> fmt::Result {
    let (whole, part) = (us / scale, us % scale);
    if part == 0 {
        return write!(f, "{whole}{unit}");
    }
    let width = scale.ilog10() as usize;
    let decimals = format!("{part:0width$}");
    write!(f, "{whole}.{}{unit}", decimals.trim_end_matches('0'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_written() {
        for (text, us) in [
            ("1us", 1),
            ("250ms", 250_000),
            ("1s", 1_000_000),
            ("5m", 300_000_000),
            ("1h30m", 5_400_000_000),
            ("7d", 604_800_000_000),
            ("2w", 1_209_600_000_000),
            ("1m30s500ms", 90_500_000),
            ("0s", 0),
        ] {
            assert_eq!(text.parse::<Micros>().unwrap(), Micros::new(us), "{text}");
        }
    }

    #[test]
    fn what_is_no_duration_is_refused_with_a_fix() {
        for (text, hint) in [
            ("", "whole number and a unit"),
            ("5", "units us, ms"),
            ("s", "whole number and a unit"),
            ("-1s", "whole number and a unit"),
            ("1.5s", "units us, ms"),
            ("1y", "units us, ms"),
            ("1M", "units us, ms"),
            ("30m1h", "largest unit first"),
            ("1s1s", "largest unit first"),
            ("99999999999999999999s", "too large"),
            ("9999999999999999w", "too large"),
            ("18446744073709s999999ms", "too large"),
            ("1 s", "units us, ms"),
        ] {
            let error = text.parse::<Micros>().unwrap_err().to_string();
            assert!(error.contains(hint), "{text:?}: {error}");
            assert!(error.contains(text), "{text:?}: {error}");
        }
    }

    #[test]
    fn display_is_short_and_exact() {
        for (us, text) in [
            (0, "0s"),
            (7, "7us"),
            (1_500, "1.5ms"),
            (999, "999us"),
            (1_000, "1ms"),
            (250_000, "250ms"),
            (1_000_000, "1s"),
            (1_234_567, "1.234567s"),
            (59_000_001, "59.000001s"),
            (60_000_000, "1m"),
            (90_000_000, "1m30s"),
            (90_500_000, "90.5s"),
            (5_400_000_000, "1h30m"),
            (604_800_000_000, "7d"),
            (90_061_000_000, "1d1h1m1s"),
        ] {
            assert_eq!(Micros::new(us).to_string(), text);
        }
    }

    #[test]
    fn conversions_round_up() {
        assert_eq!(Micros::new(1).as_secs_ceil(), 1);
        assert_eq!(Micros::ZERO.as_secs_ceil(), 0);
        assert_eq!(Micros::from(Duration::from_nanos(1)), Micros::new(1));
        assert_eq!(Micros::from(Duration::MAX), Micros::new(u64::MAX));
        assert_eq!(Duration::from(Micros::from_millis(3)), Duration::from_millis(3));
        assert_eq!(Micros::from_secs(u64::MAX).get(), u64::MAX);
        assert_eq!(Micros::new(5).saturating_sub(Micros::new(9)), Micros::ZERO);
        assert_eq!(Micros::new(5).saturating_add(Micros::new(u64::MAX)), Micros::new(u64::MAX));
    }
}
