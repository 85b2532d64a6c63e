//! What the headers of an answer say about waiting and about limits.
//!
//! | header | forms that are read |
//! |---|---|
//! | `retry-after-ms` | milliseconds, with decimals |
//! | `retry-after` | seconds, with decimals; an HTTP date; a duration such as `6m0s` |
//! | `x-ratelimit-reset-*`, `anthropic-ratelimit-*-reset` | a duration such as `6m0s` or `12ms`; seconds, with decimals; RFC 3339; seconds or milliseconds since 1970 |
//! | `x-ratelimit-{limit,remaining}-*`, `anthropic-ratelimit-*-{limit,remaining}` | whole numbers; a limit of 0 or less is not known |
//!
//! A point in time is compared with the answer's own `Date`, so that it does not matter how wrong the clock of this machine is. `Date` has whole
//! seconds and is rounded down, so a wait is up to one second too long and never too short. Without a `Date` this machine's clock is used.
//!
//! Waits are rounded up to a microsecond and bounded by [`MOST_WAIT`]. What cannot be read is `None`; nothing here fails.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::HeaderMap;

/// The longest wait that a hint can ask for. A longer one is this long, which is longer than anybody waits.
pub const MOST_WAIT: Duration = Duration::from_secs(31 * 24 * 3_600);

/// Numbers from here on are seconds since 1970 and not a duration: it was reached in 2001, and as a duration it is 31 years.
const EPOCH_SECONDS: u128 = 1_000_000_000;

/// Numbers from here on are milliseconds since 1970: reached in 1973, and as seconds in the year 5138.
const EPOCH_MILLIS: u128 = 100_000_000_000;

/// Numbers from here on are neither.
const NO_EPOCH: u128 = 100_000_000_000_000;

/// The longest header value that is looked at.
const MOST_BYTES: usize = 128;

/// The time at the provider, as its answer's `Date` says, else this machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerTime(SystemTime);

impl ServerTime {
    /// From the `Date` of an answer that arrived now.
    pub fn of(headers: &HeaderMap, now: SystemTime) -> ServerTime {
        let date = text(headers, "date").and_then(|date| httpdate::parse_http_date(date).ok());
        ServerTime(date.unwrap_or(now))
    }

    /// This time.
    pub const fn at(time: SystemTime) -> ServerTime {
        ServerTime(time)
    }

    /// How long it is until then; nothing if it is past.
    fn until(self, then: SystemTime) -> Duration {
        bounded(then.duration_since(self.0).unwrap_or_default())
    }
}

/// What an answer says about one limit of the provider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReportedLimit {
    /// What it allows.
    pub limit: Option<u64>,
    /// What is left. Anthropic rounds tokens to thousands, so up to 500 of it may not be there.
    pub remaining: Option<u64>,
    /// When all of it will be left; not when the next call fits.
    pub reset_after: Option<Duration>,
}

impl ReportedLimit {
    /// Whether nothing is left.
    pub fn is_exhausted(&self) -> bool {
        self.remaining == Some(0)
    }

    fn any(self) -> Option<ReportedLimit> {
        Some(self).filter(|limit| *limit != ReportedLimit::default())
    }
}

/// What the headers of an answer say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// How long the provider asks to wait (`retry-after-ms`, else `retry-after`). Zero is no hint.
    pub retry_after: Option<Duration>,
    /// Whether the provider asks for a retry or against one (`x-should-retry`).
    pub should_retry: Option<bool>,
    /// Its limit of requests. Groq's is of a day, all others' of a minute.
    pub requests: Option<ReportedLimit>,
    /// Its limit of tokens, input and output together. Anthropic reports the strictest that is in force here.
    pub tokens: Option<ReportedLimit>,
    /// Its limit of input tokens.
    pub input_tokens: Option<ReportedLimit>,
    /// Its limit of output tokens.
    pub output_tokens: Option<ReportedLimit>,
}

impl Hints {
    /// Reads the headers of an answer that arrived now.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use tollgate_llm::provider::Hints;
    ///
    /// let mut headers = http::HeaderMap::new();
    /// headers.insert("x-ratelimit-remaining-tokens", "0".parse().unwrap());
    /// headers.insert("x-ratelimit-reset-tokens", "6m0s".parse().unwrap());
    /// let hints = Hints::read(&headers, SystemTime::now());
    /// assert!(hints.tokens.unwrap().is_exhausted());
    /// assert_eq!(hints.wait(), Some(Duration::from_secs(360)));
    /// ```
    pub fn read(headers: &HeaderMap, now: SystemTime) -> Hints {
        let now = ServerTime::of(headers, now);
        let asked_ms = text(headers, "retry-after-ms").and_then(|text| decimal(text, 1_000_000));
        let asked = asked_ms.or_else(|| parse_retry_after(text(headers, "retry-after")?, now));
        let limit = |names: [&str; 3]| {
            let whole = |name: &str| text(headers, name)?.parse::<u64>().ok();
            let limit = whole(names[0]).filter(|limit| *limit > 0);
            let reset_after = text(headers, names[2]).and_then(|text| parse_reset(text, now));
            ReportedLimit { limit, remaining: whole(names[1]), reset_after }.any()
        };
        let openai = |axis: &str| {
            limit(
                ["limit", "remaining", "reset"]
                    .map(|part| format!("x-ratelimit-{part}{axis}"))
                    .each_ref()
                    .map(String::as_str),
            )
        };
        let anthropic = |axis: &str| {
            limit(
                ["limit", "remaining", "reset"]
                    .map(|part| format!("anthropic-ratelimit-{axis}-{part}"))
                    .each_ref()
                    .map(String::as_str),
            )
        };
        Hints {
            retry_after: asked.filter(|asked| !asked.is_zero()),
            should_retry: match text(headers, "x-should-retry") {
                Some("true") => Some(true),
                Some("false") => Some(false),
                _ => None,
            },
            // OpenRouter has one limit, without an axis in its name.
            requests: openai("-requests").or_else(|| anthropic("requests")).or_else(|| openai("")),
            tokens: openai("-tokens").or_else(|| anthropic("tokens")),
            input_tokens: anthropic("input-tokens"),
            output_tokens: anthropic("output-tokens"),
        }
    }

    /// All limits that are reported.
    pub fn limits(&self) -> impl Iterator<Item = ReportedLimit> {
        [self.requests, self.tokens, self.input_tokens, self.output_tokens].into_iter().flatten()
    }

    /// How long a refused call should wait: what the provider asks for, else until the limits that are used up are full again, else until
    /// all are. `None` if nothing is known, or if the wait is over.
    pub fn wait(&self) -> Option<Duration> {
        let resets = |is_wanted: fn(&ReportedLimit) -> bool| {
            self.limits().filter(is_wanted).filter_map(|limit| limit.reset_after).max()
        };
        let wait =
            self.retry_after.or_else(|| resets(ReportedLimit::is_exhausted)).or_else(|| resets(|_| true));
        wait.filter(|wait| !wait.is_zero())
    }
}

/// How long `retry-after` asks to wait.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tollgate_llm::provider::{ServerTime, parse_retry_after};
///
/// let now = ServerTime::at(SystemTime::now());
/// assert_eq!(parse_retry_after("1.5", now), Some(Duration::from_millis(1_500)));
/// assert_eq!(parse_retry_after("soon", now), None);
/// ```
pub fn parse_retry_after(text: &str, now: ServerTime) -> Option<Duration> {
    let text = text.trim();
    let seconds = decimal(text, 1_000_000_000).or_else(|| go_duration(text));
    seconds.or_else(|| moment(text).map(|then| now.until(then)))
}

/// How long it is until a limit is full, in any of the forms that providers have.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tollgate_llm::provider::{ServerTime, parse_reset};
///
/// let now = ServerTime::at(SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000));
/// assert_eq!(parse_reset("6m0s", now), Some(Duration::from_secs(360)));
/// assert_eq!(parse_reset("1700000002", now), Some(Duration::from_secs(2)));
/// assert_eq!(parse_reset("-1", now), None);
/// ```
pub fn parse_reset(text: &str, now: ServerTime) -> Option<Duration> {
    let text = text.trim();
    if let Some((whole, _)) = digits(text) {
        let since = |nanos: u128| Some(now.until(UNIX_EPOCH.checked_add(exact(nanos))?));
        return match whole {
            0..EPOCH_SECONDS => decimal(text, 1_000_000_000),
            EPOCH_SECONDS..EPOCH_MILLIS => since(nanos(text, 1_000_000_000)?),
            EPOCH_MILLIS..NO_EPOCH => since(nanos(text, 1_000_000)?),
            _ => None,
        };
    }
    go_duration(text).or_else(|| moment(text).map(|then| now.until(then)))
}

/// A header as text, if it is short and readable.
fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok().map(str::trim).filter(|text| (1..=MOST_BYTES).contains(&text.len()))
}

fn bounded(wait: Duration) -> Duration {
    wait.min(MOST_WAIT)
}

/// A decimal number without a sign: what is before the point, and the digits behind it.
fn digits(text: &str) -> Option<(u128, &str)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) {
        return None;
    }
    // A number that is too long for its type is more than any bound.
    Some((whole.parse().unwrap_or(u128::MAX), fraction))
}

/// A decimal number of a unit of so many nanoseconds, in nanoseconds and rounded up.
fn nanos(text: &str, unit: u64) -> Option<u128> {
    let (whole, fraction) = digits(text)?;
    let unit = u128::from(unit);
    // Nine digits of a fraction are enough for every unit; what is behind them rounds up.
    let kept = &fraction[..fraction.len().min(9)];
    let is_rounded = fraction[kept.len()..].bytes().any(|byte| byte != b'0');
    let scale = 10_u128.pow(u32::try_from(kept.len()).unwrap_or(9));
    let part = kept.parse::<u128>().unwrap_or(0).saturating_mul(unit).div_ceil(scale);
    Some(whole.saturating_mul(unit).saturating_add(part).saturating_add(u128::from(is_rounded)))
}

/// Nanoseconds as a duration, of any length.
fn exact(nanos: u128) -> Duration {
    const SECOND: u128 = 1_000_000_000;
    let seconds = u64::try_from(nanos / SECOND).unwrap_or(u64::MAX);
    Duration::new(seconds, u32::try_from(nanos % SECOND).unwrap_or(0))
}

/// Nanoseconds as a wait: whole microseconds, rounded up, and bounded.
fn wait(nanos: u128) -> Duration {
    bounded(exact(nanos.div_ceil(1_000).saturating_mul(1_000)))
}

fn decimal(text: &str, unit: u64) -> Option<Duration> {
    nanos(text, unit).map(wait)
}

/// A duration as Go writes it: `1h2m3.5s`, `12ms`.
fn go_duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = 0_u128;
    while !rest.is_empty() {
        let number = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.')?;
        let (count, behind) = rest.split_at(number);
        let end =
            behind.find(|letter: char| letter.is_ascii_digit() || letter == '.').unwrap_or(behind.len());
        let (unit, behind) = behind.split_at(end);
        let unit = match unit {
            "ns" => 1,
            "us" | "µs" | "μs" => 1_000,
            "ms" => 1_000_000,
            "s" => 1_000_000_000,
            "m" => 60_000_000_000,
            "h" => 3_600_000_000_000,
            "d" => 86_400_000_000_000,
            _ => return None,
        };
        total = total.saturating_add(nanos(count, unit)?);
        rest = behind;
    }
    (!text.is_empty()).then(|| wait(total))
}

/// A point in time: an HTTP date, or RFC 3339.
fn moment(text: &str) -> Option<SystemTime> {
    if let Ok(date) = httpdate::parse_http_date(text) {
        return Some(date);
    }
    // A time without an offset from UTC is nobody's.
    let parsed: jiff::Timestamp = text.parse().ok()?;
    Some(parsed.into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Tue, 14 Nov 2023 22:13:20 GMT.
    const NOW: Duration = Duration::from_secs(1_700_000_000);

    fn now() -> SystemTime {
        UNIX_EPOCH + NOW
    }

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let line = |(name, value): &(&'static str, &str)| {
            (http::HeaderName::from_static(name), value.parse().unwrap())
        };
        lines.iter().map(line).collect()
    }

    const fn ms(count: u64) -> Option<Duration> {
        Some(Duration::from_millis(count))
    }

    #[test]
    fn e3_every_form_of_a_reset_is_read() {
        for (text, expected) in [
            ("6m0s", ms(360_000)),
            ("1s", ms(1_000)),
            ("12ms", ms(12)),
            ("1h2m3.5s", ms(3_723_500)),
            ("59.7", ms(59_700)),
            (" 20 ", ms(20_000)),
            ("0", ms(0)),
            ("0s", ms(0)),
            ("1d", ms(86_400_000)),
            ("1µs", Some(Duration::from_micros(1))),
            ("1.0000001s", Some(Duration::from_micros(1_000_001))),
            ("1ns", Some(Duration::from_micros(1))),
            ("2023-11-14T22:13:22Z", ms(2_000)),
            ("2023-11-14T22:13:22.250Z", ms(2_250)),
            ("2023-11-15T00:13:22+02:00", ms(2_000)),
            ("2023-11-14T16:43:22-05:30", ms(2_000)),
            ("2023-11-14T22:13:10Z", ms(0)),
            ("Tue, 14 Nov 2023 22:13:22 GMT", ms(2_000)),
            ("1700000002", ms(2_000)),
            ("1700000002.5", ms(2_500)),
            ("1700000002500", ms(2_500)),
            ("1600000000", ms(0)),
            ("999999999", Some(MOST_WAIT)),
            ("99999h", Some(MOST_WAIT)),
            ("99999999999999999999999999999999999999999h", Some(MOST_WAIT)),
            ("99999999999999999999999999999999999999999", None),
            ("-1", None),
            ("-1s", None),
            ("+1", None),
            ("1e3", None),
            ("inf", None),
            ("NaN", None),
            ("", None),
            (".", None),
            (".5", None),
            ("s", None),
            ("1", ms(1_000)),
            ("1.", ms(1_000)),
            ("1 s", None),
            ("1s2", None),
            ("6m0", None),
            ("1.2.3s", None),
            ("2023-11-14", None),
            ("2023-11-14T22:13:22", None),
            ("2023-13-44T99:99:99Z", None),
            ("a few seconds", None),
            ("١s", None),
        ] {
            assert_eq!(parse_reset(text, ServerTime::at(now())), expected, "{text:?}");
        }
    }

    #[test]
    fn d1_what_the_provider_asks_for_is_waited_for() {
        for (lines, expected) in [
            (&[("retry-after-ms", "150"), ("retry-after", "1")][..], ms(150)),
            (&[("retry-after-ms", "0.5")], Some(Duration::from_micros(500))),
            (&[("retry-after-ms", "soon"), ("retry-after", "1")], ms(1_000)),
            (&[("retry-after", "1")], ms(1_000)),
            (&[("retry-after", "0.25")], ms(250)),
            (&[("retry-after", "1m30s")], ms(90_000)),
            (&[("retry-after", "Tue, 14 Nov 2023 22:13:23 GMT")], ms(3_000)),
            (&[("retry-after", "Tuesday, 14-Nov-23 22:13:23 GMT")], ms(3_000)),
            (&[("retry-after", "Tue, 14 Nov 2023 22:13:00 GMT")], None),
            (&[("retry-after", "1700000010")], Some(MOST_WAIT)),
            (&[("retry-after", "0")], None),
            (&[("retry-after", "-5")], None),
            (&[("x-ratelimit-remaining-requests", "0"), ("x-ratelimit-reset-requests", "150ms")], ms(150)),
            (
                &[
                    ("x-ratelimit-remaining-requests", "59"),
                    ("x-ratelimit-reset-requests", "6m0s"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "2s"),
                ],
                ms(2_000),
            ),
            (&[("x-ratelimit-reset-requests", "1s"), ("x-ratelimit-reset-tokens", "3s")], ms(3_000)),
            (
                &[
                    ("anthropic-ratelimit-tokens-remaining", "0"),
                    ("anthropic-ratelimit-tokens-reset", "2023-11-14T22:13:24Z"),
                ],
                ms(4_000),
            ),
            (&[("anthropic-ratelimit-output-tokens-reset", "2023-11-14T22:13:24Z")], ms(4_000)),
            (&[("x-ratelimit-remaining", "0"), ("x-ratelimit-reset", "1700000005000")], ms(5_000)),
            (
                &[
                    ("retry-after", "2"),
                    ("x-ratelimit-remaining-tokens", "0"),
                    ("x-ratelimit-reset-tokens", "9s"),
                ],
                ms(2_000),
            ),
            (&[], None),
        ] {
            assert_eq!(Hints::read(&headers(lines), now()).wait(), expected, "{lines:?}");
        }
    }

    /// Whatever this machine's clock says, a point in time is as far away as it is at the provider.
    #[test]
    fn e3_a_clock_that_is_five_minutes_off_changes_nothing() {
        for skew in [-300_i64, -1, 0, 1, 300] {
            let local = UNIX_EPOCH + Duration::from_secs(NOW.as_secs().checked_add_signed(skew).unwrap());
            let dated = |name: &'static str, value: &str| {
                let lines = [("date", "Tue, 14 Nov 2023 22:13:20 GMT"), (name, value)];
                Hints::read(&headers(&lines), local).wait()
            };
            assert_eq!(dated("retry-after", "Tue, 14 Nov 2023 22:13:22 GMT"), ms(2_000), "{skew}");
            assert_eq!(
                dated("anthropic-ratelimit-requests-reset", "2023-11-14T22:13:22Z"),
                ms(2_000),
                "{skew}"
            );
            assert_eq!(dated("x-ratelimit-reset-requests", "1700000002"), ms(2_000), "{skew}");
            assert_eq!(dated("x-ratelimit-reset-requests", "2s"), ms(2_000), "{skew}");
        }
        let unreadable = [("date", "yesterday"), ("x-ratelimit-reset-requests", "1700000002")];
        assert_eq!(
            Hints::read(&headers(&unreadable), now()).wait(),
            ms(2_000),
            "this machine's clock is left"
        );
    }

    #[test]
    fn e3_limits_that_are_not_positive_are_not_known() {
        let read = |lines: &[(&'static str, &str)]| Hints::read(&headers(lines), now());
        let all = [
            ("x-ratelimit-limit-requests", "60"),
            ("x-ratelimit-remaining-requests", "59"),
            ("x-ratelimit-reset-requests", "1s"),
        ];
        let expected = ReportedLimit { limit: Some(60), remaining: Some(59), reset_after: ms(1_000) };
        assert_eq!(read(&all).requests, Some(expected));
        for nothing in ["-1", "0", "many", ""] {
            assert_eq!(read(&[("x-ratelimit-limit-tokens", nothing)]).tokens, None, "{nothing:?}");
        }
        let exhausted =
            read(&[("x-ratelimit-limit-tokens", "0"), ("x-ratelimit-remaining-tokens", "0")]).tokens;
        assert_eq!(exhausted.map(|tokens| (tokens.limit, tokens.is_exhausted())), Some((None, true)));
        assert_eq!(read(&[("x-should-retry", "false")]).should_retry, Some(false));
        assert_eq!(read(&[("x-should-retry", "true")]).should_retry, Some(true));
        assert_eq!(read(&[("x-should-retry", "maybe")]).should_retry, None);
    }

    proptest! {
        /// Nothing that a provider may send ends in a panic, in an unbounded wait, or in a wait that is not whole microseconds.
        #[test]
        fn e3_any_text_is_read_or_not(text in "\\PC{0,40}|[0-9.hmsnuµd+-]{0,30}|[0-9]{1,50}(\\.[0-9]{0,50})?|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.Z+-]{0,20}") {
            let now = ServerTime::at(now());
            for wait in [parse_reset(&text, now), parse_retry_after(&text, now)].into_iter().flatten() {
                prop_assert!(wait <= MOST_WAIT && wait.subsec_nanos() % 1_000 == 0, "{:?}: {:?}", text, wait);
            }
            if let Ok(value) = http::HeaderValue::from_str(&text) {
                let names = ["retry-after", "retry-after-ms", "date", "x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens", "anthropic-ratelimit-tokens-reset"];
                let headers: HeaderMap = names.map(|name| (http::HeaderName::from_static(name), value.clone())).into_iter().collect();
                let wait = Hints::read(&headers, SystemTime::now()).wait();
                prop_assert!(wait.is_none_or(|wait| !wait.is_zero() && wait <= MOST_WAIT));
            }
        }

        /// What is written as Go writes it is read exactly.
        #[test]
        fn e3_durations_are_exact(hours in 0_u64..700, minutes in 0_u64..60, millis in 0_u64..60_000) {
            let expected = Some(Duration::from_millis((hours * 60 + minutes) * 60_000 + millis));
            let text = format!("{hours}h{minutes}m{}.{:03}s", millis / 1_000, millis % 1_000);
            prop_assert_eq!(parse_reset(&text, ServerTime::at(now())), expected);
        }
    }
}
