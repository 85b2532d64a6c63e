//! What is answered when the store cannot: the only room that chooses between open, closed and local.
//!
//! The walk comes here from `remote.rs` when a call to the store failed, in whichever way, or the breaker turned it away. Each
//! limit of the charge answers by its own policy: *open* allows and charges nothing, *closed* denies until the store is tried
//! next, *local* counts in a memory store of this process. The charge is admitted if all of them allow it, and only then is
//! anything charged, all local limits together. Every answer says where it came from; nothing counted here is ever sent to the
//! store afterwards.
//!
//! What was reserved here is settled here: a reservation is known to the memory store by its name even if it holds nothing.
//! What never fits (a cost above the limit) is denied under every policy, as the store would.

use std::sync::OnceLock;

use smallvec::SmallVec;
use tollgate_kernel::{Align, Cost, Limit, LimitError, Micros, Outcome, Rate};
use tollgate_store::{
    Hold, HoldId, MemoryItem, MemoryLimit, MemoryOptions, MemoryStore, Settled, Settlement, StoreError,
};

use crate::gate::{Answers, Away, Resolved};
use crate::policy::Fallback;
use crate::report::Source;

/// What a denial says when nobody knows when the store is tried next.
const A_SECOND: Micros = Micros::from_secs(1);

/// Answers in the store's stead.
pub(crate) struct Stead {
    options: MemoryOptions,
    /// The memory store of the local policy and of reservations, made when it is first needed.
    local: OnceLock<MemoryStore>,
}

/// The limit that one of several instances holds itself to, so that all of them together stay within it: its capacity and its
/// rate divided, rounded down, but at least one unit. Where a limit is below the number of instances, that makes as many
/// units as there are instances.
pub(crate) fn share_of(limit: &Limit, instances: u64) -> Result<Limit, LimitError> {
    let share = |count: u64| (count / instances).max(1);
    let slower = |rate: Rate| match rate.count() % instances {
        0 => Rate::new(rate.count() / instances, rate.period()),
        _ => Rate::new(rate.count(), Micros::new(rate.period().get().saturating_mul(instances)))
            .or_else(|_| Rate::new(rate.count() / instances, rate.period())),
    };
    match limit {
        Limit::TokenBucket(bucket) => Limit::token_bucket(slower(bucket.rate())?, share(bucket.burst())),
        Limit::LeakyBucket(bucket) => Limit::leaky_bucket(slower(bucket.rate())?, share(bucket.capacity())),
        Limit::FixedWindow(window) => match window.align() {
            Align::First => Limit::fixed_window(share(window.limit()), window.window()),
            Align::Clock => Limit::clock_window(share(window.limit()), window.window()),
        },
        Limit::SlidingWindow(window) => Limit::sliding_window(share(window.limit()), window.window()),
        Limit::SlidingWindowCounter(window) => {
            Limit::sliding_window_counter(share(window.limit()), window.window())
        }
        Limit::Concurrency(leases) => Limit::concurrency(share(leases.limit()), leases.lease()),
    }
}

/// Whether anything is charged, or only looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Charge(Option<Hold>),
    Peek,
}

/// One limit of a charge that the store does not answer.
struct Part<'a> {
    away: &'a Away,
    key: &'a str,
    cost: Cost,
    shadow: bool,
    /// The answer, unless it is counted here.
    outcome: Option<Outcome>,
}

impl<'a> Part<'a> {
    /// The part of an ask, if it meets counters.
    fn new(ask: &'a Resolved<'_, '_>, asks: &[Resolved<'_, '_>], retry_after: Micros) -> Option<Part<'a>> {
        let (key, stored, away) = ask.away()?;
        let capacity = stored.limit.capacity();
        let denied = Outcome { capacity, ..Outcome::BLOCKED };
        let outcome = match away.fallback {
            _ if total_cost(ask, asks) > capacity => Some(denied),
            Fallback::Open => Some(Outcome { capacity, remaining: capacity, ..Outcome::UNLIMITED }),
            Fallback::Closed => Some(Outcome { retry_after: Some(retry_after), ..denied }),
            Fallback::Local => None,
        };
        Some(Part { away, key, cost: ask.cost, shadow: ask.entry.rule.is_shadow(), outcome })
    }

    fn denies(&self) -> bool {
        self.outcome.is_some_and(|outcome| !outcome.allowed) && !self.shadow
    }
}

impl Stead {
    pub(crate) fn new(options: MemoryOptions) -> Stead {
        Stead { options, local: OnceLock::new() }
    }

    fn local(&self) -> &MemoryStore {
        self.local.get_or_init(|| MemoryStore::for_fallback(self.options.clone()))
    }

    /// The counters of a limit in this process.
    fn counters<'a>(&self, away: &'a Away) -> &'a MemoryLimit {
        away.local.get_or_init(|| self.local().open(&away.share))
    }

    /// Answers for the store, in the order of the asks that meet counters. `retry_after` is when it is tried next, if known.
    pub(crate) fn answer(&self, asks: &[Resolved<'_, '_>], act: Act, retry_after: Option<Micros>) -> Answers {
        let retry_after = retry_after.unwrap_or(A_SECOND).max(Micros::new(1));
        let parts: SmallVec<[Part<'_>; 4]> =
            asks.iter().filter_map(|ask| Part::new(ask, asks, retry_after)).collect();
        // Nothing is charged if anything is denied already.
        let act = if parts.iter().any(Part::denies) { Act::Peek } else { act };
        let local: SmallVec<[MemoryItem<'_>; 4]> =
            parts.iter().filter(|part| part.outcome.is_none()).map(|part| self.item(part)).collect();
        let mut counted = self.count(&local, act).into_iter();
        let answer = |part: &Part<'_>| {
            let outcome = part.outcome.unwrap_or_else(|| match counted.next() {
                // What an instance's share can never hold, the store may: it is worth coming back.
                Some(never @ Outcome { allowed: false, retry_after: None, .. }) => {
                    Outcome { retry_after: Some(retry_after), ..never }
                }
                Some(outcome) => outcome,
                None => Outcome::BLOCKED,
            });
            (outcome, source_of(part.away.fallback))
        };
        parts.iter().map(answer).collect()
    }

    fn item<'a>(&self, part: &Part<'a>) -> MemoryItem<'a> {
        MemoryItem { limit: self.counters(part.away), key: part.key, cost: part.cost, shadow: part.shadow }
    }

    /// Charges the limits that count locally, all or none.
    fn count(&self, items: &[MemoryItem<'_>], act: Act) -> SmallVec<[Outcome; 4]> {
        match act {
            Act::Charge(None) | Act::Peek if items.is_empty() => SmallVec::new(),
            Act::Peek => self.local().peek_all(items).outcomes,
            Act::Charge(hold) => match self.local().charge_all(items, hold) {
                Ok(charged) => charged.outcomes,
                // No room for one more reservation. What cannot be remembered is not admitted.
                Err(_) => items.iter().map(|_| Outcome::BLOCKED).collect(),
            },
        }
    }

    /// Settles what was reserved here; `None` if it was not. `counts_locally` tells which limits may hold anything here: the
    /// others let it through or denied it, and have nothing to correct.
    pub(crate) fn settle(
        &self,
        id: HoldId,
        settlement: &Settlement,
        counts_locally: impl Fn(&str) -> bool,
    ) -> Option<Result<Settled, StoreError>> {
        let local = self.local.get()?;
        let settled = match settlement {
            Settlement::Each(actuals) => {
                let held = actuals.iter().filter(|(name, _)| counts_locally(name)).cloned();
                local.settle(id, &Settlement::Each(held.collect()))
            }
            _ => local.settle(id, settlement),
        };
        match settled {
            Ok(Settled::Unknown) => None,
            settled => Some(settled),
        }
    }

    /// Forgets what a key was charged here.
    pub(crate) fn forget(&self, away: &Away, key: &str) -> bool {
        away.local.get().is_some_and(|limit| limit.forget(key))
    }
}

fn source_of(fallback: Fallback) -> Source {
    match fallback {
        Fallback::Open => Source::FallbackOpen,
        Fallback::Closed => Source::FallbackClosed,
        Fallback::Local => Source::FallbackLocal,
    }
}

/// What a charge asks for of the same key under the same limit, all in all.
fn total_cost(ask: &Resolved<'_, '_>, asks: &[Resolved<'_, '_>]) -> u64 {
    let is_same = |other: &&Resolved<'_, '_>| {
        std::ptr::eq(other.entry, ask.entry) && other.canonical() == ask.canonical()
    };
    match asks {
        [only] => only.cost.get(),
        _ => asks.iter().filter(is_same).fold(0, |sum, other| sum.saturating_add(other.cost.get())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_together_are_at_most_the_whole() {
        let minute = Micros::from_secs(60);
        let rate = |text: &str| text.parse::<Rate>().unwrap();
        for (limit, instances, share) in [
            (Limit::token_bucket(rate("10/s"), 20), 1, "10/s, bursts of 20"),
            (Limit::token_bucket(rate("10/s"), 20), 5, "2/s, bursts of 4"),
            (Limit::token_bucket(rate("10/s"), 20), 3, "10/3s, bursts of 6"),
            (Limit::token_bucket(rate("1/d"), 2), 10, "1/10d, bursts of 1"),
            (Limit::leaky_bucket(rate("9/m"), 10), 3, "3/m evenly, up to 3 waiting"),
            (Limit::fixed_window(100, minute), 3, "33 per 1m window"),
            (Limit::clock_window(2, minute), 3, "1 per 1m window of the clock"),
            (Limit::sliding_window(100, minute), 7, "14 in any 1m"),
            (Limit::sliding_window_counter(100, minute), 7, "about 14 in any 1m"),
            (Limit::concurrency(7, minute), 2, "3 at once, leases of 1m"),
            // A period too long to multiply is kept, and the count rounded down.
            (Limit::token_bucket(rate("15/3000d"), 20), 2, "7/3000d, bursts of 10"),
        ] {
            assert_eq!(share_of(&limit.unwrap(), instances).unwrap().to_string(), share);
        }
        let slow = Limit::token_bucket(rate("1/3000d"), 2).unwrap();
        assert!(share_of(&slow, 2).is_err(), "nothing slower can be kept exact");
    }
}
