//! Why a provider did not answer a call, and what that means for another attempt.
//!
//! | status | code or type in the body | is |
//! |---|---|---|
//! | any | `insufficient_quota`, `credit_balance_exhausted`, `organization_spend_limit_exceeded`, `project_spend_limit_exceeded`, `organization_usage_limit_exceeded`, `enforced_spend_limit_reached`, `billing_error` | billing |
//! | 402 | | billing |
//! | 429 | | limited |
//! | 529, 503 | | overloaded |
//! | 200, in a stream | `overloaded_error` | overloaded |
//! | 200, in a stream | `rate_limit_error`, `rate_limit_exceeded` | limited |
//! | 408, 409, other 5xx | | failed |
//! | other 4xx | | refused |
//!
//! Codes are read from the fields of the error alone. Its message may quote what the caller sent, and a caller must not be able to choose how its
//! refusal is understood.

use serde::Deserialize;

/// The longest body that is looked into.
const MOST_BYTES: usize = 64 * 1024;

/// Refusals that no waiting mends: somebody has to pay or to raise a budget.
const BILLING: [&str; 7] = [
    "insufficient_quota",
    "credit_balance_exhausted",
    "organization_spend_limit_exceeded",
    "project_spend_limit_exceeded",
    "organization_usage_limit_exceeded",
    "enforced_spend_limit_reached",
    "billing_error",
];

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// A limit of the provider is used up. The call fits later, and other keys of the same quota group are used up too.
    Limited,
    /// The account cannot pay. No waiting mends it, and no limit is used up.
    Billing,
    /// The provider itself is overloaded. This says nothing about the caller's limits.
    Overloaded,
    /// The provider failed, or the call may have run.
    Failed,
    /// The call itself is wrong: it would be refused again.
    Refused,
}

impl Failure {
    /// Whether another attempt may succeed.
    pub const fn may_retry(self) -> bool {
        match self {
            Failure::Limited | Failure::Overloaded | Failure::Failed => true,
            Failure::Billing | Failure::Refused => false,
        }
    }

    /// Whether it proves that the call did not run, so that it used no tokens. `status` is that of the answer.
    pub const fn proves_unused(self, status: u16) -> bool {
        match self {
            Failure::Limited | Failure::Billing | Failure::Refused => true,
            // A 503 may be of a proxy between, behind which the call goes on.
            Failure::Overloaded => status != 503,
            Failure::Failed => false,
        }
    }

    /// Its name in metrics and in the trail.
    pub const fn name(self) -> &'static str {
        match self {
            Failure::Limited => "limited",
            Failure::Billing => "billing",
            Failure::Overloaded => "overloaded",
            Failure::Failed => "failed",
            Failure::Refused => "refused",
        }
    }
}

/// What an answer that is not a success means.
///
/// ```
/// use tollgate_llm::provider::{Failure, classify};
///
/// let body = br#"{"error":{"message":"You exceeded your current quota","type":"insufficient_quota","code":"insufficient_quota"}}"#;
/// assert_eq!(classify(429, body), Failure::Billing);
/// assert_eq!(classify(429, b"slow down"), Failure::Limited);
/// assert_eq!(classify(529, b""), Failure::Overloaded);
/// ```
pub fn classify(status: u16, body: &[u8]) -> Failure {
    if status == 402 || codes(body).iter().any(|code| BILLING.contains(&code.as_str())) {
        return Failure::Billing;
    }
    match status {
        429 => Failure::Limited,
        503 | 529 => Failure::Overloaded,
        408 | 409 => Failure::Failed,
        400..=499 => Failure::Refused,
        _ => Failure::Failed,
    }
}

/// What an error means that came as an event of a stream, after a status of 200. `data` is the event's data.
pub fn classify_event(data: &[u8]) -> Failure {
    let codes = codes(data);
    let has = |wanted: &[&str]| codes.iter().any(|code| wanted.contains(&code.as_str()));
    if has(&BILLING) {
        return Failure::Billing;
    }
    if has(&["rate_limit_error", "rate_limit_exceeded", "slow_down"]) {
        return Failure::Limited;
    }
    if has(&["overloaded_error", "server_overloaded", "overloaded"]) {
        return Failure::Overloaded;
    }
    match has(&[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
    ]) {
        true => Failure::Refused,
        false => Failure::Failed,
    }
}

/// The error of either provider. Values may be of any type, because proxies and other providers fill them as they like.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    error: Option<serde_json::Value>,
    #[serde(default)]
    response: Option<Box<Answer>>,
    #[serde(default)]
    code: Option<serde_json::Value>,
}

/// The codes and types of an error.
fn codes(body: &[u8]) -> Vec<String> {
    if body.len() > MOST_BYTES {
        return Vec::new();
    }
    let Ok(answer) = serde_json::from_slice::<Answer>(body) else { return Vec::new() };
    // The Responses API has its error inside the response that failed.
    let inner = answer.response.map(|response| *response);
    let answers = [Some(Answer { response: None, ..answer }), inner];
    let mut found = Vec::new();
    for Answer { error, code, .. } in answers.into_iter().flatten() {
        let error = error.unwrap_or_default();
        let details = &error["details"];
        let fields = [&error["code"], &error["type"], &details["error_code"], &details["code"]];
        found.extend(
            fields.into_iter().chain(code.as_ref()).filter_map(|field| Some(field.as_str()?.to_owned())),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn d2_what_is_not_paid_for_is_never_tried_again() {
        for code in BILLING {
            for body in [
                format!(r#"{{"error":{{"message":"m","type":"{code}","param":null,"code":null}}}}"#),
                format!(r#"{{"error":{{"message":"m","type":"requests","code":"{code}"}}}}"#),
                format!(
                    r#"{{"type":"error","error":{{"type":"rate_limit_error","message":"m","details":{{"error_code":"{code}"}}}}}}"#
                ),
            ] {
                for status in [400, 403, 429] {
                    let failure = classify(status, body.as_bytes());
                    assert_eq!(failure, Failure::Billing, "{status}: {body}");
                    assert!(!failure.may_retry() && failure.proves_unused(status));
                }
                assert_eq!(classify_event(body.as_bytes()), Failure::Billing, "{body}");
            }
        }
        assert_eq!(classify(402, b""), Failure::Billing);
    }

    #[test]
    fn d2_only_the_fields_of_an_error_count() {
        for body in [
            r#"{"error":{"message":"insufficient_quota","type":"requests","code":"rate_limit_exceeded"}}"#,
            r#"{"error":{"message":"ramp","type":"requests","code":"slow_down"}}"#,
            r#"{"error":"insufficient_quota"}"#,
            r#"{"error":{"code":429,"type":["insufficient_quota"]}}"#,
            "insufficient_quota",
            "",
            "null",
            "[]",
        ] {
            assert_eq!(classify(429, body.as_bytes()), Failure::Limited, "{body}");
        }
    }

    #[test]
    fn d3_an_overload_is_not_a_limit() {
        for (status, expected) in [
            (529, Failure::Overloaded),
            (503, Failure::Overloaded),
            (500, Failure::Failed),
            (502, Failure::Failed),
            (504, Failure::Failed),
            (408, Failure::Failed),
            (409, Failure::Failed),
            (400, Failure::Refused),
            (401, Failure::Refused),
            (404, Failure::Refused),
            (413, Failure::Refused),
            (422, Failure::Refused),
            (302, Failure::Failed),
            (0, Failure::Failed),
        ] {
            assert_eq!(classify(status, b"{}"), expected, "{status}");
        }
        assert!(Failure::Overloaded.proves_unused(529), "it was not begun");
        assert!(!Failure::Overloaded.proves_unused(503), "a proxy may say so while the call runs");
        for (data, expected) in [
            (
                r#"{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}"#,
                Failure::Overloaded,
            ),
            (r#"{"type":"error","error":{"type":"rate_limit_error","message":"m"}}"#, Failure::Limited),
            (r#"{"error":{"message":"m","type":"server_error","code":null}}"#, Failure::Failed),
            (
                r#"{"type":"response.failed","response":{"error":{"code":"rate_limit_exceeded","message":"m"}}}"#,
                Failure::Limited,
            ),
            (r#"{"type":"error","code":"insufficient_quota","message":"m"}"#, Failure::Billing),
            (r#"{"type":"error","error":{"type":"invalid_request_error"}}"#, Failure::Refused),
            ("not json", Failure::Failed),
        ] {
            assert_eq!(classify_event(data.as_bytes()), expected, "{data}");
        }
    }

    proptest! {
        #[test]
        fn any_body_is_classified(status: u16, body in proptest::collection::vec(any::<u8>(), 0..200), text in "\\PC{0,60}") {
            let of_bytes = classify(status, &body);
            prop_assert_eq!(of_bytes == Failure::Limited, status == 429);
            let quoted = serde_json::json!({ "error": { "message": text } }).to_string();
            prop_assert_eq!(classify(status, quoted.as_bytes()) == Failure::Billing, status == 402);
        }
    }
}
