//! A limit as the layer applies it to the requests of one route limit: what it asks of a charge, and what the response shows of
//! it. Worked out when the layer is built, or for a limit with numbers of the application when it is chosen.

use std::collections::HashMap;
use std::sync::Arc;

use tollgate_kernel::{Cost, Limit, Micros, Outcome, Strategy};

use super::layer::Inner;
use super::marks::Sheet;
use crate::ad_hoc::AdHoc;
use crate::error::Error;
use crate::gate::{Entry, Place};
use crate::headers::{Format, Said, Unit};
use crate::limiter::Limiter;
use crate::policy::Allowance;
use crate::registry::Tollgate;
use crate::route::{Choice, RequestLimit, RouteLimit, Settle};

/// A limit as the layer applies it.
pub(super) struct AppliedLimit {
    pub(super) entry: Arc<Entry>,
    pub(super) settle: Settle,
    /// How long a lease lasts, where the limit gives any: it is released when the response is done.
    pub(super) lease: Option<Micros>,
    /// Charged in a way that can be corrected.
    pub(super) is_held: bool,
    /// The fast path, where the counters are in this process and a charge need only ask them.
    pub(super) straight: Option<Limiter>,
    pub(super) unit: Option<Unit>,
    /// The rate-limit headers of the fast path.
    pub(super) sheet: Option<Sheet>,
}

/// The settings of the layer that matter to a limit.
pub(super) struct Settings {
    pub(super) most_delay: Micros,
    pub(super) format: Format,
}

impl AppliedLimit {
    fn named(
        gate: &Tollgate,
        name: &str,
        settle: &Settle,
        settings: &Settings,
    ) -> Result<AppliedLimit, Error> {
        let (entry, limiter) = (gate.entry(name)?.clone(), gate.limiter(name).ok());
        let mut applied = AppliedLimit::new(entry, limiter, settle, settings)?;
        if let (Some(_), Allowance::Limited(limit)) = (&applied.straight, applied.entry.rule.allowance()) {
            let fresh = Outcome { capacity: limit.capacity(), ..Outcome::UNLIMITED };
            applied.sheet = Sheet::new(&settings.format, &applied.said(Cost::ONE, fresh));
        }
        Ok(applied)
    }

    fn ad_hoc(
        gate: &Tollgate,
        limit: &AdHoc,
        settle: &Settle,
        settings: &Settings,
    ) -> Result<AppliedLimit, Error> {
        AppliedLimit::new(limit.shared_entry(gate)?, limit.limiter().cloned(), settle, settings)
    }

    fn new(
        entry: Arc<Entry>,
        limiter: Option<Limiter>,
        settle: &Settle,
        settings: &Settings,
    ) -> Result<AppliedLimit, Error> {
        let limits = || {
            let overrides = entry.rule.overrides().iter().map(|(_, allowance)| allowance);
            std::iter::once(entry.rule.allowance()).chain(overrides).filter_map(|allowance| match allowance {
                Allowance::Limited(limit) => Some(limit),
                Allowance::Unlimited | Allowance::Blocked => None,
            })
        };
        let is = |strategy: Strategy| move |limit: &Limit| limit.strategy() == strategy;
        let leases = limits().filter(|limit| limit.strategy() == Strategy::Concurrency);
        let lease = leases.map(|limit| limit.window()).min();
        let may_wait_long = limits()
            .any(|limit| limit.strategy() == Strategy::LeakyBucket && limit.window() > settings.most_delay);
        let is_settled = !matches!(settle, Settle::Nothing);
        if lease.is_some() && is_settled {
            return Err(Error::call(format!(
                "the route limit `{}`: a concurrency limit is released when the response is done, and not settled",
                entry.rule.name()
            )));
        }
        let is_held = lease.is_some() || may_wait_long || is_settled;
        // A charge that is held, or may be delayed, needs more than its counters.
        let straight = limiter.filter(Limiter::is_straight);
        let straight = straight.filter(|_| !is_held && !limits().any(is(Strategy::LeakyBucket)));
        let unit = match (settle, lease) {
            (Settle::ByBytes, _) => Some(Unit::ContentBytes),
            (_, Some(_)) => Some(Unit::ConcurrentRequests),
            _ => None,
        };
        Ok(AppliedLimit { settle: settle.clone(), lease, is_held, straight, unit, sheet: None, entry })
    }

    /// What the response shows of an outcome, where no override applies and the limit is not in shadow mode.
    pub(super) fn said(&self, cost: Cost, outcome: Outcome) -> Said<'_> {
        let limit = match &self.entry.base {
            Place::Counted { stored, .. } => Some(&stored.limit),
            Place::Unlimited | Place::Blocked => None,
        };
        let name = self.entry.rule.name();
        Said { name, limit, cost: cost.get(), outcome, shadow: false, unit: self.unit }
    }
}

/// All limits that the layer applies.
pub(super) struct AppliedLimits {
    limits: Vec<AppliedLimit>,
    /// For each route limit.
    routes: Vec<OfRoute>,
}

/// The limits of one route limit.
enum OfRoute {
    One(usize),
    /// By the name that is chosen. Those that cannot be applied here are left out.
    Chosen(HashMap<String, usize>, Settle),
}

/// Which limit applies to one charge of a request.
#[derive(Clone)]
pub(super) enum Which {
    Known(usize),
    /// One whose numbers came with the request.
    AdHoc(Arc<AppliedLimit>),
}

impl AppliedLimits {
    pub(super) fn new<'a>(
        gate: &Tollgate,
        routes: impl Iterator<Item = &'a RouteLimit>,
        settings: &Settings,
    ) -> Result<AppliedLimits, Error> {
        let mut limits = Vec::new();
        let mut add = |limit: AppliedLimit| {
            limits.push(limit);
            limits.len() - 1
        };
        let mut of_routes = Vec::new();
        for route in routes {
            let settle = route.settle();
            of_routes.push(match route.limit() {
                Some(name) => OfRoute::One(add(AppliedLimit::named(gate, name, settle, settings)?)),
                None => {
                    let names = gate.rules().iter().map(|rule| rule.name());
                    let known = names.filter_map(|name| {
                        let limit = AppliedLimit::named(gate, name, settle, settings).ok()?;
                        Some((name.to_owned(), add(limit)))
                    });
                    OfRoute::Chosen(known.collect(), settle.clone())
                }
            });
        }
        Ok(AppliedLimits { limits, routes: of_routes })
    }

    /// The limit that applies under a route limit; an error if there is none such.
    pub(super) fn find(&self, inner: &Inner, route: usize, limit: &RequestLimit<'_>) -> Result<Which, Error> {
        let (known, settle) = match &self.routes[route] {
            OfRoute::One(index) => return Ok(Which::Known(*index)),
            OfRoute::Chosen(known, settle) => (known, settle),
        };
        if let RequestLimit::Chosen(chosen) = limit
            && let Choice::AdHoc(limit) = &chosen.0
        {
            let limit = AppliedLimit::ad_hoc(&inner.gate, limit, settle, &inner.settings)?;
            return Ok(Which::AdHoc(Arc::new(limit)));
        }
        let name = limit.name();
        match known.get(name) {
            Some(index) => Ok(Which::Known(*index)),
            // Says why: there is no such limit, or it cannot be settled.
            None => match AppliedLimit::named(&inner.gate, name, settle, &inner.settings) {
                Err(error) => Err(error),
                Ok(limit) => Ok(Which::AdHoc(Arc::new(limit))),
            },
        }
    }

    pub(super) fn get<'a>(&'a self, which: &'a Which) -> &'a AppliedLimit {
        match which {
            Which::Known(index) => &self.limits[*index],
            Which::AdHoc(limit) => limit,
        }
    }
}
