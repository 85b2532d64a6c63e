//! `/v1/gate`: applies the config's `[[routes]]` to the request that a proxy describes, with the same code as the tower layer and
//! backtest.
//!
//! The description is accepted only from a trusted proxy (`[requests] trusted_proxies`). A proxy describes a request in one of
//! two ways: `X-Original-Method` and `X-Original-URI`, or `X-Forwarded-Method` and `X-Forwarded-Uri`. The client's own headers
//! are passed along, so a client can add the headers of the other way. A request that is described in both ways, or twice in one
//! way, is refused, and never read in the way that the client chose. The client's address comes from `X-Forwarded-For`, from the
//! right past the trusted proxies.
//!
//! A client can only cause a denial, with the status of the proxy's choice (`?deny=403`), never a fault that a proxy may take for
//! "Tollgate is down" and let pass.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use http::{HeaderMap, Method, Response, StatusCode};
use tollgate::Charge;
use tollgate::config::Config;
use tollgate::route::{Described, RequestLimit, RouteCharge, RouteLimit, Routes};

use super::body::{Body, full};
use super::fault::Fault;
use super::gate::{read_deny, response};
use super::undecided;
use crate::app::{App, State};
use crate::front::peer;
use crate::validate::is_concurrency;

/// The headers of the two ways to describe a request.
const ORIGINAL: [&str; 2] = ["x-original-method", "x-original-uri"];
const FORWARDED: [&str; 2] = ["x-forwarded-method", "x-forwarded-uri"];

/// The routes of a config, as the gate applies them.
pub(crate) struct GateRoutes {
    /// They were compiled when the config was read, so there is no error; if there were one, the gate would refuse everything.
    routes: Result<Routes, tollgate::Error>,
    /// The routes that a gate cannot apply because it sees no response, and why.
    left_out: Vec<String>,
    is_reported: AtomicBool,
}

impl GateRoutes {
    pub(crate) fn new(config: &Config) -> GateRoutes {
        let mut left_out = Vec::new();
        let mut kept = Vec::new();
        for (number, route) in (1..).zip(&config.routes) {
            match why_not(config, route) {
                Some(why) => left_out.push(format!("routes[{number}]: {why}")),
                None => kept.push(route.clone()),
            }
        }
        let routes = Routes::new(kept).map(|routes| routes.read_by(config.requests.reader()));
        GateRoutes { routes, left_out, is_reported: AtomicBool::new(false) }
    }

    /// Logs, once, which routes are not applied.
    fn report_left_out(&self) {
        if !self.left_out.is_empty() && !self.is_reported.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                routes = self.left_out.join("; "),
                "the gate does not apply routes that need the response"
            );
        }
    }
}

/// Why a gate, which sees no response, cannot apply a route.
fn why_not(config: &Config, route: &RouteLimit) -> Option<&'static str> {
    let concurrency = is_concurrency(&config.policy, route.limit().unwrap_or_default());
    route
        .needs_response()
        .or(concurrency.then_some("a concurrency limit is released when the response is done"))
}

/// Charges the described request.
pub(super) async fn answer(
    app: &App,
    peer: IpAddr,
    query: Option<&str>,
    headers: &HeaderMap,
) -> Result<Response<Body>, Fault> {
    let deny = match query.unwrap_or_default().split_once('=') {
        None if query.unwrap_or_default().is_empty() => StatusCode::TOO_MANY_REQUESTS,
        Some(("deny", status)) => read_deny(status)?,
        _ => {
            return Err(Fault::malformed(
                "the query of /v1/gate may have `deny`, as in ?deny=403; the limits are in the config's [[routes]]",
            ));
        }
    };
    let state = app.state();
    let routes = trusted_routes(&state, peer)?;
    state.routes.report_left_out();
    // What is wrong with the description is the client's or the proxy's doing.
    let refused = |fault: Fault| match deny {
        StatusCode::TOO_MANY_REQUESTS => fault,
        deny => fault.with_status(deny),
    };
    let (method, target, host) = describe(headers).map_err(refused)?;
    let found: Vec<RouteCharge<'_>> = {
        let described = Described { method: &method, target, host, headers, peer };
        let request =
            routes.described(&described).map_err(|error| refused(Fault::malformed(error.to_string())))?;
        routes.charges(&request).collect()
    };
    if found.is_empty() {
        let mut response = Response::new(full(bytes::Bytes::new()));
        let no_store = http::HeaderValue::from_static("no-store");
        response.headers_mut().insert(http::header::CACHE_CONTROL, no_store);
        return Ok(response);
    }
    let charges: Vec<Charge<'_>> = found.iter().map(charge).collect();
    let keys: Vec<_> = found.iter().map(|one| (one.key.as_ref().ok(), one.cost.get())).collect();
    let _share = peer::share().await;
    match state.gate.charge(&charges).await {
        Ok(decision) => Ok(response(&state, &decision, &keys, deny)),
        Err(error) => Err(undecided(&state, None, &charges, &error)),
    }
}

/// As the engine charges it: without a key, it is denied as a malformed one is.
fn charge<'a>(route_charge: &'a RouteCharge<'_>) -> Charge<'a> {
    let limit = route_charge.limit.as_ref().map_or("", RequestLimit::name);
    let charge = match &route_charge.key {
        Ok(key) => Charge::new(limit, key),
        Err(_) => Charge::new(limit, ""),
    };
    charge.cost(route_charge.cost.get())
}

/// The routes that are applied for a peer. One that is not trusted is refused with 403, whatever status it asked for: a proxy's
/// client cannot cause that.
fn trusted_routes(state: &State, peer: IpAddr) -> Result<&Routes, Fault> {
    let routes = state.routes.routes.as_ref().map_err(|error| Fault::unavailable(error.to_string()))?;
    if routes.reader().trusts(peer) {
        return Ok(routes);
    }
    tracing::warn!(%peer, "refused a request to /v1/gate of a peer that is not in [requests] trusted_proxies");
    Err(Fault::forbidden(
        "/v1/gate believes trusted proxies only; add this peer's address to [requests] trusted_proxies",
    ))
}

/// The method, the target and the host of the described request.
fn describe(headers: &HeaderMap) -> Result<(Method, &str, Option<&str>), Fault> {
    let has = |names: [&str; 2]| names.iter().any(|name| headers.contains_key(*name));
    let names = match (has(ORIGINAL), has(FORWARDED)) {
        (true, true) => {
            return Err(Fault::malformed(
                "the request is described twice, by x-original-… and by x-forwarded-…; the proxy must remove those that it \
                 does not set",
            ));
        }
        (true, false) => ORIGINAL,
        (false, true) => FORWARDED,
        (false, false) => {
            return Err(Fault::malformed(
                "no request is described: the proxy must set x-original-method and x-original-uri, or x-forwarded-method and \
                 x-forwarded-uri",
            ));
        }
    };
    let [method, target] = names.map(|name| match one(headers, name) {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(Fault::malformed(format!("the header `{name}` is missing; the proxy must set it"))),
        Err(fault) => Err(fault),
    });
    let method = Method::from_bytes(method?.as_bytes())
        .map_err(|_| Fault::malformed(format!("the header `{}` is no method", names[0])))?;
    let host = if names == FORWARDED { one(headers, "x-forwarded-host")? } else { None };
    Ok((method, target?, host))
}

/// A header that is there once, as text.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Fault> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let text = std::str::from_utf8(value.as_bytes()).ok().filter(|_| values.next().is_none());
    text.map(Some)
        .ok_or_else(|| Fault::malformed(format!("the header `{name}` is there twice, or is not text")))
}
