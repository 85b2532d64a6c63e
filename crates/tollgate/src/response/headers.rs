//! The rate-limit header fields, for every API: middleware, server and proxy.
//!
//! There are two sets. The old `X-RateLimit-*` fields have room for one limit and show the binding one. `RateLimit-Policy` and
//! `RateLimit` of the IETF draft (draft-ietf-httpapi-ratelimit-headers-10) list all limits. `Retry-After` comes with every
//! refusal that ends by waiting. A limit in shadow mode is never reported, because it never slows a client down; an unlimited one
//! is not reported either.
//!
//! Times are whole seconds, rounded up, so that waiting that long is enough. Nothing here depends on HTTP: a field is a name and
//! a value of visible ASCII.

mod fields;
mod line;

use std::time::Duration;

use tollgate_kernel::{Limit, Micros, Outcome, Strategy};

use crate::decision::binds_over;
pub(crate) use fields::HeaderFields;
use fields::write_policy;
#[cfg(feature = "http")]
pub(crate) use fields::{QuotaNumbers, quota_start};
pub(crate) use line::Line;
pub(in crate::response) use line::visible;

/// The largest integer of a structured field (RFC 9651): fifteen digits.
const MAX_INTEGER: u64 = 999_999_999_999_999;

/// One limit of a decision, as headers show it.
#[derive(Clone, Copy, Debug)]
pub struct ReportedLimit<'a> {
    /// The limit's name.
    pub name: &'a str,
    /// The limit that applied; `None` if the key is blocked.
    pub limit: Option<&'a Limit>,
    /// The cost of the charge.
    pub cost: u64,
    /// What the limit answered.
    pub outcome: Outcome,
    /// Whether the limit is in shadow mode.
    pub shadow: bool,
    /// What it counts, if not what its strategy suggests.
    pub unit: Option<Unit>,
}

impl ReportedLimit<'_> {
    /// Whether the limit can deny: a client must not slow down for a limit that never denies.
    pub(super) fn is_reported(&self) -> bool {
        !self.shadow && self.outcome != Outcome::UNLIMITED
    }

    /// Whether the limit denies the charge.
    pub(super) fn denies(&self) -> bool {
        !self.shadow && !self.outcome.allowed
    }

    /// The state of the limit without this charge, which another limit has denied.
    fn uncharged(mut self) -> Self {
        if self.outcome.allowed {
            let before = self.outcome.remaining.saturating_add(self.cost);
            self.outcome.remaining = before.min(self.outcome.capacity);
        }
        self
    }

    /// How long until more may be charged than now.
    fn more_after(&self) -> Option<Micros> {
        more_after(self.limit, &self.outcome, self.cost)
    }

    fn unit(&self) -> Unit {
        match (self.unit, self.limit.map(Limit::strategy)) {
            (Some(unit), _) => unit,
            (None, Some(Strategy::Concurrency)) => Unit::ConcurrentRequests,
            (None, _) => Unit::Requests,
        }
    }
}

/// How long until more may be charged than now.
fn more_after(limit: Option<&Limit>, outcome: &Outcome, cost: u64) -> Option<Micros> {
    match limit.filter(|_| outcome.capacity > 0) {
        Some(limit) => limit.more_after_us(outcome, cost),
        None if outcome.allowed => Some(outcome.reset_after),
        // Blocked, or a malformed key: no reset brings more.
        None => outcome.retry_after,
    }
}

/// The time for `X-RateLimit-Reset`: for a bucket the next token that makes a difference, which is `more_after`; for other
/// strategies the reset.
fn reset_after(limit: Option<&Limit>, outcome: &Outcome, more_after: Option<Micros>) -> Micros {
    match limit {
        Some(Limit::TokenBucket(_) | Limit::LeakyBucket(_)) => more_after.unwrap_or(outcome.reset_after),
        // Where the store failed there is a time to try again and no reset.
        _ => outcome.reset_after.max(outcome.retry_after.unwrap_or_default()),
    }
}

/// The unit of a limit, in the words of the draft (`qu`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Requests. The default of the draft, so it is not written.
    #[default]
    Requests,
    /// Bytes of content.
    ContentBytes,
    /// Requests at once. The default of a concurrency limit.
    ConcurrentRequests,
}

impl Unit {
    /// The draft's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Unit::Requests => "requests",
            Unit::ContentBytes => "content-bytes",
            Unit::ConcurrentRequests => "concurrent-requests",
        }
    }
}

/// A field that may be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Field {
    /// The capacity of the limit that binds.
    Limit,
    /// What is left.
    Remaining,
    /// When there is more.
    Reset,
    /// When the refused charge is worth another try.
    RetryAfter,
    /// Every limit: what it allows.
    Policy,
    /// Every limit: what is left, and when there is more.
    Quota,
}

impl Field {
    /// All of them, in the order in which they are reported.
    pub const ALL: [Field; 6] =
        [Field::Limit, Field::Remaining, Field::Reset, Field::RetryAfter, Field::Policy, Field::Quota];

    /// The field's name in lower case, as in HTTP/2.
    pub const fn name(self) -> &'static str {
        match self {
            Field::Limit => "x-ratelimit-limit",
            Field::Remaining => "x-ratelimit-remaining",
            Field::Reset => "x-ratelimit-reset",
            Field::RetryAfter => "retry-after",
            Field::Policy => "ratelimit-policy",
            Field::Quota => "ratelimit",
        }
    }
}

/// How `X-RateLimit-Reset` is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ResetAs {
    /// As seconds from now.
    #[default]
    Seconds,
    /// As a UNIX time in seconds.
    UnixTime,
}

/// Which fields are reported. `Retry-After` is reported under every format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// Whether the `X-RateLimit-*` fields are.
    pub legacy: bool,
    /// Whether `RateLimit-Policy` and `RateLimit` are.
    pub draft: bool,
    /// How `X-RateLimit-Reset` is written.
    pub reset: ResetAs,
}

impl Format {
    /// Only `Retry-After`.
    pub const fn none() -> Format {
        Format { legacy: false, draft: false, reset: ResetAs::Seconds }
    }
}

/// Both sets, with the reset in seconds from now.
impl Default for Format {
    fn default() -> Format {
        Format { legacy: true, draft: true, reset: ResetAs::Seconds }
    }
}

/// Passes each field and its value to `write`, at most once each, in the order of [`Field::ALL`]. `now` is the time since 1970.
///
/// ```
/// use tollgate::headers::{self, Format, ReportedLimit};
/// use std::time::Duration;
/// use tollgate::{Limit, Limiter};
///
/// let limit = Limit::token_bucket("10/s", 20)?;
/// let outcome = *Limiter::new(limit).check("user:42").numbers();
/// let reported = ReportedLimit { name: "api", limit: Some(&limit), cost: 1, outcome, shadow: false, unit: None };
///
/// let mut lines = Vec::new();
/// headers::render(&Format::default(), [reported].into_iter(), Duration::ZERO, |field, value| {
///     lines.push(format!("{}: {value}", field.name()));
/// });
/// assert_eq!(lines, [
///     "x-ratelimit-limit: 20",
///     "x-ratelimit-remaining: 19",
///     "x-ratelimit-reset: 1",
///     "ratelimit-policy: \"api\";q=20;w=2",
///     "ratelimit: \"api\";r=19;t=1",
/// ]);
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn render<'a>(
    format: &Format,
    limits: impl Iterator<Item = ReportedLimit<'a>> + Clone,
    now: Duration,
    mut write: impl FnMut(Field, &str),
) {
    let Some(reported) = HeaderFields::new(format, limits, now.into()) else { return };
    let mut line = Line::default();
    for (field, number) in reported.numbers() {
        line.clear();
        write(field, line.number(number).as_str());
    }
    if format.draft {
        line.clear();
        reported.write_policy(&mut line);
        write(Field::Policy, line.as_str());
        line.clear();
        reported.write_quota(&mut line);
        write(Field::Quota, line.as_str());
    }
}

/// The item of one limit in `RateLimit-Policy`, for callers that prepare it. It depends only on the limit, its name and unit, and
/// its capacity.
///
/// ```
/// use tollgate::headers::{ReportedLimit, policy_item};
/// use std::time::Duration;
/// use tollgate::Limit;
/// use tollgate::store::Outcome;
///
/// let limit = Limit::fixed_window(5, Duration::from_secs(60))?;
/// let outcome = Outcome { capacity: limit.capacity(), ..Outcome::UNLIMITED };
/// let reported = ReportedLimit { name: "login", limit: Some(&limit), cost: 1, outcome, shadow: false, unit: None };
/// assert_eq!(policy_item(&reported), "\"login\";q=5;w=60");
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn policy_item(reported: &ReportedLimit<'_>) -> String {
    let mut line = Line::default();
    write_policy(&mut line, reported);
    line.as_str().to_owned()
}

/// The binding limit, by the rule of decisions: of those that deny the longest wait, else the smallest share left.
pub(super) fn binding<'a>(reported: impl Iterator<Item = ReportedLimit<'a>>) -> Option<ReportedLimit<'a>> {
    reported.reduce(|bound, next| if binds_over(&next.outcome, &bound.outcome) { next } else { bound })
}

/// A wait for `Retry-After`: never zero, which would ask for another try at once.
pub(super) fn seconds_to_wait(wait: Micros) -> u64 {
    wait.as_secs_ceil().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Format = Format { legacy: true, draft: true, reset: ResetAs::Seconds };

    /// An answer of a limit of ten, so much of it left, with so many seconds to its reset.
    fn left(remaining: u64, reset: u64) -> Outcome {
        Outcome { capacity: 10, remaining, reset_after: Micros::from_secs(reset), ..Outcome::UNLIMITED }
    }

    /// A refusal, with so many ms to wait.
    fn denied(wait_ms: Option<u64>) -> Outcome {
        Outcome { allowed: false, retry_after: wait_ms.map(Micros::from_millis), ..left(0, 9) }
    }

    fn reported<'a>(name: &'a str, limit: &'a Limit, outcome: Outcome) -> ReportedLimit<'a> {
        ReportedLimit { name, limit: Some(limit), cost: 1, outcome, shadow: false, unit: None }
    }

    /// What is reported, in order: `x-ratelimit-limit=10 retry-after=1 …`.
    fn check(format: Format, limits: &[ReportedLimit<'_>], now_us: u64, expected: &str) {
        let mut lines = Vec::new();
        render(&format, limits.iter().copied(), Duration::from_micros(now_us), |field, value| {
            lines.push((field, format!("{}={value}", field.name())));
        });
        let position = |field| Field::ALL.iter().position(|other| *other == field);
        assert!(lines.is_sorted_by(|a, b| position(a.0) < position(b.0)), "each once, in order: {lines:?}");
        let lines: Vec<_> = lines.into_iter().map(|(_, line)| line).collect();
        assert_eq!(lines.join(" "), expected, "{format:?} {limits:#?}");
    }

    #[test]
    fn the_old_set_shows_the_limit_that_binds_and_the_draft_all() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let bucket = Limit::token_bucket("1/s", 10).unwrap();
        let held = Limit::concurrency(10, Micros::from_secs(60)).unwrap();
        let (a, b) = (|outcome| reported("a", &window, outcome), |outcome| reported("b", &window, outcome));
        let shadow = |outcome| ReportedLimit { shadow: true, ..reported("shadow", &window, outcome) };
        let blocked = ReportedLimit { limit: None, ..a(Outcome::BLOCKED) };
        let closed = Outcome { reset_after: Micros::ZERO, ..denied(Some(1_500)) };
        let full = Outcome { reset_after: Micros::ZERO, ..left(10, 0) };
        for (limits, expected) in [
            (vec![], ""),
            (vec![a(Outcome::UNLIMITED)], ""),
            (vec![shadow(denied(Some(5)))], ""),
            (
                vec![shadow(denied(None)), a(left(9, 50)), b(Outcome::UNLIMITED)],
                r#"10 9 50 - "a";q=10;w=60 "a";r=9;t=50"#,
            ),
            (
                vec![a(left(9, 50)), b(left(3, 40))],
                r#"10 3 40 - "a";q=10;w=60,"b";q=10;w=60 "a";r=9;t=50,"b";r=3;t=40"#,
            ),
            (
                vec![a(left(3, 50)), b(left(3, 40))],
                r#"10 3 50 - "a";q=10;w=60,"b";q=10;w=60 "a";r=3;t=50,"b";r=3;t=40"#,
            ),
            (
                // The other would have taken it, and has not been charged.
                vec![a(denied(Some(1))), b(left(0, 40)), ReportedLimit { cost: 4, ..b(left(8, 30)) }],
                r#"10 0 9 1 "a";q=10;w=60,"b";q=10;w=60,"b";q=10;w=60 "a";r=0;t=1,"b";r=1;t=40,"b";r=10;t=30"#,
            ),
            (
                vec![a(denied(Some(2_000))), b(denied(Some(2_001)))],
                r#"10 0 9 3 "a";q=10;w=60,"b";q=10;w=60 "a";r=0;t=2,"b";r=0;t=3"#,
            ),
            // One of the two never fits, so no wait is enough.
            (
                vec![a(denied(Some(2_000))), b(denied(None))],
                r#"10 0 9 - "a";q=10;w=60,"b";q=10;w=60 "a";r=0;t=2,"b";r=0;t=9"#,
            ),
            // The wait is over within a µs, and still the caller has to wait.
            (vec![a(denied(Some(0)))], r#"10 0 9 1 "a";q=10;w=60 "a";r=0;t=0"#),
            (vec![blocked], r#"0 0 0 - "a";q=0 "a";r=0"#),
            // A malformed key has a limit but no counters.
            (vec![a(Outcome::BLOCKED)], r#"0 0 0 - "a";q=0 "a";r=0"#),
            (vec![reported("a", &bucket, Outcome::BLOCKED)], r#"0 0 0 - "a";q=0 "a";r=0"#),
            // The store failed: closed, then open.
            (vec![a(closed)], r#"10 0 2 2 "a";q=10;w=60 "a";r=0;t=2"#),
            (vec![reported("a", &bucket, closed)], r#"10 0 2 2 "a";q=10;w=10 "a";r=0;t=2"#),
            (vec![reported("a", &bucket, full)], r#"10 10 0 - "a";q=10;w=10 "a";r=10;t=0"#),
            (vec![ReportedLimit { limit: None, ..a(left(4, 7)) }], r#"10 4 7 - "a";q=10 "a";r=4;t=7"#),
            (vec![reported("a", &bucket, denied(None))], r#"10 0 9 - "a";q=10;w=10 "a";r=0"#),
            // Units.
            (
                vec![reported("a", &held, left(4, 7))],
                r#"10 4 7 - "a";q=10;qu="concurrent-requests" "a";r=4;t=7"#,
            ),
            (
                vec![ReportedLimit { unit: Some(Unit::Requests), ..reported("a", &held, left(4, 7)) }],
                r#"10 4 7 - "a";q=10 "a";r=4;t=7"#,
            ),
            (
                vec![ReportedLimit { unit: Some(Unit::ContentBytes), ..a(left(4, 7)) }],
                r#"10 4 7 - "a";q=10;qu="content-bytes";w=60 "a";r=4;t=7"#,
            ),
            // Structured fields have fifteen digits; the old ones are written as they are.
            (
                vec![a(Outcome { capacity: u64::MAX, remaining: u64::MAX - 1, ..left(0, 7) })],
                concat!(
                    "18446744073709551615 18446744073709551614 7 - ",
                    r#""a";q=999999999999999;w=60 "a";r=999999999999999;t=7"#
                ),
            ),
            (
                vec![reported("a\"\r\nb", &window, left(4, 7))],
                r#"10 4 7 - "a___b";q=10;w=60 "a___b";r=4;t=7"#,
            ),
        ] {
            let expected = spelled(expected);
            check(BOTH, &limits, 0, &expected);
            if let [reported] = limits[..] {
                let policy = format!("ratelimit-policy={}", policy_item(&reported));
                assert!(expected.is_empty() || expected.split(' ').any(|line| line == policy), "{policy}");
            }
        }
    }

    /// From values in the order of [`Field::ALL`], with `-` for a field that is missing and no space after a comma.
    fn spelled(values: &str) -> String {
        let fields = Field::ALL.iter().zip(values.split(' ')).filter(|(_, value)| !["", "-"].contains(value));
        let lines: Vec<_> = fields.map(|(field, value)| format!("{}={value}", field.name())).collect();
        lines.join(" ").replace(',', ", ")
    }

    #[test]
    fn a_format_chooses_the_fields_and_never_hides_the_wait() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let (reported, refused) =
            (reported("a", &window, left(9, 50)), reported("a", &window, denied(Some(3_000))));
        let legacy = Format { draft: false, ..Format::default() };
        let draft = Format { legacy: false, ..Format::default() };
        let unix = Format { reset: ResetAs::UnixTime, ..legacy };
        for (format, now_us, limits, expected) in [
            (Format::none(), 0, reported, ""),
            (Format::none(), 0, refused, "retry-after=3"),
            (legacy, 0, reported, "x-ratelimit-limit=10 x-ratelimit-remaining=9 x-ratelimit-reset=50"),
            (draft, 0, reported, r#"ratelimit-policy="a";q=10;w=60 ratelimit="a";r=9;t=50"#),
            (draft, 0, refused, r#"retry-after=3 ratelimit-policy="a";q=10;w=60 ratelimit="a";r=0;t=3"#),
            (
                unix,
                1_700_000_000_000_001,
                reported,
                "x-ratelimit-limit=10 x-ratelimit-remaining=9 x-ratelimit-reset=1700000051",
            ),
            (
                unix,
                1_700_000_000_000_000,
                reported,
                "x-ratelimit-limit=10 x-ratelimit-remaining=9 x-ratelimit-reset=1700000050",
            ),
            (
                unix,
                u64::MAX,
                reported,
                "x-ratelimit-limit=10 x-ratelimit-remaining=9 x-ratelimit-reset=18446744073710",
            ),
        ] {
            check(format, &[limits], now_us, expected);
        }
        assert_eq!(Format::default(), BOTH);
        assert_eq!(Unit::default().name(), "requests");
    }

    #[test]
    fn a_list_may_be_long() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let names: Vec<String> = (0..30).map(|index| format!("limit-{index:02}{}", "x".repeat(50))).collect();
        let all: Vec<_> = names.iter().map(|name| reported(name, &window, left(9, 50))).collect();
        let listed = |item: &dyn Fn(&String) -> String| names.iter().map(item).collect::<Vec<_>>().join(", ");
        let policy = listed(&|name| format!("\"{name}\";q=10;w=60"));
        let quota = listed(&|name| format!("\"{name}\";r=9;t=50"));
        let draft = Format { legacy: false, ..BOTH };
        check(draft, &all, 0, &format!("ratelimit-policy={policy} ratelimit={quota}"));
    }
}
