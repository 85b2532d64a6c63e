//! One limit on some requests: who pays, how much, and what is corrected once the answer is known.

use std::fmt;
use std::sync::Arc;

use http::{Extensions, HeaderMap, HeaderName, StatusCode};
use tollgate_kernel::{Cost, Limit, Micros, Outcome, Strategy};

use super::head::Head;
use super::marks::Sheet;
use super::payer::{Payer, Source};
use super::route::{Matcher, Route};
use crate::charge::NamedLimit;
use crate::error::Error;
use crate::headers::{Format, Said, Unit};
use crate::limiter::Limiter;
use crate::policy::Allowance;
use crate::tollgate::Tollgate;

/// One limit on some requests: its name, who pays and how much.
///
/// ```
/// use tollgate::http::{Payer, Toll};
///
/// // One unit of `per-user` for each request.
/// let users = Toll::new("per-user", Payer::header("x-user"));
/// // A search costs as much as it asks for.
/// let search = Toll::new("search", Payer::client())
///     .cost_by(|request| if request.uri().query().is_some_and(|query| query.contains("deep")) { 5 } else { 1 });
/// // Only failed logins count.
/// let logins = Toll::new("logins", Payer::client()).only_if(|answer| answer.status() == 401);
/// // A megabyte is set aside, and what was really sent is charged.
/// let bytes = Toll::new("bytes", Payer::client()).cost(1_000_000).by_bytes_sent();
/// ```
///
/// What is corrected afterwards is *reserved* before, so that a thousand requests at once cannot all pass before the first is
/// answered. A request that is given up before its answer is known stays charged as reserved: hanging up saves nobody anything.
#[derive(Clone)]
pub struct Toll {
    limit: String,
    payer: Payer,
    cost: CostOf,
    settle: Settle,
}

#[derive(Clone)]
enum CostOf {
    Fixed(u64),
    By(Arc<dyn Fn(&Head<'_>) -> u64 + Send + Sync>),
}

/// What is corrected once the answer is known.
#[derive(Clone)]
pub(super) enum Settle {
    Nothing,
    /// By the head of the answer; `None` leaves the charge as it is.
    ByHead(Actual),
    /// By the bytes of its body.
    ByBytes,
}

/// What an answer truly cost.
type Actual = Arc<dyn Fn(&Answer<'_>) -> Option<u64> + Send + Sync>;

impl Toll {
    /// One unit for each request under the limit of that name.
    pub fn new(limit: impl Into<String>, payer: Payer) -> Toll {
        Toll { limit: limit.into(), payer, cost: CostOf::Fixed(1), settle: Settle::Nothing }
    }

    /// The namespaces of the keys that it charges.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = &str> {
        self.payer.namespaces()
    }

    /// So much for each request.
    #[must_use]
    pub fn cost(self, cost: u64) -> Toll {
        Toll { cost: CostOf::Fixed(cost), ..self }
    }

    /// As much as the function says for each request; where it says zero, this limit is not asked.
    #[must_use]
    pub fn cost_by(self, cost: impl Fn(&Head<'_>) -> u64 + Send + Sync + 'static) -> Toll {
        Toll { cost: CostOf::By(Arc::new(cost)), ..self }
    }

    /// Charged only if the answer is such; else it is given back. The answer's own fields tell how the caller stood before that.
    #[must_use]
    pub fn only_if(self, counts: impl Fn(&Answer<'_>) -> bool + Send + Sync + 'static) -> Toll {
        self.settled_by(move |answer| (!counts(answer)).then_some(0))
    }

    /// Charged what the function says of the answer; `None` leaves the charge as it was.
    #[must_use]
    pub fn settled_by(self, actual: impl Fn(&Answer<'_>) -> Option<u64> + Send + Sync + 'static) -> Toll {
        Toll { settle: Settle::ByHead(Arc::new(actual)), ..self }
    }

    /// Charged the whole number that a header field of the answer holds; without one the charge stays as it was.
    #[must_use]
    pub fn settled_by_header(self, name: HeaderName) -> Toll {
        self.settled_by(move |answer| answer.headers().get(&name)?.to_str().ok()?.trim().parse().ok())
    }

    /// Charged the bytes of the answer's body, as many as were handed on; the cost is what is set aside before.
    #[must_use]
    pub fn by_bytes_sent(self) -> Toll {
        Toll { settle: Settle::ByBytes, ..self }
    }

    /// Made ready for the requests of a route.
    pub(super) fn compile(
        &self,
        route: &Route,
        gate: &Tollgate,
        most_delay: Micros,
        format: &Format,
    ) -> Result<Post, Error> {
        let limit = gate.limit(&self.limit)?;
        let entry = limit.entry.clone();
        let wrong = |why: String| Error::call(format!("the toll on `{}`: {why}", self.limit));
        if let CostOf::Fixed(0) = self.cost {
            return Err(wrong("a cost must be at least 1".to_owned()));
        }
        let route = route.compile()?;
        let source = self.payer.compile(&route).map_err(|error| wrong(error.to_string()))?;
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
        let is_lease = lease.is_some();
        let may_wait_long =
            limits().any(|limit| limit.strategy() == Strategy::LeakyBucket && limit.window() > most_delay);
        if is_lease && !matches!(self.settle, Settle::Nothing) {
            return Err(wrong(
                "a concurrency limit is given back when the answer is done, and not settled".to_owned(),
            ));
        }
        let is_held = is_lease || may_wait_long || !matches!(self.settle, Settle::Nothing);
        // What is held, or may be held back, has more to say than its counters.
        let straight = gate.local(&limit).ok().filter(Limiter::is_fast);
        let straight = straight.filter(|_| !is_held && !limits().any(is(Strategy::LeakyBucket)));
        let unit = match (&self.settle, is_lease) {
            (Settle::ByBytes, _) => Some(Unit::ContentBytes),
            (_, true) => Some(Unit::ConcurrentRequests),
            _ => None,
        };
        let mut post = Post {
            route,
            source,
            limit,
            cost: self.cost.clone(),
            settle: self.settle.clone(),
            lease,
            is_held,
            straight,
            unit,
            sheet: None,
        };
        if let (Some(_), Allowance::Limited(limit)) = (&post.straight, entry.rule.allowance()) {
            let fresh = Outcome { capacity: limit.capacity(), ..Outcome::UNLIMITED };
            post.sheet = Sheet::new(format, &post.said(Cost::ONE, fresh));
        }
        Ok(post)
    }
}

impl fmt::Debug for Toll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Toll").field("limit", &self.limit).field("payer", &self.payer).finish_non_exhaustive()
    }
}

/// A toll that is ready to be taken.
pub(super) struct Post {
    pub(super) route: Matcher,
    pub(super) source: Source,
    pub(super) limit: NamedLimit,
    cost: CostOf,
    pub(super) settle: Settle,
    /// How long a lease lasts, where it gives any: it is given back when the answer is done.
    pub(super) lease: Option<Micros>,
    /// Charged in a way that can be corrected.
    pub(super) is_held: bool,
    /// The short way, where the counters are in this process and a charge need only ask them.
    pub(super) straight: Option<Limiter>,
    pub(super) unit: Option<Unit>,
    /// What is told of it on the straight way.
    pub(super) sheet: Option<Sheet>,
}

impl Post {
    /// What a request costs here; `None` if nothing.
    pub(super) fn cost(&self, head: &Head<'_>) -> Option<Cost> {
        match &self.cost {
            CostOf::Fixed(cost) => Cost::new(*cost),
            CostOf::By(by) => Cost::new(by(head)),
        }
    }

    /// What is told of an answer of this limit, where no override applies and it does not only watch.
    pub(super) fn said(&self, cost: Cost, outcome: Outcome) -> Said<'_> {
        Said {
            name: self.limit.name(),
            limit: self.limit.entry.newest().base.limit(),
            cost: cost.get(),
            outcome,
            shadow: false,
            unit: self.unit,
        }
    }
}

/// An answer as settlements see it: everything but its body.
pub struct Answer<'a> {
    pub(super) status: StatusCode,
    pub(super) headers: &'a HeaderMap,
    pub(super) extensions: &'a Extensions,
}

impl Answer<'_> {
    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Its header fields.
    pub fn headers(&self) -> &HeaderMap {
        self.headers
    }

    /// What the service has noted on it.
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.extensions.get()
    }
}
