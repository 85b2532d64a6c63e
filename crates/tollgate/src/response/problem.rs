//! The body of a refusal: problem details (RFC 9457) of the types that the IETF draft registers.
//!
//! A refusal names the limits that deny and says what each allows and when to retry. It never contains a key. Names are reduced
//! to visible characters, so the text needs no escaping and `body` writes JSON by hand.

use std::fmt::Write as _;

use tollgate_kernel::Micros;

use super::headers::{ReportedLimit, binding, seconds_to_wait, visible};
use crate::decision::Decision;
use crate::outcome::{Outcome, Source};

/// The media type of a body.
pub const CONTENT_TYPE: &str = "application/problem+json";

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A limit denies it.
    QuotaExceeded,
    /// The store failed, and nothing denies it but limits that are closed then.
    ReducedCapacity,
    /// It has no key: its key is missing or malformed.
    NoKey,
}

impl Reason {
    /// All of them, in the order of the documentation.
    pub const ALL: [Reason; 3] = [Reason::QuotaExceeded, Reason::ReducedCapacity, Reason::NoKey];

    /// Why a decision is a refusal; `None` if it is none.
    ///
    /// ```
    /// use tollgate::problem::Reason;
    /// use tollgate::{Charge, Limit, Tollgate};
    ///
    /// let gate = Tollgate::builder().limit("api", Limit::token_bucket("1/h", 1)?).build()?;
    /// let api = gate.local("api")?;
    /// let charge = |key| api.charge_all(&[Charge::new("api", key)]).map(|decision| Reason::of(&decision));
    /// assert_eq!(charge("user:42")?, None);
    /// assert_eq!(charge("user:42")?, Some(Reason::QuotaExceeded));
    /// assert_eq!(charge("")?, Some(Reason::NoKey));
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn of(decision: &Decision) -> Option<Reason> {
        let denying = || decision.outcomes().iter().filter(|outcome| !outcome.is_allowed());
        let is_closed =
            |outcome: &Outcome| outcome.source() == Source::FallbackClosed && outcome.retry_after().is_some();
        if decision.is_allowed() {
            None
        } else if denying().any(|outcome| outcome.source() == Source::Malformed) {
            Some(Reason::NoKey)
        // A cost that can never fit is denied whether the store answers or not.
        } else if denying().all(is_closed) {
            Some(Reason::ReducedCapacity)
        } else {
            Some(Reason::QuotaExceeded)
        }
    }

    /// The HTTP status.
    pub const fn status(self) -> u16 {
        match self {
            Reason::QuotaExceeded | Reason::NoKey => 429,
            Reason::ReducedCapacity => 503,
        }
    }

    /// The problem's type, a URI.
    pub const fn kind(self) -> &'static str {
        match self {
            Reason::QuotaExceeded => "https://iana.org/assignments/http-problem-types#quota-exceeded",
            Reason::ReducedCapacity => {
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
            }
            Reason::NoKey => "about:blank",
        }
    }

    /// The problem's title: a summary that is the same every time.
    pub const fn title(self) -> &'static str {
        match self {
            Reason::QuotaExceeded => "Quota exceeded",
            Reason::ReducedCapacity => "Temporarily reduced capacity",
            // What about:blank prescribes: the phrase of the status.
            Reason::NoKey => "Too Many Requests",
        }
    }
}

/// The body of a refusal.
///
/// ```
/// use tollgate::headers::ReportedLimit;
/// use tollgate::problem::{Reason, body};
/// use tollgate::{Limit, Limiter};
///
/// let limit = Limit::token_bucket("1/h", 1)?;
/// let limiter = Limiter::new(limit);
/// assert!(limiter.check("user:42").is_allowed());
/// let outcome = *limiter.charge("user:42", 2)?.numbers();
/// let reported = ReportedLimit { name: "api", limit: Some(&limit), cost: 2, outcome, shadow: false, unit: None };
/// assert_eq!(
///     body(Reason::QuotaExceeded, [reported].into_iter()),
///     concat!(
///         r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded","#,
///         r#""status":429,"detail":"api allows 1/h, bursts of 1; a cost of 2 can never fit","#,
///         r#""violated-policies":["api"]}"#,
///     ),
/// );
/// # Ok::<(), tollgate::Error>(())
/// ```
pub fn body<'a>(reason: Reason, limits: impl Iterator<Item = ReportedLimit<'a>> + Clone) -> String {
    body_of(reason.status(), reason, limits)
}

/// The same for an answer with another status than [`Reason::status`].
pub fn body_of<'a>(
    status: u16,
    reason: Reason,
    limits: impl Iterator<Item = ReportedLimit<'a>> + Clone,
) -> String {
    let names: Vec<_> = denying(limits.clone()).map(|limit| format!("\"{}\"", visible(limit.name))).collect();
    format!(
        r#"{{"type":"{}","title":"{}","status":{},"detail":"{}","violated-policies":[{}]}}"#,
        reason.kind(),
        reason.title(),
        status,
        detail(reason, limits),
        names.join(","),
    )
}

/// The explanation, in visible ASCII without quotes or backslashes.
pub(super) fn detail<'a>(reason: Reason, limits: impl Iterator<Item = ReportedLimit<'a>> + Clone) -> String {
    let mut text = String::new();
    match reason {
        Reason::QuotaExceeded => {
            for limit in denying(limits) {
                text.push_str(if text.is_empty() { "" } else { ". " });
                text.push_str(&violation(&limit));
            }
        }
        Reason::ReducedCapacity => {
            text.push_str("the counters cannot be reached at the moment");
            if let Some(wait) = longest_wait(limits) {
                push_wait(&mut text, wait);
            }
        }
        Reason::NoKey => text.push_str("the request has no key, or a malformed one"),
    }
    text
}

/// The explanation of one limit that denies.
pub(super) fn violation(reported: &ReportedLimit<'_>) -> String {
    let mut text = visible(reported.name).into_owned();
    match reported.limit.filter(|_| reported.outcome.capacity > 0) {
        Some(limit) => _ = write!(text, " allows {limit}"),
        None => text.push_str(" lets nothing through"),
    }
    match reported.outcome.retry_after {
        Some(wait) => push_wait(&mut text, wait),
        None if reported.outcome.capacity > 0 => {
            _ = write!(text, "; a cost of {} can never fit", reported.cost)
        }
        None => {}
    }
    text
}

fn push_wait(text: &mut String, wait: Micros) {
    _ = write!(text, "; retry after {} s", seconds_to_wait(wait));
}

/// The limits that deny.
pub(super) fn denying<'a>(
    limits: impl Iterator<Item = ReportedLimit<'a>>,
) -> impl Iterator<Item = ReportedLimit<'a>> {
    limits.filter(ReportedLimit::denies)
}

/// How long to wait before all limits that deny now admit the charge; `None` if one of them never does.
pub(crate) fn longest_wait<'a>(limits: impl Iterator<Item = ReportedLimit<'a>>) -> Option<Micros> {
    binding(denying(limits))?.outcome.retry_after
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Limit, Outcome};

    use super::*;

    /// A refusal of a limit of ten, with so many ms to wait.
    fn denied(wait_ms: Option<u64>) -> Outcome {
        Outcome { capacity: 10, retry_after: wait_ms.map(Micros::from_millis), ..Outcome::BLOCKED }
    }

    const ALLOWED: Outcome = Outcome { capacity: 10, remaining: 9, ..Outcome::UNLIMITED };

    #[test]
    fn the_reason_is_what_all_that_deny_have_in_common() {
        let (wait, never) = (denied(Some(1)), denied(None));
        let (store, closed, malformed) = (Source::Store, Source::FallbackClosed, Source::Malformed);
        for (answers, reason) in [
            (vec![(ALLOWED, store, false)], None),
            (vec![(wait, store, true)], None),
            (vec![(wait, store, false)], Some(Reason::QuotaExceeded)),
            (vec![(Outcome::BLOCKED, Source::Blocked, false)], Some(Reason::QuotaExceeded)),
            (vec![(wait, closed, false)], Some(Reason::ReducedCapacity)),
            (vec![(wait, closed, false), (ALLOWED, store, false)], Some(Reason::ReducedCapacity)),
            (vec![(wait, closed, false), (wait, store, true)], Some(Reason::ReducedCapacity)),
            (vec![(wait, closed, false), (wait, store, false)], Some(Reason::QuotaExceeded)),
            (vec![(never, closed, false)], Some(Reason::QuotaExceeded)),
            (vec![(wait, Source::FallbackLocal, false)], Some(Reason::QuotaExceeded)),
            (vec![(Outcome::BLOCKED, malformed, false), (wait, store, false)], Some(Reason::NoKey)),
        ] {
            let limit =
                |&(outcome, source, shadow)| crate::Outcome::new("a", outcome, source).shadowed(shadow);
            let decision = Decision::new(answers.iter().map(limit).collect());
            assert_eq!(Reason::of(&decision), reason, "{answers:?}");
        }
    }

    #[test]
    fn a_body_says_who_denies_and_when_to_come_back() {
        let window = Limit::fixed_window(10, Micros::from_secs(60)).unwrap();
        let reported = |name, outcome| ReportedLimit {
            name,
            limit: Some(&window),
            cost: 11,
            outcome,
            shadow: false,
            unit: None,
        };
        let watching = ReportedLimit { shadow: true, ..reported("watching", denied(None)) };
        let shut = ReportedLimit { limit: None, ..reported("shut", Outcome::BLOCKED) };
        let no_room = Outcome { retry_after: Some(Micros::from_secs(1)), ..Outcome::BLOCKED };
        let quota = r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded","status":429,"#;
        let reduced = r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","title":"Temporarily reduced capacity","status":503,"#;
        let blank = r#"{"type":"about:blank","title":"Too Many Requests","status":429,"#;
        for (reason, limits, head, rest) in [
            (
                Reason::QuotaExceeded,
                vec![reported("login", denied(Some(2_500))), reported("free", ALLOWED), watching],
                quota,
                r#""detail":"login allows 10 per 1m window; retry after 3 s","violated-policies":["login"]}"#,
            ),
            (
                Reason::QuotaExceeded,
                vec![reported("a", denied(Some(0))), reported("b", denied(None)), shut],
                quota,
                concat!(
                    r#""detail":"a allows 10 per 1m window; retry after 1 s. "#,
                    r#"b allows 10 per 1m window; a cost of 11 can never fit. "#,
                    r#"shut lets nothing through","violated-policies":["a","b","shut"]}"#
                ),
            ),
            (
                Reason::QuotaExceeded,
                vec![reported("a", no_room)],
                quota,
                r#""detail":"a lets nothing through; retry after 1 s","violated-policies":["a"]}"#,
            ),
            (
                Reason::QuotaExceeded,
                vec![reported("a\",\n\\é", denied(Some(1)))],
                quota,
                r#""detail":"a_,___ allows 10 per 1m window; retry after 1 s","violated-policies":["a_,___"]}"#,
            ),
            (
                Reason::ReducedCapacity,
                vec![reported("a", denied(Some(100))), reported("b", denied(Some(1_100)))],
                reduced,
                r#""detail":"the counters cannot be reached at the moment; retry after 2 s","violated-policies":["a","b"]}"#,
            ),
            (
                Reason::ReducedCapacity,
                vec![],
                reduced,
                r#""detail":"the counters cannot be reached at the moment","violated-policies":[]}"#,
            ),
            (
                Reason::NoKey,
                vec![reported("a", Outcome::BLOCKED)],
                blank,
                r#""detail":"the request has no key, or a malformed one","violated-policies":["a"]}"#,
            ),
        ] {
            assert_eq!(body(reason, limits.into_iter()), format!("{head}{rest}"));
            assert!(Reason::ALL.contains(&reason));
        }
    }
}
