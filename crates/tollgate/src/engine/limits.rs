//! The limits of an engine by name, and how a reload replaces them.
//!
//! A reload builds the entries of the new policy beside the old ones and swaps them in under the write lock. No charge runs on
//! the slow path meanwhile, so a new key never starts under old and new numbers at once. Charges on the fast path touch only keys
//! that have counters, and each key moves to the new numbers under its own lock. An entry that did not change stays, with
//! everything known about its keys. An entry that changed points to its successor, so that handles follow the reload.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use tollgate_kernel::Micros;

use super::{Backend, Engine};
use crate::error::Error;
use crate::policy::entry::{Counters, Entry, Path};
use crate::policy::{Policy, Rule};
use crate::telemetry::{DecisionMeter, Recorder};

/// Shorter leases of a remote store cause a warning.
const SHORT_LEASE: Micros = Micros::from_secs(1);

/// The index of each limit, by name.
type ByName = HashMap<&'static str, usize, foldhash::fast::RandomState>;

/// The limits of a policy, on their store.
#[derive(Default)]
pub(crate) struct Limits {
    policy: Arc<Policy>,
    entries: Vec<Arc<Entry>>,
    by_name: ByName,
    /// Limits that a reload removed and that a handle may still hold: if they come back, handles follow.
    removed: HashMap<&'static str, Weak<Entry>>,
}

impl Limits {
    #[inline]
    pub(super) fn get(&self, name: &str) -> Option<&Arc<Entry>> {
        self.by_name.get(name).map(|index| &self.entries[*index])
    }

    /// The error for a name that no limit has: it lists the names there are.
    #[cold]
    pub(super) fn unknown(&self, name: &str) -> Error {
        self.policy.unknown(name).into()
    }
}

impl Engine {
    /// The policy in place.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.limits.read().policy.clone()
    }

    /// The limit of this name. The error lists the limits there are.
    pub(crate) fn entry(&self, name: &str) -> Result<Arc<Entry>, Error> {
        let limits = self.limits.read();
        limits.get(name).cloned().ok_or_else(|| limits.unknown(name))
    }

    /// Whether the policy has a limit of this name.
    pub(super) fn has_limit(&self, name: &str) -> bool {
        self.limits.read().get(name).is_some()
    }

    /// Replaces the policy as a whole. If any part of it is refused, nothing changes.
    pub(crate) fn reload(&self, policy: Policy) -> Result<(), Error> {
        let mut limits = self.limits.write();
        // Before any limit counts: the label of a namespace is fixed when its first key is counted.
        let overrides = policy.rules().iter().flat_map(Rule::overrides);
        overrides.for_each(|(key, _)| self.watch.declare(&key.namespace()));
        let mut numbering = match &self.backend {
            Backend::Remote(remote) => Some(remote.numbering()),
            Backend::Memory(_) => None,
        };
        let mut entries = Vec::with_capacity(policy.rules().len());
        for rule in policy.rules() {
            let old = limits.get(rule.name());
            let mut number = |stored: &_| numbering.as_mut().map_or(0, |numbering| numbering.of(stored));
            entries.push(match old {
                Some(old) if old.rule == *rule => {
                    // Its keys keep their numbers.
                    old.renumber(&mut number);
                    old.clone()
                }
                _ => Arc::new(self.make_entry(rule.clone(), &mut number, old)?),
            });
        }
        // From here on nothing can fail, so a refused policy has changed nothing.
        if let Some(numbering) = numbering {
            numbering.done();
        }
        if let Backend::Remote(remote) = &self.backend {
            remote.renumbered();
        }
        let by_name: ByName = entries.iter().enumerate().map(|(index, entry)| (entry.name, index)).collect();
        let before = std::mem::take(&mut limits.entries);
        for old in before {
            match by_name.get(old.name).map(|index| &entries[*index]) {
                Some(new) if Arc::ptr_eq(new, &old) => {}
                Some(new) => old.replace_with(new.clone()),
                None => {
                    limits.removed.insert(old.name, Arc::downgrade(&old));
                }
            }
            old.meter.publish();
        }
        for new in &entries {
            if let Some(old) = limits.removed.remove(new.name).and_then(|old| old.upgrade()) {
                old.replace_with(new.clone());
            }
        }
        limits.removed.retain(|_, entry| entry.strong_count() > 0);
        (limits.entries, limits.by_name, limits.policy) = (entries, by_name, Arc::new(policy));
        drop(limits);
        self.ad_hocs.leave_out(|name| self.has_limit(name));
        // Waiters may have more room now.
        self.lines.nudge();
        Ok(())
    }

    /// Builds the entry of a rule on the store of this engine. It goes on with the meters of `old`.
    pub(super) fn make_entry(
        &self,
        rule: Rule,
        number: &mut dyn FnMut(&tollgate_store::StoredLimit) -> usize,
        old: Option<&Arc<Entry>>,
    ) -> Result<Entry, Error> {
        let mut counters = match &self.backend {
            Backend::Memory(store) => Counters::Memory(store),
            Backend::Remote(_) => Counters::Remote { number, defaults: self.defaults },
        };
        let is_shadow = rule.is_shadow();
        let meter = |name: &str, strategies: &[_]| match old.map(|old| &old.meter) {
            Some(meter) if meter.counts(strategies, is_shadow) => meter.clone(),
            _ => self.watch.meter(&self.observers, name, strategies.iter().copied(), is_shadow),
        };
        let mut entry = Entry::new(rule, self.id, self.max_names, &mut counters, meter)?;
        entry.path = self.path_of(&entry);
        if let (Backend::Remote(_), Some(lease)) = (&self.backend, entry.base.lease())
            && lease < SHORT_LEASE
        {
            let limit = entry.name;
            tracing::warn!(limit, %lease, "a lease below 1s is lost by a process that stands still for that long");
        }
        Ok(entry)
    }

    /// How a plain charge reaches the counters of an entry in this process.
    fn path_of(&self, entry: &Entry) -> Path {
        if !entry.is_plain() {
            return Path::Slow;
        }
        let counts_are_enough =
            self.observers.is_empty() || (self.observers.take_counts() && entry.meter.is_on());
        match () {
            () if self.observers.is_empty() && self.watch.allows_fast_path() && entry.meter.is_on() => {
                Path::FastCounted
            }
            () if self.observers.is_empty() && self.watch.allows_fast_path() => Path::Fast,
            () if counts_are_enough && (self.watch.allows_fast_path() || self.watch.logs_denials_only()) => {
                Path::FastDenials
            }
            () => Path::Slow,
        }
    }

    /// Makes the counts of decisions exact, which are handed over many at a time.
    #[cfg(feature = "telemetry")]
    pub(crate) fn hand_over_counts(&self) {
        self.limits.read().entries.iter().for_each(|entry| entry.meter.publish());
        self.ad_hocs.publish();
    }
}
