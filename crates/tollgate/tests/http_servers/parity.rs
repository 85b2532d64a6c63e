//! Several limits on one request: all are charged or none, and every store says the same to the letter.

use std::time::Duration;

use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, TollgateBuilder};
use tollgate_testkit::Random;
use tollgate_testkit::http::Connection;

use crate::scene::{ALL, On, Scene, reported};

fn window(limit: u64) -> Limit {
    Limit::fixed_window(limit, Duration::from_secs(60)).expect("a limit")
}

#[test]
fn all_limits_are_charged_or_none() {
    for on in ALL {
        let scene = Scene::new(on, |gate| {
            gate.limit("global", window(6)).limit("search", window(2)).limit("user", window(3))
        });
        let layer = LimitLayer::builder(&scene.gate)
            .limit(RouteLimit::new("global", KeyExtractor::constant("all")))
            .limit(RouteLimit::new("search", KeyExtractor::constant("all")).on(Route::get("/search")))
            .limit(RouteLimit::new("user", KeyExtractor::header("x-user")));
        let mut caller = Connection::open(scene.serve(layer.build().expect("a layer")));
        // Who asks for what, the status, who denies, and what the three limits have been charged then.
        for (user, path, status, denies, used) in [
            ("ann", "/", 200, "", [1, 0, 1]),
            ("ann", "/search", 200, "", [2, 1, 2]),
            ("bob", "/search", 200, "", [3, 2, 1]),
            ("bob", "/search", 429, "\"search\"", [3, 2, 1]),
            ("ann", "/", 200, "", [4, 2, 3]),
            ("ann", "/", 429, "\"user\"", [4, 2, 3]),
            ("ann", "/search", 429, "\"search\",\"user\"", [4, 2, 3]),
            ("bob", "/", 200, "", [5, 2, 2]),
            ("eve", "/", 200, "", [6, 2, 1]),
            ("eve", "/", 429, "\"global\"", [6, 2, 1]),
            // Nobody pays: nothing is charged under the limits that others pay.
            ("", "/", 429, "\"global\",\"user\"", [6, 2, 0]),
        ] {
            let answer = caller.ask("GET", path, &[&format!("x-user: {user}")]);
            let context = format!("{on:?}: {user} {path}: {answer:?}");
            assert_eq!(answer.status, status, "{context}");
            let violated = format!("\"violated-policies\":[{denies}]}}");
            assert!(status == 200 || answer.body.ends_with(&violated), "{context}");
            let key = format!("x-user:{}", if user.is_empty() { "nobody" } else { user });
            let keys = [("global", "all:all"), ("search", "all:all"), ("user", &key)];
            assert_eq!(keys.map(|(limit, key)| scene.used(limit, key)), used, "{context}");
            // A refused client gets the current state, not the state after its charge.
            let reported = [("global", 6), ("search", 2), ("user", 3)].into_iter().zip(used);
            let reported = reported.filter(|((limit, _), _)| path == "/search" || *limit != "search");
            let reported: Vec<_> =
                reported.map(|((limit, most), used)| format!("\"{limit}\";r={};", most - used)).collect();
            let quota = answer.field("ratelimit").unwrap_or_default();
            let is_reported =
                quota.split(", ").count() == reported.len() && reported.iter().all(|one| quota.contains(one));
            assert!(is_reported || user.is_empty(), "{context}: not {reported:?}");
        }
    }
}

/// Limits of all strategies whose answers do not depend on when a body is out.
fn limits(gate: TollgateBuilder) -> TollgateBuilder {
    let rate = |text: &str| text.parse::<tollgate::Rate>().expect("a rate");
    let sound = |limit: Result<Limit, tollgate::store::LimitError>| limit.expect("a limit");
    gate.limit("global", sound(Limit::token_bucket(rate("40/m"), 8)))
        .limit("even", sound(Limit::leaky_bucket(rate("7/m"), 5)))
        .limit("user", sound(Limit::sliding_window(6, Duration::from_secs(30))))
        .limit("search", sound(Limit::sliding_window_counter(6, Duration::from_secs(20))))
        .limit("daily", sound(Limit::clock_window(25, Duration::from_secs(86_400))))
        .limit("write", window(4))
}

fn pick<T: Copy>(random: &mut Random, from: &[T]) -> T {
    from[usize::try_from(random.below(from.len() as u64)).expect("it is small")]
}

/// Sixty requests of three users, and all that they were reported.
fn script(on: On) -> Vec<String> {
    let scene = Scene::new(on, limits);
    let layer = LimitLayer::builder(&scene.gate)
        .most_delay(Duration::ZERO)
        .limit(RouteLimit::new("global", KeyExtractor::constant("all")))
        .limit(RouteLimit::new("user", KeyExtractor::header("x-user")))
        .limit(RouteLimit::new("daily", KeyExtractor::header("x-user")))
        .limit(RouteLimit::new("search", KeyExtractor::header("x-user")).cost(2).on(Route::get("/search")))
        .limit(RouteLimit::new("write", KeyExtractor::path_parameter("id")).on(Route::post("/items/{id}")))
        .limit(RouteLimit::new("even", KeyExtractor::constant("all")).on(Route::at("/even")));
    let mut caller = Connection::open(scene.serve(layer.build().expect("a layer")));
    let mut random = Random::seeded(60);
    let requests =
        [("GET", "/"), ("GET", "/search"), ("POST", "/items/7"), ("GET", "/even"), ("HEAD", "/search")];
    let mut all = Vec::new();
    for step in 0..60 {
        scene.hands.advance(Duration::from_micros(random.below(1_500_000)));
        let (method, path) = pick(&mut random, &requests);
        let user = pick(&mut random, &["ann", "bob", "eve"]);
        let answer = caller.ask(method, path, &[&format!("x-user: {user}")]);
        all.push(format!("{step} {method} {path} {user}: {}\n{}", reported(&answer), answer.body));
    }
    all
}

#[test]
fn every_store_says_the_same_to_the_letter() {
    let on_memory = script(On::Memory);
    let with = |status: &str| {
        on_memory.iter().filter(|reported| reported.contains(&format!(": {status}\n"))).count()
    };
    assert!(with("200") >= 15 && with("429") >= 15, "too much of one kind to mean anything: {on_memory:#?}");
    for on in [On::Redis, On::Postgres] {
        for (reported, expected) in script(on).iter().zip(&on_memory) {
            assert_eq!(reported, expected, "{on:?}");
        }
    }
}
