//! Waiting until there is room: first come, first served, and nothing is lost when a waiter gives up.
//!
//! Those who wait for the same key under the same limit stand in a line. Only the first in line asks the counters; refused, it
//! sleeps for as long as they say and asks again; admitted, it leaves and the next one steps up. A waiter that is dropped
//! leaves the line wherever it stands. Nothing is charged before a waiter is ready, so there is nothing to give back; a charge that
//! is on its way to a remote store when its waiter leaves is cancelled there. What is given back elsewhere in this process (a
//! settled reservation, a dropped permit, a reset key) wakes the first of every line. What another process gives back is seen
//! because the first in line looks again at least every 250 ms.
//!
//! Callers who do not wait are not in line and may be admitted between two waiters; limits that must be fair to all are
//! waited for by all.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tollgate_kernel::{Cost, Micros, Outcome};
use tollgate_store::{Alarm, Hold, HoldId, MemoryItem};
use tracing::Instrument;

use crate::error::Error;
use crate::gate::{Answered, Backend, Entry, Gate, Place, Resolved};
use crate::remote::DenialCache;
use crate::report::{Source, Told, Trouble};

/// How long the first in line waits at most before it looks at a remote store again, in µs. Jitter takes up to two fifths of it
/// off, so that waiters do not ask in step.
const LOOK_AGAIN_US: u64 = 250_000;

/// Why waiting came to nothing. Nothing was charged.
#[derive(Debug)]
pub enum WaitError {
    /// The charge can never fit: its cost is above the limit, or the key is blocked or malformed.
    Never(Outcome),
    /// There was no room in time. The outcome is the last refusal, if the waiter ever came to be first in line.
    TooLate(Option<Outcome>),
    /// The counters could not be asked.
    Failed(Error),
}

impl fmt::Display for WaitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitError::Never(_) => f.write_str("the charge can never fit this limit"),
            WaitError::TooLate(None) => f.write_str("no room in time: others were first"),
            WaitError::TooLate(Some(outcome)) => write!(f, "no room in time: {outcome}"),
            WaitError::Failed(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for WaitError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            WaitError::Failed(error) => error.source(),
            _ => None,
        }
    }
}

impl From<Error> for WaitError {
    fn from(error: Error) -> WaitError {
        WaitError::Failed(error)
    }
}

/// The lines of a registry and of those that continue it: who came first is served first, whichever of them was asked.
#[derive(Default)]
pub(crate) struct Queues {
    lines: Mutex<HashMap<LineName, Line>>,
    /// How many lines there are, to be read without the lock.
    count: AtomicUsize,
    /// The registry that continues the others; nothing while there is only one.
    newest: Mutex<Weak<Gate>>,
}

/// A limit, by its name, and the canonical text of a key.
type LineName = (String, String);

#[derive(Default)]
struct Line {
    next_ticket: u64,
    waiting: VecDeque<Waiter>,
    /// How often the first in line was asked to look again.
    nudges: u64,
}

struct Waiter {
    ticket: u64,
    waker: Option<Waker>,
}

impl Line {
    /// Where in the line a ticket stands; they only ever rise from front to back.
    fn place(&self, ticket: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&ticket, |waiter| waiter.ticket).ok()
    }
}

impl Queues {
    /// Takes the last place in a line.
    fn join(&self, name: LineName) -> Turn<'_> {
        let mut lines = self.lines.lock();
        let line = lines.entry(name.clone()).or_default();
        let ticket = line.next_ticket;
        line.next_ticket += 1;
        line.waiting.push_back(Waiter { ticket, waker: None });
        self.count.store(lines.len(), Ordering::Release);
        // The counters are read without a lock after this. Either they show what `nudge` was called for, or it sees the line.
        fence(Ordering::SeqCst);
        Turn { queues: self, name, ticket }
    }

    /// Has all who wait be served by the limits of this registry from now on, where it has a limit of the same name.
    pub(crate) fn continue_with(&self, gate: &Arc<Gate>) {
        *self.newest.lock() = Arc::downgrade(gate);
        self.nudge();
    }

    /// Has the first of every line look again: something was given back.
    pub(crate) fn nudge(&self) {
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut wakers = Vec::new();
        for line in self.lines.lock().values_mut() {
            line.nudges += 1;
            wakers.extend(line.waiting.front_mut().and_then(|first| first.waker.take()));
        }
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A place in a line, given up when dropped.
struct Turn<'a> {
    queues: &'a Queues,
    name: LineName,
    ticket: u64,
}

impl Turn<'_> {
    /// Ready, with the count of nudges, once this turn is first in line and was nudged more often than `seen`.
    fn poll_first(&self, seen: Option<u64>, context: &mut Context<'_>) -> Poll<u64> {
        let mut lines = self.queues.lines.lock();
        let Some(line) = lines.get_mut(&self.name) else { return Poll::Ready(0) };
        let is_first = line.waiting.front().is_some_and(|first| first.ticket == self.ticket);
        if is_first && seen.is_none_or(|seen| line.nudges > seen) {
            return Poll::Ready(line.nudges);
        }
        if let Some(place) = line.place(self.ticket) {
            line.waiting[place].waker = Some(context.waker().clone());
        }
        Poll::Pending
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut lines = self.queues.lines.lock();
        let Some(line) = lines.get_mut(&self.name) else { return };
        let place = line.place(self.ticket);
        place.map(|place| line.waiting.remove(place));
        let next = line.waiting.front_mut().filter(|_| place == Some(0)).and_then(|first| first.waker.take());
        if line.waiting.is_empty() {
            lines.remove(&self.name);
        }
        self.queues.count.store(lines.len(), Ordering::Release);
        drop(lines);
        if let Some(waker) = next {
            waker.wake();
        }
    }
}

/// Waits until `turn` may look (again), or the alarm rings.
async fn look_or_ring(turn: &Turn<'_>, seen: Option<u64>, alarm: Alarm) -> Option<u64> {
    let mut alarm = pin!(alarm);
    poll_fn(|context| match turn.poll_first(seen, context) {
        Poll::Ready(nudges) => Poll::Ready(Some(nudges)),
        Poll::Pending => Pin::as_mut(&mut alarm).poll(context).map(|()| None),
    })
    .await
}

/// Waits until `cost` fits, at most `within`. With a `hold` the charge can be settled or released later, on the memory store.
pub(crate) async fn wait(
    gate: &Gate,
    entry: &Entry,
    text: &str,
    cost: u64,
    within: Duration,
    hold: Option<Hold>,
) -> Result<Outcome, WaitError> {
    let started = gate.started("wait");
    let cost = Cost::new(cost).ok_or_else(Error::zero_cost)?;
    let resolved = Resolved::new(gate, entry, text, cost.get())?;
    let Some((key, place)) = &resolved.met else {
        let told = Told::plain(Outcome::BLOCKED, Source::Malformed, started.took());
        gate.tell("wait", entry, None, cost, &told, &started);
        return Err(WaitError::Never(Outcome::BLOCKED));
    };
    let mut ask =
        Ask { gate, resolved: &resolved, place, hold, source: place.source(), trouble: Trouble::default() };
    let answer = wait_for(&mut ask, key.canonical(), within).instrument(started.span().clone()).await;
    let outcome = match &answer {
        Ok(outcome) | Err(WaitError::Never(outcome) | WaitError::TooLate(Some(outcome))) => *outcome,
        Err(WaitError::TooLate(None)) => Outcome::BLOCKED,
        // What could not be decided is no decision.
        Err(WaitError::Failed(_)) => return answer,
    };
    let told = Told { outcome, source: ask.source, trouble: ask.trouble, took: started.took() };
    let _within = started.enter();
    gate.tell("wait", entry, Some((key, place)), cost, &told, &started);
    answer.map(|outcome| entry.as_counted(outcome))
}

/// What a waiter asks the counters, again and again, and where the last answer came from.
struct Ask<'a> {
    gate: &'a Gate,
    resolved: &'a Resolved<'a, 'a>,
    place: &'a Place,
    hold: Option<Hold>,
    source: Source,
    trouble: Trouble,
}

async fn wait_for(ask: &mut Ask<'_>, key: &str, within: Duration) -> Result<Outcome, WaitError> {
    let (gate, entry) = (ask.gate, ask.resolved.entry);
    // What passes whatever the counters say, or never can, has nothing to stand in line for.
    if entry.rule.is_shadow() || ask.place.is_hopeless_for(ask.resolved.cost) {
        let outcome = ask.once(DenialCache::Use).await?;
        let passes = outcome.allowed || entry.rule.is_shadow();
        return if passes { Ok(outcome) } else { Err(WaitError::Never(outcome)) };
    }
    let clock = &gate.clock;
    let deadline = clock.now().saturating_add(Micros::from(within));
    let turn = gate.queues.join((entry.rule.name().to_owned(), key.to_owned()));
    let Some(mut nudges) = look_or_ring(&turn, None, clock.alarm(deadline)).await else {
        return Err(WaitError::TooLate(None));
    };
    let mut cache = DenialCache::Use;
    loop {
        let outcome = ask.once(cache).await?;
        let Some(wait) = outcome.retry_after else { return Err(WaitError::Never(outcome)) };
        let now = clock.now();
        if outcome.allowed {
            return Ok(outcome);
        }
        if now >= deadline {
            return Err(WaitError::TooLate(Some(outcome)));
        }
        let next = now.saturating_add(wait.min(ask.look_again())).min(deadline);
        cache = DenialCache::Bypass;
        if let Some(again) = look_or_ring(&turn, Some(nudges), clock.alarm(next)).await {
            nudges = again;
        }
    }
}

impl Ask<'_> {
    /// After how long to look again at the latest: on a remote store other processes may give something back at any time.
    fn look_again(&self) -> Micros {
        match self.gate.backend {
            Backend::Memory(_) => Micros::new(u64::MAX),
            Backend::Remote(_) => {
                let jitter = HoldId::random().get() % u128::from(LOOK_AGAIN_US * 2 / 5);
                Micros::new(LOOK_AGAIN_US - u64::try_from(jitter).unwrap_or_default())
            }
        }
    }

    /// Asks the counters once: by the limits of today, if others were put in the place of those that were asked first.
    async fn once(&mut self, cache: DenialCache) -> Result<Outcome, Error> {
        let newest = self.gate.queues.newest.lock().upgrade();
        match newest.filter(|newest| !std::ptr::eq(&**newest, self.gate)) {
            Some(newest) => Box::pin(self.once_today(&newest, cache)).await,
            None => self.once_here(cache).await,
        }
    }

    async fn once_today(&mut self, gate: &Gate, cache: DenialCache) -> Result<Outcome, Error> {
        let Resolved { entry, cost, .. } = *self.resolved;
        let today = gate.by_name.get(entry.rule.name()).map(|index| &gate.entries[*index]);
        let (Some(entry), Some(key)) = (today, self.resolved.canonical()) else {
            return self.once_here(cache).await;
        };
        let resolved = Resolved::new(gate, entry, key, cost.get())?;
        let Some((_, place)) = &resolved.met else { return Ok(Outcome::BLOCKED) };
        let source = place.source();
        let mut ask =
            Ask { gate, resolved: &resolved, place, hold: self.hold, source, trouble: self.trouble };
        let outcome = ask.once_here(cache).await?;
        (self.source, self.trouble) = (ask.source, ask.trouble);
        Ok(entry.as_counted(outcome))
    }

    async fn once_here(&mut self, cache: DenialCache) -> Result<Outcome, Error> {
        let Resolved { entry, cost, .. } = *self.resolved;
        let (key, shadow) = (self.resolved.canonical().unwrap_or_default(), entry.rule.is_shadow());
        match (self.place, &self.gate.backend) {
            (Place::Unlimited, _) => Ok(Outcome::UNLIMITED),
            (Place::Counted { memory: Some(limit), .. }, Backend::Memory(store)) => {
                let charged = store.charge_all(&[MemoryItem { limit, key, cost, shadow }], self.hold)?;
                Ok(charged.outcomes.first().copied().unwrap_or(Outcome::BLOCKED))
            }
            (Place::Counted { .. }, Backend::Remote(remote)) => {
                let asks = std::slice::from_ref(self.resolved);
                let Answered { answers, trouble } = remote.charge_waited(asks, cache).await?;
                let (outcome, source) = answers.first().copied().unwrap_or((Outcome::BLOCKED, Source::Store));
                (self.source, self.trouble) = (source, trouble);
                Ok(outcome)
            }
            (Place::Blocked, _) | (Place::Counted { memory: None, .. }, Backend::Memory(_)) => {
                Ok(Outcome::BLOCKED)
            }
        }
    }
}
