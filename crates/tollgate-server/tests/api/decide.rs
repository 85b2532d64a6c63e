//! `/v1/check`, `/v1/peek` and `/v1/checks`.

use crate::server::{self, Tollgate, steady};

/// One request and its answer; times other than 0 read `~`.
fn check(server: &Tollgate, path: &str, body: &str, expected: &str) {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{path} {body}: {}", answer.body);
    assert_eq!(answer.field("content-type"), Some("application/json"));
    assert_eq!(steady(&answer.body), expected, "{path} {body}");
}

/// What one limit answers.
fn said(limit: &str, allowed: bool, capacity: u64, remaining: u64, retry: &str, reset: &str) -> String {
    let reason = reason(allowed, limit, retry);
    format!(
        r#"{{"limit":"{limit}","allowed":{allowed},"capacity":{capacity},"remaining":{remaining},"retry_after_ms":{retry},"reset_after_ms":{reset}{reason}}}"#
    )
}

/// Why it is denied, if it is.
fn reason(allowed: bool, limit: &str, retry: &str) -> &'static str {
    match (allowed, limit, retry) {
        (true, ..) => "",
        (false, "shut", _) => r#","reason":"blocked""#,
        (false, _, "null") => r#","reason":"too_large""#,
        _ => r#","reason":"limit""#,
    }
}

fn decided(allowed: bool, binding: &str, retry: &str, limits: &[String]) -> String {
    let (limits, reason) = (limits.join(","), reason(allowed, binding, retry));
    format!(
        r#"{{"allowed":{allowed},"binding":"{binding}","retry_after_ms":{retry},"delay_ms":0,"degraded":false{reason},"limits":[{limits}]}}"#
    )
}

fn alone(allowed: bool, capacity: u64, remaining: u64, retry: &str, reset: &str, limit: &str) -> String {
    decided(allowed, limit, retry, &[said(limit, allowed, capacity, remaining, retry, reset)])
}

#[test]
fn a_check_charges_and_a_peek_does_not() {
    let server = server::start();
    let first = server.post("/v1/check", r#"{"limit":"api","key":"user:1"}"#);
    let expected = r#"{"allowed":true,"binding":"api","retry_after_ms":0,"delay_ms":0,"degraded":false,"limits":[{"limit":"api","allowed":true,"capacity":3,"remaining":2,"retry_after_ms":0,"reset_after_ms":3600000}]}"#;
    assert_eq!(first.body, expected);
    let ask = r#"{"limit":"api","key":"user:1","cost":2}"#;
    check(&server, "/v1/peek", ask, &alone(true, 3, 0, "0", "~", "api"));
    check(&server, "/v1/check", ask, &alone(true, 3, 0, "0", "~", "api"));
    check(&server, "/v1/check", ask, &alone(false, 3, 0, "~", "~", "api"));
    check(&server, "/v1/peek", ask, &alone(false, 3, 0, "~", "~", "api"));
    // No wait makes room for more than there ever is.
    let huge = r#"{"limit":"api","key":"user:1","cost":18446744073709551615}"#;
    check(&server, "/v1/check", huge, &alone(false, 3, 0, "null", "~", "api"));
    let vip = r#"{"limit":"api","key":"user:vip"}"#;
    check(&server, "/v1/check", vip, &alone(true, 30, 29, "0", "~", "api"));
}

#[test]
fn every_kind_of_limit_says_how_it_stands() {
    let server = server::start();
    let ask = |limit: &str| format!(r#"{{"limit":"{limit}","key":"user:1"}}"#);
    check(&server, "/v1/check", &ask("login"), &alone(true, 2, 1, "0", "~", "login"));
    check(&server, "/v1/peek", &ask("uploads"), &alone(true, 2, 1, "0", "~", "uploads"));
    // A lease that nobody could give back is not taken.
    for (path, body) in
        [("/v1/check", ask("uploads")), ("/v1/checks", format!(r#"{{"checks":[{}]}}"#, ask("uploads")))]
    {
        let refused = server.post(path, &body);
        assert_eq!(refused.status, 400, "{path}");
        assert!(
            refused.body.contains("`uploads` is a concurrency limit")
                && refused.body.contains("ask /v1/reserve")
        );
    }
    let unlimited = r#"{"allowed":true,"binding":"free","retry_after_ms":0,"delay_ms":0,"degraded":false,"limits":[{"limit":"free","allowed":true,"capacity":null,"remaining":null,"retry_after_ms":0,"reset_after_ms":0}]}"#;
    check(&server, "/v1/check", &ask("free"), unlimited);
    check(&server, "/v1/check", &ask("shut"), &alone(false, 0, 0, "null", "0", "shut"));
    // The second of an even flow is asked to hold back.
    check(&server, "/v1/check", &ask("even"), &alone(true, 2, 1, "0", "~", "even"));
    let second = server.post("/v1/check", &ask("even")).body;
    assert!(steady(&second).contains(r#""delay_ms":~,"#), "{second}");
    // A shadow limit lets pass, and reports what it would have done.
    check(&server, "/v1/check", &ask("watched"), &watched(0, "0", false));
    check(&server, "/v1/check", &ask("watched"), &watched(0, "~", true));
}

fn watched(remaining: u64, retry: &str, would_deny: bool) -> String {
    let reason = if would_deny { r#","reason":"shadow""# } else { "" };
    format!(
        r#"{{"allowed":true,"binding":"watched","retry_after_ms":0,"delay_ms":0,"degraded":false,"limits":[{{"limit":"watched","allowed":true,"capacity":1,"remaining":{remaining},"retry_after_ms":{retry},"reset_after_ms":~{reason},"shadow":true,"would_deny":{would_deny}}}]}}"#
    )
}

#[test]
fn several_limits_are_charged_together_or_not_at_all() {
    let server = server::start();
    let both = r#"{"charges":[{"limit":"api","key":"user:1"},{"limit":"login","key":"user:1","cost":2}]}"#;
    let (api, login) = (said("api", true, 3, 2, "0", "~"), said("login", true, 2, 0, "0", "~"));
    check(&server, "/v1/check", both, &decided(true, "login", "0", &[api, login]));
    // A limit that would have allowed says what it would have left, and keeps what it has.
    let (api, login) = (said("api", true, 3, 1, "0", "~"), said("login", false, 2, 0, "~", "~"));
    check(&server, "/v1/check", both, &decided(false, "login", "~", &[api, login]));
    let peek = r#"{"limit":"api","key":"user:1"}"#;
    check(&server, "/v1/peek", peek, &alone(true, 3, 1, "0", "~", "api"));
}

#[test]
fn a_batch_is_as_many_checks() {
    let server = server::start();
    let one = r#"{"limit":"login","key":"user:1"}"#;
    let batch = format!(r#"{{"checks":[{one},{one},{one}]}}"#);
    let results = [
        alone(true, 2, 1, "0", "~", "login"),
        alone(true, 2, 0, "0", "~", "login"),
        alone(false, 2, 0, "~", "~", "login"),
    ];
    check(&server, "/v1/checks", &batch, &format!(r#"{{"results":[{}]}}"#, results.join(",")));
    // One with a mistake in it charges nothing.
    let batch = r#"{"checks":[{"limit":"api","key":"user:1"},{"limit":"nope","key":"user:1"}]}"#;
    assert_eq!(server.post("/v1/checks", batch).status, 404);
    let peek = r#"{"limit":"api","key":"user:1"}"#;
    check(&server, "/v1/peek", peek, &alone(true, 3, 2, "0", "~", "api"));
}

/// Whichever way a key is written, it is one key; another one is another.
#[test]
fn keys_are_texts_or_parts() {
    let server = server::start();
    let same = [
        r#""ip:2001%3Adb8%3A%3A1""#,
        r#"{"namespace":"ip","key":"2001:db8::1"}"#,
        r#""\u0069p:2001%3adb8%3A%3A1""#,
    ];
    for (index, key) in same.iter().enumerate() {
        let body = format!(r#"{{"limit":"api","key":{key}}}"#);
        let left = 2 - index as u64;
        check(&server, "/v1/check", &body, &alone(true, 3, left, "0", "~", "api"));
    }
    for other in [
        r#"{"namespace":"ip","key":"2001:db8::2"}"#,
        r#"{"namespace":"ip","key":"2001:db8::1","version":"v2"}"#,
        r#"{"key":"2001:db8::1"}"#,
        r#""ip""#,
        r#""ключ:日本""#,
    ] {
        let body = format!(r#"{{"limit":"api","key":{other}}}"#);
        check(&server, "/v1/check", &body, &alone(true, 3, 2, "0", "~", "api"));
    }
}
