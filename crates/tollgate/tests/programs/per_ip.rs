//! Per IP address, in a tower service.

use std::error::Error;

use http::{Request, Response};
use tollgate::http::{LimitLayer, Peer};
use tollgate::route::{KeyExtractor, RouteLimit};
use tollgate::{Limit, Tollgate};
use tower::{Layer, Service};

use crate::{On, service};

#[tokio::test]
async fn per_ip() -> Result<(), Box<dyn Error>> {
    for on in On::all() {
        let gate = on.connect(Tollgate::builder().limit("per-ip", Limit::token_bucket("1/h", 2)?)).await?;
        let layer = LimitLayer::new(&gate, [RouteLimit::new("per-ip", KeyExtractor::ip())])?;

        let mut app = layer.layer(service::of(|_: &Request<()>| Response::new(String::from("hello"))));
        for (ip, status) in [("10.0.0.1", 200), ("10.0.0.1", 200), ("10.0.0.1", 429), ("10.0.0.2", 200)] {
            let request = Request::builder().extension(Peer(format!("{ip}:1").parse()?)).body(())?;
            let response = app.call(request).await?;
            let is_denied = response.headers().contains_key("retry-after");
            assert_eq!(
                (response.status().as_u16(), is_denied),
                (status, status == 429),
                "{}: {ip}",
                on.name()
            );
        }
        assert_eq!(gate.status("per-ip", "ip:10.0.0.1").await?.used(), 2, "{}", on.name());
    }
    Ok(())
}
