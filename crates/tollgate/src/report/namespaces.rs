//! Which namespaces have series of their own: the first sixteen that each limit met.
//!
//! A recorder keeps a series for as long as the process lives. So these names outlive a registry: one that continues another
//! (`TollgateBuilder::continuing`) has the places that are left, and a config that is read again makes no new ones. Limits are told
//! apart by name alone, whichever strategy they have; how many names there are is for whoever writes the config.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

/// How many namespaces of a limit have series of their own.
pub(crate) const NAMESPACES: usize = 16;

/// What each limit has met, by its name.
#[derive(Default)]
pub(crate) struct Namespaces(Mutex<HashMap<Box<str>, Arc<Met>>>);

/// The namespaces that a limit has met, in the order in which it met them.
#[derive(Default)]
pub(crate) struct Met([OnceLock<Box<str>>; NAMESPACES]);

impl Namespaces {
    pub(crate) fn of(&self, limiter: &str) -> Arc<Met> {
        self.0.lock().entry(limiter.into()).or_default().clone()
    }
}

impl Met {
    /// Whether a namespace has a place: one of old, or one that was left. Another may take that at the same moment.
    pub(crate) fn takes_in(&self, name: &str) -> bool {
        self.0.iter().any(|place| **place.get_or_init(|| name.into()) == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_taken_once_and_by_each_limit_for_itself() {
        let namespaces = Namespaces::default();
        for (limit, first) in [("api", 0), ("login", 5), ("api", 0), ("login", 5)] {
            for number in first..first + 100 {
                let has_place = namespaces.of(limit).takes_in(&format!("tenant-{number}"));
                assert_eq!(has_place, number < first + NAMESPACES, "{limit}, tenant-{number}");
            }
        }
    }
}
