//! Limits and routes from a config file.

use std::error::Error;

use http::{Request, Response};
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate::http::{LimitLayer, Peer};
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tower::{Layer, Service};

use crate::{On, service};

const CONFIG: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "10/h"
burst = 20

[limits.login]
strategy = "fixed_window"
limit = 1
window = "1h"

[[routes]]
limit = "api"
key = "ip"

[[routes]]
path = "/login"
method = "POST"
limit = "login"
key = "ip"
"#;

#[tokio::test]
async fn routes_of_a_config() -> Result<(), Box<dyn Error>> {
    for on in On::all() {
        let config = Config::parse(CONFIG)?;
        let gate = on.connect(Tollgate::builder().config(&config)).await?;
        let layer = LimitLayer::from_config(&gate, &config)?;
        let mut app = layer.layer(service::of(|_: &Request<()>| Response::new(String::from("hello"))));
        for (method, path, status) in
            [("GET", "/login", 200), ("POST", "/login", 200), ("POST", "/login", 429), ("GET", "/", 200)]
        {
            let request = Request::builder().method(method).uri(path).extension(Peer("10.0.0.1:1".parse()?));
            let response = app.call(request.body(())?).await?;
            assert_eq!(response.status(), status, "{}: {method} {path}", on.name());
        }
        // The refused request was charged under neither limit.
        assert_eq!(gate.status("api", "ip:10.0.0.1").await?.used(), 3, "{}", on.name());
        assert_eq!(gate.status("login", "ip:10.0.0.1").await?.used(), 1, "{}", on.name());
        // The builder in code makes the same.
        let built = [
            RouteLimit::new("api", KeyExtractor::ip()),
            RouteLimit::new("login", KeyExtractor::ip()).on(Route::post("/login")),
        ];
        assert_eq!(config.routes, built);
    }
    Ok(())
}
