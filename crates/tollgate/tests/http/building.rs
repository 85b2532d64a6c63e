//! A layer that makes no sense is not built, and says why.

use std::time::Duration;
use tollgate::http::{LimitLayer, LimitLayerBuilder, Payer, Route, Toll};
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
    let toll = || Toll::new("api", Payer::client());
    check(|layer| layer, "a layer without a toll limits nothing");
    check(|layer| layer.toll(Route::any(), Toll::new("apy", Payer::client())), "did you mean `api`?");
    check(|layer| layer.toll(Route::any(), toll().cost(0)), "a cost must be at least 1");
    check(|layer| layer.toll(Route::at("users"), toll()), "must start with `/`");
    check(
        |layer| layer.toll(Route::any(), toll()).skip(Route::at("/a{b}")),
        "a parameter is a whole segment",
    );
    check(
        |layer| layer.toll(Route::any(), Toll::new("api", Payer::header("x user"))),
        "not the name of a header field",
    );
    check(
        |layer| layer.toll(Route::any(), Toll::new("api", Payer::header("x").namespace(""))),
        "the namespace is empty",
    );
    check(
        |layer| layer.toll(Route::at("/users/{id}"), Toll::new("api", Payer::parameter("user"))),
        "the route's template has none of that name",
    );
    check(
        |layer| layer.toll(Route::any(), Toll::new("at-once", Payer::client()).by_bytes_sent()),
        "a concurrency limit is given back",
    );
    check(
        |layer| (0..65).fold(layer, |layer, _| layer.toll(Route::any(), toll())),
        "at most 64 tolls, and this one has 65",
    );
}

#[test]
fn what_is_shown_of_a_layer_holds_no_key() {
    let gate = Tollgate::builder().limit("api", window(5)).build().expect("a registry");
    let builder = LimitLayer::builder(&gate).toll(Route::any(), Toll::new("api", Payer::bearer()));
    assert!(format!("{builder:?}").contains("bearer"));
    assert!(format!("{:?}", builder.build().expect("a layer")).starts_with("LimitLayer"));
}
