//! How many at once: a place is taken while a request is inside, and free when its answer is out or it has come to grief.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::response::Response;
use axum::routing::get;
use axum::{Extension, Router};
use std::time::Duration;
use tokio::sync::Semaphore;
use tollgate::Limit;
use tollgate::headers::ResetAs;
use tollgate::http::{Lease, LimitLayer};
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate_testkit::http::{Answer, Connection};

use crate::scene::{ALL, On, Scene, format, reported, until};

/// A service whose requests to `/held` stay inside until they are let go, in the order in which they came.
#[derive(Clone)]
struct Held {
    inside: Arc<AtomicUsize>,
    let_go: Arc<Semaphore>,
}

impl Held {
    fn new() -> Held {
        Held { inside: Arc::default(), let_go: Arc::new(Semaphore::new(0)) }
    }

    fn router(&self, layer: LimitLayer) -> Router {
        let held = self.clone();
        let handler = async move || {
            held.inside.fetch_add(1, Ordering::SeqCst);
            held.let_go.acquire().await.expect("it is never closed").forget();
            "held"
        };
        Router::new().route("/held", get(handler)).fallback(async || "fine").layer(layer)
    }
}

/// What a caller of two places is reported.
fn expected(status: u16, left: u64, reset: u64, retry: Option<u64>, more: u64) -> String {
    let retry = retry.map_or(String::new(), |seconds| format!("retry-after: {seconds}\n"));
    format!(
        "{status}\nx-ratelimit-limit: 2\nx-ratelimit-remaining: {left}\nx-ratelimit-reset: {reset}\n{retry}\
         ratelimit-policy: \"busy\";q=2;qu=\"concurrent-requests\"\nratelimit: \"busy\";r={left};t={more}"
    )
}

/// Two places with leases of a minute, taken, given back and run out. In memory they do not run out while a request is inside.
fn check(on: On, scene: &Scene, reset: ResetAs) {
    let route_limit = RouteLimit::new("busy", KeyExtractor::header("x-user"));
    let layer = LimitLayer::builder(&scene.gate).limit(route_limit).headers(format(reset));
    let held = Held::new();
    let address = scene.serve_router(held.router(layer.build().expect("a layer")));
    let user = format!("x-user: {reset:?}");
    let mut callers = [(); 3].map(|()| Connection::open(address));
    let [first, second, third] = &mut callers;
    let start = scene.next_hour();
    let at = |seconds: u64, since_start: u64| match reset {
        ResetAs::Seconds => seconds,
        ResetAs::UnixTime => start + since_start,
    };
    let hold = |caller: &mut Connection, number: usize| {
        let request = format!("GET /held HTTP/1.1\r\nhost: here\r\n{user}\r\n\r\n");
        caller.send(request.as_bytes()).expect("it listens");
        until("a request is inside, or answered", || {
            held.inside.load(Ordering::SeqCst) == number || caller.has_answer()
        });
        let inside = held.inside.load(Ordering::SeqCst);
        assert_eq!(inside, number, "{on:?} {reset:?}: it was answered: {:?}", caller.receive(false));
    };
    let let_go = |caller: &mut Connection| {
        held.let_go.add_permits(1);
        caller.receive(false).expect("an answer")
    };
    let is_held = |count: u64| {
        until("a place is free", || scene.used("busy", &format!("x-user:{reset:?}")) == count);
    };
    let ask = |caller: &mut Connection| -> Answer { caller.ask("GET", "/", &[&user]) };

    hold(first, 1);
    scene.hands.advance(Duration::from_secs(10));
    hold(second, 2);
    scene.hands.advance(Duration::from_millis(5_500));
    // At 15.5 s, with leases to 60 and 70 s; without an end, a whole lease is the guess.
    let denied = ask(third);
    let (told_reset, retry) = if on == On::Memory { (at(60, 76), 60) } else { (at(55, 70), 45) };
    assert_eq!(reported(&denied), expected(429, 0, told_reset, Some(retry), retry));
    let words = format!("busy allows 2 at once, leases of 1m; retry after {retry} s");
    assert!(denied.body.contains(&words), "{}", denied.body);
    // The first is done, and reported how it stood when it came.
    assert_eq!(reported(&let_go(first)), expected(200, 1, at(60, 60), None, 60));
    is_held(1);
    assert_eq!(reported(&ask(third)), expected(200, 0, at(60, 76), None, 60));
    is_held(1);
    // The second still holds its place when its lease ends.
    scene.hands.advance(Duration::from_millis(54_500));
    let left = if on == On::Memory { 0 } else { 1 };
    assert_eq!(reported(&ask(third)), expected(200, left, at(60, 130), None, 60));
    assert_eq!(reported(&let_go(second)), expected(200, 0, at(60, 70), None, 60));
    is_held(0);
}

#[test]
fn a_place_is_taken_while_a_request_is_inside() {
    for on in ALL {
        let busy = Limit::concurrency(2, Duration::from_secs(60)).expect("a limit");
        let scene = Scene::new(on, |gate| gate.limit("busy", busy));
        for reset in [ResetAs::Seconds, ResetAs::UnixTime] {
            println!("{on:?} {reset:?}");
            check(on, &scene, reset);
        }
    }
}

/// A client that disconnects, or whose handler panics, keeps no lease.
#[test]
fn a_place_is_given_back_whatever_becomes_of_the_request() {
    for on in ALL {
        let busy = Limit::concurrency(1, Duration::from_secs(60)).expect("a limit");
        let scene = Scene::new(on, |gate| gate.limit("busy", busy));
        let route_limit = RouteLimit::new("busy", KeyExtractor::constant("all"));
        let layer = LimitLayer::builder(&scene.gate).limit(route_limit).build().expect("a layer");
        let held = Held::new();
        let panics = get(async || -> &'static str { panic!("on purpose") });
        let router = held.router(layer.clone()).merge(Router::new().route("/panic", panics).layer(layer));
        let address = scene.serve_router(router);
        let is_free = || until("the place is free", || scene.used("busy", "all:all") == 0);

        let mut gone = Connection::open(address);
        gone.send(b"GET /held HTTP/1.1\r\nhost: here\r\n\r\n").expect("it listens");
        until("a request is inside", || held.inside.load(Ordering::SeqCst) == 1);
        assert_eq!(Connection::open(address).ask("GET", "/", &[]).status, 429, "{on:?}");
        drop(gone);
        is_free();

        let mut broken = Connection::open(address);
        broken.send(b"GET /panic HTTP/1.1\r\nhost: here\r\n\r\n").expect("it listens");
        assert!(broken.receive(false).is_err(), "{on:?}: the connection ends where a handler panics");
        is_free();
        assert_eq!(Connection::open(address).ask("GET", "/", &[]).status, 200, "{on:?}");
    }
}

/// A connection that becomes another protocol is busy for as long as it lives. Its lease used to end with the head of the answer, so
/// a limit on concurrent connections admitted any number of WebSockets.
#[test]
fn an_upgraded_connection_keeps_its_place_for_as_long_as_its_handler_does() {
    for on in ALL {
        let busy = Limit::concurrency(1, Duration::from_secs(60)).expect("a limit");
        let scene = Scene::new(on, |gate| gate.limit("busy", busy));
        let route_limit = RouteLimit::new("busy", KeyExtractor::constant("all"));
        let layer = LimitLayer::builder(&scene.gate).limit(route_limit).build().expect("a layer");
        let let_go = Arc::new(Semaphore::new(0));
        let upgraded = || Response::builder().status(101).header("upgrade", "chat").body(Body::empty());
        let kept = {
            let let_go = let_go.clone();
            get(async move |lease: Extension<Lease>| {
                tokio::spawn(async move {
                    let _served = lease;
                    let_go.acquire().await.expect("it is never closed").forget();
                });
                upgraded().expect("an answer")
            })
        };
        let left = get(async move |_: Extension<Lease>| upgraded().expect("an answer"));
        let router = Router::new().route("/kept", kept).route("/left", left).fallback(async || "fine");
        for router in [router.clone().layer(layer.clone()), router.layer(layer.for_axum())] {
            let address = scene.serve_router(router);
            let upgrade = |path: &str| {
                let mut connection = Connection::open(address);
                let lines = ["connection: upgrade", "upgrade: chat"];
                assert_eq!(connection.ask("GET", path, &lines).status, 101, "{on:?} {path}");
                connection
            };
            let ask = || Connection::open(address).ask("GET", "/", &[]).status;
            let is_free = || until("the place is free", || scene.used("busy", "all:all") == 0);

            let _connection = upgrade("/kept");
            assert_eq!(scene.used("busy", "all:all"), 1, "{on:?}: it holds its place");
            assert_eq!(ask(), 429, "{on:?}");
            let_go.add_permits(1);
            is_free();
            assert_eq!(ask(), 200, "{on:?}");
            is_free();
            // Where the handler keeps nothing, it is over with its answer.
            let _connection = upgrade("/left");
            is_free();
        }
    }
}
