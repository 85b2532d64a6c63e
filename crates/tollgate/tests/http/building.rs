//! A layer that makes no sense is not built, and says why.

use std::time::Duration;
use tollgate::http::{LimitLayer, LimitLayerBuilder};
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, Tollgate};

use crate::scene::window;

fn check(rules: impl FnOnce(LimitLayerBuilder) -> LimitLayerBuilder, why: &str) {
    let at_once = Limit::concurrency(2, Duration::from_secs(60)).expect("a limit");
    let gate =
        Tollgate::builder().limit("api", window(5)).limit("at-once", at_once).build().expect("a registry");
    let error = rules(LimitLayer::builder(&gate)).build().expect_err(why).to_string();
    assert!(error.contains(why), "{error}");
}

#[test]
fn mistakes_are_told_when_the_layer_is_built() {
    let route_limit = || RouteLimit::new("api", KeyExtractor::ip());
    check(|layer| layer, "a layer without a route limit limits nothing");
    check(|layer| layer.limit(RouteLimit::new("apy", KeyExtractor::ip())), "did you mean `api`?");
    check(|layer| layer.limit(route_limit().cost(0)), "a cost must be at least 1");
    check(|layer| layer.limit(route_limit().on(Route::at("users"))), "must start with `/`");
    check(|layer| layer.limit(route_limit()).skip(Route::at("/a{b}")), "a parameter is a whole segment");
    check(
        |layer| layer.limit(RouteLimit::new("api", KeyExtractor::header("x user"))),
        "not the name of a header field",
    );
    check(
        |layer| layer.limit(RouteLimit::new("api", KeyExtractor::header("x").namespace(""))),
        "the namespace is empty",
    );
    check(
        |layer| {
            layer.limit(
                RouteLimit::new("api", KeyExtractor::path_parameter("user")).on(Route::at("/users/{id}")),
            )
        },
        "the route's template has none of that name",
    );
    check(
        |layer| layer.limit(RouteLimit::new("at-once", KeyExtractor::ip()).settle_by_bytes_sent()),
        "a concurrency limit is released",
    );
    check(
        |layer| (0..65).fold(layer, |layer, _| layer.limit(route_limit())),
        "at most 64 limits, and 65 route limits apply to every request",
    );
}

#[test]
fn what_is_shown_of_a_layer_holds_no_key() {
    let gate = Tollgate::builder().limit("api", window(5)).build().expect("a registry");
    let builder = LimitLayer::builder(&gate).limit(RouteLimit::new("api", KeyExtractor::bearer()));
    assert!(format!("{builder:?}").contains("bearer"));
    assert!(format!("{:?}", builder.build().expect("a layer")).starts_with("LimitLayer"));
}
