//! The `time` of a request: RFC 3339 or UNIX seconds, or as access logs have it, as whole microseconds.
//!
//! Digits are read as digits: nothing passes through a float, so 1700000000.123456 is exactly that. Tollgate counts in
//! microseconds; a time that says more than it can keep is refused, because rounding it could move a request across the edge
//! of a window. A leap second (…:60) counts as the second before it, as on most clocks.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::Offset;

/// What to write instead of a time that cannot be read.
type Fix = &'static str;

const ANY: Fix = "write RFC 3339, such as 2024-05-01T12:00:00Z, or UNIX seconds with up to six decimals, such as 1714564800.25";
const TOO_FINE: Fix = "write at most six decimals: Tollgate counts whole microseconds";
const TOO_EARLY: Fix = "write a time in 1970 or later";
const TOO_LATE: Fix = "write UNIX seconds; a number this large looks like milliseconds or microseconds";
const TOO_FAR: Fix = "write a time before the end of the year 9999";
const NO_OFFSET: Fix = "end it with Z or an offset such as +02:00, so that it says which hour it means";
const NO_EXPONENT: Fix = "write the digits out, without an exponent";
const ACCESS: Fix = "write a time such as 10/Oct/2000:13:55:36 -0700";
const NO_SUCH: Fix = "write a day and an hour that exist";

/// The instant that `text` says, in microseconds since 1970, or what to write instead. The forms that nearly all logs have are read by
/// [`parse_usual`], and everything else by the rules.
pub(crate) fn parse(text: &str) -> Result<u64, Fix> {
    parse_usual(text.as_bytes()).map_or_else(|| parse_any(text), Ok)
}

/// Ten digits of UNIX seconds, or RFC 3339 in UTC, with up to six decimals; `None` for all that looks otherwise, also where it is wrong.
fn parse_usual(text: &[u8]) -> Option<u64> {
    const DATE: usize = "2024-05-01T12:00:00".len();
    if let Some((date_time, rest)) = text.split_at_checked(DATE)
        && let [decimals @ .., b'Z'] = rest
    {
        return Some(usual_date_time(date_time)? * 1_000_000 + usual_decimals(decimals)?);
    }
    let (seconds, decimals) = text.split_at_checked(10)?;
    Some(digits(seconds)? * 1_000_000 + usual_decimals(decimals)?)
}

/// Seconds since 1970 of `2024-05-01T12:00:00`, if that day and that time exist. Leap seconds are for the rules.
fn usual_date_time(text: &[u8]) -> Option<u64> {
    let &[y0, y1, y2, y3, b'-', m0, m1, b'-', d0, d1, b'T', h0, h1, b':', n0, n1, b':', s0, s1] = text else {
        return None;
    };
    let (year, month, day) = (digits(&[y0, y1, y2, y3])?, digits(&[m0, m1])?, digits(&[d0, d1])?);
    let (hour, minute, second) = (digits(&[h0, h1])?, digits(&[n0, n1])?, digits(&[s0, s1])?);
    if !(1970..=9998).contains(&year) || hour > 23 || minute > 59 || second > 59 {
        return None;
    }
    let is_leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let length = match month {
        1 | 3 | 5 | 7 | 8 | 10 | 12 => 31,
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u64::from(is_leap),
        _ => return None,
    };
    if !(1..=length).contains(&day) {
        return None;
    }
    // Days before the year, before the month in a year without a leap day, and the leap day of this year once it is past.
    let past = year - 1;
    const EPOCH: u64 = 1969 * 365 + 1969 / 4 - 1969 / 100 + 1969 / 400;
    const BEFORE: [u64; 13] = [0, 0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let before = *BEFORE.get(usize::try_from(month).ok()?)? + u64::from(is_leap && month > 2);
    let days = past * 365 + past / 4 - past / 100 + past / 400 - EPOCH + before + day - 1;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// The microseconds of nothing, or of a dot and one to six digits.
fn usual_decimals(text: &[u8]) -> Option<u64> {
    const SCALE: [u64; 7] = [0, 100_000, 10_000, 1_000, 100, 10, 1];
    match text {
        [] => Some(0),
        [b'.', decimals @ ..] if !decimals.is_empty() => {
            SCALE.get(decimals.len()).and_then(|scale| Some(digits(decimals)? * scale))
        }
        _ => None,
    }
}

/// A number of at most ten digits.
fn digits(text: &[u8]) -> Option<u64> {
    text.iter().try_fold(0, |sum: u64, byte| {
        let digit = byte.wrapping_sub(b'0');
        (digit < 10).then(|| sum * 10 + u64::from(digit))
    })
}

fn parse_any(text: &str) -> Result<u64, Fix> {
    let digits_and_dots = |text: &str| {
        text.starts_with(|c: char| c.is_ascii_digit())
            && text.bytes().all(|b| b.is_ascii_digit() || b == b'.')
    };
    if digits_and_dots(text) {
        return parse_unix(text);
    }
    if text.strip_prefix('-').is_some_and(digits_and_dots) {
        return Err(TOO_EARLY);
    }
    if text.split_once(['e', 'E']).is_some_and(|(digits, _)| digits_and_dots(digits)) {
        return Err(NO_EXPONENT);
    }
    parse_rfc3339(text)
}

fn parse_unix(text: &str) -> Result<u64, Fix> {
    let (seconds, decimals) = text.split_once('.').unwrap_or((text, "0"));
    if decimals.is_empty() || decimals.contains('.') {
        return Err(ANY);
    }
    if decimals.len() > 6 {
        return Err(TOO_FINE);
    }
    // Six digits at most, and as many zeros as are missing.
    let digits = decimals.bytes().chain(std::iter::repeat(b'0')).take(6);
    let micros = digits.fold(0, |micros: u64, digit| micros * 10 + u64::from(digit.wrapping_sub(b'0')));
    let latest = u64::try_from(Timestamp::MAX.as_microsecond()).unwrap_or(u64::MAX);
    seconds
        .parse::<u64>()
        .ok()
        .and_then(|seconds| seconds.checked_mul(1_000_000))
        .and_then(|whole| whole.checked_add(micros))
        .filter(|&instant| instant <= latest)
        .ok_or(TOO_LATE)
}

/// The grammar is checked here, because jiff reads more than RFC 3339 allows; the calendar is jiff's.
fn parse_rfc3339(text: &str) -> Result<u64, Fix> {
    const DATE_TIME: &[u8; 19] = b"0000-00-00T00:00:00";
    if !text.is_ascii() || text.len() < DATE_TIME.len() {
        return Err(ANY);
    }
    let (date_time, rest) = text.split_at(DATE_TIME.len());
    let fits = |(found, shape): (u8, &u8)| match shape {
        b'0' => found.is_ascii_digit(),
        b'T' => matches!(found, b'T' | b't' | b' '),
        _ => found == *shape,
    };
    if !date_time.bytes().zip(DATE_TIME).all(fits) {
        return Err(ANY);
    }
    let offset = match rest.strip_prefix('.') {
        None => rest,
        Some(rest) => {
            let offset = rest.trim_start_matches(|c: char| c.is_ascii_digit());
            match rest.len() - offset.len() {
                0 => return Err(ANY),
                1..=6 => offset,
                _ => return Err(TOO_FINE),
            }
        }
    };
    match offset.as_bytes() {
        b"Z" | b"z" => {}
        [b'+' | b'-', hour @ .., b':', tens, units] if hour.len() == 2 => {
            if !hour.iter().chain([tens, units]).all(u8::is_ascii_digit) {
                return Err(NO_OFFSET);
            }
        }
        _ => return Err(NO_OFFSET),
    }
    let in_reach = date_time < "9999-12-30";
    let instant: Timestamp = text.parse().map_err(|_| if in_reach { NO_SUCH } else { TOO_FAR })?;
    u64::try_from(instant.as_microsecond()).map_err(|_| TOO_EARLY)
}

/// The instant that an access log says, such as `10/Oct/2000:13:55:36 -0700`.
pub(super) fn parse_access_time(text: &[u8]) -> Result<u64, Fix> {
    const SHAPE: &[u8; 26] = b"00/Mmm/0000:00:00:00 +0000";
    let fits = |(&found, shape): (&u8, &u8)| match shape {
        b'0' => found.is_ascii_digit(),
        b'M' | b'm' => found.is_ascii_alphabetic(),
        b'+' => matches!(found, b'+' | b'-'),
        _ => found == *shape,
    };
    if text.len() != SHAPE.len() || !text.iter().zip(SHAPE).all(fits) {
        return Err(ACCESS);
    }
    // Four digits at most.
    let number = |place: std::ops::Range<usize>| {
        text[place].iter().fold(0, |sum: i16, digit| sum * 10 + i16::from(digit - b'0'))
    };
    let small = |place| i8::try_from(number(place)).map_err(|_| NO_SUCH);
    const MONTHS: [&[u8]; 12] =
        [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];
    let month = (1i8..).zip(MONTHS).find(|(_, name)| *name == &text[3..6]).ok_or(ACCESS)?.0;
    // The leap second is the one before it.
    let second = small(18..20)?;
    let second = if second == 60 { 59 } else { second };
    let local = DateTime::new(number(7..11), month, small(0..2)?, small(12..14)?, small(15..17)?, second, 0)
        .map_err(|_| NO_SUCH)?;
    let ahead = i32::from(number(22..24)) * 3600 + i32::from(number(24..26)) * 60;
    let ahead = if text[21] == b'-' { -ahead } else { ahead };
    let offset = Offset::from_seconds(ahead).map_err(|_| NO_SUCH)?;
    let instant = offset.to_timestamp(local).map_err(|_| TOO_FAR)?;
    u64::try_from(instant.as_microsecond()).map_err(|_| TOO_EARLY)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What is read quickly is what the rules read, whatever it is, and the usual forms are read quickly.
        #[test]
        fn both_ways_to_read_a_time_are_one(
            text in "[0-9]{9,11}(\\.[0-9]{0,7})?|[012][0-9]{3}-[0-3][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9](\\.[0-9]{0,7})?[Zz+]|\\PC{0,30}",
        ) {
            if let Some(quickly) = parse_usual(text.as_bytes()) {
                prop_assert_eq!(Ok(quickly), parse_any(&text), "{:?}", text);
            }
        }

        #[test]
        fn every_day_is_read_as_the_calendar_has_it(
            year in 1970i16..9999, month in 1i8..=12, day in 1i8..=31, second in 0u64..86_400, micros in 0u64..1_000_000,
        ) {
            let text = format!("{year}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{micros:06}Z", second / 3_600, second / 60 % 60, second % 60);
            prop_assert_eq!(parse_usual(text.as_bytes()), parse_any(&text).ok(), "{:?}", text);
        }
    }

    #[test]
    fn times_are_read_exactly() {
        for (text, us) in [
            ("0", 0),
            ("0.000001", 1),
            ("1700000000", 1_700_000_000_000_000),
            ("1700000000.1", 1_700_000_000_100_000),
            ("1700000000.123456", 1_700_000_000_123_456),
            // 2^53 + 1 µs: a float would lose its last digit.
            ("9007199254.740993", 9_007_199_254_740_993),
            ("0001700000000", 1_700_000_000_000_000),
            ("1970-01-01T00:00:00Z", 0),
            ("2023-11-14T22:13:20Z", 1_700_000_000_000_000),
            ("2023-11-14T22:13:20.123456Z", 1_700_000_000_123_456),
            ("2023-11-15T00:13:20.5+02:00", 1_700_000_000_500_000),
            ("2023-11-14T17:43:20-04:30", 1_700_000_000_000_000),
            ("2023-11-14t22:13:20z", 1_700_000_000_000_000),
            ("2023-11-14 22:13:20-00:00", 1_700_000_000_000_000),
            ("2016-12-31T23:59:60Z", 1_483_228_799_000_000),
            ("1970-01-01T01:00:00+01:00", 0),
        ] {
            assert_eq!(parse(text), Ok(us), "{text}");
        }
    }

    #[test]
    fn what_is_no_time_is_refused_with_a_fix() {
        for (text, fix) in [
            ("", ANY),
            ("yesterday", ANY),
            ("12:00", ANY),
            ("2024-05-01", ANY),
            ("1700000000.", ANY),
            (".5", ANY),
            ("1.2.3", ANY),
            ("+5", ANY),
            ("0x10", ANY),
            ("١٧٠٠٠٠٠٠٠٠", ANY),
            ("2024/05/01 12:00:00Z", ANY),
            ("2024-05-01T12:00:00.Z", ANY),
            ("2024-05-01T12:00Z   ", ANY),
            ("1700000000.1234567", TOO_FINE),
            ("1700000000.0000000", TOO_FINE),
            ("2024-05-01T12:00:00.1234567Z", TOO_FINE),
            ("-1", TOO_EARLY),
            ("-0.5", TOO_EARLY),
            ("1969-12-31T23:59:59.999999Z", TOO_EARLY),
            ("1970-01-01T00:59:59+01:00", TOO_EARLY),
            ("1700000000000", TOO_LATE),
            ("1700000000000000", TOO_LATE),
            ("99999999999999999999999", TOO_LATE),
            ("9999-12-31T23:59:59Z", TOO_FAR),
            ("2024-05-01T12:00:00", NO_OFFSET),
            ("2024-05-01T12:00:00+0200", NO_OFFSET),
            ("2024-05-01T12:00:00+2:00", NO_OFFSET),
            ("2024-05-01T12:00:00 UTC", NO_OFFSET),
            ("2024-05-01T12:00:00Z[UTC]", NO_OFFSET),
            ("1.7e9", NO_EXPONENT),
            ("17E8", NO_EXPONENT),
            ("2024-02-30T00:00:00Z", NO_SUCH),
            ("2024-05-01T25:00:00Z", NO_SUCH),
        ] {
            assert_eq!(parse(text), Err(fix), "{text:?}");
        }
    }

    #[test]
    fn times_of_access_logs_are_read_with_their_offset() {
        for (text, expected) in [
            ("10/Oct/2000:13:55:36 -0700", Ok(971_211_336)),
            ("10/Oct/2000:20:55:36 +0000", Ok(971_211_336)),
            ("11/Oct/2000:02:25:36 +0530", Ok(971_211_336)),
            ("01/Jan/1970:00:00:00 +0000", Ok(0)),
            ("29/Feb/2024:00:00:00 +0000", Ok(1_709_164_800)),
            ("31/Dec/2016:23:59:60 +0000", Ok(1_483_228_799)),
            ("31/Dec/1969:23:59:59 +0000", Err(TOO_EARLY)),
            ("01/Jan/1970:00:00:00 +0100", Err(TOO_EARLY)),
            ("30/Feb/2024:00:00:00 +0000", Err(NO_SUCH)),
            ("10/Oct/2000:24:00:00 +0000", Err(NO_SUCH)),
            ("10/Oct/2000:00:00:61 +0000", Err(NO_SUCH)),
            ("10/Oct/2000:00:00:00 +9900", Err(NO_SUCH)),
            ("31/Dec/9999:23:59:59 -0700", Err(TOO_FAR)),
            ("10/oct/2000:13:55:36 -0700", Err(ACCESS)),
            ("10/Okt/2000:13:55:36 -0700", Err(ACCESS)),
            ("1/Oct/2000:13:55:36 -0700", Err(ACCESS)),
            ("10/Oct/2000:13:55:36", Err(ACCESS)),
            ("10/Oct/2000:13:55:36 GMT  ", Err(ACCESS)),
            ("2000-10-10T13:55:36Z", Err(ACCESS)),
            ("", Err(ACCESS)),
        ] {
            let expected = expected.map(|seconds: u64| seconds * 1_000_000);
            assert_eq!(parse_access_time(text.as_bytes()), expected, "{text}");
        }
    }
}
