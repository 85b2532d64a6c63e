//! The heart: charge them all, or none. One limit in this process, at once and without allocating.
//!
//! A [`Limiter`] is a handle on one limit. [`check`](Limiter::check) is the whole walk on one screen: who pays, what they meet
//! under this limit, what the counters say, and how it counts. [`charge`] is the same walk over several limits at once; the
//! store takes all their locks, looks at all, and charges all or none.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, Micros, Outcome, Strategy};
use tollgate_store::{Charged, Hold, HoldId, MemoryItem, MemoryLimit, MemoryStore};

use crate::decision::{Decision, LimitOutcome};
use crate::error::Error;
use crate::gate::{self, Backend, Entry, Gate, Place, Resolved, ResolvedAll};
use crate::key::Key;
use crate::policy::Rule;
use crate::registry::Tollgate;
use crate::report::watch::is_sampled;
use crate::report::{Source, Started, Told, Trouble};
use crate::reservation::{Permit, Reservation, Reserved};
use crate::wait::{self, WaitError};

/// Texts longer than this are looked at before they are hashed: a hostile one may be of any length.
const KNOWN_BYTES: usize = 1_024;

/// How long a reservation can be settled, unless said otherwise.
pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(60);

/// One limit in this process. Cheap to clone; clones share their counters.
///
/// ```
/// use tollgate::{Limit, Limiter};
///
/// let limiter = Limiter::new(Limit::token_bucket("10/s", 20)?);
/// assert!(limiter.check("user:42").allowed);
/// assert_eq!(limiter.charge("user:42", 5)?.remaining, 14);
/// assert_eq!(limiter.peek("user:7", 1)?.remaining, 19);
/// # Ok::<(), tollgate::Error>(())
/// ```
#[derive(Clone)]
pub struct Limiter {
    gate: Arc<Gate>,
    entry: Arc<Entry>,
    /// The counters, where a charge need only ask them: no overrides, not a limit that only watches, nobody to be told of it.
    straight: Option<MemoryLimit>,
    /// Whether charges on the straight way are counted.
    is_metered: bool,
    /// Whether it would be straight if nobody were told of denials: then a charge goes straight unless it is one.
    tells_denials: bool,
}

impl Limiter {
    /// A limiter of its own, with a memory store of its own, by the name of `default`.
    pub fn new(limit: Limit) -> Limiter {
        Tollgate::of_one("default", limit)
    }

    /// A handle on one limit of a registry.
    pub(crate) fn on(gate: Arc<Gate>, entry: Arc<Entry>) -> Limiter {
        let is_straight = is_plain(&entry) && gate.observers.is_empty() && gate.watch.lets_straight();
        let tells_denials = !is_straight && tells_denials_alone(&gate, &entry);
        let straight = match &entry.base {
            Place::Counted { memory: Some(memory), .. } if is_straight => Some(memory.clone()),
            _ => None,
        };
        let is_metered = entry.meter.is_on();
        Limiter { gate, entry, straight, is_metered, tells_denials }
    }

    /// Whether a charge need only ask the counters.
    #[cfg(feature = "http")]
    pub(crate) fn is_straight(&self) -> bool {
        self.straight.is_some()
    }

    /// Charges a key one unit. A key that is empty or malformed is denied, and nothing is charged.
    #[inline]
    pub fn check(&self, key: &str) -> Outcome {
        self.charge_cost(key, Cost::ONE)
    }

    /// Charges a key `cost` units. Zero is an error: to look without charging, [`peek`](Self::peek).
    #[inline]
    pub fn charge(&self, key: &str, cost: u64) -> Result<Outcome, Error> {
        Ok(self.charge_cost(key, Cost::new(cost).ok_or_else(Error::zero_cost)?))
    }

    #[inline]
    pub(crate) fn charge_cost(&self, text: &str, cost: Cost) -> Outcome {
        // The straight way, for a text whose counters are known: only sound keys ever get any, in their canonical text, so a
        // known one need not be looked at again.
        match &self.straight {
            Some(memory) if text.len() <= KNOWN_BYTES => {
                if self.is_metered {
                    return self.charge_metered(memory, text, cost);
                }
                memory.charge_known_or(text, cost, &|| self.charge_around(text, cost))
            }
            None if self.tells_denials => self.charge_telling(text, cost),
            _ => self.charge_around(text, cost),
        }
    }

    /// The straight way where denials are told: they alone cost what telling costs.
    fn charge_telling(&self, text: &str, cost: Cost) -> Outcome {
        charge_telling(&self.gate, &self.entry, text, cost).unwrap_or_else(|| self.charge_around(text, cost))
    }

    /// The straight way where charges are counted. What goes around is counted there.
    #[inline]
    fn charge_metered(&self, memory: &MemoryLimit, text: &str, cost: Cost) -> Outcome {
        let started = is_sampled().then(Instant::now);
        let is_told = Cell::new(false);
        let outcome = memory.charge_known_or(text, cost, &|| {
            is_told.set(true);
            self.charge_around(text, cost)
        });
        if !is_told.get() {
            self.entry.meter.straight(text, outcome.allowed, started.map(|started| started.elapsed()));
        }
        outcome
    }

    /// The way around: a key that is new or not canonical, overrides, a limit that only watches, or somebody to be told.
    #[cold]
    fn charge_around(&self, text: &str, cost: Cost) -> Outcome {
        let started = self.gate.started("charge");
        let _within = started.enter();
        let key = match Key::parse(text) {
            Ok(key) => key,
            Err(error) => {
                self.gate.malformed.warn(self.entry.rule.name(), &error);
                let told = Told::plain(Outcome::BLOCKED, Source::Malformed, started.took());
                self.gate.tell("charge", &self.entry, None, cost, &told, &started);
                return Outcome::BLOCKED;
            }
        };
        let place = self.entry.place(&key);
        let outcome = match place {
            Place::Counted { memory: Some(memory), .. } => memory.charge(key.canonical(), cost),
            Place::Unlimited => Outcome::UNLIMITED,
            // A limiter is only made where counters are in this process.
            Place::Blocked | Place::Counted { memory: None, .. } => Outcome::BLOCKED,
        };
        let told = Told::plain(outcome, place.source(), started.took());
        self.gate.tell("charge", &self.entry, Some((&key, place)), cost, &told, &started);
        self.entry.as_counted(outcome)
    }

    /// Charges each of many keys one unit, at one reading of the clock, and adds the answers to `outcomes`, in order. With
    /// millions of keys this is about twice as fast as [`check`](Self::check) on each: memory is waited for only once a batch.
    pub fn check_many<K: AsRef<str>>(&self, keys: &[K], outcomes: &mut Vec<Outcome>) {
        let may_be_known = |key: &K| key.as_ref().len() <= KNOWN_BYTES;
        let Some(memory) = self.straight.as_ref().filter(|_| keys.iter().all(may_be_known)) else {
            return outcomes.extend(keys.iter().map(|key| self.check(key.as_ref())));
        };
        let around = |index: usize| self.charge_around(keys[index].as_ref(), Cost::ONE);
        if !self.is_metered {
            return memory.charge_known_many(keys, Cost::ONE, outcomes, around);
        }
        let started = is_sampled().then(Instant::now);
        let (start, told) = (outcomes.len(), RefCell::new(SmallVec::<[usize; 16]>::new()));
        memory.charge_known_many(keys, Cost::ONE, outcomes, |index| {
            told.borrow_mut().push(index);
            around(index)
        });
        // What went around was counted there, in the order of the keys.
        let told = told.into_inner();
        let mut told = told.iter().peekable();
        let answers = keys.iter().zip(&outcomes[start..]).enumerate();
        let straight = answers.filter(|(index, _)| told.next_if_eq(&index).is_none());
        let straight = straight.map(|(_, (key, outcome))| (key.as_ref(), outcome.allowed));
        self.entry.meter.straight_many(straight, started.map(|started| started.elapsed()));
    }

    /// Answers as a charge would, and changes nothing.
    pub fn peek(&self, key: &str, cost: u64) -> Result<Outcome, Error> {
        let decision = peek(&[self.of(key).cost(cost)])?;
        let outcome = decision.binding().outcome;
        Ok(if decision.allowed() { self.entry.as_counted(outcome) } else { outcome })
    }

    /// What a key has used and has left: [`Outcome::used`], `remaining`, `capacity`, and `reset_after` for the time left.
    /// The answer describes the key as it stands, as if nothing were asked for.
    pub fn status(&self, key: &str) -> Outcome {
        let Ok(key) = Key::parse(key) else { return Outcome::BLOCKED };
        match self.entry.place(&key) {
            Place::Counted { memory: Some(memory), .. } => memory.status(key.canonical()),
            Place::Unlimited => Outcome::UNLIMITED,
            Place::Blocked | Place::Counted { memory: None, .. } => Outcome::BLOCKED,
        }
    }

    /// Forgets what a key was charged; false when nothing was remembered.
    pub fn reset(&self, key: &str) -> bool {
        let Ok(key) = Key::parse(key) else { return false };
        let forgotten = match self.entry.place(&key) {
            Place::Counted { memory: Some(memory), .. } => memory.forget(key.canonical()),
            _ => false,
        };
        self.gate.queues.nudge();
        forgotten
    }

    /// Charges an estimate that can be settled with the true amount within a minute.
    /// [`reserve`](fn@reserve) does the same over several limits and with a time to live of your choice.
    pub fn reserve(&self, key: &str, cost: u64) -> Result<Reserved<'_>, Error> {
        reserve(&[self.of(key).cost(cost)], DEFAULT_TTL)
    }

    /// Takes one unit and, under a concurrency limit, holds it until the permit is dropped. `Err` is the refusal.
    pub fn acquire(&self, key: &str) -> Result<Permit, Outcome> {
        let asks = [self.of(key)];
        // The only error left is a store that has no room to remember one more; that passes.
        let no_room = Outcome { retry_after: Some(Micros::from_secs(1)), ..Outcome::BLOCKED };
        let reserved = reserve_for(&asks, self.permit_ttl(key)).map_err(|_| no_room)?;
        let outcome = reserved.decision.binding().outcome;
        match reserved.reservation {
            Some(reservation) => Ok(Permit::new(reservation, self.entry.as_counted(outcome))),
            None => Err(outcome),
        }
    }

    /// Waits until `cost` fits, at most `within`, first come, first served among those who wait for the same key. Dropping the
    /// future gives the place in the queue back; nothing is charged before it is ready. Under a concurrency limit what was
    /// waited for is held for a whole lease; [`acquire_within`](Self::acquire_within) gives it back.
    pub async fn wait(&self, key: &str, cost: u64, within: Duration) -> Result<Outcome, WaitError> {
        wait::wait(&self.gate, &self.entry, key, cost, within, None).await
    }

    /// Waits for what [`acquire`](Self::acquire) takes, at most `within`, in the same line as [`wait`](Self::wait): the way to
    /// wait under a concurrency limit, where what was waited for is given back when the permit is dropped.
    pub async fn acquire_within(&self, key: &str, within: Duration) -> Result<Permit, WaitError> {
        let hold = Hold { id: HoldId::random(), ttl: self.permit_ttl(key) };
        let outcome = wait::wait(&self.gate, &self.entry, key, 1, within, Some(hold)).await?;
        Ok(Permit::new(Reservation::unnamed(self.gate.clone(), hold.id), outcome))
    }

    /// How long the hold of a permit is kept. A lease has no end: its holder is in this process, and releases it when it goes.
    /// Any other charge stays as it is, so there is nothing to hold.
    fn permit_ttl(&self, key: &str) -> Micros {
        let of_key = || Key::parse(key).ok().and_then(|key| self.entry.place(&key).strategy());
        match if self.entry.overrides.is_empty() { self.entry.base.strategy() } else { of_key() } {
            Some(Strategy::Concurrency) => Hold::UNTIL_RELEASED,
            _ => Micros::ZERO,
        }
    }

    /// This limit and a key, as part of a charge over several limits.
    pub fn of<'a, 'k>(&'a self, key: &'k str) -> Charge<'a, 'k> {
        Charge { limiter: self, key, cost: 1 }
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        self.entry.rule.name()
    }

    /// The rule that the limit follows.
    pub fn rule(&self) -> &Rule {
        &self.entry.rule
    }

    /// How many keys are remembered under this limit, those with an override included.
    pub fn keys(&self) -> usize {
        match &self.entry.base {
            Place::Counted { memory: Some(memory), .. } => memory.keys(),
            _ => 0,
        }
    }
}

/// Whether all keys meet the same counters, and what those say is how it is.
fn is_plain(entry: &Entry) -> bool {
    entry.overrides.is_empty() && !entry.rule.is_shadow()
}

/// Whether a charge of this limit may go straight unless it is denied.
#[inline]
pub(crate) fn tells_denials_alone(gate: &Gate, entry: &Entry) -> bool {
    let counts_are_enough =
        gate.observers.is_empty() || (gate.observers.take_counts() && entry.meter.is_on());
    let watch_is_content = gate.watch.lets_straight() || gate.watch.tells_denials_alone();
    is_plain(entry) && counts_are_enough && watch_is_content
}

/// A charge that goes straight unless it is denied; `None` if the counters do not know the text.
#[inline]
pub(crate) fn charge_telling(gate: &Gate, entry: &Entry, text: &str, cost: Cost) -> Option<Outcome> {
    let Place::Counted { memory: Some(memory), .. } = &entry.base else { return None };
    if text.len() > KNOWN_BYTES {
        return None;
    }
    let is_sampled = is_sampled();
    let started = (is_sampled || gate.watch.times_all(false)).then(Instant::now);
    let is_known = Cell::new(true);
    let outcome = memory.charge_known_or(text, cost, &|| {
        is_known.set(false);
        Outcome::BLOCKED
    });
    if !is_known.get() {
        return None;
    }
    // Reading the clock costs about as much as finding the key: an admission that is not sampled is not timed to its end.
    let took = started.filter(|_| is_sampled || !outcome.allowed).map(|started| started.elapsed());
    entry.meter.straight(text, outcome.allowed, took.filter(|_| is_sampled));
    if !outcome.allowed {
        gate.tell_denial(entry, text, cost, &outcome, took);
    }
    Some(outcome)
}

impl std::fmt::Debug for Limiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Limiter").field("rule", &self.entry.rule).finish_non_exhaustive()
    }
}

/// One limit of a charge over several, made by [`Limiter::of`].
#[derive(Clone, Copy)]
pub struct Charge<'a, 'k> {
    limiter: &'a Limiter,
    key: &'k str,
    cost: u64,
}

impl Charge<'_, '_> {
    /// How much to charge; one, unless said.
    #[must_use]
    pub fn cost(self, cost: u64) -> Self {
        Charge { cost, ..self }
    }
}

/// Without the key, as everywhere.
impl std::fmt::Debug for Charge<'_, '_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut charge = f.debug_struct("Charge");
        charge.field("limiter", self.limiter).field("cost", &self.cost).finish_non_exhaustive()
    }
}

/// Charges several limits at once: all of them, or none.
///
/// ```
/// use tollgate::{Limit, Micros, Tollgate};
///
/// let gate = Tollgate::builder()
///     .limit("global", Limit::token_bucket("1000/s", 1000)?)
///     .limit("per-user", Limit::sliding_window(1, Micros::from_secs(60))?)
///     .build()?;
/// let (global, per_user) = (gate.limiter("global")?, gate.limiter("per-user")?);
///
/// assert!(tollgate::charge(&[global.of("all"), per_user.of("user:42")])?.allowed());
/// let denied = tollgate::charge(&[global.of("all"), per_user.of("user:42")])?;
/// assert_eq!(denied.binding().name, "per-user");
/// assert_eq!(global.status("all").used(), 1); // the refused charge took nothing here
/// # Ok::<(), tollgate::Error>(())
/// ```
///
/// The limits must be of one registry, so that they share a store; each pair of limit and key may be named more than once, and
/// its costs add up.
#[inline]
pub fn charge<'a>(charges: &[Charge<'a, '_>]) -> Result<Decision<'a>, Error> {
    let (gate, store) = one_gate(charges)?;
    let mut items = SmallVec::new();
    if straight_items(charges, &mut items) {
        let is_metered = charges[0].limiter.is_metered;
        let started = (is_metered && is_sampled()).then(Instant::now);
        let mut decision = Decision::open();
        let decided = store.charge_known(&items, |outcome| {
            let name = charges[decision.limits().len()].limiter.name();
            decision.add(LimitOutcome { name, outcome, shadow: false, source: Source::Store });
        });
        if decided.is_some() {
            decision.close();
            if is_metered {
                let took = started.map(|started| started.elapsed());
                for (charge, limit) in charges.iter().zip(decision.limits()) {
                    charge.limiter.entry.meter.straight(charge.key, limit.outcome.allowed, took);
                }
            }
            return Ok(decision);
        }
    }
    let started = gate.started("charge");
    let _within = started.enter();
    let asks = resolve(gate, charges)?;
    let counted = if gate::is_denied_outright(&asks) {
        store.peek_all(&gate::memory_items(&asks))
    } else {
        store.charge_all(&gate::memory_items(&asks), None)?
    };
    Ok(told(gate, "charge", &asks, &counted, &started))
}

/// The straight way for several limits: one set of counters for each, nobody watching, and texts that may be known. False if
/// it is not open to all of them.
#[inline]
fn straight_items<'a>(charges: &'a [Charge<'_, '_>], items: &mut SmallVec<[MemoryItem<'a>; 4]>) -> bool {
    charges.iter().all(|charge| {
        let (Some(limit), Some(cost)) = (&charge.limiter.straight, Cost::new(charge.cost)) else {
            return false;
        };
        items.push(MemoryItem { limit, key: charge.key, cost, shadow: false });
        charge.key.len() <= KNOWN_BYTES
    })
}

/// Answers as [`charge`](fn@charge) would, and changes nothing.
pub fn peek<'a>(charges: &[Charge<'a, '_>]) -> Result<Decision<'a>, Error> {
    let (gate, store) = one_gate(charges)?;
    let started = gate.started("peek");
    let _within = started.enter();
    let asks = resolve(gate, charges)?;
    let counted = store.peek_all(&gate::memory_items(&asks));
    Ok(told(gate, "peek", &asks, &counted, &started))
}

/// Charges an estimate under one or more limits, to be settled with the true amount within `ttl`. A reservation that nobody
/// settles stays charged as it is; leases end by themselves.
pub fn reserve<'a>(charges: &[Charge<'a, '_>], ttl: Duration) -> Result<Reserved<'a>, Error> {
    reserve_for(charges, Micros::from(ttl))
}

fn reserve_for<'a>(charges: &[Charge<'a, '_>], ttl: Micros) -> Result<Reserved<'a>, Error> {
    let (gate, store) = one_gate(charges)?;
    let started = gate.started("reserve");
    let _within = started.enter();
    let asks = resolve(gate, charges)?;
    let hold = Hold { id: HoldId::random(), ttl };
    let counted = if gate::is_denied_outright(&asks) {
        store.peek_all(&gate::memory_items(&asks))
    } else {
        store.charge_all(&gate::memory_items(&asks), Some(hold))?
    };
    let decision = told(gate, "reserve", &asks, &counted, &started);
    let gate = charges[0].limiter.gate.clone();
    let reservation = decision.allowed().then(|| Reservation::new(gate, hold.id, &decision));
    Ok(Reserved { decision, reservation })
}

/// The one registry that all charges belong to, and its store.
#[inline]
fn one_gate<'a>(charges: &[Charge<'a, '_>]) -> Result<(&'a Gate, &'a MemoryStore), Error> {
    gate::check_count(charges.len())?;
    let first = &charges[0];
    if charges.iter().any(|charge| !Arc::ptr_eq(&charge.limiter.gate, &first.limiter.gate)) {
        return Err(Error::call(
            "limits of different registries cannot be charged together; build them with one Tollgate::builder()",
        ));
    }
    match &first.limiter.gate.backend {
        Backend::Memory(store) => Ok((&first.limiter.gate, store)),
        Backend::Remote(_) => {
            Err(Error::call("this limit's store is elsewhere; use the async calls of Tollgate"))
        }
    }
}

fn resolve<'a: 'k, 'k>(gate: &Gate, charges: &[Charge<'a, 'k>]) -> Result<ResolvedAll<'a, 'k>, Error> {
    charges.iter().map(|charge| Resolved::new(gate, &charge.limiter.entry, charge.key, charge.cost)).collect()
}

/// The decision, from what the memory store said, and whoever is to be told of it told.
pub(crate) fn told<'a>(
    gate: &Gate,
    operation: &'static str,
    asks: &[Resolved<'a, '_>],
    counted: &Charged,
    started: &Started,
) -> Decision<'a> {
    let decision = gate::conclude(asks, counted.outcomes.iter().map(|outcome| (*outcome, Source::Store)));
    gate.tell_all(operation, asks, &decision, Trouble::default(), started);
    decision
}
