//! Overrides at run time over HTTP and from the command line: set, listed, removed, and refused with what to write instead.

use serde_json::{Value, json};

use crate::server::{self, POLICY, Tollgate};

fn set(server: &Tollgate, body: &Value) -> (u16, Value) {
    let answer = server.post("/v1/overrides", &body.to_string());
    (answer.status, serde_json::from_str(&answer.body).expect("JSON"))
}

fn is_allowed(server: &Tollgate, limit: &str, key: &str) -> bool {
    let asked = json!({ "limit": limit, "key": key }).to_string();
    server.post("/v1/check", &asked).body.starts_with("{\"allowed\":true")
}

#[test]
fn a_key_is_raised_blocked_and_as_before_and_keeps_what_it_consumed() {
    let server = server::start();
    assert!(is_allowed(&server, "login", "user:1") && is_allowed(&server, "login", "user:1"));
    assert!(!is_allowed(&server, "login", "user:1"));
    let raise = json!({ "limit": "login", "key": "user:1", "override": { "limit": 3 }, "for_ms": 3_600_000,
        "reason": "ticket 7", "by": "dana" });
    let (status, shown) = set(&server, &raise);
    assert_eq!(status, 200, "{shown}");
    assert_eq!(
        (&shown["rule"], &shown["instead_of"]),
        (&json!("3 per 1h window"), &json!("2 per 1h window"))
    );
    assert_eq!((&shown["kept"], &shown["survives_restart"]), (&json!("memory"), &json!(false)));
    assert!(is_allowed(&server, "login", "user:1"), "one more at once");
    assert!(!is_allowed(&server, "login", "user:1"), "and no two: what it consumed stays consumed");

    let (status, _) =
        set(&server, &json!({ "limit": "api", "key": "user:1", "override": { "blocked": true } }));
    assert_eq!(status, 200);
    assert!(!is_allowed(&server, "api", "user:1") && is_allowed(&server, "api", "user:2"));
    let (_, over_config) =
        set(&server, &json!({ "limit": "api", "key": "user:vip", "override": { "unlimited": true } }));
    assert_eq!(over_config["instead_of"], "1/h, bursts of 30", "that of the config");
    assert!((0..40).all(|_| is_allowed(&server, "api", "user:vip")));

    let list: Value = serde_json::from_str(&server.get("/v1/overrides").body).expect("JSON");
    let shown: Vec<String> = list["overrides"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|one| format!("{} {} {} {}", one["limit"], one["key"], one["rule"], one["by"]).replace('"', ""))
        .collect();
    assert_eq!(shown.len(), 3, "{list}");
    assert!(shown.contains(&"login user:1 3 per 1h window dana".to_owned()), "{shown:?}");

    let remove = r#"{"limit":"api","key":"user:1"}"#;
    assert_eq!(
        server.post("/v1/overrides/remove", remove).body,
        r#"{"removed":true,"rule":"1/h, bursts of 3"}"#
    );
    assert_eq!(
        server.post("/v1/overrides/remove", remove).body,
        r#"{"removed":false,"rule":"1/h, bursts of 3"}"#
    );
    assert!(is_allowed(&server, "api", "user:1"));
    server.post("/v1/overrides/remove", r#"{"limit":"api","key":"user:vip"}"#);
    let list: Value = serde_json::from_str(&server.get("/v1/overrides").body).expect("JSON");
    let of_config =
        list["overrides"].as_array().expect("a list").iter().find(|one| one["source"] == "config");
    assert_eq!(of_config.map(|one| &one["rule"]), Some(&json!("1/h, bursts of 30")), "{list}");

    // A config that is read again has it under what is set.
    server.reload(&POLICY.replace("limit = 2\nwindow = \"1h\"", "limit = 1\nwindow = \"1h\""));
    let status = server.get("/v1/status?limit=login&key=user:1").body;
    assert!(status.contains("\"capacity\":3"), "{status}");
}

#[test]
fn what_makes_no_sense_is_refused_with_the_field_and_a_fix() {
    let server = server::start();
    let of = |limit: &str, over: Value| json!({ "limit": limit, "key": "user:1", "override": over });
    let with = |name: &str, value: Value| {
        let mut body = of("login", json!({ "limit": 5 }));
        body[name] = value;
        body
    };
    for (body, expected, words) in [
        (of("logn", json!({ "blocked": true })), 404, "did you mean `login`?"),
        (of("a b", json!({ "blocked": true })), 400, "a name has only the characters"),
        (with("key", json!("a:b:c:d")), 400, "did you mean `a:b%3Ac%3Ad`?"),
        (with("key", json!("")), 400, "the key is empty"),
        (with("key", json!(format!("n:{}", ":".repeat(1_024).replace(':', "%3A")))), 400, "at most 1024"),
        (with("key", json!(7)), 400, "`key` must be a key such as"),
        (of("login", json!({})), 400, "`override` says nothing; write numbers"),
        (of("login", json!({ "blocked": true, "unlimited": true })), 400, "`override` contradicts itself"),
        (
            of("login", json!({ "burst": 5 })),
            400,
            "`override.burst` does not belong to fixed_window; it takes limit, window",
        ),
        (of("login", json!({ "limit": 0 })), 400, "`override.limit` = 0: must be at least 1"),
        (of("login", json!({ "limit": -1 })), 400, "override.limit"),
        (of("login", json!({ "limit": 1e300 })), 400, "override.limit"),
        (of("login", json!({ "window": "soon" })), 400, "`override.window` must be a duration"),
        (of("api", json!({ "rate": "fast" })), 400, "`override.rate` must be count/period"),
        (of("free", json!({ "limit": 5 })), 400, "the limit is unlimited and has no numbers to change"),
        (of("login", json!([])), 400, "`override` must be an object, not an array"),
        (of("login", json!({ "limt": 5 })), 400, "unknown field `limt`"),
        (
            with("until", json!("2001-01-01T00:00:00Z")),
            400,
            "`until` is in the past: the store's clock shows 20",
        ),
        (with("until", json!("noon")), 400, "`until`: write RFC 3339"),
        (with("until", json!("9999-01-01T00:00:00Z")), 400, "more than ten years"),
        (with("for_ms", json!(0)), 400, "`for_ms` must be at least 1"),
        (with("for_ms", json!(u64::MAX)), 400, "more than ten years"),
        (with("reason", json!("x".repeat(201))), 400, "`reason` has at most 200 characters"),
        (with("by", json!("a\u{1b}[31m")), 400, "`by` has at most 64 characters, and none that controls"),
        (json!({ "limit": "login", "key": "user:1" }), 400, "missing field `override`"),
    ] {
        let (status, problem) = set(&server, &body);
        assert_eq!(status, expected, "{body}: {problem}");
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.contains(words)), "{body}: {problem}");
    }
    let both = json!({ "limit": "login", "key": "user:1", "override": { "limit": 5 }, "for_ms": 5, "until": "2100-01-01T00:00:00Z" });
    assert_eq!(set(&server, &both).1["detail"], "write `until` or `for_ms`, not both");
    assert_eq!(server.ask("DELETE", "/v1/overrides", &[], "").field("allow"), Some("GET, HEAD, POST"));
    assert_eq!(server.get("/v1/overrides/remove").field("allow"), Some("POST"));
    let list: Value = serde_json::from_str(&server.get("/v1/overrides").body).expect("JSON");
    assert_eq!(list["overrides"].as_array().map(Vec::len), Some(1), "nothing of it was set: {list}");
}

/// A thousand are kept, with keys as long as they may be; one more is refused, and those that are there stay.
#[test]
fn there_are_so_many_and_no_more() {
    let server = server::start();
    let body = |number: usize| {
        let key = format!("user:{}{number}", "k".repeat(1_000));
        json!({ "limit": "login", "key": key, "override": { "limit": 5 }, "reason": "r".repeat(200), "by": "b".repeat(64) })
    };
    for number in 0..1_000 {
        let answer = server.post("/v1/overrides", &body(number).to_string());
        assert_eq!(answer.status, 200, "{number}: {}", answer.body);
    }
    let (status, problem) = set(&server, &body(1_000));
    assert_eq!(status, 400);
    assert!(
        problem["detail"]
            .as_str()
            .is_some_and(|detail| detail.starts_with("there are 1000 overrides at run time")),
        "{problem}"
    );
    assert_eq!(set(&server, &body(7)).0, 200, "one that is there may be changed");
    server.post("/v1/overrides/remove", &json!({ "limit": "login", "key": body(3)["key"] }).to_string());
    assert_eq!(set(&server, &body(1_000)).0, 200);
}

#[test]
fn it_is_for_admins_and_no_key_is_in_the_log() {
    let config = format!("[server]\nadmin_token = \"env:OPS\"\n{POLICY}");
    let server = server::with(&config, &[], &[("OPS", "s3cret")]);
    let body = json!({ "limit": "login", "key": "user:mallory", "override": { "blocked": true }, "reason": "because of mallory" });
    assert_eq!(set(&server, &body).0, 401);
    assert_eq!(server.get("/v1/overrides").status, 401);
    assert_eq!(server.post("/v1/overrides/remove", r#"{"limit":"login","key":"user:mallory"}"#).status, 401);
    let lines = ["authorization: Bearer s3cret", "content-type: application/json"];
    let answer = server.ask("POST", "/v1/overrides", &lines, &body.to_string());
    assert_eq!(answer.status, 200, "{}", answer.body);
    let removed =
        server.ask("POST", "/v1/overrides/remove", &lines, r#"{"limit":"login","key":"user:mallory"}"#);
    assert_eq!(removed.status, 200);
    server.stop();
    let log = server.output();
    assert_eq!(log.matches("\"audit\":\"override\"").count(), 2, "{log}");
    assert!(log.contains("an override was set") && !log.contains("mallory"), "{log}");
}

#[test]
fn the_command_sets_lists_and_removes() {
    let server = server::start();
    let check = |args: &str, code: i32, words: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        let output = server.tollgate(&args, &[]);
        let said =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).expect("text")).concat();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    };
    check("override list", 0, "user:vip");
    check(
        "override login user:1 --limit 7 --for 1h --reason ticket --by dana",
        0,
        "login for user:1: 7 per 1h window instead of 2 per 1h window, until 20",
    );
    check(
        "override api user:1 --rate 9/s --burst 9",
        0,
        "9/s, bursts of 9 instead of 1/h, bursts of 3, with no end; the server counts in its memory",
    );
    check("override uploads user:1 --blocked", 0, "blocked instead of 2 at once");
    check("override list", 0, "ticket");
    check("override remove login user:1", 0, "removed: 2 per 1h window again");
    check("override remove login user:1", 0, "nothing to remove");
    check("override list --json", 0, "\"kept\":\"memory\"");
    check("override login user:1", 2, "required arguments were not provided");
    check("override login user:1 --blocked --limit 5", 2, "cannot be used with");
    check("override login user:1 --limit 5 --for soon", 2, "write a duration such as 1h");
    check("override login user:1 --burst 5", 2, "`override.burst` does not belong to fixed_window");
    check("override logn user:1 --blocked", 2, "did you mean `login`?");
}
