//! `/v1/gate/{limit}/{key}`, as proxies ask it.

use crate::server::{self, Tollgate};

/// A request, and its response: status, the rate-limit headers, and a word of the body.
fn check(server: &Tollgate, path: &str, status: u16, lines: &[&str], said: &str) {
    let answer = server.get(path);
    assert_eq!(answer.status, status, "{path}: {}", answer.body);
    let names = [
        "content-type",
        "cache-control",
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "retry-after",
        "ratelimit-policy",
        "ratelimit",
    ];
    assert_eq!(answer.lines_of(&names), lines, "{path}");
    assert!(answer.body.contains(said), "{path}: {}", answer.body);
    assert_eq!(answer.body.is_empty(), status == 200, "{path}: {}", answer.body);
}

const OPEN: [&str; 6] = [
    "cache-control: no-store",
    "x-ratelimit-limit: 2",
    "x-ratelimit-remaining: 1",
    "x-ratelimit-reset: 3600",
    "ratelimit-policy: \"login\";q=2;w=3600",
    "ratelimit: \"login\";r=1;t=3600",
];

const SHUT: [&str; 8] = [
    "content-type: application/problem+json",
    "cache-control: no-store",
    "x-ratelimit-limit: 2",
    "x-ratelimit-remaining: 1",
    "x-ratelimit-reset: 3600",
    "retry-after: 3600",
    "ratelimit-policy: \"login\";q=2;w=3600",
    "ratelimit: \"login\";r=1;t=3600",
];

#[test]
fn a_proxy_is_told_by_a_status() {
    let server = server::start();
    check(&server, "/v1/gate/login/user:1", 200, &OPEN, "");
    check(&server, "/v1/gate/login/user:1?cost=2", 429, &SHUT, "quota-exceeded");
    check(&server, "/v1/gate/login/user:1?cost=2&deny=403", 403, &SHUT, "\"status\":403,");
    check(&server, "/v1/gate/login/user:1?deny=503&cost=2", 503, &SHUT, "login allows 2 per 1h window");
    check(&server, "/v1/gate/login/user:1?cost=2", 429, &SHUT, "\"violated-policies\":[\"login\"]");
}

#[test]
fn a_key_in_a_path_is_encoded_or_raw_in_a_namespace() {
    let server = server::start();
    check(&server, "/v1/gate/login/ip:2001%253Adb8%253A%253A1", 200, &OPEN, "");
    check(&server, "/v1/gate/login/2001:db8::1?namespace=ip&cost=2", 429, &SHUT, "quota-exceeded");
    check(&server, "/v1/gate/login/192.0.2.1?namespace=ip", 200, &OPEN, "");
    check(&server, "/v1/gate/login/a%20b/c", 200, &OPEN, "");
    let status = server.get("/v1/status?limit=login&key=a%20b/c").body;
    assert!(status.contains("\"used\":1"), "{status}");
}

/// Regression: a client with an IPv6 address has 2^64 of them, and each had its own quota.
#[test]
fn a_client_is_one_key_however_its_address_is_written() {
    let server = server::start();
    for (text, status) in [
        ("2001:db8::1", 200),
        ("2001:DB8:0:0::2", 200),
        ("[2001:db8::3]:443", 429),
        ("2001:db8:0:1::1", 200),
        ("1.2.3.4", 200),
        ("::ffff:1.2.3.4", 200),
        ("1.2.3.4:555", 429),
        ("1.2.3.5", 200),
        ("user", 400),
        ("1.2.3.4:port", 400),
    ] {
        let said = server.get(&format!("/v1/gate/login/{text}?as=ip"));
        assert_eq!(said.status, status, "{text}: {}", said.body);
    }
    let path = "/v1/gate/login?header=x-forwarded-for&as=ip";
    for (line, status) in
        [("x-forwarded-for: 9.9.9.9, 2001:db8::9", 429), ("x-forwarded-for: ::ffff:102:304", 429)]
    {
        let said = server.ask("GET", path, &[line], "");
        assert_eq!(said.status, status, "{line}: {}", said.body);
    }
    // The key is that of the middleware.
    let status = server.get("/v1/status?limit=login&namespace=ip&key=2001:db8::/64").body;
    assert!(status.contains("\"used\":2"), "{status}");
}

/// Traefik asks at a fixed address and says in a header for whom.
#[test]
fn a_proxy_may_say_in_a_header_who_pays() {
    let server = server::start();
    let path = "/v1/gate/login?header=x-forwarded-for&namespace=ip";
    for (lines, status) in [
        (&["x-forwarded-for: 192.0.2.1"] as &[&str], 200),
        (&["X-Forwarded-For: 192.0.2.1"], 200),
        // What a client says of itself stands before what the proxy adds, and changes nothing.
        (&["x-forwarded-for: 10.0.0.1, 192.0.2.1"], 429),
        (&["x-forwarded-for: 10.0.0.1", "x-forwarded-for: 192.0.2.1"], 429),
        (&["x-forwarded-for: 2001:db8::1"], 200),
        (&["x-forwarded-for: a:b:c:d"], 200),
    ] {
        let answer = server.ask("GET", path, lines, "");
        assert_eq!(answer.status, status, "{lines:?}: {}", answer.body);
    }
    let status = server.get("/v1/status?limit=login&key=ip:192.0.2.1").body;
    assert!(status.contains("\"used\":2"), "{status}");
}

/// Regression: such a request was answered with 400, which a proxy may take for a fault and let pass.
#[test]
fn a_header_without_a_valid_key_is_a_denial_that_charges_nothing() {
    let server = server::start();
    let denied = ["content-type: application/problem+json", "cache-control: no-store"];
    let long = format!("x-user: {}", "x".repeat(1025));
    let raw = "/v1/gate/login?header=x-user&namespace=user";
    let address = "/v1/gate/login?header=x-user&as=ip";
    for (path, lines) in [
        (raw, &[] as &[&str]),
        (raw, &["x-user:"]),
        (raw, &["x-user: ann,"]),
        (raw, &["x-user: \u{fc}"]),
        (raw, &[long.as_str()]),
        (address, &[]),
        (address, &["x-user: unknown"]),
        (address, &["x-user: 1.2.3.4:port"]),
    ] {
        let answer = server.ask("GET", path, lines, "");
        assert_eq!(answer.status, 429, "{path} {lines:?}: {}", answer.body);
        assert_eq!(answer.lines_of(&["content-type", "cache-control"]), denied, "{path} {lines:?}");
        assert!(answer.body.contains("the request has no key, or a malformed one"), "{}", answer.body);
        assert!(answer.body.contains(r#""violated-policies":["login"]"#), "{}", answer.body);
        let answer = server.ask("GET", &format!("{path}&deny=403"), lines, "");
        assert_eq!(answer.status, 403, "{path} {lines:?}: {}", answer.body);
    }
    let state = server.get("/v1/server").body;
    assert!(state.contains(r#""keys":0"#), "{state}");
    // A mistake of the address is still a fault.
    for (path, status) in [
        ("/v1/gate/login?header=x-user&namespace=", 400),
        ("/v1/gate/login?header=x-user", 400),
        ("/v1/gate/nope?header=x-user&as=ip", 404),
    ] {
        assert_eq!(server.get(path).status, status, "{path}");
    }
}

#[test]
fn head_asks_too() {
    let server = server::start();
    let answer = server.ask("HEAD", "/v1/gate/login/user:1", &[], "");
    assert_eq!((answer.status, answer.body.as_str()), (200, ""));
    let answer = server.ask("HEAD", "/v1/gate/login/user:1?cost=2", &[], "");
    assert_eq!((answer.status, answer.field("retry-after")), (429, Some("3600")));
}

#[test]
fn what_makes_no_sense_is_no_denial() {
    let server = server::start();
    for (path, status) in [
        ("/v1/gate/login", 400),
        ("/v1/gate/login/", 400),
        ("/v1/gate//user:1", 400),
        ("/v1/gate/nope/user:1", 404),
        ("/v1/gate/login/a:b:c:d", 400),
        ("/v1/gate/login/a%00b", 400),
        ("/v1/gate/login/k?cost=0", 400),
        ("/v1/gate/login/k?cost=-1", 400),
        ("/v1/gate/login/k?cost=x", 400),
        ("/v1/gate/login/k?cost=30&cost=1", 400),
        ("/v1/gate/login/k?deny=403&deny=429", 400),
        ("/v1/gate/login/k?deny=200", 400),
        ("/v1/gate/login/k?deny=600", 400),
        ("/v1/gate/login/k?dney=403", 400),
        ("/v1/gate/login/k?namespace=", 400),
        ("/v1/gate/login/1.2.3.4?as=address", 400),
        ("/v1/gate/login/1.2.3.4?as=ip&namespace=ip", 400),
        ("/v1/gate/login?as=ip", 400),
        ("/v1/gate/login?header=host", 400),
        ("/v1/gate/login?header=(&namespace=a", 400),
        ("/v1/gate/login?header=host&namespace=", 400),
        ("/v1/gate/login/k?header=host&namespace=a", 400),
    ] {
        let answer = server.get(path);
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
        assert_eq!(answer.field("content-type"), Some("application/problem+json"), "{path}");
        assert_eq!(answer.field("ratelimit"), None, "{path}");
    }
}
