//! Per IP address, in a tower service.

use http::{Request, Response};
use tollgate::http::{LimitLayer, Peer};
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::{Error, Limit, Tollgate};
use tower::{Layer, Service};

use crate::service;

#[tokio::test]
async fn per_ip() -> Result<(), Error> {
    let gate = Tollgate::builder().limit("per-ip", Limit::token_bucket("1/m", 2)?).build()?;
    let layer = LimitLayer::new(&gate, [RouteLimit::new("per-ip", KeyExtractor::ip())])?;

    let mut app = layer.layer(service::of(|_: &Request<()>| Response::new(String::from("hello"))));
    for (ip, status) in [("10.0.0.1", 200), ("10.0.0.1", 200), ("10.0.0.1", 429), ("10.0.0.2", 200)] {
        let request =
            Request::builder().extension(Peer(format!("{ip}:1").parse().unwrap())).body(()).unwrap();
        let response = app.call(request).await.unwrap();
        assert_eq!(response.status(), status, "{ip}");
        assert_eq!(response.headers().contains_key("retry-after"), status == 429, "{ip}");
    }
    Ok(())
}
