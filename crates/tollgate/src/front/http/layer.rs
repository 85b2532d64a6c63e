//! The layer: which requests are charged under which limits, put before a service.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, Response};
use ipnet::IpNet;
use tollgate_kernel::Micros;
use tower_layer::Layer;

use super::client::{ClientAddress, canonical_network};
use super::head::{Head, Identity};
use super::path::EncodedSeparators;
use super::refusal::{Refusal, Responder};
use super::route::{Matcher, Route};
use super::service::LimitService;
use super::toll::{Post, Toll};
use crate::engine::MOST_LIMITS;
use crate::error::Error;
use crate::headers::Format;
use crate::quiet::Quiet;
use crate::tollgate::Tollgate;

/// How long a request is held back at most, unless said.
const MOST_DELAY: Duration = Duration::from_secs(5);

/// How long an answer may take to be settled, unless said.
const SETTLE_WITHIN: Duration = Duration::from_secs(300);

/// Limits before a tower service: axum, tonic, hyper or any other.
///
/// ```
/// use std::time::Duration;
/// use tollgate::http::{LimitLayer, Payer, Route, Toll};
/// use tollgate::{Limit, Tollgate};
///
/// let gate = Tollgate::builder()
///     .limit("global", Limit::token_bucket("1000/s", 1000)?)
///     .limit("per-client", Limit::token_bucket("10/s", 20)?)
///     .limit("logins", Limit::fixed_window(5, Duration::from_secs(60))?)
///     .build()?;
/// let layer = LimitLayer::builder(&gate)
///     .toll(Route::any(), Toll::new("global", Payer::everyone()))
///     .toll(Route::any(), Toll::new("per-client", Payer::client()))
///     .toll(Route::post("/login"), Toll::new("logins", Payer::client()).only_if(|answer| answer.status() == 401))
///     .skip(Route::get("/healthz"))
///     .build()?;
/// # let _ = layer;
/// # Ok::<(), tollgate::Error>(())
/// ```
///
/// Every toll whose route matches is charged, all of them at once or none. What is over a limit is answered with 429 and never
/// reaches the service, and with 503 where it is refused only because a store failed and the limit is closed then; every other
/// answer says how the caller stands. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct LimitLayer {
    inner: Arc<Inner>,
}

/// What all services under one layer share.
pub(super) struct Inner {
    pub(super) gate: Tollgate,
    pub(super) posts: Vec<Post>,
    skips: Vec<Matcher>,
    skip_networks: Vec<IpNet>,
    skip_when: Vec<SkipWhen>,
    pub(super) identity: Identity,
    /// How paths are spelled, if any rule asks for them.
    pub(super) separators: Option<EncodedSeparators>,
    pub(super) format: Format,
    pub(super) most_delay: Micros,
    pub(super) settle_within: Micros,
    pub(super) responder: Option<Responder>,
    /// What is warned of at most once a second.
    pub(super) unpaid: Quiet,
    pub(super) undecided: Quiet,
    pub(super) unsettled: Quiet,
}

type SkipWhen = Arc<dyn Fn(&Head<'_>) -> bool + Send + Sync>;

impl LimitLayer {
    /// Starts a layer that charges limits of this registry.
    pub fn builder(gate: &Tollgate) -> LimitLayerBuilder {
        LimitLayerBuilder {
            gate: gate.clone(),
            tolls: Vec::new(),
            skips: Vec::new(),
            skip_networks: Vec::new(),
            skip_when: Vec::new(),
            identity: Identity { client: ClientAddress::peer(), peer_from: None },
            separators: EncodedSeparators::default(),
            format: Format::default(),
            most_delay: MOST_DELAY,
            settle_within: SETTLE_WITHIN,
            responder: None,
        }
    }
}

impl<S> Layer<S> for LimitLayer {
    type Service = LimitService<S>;

    fn layer(&self, service: S) -> LimitService<S> {
        LimitService::new(service, self.inner.clone())
    }
}

impl fmt::Debug for LimitLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayer").field("tolls", &self.inner.posts.len()).finish_non_exhaustive()
    }
}

impl Inner {
    /// Whether a request is not charged at all.
    pub(super) fn is_skipped(&self, head: &Head<'_>) -> bool {
        let is_from = |networks: &[IpNet]| {
            let client = head.client();
            client.is_some_and(|client| networks.iter().any(|network| network.contains(&client)))
        };
        self.skips.iter().any(|route| route.frees(head))
            || (!self.skip_networks.is_empty() && is_from(&self.skip_networks))
            || self.skip_when.iter().any(|skip| skip(head))
    }
}

/// Builds a [`LimitLayer`].
#[must_use]
pub struct LimitLayerBuilder {
    gate: Tollgate,
    tolls: Vec<(Route, Toll)>,
    skips: Vec<Route>,
    skip_networks: Vec<IpNet>,
    skip_when: Vec<SkipWhen>,
    identity: Identity,
    separators: EncodedSeparators,
    format: Format,
    most_delay: Duration,
    settle_within: Duration,
    responder: Option<Responder>,
}

impl LimitLayerBuilder {
    /// Charges a toll for the requests of a route. All tolls that match are charged together; a limit that is named twice is
    /// charged twice. Where one of the two is settled by the answer, both pay what the dearer of them does.
    pub fn toll(mut self, route: Route, toll: Toll) -> Self {
        self.tolls.push((route, toll));
        self
    }

    /// Lets the requests of a route pass, uncharged: health checks, metrics. Only a path that is written plainly is let pass, and
    /// only if axum has not matched it to another route.
    pub fn skip(mut self, route: Route) -> Self {
        self.skips.push(route);
        self
    }

    /// Lets requests pass, uncharged, whose client's address is in one of these networks.
    pub fn skip_from(mut self, networks: impl IntoIterator<Item = IpNet>) -> Self {
        self.skip_networks.extend(networks.into_iter().map(canonical_network));
        self
    }

    /// Lets requests pass, uncharged, of which the function says so.
    pub fn skip_when(mut self, skip: impl Fn(&Head<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.skip_when.push(Arc::new(skip));
        self
    }

    /// How the client's address is found; unless said, it is the peer's.
    pub fn client(mut self, client: ClientAddress) -> Self {
        self.identity.client = client;
        self
    }

    /// Where the peer's address is among a request's extensions; unless said, in a [`PeerAddress`](super::PeerAddress) or, with
    /// the feature `axum`, in axum's `ConnectInfo<SocketAddr>`.
    ///
    /// With tonic: `.peer_from(|extensions| extensions.get::<TcpConnectInfo>()?.remote_addr())`.
    pub fn peer_from(mut self, find: fn(&Extensions) -> Option<SocketAddr>) -> Self {
        self.identity.peer_from = Some(find);
        self
    }

    /// What to do with encoded separators in paths, where rules ask for paths; unless said, such requests are answered with 400.
    pub fn encoded_separators(mut self, separators: EncodedSeparators) -> Self {
        self.separators = separators;
        self
    }

    /// Which header fields tell the caller how it stands; unless said, `X-RateLimit-*` and those of the IETF's draft 10.
    pub fn headers(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    /// How long a leaky bucket may hold a request back; five seconds, unless said. What would have to wait longer is given back and
    /// denied, to be tried again when it would wait less. Metrics and logs count it as allowed, as the bucket did.
    pub fn most_delay(mut self, most: Duration) -> Self {
        self.most_delay = most;
        self
    }

    /// How long a charge can be settled after it was reserved; five minutes, unless said. An answer that takes longer leaves it
    /// as it was reserved.
    pub fn settle_within(mut self, within: Duration) -> Self {
        self.settle_within = within;
        self
    }

    /// Writes refusals in the service's own way. The status, fields and body of the answer are all its own; the fields that
    /// tell the caller how it stands are added.
    ///
    /// ```
    /// # use tollgate::http::{LimitLayer, Payer, Route, Toll};
    /// # use tollgate::{Limit, Tollgate};
    /// # let gate = Tollgate::builder().limit("api", Limit::token_bucket("10/s", 20)?).build()?;
    /// let layer = LimitLayer::builder(&gate)
    ///     .toll(Route::any(), Toll::new("api", Payer::client()))
    ///     .responder(|refusal| {
    ///         let mut answer = refusal.plain();
    ///         *answer.body_mut() = "slow down, please".into();
    ///         answer
    ///     })
    ///     .build()?;
    /// # Ok::<(), tollgate::Error>(())
    /// ```
    pub fn responder(
        mut self,
        responder: impl Fn(&Refusal<'_>) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.responder = Some(Arc::new(responder));
        self
    }

    /// The layer, if its limits are there and its routes and payers make sense.
    pub fn build(self) -> Result<LimitLayer, Error> {
        if self.tolls.is_empty() {
            return Err(Error::call("a layer without a toll limits nothing; add one with `toll`"));
        }
        if self.tolls.len() > MOST_LIMITS {
            let tolls = self.tolls.len();
            return Err(Error::call(format!(
                "a layer may have at most {MOST_LIMITS} tolls, and this one has {tolls}"
            )));
        }
        let most_delay = Micros::from(self.most_delay);
        let posts =
            self.tolls.iter().map(|(route, toll)| toll.compile(route, &self.gate, most_delay, &self.format));
        let posts = posts.collect::<Result<Vec<Post>, Error>>()?;
        // The program has named them, so metrics may show them.
        self.gate.show_namespaces(self.tolls.iter().flat_map(|(_, toll)| toll.namespaces()));
        let skips = self.skips.iter().map(Route::compile).collect::<Result<Vec<Matcher>, Error>>()?;
        let needs_path = posts.iter().map(|post| &post.route).chain(&skips).any(Matcher::needs_path);
        Ok(LimitLayer {
            inner: Arc::new(Inner {
                gate: self.gate,
                posts,
                skips,
                skip_networks: self.skip_networks,
                skip_when: self.skip_when,
                identity: self.identity,
                separators: needs_path.then_some(self.separators),
                format: self.format,
                most_delay,
                settle_within: Micros::from(self.settle_within),
                responder: self.responder,
                unpaid: Quiet::default(),
                undecided: Quiet::default(),
                unsettled: Quiet::default(),
            }),
        })
    }
}

impl fmt::Debug for LimitLayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayerBuilder").field("tolls", &self.tolls).finish_non_exhaustive()
    }
}
