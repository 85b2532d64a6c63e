//! The layer: which limits apply to a service, and how refusals look.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Extensions, Response};
use ipnet::IpNet;
use tollgate_kernel::Micros;
use tower_layer::Layer;

use super::applied::{AppliedLimits, Settings};
use super::header_template::TemplateSets;
use super::refusal::{Refusal, Responder};
use super::service::LimitService;
use crate::error::Error;
use crate::headers::Format;
use crate::quiet::Quiet;
use crate::route::{
    ClientAddress, EncodedSeparators, Matcher, RequestHead, RequestReader, Route, RouteLimit, Routes,
    canonical_network,
};
use crate::tollgate::Tollgate;

/// How long a request is delayed at most, by default.
const MOST_DELAY: Duration = Duration::from_secs(5);

/// How long a response may take to be settled, by default.
const SETTLE_WITHIN: Duration = Duration::from_secs(300);

/// Limits before a tower service: axum, tonic, hyper or any other.
///
/// ```
/// use std::time::Duration;
/// use tollgate::http::LimitLayer;
/// use tollgate::route::{KeyExtractor, Route, RouteLimit};
/// use tollgate::{Limit, Tollgate};
///
/// let gate = Tollgate::builder()
///     .limit("global", Limit::token_bucket("1000/s", 1000)?)
///     .limit("per-ip", Limit::token_bucket("10/s", 20)?)
///     .limit("logins", Limit::fixed_window(5, Duration::from_secs(60))?)
///     .build()?;
/// let layer = LimitLayer::new(&gate, [
///     RouteLimit::new("global", KeyExtractor::constant("all")),
///     RouteLimit::new("per-ip", KeyExtractor::ip()),
///     RouteLimit::new("logins", KeyExtractor::ip()).on(Route::post("/login")).count_if(|status| status == 401),
/// ])?;
/// # let _ = layer;
/// # Ok::<(), tollgate::Error>(())
/// ```
///
/// All route limits that match a request are charged as one: all or none. A request over a limit gets 429 and never reaches the
/// service; it gets 503 if it is refused only because the store failed and the limit's fallback is `closed`. Every other response
/// has the rate-limit headers. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct LimitLayer {
    inner: Arc<Inner>,
}

/// The state that all services of one layer share.
pub(super) struct Inner {
    pub(super) gate: Tollgate,
    pub(super) routes: Routes,
    pub(super) limits: AppliedLimits,
    pub(super) template_sets: TemplateSets,
    /// Whether any of the next three has something in it.
    skips_some: bool,
    skips: Vec<Matcher>,
    skip_networks: Vec<IpNet>,
    skip_when: Vec<SkipWhen>,
    pub(super) settings: Settings,
    pub(super) settle_within: Micros,
    pub(super) responder: Option<Responder>,
    /// Events that are logged at most once a second.
    pub(super) uncharged: Quiet,
    pub(super) undecided: Quiet,
    pub(super) unsettled: Quiet,
}

type SkipWhen = Arc<dyn Fn(&RequestHead<'_>) -> bool + Send + Sync>;

impl LimitLayer {
    /// A layer with these route limits. [`builder`](LimitLayer::builder) has more settings.
    pub fn new(gate: &Tollgate, limits: impl IntoIterator<Item = RouteLimit>) -> Result<LimitLayer, Error> {
        LimitLayer::builder(gate).limits(limits).build()
    }

    /// A layer with the `[[routes]]` of a config, which reads requests as its `[requests]` says.
    ///
    /// ```
    /// use tollgate::Tollgate;
    /// use tollgate::config::Config;
    /// use tollgate::http::LimitLayer;
    ///
    /// let config = Config::parse(r#"
    ///     [limits.api]
    ///     strategy = "token_bucket"
    ///     rate = "10/s"
    ///     burst = 20
    ///
    ///     [[routes]]
    ///     path = "/api/*"
    ///     limit = "api"
    ///     key = "ip"
    /// "#)?;
    /// let gate = Tollgate::builder().config(&config).build()?;
    /// let layer = LimitLayer::from_config(&gate, &config)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[cfg(feature = "config")]
    pub fn from_config(gate: &Tollgate, config: &crate::config::Config) -> Result<LimitLayer, Error> {
        LimitLayer::builder(gate).config(config).build()
    }

    /// Starts a layer that charges limits of this gate.
    pub fn builder(gate: &Tollgate) -> LimitLayerBuilder {
        LimitLayerBuilder {
            gate: gate.clone(),
            limits: Vec::new(),
            skips: Vec::new(),
            skip_networks: Vec::new(),
            skip_when: Vec::new(),
            reader: RequestReader::new(),
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
        f.debug_struct("LimitLayer")
            .field("limits", &self.inner.routes.limits().len())
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// Whether a request is not charged at all.
    #[inline]
    pub(super) fn is_skipped(&self, head: &RequestHead<'_>) -> bool {
        self.skips_some && self.is_among_skipped(head)
    }

    fn is_among_skipped(&self, head: &RequestHead<'_>) -> bool {
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
///
/// ```
/// use tollgate::http::LimitLayer;
/// use tollgate::route::{ClientAddress, KeyExtractor, Route, RouteLimit};
/// use tollgate::{Limit, Tollgate};
///
/// # fn run() -> Result<(), Box<dyn std::error::Error>> {
/// let gate = Tollgate::builder().limit("api", Limit::token_bucket("10/s", 20)?).build()?;
/// let layer = LimitLayer::builder(&gate)
///     .limit(RouteLimit::new("api", KeyExtractor::ip()))
///     .skip(Route::get("/healthz"))
///     .client(ClientAddress::behind(["10.0.0.0/8".parse()?]))
///     .build()?;
/// # Ok(())
/// # }
/// # run().unwrap();
/// ```
#[must_use]
pub struct LimitLayerBuilder {
    gate: Tollgate,
    limits: Vec<RouteLimit>,
    skips: Vec<Route>,
    skip_networks: Vec<IpNet>,
    skip_when: Vec<SkipWhen>,
    reader: RequestReader,
    format: Format,
    most_delay: Duration,
    settle_within: Duration,
    responder: Option<Responder>,
}

impl LimitLayerBuilder {
    /// Adds a route limit. All that match a request are charged as one; a limit that is named twice is charged twice. If the
    /// response settles one of the two, both are charged the higher of their costs.
    pub fn limit(mut self, limit: RouteLimit) -> Self {
        self.limits.push(limit);
        self
    }

    /// Adds several route limits.
    pub fn limits(mut self, limits: impl IntoIterator<Item = RouteLimit>) -> Self {
        self.limits.extend(limits);
        self
    }

    /// Adds the `[[routes]]` of a config, and reads requests as its `[requests]` says.
    #[cfg(feature = "config")]
    pub fn config(self, config: &crate::config::Config) -> Self {
        let reader = config.requests.reader();
        LimitLayerBuilder { reader, ..self }.limits(config.routes.iter().cloned())
    }

    /// Lets the requests of a route pass uncharged: health checks, metrics. Only a path that is written plainly is let pass, and
    /// only if axum has not matched it to another route.
    pub fn skip(mut self, route: Route) -> Self {
        self.skips.push(route);
        self
    }

    /// Requests from these networks pass uncharged.
    pub fn skip_from(mut self, networks: impl IntoIterator<Item = IpNet>) -> Self {
        self.skip_networks.extend(networks.into_iter().map(canonical_network));
        self
    }

    /// Lets requests pass uncharged for which the function returns true.
    pub fn skip_when(mut self, skip: impl Fn(&RequestHead<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.skip_when.push(Arc::new(skip));
        self
    }

    /// How requests are read: [`client`](Self::client), [`peer_from`](Self::peer_from),
    /// [`encoded_separators`](Self::encoded_separators) and the user header in one.
    pub fn reader(self, reader: RequestReader) -> Self {
        LimitLayerBuilder { reader, ..self }
    }

    /// How the client's address is found; by default it is the peer's.
    pub fn client(self, client: ClientAddress) -> Self {
        let reader = self.reader.client(client);
        LimitLayerBuilder { reader, ..self }
    }

    /// Where the peer's address is among a request's extensions; by default in a [`Peer`](super::Peer) or, with the feature
    /// `axum`, in axum's `ConnectInfo<SocketAddr>`.
    ///
    /// With tonic: `.peer_from(|extensions| extensions.get::<TcpConnectInfo>()?.remote_addr())`.
    pub fn peer_from(self, find: fn(&Extensions) -> Option<SocketAddr>) -> Self {
        let reader = self.reader.peer_from(find);
        LimitLayerBuilder { reader, ..self }
    }

    /// What encoded separators in paths are, where a route looks at paths; by default such requests are answered with 400.
    pub fn encoded_separators(self, separators: EncodedSeparators) -> Self {
        let reader = self.reader.encoded_separators(separators);
        LimitLayerBuilder { reader, ..self }
    }

    /// Which rate-limit headers responses have; by default `X-RateLimit-*` and those of the IETF draft 10.
    pub fn headers(mut self, format: Format) -> Self {
        self.format = format;
        self
    }

    /// How long a leaky bucket may delay a request; five seconds by default. A request that would wait longer is given back and
    /// denied, to be tried again when it would wait less. Metrics and logs count it as allowed, as the bucket did.
    pub fn most_delay(mut self, most: Duration) -> Self {
        self.most_delay = most;
        self
    }

    /// How long a charge can be settled after it was reserved; five minutes by default. A response that takes longer leaves it
    /// as it was reserved.
    pub fn settle_within(mut self, within: Duration) -> Self {
        self.settle_within = within;
        self
    }

    /// Replaces the response of refusals. Status, headers and body are the service's own; the rate-limit headers are added.
    ///
    /// ```
    /// # use tollgate::http::LimitLayer;
    /// # use tollgate::route::{KeyExtractor, RouteLimit};
    /// # use tollgate::{Limit, Tollgate};
    /// # let gate = Tollgate::builder().limit("api", Limit::token_bucket("10/s", 20)?).build()?;
    /// let layer = LimitLayer::builder(&gate)
    ///     .limit(RouteLimit::new("api", KeyExtractor::ip()))
    ///     .responder(|refusal| {
    ///         let mut response = refusal.plain();
    ///         *response.body_mut() = "slow down, please".into();
    ///         response
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

    /// The layer, if its limits exist and its routes and keys make sense.
    pub fn build(self) -> Result<LimitLayer, Error> {
        if self.limits.is_empty() {
            return Err(Error::call(
                "a layer without a route limit limits nothing; add one with `limit`, or [[routes]] to the config",
            ));
        }
        let settings = Settings { most_delay: Micros::from(self.most_delay), format: self.format };
        let limits = AppliedLimits::new(&self.gate, self.limits.iter(), &settings)?;
        // The program names these namespaces, so metrics may show them.
        self.gate.show_namespaces(self.limits.iter().flat_map(RouteLimit::namespaces));
        let skips = self.skips.iter().map(Route::compile).collect::<Result<Vec<Matcher>, Error>>()?;
        let routes = Routes::new(self.limits)?.read_by(self.reader);
        Ok(LimitLayer {
            inner: Arc::new(Inner {
                gate: self.gate,
                routes: routes.reading_paths(skips.iter().any(Matcher::needs_path)),
                limits,
                template_sets: TemplateSets::default(),
                skips_some: !skips.is_empty() || !self.skip_networks.is_empty() || !self.skip_when.is_empty(),
                skips,
                skip_networks: self.skip_networks,
                skip_when: self.skip_when,
                settings,
                settle_within: Micros::from(self.settle_within),
                responder: self.responder,
                uncharged: Quiet::default(),
                undecided: Quiet::default(),
                unsettled: Quiet::default(),
            }),
        })
    }
}

impl fmt::Debug for LimitLayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimitLayerBuilder").field("limits", &self.limits).finish_non_exhaustive()
    }
}
