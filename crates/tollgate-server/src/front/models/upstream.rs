//! HTTP to providers: one client for each upstream, pooled, which sends nothing twice.
//!
//! Addresses come from the config alone. Callers' headers are passed on but for those of the connection, and their keys are replaced
//! by the upstream's. Answers are asked for uncompressed, because they are looked into.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, Uri};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use tollgate_llm::Api;
use tollgate_llm::{UpstreamConfig, UpstreamKind};

use super::breaker::Breaker;

/// How long a connection may take, and how long it is kept.
const CONNECT: Duration = Duration::from_secs(10);
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);

/// What is about one connection and not about the call, or is the gateway's own.
const NOT_PASSED: [&str; 17] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "host",
    "content-length",
    "expect",
    "accept-encoding",
    "x-agent-id",
    "cookie",
    "set-cookie",
    "forwarded",
];

/// What names an account at a provider. An upstream with keys of its own is shown those alone: what a caller names beside them would be another quota than
/// the one that was charged here.
const CALLERS_KEYS: [&str; 6] =
    ["authorization", "x-api-key", "api-key", "x-goog-api-key", "openai-organization", "openai-project"];

/// How often a log line says that an upstream does not answer, at most.
const COMPLAIN_EVERY: Duration = Duration::from_secs(10);

/// Why a call could not be sent or was not answered.
#[derive(Debug)]
pub(crate) enum SendError {
    /// Nobody was reached, so nothing was sent.
    NotSent(Cause),
    /// It was sent, and what became of it is not known.
    Lost(Cause),
}

/// What went wrong: for the caller, and for the log, which may name addresses.
#[derive(Clone, Debug)]
pub(crate) struct Cause {
    pub(crate) what: &'static str,
    pub(crate) detail: String,
}

impl Cause {
    pub(crate) fn new(what: &'static str, detail: impl Into<String>) -> Cause {
        Cause { what, detail: detail.into() }
    }

    /// An error, with what caused it.
    fn of(what: &'static str, error: &dyn std::error::Error) -> Cause {
        let mut detail = error.to_string();
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if !detail.contains(&text) {
                detail = format!("{detail}: {text}");
            }
            next = cause.source();
        }
        Cause { what, detail }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.what, self.detail)
    }
}

/// Calls of an upstream that had no answer, as the log has them.
#[derive(Debug, Default)]
struct Complaints {
    /// When the last line was written, and how many calls failed since.
    written: Option<Instant>,
    since: u64,
}

/// One upstream.
pub(crate) struct Upstream {
    /// What it was made of: the config, the keys that stand in variables, and the certificates in a file.
    config: UpstreamConfig,
    /// The quota group and what is shown, ready to be sent.
    keys: Vec<(String, HeaderValue)>,
    ca: Option<Vec<u8>>,
    next_key: AtomicUsize,
    breaker: Breaker,
    complaints: Mutex<Complaints>,
    /// Whether the last call had no answer.
    is_failing: AtomicBool,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl Upstream {
    pub(crate) fn new(config: &UpstreamConfig) -> Result<Upstream, String> {
        Upstream::made_of(config, resolve_keys(config)?, read_ca(config)?)
    }

    /// This one if it is made of the same, else a new one. A reload that says nothing else of it keeps its connections, its breaker and the
    /// key that is next.
    pub(crate) fn reloaded(self: &Arc<Self>, config: &UpstreamConfig) -> Result<Arc<Upstream>, String> {
        let (keys, ca) = (resolve_keys(config)?, read_ca(config)?);
        if self.config == *config && self.keys == keys && self.ca == ca {
            return Ok(self.clone());
        }
        Upstream::made_of(config, keys, ca).map(Arc::new)
    }

    fn made_of(
        config: &UpstreamConfig,
        keys: Vec<(String, HeaderValue)>,
        ca: Option<Vec<u8>>,
    ) -> Result<Upstream, String> {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(CONNECT));
        let tls = tls(config, ca.as_deref())?;
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .wrap_connector(http);
        let mut builder = Client::builder(TokioExecutor::new());
        // A request of which nothing was written, because a kept connection had ended, is sent on another. One that was written may have
        // run, and whether it is sent again is decided where it is counted.
        builder.pool_idle_timeout(IDLE_TIMEOUT);
        builder.pool_timer(hyper_util::rt::TokioTimer::new());
        Ok(Upstream {
            config: config.clone(),
            keys,
            ca,
            next_key: AtomicUsize::new(0),
            breaker: Breaker::default(),
            complaints: Mutex::default(),
            is_failing: AtomicBool::new(false),
            client: builder.build(connector),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    pub(crate) fn kind(&self) -> UpstreamKind {
        self.config.kind
    }

    /// Whether it has keys of this quota group. Without any keys it passes on those of its callers.
    pub(super) fn has_group(&self, group: Option<&str>) -> bool {
        self.keys.is_empty() || group.is_none_or(|group| self.keys.iter().any(|(of, _)| of == group))
    }

    /// How long it may be silent.
    pub(super) fn timeout(&self) -> Duration {
        self.config.timeout
    }

    /// Whether it is overloaded.
    pub(super) fn breaker(&self) -> &Breaker {
        &self.breaker
    }

    /// Where it is. The config allows no login in an address.
    fn host(&self) -> String {
        let uri = self.config.base_url.parse::<Uri>().ok();
        uri.and_then(|uri| uri.authority().map(ToString::to_string)).unwrap_or_default()
    }

    /// Logs that a call had no answer: at once, and then a line every ten seconds that says how many.
    pub(super) fn failed(&self, model: &str, cause: &Cause) {
        self.is_failing.store(true, Ordering::Relaxed);
        let now = Instant::now();
        let mut complaints = self.complaints.lock();
        complaints.since += 1;
        if complaints.written.is_some_and(|written| now < written + COMPLAIN_EVERY) {
            return;
        }
        let calls = complaints.since;
        *complaints = Complaints { written: Some(now), since: 0 };
        drop(complaints);
        tracing::warn!(
            target: "tollgate::llm",
            upstream = self.config.name,
            host = self.host(),
            model,
            calls,
            cause = cause.detail,
            "{}",
            cause.what
        );
    }

    /// Logs that it answers again, where it did not.
    pub(super) fn answered(&self) {
        if self.is_failing.load(Ordering::Relaxed) && self.is_failing.swap(false, Ordering::Relaxed) {
            let calls = std::mem::take(&mut *self.complaints.lock()).since;
            let (upstream, host) = (&self.config.name, self.host());
            tracing::info!(target: "tollgate::llm", upstream, host, calls, "the upstream answers again");
        }
    }

    /// Where a route is: SDKs of OpenAI have the version in their base URL, those of Anthropic have not.
    fn uri(&self, api: Api, query: Option<&str>) -> Result<Uri, SendError> {
        let path = match self.config.base_url.ends_with("/v1") {
            true => api.path().strip_prefix("/v1").unwrap_or(api.path()),
            false => api.path(),
        };
        let (mark, query) = query.map_or(("", ""), |query| ("?", query));
        let uri = format!("{}{path}{mark}{query}", self.config.base_url).parse();
        uri.map_err(|error| SendError::NotSent(Cause::of("the upstream's address is wrong", &error)))
    }

    /// Sends a call with a key of this quota group, and waits for the head of its answer.
    pub(crate) async fn send(
        &self,
        api: Api,
        query: Option<&str>,
        headers: &HeaderMap,
        group: Option<&str>,
        body: Bytes,
    ) -> Result<Response<Incoming>, SendError> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri(api, query)?;
        *request.headers_mut() = self.headers(headers, group);
        let answered = self.client.request(request).await.map_err(|error| match error.is_connect() {
            true => SendError::NotSent(Cause::of("the upstream cannot be reached", &error)),
            false => SendError::Lost(Cause::of("the upstream did not answer", &error)),
        });
        if answered.is_ok() {
            self.answered();
        }
        answered
    }

    fn headers(&self, headers: &HeaderMap, group: Option<&str>) -> HeaderMap {
        let named = headers.get_all("connection").iter().filter_map(|value| value.to_str().ok());
        let named: Vec<String> =
            named.flat_map(|list| list.split(',')).map(|name| name.trim().to_ascii_lowercase()).collect();
        let mut passed = HeaderMap::with_capacity(headers.len() + 2);
        for (name, value) in headers {
            let text = name.as_str();
            let is_forwarded = text.starts_with("x-forwarded-") || text == "x-real-ip";
            if !NOT_PASSED.contains(&text) && !is_forwarded && !named.iter().any(|other| other == text) {
                passed.append(name.clone(), value.clone());
            }
        }
        passed.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        passed.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
        let of_group: Vec<&HeaderValue> = self
            .keys
            .iter()
            .filter(|(of, _)| group.is_none_or(|group| group == of))
            .map(|(_, key)| key)
            .collect();
        if !self.keys.is_empty() {
            CALLERS_KEYS.iter().for_each(|name| drop(passed.remove(*name)));
        }
        if !of_group.is_empty() {
            let key = of_group[self.next_key.fetch_add(1, Ordering::Relaxed) % of_group.len()];
            match self.config.kind {
                UpstreamKind::OpenAi => passed.insert(AUTHORIZATION, key.clone()),
                UpstreamKind::Anthropic => passed.insert(HeaderName::from_static("x-api-key"), key.clone()),
            };
        }
        passed
    }
}

/// Headers of an answer that are about the connection it came on.
pub(super) fn passed_back(headers: &HeaderMap) -> HeaderMap {
    let is_passed = |name: &HeaderName| !NOT_PASSED.contains(&name.as_str()) || name == "content-length";
    let passed = headers.iter().filter(|(name, _)| is_passed(name));
    passed.map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// The keys of a config as they are shown, with their groups.
fn resolve_keys(config: &UpstreamConfig) -> Result<Vec<(String, HeaderValue)>, String> {
    let mut keys = Vec::new();
    for (index, key) in config.keys.iter().enumerate() {
        let wrong = |why: &str| format!("llm.upstreams.{}, key {}: {why}", config.name, index + 1);
        let text = super::resolved(&key.key).map_err(|why| wrong(&why))?;
        let shown = match config.kind {
            UpstreamKind::OpenAi => format!("Bearer {text}"),
            UpstreamKind::Anthropic => text,
        };
        let mut value =
            HeaderValue::try_from(shown).map_err(|_| wrong("it has characters that no header can have"))?;
        value.set_sensitive(true);
        keys.push((key.group.clone(), value));
    }
    Ok(keys)
}

/// The file of the certificates that it is trusted by, if it names one.
fn read_ca(config: &UpstreamConfig) -> Result<Option<Vec<u8>>, String> {
    let Some(file) = &config.ca_file else { return Ok(None) };
    let read = std::fs::read(file);
    read.map(Some).map_err(|error| wrong_ca(config, &error))
}

fn wrong_ca(config: &UpstreamConfig, why: &dyn std::fmt::Display) -> String {
    let file = config.ca_file.as_deref().unwrap_or(std::path::Path::new("")).display();
    format!("llm.upstreams.{}: ca_file {file}: {why}", config.name)
}

/// The same TLS as the stores have: rustls with ring, and the machine's certificates where no other are named.
fn tls(config: &UpstreamConfig, ca: Option<&[u8]>) -> Result<rustls::ClientConfig, String> {
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    let mut roots = rustls::RootCertStore::empty();
    if let Some(ca) = ca {
        let read = CertificateDer::pem_slice_iter(ca).collect::<Result<Vec<_>, _>>();
        let read = read.map_err(|error| wrong_ca(config, &error))?;
        let (trusted, _) = roots.add_parsable_certificates(read);
        if trusted == 0 {
            return Err(wrong_ca(config, &"there is no certificate in it"));
        }
    } else if config.base_url.starts_with("https://") {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| format!("llm.upstreams.{}: {error}", config.name))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}
