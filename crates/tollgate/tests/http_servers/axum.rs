//! What is axum's own: matched routes, nested routers, the answers that no handler gives, and peers.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::{Method, StatusCode};
use axum::routing::{get, post};
use parking_lot::Mutex;
use std::time::Duration;
use tollgate::http::{AxumLimitLayer, LimitLayer, LimitLayerBuilder};
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, Tollgate};
use tollgate_testkit::http::Connection;

use crate::scene::{On, Scene, number, until};

fn hourly(limit: u64) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(3_600)).expect("a limit")
}

/// A limit of a hundred under this name, on these requests, paid by all together.
fn layer(gate: &Tollgate, limit: &str, route: Route) -> AxumLimitLayer {
    layers(gate)
        .limit(RouteLimit::new(limit, KeyExtractor::constant("all")).on(route))
        .build()
        .expect("a layer")
        .for_axum()
}

fn layers(gate: &Tollgate) -> LimitLayerBuilder {
    LimitLayer::builder(gate)
}

fn scene() -> Scene {
    Scene::new(On::Memory, |gate| gate.limit("inner", hourly(100)).limit("outer", hourly(100)))
}

/// What each request is charged under `inner`, and what it is answered.
fn check(scene: &Scene, router: Router, asked: &[(&str, &str, u16, bool)]) {
    let mut caller = Connection::open(scene.serve_router(router));
    for &(method, path, status, is_charged) in asked {
        let before = scene.used("inner", "all:all");
        let answer = caller.ask(method, path, &[]);
        let charged = scene.used("inner", "all:all") - before;
        let context = format!("{method} {path}: {answer:?}");
        assert_eq!((answer.status, charged), (status, u64::from(is_charged)), "{context}");
        let expected = is_charged.then(|| 100 - before - 1);
        assert_eq!(number(&answer, "x-ratelimit-remaining"), expected, "{context}");
        assert_eq!(
            answer.field("ratelimit-policy"),
            is_charged.then_some("\"inner\";q=100;w=3600"),
            "{context}"
        );
    }
}

#[test]
fn rules_know_the_route_that_axum_has_matched() {
    let scene = scene();
    let users = Router::new().route("/users/{user}", get("a user")).route("/users/me/posts", get("posts"));
    let router = users.layer(layer(&scene.gate, "inner", Route::get("/users/{id}")));
    check(
        &scene,
        router,
        &[
            ("GET", "/users/7", 200, true),
            ("GET", "/users/%37", 200, true),
            ("HEAD", "/users/7", 200, true),
            ("GET", "/users/me/posts", 200, false),
            // Axum takes the dots for a user's name, and so they are one.
            ("GET", "/users/..", 200, true),
            // By another method it is no such request, and nothing is charged for it.
            ("POST", "/users/7", 405, false),
            ("GET", "/nowhere", 404, false),
        ],
    );
}

/// However a path is written: what reaches a handler other than the one that is let pass is charged.
#[test]
fn nothing_but_what_is_let_pass_is_let_pass() {
    let scene = scene();
    let router = Router::new()
        .route("/healthz", get("healthy"))
        .route("/files/{*path}", get("a file"))
        .route("/{tenant}/{page}", get("a page"))
        .fallback(async || "whatever is left");
    let route_limit = || RouteLimit::new("inner", KeyExtractor::constant("all"));
    let skipping = layers(&scene.gate).limit(route_limit()).skip(Route::get("/healthz"));
    let charged = [
        "/files/secret",
        "/files/secret/../../healthz",
        "/files/%2e%2e/healthz",
        "/../healthz",
        "//healthz",
        "/./healthz",
        "/%68ealthz",
        "/healthz/",
        "/healthz/.",
        "/healthz;x",
    ];
    let mut asked = vec![("GET", "/healthz", 200, false), ("HEAD", "/healthz", 200, false)];
    asked.extend(charged.map(|path| ("GET", path, 200, true)));
    check(&scene, router.clone().layer(skipping.build().expect("a layer").for_axum()), &asked);
    let except = Route::any().except(Route::get("/healthz"));
    check(&scene, router.layer(layer(&scene.gate, "inner", except)), &asked);
}

#[test]
fn dots_lead_nobody_out_of_what_is_below_a_path() {
    let scene = scene();
    let inside = Router::new().fallback(async || "inside");
    let routers = [
        Router::new().route("/api/{*rest}", get("below")).route("/api", get("at")),
        Router::new().nest_service("/api", inside),
    ];
    for router in routers {
        for route in [Route::below("/api"), Route::any().except(Route::below("/other"))] {
            let router = router.clone().layer(layer(&scene.gate, "inner", route));
            let paths = ["/api/a", "/api/../a", "/api/%2e%2e/a/b", "/api/./a", "/api/x/../../a"];
            check(&scene, router, &paths.map(|path| ("GET", path, 200, true)));
        }
    }
}

#[test]
fn a_layer_inside_a_nested_router_sees_the_whole_path() {
    // Axum names the first, and only the path tells the second.
    for route in [Route::get("/api/v1/items/{id}"), Route::below("/api/v1/items").method(Method::GET)] {
        let scene = scene();
        let items =
            Router::new().route("/items/{id}", get("an item").post("made")).route("/other", get("other"));
        let items = items.layer(layer(&scene.gate, "inner", route));
        let router = Router::new().nest("/api", Router::new().nest("/v1", items));
        check(
            &scene,
            router.route("/items/{id}", get("outside")),
            &[
                ("GET", "/api/v1/items/7", 200, true),
                ("HEAD", "/api/v1/items/7", 200, true),
                ("POST", "/api/v1/items/7", 200, false),
                ("GET", "/api/v1/other", 200, false),
                ("GET", "/items/7", 200, false),
            ],
        );
    }
}

#[test]
fn answers_that_no_handler_gives_say_how_the_caller_stands_too() {
    let scene = scene();
    let fails = get(async || -> Result<&'static str, StatusCode> { Err(StatusCode::INTERNAL_SERVER_ERROR) });
    let router = Router::new().route("/", get("fine")).route("/login", post("in")).route("/fails", fails);
    check(
        &scene,
        router.layer(layer(&scene.gate, "inner", Route::any())),
        &[
            ("GET", "/", 200, true),
            ("HEAD", "/", 200, true),
            ("GET", "/nowhere", 404, true),
            ("GET", "/login", 405, true),
            ("DELETE", "/", 405, true),
            ("GET", "/fails", 500, true),
            ("OPTIONS", "/", 405, true),
        ],
    );
}

#[test]
fn a_refusal_of_head_has_no_body() {
    let scene = Scene::new(On::Memory, |gate| gate.limit("inner", hourly(1)));
    let router = Router::new().route("/", get("fine")).layer(layer(&scene.gate, "inner", Route::any()));
    let mut caller = Connection::open(scene.serve_router(router));
    assert_eq!(caller.ask("HEAD", "/", &[]).status, 200);
    let denied = caller.ask("HEAD", "/", &[]);
    assert_eq!((denied.status, number(&denied, "retry-after")), (429, Some(3_600)), "{denied:?}");
    // The connection is in order: nothing of a body came after the head.
    assert_eq!(caller.ask("GET", "/", &[]).status, 429);
}

#[test]
fn layers_of_nested_routers_charge_each_their_own() {
    let scene = scene();
    let inside = Router::new().route("/x", get("x")).layer(layer(&scene.gate, "inner", Route::any()));
    let router = Router::new().nest("/in", inside).layer(layer(&scene.gate, "outer", Route::any()));
    let mut caller = Connection::open(scene.serve_router(router));
    let answer = caller.ask("GET", "/in/x", &[]);
    assert_eq!(
        answer.lines_of(&["ratelimit"]),
        [r#"ratelimit: "inner";r=99;t=3600"#, r#"ratelimit: "outer";r=99;t=3600"#],
    );
    assert_eq!(answer.lines_of(&["x-ratelimit-limit"]).len(), 1, "{answer:?}");
}

#[test]
fn a_handler_that_panics_breaks_nothing_but_its_connection() {
    let scene = scene();
    let panics = get(async || -> &'static str { panic!("on purpose") });
    let router = Router::new().route("/", get("fine")).route("/panic", panics);
    let address = scene.serve_router(router.layer(layer(&scene.gate, "inner", Route::any())));
    let mut kept = Connection::open(address);
    assert_eq!(kept.ask("GET", "/", &[]).status, 200);
    for _ in 0..3 {
        let mut broken = Connection::open(address);
        broken.send(b"GET /panic HTTP/1.1\r\nhost: here\r\n\r\n").expect("it listens");
        assert!(broken.receive(false).is_err());
    }
    // What was charged for them stays charged.
    assert_eq!(number(&kept.ask("GET", "/", &[]), "x-ratelimit-remaining"), Some(95));
}

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Serves on one thread, whose log is kept, and without telling the service where its callers are.
fn serve_without_peers(router: Router, log: &Log) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("an address");
    listener.set_nonblocking(true).expect("it can be polled");
    let log = log.clone();
    std::thread::spawn(move || {
        let writer = move || log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        let _logged = tracing::subscriber::set_default(subscriber);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
            axum::serve(listener, router).await
        })
    });
    address
}

#[test]
fn a_service_that_does_not_know_its_callers_denies_and_says_what_to_do() {
    let gate = Tollgate::builder().limit("per-client", hourly(5)).build().expect("a registry");
    let layer = layers(&gate).limit(RouteLimit::new("per-client", KeyExtractor::ip()));
    let router = Router::new().route("/", get("fine")).layer(layer.build().expect("a layer"));
    let log = Log::default();
    let mut caller = Connection::open(serve_without_peers(router, &log));
    let denied = caller.ask("GET", "/", &[]);
    assert_eq!((denied.status, denied.field("retry-after")), (429, None), "{denied:?}");
    assert_eq!(
        denied.body,
        concat!(
            r#"{"type":"about:blank","title":"Too Many Requests","status":429,"#,
            r#""detail":"the request has no key, or a malformed one","#,
            r#""violated-policies":["per-client"]}"#
        )
    );
    until("it is logged", || !log.0.lock().is_empty());
    let logged = String::from_utf8(log.0.lock().clone()).expect("text");
    let warnings: Vec<&str> = logged.lines().filter(|line| line.contains("WARN")).collect();
    assert_eq!(warnings.len(), 1, "{logged}");
    assert!(warnings[0].contains("into_make_service_with_connect_info"), "{logged}");
    assert!(warnings[0].contains("limiter=\"per-client\""), "{logged}");
}

#[test]
fn a_peer_is_whoever_is_at_the_other_end() {
    let scene = Scene::new(On::Memory, |gate| gate.limit("inner", hourly(2)));
    let layer = layers(&scene.gate).limit(RouteLimit::new("inner", KeyExtractor::ip()));
    let router = Router::new().route("/", get("fine")).layer(layer.build().expect("a layer"));
    let address = scene.serve_router(router);
    // Another connection from the same address is the same client, whatever it says of itself.
    for status in [200, 200, 429] {
        let line = format!("x-forwarded-for: 192.0.2.{status}");
        assert_eq!(Connection::open(address).ask("GET", "/", &[&line]).status, status);
    }
    assert_eq!(scene.used("inner", "ip:127.0.0.1"), 2);
}
