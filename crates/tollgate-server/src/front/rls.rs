//! gRPC: the rate limit service that Envoy calls, with health and reflection.
//!
//! `descriptors.rs` finds the limits that the descriptors of a call meet, `key.rs` by which key, `reply.rs` writes the answer, and
//! `connection.rs` speaks HTTP/2; `budget.rs` bounds buffered bytes, `seats.rs` the number of incomplete calls. All descriptors of a
//! call are one charge: all of them, or none.
//!
//! Envoy lets a request pass when it gets no answer that it knows, unless it is configured otherwise. So there is always an answer
//! that says what is meant: OK, OVER_LIMIT, or an error of gRPC, and never the code UNKNOWN.

mod budget;
mod connection;
mod descriptors;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
#[cfg(test)]
mod in_flight;
mod key;
mod proto;
mod reply;
mod seats;

use std::sync::Arc;

use metrics::Counter;
use tollgate::{Charge, Error, Outcome, Tollgate};
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
    Ok(reply::response(&matched, &answers))
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

/// Charges what is to be charged, if all of it fits and nothing that is only looked at denies: one call of the store where all
/// descriptors are charged, or all are looked at. What is given back takes a call before it, and looks beside charges another one.
async fn charge(gate: &Tollgate, matched: &[Matched]) -> Result<Answers, Error> {
    let mut answers = Answers { each: vec![None; matched.len()], is_denied: false };
    // What was charged too much is given back first, and whatever becomes of the rest.
    let (_, back) = charges_of(matched, |hits| match hits {
        Hits::GiveBack(hits) => Some(hits),
        _ => None,
    });
    if !back.is_empty() {
        refund(gate, &back).await?;
    }
    look(gate, matched, &mut answers).await?;
    let (places, charges) = charges_of(matched, |hits| match hits {
        Hits::Charge(hits) => Some(hits),
        _ => None,
    });
    if !charges.is_empty() {
        let decision = match answers.is_denied {
            true => gate.peek(&charges).await?,
            false => gate.charge(&charges).await?,
        };
        for (place, outcome) in places.into_iter().zip(decision.outcomes()) {
            answers.each[place] = Some(*outcome);
        }
        answers.is_denied |= !decision.is_allowed();
    }
    Ok(answers)
}

async fn refund(gate: &Tollgate, back: &[Charge<'_>]) -> Result<(), Error> {
    match gate.refund(back).await {
        // The store failed. That holds nobody up: what could not be given back stays charged.
        Err(error) if error.is_transient() => {
            metrics::counter!("tollgate_envoy_refunds_dropped_total").increment(back.len() as u64);
        }
        refunded => {
            refunded?;
            metrics::counter!("tollgate_envoy_refunds_total").increment(back.len() as u64);
        }
    }
    Ok(())
}

/// Looks whether one more would fit where nothing is charged: after what was given back, which denies nobody, and where the
/// descriptor asks for no more than that, which denies the call. Each key is charged once, however many descriptors meet it.
async fn look(gate: &Tollgate, matched: &[Matched], answers: &mut Answers) -> Result<(), Error> {
    let (mut pairs, mut charges) = (Vec::new(), Vec::new());
    let mut charged = Vec::new();
    for (place, charge) in matched.iter().enumerate().filter_map(|(place, one)| Some((place, one.charge()?)))
    {
        if matches!(charge.hits, Hits::Charge(_)) {
            continue;
        }
        // Limits that come with the call have numbers of their own, whatever their name.
        let pair = (!charge.is_own).then_some((charge.limit.name(), &charge.key));
        let known = pairs.iter().position(|other| pair.is_some() && *other == pair);
        let index = known.unwrap_or_else(|| {
            pairs.push(pair);
            charges.push(charge.with_cost(1));
            pairs.len() - 1
        });
        charged.push((place, index, charge.hits == Hits::Look));
    }
    if charges.is_empty() {
        return Ok(());
    }
    let decision = gate.peek(&charges).await?;
    for (place, index, denies) in charged {
        let outcome = decision.outcomes()[index];
        answers.each[place] = Some(outcome);
        answers.is_denied |= denies && !outcome.is_allowed();
    }
    Ok(())
}

/// The charges of those descriptors that have such a cost, and which descriptors they are of.
fn charges_of<'a>(
    matched: &'a [Matched],
    cost: impl Fn(Hits) -> Option<u64>,
) -> (Vec<usize>, Vec<Charge<'a>>) {
    let of_limits = matched.iter().enumerate().filter_map(|(place, one)| Some((place, one.charge()?)));
    let costs = of_limits.filter_map(|(place, charge)| Some((place, charge, cost(charge.hits)?)));
    // Mostly all of them or none.
    let mut costs = costs.peekable();
    let room = if costs.peek().is_some() { matched.len() } else { 0 };
    let (mut places, mut charges) = (Vec::with_capacity(room), Vec::with_capacity(room));
    for (place, charge, cost) in costs {
        places.push(place);
        charges.push(charge.with_cost(cost));
    }
    (places, charges)
}

#[cfg(test)]
mod tests {
    use tollgate::store::{Failure, StoreError};
    use tonic::Code;

    use super::*;

    #[test]
    fn a_proxy_does_not_learn_the_address_of_the_store() {
        let error = StoreError::failed(Failure::Refused, "PostgreSQL at 10.0.0.5:5432 does not let app in");
        let status = undecided(error.into());
        assert_eq!(status.code(), Code::Unavailable);
        assert_eq!(status.message(), "cannot decide: the store could not answer (refused); ask again later");
    }
}
