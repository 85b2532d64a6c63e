//! What a registry and its limiters share: the limits as they were resolved against the store, and the one way in which asks
//! become a charge and answers become a decision.
//!
//! `limiter.rs` (in this process, at once) and `registry.rs` (any store, async) both walk through here, so a charge means the
//! same on both roads: malformed keys are denied, overrides apply, watching limits never deny, and nothing is charged unless
//! everything is.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Outcome, Strategy};
use tollgate_store::{Clock, Item, MemoryItem, MemoryLimit, MemoryStore, StoredLimit};

use crate::ad_hoc::AdHocs;
use crate::decision::{Decision, LimitOutcome};
use crate::error::Error;
use crate::fallback::share_of;
use crate::key::{Key, KeyError};
use crate::numbers::Numbering;
use crate::policy::{Allowance, Fallback, Policy, Rule, Slice};
use crate::quiet::Quiet;
use crate::remote::Remote;
use crate::report::watch::{Meter, Watch};
use crate::report::{Observers, Source, Trouble};
use crate::reservation::LostLeases;
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
    Remote(Box<Remote>),
}

impl Backend {
    /// The same counters, for a registry that continues another.
    pub(crate) fn continued(&self, observers: &Arc<Observers>, watch: &Arc<Watch>) -> Backend {
        match self {
            Backend::Memory(store) => Backend::Memory(store.clone()),
            Backend::Remote(remote) => {
                Backend::Remote(Box::new(remote.continued(observers.clone(), watch.clone())))
            }
        }
    }

    /// The name of the store's kind.
    pub(crate) fn mode(&self) -> &'static str {
        match self {
            Backend::Memory(_) => "memory",
            Backend::Remote(remote) => remote.mode(),
        }
    }
}

/// Where limits are, by name.
pub(crate) type ByName = HashMap<String, usize, foldhash::fast::RandomState>;

/// All limits of a registry, on their store.
pub(crate) struct Gate {
    pub(crate) entries: Vec<Arc<Entry>>,
    pub(crate) by_name: ByName,
    pub(crate) policy: Policy,
    pub(crate) backend: Backend,
    /// The clock that waiting goes by: the memory store's own.
    pub(crate) clock: Clock,
    pub(crate) observers: Arc<Observers>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) queues: Arc<Queues>,
    pub(crate) malformed: MalformedLog,
    pub(crate) lost_leases: Arc<LostLeases>,
    /// How limits fare that come with a call, and those that came.
    pub(crate) otherwise: Otherwise,
    pub(crate) ad_hocs: AdHocs,
}

/// One limit: its rule, and where its counters and those of its overrides are.
pub(crate) struct Entry {
    pub(crate) rule: Rule,
    pub(crate) base: Place,
    /// By the canonical text of the key.
    pub(crate) overrides: HashMap<String, Place>,
    pub(crate) meter: Meter,
}

/// What a key meets under a limit.
pub(crate) enum Place {
    /// Counters, and the short way to them if they are in this process.
    Counted {
        stored: StoredLimit,
        memory: Option<MemoryLimit>,
        /// What this process knows of counters that are elsewhere.
        away: Option<Box<Away>>,
    },
    Unlimited,
    Blocked,
}

/// What this process knows of a limit that is counted elsewhere.
pub(crate) struct Away {
    /// Tells limits apart in fingerprints.
    pub(crate) number: usize,
    pub(crate) fallback: Fallback,
    /// What this process holds itself to while the store is down, and its counters once they are needed.
    pub(crate) share: StoredLimit,
    pub(crate) local: OnceLock<MemoryLimit>,
    pub(crate) slice: Option<Slice>,
}

/// How limits fare on a store that may fail, where they do not say themselves.
#[derive(Clone, Copy)]
pub(crate) struct Otherwise {
    pub(crate) fallback: Fallback,
    pub(crate) instances: u64,
}

impl Away {
    fn new(number: usize, rule: &Rule, stored: &StoredLimit, otherwise: Otherwise) -> Result<Away, Error> {
        let fallback = rule.own_fallback().unwrap_or(otherwise.fallback);
        let share = match fallback {
            Fallback::Local => share_of(&stored.limit, otherwise.instances)?,
            Fallback::Open | Fallback::Closed => stored.limit,
        };
        let share = StoredLimit { limit: share, ..stored.clone() };
        // A key that holds less than a slice is charged one by one.
        let slice = rule.own_slice().filter(|slice| slice.units() <= stored.limit.capacity());
        let slice = slice.filter(|_| !rule.is_shadow());
        Ok(Away { number, fallback, share, local: OnceLock::new(), slice })
    }
}

impl Entry {
    /// The rule on its store; where that is elsewhere, each of its limits has a number.
    pub(crate) fn new(
        rule: Rule,
        backend: &Backend,
        numbering: &mut Option<Numbering<'_>>,
        otherwise: Otherwise,
        watch: &Watch,
        observers: &Arc<Observers>,
    ) -> Result<Entry, Error> {
        let mut place = |allowance: &Allowance| -> Result<Place, Error> {
            Ok(match allowance {
                Allowance::Unlimited => Place::Unlimited,
                Allowance::Blocked => Place::Blocked,
                Allowance::Limited(limit) => {
                    let stored =
                        StoredLimit { subject: rule.subject(), ..StoredLimit::new(rule.name(), *limit) };
                    let (memory, away) = match backend {
                        Backend::Memory(store) => (Some(store.open(&stored)), None),
                        Backend::Remote(_) => {
                            let number = numbering.as_mut().map_or(0, |numbering| numbering.of(&stored));
                            (None, Some(Box::new(Away::new(number, &rule, &stored, otherwise)?)))
                        }
                    };
                    Place::Counted { stored, memory, away }
                }
            })
        };
        let base = place(rule.allowance())?;
        let overrides = rule
            .overrides()
            .iter()
            .map(|(key, allowance)| Ok((key.canonical().to_owned(), place(allowance)?)))
            .collect::<Result<HashMap<String, Place>, Error>>()?;
        let strategies = std::iter::once(&base).chain(overrides.values()).map(Place::strategy);
        let meter = Meter::new(watch, observers, rule.name(), strategies);
        Ok(Entry { rule, base, overrides, meter })
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

    pub(crate) fn source(&self) -> Source {
        match self {
            Place::Counted { .. } => Source::Store,
            Place::Unlimited => Source::Unlimited,
            Place::Blocked => Source::Blocked,
        }
    }
}

/// One ask of a charge, resolved: who pays, under which limit, and what is met there. A key that makes no sense meets nothing.
///
/// The name outlives the rest, because answers have it: a limit that came with a call may be gone before them.
pub(crate) struct Resolved<'a, 'k> {
    pub(crate) name: &'a str,
    pub(crate) entry: &'k Entry,
    pub(crate) met: Option<(Key<'k>, &'k Place)>,
    pub(crate) cost: Cost,
}

pub(crate) type ResolvedAll<'a, 'k> = SmallVec<[Resolved<'a, 'k>; 4]>;

impl<'a, 'k> Resolved<'a, 'k> {
    /// Looks an ask up; an empty or malformed key is denied further on, and logged here.
    pub(crate) fn new(gate: &Gate, entry: &'a Entry, key: &'k str, cost: u64) -> Result<Self, Error>
    where
        'a: 'k,
    {
        Resolved::named(gate, entry.rule.name(), entry, key, cost)
    }

    /// The same under a limit whose name is known for longer than the limit itself.
    pub(crate) fn named(
        gate: &Gate,
        name: &'a str,
        entry: &'k Entry,
        key: &'k str,
        cost: u64,
    ) -> Result<Self, Error> {
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
        Ok(Resolved { name, entry, met, cost })
    }

    /// The counters that this ask meets, if it meets any.
    fn counted(&self) -> Option<(&Key<'k>, &'k StoredLimit, Option<&'k MemoryLimit>)> {
        match &self.met {
            Some((key, Place::Counted { stored, memory, .. })) => Some((key, stored, memory.as_ref())),
            _ => None,
        }
    }

    /// The counters that this ask meets elsewhere, by the canonical text of its key.
    pub(crate) fn away(&self) -> Option<(&str, &'k StoredLimit, &'k Away)> {
        match &self.met {
            Some((key, Place::Counted { stored, away: Some(away), .. })) => {
                Some((key.canonical(), stored, away))
            }
            _ => None,
        }
    }

    /// The canonical text of its key, if that makes sense.
    pub(crate) fn canonical(&self) -> Option<&str> {
        self.met.as_ref().map(|(key, _)| key.canonical())
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

/// What the counters said and where it came from, in the order of the asks that met any.
pub(crate) type Answers = SmallVec<[(Outcome, Source); 4]>;

/// The answers to a charge, and what went wrong on the way to them.
#[derive(Default)]
pub(crate) struct Answered {
    pub(crate) answers: Answers,
    pub(crate) trouble: Trouble,
}

impl Answered {
    /// By a store.
    pub(crate) fn by_store(outcomes: &[Outcome]) -> Answered {
        let answers = outcomes.iter().map(|outcome| (*outcome, Source::Store)).collect();
        Answered { answers, trouble: Trouble::default() }
    }
}

/// The decision, from what the counters said, in the order of the asks that met any.
pub(crate) fn conclude<'a>(
    asks: &[Resolved<'a, '_>],
    counted: impl IntoIterator<Item = (Outcome, Source)>,
) -> Decision<'a> {
    let mut counted = counted.into_iter();
    let limits = asks.iter().map(|ask| {
        let (outcome, source) = match &ask.met {
            Some((_, Place::Counted { .. })) => counted.next().unwrap_or((Outcome::BLOCKED, Source::Store)),
            Some((_, Place::Unlimited)) => (Outcome::UNLIMITED, Source::Unlimited),
            Some((_, Place::Blocked)) => (Outcome::BLOCKED, Source::Blocked),
            None => (Outcome::BLOCKED, Source::Malformed),
        };
        // A malformed key is nobody's: not even a watching limit lets it pass.
        let shadow = ask.entry.rule.is_shadow() && ask.met.is_some();
        LimitOutcome { name: ask.name, outcome, shadow, source }
    });
    Decision::new(limits.collect())
}

impl Gate {
    /// Whether a limit is counted in this process while the store is down.
    pub(crate) fn counts_locally(&self, name: &str) -> bool {
        let away = self.by_name.get(name).and_then(|index| match &self.entries[*index].base {
            Place::Counted { away, .. } => away.as_ref(),
            Place::Unlimited | Place::Blocked => None,
        });
        away.is_none_or(|away| away.fallback == Fallback::Local)
    }
}

/// Warns of malformed keys, at most once a second, with how many there were. The key itself is never shown.
#[derive(Default)]
pub(crate) struct MalformedLog(Quiet);

impl MalformedLog {
    #[cold]
    pub(crate) fn warn(&self, limiter: &str, error: &KeyError) {
        if let Some(count) = self.0.count() {
            tracing::warn!(limiter, count, "denied a malformed key: {error}");
        }
    }
}
