//! What only admins do: forget a key, read the config again.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{HOST, HeaderMap, HeaderValue, ORIGIN};
use http::uri::Authority;
use http::{Request, Response};
use hyper::body::Incoming;

use super::ask::{self, OfKey};
use super::body::Body;
use super::fault::Fault;
use super::{authorize, json, known_limit, posted};
use crate::app::App;

/// Forgets what a key was charged. Who asked is noted; the key is not.
pub(super) async fn reset(app: &App, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, &request)?;
    let body = posted(request).await?;
    let asked: OfKey<'_> = ask::read(&body)?;
    let key = asked.key.checked()?;
    let state = app.state();
    known_limit(&state, &asked.limit.0)?;
    match state.gate.reset(&asked.limit.0, key).await {
        Ok(forgotten) => {
            tracing::info!(limiter = &*asked.limit.0, forgotten, "a key was reset");
            Ok(json(format!("{{\"reset\":{forgotten}}}")))
        }
        Err(error) => Err(Fault::undecided(&error)),
    }
}

/// Reads the config file again, now.
pub(super) async fn reload(app: &Arc<App>, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    super::only(&request, "POST", &[http::Method::POST])?;
    authorize(app, &request)?;
    match crate::reload::reload(app) {
        Ok(()) => Ok(json("{\"reloaded\":true}".to_owned())),
        Err(why) => Err(Fault::malformed(why)),
    }
}

/// Where there is no token, whoever reaches the server is an admin, but for pages that a browser on such a machine shows: neither
/// one from elsewhere (`Origin`), nor one whose own name was made to mean this address (`Host`) may act for whoever looks at it.
pub(super) fn from_here(headers: &HeaderMap) -> Result<(), Fault> {
    let host = headers.get(HOST).map(HeaderValue::as_bytes);
    if host.is_some_and(|host| !is_address(host)) {
        return Err(Fault::forbidden(
            "without a token, admin calls are answered at an IP address or at localhost, not at another name; \
             set server.admin_token",
        ));
    }
    let asked_for = |origin: &HeaderValue| {
        let (_, place) = origin.to_str().ok()?.split_once("://")?;
        host.filter(|host| host.eq_ignore_ascii_case(place.as_bytes()))
    };
    if headers.get_all(ORIGIN).iter().any(|origin| asked_for(origin).is_none()) {
        return Err(Fault::forbidden(
            "without a token, admin calls are not answered to pages from elsewhere; set server.admin_token",
        ));
    }
    Ok(())
}

/// Whether a `Host` is one that nobody can make mean another address.
fn is_address(host: &[u8]) -> bool {
    let Ok(host) = Authority::try_from(host) else { return false };
    let name = host.host();
    name.eq_ignore_ascii_case("localhost") || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}
