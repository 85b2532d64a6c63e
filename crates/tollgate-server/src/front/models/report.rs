//! The provider's own limit headers, filled with the gateway's numbers.

use std::time::{Duration, SystemTime};

use http::header::RETRY_AFTER;
use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_llm::{Counts, Standing};

/// Beyond this, SDKs of OpenAI do not retry at all and those of Anthropic sleep for as long as the hint says.
const LONGEST_HINT: Duration = Duration::from_secs(120);

/// Says when to come back, in both forms that SDKs read. A wait that SDKs misread is none to retry after.
pub(super) fn set_hint(headers: &mut HeaderMap, wait: Duration) {
    // Rounded up: who comes at that very moment must find room.
    let ms = wait.as_micros().div_ceil(1_000).max(1);
    let mut set = |name: HeaderName, value: String| {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    };
    set(RETRY_AFTER, ms.div_ceil(1_000).to_string());
    set(HeaderName::from_static("retry-after-ms"), ms.to_string());
    if wait > LONGEST_HINT {
        set(HeaderName::from_static("x-should-retry"), "false".to_owned());
    }
}

/// Sets the limit headers of a provider's answer, in place of those that came with it.
pub(super) fn set_limits(headers: &mut HeaderMap, standing: &[Standing], is_anthropic: bool) {
    let ours = if is_anthropic { "anthropic-ratelimit-" } else { "x-ratelimit-" };
    let theirs: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with(ours)).cloned().collect();
    if !standing.is_empty() {
        theirs.into_iter().for_each(|name| drop(headers.remove(name)));
    }
    let kinds = [
        ("requests", Counts::Requests),
        ("tokens", Counts::Tokens),
        ("input-tokens", Counts::InputTokens),
        ("output-tokens", Counts::OutputTokens),
    ];
    for (name, counts) in kinds {
        let of_kind = standing.iter().filter(|one| one.counts == counts);
        // The tightest: of two limits on the same, the one with the smaller share left.
        let share = |one: &&Standing| u128::from(one.remaining) * 1_000_000 / u128::from(one.limit.max(1));
        let Some(one) = of_kind.min_by_key(share) else { continue };
        let (limit, remaining) = (one.limit.to_string(), one.remaining.to_string());
        let values = match is_anthropic {
            true => [("limit", limit), ("remaining", remaining), ("reset", instant(one.reset_after))],
            false => [("limit", limit), ("remaining", remaining), ("reset", go_duration(one.reset_after))],
        };
        for (field, value) in values {
            let header = match is_anthropic {
                true => format!("{ours}{name}-{field}"),
                false => format!("{ours}{field}-{name}"),
            };
            if let (Ok(header), Ok(value)) = (HeaderName::try_from(header), HeaderValue::try_from(value)) {
                headers.insert(header, value);
            }
        }
    }
}

/// A moment from now in RFC 3339, rounded up to a second.
fn instant(after: Duration) -> String {
    timestamp(SystemTime::now() + after + Duration::from_millis(999), false)
}

/// A moment in RFC 3339 and UTC.
pub(super) fn timestamp(at: SystemTime, has_micros: bool) -> String {
    let Ok(since) = at.duration_since(SystemTime::UNIX_EPOCH) else { return String::new() };
    let micros = if has_micros { since.as_micros() } else { u128::from(since.as_secs()) * 1_000_000 };
    let at = i64::try_from(micros).ok().and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok());
    at.map(|at| at.to_string()).unwrap_or_default()
}

/// As Go writes durations, and OpenAI resets: `12ms`, `1.5s`, `6m0s`.
fn go_duration(duration: Duration) -> String {
    let ms = duration.as_micros().div_ceil(1_000);
    let (minutes, rest) = (ms / 60_000, ms % 60_000);
    let seconds = match rest % 1_000 {
        0 => format!("{}s", rest / 1_000),
        ms => format!("{}.{}s", rest / 1_000, format!("{ms:03}").trim_end_matches('0')),
    };
    match minutes {
        0 if rest < 1_000 => format!("{rest}ms"),
        0 => seconds,
        1..60 => format!("{minutes}m{seconds}"),
        _ => format!("{}h{}m{seconds}", minutes / 60, minutes % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_the_provider_writes_them() {
        for (ms, expected) in [
            (0, "0ms"),
            (12, "12ms"),
            (1_000, "1s"),
            (1_500, "1.5s"),
            (59_007, "59.007s"),
            (360_000, "6m0s"),
            (3_723_500, "1h2m3.5s"),
        ] {
            assert_eq!(go_duration(Duration::from_millis(ms)), expected);
        }
        assert_eq!(go_duration(Duration::from_micros(1)), "1ms", "rounded up");
    }

    #[test]
    fn the_tightest_limit_of_a_kind_is_shown_in_either_dialect() {
        let one = |counts, limit, remaining| Standing {
            counts,
            limit,
            remaining,
            reset_after: Duration::from_secs(2),
        };
        let standing =
            [one(Counts::Requests, 500, 499), one(Counts::Requests, 10, 1), one(Counts::Tokens, 1_000, 0)];
        let mut headers = HeaderMap::new();
        headers.insert("x-ratelimit-remaining-tokens_usage_based", HeaderValue::from_static("5"));
        set_limits(&mut headers, &standing, false);
        assert_eq!(headers["x-ratelimit-limit-requests"], "10");
        assert_eq!(headers["x-ratelimit-remaining-tokens"], "0");
        assert_eq!(headers["x-ratelimit-reset-tokens"], "2s");
        assert_eq!(headers.len(), 6, "{headers:?}");
        let mut headers = HeaderMap::new();
        set_limits(&mut headers, &standing, true);
        assert_eq!(headers["anthropic-ratelimit-requests-remaining"], "1");
        assert!(headers["anthropic-ratelimit-tokens-reset"].to_str().unwrap().ends_with('Z'));
    }
}
