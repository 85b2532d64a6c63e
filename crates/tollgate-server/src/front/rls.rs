//! gRPC: the rate limit service that Envoy calls, with health and reflection.
//!
//! `descriptors.rs` finds the limits that the descriptors of a call meet, `key.rs` by which key, `reply.rs` writes the answer, and
//! `connection.rs` speaks HTTP/2, with `budget.rs` on how much of it is held and `seats.rs` on how many are waited for. All descriptors of a call are one charge: all of them, or none.
//!
//! Envoy lets a request pass when it gets no answer that it knows, unless it is configured otherwise. So there is always an answer
//! that says what is meant: OK, OVER_LIMIT, or an error of gRPC, and never the code UNKNOWN.

mod budget;
mod connection;
mod descriptors;
#[cfg(test)]
mod in_flight;
mod key;
mod proto;
mod reply;
mod seats;

use std::sync::Arc;

use metrics::Counter;
use tollgate::{Charge, Decision, Error, Outcome, Tollgate};
use tonic::{Request, Response, Status};

use self::descriptors::{Hits, Matched};
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
            Ok(answer) if reply::is_over_limit(answer) => &self.calls.over_limit,
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
    let matched = descriptors::read(&state.gate, bounds, &state.config.envoy, request)?;
    let answers = charge(&state.gate, &matched).await.map_err(undecided)?;
    Ok(reply::response(&state.gate, &matched, &answers))
}

/// Envoy goes by its own failure mode then, as its operator has chosen.
fn undecided(error: Error) -> Status {
    Status::unavailable(format!("cannot decide: {}", words(&error)))
}

/// What the limits answered to each descriptor that matched one.
struct Answers {
    each: Vec<Option<Outcome>>,
    is_denied: bool,
}

/// Charges what is to be charged, if all of it fits and nothing that is only looked at denies.
async fn charge(gate: &Tollgate, matched: &[Matched<'_>]) -> Result<Answers, Error> {
    let mut answers = Answers { each: vec![None; matched.len()], is_denied: false };
    // What was charged too much is given back first, and whatever becomes of the rest.
    let back = Charges::of(matched, |hits| match hits {
        Hits::GiveBack(hits) => Some(hits),
        _ => None,
    });
    if !back.charges.is_empty() {
        match gate.refund(&back.charges).await {
            // The store failed. That holds nobody up: what could not be given back stays charged.
            Err(error) if error.is_transient() => {
                metrics::counter!("tollgate_envoy_refunds_dropped_total")
                    .increment(back.charges.len() as u64);
            }
            refunded => {
                refunded?;
                metrics::counter!("tollgate_envoy_refunds_total").increment(back.charges.len() as u64);
            }
        }
        let after_call: Vec<Charge<'_>> = back.charges.iter().map(|charge| charge.clone().cost(1)).collect();
        let decision = gate.peek(&after_call).await?;
        answers.note(&back, &decision);
    }
    let looks = Charges::of(matched, |hits| (hits == Hits::Look).then_some(1));
    if !looks.charges.is_empty() {
        let decision = gate.peek(&looks.charges).await?;
        answers.note(&looks, &decision);
        answers.is_denied |= !decision.is_allowed();
    }
    let charges = Charges::of(matched, |hits| match hits {
        Hits::Charge(hits) => Some(hits),
        _ => None,
    });
    if !charges.charges.is_empty() {
        let decision = match answers.is_denied {
            true => gate.peek(&charges.charges).await?,
            false => gate.charge(&charges.charges).await?,
        };
        answers.note(&charges, &decision);
        answers.is_denied |= !decision.is_allowed();
    }
    Ok(answers)
}

impl Answers {
    fn note(&mut self, charges: &Charges<'_>, decision: &Decision) {
        for (index, outcome) in charges.places.iter().zip(decision.outcomes()) {
            self.each[*index] = Some(*outcome);
        }
    }
}

/// Charges of one kind, and which descriptors they are of.
struct Charges<'a> {
    places: Vec<usize>,
    charges: Vec<Charge<'a>>,
}

impl<'a> Charges<'a> {
    fn of(matched: &'a [Matched<'_>], cost: impl Fn(Hits) -> Option<u64>) -> Charges<'a> {
        let of_limits = matched.iter().enumerate().filter_map(|(place, one)| Some((place, one.charge()?)));
        let (places, charges) = of_limits
            .filter_map(|(place, charge)| Some((place, charge.with_cost(cost(charge.hits)?))))
            .unzip();
        Charges { places, charges }
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
