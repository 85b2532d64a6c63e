//! Only failed logins count.

use std::error::Error;
use std::time::Duration;

use http::{Request, Response};
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, Tollgate};
use tower::{Layer, Service};

use crate::{On, service};

#[tokio::test]
async fn failed_logins() -> Result<(), Box<dyn Error>> {
    for on in On::all() {
        let limit = Limit::fixed_window(2, Duration::from_secs(3_600))?;
        let gate = on.connect(Tollgate::builder().limit("logins", limit)).await?;
        let failed = RouteLimit::new("logins", KeyExtractor::header("x-user"))
            .on(Route::post("/login"))
            .count_if(|status| status == 401);
        let login = service::of(|request: &Request<&'static str>| {
            let status = if *request.body() == "secret" { 200 } else { 401 };
            Response::builder().status(status).body(String::new()).unwrap()
        });
        let mut app = LimitLayer::new(&gate, [failed])?.layer(login);
        for (password, status, used) in [
            ("secret", 200, 0),
            ("secret", 200, 0),
            ("secret", 200, 0),
            ("wrong", 401, 1),
            ("wrong", 401, 2),
            ("secret", 429, 2),
        ] {
            let request = Request::post("/login").header("x-user", "ann").body(password)?;
            let answer = app.call(request).await?.status().as_u16();
            let counted = gate.status("logins", "x-user:ann").await?.used();
            assert_eq!((answer, counted), (status, used), "{}: {password}", on.name());
        }
    }
    Ok(())
}
