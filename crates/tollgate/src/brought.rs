//! Limits that callers bring along with a charge.
//!
//! They count like those of the registry and fall back like them. There is room for so many different ones and no more,
//! because the numbers in them come from outside; once there, one stays, so that what was consumed under it does.

use std::sync::OnceLock;

use crate::error::Error;
use crate::gate::{Entry, Gate};
use crate::policy::{Allowance, Rule};

/// How many different limits may be brought.
const MOST: usize = 1_024;

/// The limits that were brought so far.
pub(crate) struct Brought {
    /// Filled from the front.
    places: Box<[OnceLock<Entry>]>,
    /// How many limits the registry has of its own: those brought are counted on from there.
    after: usize,
}

impl Brought {
    pub(crate) fn after(after: usize) -> Brought {
        Brought { places: (0..MOST).map(|_| OnceLock::new()).collect(), after }
    }

    /// The limit of this name and allowance, made if it is not there yet.
    pub(crate) fn entry(&self, gate: &Gate, name: &str, allowance: Allowance) -> Result<&Entry, Error> {
        for (index, place) in self.places.iter().enumerate() {
            if place.get().is_none() {
                let mut number = self.after + index;
                let rule = Rule::brought(name, allowance)?;
                let entry = Entry::new(rule, &gate.backend, &mut number, gate.otherwise, &gate.watch)?;
                // Somebody else may have been faster, with the same or another: that is looked at below.
                let _ = place.set(entry);
            }
            let entry = place.get();
            let is_it = |entry: &&Entry| entry.rule.name() == name && *entry.rule.allowance() == allowance;
            if let Some(entry) = entry.filter(is_it) {
                return Ok(entry);
            }
        }
        Err(Error::call(format!(
            "callers have brought {MOST} different limits, and there is no room for more"
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use tollgate_kernel::{Limit, Micros};

    use super::*;
    use crate::registry::Tollgate;

    fn limit(count: u64) -> Allowance {
        Limit::fixed_window(count, Micros::from_secs(60)).unwrap().into()
    }

    #[test]
    fn each_limit_is_brought_once_and_there_is_an_end_to_them() {
        let gate = Tollgate::builder().build().unwrap().gate;
        let entry = |count| gate.brought.entry(&gate, "own", limit(count));
        let first = std::ptr::from_ref(entry(1).unwrap());
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (1..=MOST as u64).for_each(|count| assert!(entry(count).is_ok())));
            }
        });
        assert_eq!(std::ptr::from_ref(entry(1).unwrap()), first);
        let error = entry(MOST as u64 + 1).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("1024 different limits"), "{error}");
        assert!(gate.brought.entry(&gate, "Own", limit(1)).is_err(), "a name like any other");
    }
}
