//! A limit on its store: the rule, its counters and those of its overrides, and how charges reach them.
//!
//! The engine makes entries when it is built or reloaded. An entry that a reload replaces points to its successor, so that a
//! handle finds the current limit without a lock. A [`Resolved`] is one charge whose limit was found and whose key was parsed.
//! Nothing here counts or decides.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, Micros, Strategy};
use tollgate_store::{MemoryCharge, MemoryLimit, MemoryStore, StoredCharge, StoredLimit};

use super::names::intern;
use super::share::share_of;
use super::{Allowance, Rule};
use crate::error::Error;
use crate::key::Key;
use crate::outcome::{Fallback, Source};
use crate::telemetry::Meter;

/// One limit on its store.
pub(crate) struct Entry {
    pub(crate) name: &'static str,
    /// Which engine made it.
    pub(crate) engine: u64,
    pub(crate) rule: Rule,
    pub(crate) base: KeyLimit,
    /// By the canonical text of the key.
    overrides: HashMap<String, Arc<KeyLimit>>,
    pub(crate) meter: Meter,
    pub(crate) path: Path,
    /// The entry that replaced this one in a reload.
    next: OnceLock<Arc<Entry>>,
}

/// How a plain charge of one limit reaches counters in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// A plain charge of the counters: no overrides, no shadow, nothing to report.
    Fast,
    /// The same, and decisions are counted.
    FastCounted,
    /// The same, and denials are reported.
    FastDenials,
    /// It takes the slow path.
    Slow,
}

/// What applies to a key under a limit.
pub(crate) enum KeyLimit {
    /// Counters: in this process, or in a remote store.
    Counted {
        stored: StoredLimit,
        memory: Option<MemoryLimit>,
        remote: Option<Box<RemoteLimit>>,
    },
    Unlimited,
    Blocked,
}

/// What this process knows of a limit in a remote store.
pub(crate) struct RemoteLimit {
    /// Identifies the limit in fingerprints.
    pub(crate) number: usize,
    pub(crate) fallback: Fallback,
    /// The share of this process while the store is down, and its counters once they are needed.
    pub(crate) share: StoredLimit,
    pub(crate) local: OnceLock<MemoryLimit>,
}

/// The default behaviour of limits on a store that may fail.
#[derive(Clone, Copy)]
pub(crate) struct FallbackDefaults {
    pub(crate) fallback: Fallback,
    /// Among how many processes a limit is divided while each counts locally.
    pub(crate) instances: u64,
}

/// Where the counters of an entry are made.
pub(crate) enum Counters<'a> {
    Memory(&'a MemoryStore),
    Remote { number: &'a mut dyn FnMut(&StoredLimit) -> usize, defaults: FallbackDefaults },
}

impl Entry {
    /// The rule on its store. `meter` makes the counters of its decisions from the strategies that it counts in.
    pub(crate) fn new(
        rule: Rule,
        engine: u64,
        max_names: usize,
        counters: &mut Counters<'_>,
        meter: impl FnOnce(&str, &[Option<Strategy>]) -> Meter,
    ) -> Result<Entry, Error> {
        let name = intern(rule.name(), max_names)?;
        let base = KeyLimit::new(&rule, rule.allowance(), counters)?;
        let overrides = rule
            .overrides()
            .iter()
            .map(|(key, allowance)| {
                Ok((key.canonical().to_owned(), Arc::new(KeyLimit::new(&rule, allowance, counters)?)))
            })
            .collect::<Result<HashMap<String, Arc<KeyLimit>>, Error>>()?;
        let strategies: Vec<Option<Strategy>> = std::iter::once(&base)
            .chain(overrides.values().map(|key_limit| &**key_limit))
            .map(KeyLimit::strategy)
            .collect();
        let meter = meter(name, &strategies);
        Ok(Entry { name, engine, rule, base, overrides, meter, path: Path::Slow, next: OnceLock::new() })
    }

    /// Registers the numbers of its limits again, for a policy that takes it over unchanged.
    pub(crate) fn renumber(&self, number: &mut dyn FnMut(&StoredLimit) -> usize) {
        for key_limit in
            std::iter::once(&self.base).chain(self.overrides.values().map(|key_limit| &**key_limit))
        {
            if let KeyLimit::Counted { stored, remote: Some(_), .. } = key_limit {
                number(stored);
            }
        }
    }

    /// Whether all keys have the same local counters, and their outcome is the answer.
    pub(crate) fn is_plain(&self) -> bool {
        let is_counted = matches!(&self.base, KeyLimit::Counted { memory: Some(_), .. });
        is_counted && self.overrides.is_empty() && !self.rule.is_shadow() && !self.is_concurrency()
    }

    /// Whether the limit gives leases.
    pub(crate) fn is_concurrency(&self) -> bool {
        self.base.strategy() == Some(Strategy::Concurrency)
    }

    /// The counters of keys without an override, if they are in this process.
    #[inline]
    pub(crate) fn memory(&self) -> Option<&MemoryLimit> {
        match &self.base {
            KeyLimit::Counted { memory, .. } => memory.as_ref(),
            _ => None,
        }
    }

    /// The override of a key, if it has one.
    #[inline]
    fn override_of(&self, key: &Key<'_>) -> Option<&Arc<KeyLimit>> {
        if self.overrides.is_empty() {
            return None;
        }
        self.overrides.get(key.canonical())
    }

    /// What applies to a key.
    pub(crate) fn key_limit(&self, key: &Key<'_>) -> &KeyLimit {
        self.override_of(key).map_or(&self.base, |key_limit| key_limit)
    }

    /// Whether no reload has replaced this entry.
    #[cfg(feature = "http")]
    #[inline]
    pub(crate) fn is_current(&self) -> bool {
        self.next.get().is_none()
    }

    /// The current successor of this entry, or itself.
    #[inline]
    pub(crate) fn newest(self: &Arc<Entry>) -> &Arc<Entry> {
        let mut newest = self;
        while let Some(next) = newest.next.get() {
            newest = next;
        }
        newest
    }

    /// A reload replaces this entry.
    pub(crate) fn replace_with(&self, next: Arc<Entry>) {
        // Only reloads do so, one at a time, and each entry is replaced once.
        let _ = self.next.set(next);
    }
}

/// A limit may have changed very often while a handle kept the first entry. Its successors are dropped in a loop, because nested
/// drops could overflow the stack.
impl Drop for Entry {
    fn drop(&mut self) {
        let mut next = self.next.take();
        while let Some(mut entry) = next.and_then(Arc::into_inner) {
            next = entry.next.take();
        }
    }
}

impl KeyLimit {
    fn new(rule: &Rule, allowance: &Allowance, counters: &mut Counters<'_>) -> Result<KeyLimit, Error> {
        Ok(match allowance {
            Allowance::Unlimited => KeyLimit::Unlimited,
            Allowance::Blocked => KeyLimit::Blocked,
            Allowance::Limited(limit) => {
                let stored = StoredLimit { subject: rule.subject(), ..StoredLimit::new(rule.name(), *limit) };
                let (memory, remote) = match counters {
                    Counters::Memory(store) => (Some(store.open(&stored)), None),
                    Counters::Remote { number, defaults } => {
                        let remote = RemoteLimit::new(number(&stored), rule, &stored, *defaults)?;
                        (None, Some(Box::new(remote)))
                    }
                };
                KeyLimit::Counted { stored, memory, remote }
            }
        })
    }

    pub(crate) fn limit(&self) -> Option<&Limit> {
        match self {
            KeyLimit::Counted { stored, .. } => Some(&stored.limit),
            KeyLimit::Unlimited | KeyLimit::Blocked => None,
        }
    }

    pub(crate) fn strategy(&self) -> Option<Strategy> {
        self.limit().map(Limit::strategy)
    }

    /// The length of a lease, if this is a concurrency limit.
    pub(crate) fn lease(&self) -> Option<Micros> {
        match self.limit() {
            Some(Limit::Concurrency(leases)) => Some(leases.lease()),
            _ => None,
        }
    }

    /// Whether this cost can never fit.
    pub(crate) fn is_hopeless_for(&self, cost: Cost) -> bool {
        match self {
            KeyLimit::Counted { stored, .. } => cost.get() > stored.limit.capacity(),
            KeyLimit::Unlimited => false,
            KeyLimit::Blocked => true,
        }
    }

    pub(crate) fn source(&self) -> Source {
        match self {
            KeyLimit::Counted { .. } => Source::Store,
            KeyLimit::Unlimited => Source::Unlimited,
            KeyLimit::Blocked => Source::Blocked,
        }
    }
}

impl RemoteLimit {
    fn new(
        number: usize,
        rule: &Rule,
        stored: &StoredLimit,
        defaults: FallbackDefaults,
    ) -> Result<RemoteLimit, Error> {
        let fallback = rule.own_fallback().unwrap_or(defaults.fallback);
        let share = match fallback {
            Fallback::Local => share_of(&stored.limit, defaults.instances)?,
            Fallback::Open | Fallback::Closed => stored.limit,
        };
        let share = StoredLimit { limit: share, ..stored.clone() };
        Ok(RemoteLimit { number, fallback, share, local: OnceLock::new() })
    }
}

/// An entry, borrowed where the call is over at once and shared where it may wait.
pub(crate) enum EntryRef<'e> {
    Borrowed(&'e Entry),
    Shared(Arc<Entry>),
}

impl Deref for EntryRef<'_> {
    type Target = Entry;

    #[inline]
    fn deref(&self) -> &Entry {
        match self {
            EntryRef::Borrowed(entry) => entry,
            EntryRef::Shared(entry) => entry,
        }
    }
}

/// One resolved charge: its limit, its key if that is valid, and its cost.
pub(crate) struct Resolved<'e, 'k> {
    pub(crate) entry: EntryRef<'e>,
    /// `None` if the key is empty or malformed.
    pub(crate) key: Option<Key<'k>>,
    /// The override of the key, if it has one.
    override_limit: Option<Arc<KeyLimit>>,
    pub(crate) cost: Cost,
}

pub(crate) type ResolvedAll<'e, 'k> = SmallVec<[Resolved<'e, 'k>; 4]>;

impl<'e, 'k> Resolved<'e, 'k> {
    pub(crate) fn new(entry: EntryRef<'e>, key: Option<Key<'k>>, cost: Cost) -> Resolved<'e, 'k> {
        let override_limit = key.as_ref().and_then(|key| entry.override_of(key)).cloned();
        Resolved { entry, key, override_limit, cost }
    }

    /// What applies to the key; `None` if it is malformed.
    pub(crate) fn key_limit(&self) -> Option<&KeyLimit> {
        self.key.as_ref().map(|_| self.override_limit.as_deref().unwrap_or(&self.entry.base))
    }

    /// The canonical text of its key, if that makes sense.
    pub(crate) fn canonical(&self) -> Option<&str> {
        self.key.as_ref().map(Key::canonical)
    }

    /// Whether the limit is a shadow limit. A malformed key is denied even then.
    pub(crate) fn is_shadow(&self) -> bool {
        self.entry.rule.is_shadow() && self.key.is_some()
    }

    /// Its counters, if it has any.
    pub(crate) fn counted(&self) -> Option<(&str, &StoredLimit)> {
        match (self.canonical(), self.key_limit()) {
            (Some(key), Some(KeyLimit::Counted { stored, .. })) => Some((key, stored)),
            _ => None,
        }
    }

    /// Its counters in a remote store.
    pub(crate) fn remote(&self) -> Option<(&str, &StoredLimit, &RemoteLimit)> {
        match (self.canonical(), self.key_limit()) {
            (Some(key), Some(KeyLimit::Counted { stored, remote: Some(remote), .. })) => {
                Some((key, stored, remote))
            }
            _ => None,
        }
    }

    /// Whether it is denied before anything is counted.
    pub(crate) fn is_denied_outright(&self) -> bool {
        match self.key_limit() {
            None => true,
            Some(KeyLimit::Blocked) => !self.is_shadow(),
            Some(_) => false,
        }
    }

    /// How long a lease lasts that it takes, if it takes one.
    pub(crate) fn lease(&self) -> Option<Micros> {
        self.key_limit().and_then(KeyLimit::lease)
    }

    /// The charge for the memory store, if it has counters.
    pub(crate) fn memory_charge(&self) -> Option<MemoryCharge<'_>> {
        match (self.canonical(), self.key_limit()) {
            (Some(key), Some(KeyLimit::Counted { memory: Some(limit), .. })) => {
                Some(MemoryCharge { limit, key, cost: self.cost, shadow: self.is_shadow() })
            }
            _ => None,
        }
    }

    /// The charge for any store, if it has counters.
    pub(crate) fn stored_charge(&self) -> Option<StoredCharge<'_>> {
        let (key, limit) = self.counted()?;
        Some(StoredCharge { limit, key, cost: self.cost, shadow: self.is_shadow() })
    }
}
