//! Finds the charges of a request by its route limits, before anything is charged.

use std::ops::Deref;

use bytes::Bytes;
use http::{Request, Response};
use smallvec::SmallVec;
use tollgate_kernel::Cost;

use super::applied::{AppliedLimit, Which};
use super::layer::Inner;
use super::refusal::{self, Protocol, Refusal};
use crate::charge::Charge;
use crate::error::Error;
use crate::key::{KeyRef, KeyRoom, RoomKey};
use crate::problem::Reason;
use crate::route::{NoKey, RequestHead, RequestLimit};

/// The charge of a request under one limit. Without a key it is denied.
pub(super) struct RouteCharge<'k> {
    which: Which,
    key: Option<RoomKey<'k>>,
    pub(super) cost: Cost,
}

/// The charges of a request under all its limits.
pub(super) struct RouteCharges<'k> {
    charges: SmallVec<[RouteCharge<'k>; 4]>,
    room: KeyRoom,
}

impl RouteCharge<'_> {
    /// The limit that applies.
    #[inline]
    pub(super) fn limit<'a>(&'a self, inner: &'a Inner) -> &'a AppliedLimit {
        inner.limits.get(&self.which)
    }

    /// Which limit this is, for later steps.
    pub(super) fn which(&self) -> Which {
        self.which.clone()
    }
}

impl<'k> RouteCharges<'k> {
    #[inline]
    pub(super) fn new() -> RouteCharges<'k> {
        RouteCharges { charges: SmallVec::new(), room: KeyRoom::new() }
    }

    /// The canonical text of the key of one of them.
    #[inline]
    pub(super) fn key<'a>(&'a self, route_charge: &'a RouteCharge<'_>) -> Option<&'a str> {
        route_charge.key.as_ref().map(|key| self.room.text(key))
    }

    /// As the engine charges one of them: without a key, it is denied as a malformed one is.
    pub(super) fn charge<'a>(&'a self, inner: &'a Inner, route_charge: &'a RouteCharge<'_>) -> Charge<'a> {
        let key = self.key(route_charge).map_or_else(KeyRef::not_found, KeyRef::canonical);
        Charge::new(&route_charge.limit(inner).limit, key).cost(route_charge.cost.get())
    }

    /// The same, for a store that is waited for.
    pub(super) fn into_owned(self) -> RouteCharges<'static> {
        let RouteCharges { charges, mut room } = self;
        let mut owned = |RouteCharge { which, key, cost }: RouteCharge<'_>| RouteCharge {
            which,
            key: key.map(|key| room.keep(key)),
            cost,
        };
        let charges = charges.into_iter().map(&mut owned).collect();
        RouteCharges { charges, room }
    }
}

impl<'k> Deref for RouteCharges<'k> {
    type Target = [RouteCharge<'k>];

    #[inline]
    fn deref(&self) -> &[RouteCharge<'k>] {
        &self.charges
    }
}

/// Adds the charges of a request to `route_charges`; none, if no limit applies to it. They are filled in place: moving them costs more
/// than filling them. An error is the response to a request that cannot be charged.
#[inline]
pub(super) fn find<'a, B>(
    inner: &'a Inner,
    request: &'a Request<B>,
    route_charges: &mut RouteCharges<'a>,
) -> Result<(), Box<Response<Bytes>>> {
    let head = inner.routes.head(request).map_err(|error| Box::new(refusal::bad_path(&error)))?;
    if inner.is_skipped(&head) {
        return Ok(());
    }
    find_charges(inner, &head, route_charges).map_err(|stop| stop.response(inner, request))
}

#[inline]
fn find_charges<'a>(
    inner: &'a Inner,
    head: &RequestHead<'a>,
    route_charges: &mut RouteCharges<'a>,
) -> Result<(), Stop> {
    for (index, route, cost) in inner.routes.matching(head) {
        // Finds the key first: a request that may go without a key, and has none, is not charged, whatever its limit is.
        let Some(key) = route.find_key(head, &mut route_charges.room) else { continue };
        let chosen = match route.is_chosen() {
            true => Some(route.find_limit(head).ok_or(Stop::NoLimit)?),
            false => None,
        };
        let which = inner.limits.find(inner, index, chosen.as_ref()).map_err(Stop::Unknown)?;
        let name = || chosen.as_ref().map_or(route.name(), RequestLimit::name);
        let key = key.map_err(|no_key| warn(inner, name(), &no_key)).ok();
        route_charges.charges.push(RouteCharge { which, key, cost });
    }
    Ok(())
}

/// Why a request is answered before anything is charged.
enum Stop {
    /// No limit was chosen for it.
    NoLimit,
    /// The limit that was chosen cannot be applied.
    Unknown(Error),
}

impl Stop {
    #[cold]
    fn response<B>(self, inner: &Inner, request: &Request<B>) -> Box<Response<Bytes>> {
        let protocol = Protocol::of(request);
        let refusal = match self {
            Stop::NoLimit => {
                if let Some(count) = inner.uncharged.count() {
                    tracing::warn!(count, "denied a request for which no limit was chosen");
                }
                Refusal::new(protocol, &[], Reason::NoKey)
            }
            Stop::Unknown(error) => {
                if let Some(count) = inner.undecided.count() {
                    tracing::error!(count, "refused a request whose limit cannot be applied: {error}");
                }
                Refusal::undecided(protocol)
            }
        };
        Box::new(refusal.answer(inner.responder.as_ref(), Default::default()))
    }
}

/// Logs, at most once a second, that a request was denied because it has no key.
#[cold]
fn warn(inner: &Inner, limiter: &str, no_key: &NoKey) {
    if let Some(count) = inner.uncharged.count() {
        tracing::warn!(limiter, count, "denied a request without a key: {no_key}");
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::time::Duration;

    use http::{Request, Response};
    use tollgate_store::{MemoryOptions, MemoryStore};
    use tower::{Layer, Service};

    use crate::http::LimitLayer;
    use crate::key::parsed;
    use crate::route::{KeyExtractor, Route, RouteLimit};
    use crate::{Limit, Tollgate};

    /// As `src/tollgate/tests.rs` has it for calls: whatever the store, no key of a request is parsed twice.
    #[tokio::test]
    async fn a_request_parses_none_of_its_keys_twice() {
        let builder = || {
            let hour = Duration::from_secs(3_600);
            let limits = ["user", "id", "all"].map(|name| (name, Limit::fixed_window(100, hour).unwrap()));
            limits.into_iter().fold(Tollgate::builder(), |gate, (name, limit)| gate.limit(name, limit))
        };
        let store = MemoryStore::new(MemoryOptions { sweep_every: None, ..MemoryOptions::default() });
        let gates = [builder().build().unwrap(), builder().store(store).connect().await.unwrap()];
        for (gate, place) in gates.into_iter().zip(["in this process", "in another store"]) {
            let routes = [
                RouteLimit::new("user", KeyExtractor::header("x-user")),
                RouteLimit::new("id", KeyExtractor::path_parameter("id")).on(Route::at("/users/{id}")),
                RouteLimit::new("all", KeyExtractor::constant("all")),
            ];
            let fine = async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new()));
            let mut service = LimitLayer::new(&gate, routes).unwrap().layer(tower::service_fn(fine));
            for (path, user, keys) in
                [("/", "a:b", 2), ("/users/c%3Ad", "ann", 3), ("/users/c%3Ad", "ann", 3)]
            {
                let request = Request::get(path).header("x-user", user).body(()).unwrap();
                parsed();
                assert_eq!(service.call(request).await.unwrap().status(), 200, "{place}: {path}");
                assert!(parsed() <= keys, "{place}: {path}");
            }
            assert_eq!(gate.status("user", "x-user:ann").await.unwrap().used(), 2, "{place}");
            assert_eq!(gate.status("id", "id:c%3Ad").await.unwrap().used(), 2, "{place}");
        }
    }
}
