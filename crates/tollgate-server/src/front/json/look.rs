//! The read-only routes: limits, the state of a key, health, metrics.

use std::fmt::Write;
use std::sync::Arc;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use serde_json::{Value, json};
use tollgate::route::decoded;
use tollgate::store::StoreState;
use tollgate::{Allowance, Key, Rule};

use super::body::Body;
use super::fault::Fault;
use super::requests::{self, OfKey, key_of_url};
use super::{json as answered, known_limit, posted, render, text};
use crate::app::{App, State};
use crate::front::peer;

/// The description of the API. Tests compare it with the responses.
const OPENAPI: &str = include_str!("openapi.json");

/// The read-only routes.
#[derive(Clone, Copy)]
pub(super) enum Look {
    Health,
    Readiness,
    Metrics,
    Document,
    Limits,
    Status,
    Server,
    Fleet,
}

impl Look {
    /// The route of a path.
    pub(super) fn find(path: &str) -> Option<Look> {
        Some(match path {
            "/healthz" => Look::Health,
            "/readyz" => Look::Readiness,
            "/metrics" => Look::Metrics,
            "/openapi.json" => Look::Document,
            "/v1/limits" => Look::Limits,
            "/v1/status" => Look::Status,
            "/v1/server" => Look::Server,
            "/v1/fleet" => Look::Fleet,
            _ => return None,
        })
    }

    pub(super) async fn answer(self, app: &Arc<App>, query: Option<&str>) -> Result<Response<Body>, Fault> {
        match self {
            Look::Health => Ok(text(StatusCode::OK, "text/plain; charset=utf-8", "ok\n")),
            Look::Readiness => Ok(ready(app)),
            Look::Metrics => {
                app.publish_metrics().await;
                Ok(text(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", app.metrics.render()))
            }
            Look::Document => Ok(answered(OPENAPI.to_owned())),
            Look::Limits => Ok(answered(limits(&app.state()).to_string())),
            Look::Status => status(app, query).await,
            Look::Server => Ok(answered(server(app).to_string())),
            Look::Fleet => {
                app.fleet.look(app).await;
                Ok(answered(app.fleet.to_json(app).to_string()))
            }
        }
    }
}

/// Ready as long as it answers: limits fall back where their store is down. A server that ends is not ready for more.
fn ready(app: &App) -> Response<Body> {
    if app.is_draining() {
        return text(StatusCode::SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", "draining\n");
    }
    let store = app.state().gate.store_health().state;
    let words = match store {
        StoreState::Up => "ready\n",
        StoreState::Partial => "ready, without a node of the store: limits of its keys fall back\n",
        StoreState::Down | StoreState::Probing => "ready, without the store: limits fall back\n",
    };
    text(StatusCode::OK, "text/plain; charset=utf-8", words)
}

/// All limits, in words and in numbers.
pub(super) fn limits(state: &State) -> Value {
    let limits: Vec<Value> = state.gate.policy().rules().iter().map(|rule| limit(state, rule)).collect();
    json!({ "limits": limits })
}

/// A limit, in words and in numbers.
pub(crate) fn limit(state: &State, rule: &Rule) -> Value {
    let (strategy, capacity, window_ms) = match rule.allowance() {
        Allowance::Limited(limit) => (
            Some(limit.strategy().name()),
            Some(limit.capacity()),
            Some(limit.window_us().get().div_ceil(1_000)),
        ),
        Allowance::Unlimited => (None, None, None),
        Allowance::Blocked => (None, Some(0), None),
    };
    json!({
        "limit": rule.name(),
        "strategy": strategy,
        "rule": rule.allowance().to_string(),
        "capacity": capacity,
        "window_ms": window_ms,
        "shadow": rule.is_shadow(),
        "fallback": rule.own_fallback().unwrap_or(state.config.gate.store.fallback).name(),
        "overrides": rule.overrides().len(),
        "store": state.config.gate.store.mode.name(),
    })
}

/// Limits whose numbers come with each call, as far as they can be described.
pub(crate) fn ad_hoc(state: &State, name: &str) -> Value {
    json!({
        "limit": name,
        "strategy": null,
        "rule": "",
        "capacity": null,
        "window_ms": null,
        "shadow": false,
        "fallback": state.config.gate.store.fallback.name(),
        "overrides": 0,
        "store": state.config.gate.store.mode.name(),
    })
}

/// The state of a key; nothing is charged.
async fn status(app: &App, query: Option<&str>) -> Result<Response<Body>, Fault> {
    let find = |name: &str| {
        let mut pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        pairs.find(|(other, _)| *other == name).map(|(_, value)| decoded(value))
    };
    let (Some(limit), Some(key)) = (find("limit"), find("key")) else {
        return Err(Fault::malformed("write /v1/status?limit=…&key=…"));
    };
    let namespace = find("namespace");
    key_status(app, &limit, &key_of_url(namespace.as_deref(), &key)?).await
}

/// The same with the key in the body, so that it is in no address and in no log of a proxy.
pub(super) async fn status_of_body(app: &App, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    let body = posted(request).await?;
    let call: OfKey<'_> = requests::read(&body)?;
    key_status(app, &call.limit.0, &call.key.parsed()?).await
}

async fn key_status(app: &App, limit: &str, key: &Key<'_>) -> Result<Response<Body>, Fault> {
    let state = app.state();
    known_limit(&state, limit)?;
    let share = peer::share().await;
    let outcome = state.gate.status(limit, key).await.map_err(|error| Fault::undecided(&error))?;
    drop(share);
    let mut out = String::with_capacity(192);
    let _ = write!(out, "{{\"limit\":\"{limit}\",\"allowed\":{},", outcome.numbers().allowed);
    render::outcome(&mut out, &outcome);
    if !outcome.is_unlimited() {
        let _ = write!(out, ",\"used\":{}", outcome.used());
    }
    out.push('}');
    Ok(answered(out))
}

/// The state of the server: its store, and its config.
fn server(app: &App) -> Value {
    let state = app.state();
    let health = state.gate.store_health();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "draining": app.is_draining(),
        "store": {
            "mode": state.config.gate.store.mode.name(),
            "state": health.state.name(),
            "nodes": health.nodes,
            "nodes_up": health.nodes_up,
            "last_failure": health.last_failure.map(|failure| failure.name()),
            "calls": health.calls,
            "outages": health.outages,
            "fallen_back": health.fallen_back,
            "ambiguous": health.ambiguous,
        },
        "keys": state.gate.keys(),
        "reloads": app.history.to_json(),
    })
}
