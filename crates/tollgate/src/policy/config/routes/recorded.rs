//! Tests of `[[routes]]` with requests of an access log: which are charged, by which key and how much.

use tollgate_kernel::MAX_COUNT;

use super::super::tests::parse;
use crate::route::{RequestHead, RequestReader, Routes};

/// The charge of a request under one route: its key and cost, `-` if none, `denied` without a key.
fn charged(route: &str, request: impl FnOnce(&RequestReader) -> RequestHead<'_>) -> String {
    let config =
        parse(&format!("[limits]\napi = {{ unlimited = true }}\n[[routes]]\nlimit = 'api'\n{route}"));
    let routes = Routes::new(config.routes).expect("a sound route");
    let request = request(routes.reader());
    let charge = routes.charges(&request).next();
    charge.map_or("-".to_owned(), |charge| match charge.key {
        Ok(key) => format!("{key} {}", charge.cost.get()),
        Err(_) => "denied".to_owned(),
    })
}

#[test]
fn a_route_matches_what_it_says() {
    for (route, method, target, is_charged) in [
        ("", "GET", "/", true),
        ("path = '/login'", "GET", "/login", true),
        ("path = '/login'", "GET", "/login/", true),
        ("path = '/login'", "GET", "/login?next=/a/b", true),
        ("path = '/login'", "GET", "//x/..//%6Cogin", true),
        ("path = '/login'", "GET", "http://example.com/login?x", true),
        ("path = '/login'", "GET", "/logins", false),
        ("path = '/login'", "GET", "/Login", false),
        ("path = '/api/*'", "GET", "/api", true),
        ("path = '/api/*'", "GET", "/api/users/7", true),
        ("path = '/api/*'", "GET", "/apis", false),
        ("path = '/api/*'", "GET", "/files/../api/x", true),
        ("path = '/api/*'", "GET", "/api/100%", true),
        ("path = '/*'", "GET", "/", true),
        ("path = '/*'", "OPTIONS", "*", false),
        ("path = '/*'", "CONNECT", "example.com:443", false),
        ("", "CONNECT", "example.com:443", true),
        ("method = ['CONNECT']", "CONNECT", "example.com:443", true),
        ("path = '/'", "GET", "http://example.com", true),
        ("path = '/users/{id}'", "GET", "/users/7", true),
        ("path = '/users/{id}'", "GET", "/users/7/posts", false),
        ("path = '/a%2Fb'", "GET", "/a%2fb", true),
        ("path = '/a/b'", "GET", "/a%2fb", false),
        ("path = '/api/*'\nexcept = ['/api/health']", "GET", "/api/health", false),
        ("path = '/api/*'\nexcept = ['/api/health']", "GET", "/api//health", true),
        ("path = '/api/*'\nexcept = ['/api/v1/*']", "GET", "/api/v1/x", false),
        ("except = ['/static/*']", "GET", "/static/a.css", false),
        ("except = ['/static/*']", "GET", "/a.css", true),
        ("method = ['GET']", "GET", "/", true),
        ("method = ['GET']", "HEAD", "/", true),
        ("method = ['GET', 'PUT']", "POST", "/", false),
        ("method = ['GET', 'PUT']", "PUT", "/", true),
        ("method = ['GET']", "get", "/", false),
        ("clients = ['203.0.113.0/24']", "GET", "/", true),
        ("clients = ['::ffff:203.0.113.0/120']", "GET", "/", true),
        ("clients = ['203.0.113.7']", "GET", "/", true),
        ("clients = ['203.0.113.8', '::/0']", "GET", "/", false),
        ("users = ['alice']", "GET", "/", true),
        ("users = ['bob', 'al*']", "GET", "/", true),
        ("users = ['*']", "GET", "/", true),
        ("users = ['Alice', 'bob']", "GET", "/", false),
        ("headers = { user-agent = 'curl/*' }", "GET", "/", true),
        ("headers = { user-agent = 'curl' }", "GET", "/", false),
        ("headers = { referer = '*' }", "GET", "/", false),
        ("headers = { x-api-key = '*' }", "GET", "/", false),
        ("host = 'example.com'", "GET", "http://example.com/", false),
        ("path = '/a'\nmethod = ['GET']\nclients = ['203.0.113.7']\nusers = ['alice']", "GET", "/a", true),
        ("path = '/a'\nmethod = ['GET']\nclients = ['203.0.113.7']\nusers = ['bob']", "GET", "/a", false),
    ] {
        let found = charged(route, |reader| {
            let request = reader.recorded("203.0.113.7").target(method, target);
            request.logged_user(Some("alice")).logged_headers(None, Some("curl/8.0"))
        });
        assert_eq!(found != "-", is_charged, "{route:?} {method} {target}");
    }
}

/// A line without a request still has a client, and matches routes without a path and a method.
#[test]
fn a_line_that_is_no_request_matches_routes_without_path_and_method() {
    for (route, is_charged) in [
        ("", true),
        ("clients = ['203.0.113.7']", true),
        ("except = ['/static/*']", true),
        ("path = '/*'", false),
        ("path = '/{*all}'", false),
        ("method = ['GET']", false),
    ] {
        assert_eq!(charged(route, |reader| reader.recorded("203.0.113.7")) != "-", is_charged, "{route:?}");
    }
}

#[test]
fn keys_are_those_of_the_tower_layer() {
    let long: &str = "x".repeat(1_025).leak();
    for (route, client, user, agent, target, expected) in [
        ("", "203.0.113.7", None, None, "/", "ip:203.0.113.7 1"),
        ("", "::ffff:203.0.113.7", None, None, "/", "ip:203.0.113.7 1"),
        ("", "2001:db8:1:2:3:4:5:6", None, None, "/", "ip:2001%3Adb8%3A1%3A2%3A%3A/64 1"),
        ("", "crawler.example.com", None, None, "/", "ip:crawler.example.com 1"),
        ("", "unix:", None, None, "/", "ip:unix%3A 1"),
        ("", long, None, None, "/", "denied"),
        ("key = 'all'\ncost = 7", "203.0.113.7", None, None, "/", "all:all 7"),
        ("key = 'user'", "203.0.113.7", Some("a:b"), None, "/", "user:a%3Ab 1"),
        ("key = 'user'", "203.0.113.7", None, None, "/", "denied"),
        ("key = 'user'\nif_missing = 'deny'", "203.0.113.7", None, None, "/", "denied"),
        ("key = 'user'\nif_missing = 'ip'", "203.0.113.7", None, None, "/", "ip:203.0.113.7 1"),
        (
            "key = 'user'\nnamespace = 'account'\nfolded = true",
            "203.0.113.7",
            Some(" Bob"),
            None,
            "/",
            "account:bob 1",
        ),
        ("key = 'user'\nif_missing = 'skip'", "203.0.113.7", None, None, "/", "-"),
        ("key = 'user'\nif_missing = 'shared'", "203.0.113.7", None, None, "/", "user:missing:shared 1"),
        ("key = 'user-agent'", "203.0.113.7", None, Some("curl/8"), "/", "user-agent:curl/8 1"),
        ("key = 'user-agent'\nif_missing = 'ip'", "203.0.113.7", None, Some(""), "/", "denied"),
        ("key = 'user-agent'\nif_missing = 'ip'", "203.0.113.7", None, Some("a\nb"), "/", "denied"),
        ("key = 'user-agent'\nif_missing = 'ip'", "203.0.113.7", None, Some(long), "/", "denied"),
        ("path = '/users/{id}'\nkey = '{id}'", "203.0.113.7", None, None, "/users/a%20b/", "id:a b 1"),
        ("cost = 'bytes'", "203.0.113.7", None, None, "/", "ip:203.0.113.7 2326"),
    ] {
        let found = charged(route, |reader| {
            let request = reader.recorded(client).target("GET", target).logged_user(user);
            request.logged_headers(None, agent).bytes_sent(2326)
        });
        assert_eq!(found, expected, "{route:?} {client:.20} {target}");
    }
    // A response without a body costs nothing, and a cost that cannot be counted is the largest that can.
    assert_eq!(charged("cost = 'bytes'", |reader| reader.recorded("::1")), "-");
    let most = charged("cost = 'bytes'", |reader| reader.recorded("10.0.0.1").bytes_sent(u64::MAX));
    assert_eq!(most, format!("ip:10.0.0.1 {MAX_COUNT}"));
}
