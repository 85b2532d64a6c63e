//! gRPC: the rate limit service that Envoy asks, with health and reflection.
//!
//! `ask.rs` reads which limits the descriptors of a call meet, `payer.rs` who pays, `tell.rs` writes the answer, and
//! `connection.rs` speaks HTTP/2, with `budget.rs` on how much of it is held and `seats.rs` on how many are waited for. All descriptors of a call are one charge: all of them, or none.
//!
//! Envoy lets a request pass when it gets no answer that it knows, unless it is told otherwise. So there is always an answer
//! that says what is meant: OK, OVER_LIMIT, or an error of gRPC, and never the code UNKNOWN.

mod ask;
mod budget;
mod connection;
#[cfg(test)]
mod in_flight;
mod payer;
mod proto;
mod seats;
mod tell;

use std::sync::Arc;

use metrics::Counter;
use tollgate::{Charge, Decision, Error, Outcome, Tollgate};
use tonic::{Request, Response, Status};

use self::ask::{Hits, Meets};
use self::proto::service::rate_limit_service_server::RateLimitService;
use self::proto::service::{RateLimitRequest, RateLimitResponse};
use super::peer;
use super::undecided::words;
use crate::app::{App, Bounds, State};

pub(crate) use self::connection::serve;

/// The service.
pub(crate) struct Rls {
    app: Arc<App>,
    calls: Calls,
}

/// How many calls were answered how. Looked up once, because looking up costs more than counting.
struct Calls {
    ok: Counter,
    over_limit: Counter,
    error: Counter,
}

impl Rls {
    pub(crate) fn new(app: Arc<App>) -> Rls {
        let calls = |code| metrics::counter!("tollgate_envoy_calls_total", "code" => code);
        Rls { app, calls: Calls { ok: calls("ok"), over_limit: calls("over_limit"), error: calls("error") } }
    }
}

#[tonic::async_trait]
impl RateLimitService for Rls {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let answered = answer(&self.app, request.get_ref()).await;
        let calls = match &answered {
            Ok(answer) if tell::is_over_limit(answer) => &self.calls.over_limit,
            Ok(_) => &self.calls.ok,
            Err(_) => &self.calls.error,
        };
        calls.increment(1);
        answered.map(Response::new)
    }
}

async fn answer(app: &App, request: &RateLimitRequest) -> Result<RateLimitResponse, Status> {
    let state = app.state();
    let _share = peer::share().await;
    let answered = decide(&state, app.bounds, request).await;
    if answered.is_ok() {
        return answered;
    }
    // A reload in between may have left out a limit that the rules named: then the new rules answer.
    let now = app.state();
    if Arc::ptr_eq(&state, &now) { answered } else { decide(&now, app.bounds, request).await }
}

async fn decide(
    state: &State,
    bounds: Bounds,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Status> {
    let meets = ask::read(&state.gate, bounds, &state.config.envoy, request)?;
    let answers = charge(&state.gate, &meets).await.map_err(undecided)?;
    Ok(tell::response(&state.gate, &meets, &answers))
}

/// Envoy goes by its own failure mode then, as its operator has chosen.
fn undecided(error: Error) -> Status {
    Status::unavailable(format!("cannot decide: {}", words(&error)))
}

/// What the limits said to each descriptor that meets one.
struct Answers {
    each: Vec<Option<Outcome>>,
    is_denied: bool,
}

/// Charges what is to be charged, if all of it fits and nothing that is only looked at denies.
async fn charge(gate: &Tollgate, meets: &[Meets<'_>]) -> Result<Answers, Error> {
    let mut answers = Answers { each: vec![None; meets.len()], is_denied: false };
    // What was charged too much is given back first, and whatever becomes of the rest.
    let back = Asks::of(meets, |hits| match hits {
        Hits::GiveBack(hits) => Some(hits),
        _ => None,
    });
    if !back.asks.is_empty() {
        match gate.refund(&back.asks).await {
            // The store failed. That holds nobody up: what could not be given back stays charged.
            Err(error) if error.is_transient() => {
                metrics::counter!("tollgate_envoy_refunds_dropped_total").increment(back.asks.len() as u64);
            }
            refunded => {
                refunded?;
                metrics::counter!("tollgate_envoy_refunds_total").increment(back.asks.len() as u64);
            }
        }
        let standing: Vec<Charge<'_>> = back.asks.iter().map(|ask| ask.clone().cost(1)).collect();
        let decision = gate.peek(&standing).await?;
        answers.note(&back, &decision);
    }
    let looks = Asks::of(meets, |hits| (hits == Hits::Look).then_some(1));
    if !looks.asks.is_empty() {
        let decision = gate.peek(&looks.asks).await?;
        answers.note(&looks, &decision);
        answers.is_denied |= !decision.is_allowed();
    }
    let charges = Asks::of(meets, |hits| match hits {
        Hits::Charge(hits) => Some(hits),
        _ => None,
    });
    if !charges.asks.is_empty() {
        let decision = match answers.is_denied {
            true => gate.peek(&charges.asks).await?,
            false => gate.charge(&charges.asks).await?,
        };
        answers.note(&charges, &decision);
        answers.is_denied |= !decision.is_allowed();
    }
    Ok(answers)
}

impl Answers {
    fn note(&mut self, asks: &Asks<'_>, decision: &Decision) {
        for (index, outcome) in asks.places.iter().zip(decision.outcomes()) {
            self.each[*index] = Some(*outcome);
        }
    }
}

/// Asks of one kind, and which descriptors they are of.
struct Asks<'a> {
    places: Vec<usize>,
    asks: Vec<Charge<'a>>,
}

impl<'a> Asks<'a> {
    fn of(meets: &'a [Meets<'_>], cost: impl Fn(Hits) -> Option<u64>) -> Asks<'a> {
        let tolls = meets.iter().enumerate().filter_map(|(place, met)| Some((place, met.toll()?)));
        let (places, asks) =
            tolls.filter_map(|(place, toll)| Some((place, toll.ask(cost(toll.hits)?)))).unzip();
        Asks { places, asks }
    }
}

#[cfg(test)]
mod tests {
    use tollgate::store::{Failure, StoreError};
    use tonic::Code;

    use super::*;

    #[test]
    fn a_proxy_is_not_told_where_the_store_is() {
        let error = StoreError::failed(Failure::Refused, "PostgreSQL at 10.0.0.5:5432 does not let app in");
        let status = undecided(error.into());
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(status.message(), "cannot decide: the store could not answer (refused); ask again later");
    }
}
