//! A tonic service with a limit on each client: a call over it ends with RESOURCE_EXHAUSTED, and says how long to wait.
//!
//! ```sh
//! cargo run -p tollgate --example grpc --features http
//! ```
//!
//! The service is tonic's own health service, so that nothing need be compiled from a .proto file; the layer stands before any
//! other in the same way. It listens on port 3001, or on the one that `PORT` names.

use std::time::Duration;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, Tollgate};
use tonic::transport::Server;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};

#[tokio::main]
async fn main() {
    if let Err(error) = run().await {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let gate =
        Tollgate::builder().limit("checks", Limit::fixed_window(3, Duration::from_secs(60))?).build()?;
    let limits = LimitLayer::builder(&gate)
        .limit(RouteLimit::new("checks", KeyExtractor::ip()).on(Route::below("/grpc.health.v1.Health")))
        // This is where tonic notes whom it has accepted.
        .peer_from(|extensions| extensions.get::<TcpConnectInfo>()?.remote_addr())
        .build()?;

    let port = match std::env::var("PORT") {
        Ok(port) => {
            port.parse().map_err(|_| format!("PORT is `{port}`, which is no port; give 0 to 65535"))?
        }
        Err(_) => 3001,
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    println!("  for i in 1 2 3 4; do grpc_health_probe -addr={address}; done");

    let (_, health) = tonic_health::server::health_reporter();
    Server::builder()
        .layer(limits)
        .add_service(health)
        .serve_with_incoming(TcpIncoming::from(listener))
        .await?;
    Ok(())
}
