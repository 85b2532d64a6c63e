//! From a request to a verdict: who owes what under which limits, charged all at once, and what that means for the request.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

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
use crate::charge::Charge;
use crate::engine::{self, Answer, Charges, Mode, Step, Take};
use crate::error::Error;
use crate::headers::{ResetAs, Said};
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

/// Charges what is due in a remote store.
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
    if is_leased && inner.gate.engine.is_local() { Hold::UNTIL_RELEASED } else { inner.settle_within }
}

/// What each limit of a charge said, in the order of the dues.
type AllSaid<'a> = SmallVec<[Said<'a>; 4]>;

/// Charges what is due where the counters are in this process, and says what that means.
///
/// Fast path, which nearly every request takes: one limit whose counters need only be asked, and a valid key.
pub(super) fn decide_local<B>(inner: &Arc<Inner>, dues: &Dues, request: &Request<B>) -> Verdict {
    if let [due] = &dues[..]
        && let Some(verdict) = decide_one(inner, due, request)
    {
        return verdict;
    }
    let protocol = Protocol::of(request);
    let charges: SmallVec<[Charge<'_>; 4]> = dues.iter().map(|due| due.charge(inner)).collect();
    match inner.gate.engine.charge(&mut to_charge(inner, dues, &charges)) {
        Step::Done(Ok(answer)) => match conclude(inner, dues, protocol, answer) {
            Concluded::Verdict(verdict) => verdict,
            Concluded::Cancel(reservation, verdict) => {
                settle_local(inner, reservation.id(), &Settlement::Cancel);
                verdict
            }
        },
        Step::Done(Err(error)) => undecided(inner, protocol, &error),
        Step::Waits(_) => Verdict::undecided(inner, protocol),
    }
}

/// Fast path of one limit. `None`, and nothing charged, if it is not open.
fn decide_one<B>(inner: &Inner, due: &Due, request: &Request<B>) -> Option<Verdict> {
    let applied = due.limit(inner);
    let limiter = applied.straight.as_ref().filter(|limiter| limiter.is_fast())?;
    let outcome = limiter.charge_cost(due.key.as_ref()?, due.cost);
    // What was said is not put together unless it is needed: it was written only now, and copying it would wait for that.
    let said = || [applied.said(due.cost, *outcome.numbers())];
    if !outcome.is_allowed() {
        return Some(refuse(inner, Protocol::of(request), &said(), Reason::QuotaExceeded));
    }
    let marks = match &applied.sheet {
        Some(sheet) if sheet.fits(outcome.numbers()) => sheet.filled(outcome.numbers(), due.cost, now(inner)),
        None if !inner.settings.format.legacy && !inner.settings.format.draft => Marks::default(),
        _ => marks(inner, &said()),
    };
    Some(Verdict::Pass { delay: Micros::ZERO, marks, after: None })
}

/// The call of the engine for what is due.
fn to_charge<'a>(inner: &Inner, dues: &Dues, charges: &'a [Charge<'a>]) -> engine::Request<'a> {
    let take = match is_held(inner, dues) {
        true => Take::Reservation(hold_ttl(inner, dues)),
        false => Take::Nothing,
    };
    engine::Request { take, ..engine::Request::new(Charges::All(charges), Mode::AllOrNone) }
}

/// Charges what is due, and says what that means.
pub(super) async fn decide(inner: &Arc<Inner>, dues: &Dues, protocol: Protocol) -> Verdict {
    let charges: SmallVec<[Charge<'_>; 4]> = dues.iter().map(|due| due.charge(inner)).collect();
    let answer = match inner.gate.engine.charge(&mut to_charge(inner, dues, &charges)) {
        Step::Done(answer) => answer,
        Step::Waits(waiting) => waiting.await,
    };
    match answer.map(|answer| conclude(inner, dues, protocol, answer)) {
        Ok(Concluded::Verdict(verdict)) => verdict,
        Ok(Concluded::Cancel(reservation, verdict)) => {
            settle(inner, reservation.id(), &Settlement::Cancel).await;
            verdict
        }
        Err(error) => undecided(inner, protocol, &error),
    }
}

#[cold]
fn undecided(inner: &Inner, protocol: Protocol, error: &Error) -> Verdict {
    if let Some(count) = inner.undecided.count() {
        tracing::error!(count, "refused a request that could not be decided: {error}");
    }
    Verdict::undecided(inner, protocol)
}

/// What an answer means for the request.
enum Concluded {
    Verdict(Verdict),
    /// It is refused though it was charged: that is to be given back.
    Cancel(Box<Reservation>, Verdict),
}

fn conclude(inner: &Arc<Inner>, dues: &Dues, protocol: Protocol, answer: Answer) -> Concluded {
    let Answer { decision, held } = answer;
    let entries: SmallVec<[_; 4]> = dues.iter().map(|due| due.limit(inner).limit.entry.newest()).collect();
    let mut said: AllSaid<'_> = SmallVec::new();
    for ((due, entry), outcome) in dues.iter().zip(&entries).zip(decision.outcomes()) {
        let limit = due.key.as_ref().and_then(|key| entry.place(key).limit());
        let told = due.limit(inner).said(due.cost, *outcome.numbers());
        said.push(Said { limit, shadow: outcome.is_shadow(), ..told });
    }
    let mut is_too_late = false;
    for limit in &mut said {
        is_too_late |= refuse_long_wait(limit, inner.settings.most_delay);
    }
    let reason = Reason::of(&decision);
    if reason.is_some() || is_too_late {
        let refused = refuse(inner, protocol, &said, reason.unwrap_or(Reason::QuotaExceeded));
        // It would rather not have been charged.
        return match held.filter(|_| reason.is_none()) {
            Some(held) => {
                let reservation = Reservation::new(inner.gate.engine.clone(), held, decision);
                Concluded::Cancel(Box::new(reservation), refused)
            }
            None => Concluded::Verdict(refused),
        };
    }
    let (delay, marks) = (Micros::from(decision.delay()), marks(inner, &said));
    let after = held.map(|held| {
        let reservation = Reservation::new(inner.gate.engine.clone(), held, decision);
        Box::new(After::new(inner.clone(), reservation, dues))
    });
    Concluded::Verdict(Verdict::Pass { delay, marks, after })
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
        ResetAs::UnixTime => inner.gate.engine.clock.now(),
    }
}

/// Settles a charge; what cannot be settled stays charged as it was reserved, and is warned of.
pub(super) async fn settle(inner: &Inner, id: HoldId, settlement: &Settlement) {
    let settled = inner.gate.engine.settle(id, settlement).await;
    settled_or_warn(inner, settled.err());
}

/// The same where the counters are in this process. Nobody asks for the reservation again, so it is forgotten.
pub(super) fn settle_local(inner: &Inner, id: HoldId, settlement: &Settlement) {
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
