//! Charges a request: makes its charges in one call, and turns the decision into an admission.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use smallvec::SmallVec;
use tollgate_kernel::{Limit, Micros};
use tollgate_store::{ChargeId, Hold, Settlement};

use super::after::After;
use super::charges::{RouteCharge, RouteCharges};
use super::header_template::HeaderTemplate;
use super::layer::Inner;
use super::rate_limit_headers::RateLimitHeaders;
use super::refusal::{Protocol, Refusal};
use crate::charge::Charge;
use crate::engine::{self, Answer, Charges, Mode, Step, Take};
use crate::error::Error;
use crate::headers::{ReportedLimit, ResetAs};
use crate::key::{Key, KeyRef};
use crate::outcome::Outcome;
use crate::problem::Reason;
use crate::reservation::Reservation;

/// The result for a request.
pub(super) enum Admission {
    /// It passes, after a delay.
    Pass { delay: Micros, rate_limit_headers: RateLimitHeaders, after: Option<Box<After>> },
    /// It is answered here. Boxed, because requests that pass are moved with this type.
    Stop(Box<Response<Bytes>>),
}

impl Admission {
    fn stop(answer: Response<Bytes>) -> Admission {
        Admission::Stop(Box::new(answer))
    }

    /// It passes, and nothing was charged.
    pub(super) fn free() -> Admission {
        Admission::Pass { delay: Micros::ZERO, rate_limit_headers: RateLimitHeaders::default(), after: None }
    }

    /// Neither the store nor a fallback could decide: the request does not pass.
    pub(super) fn undecided(inner: &Inner, protocol: Protocol) -> Admission {
        Admission::stop(
            Refusal::undecided(protocol).answer(inner.responder.as_ref(), RateLimitHeaders::default()),
        )
    }
}

/// An admission that is waited for: boxed, as the future of a remote store is.
pub(super) type Deciding = Pin<Box<dyn Future<Output = Admission> + Send>>;

/// Charges a request in a remote store.
///
/// A reservation is completed even if the client disconnects meanwhile: only then can its lease be released.
pub(super) fn decide_remote(
    inner: Arc<Inner>,
    route_charges: RouteCharges<'_>,
    protocol: Protocol,
) -> Deciding {
    let route_charges = route_charges.into_owned();
    if !is_held(&inner, &route_charges) {
        return Box::pin(async move { decide(&inner, &route_charges, protocol).await });
    }
    let deciding = {
        let inner = inner.clone();
        tokio::spawn(async move { decide(&inner, &route_charges, protocol).await })
    };
    Box::pin(async move { deciding.await.unwrap_or_else(|_| Admission::undecided(&inner, protocol)) })
}

/// Whether anything of it is to be corrected later.
fn is_held(inner: &Inner, route_charges: &RouteCharges<'_>) -> bool {
    route_charges.iter().any(|route_charge| route_charge.limit(inner).is_held)
}

/// The time to live of a reservation. A local lease does not expire: the request that holds it is in this process too, and
/// releases it however it ends.
fn hold_ttl(inner: &Inner, route_charges: &RouteCharges<'_>) -> Micros {
    let is_leased = route_charges.iter().any(|route_charge| route_charge.limit(inner).lease.is_some());
    if is_leased && inner.gate.engine.is_local() { Hold::UNTIL_RELEASED } else { inner.settle_within }
}

/// What each limit of a charge answered, in the order of the charges.
type ReportedLimits<'a> = SmallVec<[ReportedLimit<'a>; 4]>;

/// Charges a request on local counters and returns the admission.
///
/// Fast path, for nearly every request: plain charges with valid keys.
pub(super) fn decide_local<B>(
    inner: &Arc<Inner>,
    route_charges: &RouteCharges<'_>,
    request: &Request<B>,
) -> Admission {
    let fast = match &route_charges[..] {
        [route_charge] => decide_one(inner, route_charges, route_charge, request),
        _ => decide_several(inner, route_charges, request),
    };
    if let Some(admission) = fast {
        return admission;
    }
    let protocol = Protocol::of(request);
    let charges: SmallVec<[Charge<'_>; 4]> =
        route_charges.iter().map(|route_charge| route_charges.charge(inner, route_charge)).collect();
    match inner.gate.engine.charge(&mut to_charge(inner, route_charges, &charges)) {
        Step::Done(Ok(answer)) => match conclude(inner, route_charges, protocol, answer) {
            Conclusion::Admission(admission) => admission,
            Conclusion::Cancel(reservation, admission) => {
                settle_local(inner, reservation.id(), &Settlement::Cancel);
                admission
            }
        },
        Step::Done(Err(error)) => undecided(inner, protocol, &error),
        Step::Waits(_) => Admission::undecided(inner, protocol),
    }
}

/// Fast path of one limit. `None`, and nothing charged, if it is not open.
#[inline]
fn decide_one<B>(
    inner: &Inner,
    route_charges: &RouteCharges<'_>,
    route_charge: &RouteCharge<'_>,
    request: &Request<B>,
) -> Option<Admission> {
    let applied = route_charge.limit(inner);
    let limiter = applied.fast_path.as_ref().filter(|limiter| limiter.is_fast())?;
    let key = KeyRef::canonical(route_charges.key(route_charge)?);
    let outcome = limiter.charge_cost(key, route_charge.cost);
    // The report is made only if it is needed: the outcome was written just now, and copying it would wait for that.
    let reported = || [applied.reported(route_charge.cost, *outcome.numbers())];
    if !outcome.is_allowed() {
        return Some(refuse(inner, Protocol::of(request), &reported(), Reason::QuotaExceeded));
    }
    let rate_limit_headers = match applied.template {
        Some(template) if template.fits(outcome.numbers()) => {
            RateLimitHeaders::Template(template.filled(outcome.numbers(), route_charge.cost, now(inner)))
        }
        None if is_silent(inner) => RateLimitHeaders::None,
        _ => rate_limit_headers(inner, &reported()),
    };
    Some(Admission::Pass { delay: Micros::ZERO, rate_limit_headers, after: None })
}

/// Whether a request that passes has no rate-limit headers.
fn is_silent(inner: &Inner) -> bool {
    !inner.settings.format.legacy && !inner.settings.format.draft
}

/// Fast path of several limits. `None`, and nothing charged, if it is not open.
fn decide_several<B>(
    inner: &Inner,
    route_charges: &RouteCharges<'_>,
    request: &Request<B>,
) -> Option<Admission> {
    let mut charges: SmallVec<[Charge<'_>; 4]> = SmallVec::new();
    let mut templates: SmallVec<[&'static HeaderTemplate; 4]> = SmallVec::new();
    for route_charge in &**route_charges {
        let applied = route_charge.limit(inner);
        applied.fast_path.as_ref().filter(|limiter| limiter.is_fast())?;
        let key = KeyRef::canonical(route_charges.key(route_charge)?);
        charges.push(Charge::new(&applied.limit, key).cost(route_charge.cost.get()));
        templates.extend(applied.template);
    }
    let decision = inner.gate.engine.charge_all(&charges).ok()?;
    let pass = |rate_limit_headers| Admission::Pass { delay: Micros::ZERO, rate_limit_headers, after: None };
    let reason = Reason::of(&decision);
    if reason.is_none() {
        if is_silent(inner) {
            return Some(pass(RateLimitHeaders::None));
        }
        let outcomes = decision.outcomes().iter().map(Outcome::numbers);
        let outcomes = outcomes.zip(route_charges.iter().map(|route_charge| route_charge.cost));
        let template = inner.template_sets.of(&templates).filter(|_| templates.len() == charges.len());
        let filled =
            template.and_then(|template| template.filled_all(outcomes, decision.binding_index(), now(inner)));
        if let Some(filled) = filled {
            return Some(pass(RateLimitHeaders::Template(filled)));
        }
    }
    let mut reported: ReportedLimits<'_> = SmallVec::new();
    for (route_charge, outcome) in route_charges.iter().zip(decision.outcomes()) {
        reported.push(route_charge.limit(inner).reported(route_charge.cost, *outcome.numbers()));
    }
    Some(match reason {
        None => pass(rate_limit_headers(inner, &reported)),
        Some(reason) => refuse(inner, Protocol::of(request), &reported, reason),
    })
}

/// The call of the engine for the charges of a request.
fn to_charge<'a>(
    inner: &Inner,
    route_charges: &RouteCharges<'_>,
    charges: &'a [Charge<'a>],
) -> engine::Request<'a> {
    let take = match is_held(inner, route_charges) {
        true => Take::Reservation(hold_ttl(inner, route_charges)),
        false => Take::Nothing,
    };
    engine::Request { take, ..engine::Request::new(Charges::All(charges), Mode::AllOrNone) }
}

/// Charges a request and returns the admission.
pub(super) async fn decide(
    inner: &Arc<Inner>,
    route_charges: &RouteCharges<'_>,
    protocol: Protocol,
) -> Admission {
    let charges: SmallVec<[Charge<'_>; 4]> =
        route_charges.iter().map(|route_charge| route_charges.charge(inner, route_charge)).collect();
    let answer = match inner.gate.engine.charge(&mut to_charge(inner, route_charges, &charges)) {
        Step::Done(answer) => answer,
        Step::Waits(waiting) => waiting.await,
    };
    match answer.map(|answer| conclude(inner, route_charges, protocol, answer)) {
        Ok(Conclusion::Admission(admission)) => admission,
        Ok(Conclusion::Cancel(reservation, admission)) => {
            settle(inner, reservation.id(), &Settlement::Cancel).await;
            admission
        }
        Err(error) => undecided(inner, protocol, &error),
    }
}

#[cold]
fn undecided(inner: &Inner, protocol: Protocol, error: &Error) -> Admission {
    if let Some(count) = inner.undecided.count() {
        tracing::error!(count, "refused a request that could not be decided: {error}");
    }
    Admission::undecided(inner, protocol)
}

/// What an answer of the engine means for the request.
enum Conclusion {
    Admission(Admission),
    /// It is refused though it was charged: that is to be given back.
    Cancel(Box<Reservation>, Admission),
}

fn conclude(
    inner: &Arc<Inner>,
    route_charges: &RouteCharges<'_>,
    protocol: Protocol,
    answer: Answer,
) -> Conclusion {
    let Answer { decision, held, .. } = answer;
    let entries: SmallVec<[_; 4]> =
        route_charges.iter().map(|route_charge| route_charge.limit(inner).limit.entry.newest()).collect();
    let mut reported: ReportedLimits<'_> = SmallVec::new();
    for ((route_charge, entry), outcome) in route_charges.iter().zip(&entries).zip(decision.outcomes()) {
        let key = route_charges.key(route_charge).map(Key::from_canonical);
        let limit = key.and_then(|key| entry.key_limit(&key).limit());
        let report = route_charge.limit(inner).reported(route_charge.cost, *outcome.numbers());
        reported.push(ReportedLimit { limit, shadow: outcome.is_shadow(), ..report });
    }
    let mut is_too_late = false;
    for limit in &mut reported {
        is_too_late |= refuse_long_wait(limit, inner.settings.most_delay);
    }
    let reason = Reason::of(&decision);
    if reason.is_some() || is_too_late {
        let refused = refuse(inner, protocol, &reported, reason.unwrap_or(Reason::QuotaExceeded));
        // It would rather not have been charged.
        return match held.filter(|_| reason.is_none()) {
            Some(held) => {
                let reservation = Reservation::new(inner.gate.engine.clone(), held, decision);
                Conclusion::Cancel(Box::new(reservation), refused)
            }
            None => Conclusion::Admission(refused),
        };
    }
    let (delay, rate_limit_headers) = (Micros::from(decision.delay()), rate_limit_headers(inner, &reported));
    let after = held.map(|held| {
        let reservation = Reservation::new(inner.gate.engine.clone(), held, decision);
        Box::new(After::new(inner.clone(), reservation, route_charges))
    });
    Conclusion::Admission(Admission::Pass { delay, rate_limit_headers, after })
}

/// Turns an admission with a delay longer than `most` into a refusal; true if it did. The refusal's retry time is when the delay
/// is short enough, not when there is room.
fn refuse_long_wait(reported: &mut ReportedLimit<'_>, most: Micros) -> bool {
    if reported.shadow || !matches!(reported.limit, Some(Limit::LeakyBucket(_))) {
        return false;
    }
    let outcome = &mut reported.outcome;
    // All that is ahead; a refused charge has added nothing to it.
    let ahead = if outcome.allowed { outcome.delay } else { outcome.reset_after };
    if ahead <= most {
        return false;
    }
    let wait = ahead.saturating_sub(most);
    if outcome.allowed {
        outcome.allowed = false;
        outcome.retry_after = Some(wait);
        // It is given back, or was never taken.
        outcome.remaining = outcome.remaining.saturating_add(reported.cost).min(outcome.capacity);
    } else {
        outcome.retry_after = outcome.retry_after.map(|room| room.max(wait));
    }
    true
}

#[cold]
fn refuse(inner: &Inner, protocol: Protocol, reported: &[ReportedLimit<'_>], reason: Reason) -> Admission {
    let refusal = Refusal::new(protocol, reported, reason);
    Admission::stop(refusal.answer(inner.responder.as_ref(), rate_limit_headers(inner, reported)))
}

/// The rate-limit headers of a response.
fn rate_limit_headers(inner: &Inner, reported: &[ReportedLimit<'_>]) -> RateLimitHeaders {
    RateLimitHeaders::new(&inner.settings.format, reported, now(inner))
}

/// The time, where it is written: only where the reset is one, as reading it takes a good part of a charge.
fn now(inner: &Inner) -> Micros {
    match inner.settings.format.reset {
        ResetAs::Seconds => Micros::ZERO,
        ResetAs::UnixTime => inner.gate.engine.clock.now(),
    }
}

/// Settles a charge. If that fails, the reserved amount stays charged, with a warning.
pub(super) async fn settle(inner: &Inner, id: ChargeId, settlement: &Settlement) {
    let settled = inner.gate.engine.settle(id, settlement).await;
    settled_or_warn(inner, settled.err());
}

/// The same on local counters. The reservation is not needed again, so it is forgotten.
pub(super) fn settle_local(inner: &Inner, id: ChargeId, settlement: &Settlement) {
    let settled = inner.gate.engine.settle_local(id, settlement);
    settled_or_warn(inner, settled.and_then(Result::err));
    inner.gate.engine.forget_local(id);
}

fn settled_or_warn(inner: &Inner, error: Option<Error>) {
    if let Some(error) = error
        && let Some(count) = inner.unsettled.count()
    {
        tracing::warn!(count, "a charge stays as it was reserved, because it could not be settled: {error}");
    }
}
