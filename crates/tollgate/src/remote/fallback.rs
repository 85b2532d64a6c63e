//! What is answered when the store cannot: the only module that chooses between open, closed and local.
//!
//! A charge comes here from `remote.rs` when a call to the store failed, in whichever way, or the breaker turned it away. Each
//! limit of the charge answers by its own policy: *open* allows and charges nothing, *closed* denies until the store is tried
//! next, *local* counts in a memory store of this process. The charge is admitted if all of them allow it, and only then is
//! anything charged, all local limits together. Every answer says where it came from; nothing counted here is ever sent to the
//! store afterwards.
//!
//! What was reserved here is settled here: a reservation is known to the memory store by its name even if it holds nothing.
//! What never fits (a cost above the limit) is denied under every policy, as the store would.

use std::collections::HashSet;
use std::sync::OnceLock;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Micros, Outcome};
use tollgate_store::{
    ChargeId, Hold, MemoryCharge, MemoryLimit, MemoryOptions, MemoryStore, Settled, Settlement, StoreError,
};

use super::Answers;
use crate::outcome::{Fallback, Source};
use crate::policy::entry::{RemoteLimit, Resolved};

/// What a denial says when nobody knows when the store is tried next.
const A_SECOND: Micros = Micros::from_secs(1);

/// Answers in place of the store.
pub(crate) struct FallbackStore {
    options: MemoryOptions,
    /// The memory store of the local policy and of reservations, made when it is first needed.
    local: OnceLock<MemoryStore>,
    /// The names of limits that were open or closed when they were last reserved here.
    uncounted: Mutex<HashSet<&'static str>>,
}

/// Whether anything is charged, or only looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Charge(Option<Hold>),
    Peek,
}

/// One limit of a charge that the store does not answer.
struct Part<'a> {
    name: &'static str,
    remote: &'a RemoteLimit,
    key: &'a str,
    cost: Cost,
    shadow: bool,
    /// The answer, unless it is counted here.
    outcome: Option<Outcome>,
}

impl<'a> Part<'a> {
    /// The part of a charge, if it meets counters.
    fn new(
        charge: &'a Resolved<'_, '_>,
        charges: &[Resolved<'_, '_>],
        retry_after: Micros,
    ) -> Option<Part<'a>> {
        let (key, stored, remote) = charge.remote()?;
        let capacity = stored.limit.capacity();
        let denied = Outcome { capacity, ..Outcome::BLOCKED };
        let outcome = match remote.fallback {
            _ if total_cost(charge, charges) > capacity => Some(denied),
            Fallback::Open => Some(Outcome { capacity, remaining: capacity, ..Outcome::UNLIMITED }),
            Fallback::Closed => Some(Outcome { retry_after: Some(retry_after), ..denied }),
            Fallback::Local => None,
        };
        let name = charge.entry.name;
        Some(Part { name, remote, key, cost: charge.cost, shadow: charge.is_shadow(), outcome })
    }

    fn denies(&self) -> bool {
        self.outcome.is_some_and(|outcome| !outcome.allowed) && !self.shadow
    }
}

impl FallbackStore {
    pub(crate) fn new(options: MemoryOptions) -> FallbackStore {
        FallbackStore { options, local: OnceLock::new(), uncounted: Mutex::default() }
    }

    fn local(&self) -> &MemoryStore {
        self.local.get_or_init(|| MemoryStore::for_fallback(self.options.clone()))
    }

    /// The counters of a limit in this process.
    fn counters<'a>(&self, remote: &'a RemoteLimit) -> &'a MemoryLimit {
        remote.local.get_or_init(|| self.local().open(&remote.share))
    }

    /// Answers for the store, in the order of the charges that meet counters. `retry_after` is when it is tried next, if known.
    pub(crate) fn answer(
        &self,
        charges: &[Resolved<'_, '_>],
        act: Act,
        retry_after: Option<Micros>,
    ) -> Answers {
        let retry_after = retry_after.unwrap_or(A_SECOND).max(Micros::new(1));
        let parts: SmallVec<[Part<'_>; 4]> =
            charges.iter().filter_map(|charge| Part::new(charge, charges, retry_after)).collect();
        if matches!(act, Act::Charge(Some(_))) {
            self.note_uncounted(&parts);
        }
        // Nothing is charged if anything is denied already.
        let act = if parts.iter().any(Part::denies) { Act::Peek } else { act };
        let local: SmallVec<[MemoryCharge<'_>; 4]> =
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
            (outcome, source_of(part.remote.fallback))
        };
        parts.iter().map(answer).collect()
    }

    fn note_uncounted(&self, parts: &[Part<'_>]) {
        let mut uncounted = self.uncounted.lock();
        for part in parts {
            match part.remote.fallback {
                Fallback::Local => uncounted.remove(part.name),
                Fallback::Open | Fallback::Closed => uncounted.insert(part.name),
            };
        }
    }

    fn item<'a>(&self, part: &Part<'a>) -> MemoryCharge<'a> {
        MemoryCharge {
            limit: self.counters(part.remote),
            key: part.key,
            cost: part.cost,
            shadow: part.shadow,
        }
    }

    /// Charges the limits that count locally, all or none.
    fn count(&self, items: &[MemoryCharge<'_>], act: Act) -> SmallVec<[Outcome; 4]> {
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

    /// Settles what was reserved here; `None` if it was not. Limits that are open or closed charged nothing here, and have nothing
    /// to correct.
    pub(super) fn settle(
        &self,
        id: ChargeId,
        settlement: &Settlement,
    ) -> Option<Result<Settled, StoreError>> {
        let local = self.local.get()?;
        let settled = match settlement {
            Settlement::Each(actuals) => {
                let uncounted = self.uncounted.lock();
                let held = actuals.iter().filter(|(name, _)| !uncounted.contains(name.as_str())).cloned();
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
    pub(crate) fn forget(&self, remote: &RemoteLimit, key: &str) -> bool {
        remote.local.get().is_some_and(|limit| limit.forget(key))
    }
}

fn source_of(fallback: Fallback) -> Source {
    match fallback {
        Fallback::Open => Source::FallbackOpen,
        Fallback::Closed => Source::FallbackClosed,
        Fallback::Local => Source::FallbackLocal,
    }
}

/// What a charge costs under the same limit for the same key, all in all.
fn total_cost(charge: &Resolved<'_, '_>, charges: &[Resolved<'_, '_>]) -> u64 {
    let is_same = |other: &&Resolved<'_, '_>| {
        std::ptr::eq(&*other.entry, &*charge.entry) && other.canonical() == charge.canonical()
    };
    match charges {
        [only] => only.cost.get(),
        _ => charges.iter().filter(is_same).fold(0, |sum, other| sum.saturating_add(other.cost.get())),
    }
}
