//! One service, whose counters are where the environment says.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tokio::runtime::Runtime;
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate_testkit::http::Connection;

use crate::scene::{redis, serve_on};

const POLICY: &str = "
[store]
timeout = '5s'
fallback = 'closed'

[limits.environment]
strategy = 'fixed_window'
limit = 3
window = '1h'
";

/// The service, as its `main` would start it.
fn start(runtime: &Runtime, variables: &[(&str, &str)]) -> SocketAddr {
    let variables = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let config = Config::parse_with_env(POLICY, variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let gate = runtime.block_on(Tollgate::open(&config)).expect("opened");
    let layer = LimitLayer::builder(&gate).limit(RouteLimit::new("environment", KeyExtractor::ip()));
    let router = Router::new().route("/", get("fine")).layer(layer.build().expect("a layer"));
    serve_on(runtime, router)
}

/// What two instances of the service answer, asked in turn.
fn check(variables: &[(&str, &str)], expected: [u16; 8]) {
    let runtime = Runtime::new().expect("a runtime");
    let mut instances = [(); 2].map(|()| Connection::open(start(&runtime, variables)));
    let statuses: Vec<u16> = (0..8).map(|turn| instances[turn % 2].ask("GET", "/", &[]).status).collect();
    assert_eq!(statuses, expected, "{variables:?}");
}

#[test]
fn the_environment_says_where_is_counted() {
    let address = format!("127.0.0.1:{}", redis().port());
    check(
        &[("RL_STORAGE_MODE", "memory"), ("REDIS_ADDR", &address)],
        [200, 200, 200, 200, 200, 200, 429, 429],
    );
    check(
        &[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", &address)],
        [200, 200, 200, 429, 429, 429, 429, 429],
    );
}
