//! `/v1/gate`: the config's `[[routes]]`, applied to the request that a proxy describes.

use crate::server::{self, Tollgate};

const LIMITS: &str = r#"
[limits.api]
strategy = "fixed_window"
limit = 2
window = "1h"

[limits.login]
strategy = "fixed_window"
limit = 1
window = "1h"

[limits.users]
strategy = "fixed_window"
limit = 1
window = "1h"

[limits.pool]
strategy = "concurrency"
limit = 5
lease = "1m"

[[routes]]
path = "/api/*"
except = ["/api/health"]
limit = "api"

[[routes]]
path = "/login"
method = "POST"
limit = "login"

[[routes]]
path = "/users/{id}"
limit = "users"
key = "header:x-user"

[[routes]]
host = "admin.example.com"
limit = "users"
key = "user"
if_missing = "ip"

[[routes]]
path = "/bytes"
limit = "api"
cost = "bytes"

[[routes]]
path = "/pool"
limit = "pool"
"#;

/// A server that trusts every peer on this machine.
fn trusting() -> Tollgate {
    server::with(
        &format!(
            "[requests]\ntrusted_proxies = [\"127.0.0.1\", \"10.0.0.0/8\"]\nuser_header = \"x-authenticated\"\n{LIMITS}"
        ),
        &[],
        &[],
    )
}

/// What a key has used.
fn used(server: &Tollgate, limit: &str, key: &str) -> u64 {
    let status = server.get(&format!("/v1/status?limit={limit}&key={key}")).body;
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    status["used"].as_u64().expect("a number")
}

/// A described request: header lines, and the status of the answer.
fn check(server: &Tollgate, lines: &[&str], status: u16) {
    let answer = server.ask("GET", "/v1/gate", lines, "");
    assert_eq!(answer.status, status, "{lines:?}: {}", answer.body);
}

fn nginx<'a>(method: &'a str, uri: &'a str, client: &'a str) -> [String; 3] {
    [
        format!("X-Original-Method: {method}"),
        format!("X-Original-URI: {uri}"),
        format!("X-Forwarded-For: {client}"),
    ]
}

fn traefik<'a>(method: &'a str, uri: &'a str, client: &'a str) -> [String; 3] {
    [
        format!("X-Forwarded-Method: {method}"),
        format!("X-Forwarded-Uri: {uri}"),
        format!("X-Forwarded-For: {client}"),
    ]
}

#[test]
fn routes_are_applied_to_the_described_request() {
    type Describe = for<'a> fn(&'a str, &'a str, &'a str) -> [String; 3];
    for describe in [nginx as Describe, traefik] {
        let server = trusting();
        for (method, uri, client, status) in [
            ("GET", "/api/a?x=1", "203.0.113.7", 200),
            ("POST", "//api/./b", "203.0.113.7", 200),
            ("GET", "/api/c", "203.0.113.7", 429),
            ("GET", "/api/c", "203.0.113.8", 200),
            ("GET", "/api/health", "203.0.113.7", 200),
            ("GET", "/api//health", "203.0.113.7", 429),
            ("POST", "/login?next=/", "203.0.113.7", 200),
            ("POST", "/login", "203.0.113.7", 429),
            ("GET", "/login", "203.0.113.7", 200),
            ("GET", "/elsewhere", "203.0.113.7", 200),
            ("POST", "/login", "2001:db8::1", 200),
            ("POST", "/login", "2001:db8::2", 429),
        ] {
            let lines = describe(method, uri, client);
            check(&server, &lines.each_ref().map(String::as_str), status);
        }
        assert_eq!(
            (used(&server, "api", "ip:203.0.113.7"), used(&server, "login", "ip:203.0.113.7")),
            (2, 1)
        );
        let of = |uri, client| {
            let lines = describe("GET", uri, client);
            server.ask("GET", "/v1/gate?deny=403", &lines.each_ref().map(String::as_str), "")
        };
        // The answer has the rate-limit headers of the limits that apply.
        let allowed = of("/api/x", "203.0.113.9");
        assert_eq!(allowed.status, 200);
        assert_eq!(allowed.field("x-ratelimit-remaining"), Some("1"));
        assert_eq!(allowed.field("ratelimit-policy"), Some("\"api\";q=2;w=3600"));
        assert_eq!((allowed.field("cache-control"), allowed.body.as_str()), (Some("no-store"), ""));
        let denied = of("/api/x", "203.0.113.7");
        assert_eq!((denied.status, denied.field("content-type")), (403, Some("application/problem+json")));
        assert!(denied.body.contains("\"violated-policies\":[\"api\"]"), "{}", denied.body);
        assert!(denied.field("retry-after").is_some());
        let free = of("/elsewhere", "203.0.113.7");
        assert_eq!(
            (free.status, free.field("ratelimit"), free.field("cache-control")),
            (200, None, Some("no-store"))
        );
    }
}

/// A request without a key is denied, as in the tower layer and in a backtest; a limit that needs the response does not apply.
#[test]
fn a_request_without_a_key_is_denied() {
    let server = trusting();
    let user = |lines: &[&str], status| {
        let described = nginx("GET", "/users/7", "203.0.113.7");
        let mut all: Vec<&str> = described.iter().map(String::as_str).collect();
        all.extend(lines);
        check(&server, &all, status);
    };
    user(&[], 429);
    user(&["x-user:"], 429);
    user(&["x-user: ann", "x-user: bob"], 429);
    user(&["x-user: ann"], 200);
    user(&["x-user: ann"], 429);
    user(&["x-user: bob"], 200);
    assert_eq!(used(&server, "users", "x-user:ann"), 1);
    // The config names the namespace of the keys, so metrics show it.
    let metrics = server.get("/metrics").body;
    assert!(metrics.contains("\"x-user\""), "{metrics}");
    for uri in ["/bytes", "/pool"] {
        let lines = nginx("GET", uri, "203.0.113.7");
        let answer = server.ask("GET", "/v1/gate", &lines.each_ref().map(String::as_str), "");
        assert_eq!((answer.status, answer.field("ratelimit")), (200, None), "{uri}");
    }
}

/// Nobody is believed who is not named: not even on this machine.
#[test]
fn a_peer_that_is_not_trusted_is_refused() {
    for requests in ["", "[requests]\ntrusted_proxies = [\"10.0.0.0/8\"]\n"] {
        let server = server::with(&format!("{requests}{LIMITS}"), &[], &[]);
        for lines in [nginx("GET", "/elsewhere", "10.0.0.1"), traefik("POST", "/login", "10.0.0.1")] {
            let lines = lines.each_ref().map(String::as_str);
            let answer = server.ask("GET", "/v1/gate", &lines, "");
            assert_eq!(answer.status, 403, "{}", answer.body);
            assert!(answer.body.contains("trusted_proxies"), "{}", answer.body);
            assert_eq!(server.ask("GET", "/v1/gate?deny=429", &lines, "").status, 403);
        }
        assert_eq!((used(&server, "login", "ip:10.0.0.1"), used(&server, "login", "ip:127.0.0.1")), (0, 0));
    }
}

/// What a client sends comes along with what the proxy sets. It must choose neither another route nor another key, and must
/// not bring about a fault that a proxy takes for an outage.
#[test]
fn a_client_cannot_describe_another_request() {
    let server = trusting();
    let login = nginx("POST", "/login", "198.51.100.9");
    check(&server, &login.each_ref().map(String::as_str), 200);
    let by_traefik = traefik("POST", "/login", "198.51.100.9");
    for (proxy, sent) in [
        // The other way to describe a request.
        (&login, &["X-Forwarded-Method: GET", "X-Forwarded-Uri: /elsewhere"][..]),
        (&login, &["X-Forwarded-Uri: /elsewhere"]),
        (&by_traefik, &["X-Original-Method: GET", "X-Original-URI: /elsewhere"]),
        (&by_traefik, &["X-Original-URI: /elsewhere"]),
        // The same way, twice.
        (&login, &["X-Original-URI: /elsewhere"]),
        (&login, &["X-Original-Method: GET"]),
        (&by_traefik, &["x-forwarded-uri: /elsewhere"]),
        // Headers that nobody reads.
        (&login, &["X-Rewrite-Url: /elsewhere", "X-HTTP-Method-Override: GET", "X-Original-Url: /elsewhere"]),
        (&login, &["Forwarded: for=203.0.113.1", "X-Real-IP: 203.0.113.1", "X-Client-IP: 203.0.113.1"]),
    ] {
        for first in [true, false] {
            let proxy = proxy.iter().map(String::as_str);
            let sent = sent.iter().copied();
            let lines: Vec<&str> =
                if first { sent.chain(proxy).collect() } else { proxy.chain(sent).collect() };
            let answer = server.ask("GET", "/v1/gate?deny=403", &lines, "");
            assert_eq!(answer.status, 403, "{lines:?}: {}", answer.body);
        }
    }
    // The left of X-Forwarded-For is the client's to invent.
    for client in ["203.0.113.1, 198.51.100.9", "127.0.0.1, 198.51.100.9, 10.1.1.1", "unknown, 198.51.100.9"]
    {
        check(&server, &nginx("POST", "/login", client).each_ref().map(String::as_str), 429);
    }
    assert_eq!(used(&server, "login", "ip:198.51.100.9"), 1);
    assert_eq!(used(&server, "login", "ip:203.0.113.1"), 0);
}

/// Descriptions that make no sense are denials with the status that the proxy asked for.
#[test]
fn a_hostile_description_is_a_denial() {
    let server = trusting();
    let long = format!("X-Original-URI: /api/{}", "a".repeat(7_000));
    for (lines, plain) in [
        (&[][..], 400),
        (&["X-Original-Method: GET"], 400),
        (&["X-Original-URI: /"], 400),
        (&["X-Forwarded-Method: GET"], 400),
        (&["X-Original-Method: G T", "X-Original-URI: /"], 400),
        (&["X-Original-Method:", "X-Original-URI: /"], 400),
        (&["X-Original-Method: GET", "X-Original-URI:"], 200),
        (&["X-Original-Method: GET", "X-Original-URI: relative"], 400),
        (&["X-Original-Method: GET", "X-Original-URI: http://evil/api/x"], 400),
        (&["X-Original-Method: GET", "X-Original-URI: /api%2Fx"], 400),
        (&["X-Original-Method: GET", "X-Original-URI: /api\\x"], 400),
        (&["X-Original-Method: GET", "X-Original-URI: /api/%zz"], 400),
        (&["X-Original-Method: GET", "X-Original-URI: /api/%00"], 400),
        (&["X-Original-Method: GET", "X-Original-URI: /elsewhere#/../login"], 400),
        (&["X-Original-Method: OPTIONS", "X-Original-URI: *"], 200),
        (&["X-Original-Method: GET", &long], 200),
    ] {
        let mut all = vec!["X-Forwarded-For: 203.0.113.7"];
        all.extend(lines);
        check(&server, &all, plain);
        let answer = server.ask("GET", "/v1/gate?deny=403", &all, "");
        assert_eq!(answer.status, if plain == 200 { 200 } else { 403 }, "{lines:?}: {}", answer.body);
    }
    for path in ["/v1/gate?deny=200", "/v1/gate?cost=2", "/v1/gate?as=ip", "/v1/gate?deny"] {
        assert_eq!(server.ask("GET", path, &[], "").status, 400, "{path}");
    }
    assert_eq!(server.ask("POST", "/v1/gate", &[], "").status, 405);
}

/// Hosts and users are those that the proxy says.
#[test]
fn hosts_and_users_come_from_the_proxy() {
    let server = trusting();
    let ask = |describe: [String; 3], more: &[&str]| {
        let mut lines: Vec<&str> = describe.iter().map(String::as_str).collect();
        lines.extend(more);
        server.ask("GET", "/v1/gate", &lines, "").status
    };
    let of = |client| traefik("GET", "/", client);
    let admin = "X-Forwarded-Host: admin.example.com";
    assert_eq!(ask(of("203.0.113.1"), &["X-Forwarded-Host: www.example.com"]), 200);
    assert_eq!(ask(of("203.0.113.1"), &[admin, "x-authenticated: ann"]), 200);
    assert_eq!(ask(of("203.0.113.2"), &[admin, "x-authenticated: ann"]), 429);
    assert_eq!(ask(of("203.0.113.2"), &[admin]), 200);
    assert_eq!(ask(of("203.0.113.2"), &["X-Forwarded-Host: ADMIN.example.com:443"]), 429);
    assert_eq!(ask(of("203.0.113.2"), &[admin, "X-Forwarded-Host: www.example.com"]), 400);
    assert_eq!(used(&server, "users", "user:ann"), 1);
    assert_eq!(used(&server, "users", "ip:203.0.113.2"), 1);
}

/// A changed config changes the routes, and what was consumed stays consumed.
#[test]
fn a_reload_applies_new_routes() {
    let server = trusting();
    let lines = nginx("GET", "/login", "203.0.113.7");
    let lines = lines.each_ref().map(String::as_str);
    check(&server, &lines, 200);
    check(&server, &lines, 200);
    let config =
        format!("[requests]\ntrusted_proxies = [\"127.0.0.1\"]\n{LIMITS}").replace("method = \"POST\"\n", "");
    server.reload(&config);
    check(&server, &lines, 200);
    check(&server, &lines, 429);
}
