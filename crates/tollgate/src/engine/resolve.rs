//! Resolves the charges of a request: finds each limit and parses each key.
//!
//! A request is resolved once. Only a request that waits is resolved again, before each try, because the limits may have been
//! reloaded; its keys are canonical by then and need no parse (`engine/waiting.rs`).

use std::sync::Arc;

use tollgate_kernel::Cost;

use super::request::Charges;
use super::{Engine, Limits, MOST_LIMITS};
use crate::charge::{Charge, Given, LimitRef, NamedLimit};
use crate::error::Error;
use crate::key::{Key, KeyError};
use crate::policy::entry::{Entry, EntryRef, Resolved, ResolvedAll};

impl Engine {
    /// A handle, if it is of this engine.
    pub(crate) fn owned<'a>(&self, limit: &'a NamedLimit) -> Result<&'a NamedLimit, Error> {
        match limit.entry.engine == self.id {
            true => Ok(limit),
            false => Err(another_gate(limit.name())),
        }
    }

    /// Finds the limit of a charge.
    pub(super) fn find<'e, 'a: 'e>(
        &self,
        limits: &'e Limits,
        limit: LimitRef<'a>,
    ) -> Result<&'e Arc<Entry>, Error> {
        match limit.0 {
            Given::Name(name) => limits.get(name).ok_or_else(|| limits.unknown(name)),
            Given::Handle(limit) => self.own(limit.entry.newest()).ok_or_else(|| another_gate(limit.name())),
        }
    }

    /// An entry, if it is of this engine.
    #[inline]
    pub(super) fn own<'e>(&self, entry: &'e Arc<Entry>) -> Option<&'e Arc<Entry>> {
        (entry.engine == self.id).then_some(entry)
    }

    /// Finds the limits and parses the keys, except those that are canonical. An empty or malformed key is logged here and denied later.
    pub(super) fn resolve<'a>(
        &self,
        limits: &Limits,
        charges: Charges<'a>,
        holds_nothing: Option<&'static str>,
    ) -> Result<ResolvedAll<'static, 'a>, Error> {
        let count = charges.as_slice().len();
        if count == 0 {
            return Err(Error::call("a charge needs at least one limit"));
        }
        if count > MOST_LIMITS {
            return Err(Error::call(format!(
                "a charge may name at most {MOST_LIMITS} limits, and this one names {count}"
            )));
        }
        self.resolve_each(limits, charges, holds_nothing).collect()
    }

    /// The same for charges that are charged separately. Their number is not bounded.
    pub(super) fn resolve_each<'a>(
        &self,
        limits: &Limits,
        charges: Charges<'a>,
        holds_nothing: Option<&'static str>,
    ) -> impl Iterator<Item = Result<Resolved<'static, 'a>, Error>> {
        let one = move |limit: LimitRef<'a>, key: Result<Key<'a>, KeyError>, cost: u64| {
            let entry = self.find(limits, limit)?;
            let cost = check(entry, cost, holds_nothing)?;
            Ok(self.resolved(EntryRef::Shared(entry.clone()), key, cost))
        };
        let (only, all) = match charges {
            Charges::One(charge) => (Some(charge), &[][..]),
            Charges::All(charges) => (None, charges),
        };
        let only = only.into_iter().map(move |Charge { limit, key, cost }| one(limit, key.parse(), cost));
        only.chain(all.iter().map(move |charge| one(charge.limit, charge.key.parse_ref(), charge.cost)))
    }

    pub(super) fn resolved<'e, 'k>(
        &self,
        entry: EntryRef<'e>,
        key: Result<Key<'k>, KeyError>,
        cost: Cost,
    ) -> Resolved<'e, 'k> {
        let key = key.map_err(|error| self.warn_malformed(entry.name, &error)).ok();
        Resolved::new(entry, key, cost)
    }

    /// Warns of malformed keys, at most once a second, with how many there were. The key itself is never shown.
    #[cold]
    pub(super) fn warn_malformed(&self, limiter: &str, error: &KeyError) {
        if !error.is_reported()
            && let Some(count) = self.malformed.count()
        {
            tracing::warn!(target: "tollgate::engine", limiter, count, "denied a malformed key: {error}");
        }
    }
}

/// The error for a handle that another engine made.
fn another_gate(limit: &str) -> Error {
    Error::call(format!("`{limit}` is a limit of another gate; look it up in this one"))
}

/// Refuses a cost of zero, and a concurrency limit where nothing would be held.
#[inline]
fn check(entry: &Entry, cost: u64, holds_nothing: Option<&'static str>) -> Result<Cost, Error> {
    let cost = Cost::new(cost).ok_or_else(Error::zero_cost)?;
    match holds_nothing {
        Some(call) if entry.is_concurrency() => Err(Error::holds_nothing(entry.name, call)),
        _ => Ok(cost),
    }
}
