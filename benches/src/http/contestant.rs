//! Who takes part: one layer each, set up as its documentation shows, with a limit that nobody can reach.
//!
//! All of them stand before the same service and have the same keys, by the header field `x-key`. All are served with
//! axum's `ConnectInfo`, which only the one that pays by address looks at, so that what differs is the layer alone.

use std::convert::Infallible;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use governor::middleware::{NoOpMiddleware, StateInformationMiddleware};
use http::{HeaderName, Request, Response};
use tollgate::headers::Format;
use tollgate::http::LimitLayer;
use tollgate::route::{KeyExtractor, Route, RouteLimit};
use tollgate::{Limit, Tollgate};
use tower::layer::util::Identity;
use tower::{Layer, Service};
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::KeyExtractor as GovernorKey;
use tower_governor::{GovernorError, GovernorLayer};

use super::direct::{self, Slice};

pub(crate) const NONE: &str = "none";
pub(crate) const EMPTY: &str = "empty layer";
pub(crate) const TOLLGATE: &str = "tollgate";
pub(crate) const TOLLGATE_OLD: &str = "tollgate-x-headers";
pub(crate) const TOLLGATE_SILENT: &str = "tollgate-no-headers";
pub(crate) const TOLLGATE_THREE: &str = "tollgate-3";
pub(crate) const GOVERNOR: &str = "tower_governor";
pub(crate) const GOVERNOR_SILENT: &str = "tower_governor-no-headers";

/// The header with the key. Parsed once for all, because a name that is given as text would be parsed for each request.
pub(crate) static KEY: HeaderName = HeaderName::from_static("x-key");

/// How many keys there are.
pub(crate) const KEYS: usize = 1_000;

/// What the service answers.
const TEXT: &str = "Hello, World!";

/// So many, and as many a second: what is never denied. Both say it with ten digits.
const PLENTY: u32 = 1_000_000_000;

/// How much a key may ask for at once: a limit as services have them, so that its headers are of the usual length.
const BURST: u32 = 100;

/// Who takes part.
pub(crate) struct Contestant {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    /// How many header fields its answers have that tell how the caller stands.
    pub(crate) fields: usize,
    layer: Chosen,
}

enum Chosen {
    None,
    Empty,
    Tollgate(LimitLayer),
    Governor(GovernorLayer<ByKey, StateInformationMiddleware, Body>),
    GovernorSilent(GovernorLayer<ByKey, NoOpMiddleware, Body>),
}

impl Contestant {
    /// The service, to be served.
    pub(crate) fn router(&self) -> Router {
        let router = Router::new().route("/", get(|| async { TEXT }));
        match &self.layer {
            Chosen::None => router,
            Chosen::Empty => router.layer(Identity::new()),
            Chosen::Tollgate(layer) => router.layer(layer.clone().for_axum()),
            Chosen::Governor(layer) => router.layer(layer.clone()),
            Chosen::GovernorSilent(layer) => router.layer(layer.clone()),
        }
    }

    /// So many calls of a service that only answers, behind the layer.
    pub(crate) fn call(&self, keys: &direct::Keys, calls: usize) -> Slice {
        match &self.layer {
            Chosen::None | Chosen::Empty => direct::slice(Constant, keys, calls, self.fields),
            Chosen::Tollgate(layer) => direct::slice(layer.layer(Constant), keys, calls, self.fields),
            Chosen::Governor(layer) => direct::slice(layer.layer(Constant), keys, calls, self.fields),
            Chosen::GovernorSilent(layer) => direct::slice(layer.layer(Constant), keys, calls, self.fields),
        }
    }
}

/// Everybody, in the order of the tables.
pub(crate) fn all() -> Result<Vec<Contestant>, String> {
    let by_key = || KeyExtractor::header(KEY.as_str());
    let user = || [RouteLimit::new("user", by_key())];
    let address = [RouteLimit::new("user", KeyExtractor::ip())];
    let three = [
        RouteLimit::new("global", KeyExtractor::constant("all")),
        RouteLimit::new("route", KeyExtractor::constant("all")).on(Route::get("/")),
        RouteLimit::new("user", by_key()),
    ];
    let ours = |name, about, fields, format, routes: &[RouteLimit]| {
        let layer = limits(format, routes).map_err(|error| format!("building `{name}`: {error}"))?;
        Ok::<_, String>(Contestant { name, about, fields, layer: Chosen::Tollgate(layer) })
    };
    let mut builder = GovernorConfigBuilder::default().key_extractor(ByKey);
    builder.per_nanosecond(1).burst_size(BURST);
    let unbuilt = || "building `tower_governor`: its settings were refused".to_string();
    let reported = builder.use_headers().finish().ok_or_else(unbuilt)?;
    let silent = builder.finish().ok_or_else(unbuilt)?;
    let both = Format::default();
    let old = Format { draft: false, ..both };
    Ok(vec![
        Contestant { name: NONE, about: "the service alone", fields: 0, layer: Chosen::None },
        Contestant {
            name: EMPTY,
            about: "a layer that does nothing: what axum takes for having one",
            fields: 0,
            layer: Chosen::Empty,
        },
        ours(TOLLGATE, "one limit by x-key, X-RateLimit-* and the draft's fields", 5, both, &user())?,
        ours(TOLLGATE_OLD, "the same, X-RateLimit-* alone", 3, old, &user())?,
        ours(TOLLGATE_SILENT, "the same, telling nothing", 0, Format::none(), &user())?,
        ours("tollgate-ip", "one limit by the client's address, which is one here", 5, both, &address)?,
        ours(TOLLGATE_THREE, "three limits in one charge: all, the route, x-key", 5, both, &three)?,
        Contestant {
            name: GOVERNOR,
            about: "one limit by x-key, two fields",
            fields: 2,
            layer: Chosen::Governor(GovernorLayer::new(reported)),
        },
        Contestant {
            name: GOVERNOR_SILENT,
            about: "the same, telling nothing",
            fields: 0,
            layer: Chosen::GovernorSilent(GovernorLayer::new(silent)),
        },
    ])
}

fn limits(format: Format, routes: &[RouteLimit]) -> Result<LimitLayer, tollgate::Error> {
    let limit = Limit::token_bucket(format!("{PLENTY}/s"), u64::from(BURST))?;
    let gate = ["global", "route", "user"]
        .into_iter()
        .fold(Tollgate::builder(), |gate, name| gate.limit(name, limit));
    LimitLayer::builder(&gate.build()?).headers(format).limits(routes.iter().cloned()).build()
}

/// How tower_governor finds the key.
#[derive(Clone, Copy)]
struct ByKey;

impl GovernorKey for ByKey {
    type Key = String;

    fn extract<T>(&self, request: &Request<T>) -> Result<String, GovernorError> {
        let key = request.headers().get(&KEY).and_then(|key| key.to_str().ok());
        key.map(str::to_owned).ok_or(GovernorError::UnableToExtractKey)
    }
}

/// A service that only answers.
#[derive(Clone, Copy)]
struct Constant;

impl Service<Request<Body>> for Constant {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        std::future::ready(Ok(Response::new(Body::empty())))
    }
}
