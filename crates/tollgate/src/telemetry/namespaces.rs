//! Which namespaces of keys have their own series: declared ones, and of those the first sixteen that each limit sees.
//!
//! A client may choose a namespace, and then its name is personal data that everybody with access to the metrics could read. So
//! only names that the operator or the program has declared are labels: in the config (`server.namespaces`, overrides, domains of
//! Envoy), in `Telemetry::namespaces`, or as the namespace of a key of route limits. All others are counted as `other`.
//!
//! A recorder keeps a series for the life of the process. So these names outlive a reload, and a config that is read again adds
//! no new ones. Limits are distinguished by name alone, whatever their strategy; the config decides how many names there are.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::key::Key;

/// How many namespaces of a limit have series of their own.
pub(crate) const NAMESPACES: usize = 16;

/// How many namespaces can be declared in one process. A key of another namespace is compared with all of them.
const DECLARED: usize = 64;

/// The namespace of keys whose text names none.
pub(crate) const DEFAULT: &str = "default";

/// The declared namespaces, and those that each limit has seen, by its name.
#[derive(Default)]
pub(crate) struct Namespaces {
    declared: Arc<Declared>,
    seen: Mutex<HashMap<Box<str>, Arc<LimitNamespaces>>>,
}

/// The namespaces that may be labels, as the canonical text of their keys begins. Names are only ever added, so they are read
/// without a lock.
pub(crate) struct Declared {
    names: [OnceLock<Box<str>>; DECLARED],
    /// The number of declared names, so that a reader can see whether there are new ones.
    count: AtomicUsize,
}

/// The namespaces that a limit has seen, in the order of their first use.
pub(crate) struct LimitNamespaces {
    declared: Arc<Declared>,
    slots: [OnceLock<Box<str>>; NAMESPACES],
}

impl Namespaces {
    pub(crate) fn of(&self, limiter: &str) -> Arc<LimitNamespaces> {
        let new = || Arc::new(LimitNamespaces { declared: self.declared.clone(), slots: Default::default() });
        self.seen.lock().entry(limiter.into()).or_insert_with(new).clone()
    }

    /// Allows this namespace as a label from now on. An invalid namespace, or one over the maximum, stays `other`.
    pub(crate) fn declare(&self, namespace: &str) {
        let Ok(prefix) = Key::prefix(namespace) else { return };
        let name = prefix.strip_suffix(':').unwrap_or(DEFAULT);
        self.declared.names.iter().any(|slot| **slot.get_or_init(|| name.into()) == *name);
        self.declared.count.fetch_add(1, Ordering::Release);
    }
}

impl Default for Declared {
    fn default() -> Declared {
        Declared { names: [const { OnceLock::new() }; DECLARED], count: AtomicUsize::new(0) }
    }
}

impl Declared {
    fn has(&self, name: &str) -> bool {
        name == DEFAULT || self.names.iter().map_while(OnceLock::get).any(|declared| **declared == *name)
    }
}

impl LimitNamespaces {
    /// How many names were declared so far. Once it has grown, a name that was not declared may be.
    #[inline]
    pub(crate) fn declared(&self) -> usize {
        self.declared.count.load(Ordering::Acquire)
    }

    /// Whether a namespace has its own series. `name` is the prefix of the canonical text of its keys. It must be declared, and
    /// either be known already or find room. Another thread may take that room at the same time.
    pub(crate) fn takes_in(&self, name: &str) -> bool {
        self.declared.has(name) && self.slots.iter().any(|slot| **slot.get_or_init(|| name.into()) == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_declared_namespaces_have_a_place() {
        let namespaces = Namespaces::default();
        let seen = namespaces.of("api");
        for declared in ["user", "a:b", "user", ""] {
            namespaces.declare(declared);
        }
        for (name, has_slot) in [
            ("default", true),
            ("user", true),
            ("a%3Ab", true),
            ("a:b", false),
            ("users", false),
            ("", false),
            ("alice@example.com", false),
        ] {
            assert_eq!(seen.takes_in(name), has_slot, "{name}");
        }
        namespaces.declare("later");
        assert!(seen.takes_in("later"), "a config that is read again may declare more");
    }

    #[test]
    fn places_are_taken_once_and_by_each_limit_for_itself() {
        let namespaces = Namespaces::default();
        (0..30).for_each(|number| namespaces.declare(&format!("tenant-{number}")));
        for (limit, first) in [("api", 0), ("login", 5), ("api", 0), ("login", 5)] {
            for number in first..30 {
                let has_slot = namespaces.of(limit).takes_in(&format!("tenant-{number}"));
                assert_eq!(has_slot, number < first + NAMESPACES, "{limit}, tenant-{number}");
            }
        }
    }

    #[test]
    fn declaring_ends_where_there_is_no_room() {
        let namespaces = Namespaces::default();
        (0..1_000).for_each(|number| namespaces.declare(&format!("n{number}")));
        let seen = namespaces.of("api");
        assert!(!seen.takes_in("n64") && seen.takes_in("n63"));
    }
}
