//! The last decisions about each key, in constant memory: what a key's page lists.
//!
//! Keys share 256 rings of 128 decisions by their mark, 64 bits of a hash under a random key. A busy key pushes out its own decisions first,
//! and those of the few keys that share its ring; what happens in other rings is none of its business. A ring takes memory when its first decision comes, and at most some
//! 14 KiB. The key itself is not kept. Admissions that come as numbers (memory store, fast path) are about no key in particular and are not here.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tollgate::telemetry::Event;

use super::ring::Counted;

/// How many rings there are, and how many decisions each holds.
const RINGS: usize = 256;
const DECISIONS: usize = 128;

/// One decision of one limit about a key.
#[derive(Clone, Debug)]
pub(crate) struct Recent {
    mark: u64,
    /// In microseconds since 1970.
    pub(crate) at_us: u64,
    pub(crate) limit: Box<str>,
    pub(crate) what: Counted,
    pub(crate) cost: u64,
    /// `None` where nothing is counted.
    pub(crate) left: Option<u64>,
    /// `None` is never.
    pub(crate) retry_after_us: Option<u64>,
    pub(crate) why: &'static str,
}

/// The last decisions.
pub(crate) struct Decisions(Box<[Mutex<VecDeque<Recent>>]>);

impl Default for Decisions {
    fn default() -> Decisions {
        Decisions((0..RINGS).map(|_| Mutex::default()).collect())
    }
}

impl Decisions {
    fn ring(&self, mark: u64) -> &Mutex<VecDeque<Recent>> {
        // Less than RINGS, which is a power of two.
        #[allow(clippy::cast_possible_truncation)]
        let place = mark as usize % RINGS;
        &self.0[place]
    }

    /// Notes what a limit answered about the key of this mark.
    pub(crate) fn note(&self, mark: u64, at_us: u64, event: &Event<'_>) {
        let numbers = event.outcome.numbers();
        let what = Counted::of(numbers.allowed, event.allowed);
        let why = match what {
            Counted::Allowed if event.source.is_fallback() => "fallback",
            Counted::Allowed => "",
            _ => event.outcome.reason().name(),
        };
        let recent = Recent {
            mark,
            at_us,
            limit: event.limiter.into(),
            what,
            cost: event.cost,
            left: (!event.outcome.is_unlimited()).then_some(numbers.remaining),
            retry_after_us: if numbers.allowed {
                Some(0)
            } else {
                numbers.retry_after.map(|wait| wait.get())
            },
            why,
        };
        let mut ring = self.ring(mark).lock();
        if ring.len() == DECISIONS {
            ring.pop_front();
        }
        ring.push_back(recent);
    }

    /// Those about the key of this mark, newest first.
    pub(crate) fn of(&self, mark: u64) -> Vec<Recent> {
        let ring = self.ring(mark).lock();
        ring.iter().rev().filter(|recent| recent.mark == mark).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tollgate::store::Micros;
    use tollgate::telemetry::{Observer, Telemetry};
    use tollgate::{Limit, Rule, Tollgate};

    use super::*;
    use crate::app::tests::ready;
    use crate::stats::{Settings, Stats};

    fn watched() -> (Tollgate, Arc<Stats>) {
        let stats = Stats::new(Telemetry::new(), Settings { shows_keys: false }, 1_700_000_000);
        let limit = |count| Limit::fixed_window(count, Micros::from_secs(3_600)).expect("a limit");
        let gate = Tollgate::builder()
            .limit("api", limit(2))
            .rule(Rule::new("watching", limit(1)).expect("a rule").shadow())
            .rule(Rule::blocked("shut").expect("a rule"))
            .observer(stats.clone())
            .build();
        (gate.expect("a gate"), stats)
    }

    #[test]
    fn the_last_decisions_about_a_key_are_listed_newest_first() {
        let (gate, stats) = watched();
        for _ in 0..4 {
            let _ = ready(gate.check("api", "user:1")).expect("a decision");
        }
        for _ in 0..2 {
            let _ = ready(gate.check("watching", "user:1")).expect("a decision");
        }
        let _ = ready(gate.check("shut", "user:1")).expect("a decision");
        let _ = ready(gate.check("api", "user:2")).expect("a decision");
        let all = stats.recent("user:1");
        let shown: Vec<String> =
            all.iter().map(|one| format!("{} {:?} {}", one.limit, one.what, one.why)).collect();
        assert!(
            shown.starts_with(&["shut Denied blocked".into(), "watching WouldDeny shadow".into()]),
            "{shown:?}"
        );
        let denied: Vec<&Recent> =
            all.iter().filter(|one| &*one.limit == "api" && one.what == Counted::Denied).collect();
        assert_eq!(denied.len(), 2);
        assert_eq!((denied[0].cost, denied[0].left, denied[0].why), (1, Some(0), "limit"));
        assert!(denied[0].retry_after_us.is_some_and(|wait| wait > 3_500_000_000));
        assert_eq!(all[0].retry_after_us, None, "a blocked key never passes");
        assert!(stats.recent("user:3").is_empty());
    }

    #[test]
    fn a_busy_key_pushes_out_its_own_and_memory_is_bounded() {
        let (gate, stats) = watched();
        let _ = ready(gate.check("shut", "quiet")).expect("a decision");
        for _ in 0..1_000 {
            let _ = ready(gate.check("shut", "busy")).expect("a decision");
        }
        assert_eq!(stats.recent("busy").len(), DECISIONS);
        // Unless both happen to share a ring.
        assert!(stats.recent("quiet").len() <= 1);
        for number in 0..20_000 {
            let _ = ready(gate.check("shut", format!("user:{number}"))).expect("a decision");
        }
        let all: usize = stats.decisions.0.iter().map(|ring| ring.lock().len()).sum();
        assert!(all <= RINGS * DECISIONS, "{all}");
        assert!(stats.takes_counts(), "what is counted together is not listed");
    }
}
