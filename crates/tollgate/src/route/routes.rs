//! Compiled route limits: find the charges of each request.

use std::fmt;

use http::Request;
use tollgate_kernel::{Cost, MAX_COUNT};

use super::key::{CompiledKey, NoKey};
use super::limit::{Choice, ChosenLimit, CostOf, LimitOf, RouteLimit, Settle};
use super::path::BadPath;
use super::pattern::Matcher;
use super::request::{Described, RequestHead, RequestReader};
use crate::engine::MOST_LIMITS;
use crate::error::Error;
use crate::key::{Key, KeyRoom, RoomKey};

/// How many route limits there may be. Each request is compared with all of them.
const MOST_ROUTES: usize = 1_024;

/// Compiled route limits: they find the limits, keys and costs of a request.
///
/// ```
/// use tollgate::route::{KeyExtractor, Route, RouteLimit, Routes};
///
/// let routes = Routes::new([
///     RouteLimit::new("api", KeyExtractor::ip()).on(Route::below("/api")),
///     RouteLimit::new("login", KeyExtractor::ip()).on(Route::post("/login")),
/// ])?;
/// let request = routes.reader().recorded("203.0.113.7").target("POST", "/login?next=/");
/// let charges: Vec<_> = routes.charges(&request).map(|charge| (charge.route, charge.key.unwrap().to_string())).collect();
/// assert_eq!(charges, [(1, "ip:203.0.113.7".to_owned())]);
/// # Ok::<(), tollgate::Error>(())
/// ```
///
/// Every route limit whose route matches is charged. The caller charges all of them as one, or none.
#[derive(Default)]
pub struct Routes {
    reader: RequestReader,
    routes: Vec<Compiled>,
    needs_path: bool,
}

/// One route limit.
pub(crate) struct Compiled {
    source: RouteLimit,
    matcher: Matcher,
    /// It applies to every request, which need not be compared.
    is_on_all: bool,
    key: CompiledKey,
}

/// The charge of a request under one route limit.
#[derive(Debug)]
#[non_exhaustive]
pub struct RouteCharge<'a> {
    /// Which route limit, by its place in the list.
    pub route: usize,
    /// The limit; `None` if it is [chosen](RouteLimit::choose) for each request and none was chosen for this one, which is
    /// denied.
    pub limit: Option<RequestLimit<'a>>,
    /// The key; a request without one is denied, and nothing is charged.
    pub key: Result<Key<'a>, NoKey>,
    /// How much.
    pub cost: Cost,
}

/// The limit that applies to a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum RequestLimit<'a> {
    /// The limit that the route limit names.
    Named(&'a str),
    /// A limit that was chosen for this request. Boxed, because it is rare.
    Chosen(Box<ChosenLimit>),
}

impl Routes {
    /// Compiles route limits, in this order. Fails if a path, a header or a key makes no sense, or if they are too many.
    pub fn new(limits: impl IntoIterator<Item = RouteLimit>) -> Result<Routes, Error> {
        let routes = limits.into_iter().map(Compiled::new).collect::<Result<Vec<_>, Error>>()?;
        if routes.len() > MOST_ROUTES {
            let count = routes.len();
            return Err(Error::call(format!(
                "there may be at most {MOST_ROUTES} route limits, and there are {count}"
            )));
        }
        let on_all = routes.iter().filter(|route| route.is_on_all).count();
        if on_all > MOST_LIMITS {
            return Err(Error::call(format!(
                "a request may meet at most {MOST_LIMITS} limits, and {on_all} route limits apply to every request"
            )));
        }
        let needs_path = routes.iter().any(|route| route.matcher.needs_path());
        Ok(Routes { reader: RequestReader::new(), routes, needs_path })
    }

    /// How requests are read; by default the client is the peer.
    #[must_use]
    pub fn read_by(self, reader: RequestReader) -> Routes {
        Routes { reader, ..self }
    }

    /// How requests are read.
    pub fn reader(&self) -> &RequestReader {
        &self.reader
    }

    /// The route limits, in their order.
    pub fn limits(&self) -> impl ExactSizeIterator<Item = &RouteLimit> {
        self.routes.iter().map(|route| &route.source)
    }

    /// Whether there are no route limits.
    pub fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// Reads paths even if no route limit looks at them.
    pub(crate) fn reading_paths(self, needs_path: bool) -> Routes {
        Routes { needs_path: self.needs_path || needs_path, ..self }
    }

    /// A request as route limits see it; an error if its path has no one spelling and a route looks at paths.
    #[inline]
    pub fn head<'a, B>(&'a self, request: &'a Request<B>) -> Result<RequestHead<'a>, BadPath> {
        if self.needs_path { self.reader.head(request) } else { Ok(self.reader.head_without_path(request)) }
    }

    /// A request that a trusted proxy describes. Whether the peer is one is for the caller to check
    /// ([`RequestReader::trusts`]).
    pub fn described<'a>(&'a self, described: &Described<'a>) -> Result<RequestHead<'a>, BadPath> {
        self.reader.described(described, self.needs_path)
    }

    /// The charges of a request, under each route limit that applies to it.
    #[inline]
    pub fn charges<'r, 'a>(
        &'a self,
        request: &'r RequestHead<'a>,
    ) -> impl Iterator<Item = RouteCharge<'a>> + use<'r, 'a> {
        self.matching(request).filter_map(move |(index, route, cost)| {
            let mut room = KeyRoom::new();
            let key = route.find_key(request, &mut room)?.map(|key| room.key(key));
            Some(RouteCharge { route: index, limit: route.find_limit(request), key, cost })
        })
    }

    /// The route limits that apply to a request, with its cost under each. A request without a key may still turn out to need
    /// none. The request is then matched by that route.
    #[inline]
    pub(crate) fn matching<'r, 'a>(
        &'a self,
        request: &'r RequestHead<'a>,
    ) -> impl Iterator<Item = (usize, &'a Compiled, Cost)> + use<'r, 'a> {
        let matching = move |(index, route): (usize, &'a Compiled)| {
            if !route.is_on_all && !route.matcher.charges(request) {
                return None;
            }
            Some((index, route, route.cost(request.on_behalf_of(&route.matcher))?))
        };
        self.routes.iter().enumerate().filter_map(matching)
    }
}

impl Compiled {
    fn new(source: RouteLimit) -> Result<Compiled, Error> {
        let wrong = |why: String| match source.limit() {
            Some(limit) => Error::call(format!("the route limit `{limit}`: {why}")),
            None => Error::call(format!("a route limit whose limit is chosen: {why}")),
        };
        match source.cost {
            CostOf::Fixed(0) => return Err(wrong("a cost must be at least 1".to_owned())),
            CostOf::Fixed(cost) if cost > MAX_COUNT => {
                return Err(wrong(format!("a cost is at most {MAX_COUNT}")));
            }
            _ => {}
        }
        let matcher = source.route.compile().map_err(|error| wrong(error.to_string()))?;
        let key = source.key.compile(&matcher).map_err(|error| wrong(error.to_string()))?;
        let is_on_all = matcher.matches_all();
        Ok(Compiled { source, matcher, is_on_all, key })
    }

    /// The key of a request, written into `room` if it is joined from parts; `None` if the limit does not apply to the request.
    #[inline]
    pub(crate) fn find_key(
        &self,
        request: &RequestHead<'_>,
        room: &mut KeyRoom,
    ) -> Option<Result<RoomKey<'_>, NoKey>> {
        self.key.find(request, room).transpose()
    }

    /// The limit of a request; `None` if none was chosen.
    #[inline]
    pub(crate) fn find_limit(&self, request: &RequestHead<'_>) -> Option<RequestLimit<'_>> {
        match &self.source.limit {
            LimitOf::Named(name) => Some(RequestLimit::Named(name)),
            LimitOf::Chosen(choose) => choose(request).map(|chosen| RequestLimit::Chosen(Box::new(chosen))),
        }
    }

    /// Whether the limit is chosen for each request.
    #[inline]
    pub(crate) fn is_chosen(&self) -> bool {
        matches!(self.source.limit, LimitOf::Chosen(_))
    }

    /// The name of the limit, where it is not chosen for each request.
    pub(crate) fn name(&self) -> &str {
        self.source.limit().unwrap_or_default()
    }

    /// The cost of a request; `None` if it is zero.
    #[inline]
    fn cost(&self, request: &RequestHead<'_>) -> Option<Cost> {
        match (&self.source.settle, request.sent(), &self.source.cost) {
            // The response of a recorded request is known.
            (Settle::ByBytes, Some(sent), _) => Cost::new(sent.min(MAX_COUNT)),
            (_, _, CostOf::Fixed(cost)) => Cost::new(*cost),
            (_, _, CostOf::By(by)) => Cost::new(by(request)),
        }
    }
}

impl RequestLimit<'_> {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            RequestLimit::Named(name) => name,
            RequestLimit::Chosen(chosen) => match &chosen.0 {
                Choice::Name(name) => name,
                Choice::Handle(limit) => limit.name(),
            },
        }
    }
}

impl fmt::Debug for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.limits()).finish()
    }
}
