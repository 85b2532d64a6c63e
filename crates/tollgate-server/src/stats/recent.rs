//! The last decisions about each key, in constant memory: what a key's page lists.
//!
//! Each stripe of threads (`striped.rs`) has 64 rings of 200 decisions, which keys share by their mark, 64 bits of a hash under a random key. A busy key pushes out its own
//! decisions first, and those of the few keys that share its ring; what happens in other rings is none of its business. A key that is denied more often than
//! [`EACH`] times in a second has the rest of them in one row with a count, so that a flood does not push out what came before it, and costs no look at the clock. A ring takes
//! memory when its first decision comes, and at most some 20 KiB: 5 MiB in all. The key itself is not kept. Admissions that come as numbers (memory store, fast path)
//! are about no key in particular and are not here.

use std::sync::Arc;

use tollgate::Clock;
use tollgate::telemetry::Event;

use super::ring::Counted;

/// How many rings a stripe has, how many decisions each holds, and for how many it takes memory at first.
const RINGS: usize = 64;
pub(crate) const DECISIONS: usize = 200;
const AT_FIRST: usize = 8;

/// How many denials of a key under a limit have rows of their own in a second.
const EACH: u32 = 50;

/// One decision of one limit about a key, or several denials of one second.
#[derive(Clone, Debug)]
pub(crate) struct Recent {
    mark: u64,
    /// In microseconds since 1970.
    pub(crate) at_us: u64,
    pub(crate) limit: Arc<str>,
    pub(crate) what: Counted,
    pub(crate) cost: u64,
    /// `None` where nothing is counted.
    pub(crate) left: Option<u64>,
    /// `None` is never.
    pub(crate) retry_after_us: Option<u64>,
    pub(crate) why: &'static str,
    /// How many decisions this is, the first of which it describes.
    pub(crate) times: u32,
}

/// Which denials of one key under one limit have rows in this second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rows {
    second: u64,
    count: u32,
    /// The number of the last row in its ring.
    last: u64,
}

/// The last decisions, of some of the threads.
pub(super) struct Decisions(Box<[Ring]>);

/// The last so many decisions: number `n` is at place `n % DECISIONS`.
#[derive(Default)]
struct Ring {
    rows: Vec<Recent>,
    next: u64,
}

impl Default for Decisions {
    fn default() -> Decisions {
        Decisions((0..RINGS).map(|_| Ring::default()).collect())
    }
}

fn place(mark: u64) -> usize {
    // Less than RINGS, which is a power of two.
    #[allow(clippy::cast_possible_truncation)]
    let place = mark as usize % RINGS;
    place
}

impl Decisions {
    /// Notes what a limit answered about the key of this mark.
    pub(super) fn note(&mut self, mark: u64, limit: &Arc<str>, event: &Event<'_>) -> u64 {
        self.0[place(mark)].push(Recent::new(mark, limit, event))
    }

    /// The same of a denial, which may be counted in the row of another.
    pub(super) fn note_denial(
        &mut self,
        mark: u64,
        limit: &Arc<str>,
        event: &Event<'_>,
        second: u64,
        rows: &mut Rows,
    ) {
        if rows.second != second {
            *rows = Rows { second, count: 0, last: 0 };
        }
        if rows.count > EACH && self.0[place(mark)].counts_in(rows.last, mark, event) {
            return;
        }
        rows.count = rows.count.saturating_add(1);
        rows.last = self.note(mark, limit, event);
    }

    /// Since when everything about the key of this mark is here, in microseconds since 1970: what its ring held before may have been about the key too.
    /// `None` if nothing was pushed out.
    pub(super) fn complete_since(&self, mark: u64) -> Option<u64> {
        let ring = &self.0[place(mark)];
        let oldest = ring.next.checked_sub(DECISIONS as u64).filter(|pushed_out| *pushed_out > 0)?;
        ring.rows.get(at(oldest)).map(|recent| recent.at_us)
    }

    /// Adds those about the key of this mark, newest first.
    pub(super) fn add_to(&self, all: &mut Vec<Recent>, mark: u64) {
        let ring = &self.0[place(mark)];
        let oldest = ring.next.saturating_sub(DECISIONS as u64);
        let rows = (oldest..ring.next).rev().filter_map(|number| ring.rows.get(at(number)));
        all.extend(rows.filter(|recent| recent.mark == mark).cloned());
    }
}

/// The last decisions about a key.
pub(crate) struct Retained {
    /// Newest first.
    pub(crate) decisions: Vec<Recent>,
    /// Since when none is missing, in microseconds since 1970.
    pub(crate) since_us: u64,
}

impl Retained {
    /// Of the decisions of all stripes, of which none is missing since then.
    pub(super) fn newest(mut decisions: Vec<Recent>, since_us: u64) -> Retained {
        decisions.sort_by_key(|recent| std::cmp::Reverse(recent.at_us));
        let is_cut = decisions.len() > DECISIONS;
        decisions.truncate(DECISIONS);
        let oldest = decisions.last().filter(|_| is_cut).map_or(0, |recent| recent.at_us);
        Retained { decisions, since_us: since_us.max(oldest) }
    }
}

fn at(number: u64) -> usize {
    // Less than DECISIONS.
    #[allow(clippy::cast_possible_truncation)]
    let place = (number % DECISIONS as u64) as usize;
    place
}

impl Ring {
    fn push(&mut self, recent: Recent) -> u64 {
        let number = self.next;
        match self.rows.get_mut(at(number)) {
            Some(row) => *row = recent,
            None => {
                let length = self.rows.len();
                if length == self.rows.capacity() {
                    self.rows.reserve_exact((2 * length).clamp(AT_FIRST, DECISIONS) - length);
                }
                self.rows.push(recent);
            }
        }
        self.next += 1;
        number
    }

    /// Counts a decision in the row of an equal one, if that is still there.
    fn counts_in(&mut self, number: u64, mark: u64, event: &Event<'_>) -> bool {
        let is_there = self.next - number <= DECISIONS as u64;
        let Some(row) = self.rows.get_mut(at(number)).filter(|_| is_there) else { return false };
        let (what, why) = described(event);
        let is_equal = row.mark == mark && row.what == what && row.cost == event.cost && row.why == why;
        if is_equal {
            row.times = row.times.saturating_add(1);
        }
        is_equal
    }
}

/// What it was, and why.
fn described(event: &Event<'_>) -> (Counted, &'static str) {
    let what = Counted::of(event.outcome.numbers().allowed, event.allowed);
    let why = match what {
        Counted::Allowed if event.source.is_fallback() => "fallback",
        Counted::Allowed => "",
        _ => event.outcome.reason().name(),
    };
    (what, why)
}

impl Recent {
    fn new(mark: u64, limit: &Arc<str>, event: &Event<'_>) -> Recent {
        let numbers = event.outcome.numbers();
        let (what, why) = described(event);
        let wait = || numbers.retry_after.map(|wait| wait.get());
        Recent {
            mark,
            at_us: Clock::system().now().get(),
            limit: limit.clone(),
            what,
            cost: event.cost,
            left: (!event.outcome.is_unlimited()).then_some(numbers.remaining),
            retry_after_us: if numbers.allowed { Some(0) } else { wait() },
            why,
            times: 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::hash::BuildHasher;
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
            .rule(Rule::blocked("closed").expect("a rule"))
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
        let all = stats.retained("user:1").decisions;
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
        assert!(stats.retained("user:3").decisions.is_empty());
    }

    #[test]
    fn a_busy_key_pushes_out_its_own_and_memory_is_bounded() {
        let (gate, stats) = watched();
        let _ = ready(gate.check("shut", "quiet")).expect("a decision");
        for second in 1..=10 {
            stats.tick(1_700_000_000 + second);
            for _ in 0..100 {
                let _ = ready(gate.check("shut", "busy")).expect("a decision");
            }
        }
        assert_eq!(stats.retained("busy").decisions.len(), DECISIONS);
        // Unless both happen to share a ring.
        assert!(stats.retained("quiet").decisions.len() <= 1);
        for number in 0..20_000 {
            let _ = ready(gate.check("shut", format!("user:{number}"))).expect("a decision");
        }
        for table in stats.noted.each() {
            for ring in &table.decisions.0 {
                assert!(ring.rows.len() <= DECISIONS && ring.rows.capacity() <= DECISIONS);
            }
        }
        assert!(stats.takes_counts(), "what is counted together is not listed");
    }

    /// Charts showed nothing for what was not kept any more, as if nothing had been asked.
    #[test]
    fn it_is_known_since_when_no_decision_is_missing() {
        const START_US: u64 = 1_700_000_000_000_000;
        let (gate, stats) = watched();
        let charge = |key: &str, cost: u64| {
            let charge = tollgate::Charge::new("shut", key).cost(cost);
            let _ = ready(gate.charge(&[charge])).expect("a decision");
        };
        for cost in 0..DECISIONS as u64 {
            charge("busy", 1 + cost);
        }
        assert_eq!(stats.retained("busy").since_us, START_US, "all since the start");
        let first = stats.retained("busy").decisions.pop().expect("a decision").at_us;
        charge("busy", 1_000);
        let retained = stats.retained("busy");
        let oldest = retained.decisions.last().expect("a decision");
        assert_eq!((retained.decisions.len(), oldest.cost, retained.since_us), (DECISIONS, 2, oldest.at_us));
        assert!(first <= retained.since_us);
        // What other keys of its ring push out is missing too.
        let other = (0..).map(|number| format!("user:{number}"));
        let same =
            |key: &String| place(stats.hashes.hash_one(&**key)) == place(stats.hashes.hash_one("busy"));
        let other = { other }.find(same).expect("a key in the same ring");
        for cost in 0..DECISIONS as u64 {
            charge(&other, 1 + cost);
        }
        let retained = stats.retained("busy");
        assert!(retained.decisions.is_empty() && retained.since_us > START_US);
    }

    /// A flood is one row after the first few, with an exact count; another second, cost or limit has rows of its own.
    #[test]
    fn denials_of_a_flood_are_counted_in_one_row() {
        let (gate, stats) = watched();
        let flood = |limit: &str, times: u32| {
            for _ in 0..times {
                let _ = ready(gate.check(limit, "busy")).expect("a decision");
            }
        };
        let shown = |stats: &Stats| -> Vec<(String, u32)> {
            stats.retained("busy").decisions.iter().map(|one| (one.limit.to_string(), one.times)).collect()
        };
        flood("shut", 1_000);
        let first = shown(&stats);
        assert_eq!(first.len(), 51);
        assert_eq!((first[0].clone(), first[1].clone()), (("shut".into(), 950), ("shut".into(), 1)));
        let _ = ready(gate.charge(&[tollgate::Charge::new("shut", "busy").cost(2)])).expect("a decision");
        flood("watching", 3);
        stats.tick(1_700_000_001);
        flood("shut", 60);
        let all = shown(&stats);
        assert_eq!(all.len(), 51 + 1 + 3 + 51);
        assert_eq!(all[0], ("shut".into(), 10));
        let total: u32 = all.iter().map(|(_, times)| times).sum();
        assert_eq!(total, 1_000 + 1 + 3 + 60, "none is lost, none is counted twice");
        // A row that was pushed out in the same second is no row to count in.
        for cost in 0..DECISIONS as u64 {
            let charge = tollgate::Charge::new("closed", "busy").cost(1 + cost);
            let _ = ready(gate.charge(&[charge])).expect("a decision");
        }
        assert!(shown(&stats).iter().all(|one| *one == ("closed".into(), 1)));
        flood("shut", 1);
        assert_eq!(shown(&stats)[0], ("shut".into(), 1));
    }
}
