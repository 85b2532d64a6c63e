//! What a registry and its limiters share: the limits as they were resolved against the store, and the one way in which asks
//! become a charge and answers become a decision.
//!
//! `limiter.rs` (in this process, at once) and `registry.rs` (any store, async) both walk through here, so a charge means the
//! same on both roads: malformed keys are denied, overrides apply, watching limits never deny, and nothing is charged unless
//! everything is.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Outcome, Strategy};
use tollgate_store::{Clock, Item, MemoryItem, MemoryLimit, MemoryStore, Store, StoredLimit};

use crate::decision::{Decision, LimitOutcome};
use crate::error::Error;
use crate::key::{Key, KeyError};
use crate::policy::{Allowance, Policy, Rule};
use crate::report::{Event, Observer, Source};
use crate::wait::Queues;

/// How many limits one charge may name. A charge compares all of its pairs, so there must be an end to them.
pub(crate) const MOST_LIMITS: usize = 64;

/// Refuses a charge of no limits, or of too many.
#[inline]
pub(crate) fn check_count(limits: usize) -> Result<(), Error> {
    match limits {
        0 => Err(Error::call("a charge needs at least one limit")),
        1..=MOST_LIMITS => Ok(()),
        _ => Err(Error::call(format!(
            "a charge may name at most {MOST_LIMITS} limits, and this one names {limits}"
        ))),
    }
}

/// Where the counters are.
pub(crate) enum Backend {
    Memory(MemoryStore),
    Remote(Arc<dyn Store>),
}

/// All limits of a registry, on their store.
pub(crate) struct Gate {
    pub(crate) entries: Vec<Arc<Entry>>,
    pub(crate) by_name: HashMap<String, usize>,
    pub(crate) policy: Policy,
    pub(crate) backend: Backend,
    /// The clock that waiting goes by: the memory store's own.
    pub(crate) clock: Clock,
    pub(crate) observer: Option<Arc<dyn Observer>>,
    pub(crate) queues: Queues,
    pub(crate) malformed: MalformedLog,
}

/// One limit: its rule, and where its counters and those of its overrides are.
pub(crate) struct Entry {
    pub(crate) rule: Rule,
    pub(crate) base: Place,
    /// By the canonical text of the key.
    pub(crate) overrides: HashMap<String, Place>,
}

/// What a key meets under a limit.
pub(crate) enum Place {
    /// Counters, and the short way to them if they are in this process.
    Counted {
        stored: StoredLimit,
        memory: Option<MemoryLimit>,
    },
    Unlimited,
    Blocked,
}

impl Entry {
    pub(crate) fn new(rule: Rule, backend: &Backend) -> Entry {
        let place = |allowance: &Allowance| match allowance {
            Allowance::Unlimited => Place::Unlimited,
            Allowance::Blocked => Place::Blocked,
            Allowance::Limited(limit) => {
                let stored = StoredLimit::new(rule.name(), *limit);
                let memory = match backend {
                    Backend::Memory(store) => Some(store.open(&stored)),
                    Backend::Remote(_) => None,
                };
                Place::Counted { stored, memory }
            }
        };
        let base = place(rule.allowance());
        let overrides = rule
            .overrides()
            .iter()
            .map(|(key, allowance)| (key.canonical().to_owned(), place(allowance)))
            .collect();
        Entry { rule, base, overrides }
    }

    /// What a key meets here.
    #[inline]
    pub(crate) fn place(&self, key: &Key<'_>) -> &Place {
        if self.overrides.is_empty() {
            return &self.base;
        }
        self.overrides.get(key.canonical()).unwrap_or(&self.base)
    }

    /// How an answer counts: a watching limit's refusal lets the charge pass.
    #[inline]
    pub(crate) fn as_counted(&self, outcome: Outcome) -> Outcome {
        if outcome.allowed || !self.rule.is_shadow() {
            return outcome;
        }
        Outcome { allowed: true, retry_after: Some(tollgate_kernel::Micros::ZERO), ..outcome }
    }
}

impl Place {
    pub(crate) fn strategy(&self) -> Option<Strategy> {
        match self {
            Place::Counted { stored, .. } => Some(stored.limit.strategy()),
            Place::Unlimited | Place::Blocked => None,
        }
    }

    /// Whether so much can never pass, however long one waits.
    pub(crate) fn is_hopeless_for(&self, cost: Cost) -> bool {
        match self {
            Place::Counted { stored, .. } => cost.get() > stored.limit.capacity(),
            Place::Unlimited => false,
            Place::Blocked => true,
        }
    }

    fn source(&self) -> Source {
        match self {
            Place::Counted { .. } => Source::Store,
            Place::Unlimited => Source::Unlimited,
            Place::Blocked => Source::Blocked,
        }
    }
}

/// One ask of a charge, resolved: who pays, under which limit, and what is met there. A key that makes no sense meets nothing.
pub(crate) struct Resolved<'a, 'k> {
    pub(crate) entry: &'a Entry,
    pub(crate) met: Option<(Key<'k>, &'a Place)>,
    pub(crate) cost: Cost,
}

pub(crate) type ResolvedAll<'a, 'k> = SmallVec<[Resolved<'a, 'k>; 4]>;

impl<'a, 'k> Resolved<'a, 'k> {
    /// Looks an ask up; an empty or malformed key is denied further on, and logged here.
    pub(crate) fn new(gate: &Gate, entry: &'a Entry, key: &'k str, cost: u64) -> Result<Self, Error> {
        let cost = Cost::new(cost).ok_or_else(Error::zero_cost)?;
        let met = match Key::parse(key) {
            Ok(key) => {
                let place = entry.place(&key);
                Some((key, place))
            }
            Err(error) => {
                gate.malformed.warn(entry.rule.name(), &error);
                None
            }
        };
        Ok(Resolved { entry, met, cost })
    }

    /// The counters that this ask meets, if it meets any.
    fn counted(&self) -> Option<(&Key<'k>, &'a StoredLimit, Option<&'a MemoryLimit>)> {
        match &self.met {
            Some((key, Place::Counted { stored, memory })) => Some((key, stored, memory.as_ref())),
            _ => None,
        }
    }

    /// The answer of an ask that meets no counters.
    fn uncounted(&self) -> Option<Outcome> {
        match &self.met {
            Some((_, Place::Counted { .. })) => None,
            Some((_, Place::Unlimited)) => Some(Outcome::UNLIMITED),
            Some((_, Place::Blocked)) | None => Some(Outcome::BLOCKED),
        }
    }

    /// Whether this ask is denied before anything is counted. A malformed key is denied even where a limit only watches.
    fn is_denied_outright(&self) -> bool {
        match &self.met {
            None => true,
            Some((_, Place::Blocked)) => !self.entry.rule.is_shadow(),
            Some(_) => false,
        }
    }
}

/// Whether the counters may be charged at all, or only be looked at because the charge is denied already.
pub(crate) fn is_denied_outright(asks: &[Resolved<'_, '_>]) -> bool {
    asks.iter().any(Resolved::is_denied_outright)
}

/// The asks that meet counters, for the store in this process.
pub(crate) fn memory_items<'a>(asks: &'a [Resolved<'_, '_>]) -> SmallVec<[MemoryItem<'a>; 4]> {
    asks.iter()
        .filter_map(|ask| {
            let (key, _, memory) = ask.counted()?;
            let shadow = ask.entry.rule.is_shadow();
            Some(MemoryItem { limit: memory?, key: key.canonical(), cost: ask.cost, shadow })
        })
        .collect()
}

/// The asks that meet counters, for any store.
pub(crate) fn store_items<'a>(asks: &'a [Resolved<'_, '_>]) -> SmallVec<[Item<'a>; 4]> {
    asks.iter()
        .filter_map(|ask| {
            let (key, limit, _) = ask.counted()?;
            Some(Item { limit, key: key.canonical(), cost: ask.cost, shadow: ask.entry.rule.is_shadow() })
        })
        .collect()
}

/// The decision, from what the counters said, in the order of the asks that met any.
pub(crate) fn conclude<'a>(asks: &[Resolved<'a, '_>], counted: &[Outcome]) -> Decision<'a> {
    let mut counted = counted.iter();
    let limits = asks.iter().map(|ask| {
        let outcome = ask.uncounted().or_else(|| counted.next().copied()).unwrap_or(Outcome::BLOCKED);
        // A malformed key is nobody's: not even a watching limit lets it pass.
        let shadow = ask.entry.rule.is_shadow() && ask.met.is_some();
        LimitOutcome { name: ask.entry.rule.name(), outcome, shadow }
    });
    Decision::new(limits.collect())
}

impl Gate {
    /// When a decision started, if anybody wants to know how long it took.
    #[inline]
    pub(crate) fn started(&self) -> Option<Instant> {
        self.observer.is_some().then(Instant::now)
    }

    /// Tells the observer of every limit of a decision.
    pub(crate) fn tell_all(
        &self,
        operation: &'static str,
        asks: &[Resolved<'_, '_>],
        decision: &Decision<'_>,
        started: Option<Instant>,
    ) {
        let Some(started) = started else { return };
        let duration = started.elapsed();
        for (ask, limit) in asks.iter().zip(decision.limits()) {
            let met = ask.met.as_ref().map(|(key, place)| (key, *place));
            self.tell(operation, ask.entry, met, ask.cost, limit.outcome, duration);
        }
    }

    pub(crate) fn tell(
        &self,
        operation: &'static str,
        entry: &Entry,
        met: Option<(&Key<'_>, &Place)>,
        cost: Cost,
        outcome: Outcome,
        duration: Duration,
    ) {
        let Some(observer) = &self.observer else { return };
        let namespace = met.map(|(key, _)| key.namespace()).unwrap_or_default();
        let shadow = entry.rule.is_shadow() && met.is_some();
        observer.decided(&Event {
            operation,
            limiter: entry.rule.name(),
            strategy: met.and_then(|(_, place)| place.strategy()),
            namespace: &namespace,
            cost: cost.get(),
            allowed: outcome.allowed || shadow,
            shadow,
            outcome,
            source: met.map_or(Source::Malformed, |(_, place)| place.source()),
            duration,
        });
    }
}

/// Warns of malformed keys, at most once a second, with how many there were. The key itself is never shown.
#[derive(Default)]
pub(crate) struct MalformedLog {
    unreported: AtomicU64,
    /// When the last warning was given, in µs.
    last: AtomicU64,
}

impl MalformedLog {
    #[cold]
    pub(crate) fn warn(&self, limiter: &str, error: &KeyError) {
        self.unreported.fetch_add(1, Ordering::Relaxed);
        let now = Clock::system().now().get();
        let last = self.last.load(Ordering::Relaxed);
        let is_due = now.saturating_sub(last) >= 1_000_000;
        if is_due && self.last.compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let count = self.unreported.swap(0, Ordering::Relaxed);
            tracing::warn!(limiter, count, "denied a malformed key: {error}");
        }
    }
}
