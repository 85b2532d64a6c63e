//! Hostile paths, headers and hosts: the tower layer and the server's gate find the same charges, and nothing gets around them.

use std::sync::{Arc, Mutex};

use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use proptest::prelude::*;
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate::http::{LimitLayer, Peer};
use tollgate::route::{Described, KeyExtractor, MissingKey, RequestHead, Route, RouteLimit, Routes};
use tollgate::telemetry::{Event, Observer};
use tower::{Layer, Service};

use crate::service;

const ROUTES: &str = r#"
[requests]
trusted_proxies = ["10.0.0.1"]

[limits]
all = { unlimited = true }
login = { unlimited = true }
user = { unlimited = true }
below = { unlimited = true }
host = { unlimited = true }

[[routes]]
limit = "all"
key = "ip"

[[routes]]
path = "/login"
method = ["POST", "PUT"]
limit = "login"
key = "header:x-user"

[[routes]]
path = "/users/{id}"
limit = "user"
key = "{id}"
if_missing = "skip"

[[routes]]
path = "/api/*"
except = ["/api/health", "/api/docs/*"]
limit = "below"
key = "header:x-user"
if_missing = "shared"

[[routes]]
host = ["*.example.com", "example.com"]
headers = { x-plan = "free*" }
limit = "host"
key = "bearer"
if_missing = "ip"
"#;

fn config() -> Config {
    Config::parse(ROUTES).expect("a sound config")
}

fn routes() -> Routes {
    let config = config();
    Routes::new(config.routes).expect("sound routes").read_by(config.requests.reader())
}

/// The charges of a request, with `!` for a request without a key.
fn charges<'a>(routes: &'a Routes, request: &RequestHead<'a>) -> Vec<(usize, String)> {
    let key = |key: Result<tollgate::Key<'_>, _>| key.map_or("!".to_owned(), |key| key.to_string());
    routes.charges(request).map(|charge| (charge.route, key(charge.key))).collect()
}

/// Collects the limit and the key of each charge that is decided, with `!` for a request without a key.
#[derive(Default)]
struct Charged(Mutex<Vec<(String, String)>>);

impl Observer for Charged {
    fn decided(&self, event: &Event<'_>) {
        let key = event.key.reveal().map_or("!".to_owned(), |key| key.to_string());
        self.0.lock().unwrap().push((event.limiter.to_owned(), key));
    }
}

/// What a layer from the same config charges for a request, and its answer.
fn charged_by_the_layer(request: Request<()>) -> (StatusCode, Vec<(String, String)>) {
    let (config, charged) = (config(), Arc::new(Charged::default()));
    let gate = Tollgate::builder().config(&config).observer(charged.clone()).build().expect("a gate");
    let layer = LimitLayer::from_config(&gate, &config).expect("a layer");
    let mut app = layer.layer(service::of(|_: &Request<()>| Response::new(String::new())));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    let response = runtime.block_on(app.call(request)).expect("an answer");
    let mut found = std::mem::take(&mut *charged.0.lock().unwrap());
    found.sort();
    (response.status(), found)
}

fn names() -> impl Strategy<Value = String> {
    proptest::sample::select(vec![
        "x-user",
        "x-plan",
        "authorization",
        "host",
        "x-forwarded-for",
        "forwarded",
        "x-other",
    ])
    .prop_map(str::to_owned)
}

proptest! {
    /// The gate is reported the method, the target and the headers; the layer has them. Both find the same, and the layer charges it.
    #[test]
    fn layer_and_gate_find_the_same_charges(
        method in "GET|POST|PUT|HEAD|BREW",
        path in "(/(api|login|users|docs|health|[a-z.%]{0,4}|%[0-9a-f]{2}|é|\\.\\.|))(/(health|docs|[.a-z0-9]{0,3}|%2[eEfF]))*/?",
        query in "(\\?[a-z/=&%]{0,8})?",
        headers in prop::collection::vec((names(), "[ -~]{0,12}|free|Bearer t|a.example.com|203.0.113.[0-9]|\\PC{1,3}"), 0..6),
    ) {
        let routes = routes();
        let target = format!("{path}{query}");
        let Ok(builder) = http::Uri::try_from(target.as_str()).map(|uri| Request::builder().uri(uri)) else { return Ok(()) };
        let mut request = builder.method(method.as_str()).body(()).unwrap();
        request.extensions_mut().insert(Peer("10.0.0.1:1".parse().unwrap()));
        for (name, value) in &headers {
            let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) else { continue };
            request.headers_mut().append(HeaderName::try_from(name.as_str()).unwrap(), value);
        }
        let described = Described {
            method: &Method::from_bytes(method.as_bytes()).unwrap(),
            target: &target,
            host: None,
            headers: request.headers(),
            peer: "10.0.0.1".parse().unwrap(),
        };
        let at_gate = routes.described(&described).map(|request| charges(&routes, &request));
        let in_layer = routes.head(&request).map(|request| charges(&routes, &request));
        prop_assert_eq!(&at_gate, &in_layer);
        let (status, charged) = charged_by_the_layer(request.clone());
        match &in_layer {
            Err(_) => prop_assert_eq!((status, charged), (StatusCode::BAD_REQUEST, Vec::new())),
            Ok(found) => {
                let name = |route| routes.limits().nth(route).and_then(|limit| limit.limit()).unwrap_or_default();
                let mut found: Vec<_> = found.iter().map(|(route, key)| (name(*route).to_owned(), key.clone())).collect();
                found.sort();
                let is_denied = found.iter().any(|(_, key)| key == "!");
                prop_assert_eq!(status, if is_denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK });
                prop_assert_eq!(charged, found);
            }
        }
        if let Ok(found) = in_layer {
            // No request gets around the limit that is on all of them, and it always has a key.
            prop_assert!(found.first().is_some_and(|(route, key)| *route == 0 && key.starts_with("ip:")), "{:?}", found);
            prop_assert!(found.iter().all(|(_, key)| key == "!" || key.len() <= 1_024 * 3 + 16));
        }
    }

    /// However the path of a limited route is spelled, it is met; exceptions are only for the plain spelling.
    #[test]
    fn no_spelling_gets_around_a_route(
        before in "(/|/\\.|/x/\\.\\.){0,3}",
        letters in prop::collection::vec(any::<bool>(), 5),
        after in "/?",
    ) {
        let login: String = "login".chars().zip(letters).map(|(letter, is_escaped)| match is_escaped {
            true => format!("%{:02x}", u32::from(letter)),
            false => letter.to_string(),
        }).collect();
        let path = format!("{before}/{login}{after}");
        let routes = Routes::new([
            RouteLimit::new("api", KeyExtractor::constant("all")).on(Route::post("/login")),
            RouteLimit::new("api", KeyExtractor::constant("all")).on(Route::any().except(Route::at("/login"))),
        ]).unwrap();
        let request = Request::post(path.as_str()).body(()).unwrap();
        let found: Vec<usize> = charges(&routes, &routes.head(&request).unwrap()).into_iter().map(|(route, _)| route).collect();
        let expected: &[usize] = if path == "/login" { &[0] } else { &[0, 1] };
        prop_assert_eq!(found, expected, "{}", path);
    }
}

/// A path that only a router reads as having the parameter is not free, whatever happens to requests without a key.
#[test]
fn a_parameter_that_only_a_router_sees_is_denied() {
    for (missing, expected) in
        [(MissingKey::Deny, "!"), (MissingKey::Skip, "!"), (MissingKey::Shared, "id:missing:shared")]
    {
        let key = KeyExtractor::path_parameter("id").if_missing(missing);
        let routes = Routes::new([RouteLimit::new("api", key).on(Route::at("/users/{id}"))]).unwrap();
        for path in ["/users/..", "/users/%2e%2e", "/users/."] {
            let request = Request::get(path).body(()).unwrap();
            let found = charges(&routes, &routes.head(&request).unwrap());
            assert_eq!(found, [(0, expected.to_owned())], "{path} {missing:?}");
        }
    }
}

/// A header that is given twice is no way around: a route matches if one of the values does, an exception only without a doubt.
#[test]
fn headers_and_hosts_match_in_doubt() {
    let all = || RouteLimit::new("api", KeyExtractor::constant("all"));
    let routes = Routes::new([
        all().on(Route::any().header("x-plan", "free")),
        all().on(Route::any().except(Route::any().header("x-internal", "yes"))),
        all().on(Route::any().host("api.example.com")),
        all().on(Route::any().except(Route::any().host("*.internal"))),
    ])
    .unwrap();
    for (uri, lines, expected) in [
        ("/", &[][..], &[1, 3][..]),
        ("/", &[("x-plan", "free")], &[0, 1, 3]),
        ("/", &[("x-plan", "pro"), ("x-plan", "free")], &[0, 1, 3]),
        ("/", &[("x-plan", "Free")], &[1, 3]),
        ("/", &[("x-internal", "yes")], &[3]),
        ("/", &[("x-internal", "yes"), ("x-internal", "no")], &[1, 3]),
        ("/", &[("x-internal", "no"), ("x-internal", "yes")], &[1, 3]),
        ("/", &[("host", "API.example.com:8443")], &[1, 2, 3]),
        ("/", &[("host", "api.example.com.")], &[1, 2, 3]),
        ("/", &[("host", "www.example.com"), ("host", "api.example.com")], &[1, 2, 3]),
        ("/", &[("host", "api.example.com.evil")], &[1, 3]),
        ("/", &[("host", "a.internal")], &[1]),
        ("/", &[("host", ".internal")], &[1, 3]),
        ("/", &[("host", "internal")], &[1, 3]),
        ("/", &[("host", "a.internal"), ("host", "b.example")], &[1, 3]),
        ("http://api.example.com/", &[("host", "a.internal")], &[1, 2, 3]),
        ("http://a.internal/", &[("host", "b.internal")], &[1]),
    ] {
        let request =
            lines.iter().fold(Request::get(uri), |request, (name, value)| request.header(*name, *value));
        let request = request.body(()).unwrap();
        let found: Vec<usize> =
            charges(&routes, &routes.head(&request).unwrap()).into_iter().map(|(route, _)| route).collect();
        assert_eq!(found, expected, "{uri} {lines:?}");
    }
}
