//! The fallback: answers when the store cannot. Only this module chooses between open, closed and local.
//!
//! `remote.rs` calls it when a store call failed or the breaker turned it away. Each limit of the charge follows its own policy:
//! *open* allows and charges nothing; *closed* denies until the next attempt to reach the store; *local* counts in a memory store
//! of this process and denies what the store last denied until that denial ends, because the local counters start empty. The
//! charge is admitted if all limits allow it; only then are all local limits charged, as one. Every outcome names its source.
//! Nothing counted here is ever sent to the store.
//!
//! A reservation made here is settled here: the memory store knows it by its id even if it holds nothing. A cost above the limit
//! is denied under every policy, as the store would deny it.

use std::collections::HashMap;
use std::sync::OnceLock;

use parking_lot::Mutex;
use smallvec::SmallVec;
use tollgate_kernel::{Cost, Limit, Micros, Outcome};
use tollgate_store::{
    ChargeId, Hold, MemoryCharge, MemoryLimit, MemoryOptions, MemoryStore, Settled, Settlement, StoreError,
};

use super::Answers;
use crate::outcome::{Fallback, Source};
use crate::policy::entry::{RemoteLimit, Resolved};

/// The retry time of a denial when the time of the next attempt is not known.
const A_SECOND: Micros = Micros::from_secs(1);

/// Answers in place of the store.
pub(crate) struct FallbackStore {
    options: MemoryOptions,
    /// The memory store of the local policy and of reservations, made when it is first needed.
    local: OnceLock<MemoryStore>,
    /// Reservations of this process of which only some charges are counted here.
    partly_counted: Mutex<HashMap<u128, PartlyCounted>>,
}

/// How many of those are remembered at most.
const MOST_PARTLY_COUNTED: usize = 65_536;

/// Which charges of a reservation are counted here, by the names of their limits, in order.
struct PartlyCounted {
    charges: SmallVec<[(&'static str, bool); 4]>,
    ttl: Micros,
    end: Micros,
}

impl PartlyCounted {
    /// The settlement for those charges that are counted here.
    fn translated(&self, settlement: &Settlement) -> Result<Settlement, StoreError> {
        Ok(match settlement {
            Settlement::Each(actuals) if actuals.len() != self.charges.len() => {
                return Err(StoreError::wrong_count(self.charges.len(), actuals.len()));
            }
            Settlement::Each(actuals) => {
                let counted = actuals.iter().zip(&self.charges).filter(|(_, (_, is_counted))| *is_counted);
                Settlement::Each(counted.map(|(actual, _)| *actual).collect())
            }
            Settlement::Named(actuals) => {
                let is_of = |name: &str, counted: bool| self.charges.contains(&(name, counted));
                let counted = actuals.iter().filter(|(name, _)| is_of(name, true) || !is_of(name, false));
                Settlement::Named(counted.cloned().collect())
            }
            other => other.clone(),
        })
    }
}

/// Whether anything is charged, or only looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Charge(Option<Hold>),
    Peek,
}

/// One limit of a charge that the store does not answer.
struct FallbackCharge<'a> {
    name: &'static str,
    remote: &'a RemoteLimit,
    key: &'a str,
    cost: Cost,
    shadow: bool,
    /// The outcome, unless it is counted here.
    outcome: Option<Outcome>,
}

impl<'a> FallbackCharge<'a> {
    /// The charge for the fallback, if it has counters.
    fn new(
        charge: &'a Resolved<'_, '_>,
        charges: &[Resolved<'_, '_>],
        retry_after: Micros,
        last_denial: impl Fn(&Resolved<'_, '_>) -> Option<Outcome>,
    ) -> Option<FallbackCharge<'a>> {
        let (key, stored, remote) = charge.remote()?;
        let capacity = stored.limit.capacity();
        let denied = Outcome { capacity, ..Outcome::BLOCKED };
        let outcome = match remote.fallback {
            _ if total_cost(charge, charges).get() > capacity => Some(denied),
            Fallback::Open => Some(Outcome { capacity, remaining: capacity, ..Outcome::UNLIMITED }),
            Fallback::Closed => Some(Outcome { retry_after: Some(retry_after), ..denied }),
            Fallback::Local => last_denial(charge),
        };
        let name = charge.entry.name;
        Some(FallbackCharge { name, remote, key, cost: charge.cost, shadow: charge.is_shadow(), outcome })
    }

    fn denies(&self) -> bool {
        self.outcome.is_some_and(|outcome| !outcome.allowed) && !self.shadow
    }
}

impl FallbackStore {
    pub(crate) fn new(options: MemoryOptions) -> FallbackStore {
        FallbackStore { options, local: OnceLock::new(), partly_counted: Mutex::default() }
    }

    fn local(&self) -> &MemoryStore {
        self.local.get_or_init(|| MemoryStore::for_fallback(self.options.clone()))
    }

    /// The counters of a limit in this process.
    fn counters<'a>(&self, remote: &'a RemoteLimit) -> &'a MemoryLimit {
        remote.local.get_or_init(|| self.local().open(&remote.share))
    }

    /// Answers in the store's place, in the order of the charges that have counters. `retry_after` is the time until the next
    /// attempt, if known; `last_denial` returns the store's last denial of a charge, if it is not over yet.
    pub(crate) fn answer(
        &self,
        charges: &[Resolved<'_, '_>],
        act: Act,
        retry_after: Option<Micros>,
        last_denial: impl Fn(&Resolved<'_, '_>) -> Option<Outcome>,
    ) -> Answers {
        let retry_after = retry_after.unwrap_or(A_SECOND).max(Micros::new(1));
        let parts: SmallVec<[FallbackCharge<'_>; 4]> = charges
            .iter()
            .filter_map(|charge| FallbackCharge::new(charge, charges, retry_after, &last_denial))
            .collect();
        // Nothing is charged if anything is denied already.
        let act = if parts.iter().any(FallbackCharge::denies) { Act::Peek } else { act };
        let local: SmallVec<[MemoryCharge<'_>; 4]> =
            parts.iter().filter(|part| part.outcome.is_none()).map(|part| self.memory_charge(part)).collect();
        let mut counted = self.count(&local, act).into_iter();
        let answer = |part: &FallbackCharge<'_>| {
            let outcome = part.outcome.unwrap_or_else(|| match counted.next() {
                // A cost above this instance's share may still fit in the store, so the denial gets a retry time.
                Some(never @ Outcome { allowed: false, retry_after: None, .. }) => {
                    Outcome { retry_after: Some(retry_after), ..never }
                }
                Some(outcome) => outcome,
                None => Outcome::BLOCKED,
            });
            (outcome, source_of(part.remote.fallback))
        };
        let answers: Answers = parts.iter().map(answer).collect();
        let is_admitted =
            parts.iter().zip(&answers).all(|(part, (outcome, _))| outcome.allowed || part.shadow);
        if let (Act::Charge(Some(hold)), true) = (act, is_admitted) {
            self.remember_counted(hold, &parts, &answers);
        }
        answers
    }

    /// Remembers which charges of a reservation are counted here, unless all are.
    fn remember_counted(&self, hold: Hold, parts: &[FallbackCharge<'_>], answers: &Answers) {
        let now = self.options.clock.now();
        let mut partly_counted = self.partly_counted.lock();
        // A reservation that is sent again is answered as before, until its time has run out.
        if partly_counted.get(&hold.id.get()).is_some_and(|known| now < known.end) {
            return;
        }
        partly_counted.remove(&hold.id.get());
        if parts.iter().all(|part| part.outcome.is_none()) {
            return;
        }
        if partly_counted.len() >= MOST_PARTLY_COUNTED {
            partly_counted.retain(|_, known| now < known.end);
        }
        // Memory is bounded. A forgotten entry can still be cancelled and settled with one amount, but not charge by charge.
        if partly_counted.len() >= MOST_PARTLY_COUNTED
            && let Some(other) = partly_counted.keys().next().copied()
        {
            partly_counted.remove(&other);
        }
        // As the counters do: a reservation lives at least as long as its leases.
        let lease =
            |(part, (outcome, _)): (&FallbackCharge<'_>, &(Outcome, Source))| match part.remote.share.limit {
                Limit::Concurrency(leases) if part.outcome.is_none() && outcome.allowed => {
                    Some(leases.lease())
                }
                _ => None,
            };
        let longest_lease = parts.iter().zip(answers).filter_map(lease).max();
        let ttl = match hold.ttl {
            Hold::UNTIL_RELEASED => hold.ttl,
            ttl => ttl.min(Hold::MAX_TTL).max(longest_lease.unwrap_or_default()),
        };
        let charges = parts.iter().map(|part| (part.name, part.outcome.is_none())).collect();
        let known = PartlyCounted { charges, ttl, end: now.saturating_add(ttl) };
        partly_counted.insert(hold.id.get(), known);
    }

    fn memory_charge<'a>(&self, part: &FallbackCharge<'a>) -> MemoryCharge<'a> {
        MemoryCharge {
            limit: self.counters(part.remote),
            key: part.key,
            cost: part.cost,
            shadow: part.shadow,
        }
    }

    /// Charges the limits that count locally, all or none.
    fn count(&self, charges: &[MemoryCharge<'_>], act: Act) -> SmallVec<[Outcome; 4]> {
        match act {
            Act::Charge(None) | Act::Peek if charges.is_empty() => SmallVec::new(),
            Act::Peek => self.local().peek_all(charges).outcomes,
            Act::Charge(hold) => match self.local().charge_all(charges, hold) {
                Ok(charged) => charged.outcomes,
                // No room for one more reservation: what cannot be remembered is not admitted.
                Err(_) => charges.iter().map(|_| Outcome::BLOCKED).collect(),
            },
        }
    }

    /// Settles a reservation that was made here; `None` if it was not. Limits with an open or closed fallback charged nothing
    /// here.
    pub(super) fn settle(
        &self,
        id: ChargeId,
        settlement: &Settlement,
    ) -> Option<Result<Settled, StoreError>> {
        let local = self.local.get()?;
        // An expired reservation must not affect a later one with the same id.
        let now = self.options.clock.now();
        let is_live = |known: &&PartlyCounted| now < known.end;
        let translated = {
            let partly_counted = self.partly_counted.lock();
            partly_counted.get(&id.get()).filter(is_live).map(|known| known.translated(settlement))
        };
        let settled = match translated {
            Some(translated) => translated.and_then(|settlement| local.settle(id, &settlement)),
            None => local.settle(id, settlement),
        };
        match settled {
            Ok(Settled::Unknown) => None,
            Ok(settled) => {
                self.note_settled(id, settlement);
                Some(Ok(settled))
            }
            error => Some(error),
        }
    }

    /// A reservation that is held here was settled.
    fn note_settled(&self, id: ChargeId, settlement: &Settlement) {
        let mut partly_counted = self.partly_counted.lock();
        match settlement {
            Settlement::Renew => {
                if let Some(known) = partly_counted.get_mut(&id.get()) {
                    known.end = self.options.clock.now().saturating_add(known.ttl);
                }
            }
            _ => drop(partly_counted.remove(&id.get())),
        }
    }

    /// Forgets the charges of a key in this process.
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

/// The total cost of all charges with the same limit and key.
fn total_cost(charge: &Resolved<'_, '_>, charges: &[Resolved<'_, '_>]) -> Cost {
    let is_same = |other: &&Resolved<'_, '_>| {
        std::ptr::eq(&*other.entry, &*charge.entry) && other.canonical() == charge.canonical()
    };
    let costs = charges.iter().filter(is_same).map(|other| other.cost);
    costs.reduce(Cost::saturating_add).unwrap_or(charge.cost)
}
