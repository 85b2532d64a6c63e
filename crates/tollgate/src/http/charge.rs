//! From a request to a verdict: who owes what under which limits, charged all at once, and what that means for the request.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use smallvec::SmallVec;
use tollgate_kernel::{Limit, Micros};
use tollgate_store::{Hold, HoldId, Settlement};

use super::after::After;
use super::charges::{Due, Dues};
use super::layer::Inner;
use super::marks::Marks;
use super::refusal::{Protocol, Refusal};
use crate::decision::Decision;
use crate::gate::{Place, Resolved, ResolvedAll};
use crate::headers::{ResetAs, Said};
use crate::limiter::{self, Charge};
use crate::problem::Reason;
use crate::reservation::Reservation;

/// What becomes of a request.
pub(super) enum Verdict {
    /// It goes on, after a while.
    Pass { delay: Micros, marks: Marks, after: Option<Box<After>> },
    /// It is answered here. Boxed, because those that pass carry the room.
    Stop(Box<Response<Bytes>>),
}

impl Verdict {
    fn stop(answer: Response<Bytes>) -> Verdict {
        Verdict::Stop(Box::new(answer))
    }

    /// It goes on, and nothing was charged.
    pub(super) fn free() -> Verdict {
        Verdict::Pass { delay: Micros::ZERO, marks: Marks::default(), after: None }
    }

    /// Nobody could decide, neither the store nor a fallback: it does not pass.
    pub(super) fn undecided(inner: &Inner, protocol: Protocol) -> Verdict {
        Verdict::stop(Refusal::undecided(protocol).answer(inner.responder.as_ref(), Marks::default()))
    }
}

/// A verdict that is waited for: boxed, as the future of a store elsewhere is.
pub(super) type Asked = Pin<Box<dyn Future<Output = Verdict> + Send>>;

/// Charges what is due in a store elsewhere.
///
/// A charge that is to be corrected later is seen through even if the caller goes away meanwhile: once it is there, its lease can
/// be given back.
pub(super) fn ask(inner: Arc<Inner>, dues: Dues, protocol: Protocol) -> Asked {
    if !is_held(&inner, &dues) {
        return Box::pin(async move { decide(&inner, &dues, protocol).await });
    }
    let deciding = {
        let inner = inner.clone();
        tokio::spawn(async move { decide(&inner, &dues, protocol).await })
    };
    Box::pin(async move { deciding.await.unwrap_or_else(|_| Verdict::undecided(&inner, protocol)) })
}

/// Whether anything of it is to be corrected later.
fn is_held(inner: &Inner, dues: &Dues) -> bool {
    dues.iter().any(|due| due.limit(inner).is_held)
}

/// How long what is to be corrected is held. Where the counters are in this process a lease has no end: the request that holds it
/// is in this process too, and gives it back however it ends.
fn hold_ttl(inner: &Inner, dues: &Dues) -> Micros {
    let is_leased = dues.iter().any(|due| due.limit(inner).lease.is_some());
    if is_leased && inner.gate.is_in_process() { Hold::UNTIL_RELEASED } else { inner.settle_within }
}

/// What each limit of a charge said, in the order of the dues.
type AllSaid<'a> = SmallVec<[Said<'a>; 4]>;

/// Charges what is due where the counters are in this process, and says what that means.
///
/// The straight way, which nearly every request takes, is open to limits whose counters need only be asked, and to keys that
/// make sense.
pub(super) fn decide_at_once<B>(inner: &Arc<Inner>, dues: &Dues, request: &Request<B>) -> Verdict {
    let straight = match &dues[..] {
        [due] => decide_one(inner, due, request),
        _ => decide_several(inner, dues, request),
    };
    straight.unwrap_or_else(|| {
        let protocol = Protocol::of(request);
        let verdict = at_once(decide(inner, dues, protocol));
        verdict.unwrap_or_else(|| Verdict::undecided(inner, protocol))
    })
}

/// The straight way of one limit. `None`, and nothing charged, if it is not open.
fn decide_one<B>(inner: &Inner, due: &Due, request: &Request<B>) -> Option<Verdict> {
    let post = due.limit(inner);
    let outcome = post.straight.as_ref()?.charge_cost(due.key.as_ref()?.canonical(), due.cost);
    // What was said is not put together unless it is needed: it was written only now, and copying it would wait for that.
    let said = || [post.said(due.cost, outcome)];
    if !outcome.allowed {
        return Some(refuse(inner, Protocol::of(request), &said(), Reason::QuotaExceeded));
    }
    let marks = match &post.sheet {
        Some(sheet) if sheet.fits(&outcome) => sheet.filled(&outcome, due.cost, now(inner)),
        None if !inner.settings.format.legacy && !inner.settings.format.draft => Marks::default(),
        _ => marks(inner, &said()),
    };
    Some(Verdict::Pass { delay: Micros::ZERO, marks, after: None })
}

/// The straight way of several limits. `None`, and nothing charged, if it is not open.
fn decide_several<B>(inner: &Inner, dues: &Dues, request: &Request<B>) -> Option<Verdict> {
    let mut charges: SmallVec<[Charge<'_, '_>; 4]> = SmallVec::new();
    for due in dues {
        let limiter = due.limit(inner).straight.as_ref()?;
        charges.push(limiter.of(due.key.as_ref()?.canonical()).cost(due.cost.get()));
    }
    let decision = limiter::charge(&charges).ok()?;
    let mut said = AllSaid::new();
    for (due, limit) in dues.iter().zip(decision.limits()) {
        said.push(due.limit(inner).said(due.cost, limit.outcome));
    }
    Some(match decision.allowed() {
        true => Verdict::Pass { delay: Micros::ZERO, marks: marks(inner, &said), after: None },
        false => refuse(inner, Protocol::of(request), &said, Reason::QuotaExceeded),
    })
}

/// Charges what is due, and says what that means.
pub(super) async fn decide(inner: &Arc<Inner>, dues: &Dues, protocol: Protocol) -> Verdict {
    let is_held = is_held(inner, dues);
    let hold = is_held.then(|| Hold { id: HoldId::random(), ttl: hold_ttl(inner, dues) });
    let operation = if is_held { "reserve" } else { "charge" };
    let started = inner.gate.gate.started(operation);
    let resolved: ResolvedAll<'_, '_> = dues.iter().map(|due| resolve(inner, due)).collect();
    match inner.gate.decide_resolved(operation, &resolved, hold, &started).await {
        Ok(decision) => conclude(inner, dues, protocol, &resolved, &decision, hold).await,
        Err(error) => {
            if let Some(count) = inner.undecided.count() {
                tracing::error!(count, "refused a request that could not be decided: {error}");
            }
            Verdict::undecided(inner, protocol)
        }
    }
}

fn resolve<'a>(inner: &'a Inner, due: &'a Due) -> Resolved<'a, 'a> {
    let entry = &*due.limit(inner).entry;
    let met = due.key.as_ref().map(|key| (key.borrowed(), entry.place(key)));
    Resolved { name: entry.rule.name(), entry, met, cost: due.cost }
}

async fn conclude(
    inner: &Arc<Inner>,
    dues: &Dues,
    protocol: Protocol,
    resolved: &[Resolved<'_, '_>],
    decision: &Decision<'_>,
    hold: Option<Hold>,
) -> Verdict {
    let mut said: AllSaid<'_> = SmallVec::new();
    for ((due, ask), limit) in dues.iter().zip(resolved).zip(decision.limits()) {
        let counted = match &ask.met {
            Some((_, Place::Counted { stored, .. })) => Some(&stored.limit),
            _ => None,
        };
        let told = due.limit(inner).said(due.cost, limit.outcome);
        said.push(Said { limit: counted, shadow: limit.shadow, ..told });
    }
    let mut is_too_late = false;
    for limit in &mut said {
        is_too_late |= refuse_long_wait(limit, inner.settings.most_delay);
    }
    let reservation = hold.map(|hold| Reservation::new(inner.gate.gate.clone(), hold.id, decision));
    let reason = match Reason::of(decision) {
        None if is_too_late => {
            // It would rather not have been charged.
            if let Some(reservation) = &reservation {
                settle(inner, reservation.id(), &Settlement::Cancel).await;
            }
            Some(Reason::QuotaExceeded)
        }
        reason => reason,
    };
    if let Some(reason) = reason {
        return refuse(inner, protocol, &said, reason);
    }
    let after = reservation.map(|reservation| Box::new(After::new(inner.clone(), reservation, dues)));
    Verdict::Pass { delay: decision.delay(), marks: marks(inner, &said), after }
}

/// Makes a refusal of what a leaky bucket would hold back for longer than `most`, and says whether it is one. Whoever was
/// refused is not told to come back as soon as there is room, but when the wait in it is short enough.
fn refuse_long_wait(said: &mut Said<'_>, most: Micros) -> bool {
    if said.shadow || !matches!(said.limit, Some(Limit::LeakyBucket(_))) {
        return false;
    }
    let outcome = &mut said.outcome;
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
        outcome.remaining = outcome.remaining.saturating_add(said.cost).min(outcome.capacity);
    } else {
        outcome.retry_after = outcome.retry_after.map(|room| room.max(wait));
    }
    true
}

#[cold]
fn refuse(inner: &Inner, protocol: Protocol, said: &[Said<'_>], reason: Reason) -> Verdict {
    let refusal = Refusal::new(protocol, said, reason);
    Verdict::stop(refusal.answer(inner.responder.as_ref(), marks(inner, said)))
}

/// The fields that tell how the caller stands.
fn marks(inner: &Inner, said: &[Said<'_>]) -> Marks {
    Marks::new(&inner.settings.format, said, now(inner))
}

/// The time, where it is told: only where the reset is one, as reading it takes a good part of a charge.
fn now(inner: &Inner) -> Micros {
    match inner.settings.format.reset {
        ResetAs::Seconds => Micros::ZERO,
        ResetAs::UnixTime => inner.gate.gate.clock.now(),
    }
}

/// Settles a charge; what cannot be settled stays charged as it was reserved, and is warned of.
pub(super) async fn settle(inner: &Inner, id: HoldId, settlement: &Settlement) {
    if let Err(error) = inner.gate.settle(id, settlement).await
        && let Some(count) = inner.unsettled.count()
    {
        tracing::warn!(count, "a charge stays as it was reserved, because it could not be settled: {error}");
    }
    inner.gate.forget_hold(id);
}

/// The outcome of what is ready at once, as everything is whose counters are in this process.
pub(super) fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}
