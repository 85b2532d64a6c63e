//! Which requests are charged under which limits.

use http::Method;
use tollgate::route::{EncodedSeparators, KeyExtractor, Route, RouteLimit};

use crate::scene::{BOTH, ask, gate, get, post, serve, statuses, used, window};

#[tokio::test]
async fn every_toll_on_the_way_is_charged_or_none() {
    for on in BOTH {
        let (gate, _) = gate(on, |gate| {
            gate.limit("global", window(4)).limit("per-user", window(2)).limit("exports", window(1))
        });
        let (service, inside) = serve(&gate, |layer| {
            layer
                .limit(RouteLimit::new("global", KeyExtractor::constant("all")))
                .limit(RouteLimit::new("per-user", KeyExtractor::header("x-user")))
                .limit(RouteLimit::new("exports", KeyExtractor::header("x-user")).on(Route::post("/exports")))
        });
        let alice = || get("/").with("x-user", "alice");
        let export = || post("/exports").with("x-user", "bob");
        assert_eq!(statuses(&service, [alice(), export(), export()]).await, [200, 200, 429], "{on:?}");
        // The refused export took nothing anywhere.
        assert_eq!(used(&gate, "global", "all:all").await, 2, "{on:?}");
        assert_eq!(used(&gate, "per-user", "x-user:bob").await, 1, "{on:?}");
        assert_eq!(statuses(&service, [alice(), alice()]).await, [200, 429], "{on:?}");
        let bob = || get("/").with("x-user", "bob");
        assert_eq!(statuses(&service, [bob(), get("/").with("x-user", "carol")]).await, [200, 429], "{on:?}");
        assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 4, "{on:?}");
    }
}

/// Which of these requests a route covers.
async fn covers(route: Route, expected: &[(&str, &str, bool)]) {
    let (gate, _) = gate(BOTH[0], |gate| gate.limit("api", window(1_000)));
    let (service, _) = serve(&gate, |layer| {
        layer.limit(RouteLimit::new("api", KeyExtractor::constant("all")).on(route.clone()))
    });
    for (method, path, covered) in expected {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let answer = ask(&service, get(path).by(method.clone())).await;
        let is_covered = !answer.field("x-ratelimit-limit").is_empty();
        assert_eq!((answer.status, is_covered), (200, *covered), "{route:?} {method} {path}");
    }
}

#[tokio::test]
async fn routes_are_templates_prefixes_and_methods() {
    covers(Route::any(), &[("GET", "/", true), ("PURGE", "/a//b", true)]).await;
    covers(
        Route::at("/users/{id}"),
        &[
            ("GET", "/users/7", true),
            ("DELETE", "/users/7/", true),
            ("GET", "/users", false),
            ("GET", "/users/7/posts", false),
            // The same path in other spellings.
            ("GET", "//users//7", true),
            ("GET", "/./users/x/../7", true),
            ("GET", "/%75sers/7", true),
            ("GET", "/users/7?x=/y", true),
            ("GET", "/users/..", true),
            ("GET", "/users/.", true),
            ("GET", "/Users/7", false),
        ],
    )
    .await;
    covers(
        Route::get("/page"),
        &[("GET", "/page", true), ("HEAD", "/page", true), ("POST", "/page", false), ("get", "/page", false)],
    )
    .await;
    covers(Route::put("/x"), &[("PUT", "/x", true), ("PATCH", "/x", false)]).await;
    covers(Route::patch("/x").method(Method::PUT), &[("PUT", "/x", true), ("PATCH", "/x", true)]).await;
    covers(Route::delete("/x"), &[("DELETE", "/x", true), ("GET", "/x", false)]).await;
    covers(
        Route::below("/api/").except(Route::get("/api/health")).except(Route::below("/api/docs")),
        &[
            ("GET", "/api", true),
            ("GET", "/api/v1/x", true),
            ("GET", "/apis", false),
            ("GET", "/api/health", false),
            ("POST", "/api/health", true),
            ("GET", "/api/docs/a/b", false),
            // Exceptions are made only for what is written plainly.
            ("GET", "/api/x/../health", true),
            ("GET", "/api/health/", true),
            ("GET", "/api//health", true),
            ("GET", "/api/docs/../a", true),
            // And what leads out of it by dots may still be below it to a router.
            ("GET", "/api/../a", true),
            ("GET", "/api/%2e%2e/a", true),
            ("GET", "/API/v1", false),
        ],
    )
    .await;
}

#[tokio::test]
async fn what_is_skipped_is_neither_charged_nor_marked() {
    let (gate, _) = gate(BOTH[0], |gate| gate.limit("api", window(1)));
    let (service, _) = serve(&gate, |layer| {
        layer
            .limit(RouteLimit::new("api", KeyExtractor::ip()))
            .skip(Route::get("/healthz"))
            .skip_from(
                ["10.0.0.0/8", "::ffff:9.9.9.0/120"].map(|network| network.parse().expect("a network")),
            )
            .skip_when(|head| head.header("x-internal") == Some("yes"))
    });
    for asked in [
        get("/healthz"),
        get("/").from("10.1.2.3:80"),
        get("/").from("[::ffff:10.1.2.3]:80"),
        get("/").from("9.9.9.9:80"),
        get("/").with("x-internal", "yes"),
    ] {
        let answer = ask(&service, asked).await;
        assert_eq!((answer.status, answer.field("x-ratelimit-limit")), (200, ""));
    }
    assert_eq!(used(&gate, "api", "ip:192.0.2.1").await, 0);
    // What a router might take for something else is not let pass.
    for (number, path) in
        ["//healthz", "/./healthz", "/x/../healthz", "/%68ealthz", "/healthz/", "/healthz/.", "/../healthz"]
            .iter()
            .enumerate()
    {
        let asked = || get(path).from(&format!("198.51.100.{number}:1"));
        assert_eq!(statuses(&service, [asked(), asked()]).await, [200, 429], "{path}");
    }
    // A header does not make an address.
    let spoofed = || get("/").with("x-forwarded-for", "10.1.2.3");
    assert_eq!(statuses(&service, [spoofed(), spoofed()]).await, [200, 429]);
    assert_eq!(statuses(&service, [post("/healthz")]).await, [429]);
}

#[tokio::test]
async fn a_path_that_has_no_one_spelling_is_refused_where_paths_matter() {
    let (gate, _) = gate(BOTH[0], |gate| gate.limit("api", window(100)));
    let route_limit = || RouteLimit::new("api", KeyExtractor::constant("all"));
    let (strict, inside) = serve(&gate, |layer| layer.limit(route_limit().on(Route::below("/api"))));
    let (keeping, _) = serve(&gate, |layer| {
        layer.limit(route_limit().on(Route::at("/api/{x}"))).encoded_separators(EncodedSeparators::Keep)
    });
    let (blind, _) = serve(&gate, |layer| layer.limit(route_limit()));
    for (path, kept) in [("/api/a%2Fb", 200), ("/api/a%5cb", 200), ("/api/a%00b", 400), ("/api/a%zz", 400)] {
        let answer = ask(&strict, get(path)).await;
        assert_eq!(
            (answer.status, answer.field("content-type")),
            (400, "application/problem+json"),
            "{path}"
        );
        assert!(!answer.body.contains(path) && answer.body.contains("\"status\":400"), "{}", answer.body);
        assert_eq!(ask(&keeping, get(path)).await.status, kept, "{path}");
        assert_eq!(ask(&blind, get(path)).await.status, 200, "{path}");
    }
    assert_eq!(inside.calls.load(std::sync::atomic::Ordering::Relaxed), 0);
}
