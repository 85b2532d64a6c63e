//! What was decided for keys of each namespace that the config names, in the last minutes; all others are counted together.

use std::collections::BTreeMap;

use serde::Serialize;

use super::ring::Counted;

/// How many minutes are remembered, that of now among them.
const MINUTES: usize = 5;

/// What other namespaces are counted as.
const OTHER: &str = "other";

/// Counts of the namespaces that are shown by name, and of the others together; of some of the threads.
#[derive(Default)]
pub(super) struct Namespaces {
    counts: BTreeMap<String, Minutes>,
}

/// For each minute its number, and how many were allowed, denied and would have been denied.
#[derive(Clone, Copy, Default)]
struct Minutes([(u64, [u64; 3]); MINUTES]);

/// What was decided for one.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct OfNamespace {
    pub(crate) namespace: String,
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) would_deny: u64,
}

impl Namespaces {
    /// Shows these by name from now on. What others were counted as stays where it was counted.
    pub(super) fn show(&mut self, names: &[String]) {
        for name in names.iter().map(String::as_str).chain([OTHER]) {
            self.counts.entry(name.to_owned()).or_default();
        }
    }

    pub(super) fn add(&mut self, namespace: &str, second: u64, what: Counted, count: u64) {
        let minutes = match self.counts.get_mut(namespace) {
            Some(minutes) => minutes,
            None => match self.counts.get_mut(OTHER) {
                Some(minutes) => minutes,
                None => return,
            },
        };
        let minute = second / 60;
        // Less than MINUTES.
        #[allow(clippy::cast_possible_truncation)]
        let place = (minute % MINUTES as u64) as usize;
        let (number, counted) = &mut minutes.0[place];
        if *number != minute {
            (*number, *counted) = (minute, [0; 3]);
        }
        let index = match what {
            Counted::Allowed | Counted::FellBack => 0,
            Counted::Denied => 1,
            Counted::WouldDeny => 2,
        };
        counted[index] = counted[index].saturating_add(count);
    }

    /// Adds what was decided in the last minutes.
    pub(super) fn add_to(&self, sums: &mut BTreeMap<String, [u64; 3]>, second: u64) {
        let oldest = (second / 60).saturating_sub(MINUTES as u64 - 1);
        for (name, minutes) in &self.counts {
            for (_, counted) in minutes.0.iter().filter(|(number, _)| *number >= oldest) {
                let sum = sums.entry(name.clone()).or_default();
                counted.iter().zip(sum).for_each(|(one, sum)| *sum += one);
            }
        }
    }
}

/// Those of which anything was decided, those that were denied most first.
pub(super) fn most_denied(sums: BTreeMap<String, [u64; 3]>) -> Vec<OfNamespace> {
    let one = |(namespace, sums): (String, [u64; 3])| {
        let [allowed, denied, would_deny] = sums;
        OfNamespace { namespace, allowed, denied, would_deny }
    };
    let mut all: Vec<OfNamespace> = sums.into_iter().map(one).collect();
    all.retain(|one| one.allowed + one.denied + one.would_deny > 0);
    all.sort_by_key(|one| std::cmp::Reverse((one.denied, one.would_deny, one.allowed)));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lately(namespaces: &Namespaces, second: u64) -> Vec<OfNamespace> {
        let mut sums = BTreeMap::new();
        namespaces.add_to(&mut sums, second);
        most_denied(sums)
    }

    #[test]
    fn named_ones_are_counted_apart_and_the_rest_as_one() {
        let mut namespaces = Namespaces::default();
        namespaces.add("user", 0, Counted::Denied, 1);
        assert_eq!(lately(&namespaces, 0), [], "nothing is shown before it is named");
        namespaces.show(&["user".to_owned(), "tenant".to_owned()]);
        for (name, what) in [
            ("user", Counted::Allowed),
            ("user", Counted::Denied),
            ("tenant", Counted::WouldDeny),
            ("made-up-1", Counted::Denied),
            ("made-up-2", Counted::Denied),
        ] {
            namespaces.add(name, 600, what, 1);
        }
        let shown = |namespaces: &Namespaces, second| -> Vec<String> {
            let words = |one: OfNamespace| {
                format!("{} {} {} {}", one.namespace, one.allowed, one.denied, one.would_deny)
            };
            lately(namespaces, second).into_iter().map(words).collect()
        };
        assert_eq!(shown(&namespaces, 600), ["other 0 2 0", "user 1 1 0", "tenant 0 0 1"]);
        assert_eq!(shown(&namespaces, 600 + 4 * 60).len(), 3);
        assert!(shown(&namespaces, 600 + 5 * 60).is_empty(), "minutes pass");
        namespaces.add("user", 600 + 5 * 60, Counted::Denied, 1);
        assert_eq!(shown(&namespaces, 600 + 5 * 60), ["user 0 1 0"]);
    }
}
