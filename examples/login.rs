//! A login that counts only failures: a few for each address, a few for each account, and none while nobody can count.
//!
//! ```sh
//! cargo run -p tollgate --example login --features axum,config,redis
//! ```
//!
//! A limit on addresses alone lets a botnet try one account from everywhere; a limit on accounts alone lets one machine try every
//! account once. So both are charged, and a login that succeeds is given back. A limit on accounts also lets strangers keep an
//! owner out for a while, so it should be no tighter than guessing demands. The layer reads no bodies: the account's name is in a
//! header, where the login itself finds it too. It listens on port 3000, or on the one that `PORT` names.

use std::net::SocketAddr;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use tollgate::Tollgate;
use tollgate::config::Config;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, Route, RouteLimit};

const POLICY: &str = r#"
[store]
fallback = "closed"              # rather no logins than logins that nobody counts

[limits.failures-by-address]
strategy = "sliding_window"
limit = 10
window = "15m"

[limits.failures-by-account]
strategy = "sliding_window"
limit = 3
window = "15m"
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
    let gate = Tollgate::open(&Config::parse_with_env(POLICY, std::env::vars())?).await?;

    // What is counted only afterwards is reserved before: a thousand guesses at once do not all pass before the first has failed.
    let failed = |status| status == StatusCode::UNAUTHORIZED;
    // `Alice`, ` alice ` and `ＡＬＩＣＥ` are one account here, as they are to the login itself.
    let account = KeyExtractor::header("x-account").namespace("account").folded();
    let limits = LimitLayer::builder(&gate)
        .limit(
            RouteLimit::new("failures-by-address", KeyExtractor::ip())
                .count_if(failed)
                .on(Route::post("/login")),
        )
        .limit(RouteLimit::new("failures-by-account", account).count_if(failed).on(Route::post("/login")))
        .build()?;
    let router = Router::new().route("/login", post(login)).layer(limits.for_axum());

    let port = match std::env::var("PORT") {
        Ok(port) => {
            port.parse().map_err(|_| format!("PORT is `{port}`, which is no port; give 0 to 65535"))?
        }
        Err(_) => 3000,
    };
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await;
    let listener = listener.map_err(|error| format!("cannot listen on 127.0.0.1:{port}: {error}"))?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}");
    println!("  curl -i -X POST http://{address}/login -H 'x-account: alice' -d 'open sesame'");
    println!(
        "  for i in 1 2 3 4; do curl -i -X POST http://{address}/login -H 'x-account: alice' -d guess; done"
    );
    axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

/// Everybody's password is the same, which is not what this example is about.
async fn login(headers: HeaderMap, password: String) -> (StatusCode, &'static str) {
    match headers.contains_key("x-account") && password == "open sesame" {
        true => (StatusCode::OK, "welcome\n"),
        false => (StatusCode::UNAUTHORIZED, "wrong account or password\n"),
    }
}
