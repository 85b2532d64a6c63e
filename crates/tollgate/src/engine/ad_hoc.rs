//! Limits whose numbers come with the call: protocols without a config (`CL.THROTTLE`), callers with their own limits (Envoy),
//! and applications that keep a plan's numbers in their database.
//!
//! All limits of one name share their counters. A key that is charged with new numbers keeps what it has consumed, as it does
//! after a reload. The engine builds a limit at its first use and caches it. Each name has at most [`MOST`] cached limits. When
//! the cache is full, limits without a holder are dropped; no count is lost, because the store holds the counters. If every
//! cached limit has a holder, the new limit is not cached and lives as long as its handle. The numbers may come from a client, so
//! no client can use up a name by holding many limits.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tollgate_kernel::Strategy;

use super::{Backend, Engine};
use crate::error::Error;
use crate::policy::entry::Entry;
use crate::policy::{Allowance, Rule};
#[cfg(feature = "telemetry")]
use crate::telemetry::DecisionMeter;
use crate::telemetry::Meter;

/// The most limits that are cached for one name.
const MOST: usize = 1_024;

/// The cached limits, by name.
#[derive(Default)]
pub(super) struct AdHocs(Mutex<HashMap<&'static str, Named>>);

/// The cached limits of one name.
#[derive(Default)]
struct Named {
    /// Limits of one strategy share one meter.
    meters: Vec<(Option<Strategy>, Meter)>,
    entries: HashMap<Allowance, Arc<Entry>>,
}

impl Engine {
    /// A limit with these numbers, counted under `name`. No limit of the policy may have the same name.
    pub(crate) fn ad_hoc(&self, name: &str, allowance: Allowance) -> Result<Arc<Entry>, Error> {
        let allowance = match allowance {
            // A key that is charged with new numbers keeps the instant at which it is full, as in redis-cell.
            Allowance::Limited(limit) => Allowance::Limited(limit.keeping_instant()),
            other => other,
        };
        let mut names = self.ad_hocs.0.lock();
        if let Some(entry) = names.get(name).and_then(|named| named.entries.get(&allowance)) {
            return Ok(entry.clone());
        }
        if self.has_limit(name) {
            return Err(Error::call(format!("`{name}` is a limit of the policy; give that another name")));
        }
        let rule = Rule::ad_hoc(name, allowance)?;
        let mut numbering = match &self.backend {
            // A limit of its own: no reload replaces it.
            Backend::Remote(remote) => Some(remote.numbering()),
            Backend::Memory(_) => None,
        };
        let mut number = |stored: &_| numbering.as_mut().map_or(0, |numbering| numbering.of(stored));
        let entry = self.make_entry(rule, &mut number, None)?;
        Ok(names.entry(entry.name).or_default().take_in(allowance, entry))
    }

    /// The names of all ad-hoc limits, sorted.
    pub(crate) fn ad_hoc_names(&self) -> Vec<&'static str> {
        let mut names: Vec<&'static str> = self.ad_hocs.0.lock().keys().copied().collect();
        names.sort_unstable();
        names
    }
}

impl AdHocs {
    /// Removes names that the policy uses now.
    pub(super) fn leave_out(&self, is_of_policy: impl Fn(&str) -> bool) {
        let taken: Vec<&'static str> = self.0.lock().keys().copied().collect();
        for name in taken.into_iter().filter(|name| is_of_policy(name)) {
            self.0.lock().remove(name);
        }
    }

    /// Brings the counts of decisions up to date.
    #[cfg(feature = "telemetry")]
    pub(super) fn publish(&self) {
        let names = self.0.lock();
        names.values().flat_map(|named| &named.meters).for_each(|(_, meter)| meter.publish());
    }
}

impl Named {
    /// Adds a limit, and caches it if there is room.
    fn take_in(&mut self, numbers: Allowance, mut entry: Entry) -> Arc<Entry> {
        let strategy = entry.base.strategy();
        match self.meters.iter().find(|(of, _)| *of == strategy) {
            Some((_, meter)) => entry.meter = meter.clone(),
            None => self.meters.push((strategy, entry.meter.clone())),
        }
        let entry = Arc::new(entry);
        if self.entries.len() >= MOST {
            self.entries.retain(|_, entry| Arc::strong_count(entry) > 1);
        }
        if self.entries.len() < MOST {
            self.entries.insert(numbers, entry.clone());
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use tollgate_kernel::{Cost, Limit};
    use tollgate_store::{MemoryOptions, MemoryStore};

    use super::*;

    fn bucket(burst: u64) -> Allowance {
        Limit::token_bucket("60/m", burst).unwrap().into()
    }

    /// Regression: one client that held many limits blocked all others with "too many in use".
    #[test]
    fn only_so_many_of_a_name_are_kept_and_nobody_is_refused() {
        let engine = Arc::new(Engine::in_memory(MemoryStore::new(MemoryOptions::default())));
        let of = |name: &str, burst: u64| engine.ad_hoc(name, bucket(burst)).unwrap();
        let charge = |burst: u64| {
            let outcome = engine.charge_one(&of("cl", burst), &"user:42".into(), Cost::ONE);
            (outcome.is_allowed(), outcome.remaining())
        };
        let cached = |name: &str| engine.ad_hocs.0.lock().get(name).map_or(0, |named| named.entries.len());
        let most = MOST as u64;
        let mut held: Vec<Arc<Entry>> = (1..=most).map(|burst| of("cl", burst)).collect();
        // All cached limits have a holder: a further limit is counted in the same way and goes with its handle.
        assert_eq!(charge(most + 1), (true, most));
        assert_eq!(charge(most + 1), (true, most - 1));
        assert_eq!(charge(2), (false, 0), "cached and unkept share their counters");
        let unkept = of("cl", most + 2);
        let gone = Arc::downgrade(&unkept);
        drop(unkept);
        assert!(gone.upgrade().is_none());
        assert_eq!(cached("cl"), MOST);
        // Another name has room of its own.
        assert!(Arc::ptr_eq(&of("envoy", 1), &of("envoy", 1)));
        // A limit without a holder makes room.
        held.pop();
        assert!(Arc::ptr_eq(&of("cl", most + 1), &of("cl", most + 1)));
        drop(held);
        (1..=3 * most).for_each(|burst| drop(of("cl", burst)));
        assert!(cached("cl") <= MOST);
        assert_eq!(charge(2), (false, 0), "counters outlive what was let go");
    }
}
