//! HTTP: the JSON API, the gate for proxies, health, metrics, and the page.
//!
//! `requests.rs` parses requests, `render.rs` writes decisions, `fault.rs` reports errors, `gate.rs` and `gate_routes.rs` answer
//! proxies. Routes are a `match`: there are few, and a check must cost little more than its parsing. Every charge is a call of the
//! gate that `app.rs` keeps, within the peer's share (`peer.rs`).

mod admin;
mod body;
mod fault;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gate;
mod gate_routes;
mod look;
mod looks;
mod overrides;
mod render;
mod requests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use tollgate::store::Micros;
use tollgate::{Allowance, Call, Charge, ChargeId, Decision, Limit, Rule, Settled, Settlement, Tollgate};

use self::look::Look;
use self::requests::{Actual, Batch, CheckRequest, ListEntry, OfReservation};
use super::{page, peer};
use crate::app::{App, State};

pub(crate) use self::body::{Body, full};
pub(crate) use self::fault::Fault;
#[cfg(test)]
pub(crate) use self::gate::answer as answer_gate;
pub(crate) use self::gate_routes::GateRoutes;
pub(crate) use self::look::{ad_hoc as described_ad_hoc, limit as described};
pub(crate) use self::looks::Looks;

/// How long a reservation can be settled by default.
const TTL: Duration = Duration::from_secs(60);

/// Answers one request of a peer. A fault is an answer too.
pub(crate) async fn answer(app: Arc<App>, peer: IpAddr, request: Request<Incoming>) -> Response<Body> {
    match route(&app, peer, request).await {
        Ok(response) => response,
        Err(fault) => fault.into_response(),
    }
}

async fn route(app: &Arc<App>, peer: IpAddr, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    let path = request.uri().path();
    if path == "/v1/gate" {
        only(&request, "GET, HEAD", &[Method::GET, Method::HEAD])?;
        return Box::pin(gate_routes::answer(app, peer, request.uri().query(), request.headers())).await;
    }
    if let Some(rest) = path.strip_prefix("/v1/gate/") {
        only(&request, "GET, HEAD", &[Method::GET, Method::HEAD])?;
        return Box::pin(gate::answer(app, rest, request.uri().query(), request.headers())).await;
    }
    // All but the first are boxed: what any of them could become would be carried along by every check.
    match path {
        "/v1/check" => decide(app, request, Tollgate::charge).await,
        "/v1/peek" => Box::pin(decide(app, request, Tollgate::peek)).await,
        "/v1/reserve" => Box::pin(reserve(app, request)).await,
        "/v1/checks" => Box::pin(checks(app, request)).await,
        "/v1/settle" => Box::pin(settle(app, request, settlement)).await,
        "/v1/cancel" => Box::pin(settle(app, request, |call| no_amount(call, Settlement::Cancel))).await,
        "/v1/renew" => Box::pin(settle(app, request, |call| no_amount(call, Settlement::Renew))).await,
        "/v1/status" if request.method() == Method::POST => {
            Box::pin(look::status_of_body(app, request)).await
        }
        "/v1/reset" => Box::pin(admin::reset(app, peer, request)).await,
        "/v1/reload" => Box::pin(admin::reload(app, peer, request)).await,
        "/v1/key" => Box::pin(admin::key(app, peer, request)).await,
        "/v1/overrides" => Box::pin(overrides::answer(app, peer, request)).await,
        "/v1/overrides/remove" => Box::pin(overrides::remove(app, peer, request)).await,
        "/v1/compare" => Box::pin(admin::compare(app, peer, request)).await,
        "/v1/llm" => Box::pin(admin::models(app, peer, request)).await,
        "/v1/jobs" => Box::pin(admin::jobs(app, peer, request)).await,
        "/v1/jobs/close" => Box::pin(admin::close_job_key(app, peer, request)).await,
        "/v1/jobs/open" => Box::pin(admin::open_job_key(app, peer, request)).await,
        _ => {
            let looks = || match path {
                "/v1/status" => only(&request, "GET, HEAD, POST", &[Method::GET, Method::HEAD]),
                _ => only(&request, "GET, HEAD", &[Method::GET, Method::HEAD]),
            };
            if let Some(shown) = page::find(path) {
                looks()?;
                shown.answer(app, &request)
            } else if let Some(look) = Look::find(path) {
                looks()?;
                Box::pin(look.answer(app, request.uri().query())).await
            } else {
                Err(Fault::not_found("there is nothing at this address; /openapi.json lists what there is"))
            }
        }
    }
}

fn only(request: &Request<Incoming>, allow: &'static str, methods: &[Method]) -> Result<(), Fault> {
    if methods.contains(request.method()) { Ok(()) } else { Err(Fault::method(allow)) }
}

/// The body of a POST that is JSON.
async fn posted(request: Request<Incoming>) -> Result<Bytes, Fault> {
    posted_up_to(request, body::MOST_BYTES).await
}

/// The same, of at most so many bytes.
async fn posted_up_to(request: Request<Incoming>, most: usize) -> Result<Bytes, Fault> {
    only(&request, "POST", &[Method::POST])?;
    let is_json = |value: &HeaderValue| {
        let kind = value.as_bytes().split(|byte| *byte == b';').next().unwrap_or_default();
        kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
    };
    if !request.headers().get(CONTENT_TYPE).is_some_and(is_json) {
        return Err(Fault::not_json());
    }
    body::read_up_to(request.into_body(), most).await
}

/// Charges the limits of a request, or peeks at them.
async fn decide(
    app: &App,
    request: Request<Incoming>,
    call: for<'a> fn(&'a Tollgate, &'a [Charge<'a>]) -> Call<'a, Decision>,
) -> Result<Response<Body>, Fault> {
    let body = posted(request).await?;
    let asked: CheckRequest<'_> = requests::read(&body)?;
    if asked.ttl_ms().is_some() {
        return Err(Fault::malformed("`ttl_ms` is for /v1/reserve"));
    }
    let charges = asked.charges()?;
    let (state, _share) = (app.state(), peer::share().await);
    match call(&state.gate, &charges).await {
        Ok(decision) => Ok(decided(&decision, None)),
        Err(error) => Err(undecided(&state, asked.list(), &charges, &error)),
    }
}

async fn reserve(app: &App, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    let body = posted(request).await?;
    let asked: CheckRequest<'_> = requests::read(&body)?;
    let ttl = ttl(app.bounds.max_ttl, asked.ttl_ms())?;
    let charges = asked.charges()?;
    let (state, _share) = (app.state(), peer::share().await);
    match state.gate.reserve(&charges, ttl).await {
        Ok(Ok(held)) => Ok(decided(held.decision(), Some(held.id()))),
        Ok(Err(denied)) => Ok(decided(denied.decision(), None)),
        Err(error) => Err(undecided(&state, asked.list(), &charges, &error)),
    }
}

/// The response to a decision, with the id of the reservation if one was made.
fn decided(decision: &Decision, reservation: Option<ChargeId>) -> Response<Body> {
    let mut out = String::with_capacity(192 + 128 * decision.outcomes().len());
    render::decision(&mut out, decision, reservation);
    json(out)
}

/// Many checks in one call, each charged separately.
async fn checks(app: &App, request: Request<Incoming>) -> Result<Response<Body>, Fault> {
    let body = posted(request).await?;
    let batch: Batch<'_> = requests::read(&body)?;
    if batch.checks.is_empty() || batch.checks.len() > requests::MOST_CHECKS {
        let (count, most) = (batch.checks.len(), requests::MOST_CHECKS);
        return Err(Fault::malformed(format!("`checks` has {count} entries; a batch has 1 to {most}")));
    }
    // All of them are read before the first is charged: a batch with a mistake in it charges nothing.
    let entry = |index| ListEntry { list: "checks", index };
    let charges = batch.checks.iter().enumerate().map(|(index, one)| one.0.charge(entry(index)));
    let charges = charges.collect::<Result<Vec<Charge<'_>>, Fault>>()?;
    let state = app.state();
    known(&state, Some("checks"), &charges)?;
    let policy = state.gate.policy();
    let is_lease = |charge: &Charge<'_>| {
        let rule = policy.rule(charge.limit());
        rule.is_some_and(|rule| matches!(rule.allowance(), Allowance::Limited(Limit::Concurrency(_))))
    };
    if let Some(index) = charges.iter().position(is_lease) {
        return Err(Fault::needs_reserve(charges[index].limit()).at(entry(index), "limit"));
    }
    let results = Box::pin(check_each(&state, &charges)).await;
    Ok(json(results.into_json()?))
}

/// Charges each check separately, as many in one store call as it can carry.
async fn check_each(state: &State, charges: &[Charge<'_>]) -> Results {
    let mut results = Results::with_capacity(charges.len());
    for batch in charges.chunks(requests::MOST_CHARGES) {
        let _share = peer::share_of(batch.len()).await;
        match state.gate.charge_each(batch).await {
            Ok(outcomes) => {
                for (charge, outcome) in batch.iter().zip(outcomes) {
                    let fault = |error| undecided(state, None, std::slice::from_ref(charge), &error);
                    results.add(outcome.map(Decision::from).map_err(fault));
                }
            }
            Err(error) => batch.iter().for_each(|_| results.add(Err(undecided(state, None, batch, &error)))),
        }
    }
    results
}

/// The answer to a batch, as it grows: for each check the decision, or why there is none.
struct Results {
    json: String,
    is_any_decided: bool,
    first_fault: Option<Fault>,
}

impl Results {
    fn with_capacity(count: usize) -> Results {
        let json = String::with_capacity(32 + 256 * count);
        Results { json, is_any_decided: false, first_fault: None }
    }

    fn add(&mut self, decided: Result<Decision, Fault>) {
        self.json.push_str(if self.json.is_empty() { "{\"results\":[" } else { "," });
        match decided {
            Ok(decision) => {
                self.is_any_decided = true;
                render::decision(&mut self.json, &decision, None);
            }
            Err(fault) => {
                self.json.push_str(&fault.in_place());
                self.first_fault.get_or_insert(fault);
            }
        }
    }

    /// A fault means that nothing was charged. So the whole response is a fault only if nothing was decided; if other checks
    /// were, the fault is at the position of its check.
    fn into_json(self) -> Result<String, Fault> {
        match self.first_fault {
            Some(fault) if !self.is_any_decided => Err(fault),
            _ => Ok(self.json + "]}"),
        }
    }
}

async fn settle(
    app: &App,
    request: Request<Incoming>,
    settlement: impl FnOnce(&OfReservation<'_>) -> Result<Settlement, Fault>,
) -> Result<Response<Body>, Fault> {
    let body = posted(request).await?;
    let call: OfReservation<'_> = requests::read(&body)?;
    let id: ChargeId = call.reservation.0.parse().map_err(|error| Fault::malformed(format!("{error}")))?;
    // All that the caller chose is checked before the store sees any of it.
    let settlement = settlement(&call)?;
    let share = peer::share().await;
    let settled = app.state().gate.settle(id, &settlement).await;
    drop(share);
    let word = match settled {
        Ok(Settled::Done) => "done",
        Ok(Settled::Already) => "already",
        Ok(Settled::Unknown) => "unknown",
        Ok(Settled::Pending) => "pending",
        Err(error) => return Err(Fault::undecided(&error)),
    };
    Ok(json(format!("{{\"settled\":\"{word}\"}}")))
}

fn settlement(call: &OfReservation<'_>) -> Result<Settlement, Fault> {
    match &call.actual {
        Some(Actual::All(actual)) => Ok(Settlement::Actual(*actual)),
        Some(Actual::Each(each)) => {
            if each.len() > requests::MOST_CHARGES {
                let (count, most) = (each.len(), requests::MOST_CHARGES);
                return Err(Fault::malformed(format!(
                    "`actual` names {count} limits; a charge has at most {most}"
                )));
            }
            each.keys().try_for_each(|name| sound_name(name))?;
            Ok(Settlement::Named(each.iter().map(|(name, actual)| (name.clone(), *actual)).collect()))
        }
        None => Err(Fault::malformed("`actual` says what it cost; to give all of it back, ask /v1/cancel")),
    }
}

fn no_amount(call: &OfReservation<'_>, settlement: Settlement) -> Result<Settlement, Fault> {
    match call.actual {
        None => Ok(settlement),
        Some(_) => Err(Fault::malformed("`actual` is for /v1/settle")),
    }
}

/// How long a reservation can be settled: the requested time, up to the bound of the config.
fn ttl(most: Micros, ttl_ms: Option<u64>) -> Result<Duration, Fault> {
    let most_ms = most.get() / 1_000;
    match ttl_ms {
        None => Ok(TTL.min(most.into())),
        Some(ms) if (1..=most_ms).contains(&ms) => Ok(Duration::from_millis(ms)),
        Some(_) => {
            Err(Fault::malformed(format!("`ttl_ms` must be from 1 to {most_ms} ({most}, server.max_ttl)")))
        }
    }
}

/// Refuses a name that no limit can have. The name is not repeated: it is any text that a caller likes.
fn sound_name(name: &str) -> Result<(), Fault> {
    match Rule::name_fault(name) {
        None => Ok(()),
        Some(fix) => Err(Fault::malformed(format!("there can be no limit of this name: {fix}"))),
    }
}

/// Refuses a request for a limit that is unknown or invalid.
fn known(state: &State, list: Option<&'static str>, charges: &[Charge<'_>]) -> Result<(), Fault> {
    charges.iter().enumerate().try_for_each(|(index, charge)| {
        known_limit(state, charge.limit()).map_err(|fault| match list {
            Some(list) => fault.at(ListEntry { list, index }, "limit"),
            None => fault,
        })
    })
}

fn known_limit(state: &State, name: &str) -> Result<(), Fault> {
    let Err(error) = state.gate.find(name) else { return Ok(()) };
    sound_name(name)?;
    let names = state.gate.policy().rules().iter().map(|rule| rule.name().to_owned()).collect();
    Err(Fault::unknown_limit(error.to_string(), names))
}

/// Why a request could not be decided: it was invalid, or the store failed.
fn undecided(
    state: &State,
    list: Option<&'static str>,
    charges: &[Charge<'_>],
    error: &tollgate::Error,
) -> Fault {
    known(state, list, charges).err().unwrap_or_else(|| Fault::undecided(error))
}

fn json(text: String) -> Response<Body> {
    let mut response = Response::new(full(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn text(status: StatusCode, kind: &'static str, text: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(full(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use tollgate::{Charge, Tollgate};

    use super::*;

    /// Regression: one failed check made the whole response a fault, and the caller did not learn what had been charged.
    #[tokio::test]
    async fn a_batch_tells_a_fault_where_others_were_charged() {
        let config = Config::parse("[limits.free]\nunlimited = true\n").unwrap();
        let gate = Tollgate::builder().config(&config.gate).build().unwrap();
        let charges = [Charge::new("free", "k")];
        let check = async |pattern: &str, expected: Result<&[&str], &str>| {
            let mut results = Results::with_capacity(pattern.len());
            for kind in pattern.chars() {
                results.add(match kind {
                    'd' => Ok(gate.charge(&charges).await.unwrap()),
                    _ => Err(Fault::unavailable("gone")),
                });
            }
            let body = results.into_json();
            match (body, expected) {
                (Err(fault), Err(detail)) => assert_eq!(fault.to_string(), detail, "{pattern}"),
                (Ok(body), Ok(expected)) => {
                    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
                    let body = body["results"].as_array().unwrap();
                    let short = |one: &serde_json::Value| match &one["error"] {
                        serde_json::Value::Null => format!("allowed {}", one["allowed"]),
                        error => error.to_string(),
                    };
                    assert_eq!(body.iter().map(short).collect::<Vec<_>>(), expected, "{pattern}");
                }
                (body, _) => panic!("{pattern}: {body:?}"),
            }
        };
        let gone = r#"{"detail":"gone","status":503}"#;
        check("d", Ok(&["allowed true"])).await;
        check("dfd", Ok(&["allowed true", gone, "allowed true"])).await;
        check("fd", Ok(&[gone, "allowed true"])).await;
        check("f", Err("gone")).await;
        check("ff", Err("gone")).await;
    }
}
