//! How the requests of a config's routes are read, and configs that make no layer. The program itself is
//! `programs/from_config.rs`.

use http::{Request, Response};
use tollgate::config::Config;
use tollgate::http::{LimitLayer, Peer};
use tollgate::route::AuthenticatedUser;
use tollgate::{Error, Tollgate};
use tower::{Layer, Service};

use crate::service;

#[tokio::test]
async fn requests_are_read_as_the_config_says() -> Result<(), Error> {
    let config = Config::parse(
        "[requests]\ntrusted_proxies = ['10.0.0.0/8']\nipv4_prefix = 24\nuser_header = 'x-user'\n\
         [limits.one]\nstrategy = 'fixed_window'\nlimit = 1\nwindow = '1m'\n\
         [[routes]]\nlimit = 'one'\nkey = 'user'\nif_missing = 'ip'\n",
    )?;
    let gate = Tollgate::builder().config(&config).build()?;
    let layer = LimitLayer::from_config(&gate, &config)?;
    let mut app = layer.layer(service::of(|_: &Request<()>| Response::new(String::new())));
    let mut ask = async |peer: &str, client: &str, user: &str, known: Option<&str>| {
        let request = Request::builder().extension(Peer(format!("{peer}:1").parse().unwrap()));
        let request = request.header("x-forwarded-for", client).header("x-user", user);
        let request =
            known.into_iter().fold(request, |request, user| request.extension(AuthenticatedUser::new(user)));
        app.call(request.body(()).unwrap()).await.unwrap().status().as_u16()
    };
    // A proxy says whose request it is, and which user it authenticated.
    assert_eq!(ask("10.0.0.1", "203.0.113.7", "ann", None).await, 200);
    assert_eq!(ask("10.0.0.1", "203.0.113.8", "ann", None).await, 429);
    assert_eq!(ask("10.0.0.1", "203.0.113.8", "", None).await, 200, "by the network");
    assert_eq!(ask("10.0.0.1", "203.0.113.9", "", None).await, 429, "one network");
    // Anybody else does not.
    assert_eq!(ask("198.51.100.1", "203.0.114.1", "bob", None).await, 200);
    assert_eq!(ask("198.51.100.2", "203.0.115.1", "eve", None).await, 429);
    // What the program has authenticated is known whatever the client sends.
    assert_eq!(ask("198.51.100.2", "203.0.115.1", "eve", Some("eve")).await, 200);
    assert_eq!(gate.status("one", "user:eve").await?.used(), 1);
    assert_eq!(gate.status("one", "user:bob").await?.used(), 0);
    Ok(())
}

#[test]
fn a_config_without_routes_or_for_another_gate_makes_no_layer() {
    let config = Config::parse("[limits.api]\nunlimited = true").unwrap();
    let gate = Tollgate::builder().config(&config).build().unwrap();
    let error = LimitLayer::from_config(&gate, &config).unwrap_err().to_string();
    assert!(error.contains("add one with `limit`, or [[routes]] to the config"), "{error}");
    let other = Tollgate::builder().build().unwrap();
    let config = Config::parse("[limits.api]\nunlimited = true\n[[routes]]\nlimit = 'api'").unwrap();
    let error = LimitLayer::from_config(&other, &config).unwrap_err().to_string();
    assert!(error.contains("api"), "{error}");
}
