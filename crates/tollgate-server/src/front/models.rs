//! The gateway: limits calls of language models before they are sent.
//!
//! It answers on the providers' own routes, so that their SDKs only need another base URL. `body.rs` reads a call under one
//! memory budget, `call.rs` admits it, sends it and retries, `begin.rs` keeps an answer back until it is known to be one, `breaker.rs` waits out an overload, `upstream.rs` calls providers,
//! `pump.rs` streams the response and settles the call however it ends, `report.rs` writes limit headers, `fault.rs` writes
//! errors in the provider's format. The crate `tollgate-llm` decides which limits a call charges and which calls wait.

mod begin;
mod body;
mod breaker;
mod call;
mod fault;
mod pump;
mod report;
pub(crate) mod upstream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::header::AUTHORIZATION;
use http::{HeaderMap, Method, Request, Response};
use hyper::body::Incoming;
use parking_lot::RwLock;
use tollgate::Tollgate;
use tollgate::config::Password;
use tollgate_llm::{Api, Caller, ModelLimits, ModelRequest, RequestError, Trail};
use tollgate_llm::{LlmConfig, UpstreamKind};

use self::body::Budget;
use self::fault::Fault;
use self::upstream::Upstream;
use super::json::{Body, full};
use crate::config::Config;
use crate::serve::timeouts::Progress;
use crate::token::Token;

/// The gateway of a server.
pub(crate) struct Models {
    limits: ModelLimits,
    setup: RwLock<Arc<Setup>>,
    trail: Option<Trail>,
    budget: Budget,
    in_flight: AtomicUsize,
    /// Where it listens.
    address: SocketAddr,
}

/// The upstreams and clients of a config, resolved.
pub(crate) struct Setup {
    config: Arc<LlmConfig>,
    upstreams: Vec<Arc<Upstream>>,
    clients: Vec<(String, Token)>,
}

impl Setup {
    /// Reuses upstreams of the last setup that are unchanged.
    fn of(config: &LlmConfig, last: Option<&Setup>) -> Result<Setup, String> {
        let upstreams = config.upstreams.iter().map(|upstream| {
            let last = last.iter().flat_map(|last| &last.upstreams);
            match last.into_iter().find(|last| last.name() == upstream.name) {
                Some(last) => last.reloaded(upstream),
                None => Upstream::new(upstream).map(Arc::new),
            }
        });
        let upstreams = upstreams.collect::<Result<_, String>>()?;
        let mut clients: Vec<(String, Token)> = Vec::new();
        for client in &config.clients {
            let wrong = |why: &str| format!("llm.clients.{}.key: {why}", client.name);
            let key = resolved(&client.key).map_err(|why| wrong(&why))?;
            // Two variables may have the same key.
            if let Some((other, _)) = clients.iter().find(|(_, token)| token.is(key.as_bytes())) {
                return Err(wrong(&format!("it is the key of {other}, so nobody could tell the two apart")));
            }
            clients.push((client.name.clone(), Token::new(key)));
        }
        Ok(Setup { config: Arc::new(config.clone()), upstreams, clients })
    }

    /// The upstream of a model: the configured one, or the first that has the route.
    fn upstream(&self, model: &str, api: Api) -> Result<&Arc<Upstream>, Fault> {
        let kind = if api.is_anthropic() { UpstreamKind::Anthropic } else { UpstreamKind::OpenAi };
        let known = self.config.model(model);
        let found = self.upstreams.iter().find(|upstream| match known {
            Some(model) => upstream.name() == model.upstream,
            None => upstream.kind() == kind,
        });
        match found {
            Some(upstream) if upstream.kind() == kind => Ok(upstream),
            Some(upstream) => {
                let route = match upstream.kind() {
                    UpstreamKind::OpenAi => Api::ChatCompletions,
                    UpstreamKind::Anthropic => Api::Messages,
                };
                Err(Fault::invalid("model", format!("this model is served at {}", route.path())))
            }
            None => Err(Fault::no_model(format!("no upstream here serves {}", api.path()))),
        }
    }
}

/// Without clients, everybody who reaches the gateway could spend the provider's quota, so only this machine may.
fn check_reach(config: &LlmConfig, address: SocketAddr) -> Result<(), String> {
    if config.clients.is_empty() && !address.ip().is_loopback() {
        return Err(format!(
            "listening on {address} lets others spend the quota of your language models: name them under [llm.clients], \
             or listen on 127.0.0.1"
        ));
    }
    Ok(())
}

fn resolved(password: &Password) -> Result<String, String> {
    password.resolve(|name| std::env::var(name).ok()).map_err(|why| why.replace("the password", "the key"))
}

/// The routes of the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Call(Api),
    Models,
    Check,
}

/// The gateway's routes.
pub(crate) fn route(path: &str) -> Option<Route> {
    match path {
        "/v1/models" => Some(Route::Models),
        "/v1/llm/check" => Some(Route::Check),
        _ => Api::at(path).map(Route::Call),
    }
}

impl Models {
    /// The gateway that a config describes, if it describes one, to listen at this address.
    pub(crate) fn open(
        config: &Config,
        gate: Tollgate,
        address: SocketAddr,
    ) -> Result<Option<Arc<Models>>, String> {
        let Some(llm) = config.llm.as_ref().filter(|llm| !llm.upstreams.is_empty()) else { return Ok(None) };
        check_reach(llm, address)?;
        let trail = llm.log_dir.as_deref().map(Trail::open).transpose();
        let trail = trail.map_err(|error| format!("llm.log_dir: the trail cannot be written: {error}"))?;
        Ok(Some(Arc::new(Models {
            limits: ModelLimits::new(gate, llm.clone()),
            setup: RwLock::new(Arc::new(Setup::of(llm, None)?)),
            trail,
            budget: Budget::new(llm.memory),
            in_flight: AtomicUsize::new(0),
            address,
        })))
    }

    /// The setup of another config, if it is valid.
    pub(crate) fn prepare(&self, config: &LlmConfig) -> Result<Setup, String> {
        check_reach(config, self.address)?;
        Setup::of(config, Some(&self.setup()))
    }

    /// Applies another config; the gate has its limits already.
    pub(crate) fn reload(&self, config: &LlmConfig, setup: Setup) {
        *self.setup.write() = Arc::new(setup);
        self.limits.reload(config.clone());
    }

    /// The limits, for the page.
    pub(crate) fn limits(&self) -> &ModelLimits {
        &self.limits
    }

    /// How many calls are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Acquire)
    }

    fn setup(&self) -> Arc<Setup> {
        self.setup.read().clone()
    }

    /// Updates the metrics that are not set by calls.
    pub(crate) async fn publish(&self, gate: &Tollgate) {
        let setup = self.setup();
        if let Some(trail) = &self.trail {
            metrics::counter!("tollgate_llm_trail_dropped_total").absolute(trail.dropped());
        }
        for model in &setup.config.models {
            let waiting = u32::try_from(self.limits.waiting(&model.name)).unwrap_or(u32::MAX);
            metrics::gauge!("tollgate_llm_queue", "model" => model.name.clone()).set(f64::from(waiting));
            let groups =
                setup.config.upstream(&model.upstream).into_iter().flat_map(|upstream| &upstream.keys);
            let mut groups: Vec<&str> = groups.map(|key| key.group.as_str()).collect();
            groups.dedup();
            if groups.is_empty() {
                groups.push(&model.upstream);
            }
            for limit in &model.limits {
                let mut fullest = 0.0_f64;
                for group in &groups {
                    let key = tollgate_llm::llm_key(group);
                    let Ok(outcome) = gate.status(limit.name.as_str(), key.as_str()).await else { continue };
                    #[expect(clippy::cast_precision_loss, reason = "a gauge")]
                    let share = outcome.used() as f64 / outcome.capacity().max(1) as f64;
                    fullest = fullest.max(share);
                }
                let labels = [("model", model.name.clone()), ("limit", limit.unit.to_owned())];
                metrics::gauge!("tollgate_llm_usage", &labels).set(fullest);
            }
        }
    }

    /// The caller, by its key.
    fn caller(&self, setup: &Setup, headers: &HeaderMap) -> Result<Caller, Fault> {
        if setup.clients.is_empty() {
            return Ok(Caller::default());
        }
        let bearer = headers.get(AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        let shown = bearer.or_else(|| headers.get("x-api-key").map(http::HeaderValue::as_bytes));
        let Some(shown) = shown else {
            return Err(Fault::no_key("you did not provide a key of this gateway"));
        };
        // All are compared, so that the duration does not reveal which one was close.
        let mut found = None;
        for (name, token) in &setup.clients {
            if token.is(shown.trim_ascii()) {
                found = Some(name.clone());
            }
        }
        match found {
            Some(name) => Ok(Caller { client: Some(name) }),
            None => Err(Fault::no_key("the key is not one of this gateway's")),
        }
    }
}

/// A call in flight, counted until it is settled.
pub(crate) struct InFlight(Arc<Models>);

impl InFlight {
    fn of(models: &Arc<Models>) -> InFlight {
        models.in_flight.fetch_add(1, Ordering::AcqRel);
        InFlight(models.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Answers one request on a route of the gateway.
pub(crate) async fn answer(
    models: Arc<Models>,
    route: Route,
    request: Request<Incoming>,
    progress: Progress,
) -> Response<Body> {
    let is_anthropic = match route {
        Route::Call(api) => api.is_anthropic(),
        // The SDK's headers identify the API.
        Route::Models | Route::Check => request.headers().contains_key("anthropic-version"),
    };
    let id = call::request_id(request.headers());
    let answered_at = progress.clone();
    let answered = match route {
        Route::Call(api) => call::answer(&models, api, request, progress, &id).await,
        Route::Models => list(&models, &request),
        Route::Check => check(&models, request).await,
    };
    let mut response = match answered {
        Ok(response) => response,
        Err(fault) => fault.into_response(is_anthropic, &id),
    };
    // A streamed body reports its own end.
    if matches!(response.body(), http_body_util::Either::Left(_)) {
        answered_at.is_answered();
    }
    if let Ok(id) = http::HeaderValue::try_from(id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

/// `GET /v1/models`: the models of the config.
fn list(models: &Arc<Models>, request: &Request<Incoming>) -> Result<Response<Body>, Fault> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return Err(Fault::method("GET"));
    }
    let setup = models.setup();
    models.caller(&setup, request.headers())?;
    let model = |model: &tollgate_llm::ModelConfig| {
        serde_json::json!({
            "id": model.name, "object": "model", "type": "model", "created": 0, "owned_by": model.upstream,
            "display_name": model.name, "created_at": "1970-01-01T00:00:00Z",
        })
    };
    let data: Vec<serde_json::Value> = setup.config.models.iter().map(model).collect();
    Ok(json(&serde_json::json!({ "object": "list", "data": data, "has_more": false })))
}

/// Reads the body of a call whose route is not known: by its form, and by the header that SDKs of Anthropic send or the upstream of the model.
fn read_unrouted<'b>(
    setup: &Setup,
    headers: &HeaderMap,
    body: &'b [u8],
) -> Result<ModelRequest<'b>, RequestError> {
    if headers.contains_key("anthropic-version") {
        return ModelRequest::read(Api::Messages, body);
    }
    let request = ModelRequest::read(Api::of_body(body), body)?;
    let known = setup.config.model(request.model());
    let kind = known.and_then(|model| setup.config.upstream(&model.upstream)).map(|upstream| upstream.kind);
    match kind {
        Some(UpstreamKind::Anthropic) => ModelRequest::read(Api::Messages, body),
        _ => Ok(request),
    }
}

/// `POST /v1/llm/check`: whether a request could proceed. Charges nothing.
async fn check(models: &Arc<Models>, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    if request.method() != Method::POST {
        return Err(Fault::method("POST"));
    }
    let setup = models.setup();
    let (head, body) = request.into_parts();
    let caller = models.caller(&setup, &head.headers)?;
    let held = models.budget.read(body).await?;
    let request = read_unrouted(&setup, &head.headers, &held.bytes)?;
    let check = models.limits.check(&request, &caller).await?;
    let seconds = |wait: Duration| wait.as_secs_f64();
    Ok(json(&serde_json::json!({
        "can_proceed": check.can_proceed,
        "reason": check.reason,
        "wait_seconds": check.wait.map(seconds),
        "input_tokens": check.input_tokens,
        "reserved_tokens": check.reserved_tokens,
    })))
}

fn json(value: &serde_json::Value) -> Response<Body> {
    let mut response = Response::new(full(value.to_string()));
    let kind = http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    response
}
