//! A limit on the requests of one route: its key, its cost, and how the response corrects the charge.

use std::fmt;
use std::sync::Arc;

use http::{Extensions, HeaderMap, HeaderName, StatusCode};

use super::key::KeyExtractor;
use super::pattern::Route;
use super::request::RequestHead;
use crate::charge::NamedLimit;

/// A limit on the requests that match a route: the limit's name, where the key is found, and the cost.
///
/// ```
/// use tollgate::route::{KeyExtractor, Route, RouteLimit};
///
/// // Each request costs one unit of `per-user`.
/// let users = RouteLimit::new("per-user", KeyExtractor::header("x-user"));
/// // Only failed logins count.
/// let logins = RouteLimit::new("logins", KeyExtractor::ip()).on(Route::post("/login")).count_if(|status| status == 401);
/// // A search costs as much as it asks for.
/// let search = RouteLimit::new("search", KeyExtractor::ip())
///     .cost_by(|request| if request.query().is_some_and(|query| query.contains("deep")) { 5 } else { 1 });
/// // Reserves a megabyte and charges the bytes that were sent.
/// let bytes = RouteLimit::new("bytes", KeyExtractor::ip()).cost(1_000_000).settle_by_bytes_sent();
/// ```
///
/// A charge that the response corrects is *reserved* first, so that a thousand requests at once cannot all pass before the first
/// one is answered. A request that is dropped before its response stays charged as reserved.
#[derive(Clone)]
pub struct RouteLimit {
    pub(super) limit: LimitOf,
    pub(super) key: KeyExtractor,
    pub(super) route: Route,
    pub(super) cost: CostOf,
    pub(super) settle: Settle,
}

/// Which limit applies.
#[derive(Clone)]
pub(super) enum LimitOf {
    Named(String),
    Chosen(Choose),
}

type Choose = Arc<dyn Fn(&RequestHead<'_>) -> Option<ChosenLimit> + Send + Sync>;

#[derive(Clone)]
pub(super) enum CostOf {
    Fixed(u64),
    By(Arc<dyn Fn(&RequestHead<'_>) -> u64 + Send + Sync>),
}

/// How the response corrects a charge.
#[derive(Clone)]
pub(crate) enum Settle {
    Nothing,
    /// The charge is given back unless the response has one of these statuses.
    ByStatus(Vec<StatusCode>),
    /// By the head of the response; `None` leaves the charge as it is.
    ByHead(Actual),
    /// By the bytes of its body.
    ByBytes,
}

/// The actual cost of a request, from its response.
type Actual = Arc<dyn Fn(&ResponseHead<'_>) -> Option<u64> + Send + Sync>;

impl Settle {
    /// The actual cost according to the response head; `None` leaves the charge as it is.
    pub(crate) fn by_head(&self, response: &ResponseHead<'_>) -> Option<u64> {
        match self {
            Settle::ByStatus(counted) => (!counted.contains(&response.status)).then_some(0),
            Settle::ByHead(actual) => actual(response),
            Settle::Nothing | Settle::ByBytes => None,
        }
    }
}

/// A limit that was chosen for one request: a limit of the policy by its name, or a [`NamedLimit`], which
/// [`Tollgate::ad_hoc`](crate::Tollgate::ad_hoc) makes from numbers of the application.
#[derive(Clone, Debug)]
pub struct ChosenLimit(pub(crate) Choice);

#[derive(Clone, Debug)]
pub(crate) enum Choice {
    Name(std::borrow::Cow<'static, str>),
    Handle(NamedLimit),
}

impl From<&'static str> for ChosenLimit {
    fn from(name: &'static str) -> ChosenLimit {
        ChosenLimit(Choice::Name(name.into()))
    }
}

impl From<String> for ChosenLimit {
    fn from(name: String) -> ChosenLimit {
        ChosenLimit(Choice::Name(name.into()))
    }
}

impl From<NamedLimit> for ChosenLimit {
    fn from(limit: NamedLimit) -> ChosenLimit {
        ChosenLimit(Choice::Handle(limit))
    }
}

impl RouteLimit {
    fn of(limit: LimitOf, key: KeyExtractor) -> RouteLimit {
        RouteLimit { limit, key, route: Route::any(), cost: CostOf::Fixed(1), settle: Settle::Nothing }
    }

    /// The limit of this name, on every request; each costs one unit.
    pub fn new(limit: impl Into<String>, key: KeyExtractor) -> RouteLimit {
        RouteLimit::of(LimitOf::Named(limit.into()), key)
    }

    /// A limit that is chosen for each request: by the name of a limit, or with numbers of the application. A request for which
    /// the function returns `None` is denied, and nothing is charged.
    ///
    /// ```
    /// use tollgate::route::{KeyExtractor, RouteLimit};
    ///
    /// #[derive(Clone)]
    /// enum Plan { Free, Pro } // put into the extensions by the layer that authenticates
    ///
    /// let plan = RouteLimit::choose(
    ///     |request| match request.extension()? {
    ///         Plan::Free => Some("plan-free"),
    ///         Plan::Pro => Some("plan-pro"),
    ///     },
    ///     KeyExtractor::user(),
    /// );
    /// ```
    pub fn choose<L: Into<ChosenLimit>>(
        choose: impl Fn(&RequestHead<'_>) -> Option<L> + Send + Sync + 'static,
        key: KeyExtractor,
    ) -> RouteLimit {
        RouteLimit::of(LimitOf::Chosen(Arc::new(move |request| choose(request).map(Into::into))), key)
    }

    /// Only on the requests of this route; by default on every request.
    #[must_use]
    pub fn on(self, route: Route) -> RouteLimit {
        RouteLimit { route, ..self }
    }

    /// Each request costs this much.
    #[must_use]
    pub fn cost(self, cost: u64) -> RouteLimit {
        RouteLimit { cost: CostOf::Fixed(cost), ..self }
    }

    /// The cost is what the function returns; zero means that the limit does not apply to this request.
    #[must_use]
    pub fn cost_by(self, cost: impl Fn(&RequestHead<'_>) -> u64 + Send + Sync + 'static) -> RouteLimit {
        RouteLimit { cost: CostOf::By(Arc::new(cost)), ..self }
    }

    /// Counts only requests whose response has such a status; others are given back. The rate-limit headers of the response show
    /// the state before that.
    #[must_use]
    pub fn count_if(self, counts: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> RouteLimit {
        self.settle_by(move |response| (!counts(response.status())).then_some(0))
    }

    /// Counts only requests whose response has one of these statuses, as `count_if_status` of `[[routes]]` does.
    #[must_use]
    pub fn count_if_status(self, statuses: impl IntoIterator<Item = StatusCode>) -> RouteLimit {
        RouteLimit { settle: Settle::ByStatus(statuses.into_iter().collect()), ..self }
    }

    /// The actual cost is what the function returns for the response; `None` leaves the charge as it is.
    #[must_use]
    pub fn settle_by(
        self,
        actual: impl Fn(&ResponseHead<'_>) -> Option<u64> + Send + Sync + 'static,
    ) -> RouteLimit {
        RouteLimit { settle: Settle::ByHead(Arc::new(actual)), ..self }
    }

    /// Charges the whole number in a header field of the response; without one the charge stays as it was.
    #[must_use]
    pub fn settle_by_header(self, name: HeaderName) -> RouteLimit {
        self.settle_by(move |response| response.headers().get(&name)?.to_str().ok()?.trim().parse().ok())
    }

    /// Charges the bytes of the response's body that were sent; `cost` is reserved first.
    #[must_use]
    pub fn settle_by_bytes_sent(self) -> RouteLimit {
        RouteLimit { settle: Settle::ByBytes, ..self }
    }

    /// The name of the limit; `None` where it is chosen for each request.
    pub fn limit(&self) -> Option<&str> {
        match &self.limit {
            LimitOf::Named(name) => Some(name),
            LimitOf::Chosen(_) => None,
        }
    }

    /// Where the key is found.
    pub fn key(&self) -> &KeyExtractor {
        &self.key
    }

    /// Which requests it applies to.
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// The part of the response that the charge depends on; `None` if it depends on none. A caller without a response cannot
    /// apply this limit.
    pub fn needs_response(&self) -> Option<&'static str> {
        match self.settle {
            Settle::Nothing => None,
            Settle::ByStatus(_) => Some("it counts by the status of the response"),
            Settle::ByHead(_) => Some("it is settled by the response"),
            Settle::ByBytes => Some("it charges the bytes of the response"),
        }
    }

    /// What this limit needs that an access log lacks; `None` if a log has everything.
    pub fn not_in_access_logs(&self) -> Option<String> {
        let by_response = match self.settle {
            Settle::Nothing | Settle::ByBytes => None,
            // A log has the status, and a charge that is given back later is no single charge.
            Settle::ByStatus(_) | Settle::ByHead(_) => self.needs_response().map(str::to_owned),
        };
        let lacks = |what: String| format!("an access log does not have {what}");
        let by_request =
            || self.route.not_in_access_logs().or_else(|| self.key.not_in_access_logs()).map(lacks);
        by_response.or_else(by_request)
    }

    /// How the response corrects the charge.
    pub(crate) fn settle(&self) -> &Settle {
        &self.settle
    }

    /// The namespaces of the keys that it charges.
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &str> {
        self.key.namespaces()
    }
}

/// The route limit in words, without the limit: `POST /login, by ip`.
impl fmt::Display for RouteLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, by {}", self.route, self.key)?;
        match (&self.settle, &self.cost) {
            (Settle::ByBytes, _) => f.write_str(", costing the bytes sent")?,
            (_, CostOf::Fixed(1)) => {}
            (_, CostOf::Fixed(cost)) => write!(f, ", costing {cost}")?,
            (_, CostOf::By(_)) => f.write_str(", costing what a function returns")?,
        }
        if let Settle::ByStatus(statuses) = &self.settle {
            let statuses: Vec<&str> = statuses.iter().map(StatusCode::as_str).collect();
            write!(f, ", counting status {}", statuses.join(", "))?;
        }
        Ok(())
    }
}

impl fmt::Debug for RouteLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("RouteLimit");
        shown.field("limit", &self.limit()).field("key", &self.key).field("route", &self.route);
        shown.finish_non_exhaustive()
    }
}

/// Equal if they treat every request alike; functions are equal only to themselves.
impl PartialEq for RouteLimit {
    fn eq(&self, other: &RouteLimit) -> bool {
        let limit = match (&self.limit, &other.limit) {
            (LimitOf::Named(one), LimitOf::Named(other)) => one == other,
            (LimitOf::Chosen(one), LimitOf::Chosen(other)) => is_same(one, other),
            _ => false,
        };
        let cost = match (&self.cost, &other.cost) {
            (CostOf::Fixed(one), CostOf::Fixed(other)) => one == other,
            (CostOf::By(one), CostOf::By(other)) => is_same(one, other),
            _ => false,
        };
        let settle = match (&self.settle, &other.settle) {
            (Settle::Nothing, Settle::Nothing) | (Settle::ByBytes, Settle::ByBytes) => true,
            (Settle::ByStatus(one), Settle::ByStatus(other)) => one == other,
            (Settle::ByHead(one), Settle::ByHead(other)) => is_same(one, other),
            _ => false,
        };
        limit && cost && settle && self.key == other.key && self.route == other.route
    }
}

impl Eq for RouteLimit {}

fn is_same<T: ?Sized>(one: &Arc<T>, other: &Arc<T>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

/// A response as settlements see it: everything but its body.
pub struct ResponseHead<'a> {
    pub(crate) status: StatusCode,
    pub(crate) headers: &'a HeaderMap,
    pub(crate) extensions: &'a Extensions,
}

impl ResponseHead<'_> {
    /// Its status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Its header fields.
    pub fn headers(&self) -> &HeaderMap {
        self.headers
    }

    /// A value that the service has put into the response's extensions.
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.extensions.get()
    }
}
