//! How much each key needed: the smallest limit under which none of its requests would have been denied.
//!
//! A key is charged, by the kernel, under the same limit with a capacity that it cannot use up; the most that was in use after any of its charges is
//! its peak. That is exact for every strategy: until something is denied, what is in use does not depend on the capacity, and a charge
//! fits if and only if what is in use after it is at most the capacity. Each limit is looked at by itself, as if the others had room.
//!
//! The same charges also show what a sliding counter does that the exact log would not. Only the kernel counts here.

use std::collections::HashSet;

use serde::Serialize;
use tollgate::{Allowance, Limit, Rule};
use tollgate_kernel::{Cost, FixedWindow, Micros, Outcome};

use super::intake::NO_KEY;
use super::traffic::{Request, Traffic};

/// The charges of each key under each limit, in the order of replay.
pub(super) struct Groups<'a> {
    traffic: &'a Traffic,
    /// Indices of requests, sorted by limit, then by key, then in the order of replay.
    order: Vec<u32>,
}

/// The charges of one key under one limit.
#[derive(Clone, Copy)]
pub(super) struct Group<'a> {
    traffic: &'a Traffic,
    requests: &'a [u32],
}

impl<'a> Groups<'a> {
    pub(super) fn of(traffic: &'a Traffic) -> Groups<'a> {
        let requests = &traffic.requests;
        let has_key = |request: &Request| traffic.keys.text(request.key) != NO_KEY;
        // There are fewer than 2^28.
        let all = (0..u32::try_from(requests.len()).unwrap_or(u32::MAX)).zip(requests);
        let mut order: Vec<u32> =
            all.filter(|(_, request)| has_key(request)).map(|(index, _)| index).collect();
        order.sort_unstable_by_key(|&index| {
            let request = &requests[index as usize];
            (request.limit, traffic.keys.normal(request.key).index(), index)
        });
        Groups { traffic, order }
    }

    /// The keys of a limit.
    pub(super) fn of_limit(&self, limit: u16) -> impl Iterator<Item = Group<'_>> {
        let requests = &self.traffic.requests;
        let limit_of = |index: &u32| requests[*index as usize].limit;
        let start = self.order.partition_point(|index| limit_of(index) < limit);
        let end = self.order.partition_point(|index| limit_of(index) <= limit);
        let key = |index: u32| self.traffic.keys.normal(requests[index as usize].key);
        self.order[start..end]
            .chunk_by(move |&one, &next| key(one) == key(next))
            .map(|requests| Group { traffic: self.traffic, requests })
    }
}

impl<'a> Group<'a> {
    /// The costs and the times.
    pub(super) fn charges(self) -> impl Iterator<Item = (Cost, Micros)> + 'a {
        self.requests.iter().filter_map(move |&index| {
            let request = &self.traffic.requests[index as usize];
            Some((Cost::new(request.cost)?, Micros::new(request.time_us)))
        })
    }

    pub(super) fn len(self) -> u64 {
        self.requests.len() as u64
    }

    /// All that it was charged, together.
    pub(super) fn total(self) -> u64 {
        self.charges().fold(0, |sum: u64, (cost, _)| sum.saturating_add(cost.get()))
    }

    pub(super) fn canonical(self) -> &'a str {
        let keys = &self.traffic.keys;
        self.requests.first().map_or(NO_KEY, |&index| {
            keys.text_at(keys.normal(self.traffic.requests[index as usize].key).index())
        })
    }
}

/// What a limit answers to the charges of a key that was never charged before.
pub(super) fn outcomes<'a>(limit: &'a Limit, group: Group<'a>) -> impl Iterator<Item = Outcome> + 'a {
    let mut state = limit.fresh();
    group.charges().map(move |(cost, now)| limit.charge(&mut state, cost, now))
}

/// The widest limit of a kind, at most so wide; `None` if there is none at all.
pub(super) fn widest(make: impl Fn(u64) -> Option<Limit>, most: u64) -> Option<Limit> {
    let halves = std::iter::successors(Some(most.max(1)), |wide| Some(wide / 2).filter(|&half| half > 0));
    halves.map(make).find_map(|limit| limit)
}

/// The most that a key has in use under a limit that is wide enough; `u64::MAX` if it is not.
pub(super) fn peak(wide: &Limit, group: Group<'_>) -> u64 {
    let used = |outcome: Outcome| if outcome.allowed { outcome.used() } else { u64::MAX };
    outcomes(wide, group).map(used).max().unwrap_or(0)
}

/// The same limit with another capacity. A concurrency limit has no peak, because a log does not say when a request ended.
pub(super) fn with_capacity(limit: &Limit, capacity: u64) -> Option<Limit> {
    let made = match limit {
        Limit::TokenBucket(bucket) => Limit::token_bucket(bucket.rate(), capacity),
        Limit::LeakyBucket(bucket) => Limit::leaky_bucket(bucket.rate(), capacity),
        Limit::FixedWindow(window) => {
            FixedWindow::new(capacity, window.window(), window.align()).map(Limit::FixedWindow)
        }
        Limit::SlidingWindow(window) => Limit::sliding_window(capacity, window.window()),
        Limit::SlidingWindowCounter(window) => Limit::sliding_window_counter(capacity, window.window()),
        Limit::Concurrency(_) => return None,
    };
    made.ok()
}

/// How the peaks of the keys of a limit are spread.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Peaks {
    pub(super) limit: String,
    /// The limit that is drawn in: what a key may have in use.
    pub(super) capacity: u64,
    /// The limit in words.
    pub(super) rule: String,
    pub(super) keys: u64,
    /// The keys that needed more.
    pub(super) above: u64,
    /// Keys with an override, which are not among `keys`.
    pub(super) with_override: u64,
    /// What half of the keys needed at most, 90 %, 99 % and all.
    pub(super) p50: u64,
    pub(super) p90: u64,
    pub(super) p99: u64,
    pub(super) most: u64,
    /// From the lowest to the highest; none spans the capacity.
    pub(super) steps: Vec<PeakStep>,
}

/// The keys whose peak is from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct PeakStep {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) keys: u64,
}

impl Peaks {
    /// Of one limit; `None` where nobody met it, or it has no peaks.
    pub(super) fn of(rule: &Rule, limit: u16, groups: &Groups<'_>) -> Option<Peaks> {
        let Allowance::Limited(allowed) = rule.allowance() else { return None };
        let most = groups.of_limit(limit).map(Group::total).max()?;
        let wide = widest(|capacity| with_capacity(allowed, capacity), most)?;
        let overrides: HashSet<&str> = rule.overrides().iter().map(|(key, _)| key.canonical()).collect();
        let mut with_override = 0;
        let mut peaks = Vec::new();
        for group in groups.of_limit(limit) {
            match overrides.contains(group.canonical()) {
                true => with_override += 1,
                false => peaks.push(peak(&wide, group)),
            }
        }
        peaks.sort_unstable();
        let capacity = allowed.capacity();
        let at = |per_cent: usize| peaks[(peaks.len() * per_cent).div_ceil(100).max(1) - 1];
        if peaks.is_empty() {
            return None;
        }
        Some(Peaks {
            limit: rule.name().to_owned(),
            capacity,
            rule: rule.allowance().to_string(),
            keys: peaks.len() as u64,
            above: (peaks.len() - peaks.partition_point(|&peak| peak <= capacity)) as u64,
            with_override,
            p50: at(50),
            p90: at(90),
            p99: at(99),
            most: at(100),
            steps: steps(&peaks, capacity),
        })
    }
}

/// Sorted peaks in steps of 1, 2, 5, 10, …, with one that ends at the capacity.
fn steps(peaks: &[u64], capacity: u64) -> Vec<PeakStep> {
    let tens = std::iter::successors(Some(1u64), |ten| ten.checked_mul(10));
    let round = tens.flat_map(|ten| [Some(ten), ten.checked_mul(2), ten.checked_mul(5)]).flatten();
    let highest = peaks.last().copied().unwrap_or(0).max(capacity);
    let mut edges: Vec<u64> = round.take_while(|&edge| edge < highest).chain([capacity, highest]).collect();
    edges.sort_unstable();
    edges.dedup();
    let mut below = 0;
    edges
        .into_iter()
        .map(|to| {
            let up_to = |edge: u64| peaks.partition_point(|&peak| peak <= edge);
            let step = PeakStep { from: below + 1, to, keys: (up_to(to) - up_to(below)) as u64 };
            below = to;
            step
        })
        .collect()
}

/// What a sliding counter did to this traffic, beside the exact log with the same numbers.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct CounterBesideLog {
    pub(super) limit: String,
    pub(super) requests: u64,
    pub(super) denied_by_log: u64,
    pub(super) denied_by_counter: u64,
    /// What the counter denied and the log had room for, each with its own history.
    pub(super) counter_alone: u64,
    /// What the log denied and the counter let pass.
    pub(super) log_alone: u64,
    /// Keys of which at least one request was decided in different ways.
    pub(super) keys: u64,
    /// The most that the counter let pass above the limit in any window.
    pub(super) most_above: u64,
}

impl CounterBesideLog {
    /// Of a limit that is one of both; `None` for others.
    pub(super) fn of(rule: &Rule, limit: u16, groups: &Groups<'_>) -> Option<CounterBesideLog> {
        let Allowance::Limited(allowed) = rule.allowance() else { return None };
        let window = match allowed {
            Limit::SlidingWindow(window) => window.window(),
            Limit::SlidingWindowCounter(window) => window.window(),
            _ => return None,
        };
        let capacity = allowed.capacity();
        let log = Limit::sliding_window(capacity, window).ok()?;
        let counter = Limit::sliding_window_counter(capacity, window).ok()?;
        let most = groups.of_limit(limit).map(Group::total).max()?;
        let wide = widest(|limit| Limit::sliding_window(limit, window).ok(), most)?;
        let mut beside = CounterBesideLog {
            limit: rule.name().to_owned(),
            requests: 0,
            denied_by_log: 0,
            denied_by_counter: 0,
            counter_alone: 0,
            log_alone: 0,
            keys: 0,
            most_above: 0,
        };
        for group in groups.of_limit(limit) {
            let before = beside.counter_alone + beside.log_alone;
            let mut passed = wide.fresh();
            let both = outcomes(&log, group).zip(outcomes(&counter, group)).zip(group.charges());
            for ((log, counter), (cost, now)) in both {
                beside.requests += 1;
                beside.denied_by_log += u64::from(!log.allowed);
                beside.denied_by_counter += u64::from(!counter.allowed);
                beside.counter_alone += u64::from(log.allowed && !counter.allowed);
                beside.log_alone += u64::from(!log.allowed && counter.allowed);
                if counter.allowed {
                    let used = wide.charge(&mut passed, cost, now).used();
                    beside.most_above = beside.most_above.max(used.saturating_sub(capacity));
                }
            }
            beside.keys += u64::from(beside.counter_alone + beside.log_alone > before);
        }
        Some(beside)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::traffic::Keys;
    use super::*;

    /// Charges of one key under one limit, as (time in milliseconds, cost).
    fn traffic(charges: &[(u64, u64)]) -> Traffic {
        let mut keys = Keys::default();
        let key = keys.enter("user:1", "user:1").unwrap();
        let request =
            |(&(at, cost), line)| Request { time_us: at * 1_000, cost, line, key, limit: 0, file: 0 };
        let mut traffic =
            Traffic { requests: charges.iter().zip(1..).map(request).collect(), keys, ..Traffic::default() };
        traffic.order();
        traffic
    }

    fn limits(capacity: u64) -> [Limit; 6] {
        let second = Micros::from_secs(1);
        [
            Limit::token_bucket("3/s", capacity),
            Limit::leaky_bucket("7/2s", capacity),
            Limit::fixed_window(capacity, second),
            Limit::clock_window(capacity, second),
            Limit::sliding_window(capacity, second),
            Limit::sliding_window_counter(capacity, second),
        ]
        .map(|limit| limit.expect("a limit"))
    }

    proptest! {
        /// Nothing is denied at the peak, and something is just below it.
        #[test]
        fn the_peak_is_the_smallest_limit_that_denies_nothing(
            charges in proptest::collection::vec((0u64..5_000, 1u64..6), 1..60),
        ) {
            let traffic = traffic(&charges);
            let groups = Groups::of(&traffic);
            let group = groups.of_limit(0).next().expect("a key");
            for limit in limits(1) {
                let wide = widest(|capacity| with_capacity(&limit, capacity), group.total()).unwrap();
                let peak = peak(&wide, group);
                let denies = |capacity| {
                    let limit = with_capacity(&limit, capacity).unwrap();
                    outcomes(&limit, group).any(|outcome| !outcome.allowed)
                };
                prop_assert!(!denies(peak), "{limit} of {peak}");
                prop_assert!(peak == 1 || denies(peak - 1), "{limit} of {}", peak - 1);
            }
        }
    }

    #[test]
    fn steps_are_round_and_one_ends_at_the_capacity() {
        let step = |from, to, keys| PeakStep { from, to, keys };
        assert_eq!(
            steps(&[1, 1, 2, 4, 7, 8, 30], 7),
            [
                step(1, 1, 2),
                step(2, 2, 1),
                step(3, 5, 1),
                step(6, 7, 1),
                step(8, 10, 1),
                step(11, 20, 0),
                step(21, 30, 1)
            ]
        );
        assert_eq!(steps(&[1], 3), [step(1, 1, 1), step(2, 2, 0), step(3, 3, 0)]);
        assert_eq!(steps(&[u64::MAX], 1).last(), Some(&step(10_000_000_000_000_000_001, u64::MAX, 1)));
    }

    /// Six just before a second is full and six just after: the counter lets none of the second six pass while the log has no room either, and
    /// later it still remembers half of what the log has forgotten.
    #[test]
    fn a_counter_is_shown_beside_the_log() {
        let charges = [(900, 6), (1_100, 6), (1_901, 3), (1_950, 3)];
        let traffic = traffic(&charges);
        let config = tollgate::config::Config::parse(
            "limits.a = { strategy = 'sliding_window_counter', limit = 6, window = '1s' }",
        );
        let policy = config.expect("a config").policy;
        let beside =
            CounterBesideLog::of(&policy.rules()[0], 0, &Groups::of(&traffic)).expect("a sliding limit");
        // At 1.1 s the log has the first six; the counter 6 · 0.9 of them. At 1.901 s the log is empty, and the counter has 6 · 0.099.
        assert_eq!((beside.requests, beside.denied_by_log, beside.denied_by_counter), (4, 1, 2));
        assert_eq!((beside.counter_alone, beside.log_alone, beside.keys, beside.most_above), (1, 0, 1, 0));
        // Spread over the second before, the counter forgets too early: 6 at 0 s count for nothing at 1.999 s, and for 0.6 at 1.9 s.
        let early: Vec<(u64, u64)> =
            [(999, 6)].into_iter().chain((1_500..1_900).step_by(20).map(|at| (at, 1))).collect();
        let beside = CounterBesideLog::of(&policy.rules()[0], 0, &Groups::of(&super::tests::traffic(&early)))
            .expect("a sliding limit");
        assert!(beside.log_alone > 0 && beside.most_above > 0, "{beside:?}");
    }

    #[test]
    fn peaks_are_spread_with_the_limit_between_them() {
        let config = tollgate::config::Config::parse(
            "limits.a = { strategy = 'fixed_window', limit = 2, window = '1s', overrides = { 'user:1' = { limit = 9 } } }\n\
             limits.b = { strategy = 'concurrency', limit = 2, lease = '1s' }",
        );
        let policy = config.expect("a config").policy;
        let mut traffic = traffic(&[(0, 1), (1, 1), (2, 1)]);
        assert!(Peaks::of(&policy.rules()[0], 0, &Groups::of(&traffic)).is_none(), "a key with an override");
        let mut keys = Keys::default();
        let two = keys.enter("user:2", "user:2").unwrap();
        let none = keys.enter(NO_KEY, NO_KEY).unwrap();
        traffic.keys = keys;
        for (request, key) in traffic.requests.iter_mut().zip([two, two, none]) {
            request.key = key;
        }
        let peaks = Peaks::of(&policy.rules()[0], 0, &Groups::of(&traffic)).expect("peaks");
        assert_eq!((peaks.keys, peaks.above, peaks.capacity, peaks.p50, peaks.most), (1, 0, 2, 2, 2));
        assert!(Peaks::of(&policy.rules()[1], 0, &Groups::of(&traffic)).is_none(), "no peak of leases");
        assert!(Peaks::of(&policy.rules()[0], 1, &Groups::of(&traffic)).is_none(), "nobody met it");
    }
}
