//! A limit as the layer applies it to the requests of one route limit: how it is charged, and what the response shows of it. It
//! is built with the layer, again after a reload has changed the limit, and on each choice of a limit with the application's own
//! numbers.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use tollgate_kernel::{Cost, Limit, Micros, Outcome, Strategy};

use super::header_template::HeaderTemplate;
use super::layer::Inner;
use crate::charge::NamedLimit;
use crate::error::Error;
use crate::headers::{Format, ReportedLimit, Unit};
use crate::limiter::Limiter;
use crate::policy::Allowance;
use crate::route::{Choice, RequestLimit, RouteLimit, Settle};
use crate::tollgate::Tollgate;

/// A limit as the layer applies it.
pub(super) struct AppliedLimit {
    pub(super) limit: NamedLimit,
    pub(super) settle: Settle,
    /// How long a lease lasts, where the limit gives any: it is released when the response is done.
    pub(super) lease: Option<Micros>,
    /// Whether the charge is a reservation, so that it can be corrected.
    pub(super) is_held: bool,
    /// The fast path, for local counters and plain charges.
    pub(super) fast_path: Option<Limiter>,
    pub(super) unit: Option<Unit>,
    /// The rate-limit headers of the fast path.
    pub(super) template: Option<&'static HeaderTemplate>,
}

/// The settings of the layer that matter to a limit.
pub(super) struct Settings {
    pub(super) most_delay: Micros,
    pub(super) format: Format,
}

impl AppliedLimit {
    /// A limit of the policy, which is applied often.
    fn of_policy(
        gate: &Tollgate,
        limit: NamedLimit,
        settle: &Settle,
        settings: &Settings,
    ) -> Result<AppliedLimit, Error> {
        let mut applied = AppliedLimit::new(gate, limit, settle, settings)?;
        if let (Some(_), Allowance::Limited(limit)) = (&applied.fast_path, applied.limit.allowance()) {
            let fresh = Outcome { capacity: limit.capacity(), ..Outcome::UNLIMITED };
            applied.template = HeaderTemplate::new(&settings.format, &applied.reported(Cost::ONE, fresh));
        }
        Ok(applied)
    }

    fn new(
        gate: &Tollgate,
        limit: NamedLimit,
        settle: &Settle,
        settings: &Settings,
    ) -> Result<AppliedLimit, Error> {
        let entry = gate.engine.owned(&limit)?.entry.newest().clone();
        let limit = NamedLimit { entry: entry.clone() };
        let limits = || {
            let overrides = entry.rule.overrides().iter().map(|(_, allowance)| allowance);
            std::iter::once(entry.rule.allowance()).chain(overrides).filter_map(|allowance| match allowance {
                Allowance::Limited(limit) => Some(limit),
                Allowance::Unlimited | Allowance::Blocked => None,
            })
        };
        let is = |strategy: Strategy| move |limit: &Limit| limit.strategy() == strategy;
        let leases = limits().filter(|limit| limit.strategy() == Strategy::Concurrency);
        let lease = leases.map(|limit| limit.window_us()).min();
        let may_wait_long = limits().any(|limit| {
            limit.strategy() == Strategy::LeakyBucket && limit.window_us() > settings.most_delay
        });
        let is_settled = !matches!(settle, Settle::Nothing);
        if lease.is_some() && is_settled {
            return Err(Error::call(format!(
                "the route limit `{}`: a concurrency limit is released when the response is done, and not settled",
                entry.rule.name()
            )));
        }
        let is_held = lease.is_some() || may_wait_long || is_settled;
        // A charge that is held, or may be delayed, needs more than its counters.
        let fast_path = gate.local(&limit).ok().filter(Limiter::is_fast);
        let fast_path = fast_path.filter(|_| !is_held && !limits().any(is(Strategy::LeakyBucket)));
        let unit = match (settle, lease) {
            (Settle::ByBytes, _) => Some(Unit::ContentBytes),
            (_, Some(_)) => Some(Unit::ConcurrentRequests),
            _ => None,
        };
        Ok(AppliedLimit { settle: settle.clone(), lease, is_held, fast_path, unit, template: None, limit })
    }

    /// What the response shows of an outcome, without an override and not in shadow mode.
    pub(super) fn reported(&self, cost: Cost, outcome: Outcome) -> ReportedLimit<'_> {
        let (name, limit) = (self.limit.name(), self.limit.entry.newest().base.limit());
        ReportedLimit { name, limit, cost: cost.get(), outcome, shadow: false, unit: self.unit }
    }
}

/// All limits that the layer applies.
pub(super) struct AppliedLimits {
    limits: Vec<Slot>,
    /// For each route limit.
    routes: Vec<OfRoute>,
}

/// The limits of one route limit.
enum OfRoute {
    One(usize),
    /// By the chosen name. Limits that cannot be applied here are left out.
    Chosen(HashMap<String, usize>, Settle),
}

/// A limit as it was when the layer was built, and its replacement after a reload.
struct Slot {
    built: AppliedLimit,
    reloaded: RwLock<Option<Arc<AppliedLimit>>>,
}

impl Slot {
    fn new(built: AppliedLimit) -> Slot {
        Slot { built, reloaded: RwLock::default() }
    }

    /// The current limit. An error if it can no longer be applied here.
    #[cold]
    fn reloaded(&self, inner: &Inner) -> Result<Arc<AppliedLimit>, Error> {
        if let Some(limit) = self.reloaded.read().as_ref().filter(|limit| limit.limit.entry.is_current()) {
            return Ok(limit.clone());
        }
        let (limit, settle) = (self.built.limit.clone(), &self.built.settle);
        let limit = Arc::new(AppliedLimit::of_policy(&inner.gate, limit, settle, &inner.settings)?);
        *self.reloaded.write() = Some(limit.clone());
        Ok(limit)
    }
}

/// Which limit applies to one charge of a request.
#[derive(Clone)]
pub(super) enum Which {
    Known(usize),
    /// A limit for this request only: a reload has changed it, its numbers are the application's, or its name was not known when
    /// the layer was built.
    OfRequest(Arc<AppliedLimit>),
}

impl AppliedLimits {
    pub(super) fn new<'a>(
        gate: &Tollgate,
        routes: impl Iterator<Item = &'a RouteLimit>,
        settings: &Settings,
    ) -> Result<AppliedLimits, Error> {
        let mut limits = Vec::new();
        let mut add = |limit: AppliedLimit| {
            limits.push(Slot::new(limit));
            limits.len() - 1
        };
        let mut of_routes = Vec::new();
        for route in routes {
            let settle = route.settle();
            of_routes.push(match route.limit() {
                Some(name) => {
                    OfRoute::One(add(AppliedLimit::of_policy(gate, gate.limit(name)?, settle, settings)?))
                }
                None => {
                    let policy = gate.policy();
                    let names = policy.rules().iter().map(|rule| rule.name());
                    let known = names.filter_map(|name| {
                        let limit = gate.limit(name).ok()?;
                        let limit = AppliedLimit::of_policy(gate, limit, settle, settings).ok()?;
                        Some((name.to_owned(), add(limit)))
                    });
                    OfRoute::Chosen(known.collect(), settle.clone())
                }
            });
        }
        Ok(AppliedLimits { limits, routes: of_routes })
    }

    /// The limit of a route limit: the one that it names, or the one that was chosen for the request. An error if there is no
    /// such limit.
    #[inline]
    pub(super) fn find(
        &self,
        inner: &Inner,
        route: usize,
        chosen: Option<&RequestLimit<'_>>,
    ) -> Result<Which, Error> {
        match (&self.routes[route], chosen) {
            (OfRoute::One(index), _) => self.current(inner, *index),
            (OfRoute::Chosen(known, settle), Some(limit)) => self.chosen(inner, known, settle, limit),
            (OfRoute::Chosen(..), None) => Err(Error::call("no limit was chosen for the request")),
        }
    }

    /// The limit that was chosen for a request.
    fn chosen(
        &self,
        inner: &Inner,
        known: &HashMap<String, usize>,
        settle: &Settle,
        limit: &RequestLimit<'_>,
    ) -> Result<Which, Error> {
        if let RequestLimit::Chosen(chosen) = limit
            && let Choice::Handle(limit) = &chosen.0
        {
            let limit = AppliedLimit::new(&inner.gate, limit.clone(), settle, &inner.settings)?;
            return Ok(Which::OfRequest(Arc::new(limit)));
        }
        let name = limit.name();
        if let Some(index) = known.get(name) {
            return self.current(inner, *index);
        }
        // The error says why: the limit is unknown, or it cannot be settled.
        let limit = AppliedLimit::new(&inner.gate, inner.gate.limit(name)?, settle, &inner.settings)?;
        Ok(Which::OfRequest(Arc::new(limit)))
    }

    /// A limit of the policy, in its current form.
    #[inline]
    fn current(&self, inner: &Inner, index: usize) -> Result<Which, Error> {
        let slot = &self.limits[index];
        match slot.built.limit.entry.is_current() {
            true => Ok(Which::Known(index)),
            false => slot.reloaded(inner).map(Which::OfRequest),
        }
    }

    pub(super) fn get<'a>(&'a self, which: &'a Which) -> &'a AppliedLimit {
        match which {
            Which::Known(index) => &self.limits[*index].built,
            Which::OfRequest(limit) => limit,
        }
    }
}
