//! An axum service with limits: one on all requests together, one on each user, and a tighter one on searches.
//!
//! ```sh
//! cargo run -p tollgate --example axum --features axum,config,redis
//! RL_STORAGE_MODE=redis REDIS_ADDR=127.0.0.1:6379 cargo run -p tollgate --example axum --features axum,config,redis
//! ```
//!
//! It listens on port 3000, or on the one that `PORT` names.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::{Path, Request};
use axum::http::header::{AUTHORIZATION, HeaderValue};
use axum::middleware::{Next, from_fn};
use axum::response::Response;
use axum::routing::get;
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, MissingKey, Route, RouteLimit};

const POLICY: &str = r#"
[store]
fallback = "local"               # count in this process while the store is out of reach

[limits.global]
strategy = "token_bucket"
rate = "1000/s"
burst = 2000

[limits.per-user]
strategy = "token_bucket"
rate = "10/s"
burst = 20

[limits.search]
strategy = "sliding_window"
limit = 3
window = "1m"
"#;

#[tokio::main]
async fn main() {
    // What the limits have to warn of, such as a store that is out of reach, goes to standard error.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    if let Err(error) = run().await {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let config = Config::parse_with_env(POLICY, std::env::vars())?;
    let gate = Tollgate::open(&config).await?;

    // Whoever shows no key of ours pays by address, together with all who do the same from there.
    let user = || KeyExtractor::extension("user", |user: &User| user.0.to_owned()).if_missing(MissingKey::Ip);
    let limits = LimitLayer::builder(&gate)
        .limit(RouteLimit::new("global", KeyExtractor::constant("all")))
        .limit(RouteLimit::new("per-user", user()))
        .limit(RouteLimit::new("search", user()).on(Route::get("/search")))
        .skip(Route::get("/healthz"))
        .build()?;

    let router = Router::new()
        .route("/items/{id}", get(async |Path(id): Path<u64>| format!("item {id}\n")))
        .route("/search", get("found nothing\n"))
        .route("/healthz", get("ok\n"))
        .layer(limits.for_axum())
        .layer(from_fn(recognize));

    let port = match std::env::var("PORT") {
        Ok(port) => {
            port.parse().map_err(|_| format!("PORT is `{port}`, which is no port; give 0 to 65535"))?
        }
        Err(_) => 3000,
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.map_err(|error| format!("cannot listen on 127.0.0.1:{port}: {error}"))?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}, counting in {}", config.store.mode);
    println!("  curl -i http://{address}/items/7 -H 'authorization: Bearer key-of-ann'");
    println!(
        "  for i in 1 2 3 4; do curl -i http://{address}/search -H 'authorization: Bearer key-of-ann'; done"
    );

    // Without the connect info nobody would know whom a request comes from, and those that pay by address would be denied.
    axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

/// Who has shown a key that we know.
#[derive(Clone)]
struct User(&'static str);

/// Notes who asks. It stands outside of the limits, so that they need not believe what a request says of itself: with a made-up
/// name for each request, nobody would ever meet a limit.
async fn recognize(mut request: Request, next: Next) -> Response {
    let user = match request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes) {
        Some(b"Bearer key-of-ann") => Some(User("ann")),
        Some(b"Bearer key-of-bob") => Some(User("bob")),
        _ => None,
    };
    if let Some(user) = user {
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}
