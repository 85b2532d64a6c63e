//! Only failed logins count.

use std::time::Duration;

use http::{Request, Response};
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, Tollgate};
use tower::{Layer, Service};

use crate::service;

#[tokio::test]
async fn failed_logins() -> Result<(), Box<dyn std::error::Error>> {
    let gate =
        Tollgate::builder().limit("logins", Limit::fixed_window(2, Duration::from_secs(60))?).build()?;
    let failed = RouteLimit::new("logins", KeyExtractor::header("x-user"))
        .on(Route::post("/login"))
        .count_if(|status| status == 401);
    let login = service::of(|request: &Request<&'static str>| {
        let status = if *request.body() == "secret" { 200 } else { 401 };
        Response::builder().status(status).body(String::new()).unwrap()
    });
    let mut app = LimitLayer::new(&gate, [failed])?.layer(login);
    for (password, status) in
        [("secret", 200), ("secret", 200), ("secret", 200), ("wrong", 401), ("wrong", 401), ("secret", 429)]
    {
        let request = Request::post("/login").header("x-user", "ann").body(password)?;
        assert_eq!(app.call(request).await.unwrap().status(), status);
    }
    Ok(())
}
