//! From a request to a verdict: who owes what under which limits, charged all at once, and what that means for the request.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{Request, Response};
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};
use tollgate_store::{Hold, HoldId, MemoryItem, Settlement};

use super::after::After;
use super::head::Head;
use super::layer::Inner;
use super::marks::Marks;
use super::path::BadPath;
use super::payer::Unpaid;
use super::refusal::{Protocol, Refusal};
use crate::decision::Decision;
use crate::error::Error;
use crate::gate::{Place, Resolved, ResolvedAll};
use crate::headers::{ResetAs, Said};
use crate::key::Key;
use crate::problem::Reason;
use crate::reservation::Reservation;

/// What a request owes under one toll. Without a key it is denied.
pub(super) struct Due {
    pub(super) post: usize,
    key: Option<Key<'static>>,
    cost: Cost,
}

pub(super) type Dues = SmallVec<[Due; 4]>;

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
}

/// What a request owes; nothing, if it is to be let through.
pub(super) fn dues<B>(inner: &Inner, request: &Request<B>) -> Result<Dues, BadPath> {
    let head = Head::new(request, &inner.identity, inner.separators)?;
    let mut dues = Dues::new();
    if inner.is_skipped(&head) {
        return Ok(dues);
    }
    for (index, post) in inner.posts.iter().enumerate() {
        if !post.route.matches(&head) {
            continue;
        }
        let head = head.on_behalf_of(&post.route);
        let Some(cost) = post.cost(head) else { continue };
        let key = post.source.find(head).map_err(|unpaid| warn(inner, post.entry.rule.name(), &unpaid)).ok();
        dues.push(Due { post: index, key, cost });
    }
    Ok(dues)
}

/// Says, at most once a second, that a request was denied because nobody pays for it.
#[cold]
fn warn(inner: &Inner, limiter: &str, unpaid: &Unpaid) {
    if let Some(count) = inner.unpaid.count() {
        tracing::warn!(limiter, count, "denied a request that nobody pays for: {unpaid}");
    }
}

/// What each limit of a charge said, in the order of the dues.
type AllSaid<'a> = SmallVec<[Said<'a>; 4]>;

/// Charges what is due where the counters are in this process, and says what that means.
pub(super) fn decide_at_once<B>(inner: &Arc<Inner>, dues: &Dues, request: &Request<B>) -> Verdict {
    let mut said = AllSaid::new();
    match charge_straight(inner, dues, &mut said) {
        Some(true) => Verdict::Pass { delay: Micros::ZERO, marks: marks(inner, &said), after: None },
        Some(false) => refuse(inner, Protocol::of(request), &said, Reason::QuotaExceeded),
        None => {
            let protocol = Protocol::of(request);
            let undecided = || Verdict::stop(Refusal::undecided(protocol).answer(None, Marks::default()));
            at_once(decide(inner, dues, protocol)).unwrap_or_else(undecided)
        }
    }
}

/// The straight way, which nearly every request takes: limits whose counters need only be asked, and keys that make sense.
/// `None`, and nothing charged, if it is not open; else whether all was charged.
fn charge_straight<'a>(inner: &'a Inner, dues: &Dues, said: &mut AllSaid<'a>) -> Option<bool> {
    let asked = |due: &'_ Due| inner.posts[due.post].straight.as_ref().zip(due.key.as_ref()).is_some();
    if !dues.iter().all(asked) {
        return None;
    }
    let mut say = |due: &Due, outcome: Outcome| said.push(inner.posts[due.post].said(due.cost, outcome));
    if let [due] = &dues[..] {
        let (limit, key) = inner.posts[due.post].straight.as_ref().zip(due.key.as_ref())?;
        let outcome = limit.charge(key.canonical(), due.cost);
        say(due, outcome);
        return Some(outcome.allowed);
    }
    let items: SmallVec<[MemoryItem<'_>; 4]> = dues
        .iter()
        .filter_map(|due| {
            let (limit, key) = inner.posts[due.post].straight.as_ref().zip(due.key.as_ref())?;
            Some(MemoryItem { limit, key: key.canonical(), cost: due.cost, shadow: false })
        })
        .collect();
    let mut next = dues.iter();
    inner.gate.memory()?.charge_known(&items, |outcome| {
        next.next().into_iter().for_each(|due| say(due, outcome));
    })
}

/// Charges what is due, and says what that means.
pub(super) async fn decide(inner: &Arc<Inner>, dues: &Dues, protocol: Protocol) -> Verdict {
    let is_held = dues.iter().any(|due| inner.posts[due.post].is_held);
    let hold = is_held.then(|| Hold { id: HoldId::random(), ttl: inner.settle_within });
    let started = inner.gate.gate.started();
    let resolved: ResolvedAll<'_, '_> = dues.iter().map(|due| resolve(inner, due)).collect();
    let operation = if is_held { "reserve" } else { "charge" };
    match inner.gate.decide_resolved(operation, &resolved, hold, started).await {
        Ok(decision) => conclude(inner, dues, protocol, &resolved, &decision, hold).await,
        Err(error) => Verdict::stop(undecided(inner, protocol, &error)),
    }
}

fn resolve<'a>(inner: &'a Inner, due: &'a Due) -> Resolved<'a, 'a> {
    let entry = &*inner.posts[due.post].entry;
    let met = due.key.as_ref().map(|key| (key.borrowed(), entry.place(key)));
    Resolved { entry, met, cost: due.cost }
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
        let told = inner.posts[due.post].said(due.cost, limit.outcome);
        said.push(Said { limit: counted, shadow: limit.shadow, ..told });
    }
    if let Some(reason) = Reason::of(decision) {
        return refuse(inner, protocol, &said, reason);
    }
    let delay = decision.delay();
    let reservation = hold.map(|hold| Reservation::new(inner.gate.gate.clone(), hold.id, decision));
    if delay > inner.most_delay {
        // It would wait too long, and would rather not have been charged.
        if let Some(reservation) = &reservation {
            settle(inner, reservation.id(), &Settlement::Cancel).await;
        }
        for limit in said.iter_mut().filter(|limit| limit.outcome.delay > inner.most_delay) {
            limit.outcome.allowed = false;
            let wait = limit.outcome.delay.get() - inner.most_delay.get();
            limit.outcome.retry_after = Some(Micros::new(wait));
        }
        return refuse(inner, protocol, &said, Reason::QuotaExceeded);
    }
    let after = reservation.map(|reservation| Box::new(After::new(inner.clone(), reservation, dues)));
    Verdict::Pass { delay, marks: marks(inner, &said), after }
}

#[cold]
fn refuse(inner: &Inner, protocol: Protocol, said: &[Said<'_>], reason: Reason) -> Verdict {
    let refusal = Refusal::new(protocol, said, reason);
    Verdict::stop(refusal.answer(inner.responder.as_ref(), marks(inner, said)))
}

/// The fields that tell how the caller stands.
fn marks(inner: &Inner, said: &[Said<'_>]) -> Marks {
    // The time is told only where the reset is one; reading it takes a good part of a charge.
    let now = match inner.format.reset {
        ResetAs::Seconds => Micros::ZERO,
        ResetAs::UnixTime => inner.gate.gate.clock.now(),
    };
    Marks::new(&inner.format, said, now)
}

/// Settles a charge; what cannot be settled stays charged as it was reserved, and is warned of.
pub(super) async fn settle(inner: &Inner, id: HoldId, settlement: &Settlement) {
    if let Err(error) = inner.gate.settle(id, settlement).await
        && let Some(count) = inner.unsettled.count()
    {
        tracing::warn!(count, "a charge stays as it was reserved, because it could not be settled: {error}");
    }
}

/// The answer where nobody could decide: neither the store nor a fallback.
#[cold]
fn undecided(inner: &Inner, protocol: Protocol, error: &Error) -> Response<Bytes> {
    if let Some(count) = inner.undecided.count() {
        tracing::error!(count, "refused a request that could not be decided: {error}");
    }
    Refusal::undecided(protocol).answer(inner.responder.as_ref(), Marks::default())
}

/// The outcome of what is ready at once, as everything is whose counters are in this process.
pub(super) fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}
