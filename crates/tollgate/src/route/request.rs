//! A request as route limits see it: everything but its body.
//!
//! All callers of route limits use this type: the tower layer has the request itself, the server's gate has a proxy's description
//! of it, and backtest has a line of an access log. [`RequestReader`] holds what is the same for all requests: how to find the
//! client's address, and the meaning of an encoded slash in a path.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header::{HOST, HeaderValue, REFERER, USER_AGENT};
use http::{Extensions, HeaderMap, HeaderName, Method, Request, Uri};

use super::client::{ClientAddress, ClientGroup, address, canonical};
use super::path::{self, BadPath, EncodedSeparators};
use super::pattern::Matcher;

/// The address of the peer, for services other than axum's: put it into the extensions of each request, or set [where it
/// is](RequestReader::peer_from).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// The user that an outer layer has authenticated: put it into the extensions of each request. It is the key of
/// [`KeyExtractor::user`](super::KeyExtractor::user) and what [`Route::user`](super::Route::user) compares.
///
/// ```
/// use tollgate::route::AuthenticatedUser;
///
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(AuthenticatedUser::new("alice"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthenticatedUser(Arc<str>);

impl AuthenticatedUser {
    /// The user of this name.
    pub fn new(name: impl Into<Arc<str>>) -> AuthenticatedUser {
        AuthenticatedUser(name.into())
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

/// How requests are read: where the client's address is found, and what an encoded slash in a path means.
#[derive(Clone, Debug, Default)]
pub struct RequestReader {
    client: ClientAddress,
    peer_from: Option<fn(&Extensions) -> Option<SocketAddr>>,
    separators: EncodedSeparators,
    user_header: Option<HeaderName>,
}

impl RequestReader {
    /// The client is the peer, encoded separators are refused, and the user is taken only from the extensions.
    pub fn new() -> RequestReader {
        RequestReader::default()
    }

    /// How the client's address is found; by default it is the peer's.
    #[must_use]
    pub fn client(self, client: ClientAddress) -> RequestReader {
        RequestReader { client, ..self }
    }

    /// Where the peer's address is among a request's extensions; by default in a [`Peer`] or, with the feature `axum`, in
    /// axum's `ConnectInfo<SocketAddr>`.
    #[must_use]
    pub fn peer_from(self, find: fn(&Extensions) -> Option<SocketAddr>) -> RequestReader {
        RequestReader { peer_from: Some(find), ..self }
    }

    /// What encoded separators in paths are; by default such requests are refused where a route looks at paths.
    #[must_use]
    pub fn encoded_separators(self, separators: EncodedSeparators) -> RequestReader {
        RequestReader { separators, ..self }
    }

    /// The header in which trusted proxies name the authenticated user. It is read only if the peer is one of them
    /// ([`ClientAddress::behind`]). The proxy must set or remove this header on every request; if it does not, the client can
    /// choose it.
    #[must_use]
    pub fn user_header(self, name: HeaderName) -> RequestReader {
        RequestReader { user_header: Some(name), ..self }
    }

    /// Whether a peer is a trusted proxy, whose description of a request is accepted.
    pub fn trusts(&self, peer: IpAddr) -> bool {
        self.client.trusts(Some(peer))
    }

    /// Reads a request with its path; an error if the path cannot be normalised.
    pub(crate) fn head<'a, B>(&'a self, request: &'a Request<B>) -> Result<RequestHead<'a>, BadPath> {
        let raw = full_path(request.uri(), request.extensions());
        let path = path::normalized(raw, self.separators)?;
        Ok(RequestHead { path: Some(path), ..self.head_without_path(request) })
    }

    /// Reads a request whose path is not needed.
    #[inline]
    pub(crate) fn head_without_path<'a, B>(&'a self, request: &'a Request<B>) -> RequestHead<'a> {
        let target = Target::Uri(request.uri(), request.extensions());
        RequestHead {
            method: Some(Cow::Borrowed(request.method())),
            fields: Fields::Map(request.headers()),
            extensions: Some(request.extensions()),
            ..RequestHead::new(self, target)
        }
    }

    /// A request that a trusted proxy describes. `target` is its path and query as the client sent them; `headers` are those of
    /// the description, including the client's own.
    pub(crate) fn described<'a>(
        &'a self,
        described: &Described<'a>,
        needs_path: bool,
    ) -> Result<RequestHead<'a>, BadPath> {
        let Described { method, target, host, headers, peer } = *described;
        // A `#` stays in the path and is refused: servers disagree about its meaning there.
        let (raw, query) = match target.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (target, None),
        };
        let path = needs_path.then(|| path::normalized(raw, self.separators)).transpose()?;
        Ok(RequestHead {
            method: Some(Cow::Borrowed(method)),
            path,
            fields: Fields::Map(headers),
            host,
            peer: Some(peer),
            ..RequestHead::new(self, Target::Text { path: raw, query })
        })
    }

    /// A request from an access log. `client` is an address, or a host name if the log has names.
    ///
    /// ```
    /// use tollgate::route::RequestReader;
    ///
    /// let reader = RequestReader::new();
    /// let request = reader.recorded("2001:db8::7").target("GET", "/users/7?tab=2").logged_user(Some("alice")).bytes_sent(2326);
    /// assert_eq!((request.path(), request.query()), ("/users/7", Some("tab=2")));
    /// // A line that is no request has no path.
    /// assert_eq!(reader.recorded("203.0.113.7").path(), "");
    /// ```
    pub fn recorded<'a>(&'a self, client: &'a str) -> RequestHead<'a> {
        let address = address(client.as_bytes());
        RequestHead {
            path: Some(Cow::Borrowed("")),
            fields: Fields::Recorded { referer: None, user_agent: None },
            client: OnceCell::from(address),
            client_name: address.is_none().then_some(client),
            sent: Some(0),
            ..RequestHead::new(self, Target::Text { path: "", query: None })
        }
    }
}

/// A request as a trusted proxy describes it.
#[derive(Clone, Copy, Debug)]
pub struct Described<'a> {
    /// The method of the client's request.
    pub method: &'a Method,
    /// Its path and query, as the client sent them.
    pub target: &'a str,
    /// The requested host, if the proxy names it; else the `Host` of `headers`.
    pub host: Option<&'a str>,
    /// The header fields of the description.
    pub headers: &'a HeaderMap,
    /// The proxy.
    pub peer: IpAddr,
}

/// A request as route limits see it: everything but its body.
pub struct RequestHead<'a> {
    /// `None` if a log line has none.
    method: Option<Cow<'a, Method>>,
    target: Target<'a>,
    /// In its one spelling, if a route looks at it.
    path: Option<Cow<'a, str>>,
    fields: Fields<'a>,
    extensions: Option<&'a Extensions>,
    /// The peer, if the extensions do not have it.
    peer: Option<IpAddr>,
    host: Option<&'a str>,
    user: Option<&'a str>,
    reader: &'a RequestReader,
    client: OnceCell<Option<IpAddr>>,
    /// The client's name in a log without addresses.
    client_name: Option<&'a str>,
    /// The bytes of the response, where it is over.
    sent: Option<u64>,
    /// The route that is being matched.
    route: Cell<Option<&'a Matcher>>,
}

/// The target of a request.
#[derive(Clone, Copy)]
enum Target<'a> {
    Uri(&'a Uri, &'a Extensions),
    Text { path: &'a str, query: Option<&'a str> },
}

/// The header fields.
enum Fields<'a> {
    Map(&'a HeaderMap),
    /// The headers of an access log.
    Recorded {
        referer: Option<&'a str>,
        user_agent: Option<&'a str>,
    },
}

impl<'a> RequestHead<'a> {
    #[inline]
    fn new(reader: &'a RequestReader, target: Target<'a>) -> RequestHead<'a> {
        RequestHead {
            method: None,
            target,
            path: None,
            fields: Fields::Recorded { referer: None, user_agent: None },
            extensions: None,
            peer: None,
            host: None,
            user: None,
            reader,
            client: OnceCell::new(),
            client_name: None,
            sent: None,
            route: Cell::new(None),
        }
    }

    /// The method and the target of a recorded request: a path with an optional query, or a whole URL, as in requests to a proxy.
    #[must_use]
    pub fn target(mut self, method: &str, target: &'a str) -> RequestHead<'a> {
        self.method = Method::from_bytes(method.as_bytes()).ok().map(Cow::Owned);
        let (raw, query) = split_target(target);
        self.target = Target::Text { path: raw, query };
        // In a log an encoded slash is data. A path that cannot be normalised is compared as it came.
        self.path = Some(match raw {
            "" => Cow::Borrowed(""),
            raw => path::normalized(raw, EncodedSeparators::Keep).unwrap_or(Cow::Borrowed(raw)),
        });
        self
    }

    /// The user of a recorded request.
    #[must_use]
    pub fn logged_user(self, user: Option<&'a str>) -> RequestHead<'a> {
        RequestHead { user, ..self }
    }

    /// The header fields `Referer` and `User-Agent` of a recorded request.
    #[must_use]
    pub fn logged_headers(self, referer: Option<&'a str>, user_agent: Option<&'a str>) -> RequestHead<'a> {
        RequestHead { fields: Fields::Recorded { referer, user_agent }, ..self }
    }

    /// How many bytes the response to a recorded request had.
    #[must_use]
    pub fn bytes_sent(self, bytes: u64) -> RequestHead<'a> {
        RequestHead { sent: Some(bytes), ..self }
    }

    /// The same request, matched by a route, with the parameters of that route.
    pub(crate) fn on_behalf_of(&self, route: &'a Matcher) -> &RequestHead<'a> {
        self.route.set(Some(route));
        self
    }

    /// The method; `GET` for a log line without one.
    pub fn method(&self) -> &Method {
        self.known_method().unwrap_or(&Method::GET)
    }

    pub(crate) fn known_method(&self) -> Option<&Method> {
        self.method.as_deref()
    }

    /// The normalised path: unescaped where that changes nothing, without `.`, `..` and doubled slashes. In a nested axum router
    /// it is the whole path. If no route looks at paths, it is the raw path.
    pub fn path(&self) -> &str {
        match &self.path {
            Some(path) => path,
            None => self.raw_path(),
        }
    }

    /// The raw path.
    pub(crate) fn raw_path(&self) -> &str {
        match self.target {
            Target::Uri(uri, extensions) => full_path(uri, extensions),
            Target::Text { path, .. } => path,
        }
    }

    /// Whether the raw path is the normalised path.
    pub(crate) fn is_plain(&self) -> bool {
        !matches!(self.path, Some(Cow::Owned(_)))
    }

    /// The query, without its `?`.
    pub fn query(&self) -> Option<&str> {
        match self.target {
            Target::Uri(uri, _) => uri.query(),
            Target::Text { query, .. } => query,
        }
    }

    /// All header fields; none for a recorded request, which has only two, readable with [`header`](RequestHead::header).
    pub fn headers(&self) -> &HeaderMap {
        static NONE: std::sync::LazyLock<HeaderMap> = std::sync::LazyLock::new(HeaderMap::new);
        match self.fields {
            Fields::Map(headers) => headers,
            Fields::Recorded { .. } => &NONE,
        }
    }

    /// The text of a header field; `None` if it is not there, is there twice, or is not text.
    pub fn header(&self, name: impl TryInto<HeaderName>) -> Option<&str> {
        match self.field(&name.try_into().ok()?) {
            Field::Text(text) => Some(text),
            Field::Missing | Field::Malformed => None,
        }
    }

    /// A value that an outer layer has put into the request's extensions, such as the authenticated account.
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.extensions?.get()
    }

    /// The address at the other end of the connection.
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer.or_else(|| self.peer_address().map(|address| address.ip())).map(canonical)
    }

    /// The client's address: the peer's, or the one that trusted proxies report. See [`ClientAddress`].
    pub fn client(&self) -> Option<IpAddr> {
        *self.client.get_or_init(|| self.reader.client.resolve(self.peer(), self.headers()))
    }

    /// The user: an [`AuthenticatedUser`] in the extensions, or a trusted proxy's [user header](RequestReader::user_header).
    pub fn user(&self) -> Option<&str> {
        if let Some(user) = self.extensions.and_then(|extensions| extensions.get::<AuthenticatedUser>()) {
            return Some(user.name());
        }
        self.user.or_else(|| {
            let name = self.reader.user_header.as_ref()?;
            let is_trusted = self.reader.client.trusts(self.peer());
            self.header(name).filter(|user| is_trusted && !user.is_empty())
        })
    }

    /// A parameter of the route's path template, unescaped.
    pub fn parameter(&self, name: &str) -> Option<Cow<'_, str>> {
        self.route.get()?.parameter(self.path(), name).map(path::decoded)
    }

    /// The bytes of the response, where it is over: a recorded request.
    pub(crate) fn sent(&self) -> Option<u64> {
        self.sent
    }

    /// The client's name in a log without addresses.
    pub(crate) fn client_name(&self) -> Option<&str> {
        self.client_name
    }

    /// The path template that axum matched.
    pub(crate) fn matched(&self) -> Option<&str> {
        #[cfg(feature = "axum")]
        return self.extensions?.get::<axum::extract::MatchedPath>().map(|matched| matched.as_str());
        #[cfg(not(feature = "axum"))]
        None
    }

    /// The hosts that the request names: in its target and its `Host` fields, or the one that a proxy reports.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = &[u8]> {
        let of_target = match self.target {
            Target::Uri(uri, _) => uri.host().map(str::as_bytes),
            Target::Text { .. } => None,
        };
        let of_proxy = self.host.map(str::as_bytes);
        let fields = of_proxy.is_none().then(|| self.values(&HOST)).into_iter().flatten();
        of_proxy.into_iter().chain(of_target).chain(fields)
    }

    /// All values of a header field.
    pub(crate) fn values(&self, name: &HeaderName) -> impl Iterator<Item = &[u8]> {
        let (all, recorded) = match &self.fields {
            Fields::Map(headers) => (Some(headers.get_all(name)), None),
            Fields::Recorded { .. } => (None, self.logged(name)),
        };
        let all = all.into_iter().flatten().map(HeaderValue::as_bytes);
        all.chain(recorded.map(str::as_bytes))
    }

    /// A header field of a recorded request.
    fn logged(&self, name: &HeaderName) -> Option<&'a str> {
        match self.fields {
            Fields::Recorded { referer, .. } if name == REFERER => referer,
            Fields::Recorded { user_agent, .. } if name == USER_AGENT => user_agent,
            _ => None,
        }
    }

    fn peer_address(&self) -> Option<SocketAddr> {
        let extensions = self.extensions?;
        if let Some(find) = self.reader.peer_from {
            return find(extensions);
        }
        let given = extensions.get::<Peer>().map(|peer| peer.0);
        #[cfg(feature = "axum")]
        let given =
            given.or_else(|| extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|info| info.0));
        given
    }

    /// How the client's address is written in keys.
    pub(crate) fn write_group(&self, address: IpAddr, to: &mut ClientGroup) {
        // There is room for the longest.
        let _ = self.reader.client.write_group(address, to);
    }

    /// A header field that a key is taken from.
    #[inline]
    pub(crate) fn field(&self, name: &HeaderName) -> Field<'_> {
        let Fields::Map(headers) = self.fields else {
            return self.logged(name).map_or(Field::Missing, Field::Text);
        };
        let Some(value) = headers.get(name) else { return Field::Missing };
        // If a field occurs twice, the service might use the other value. Nearly always no field does, and then this one need not
        // be looked up again.
        let has_twice = headers.len() != headers.keys_len();
        if has_twice && headers.get_all(name).iter().nth(1).is_some() {
            return Field::Malformed;
        }
        // Nearly all are visible ASCII, which is found out faster than UTF-8.
        let text = value.to_str().or_else(|_| std::str::from_utf8(value.as_bytes()));
        text.map_or(Field::Malformed, Field::Text)
    }
}

/// The content of a header field.
pub(crate) enum Field<'a> {
    Text(&'a str),
    Missing,
    Malformed,
}

/// Whether access logs have a header field.
pub(crate) fn is_logged(name: &str) -> bool {
    [REFERER, USER_AGENT].iter().any(|logged| name.eq_ignore_ascii_case(logged.as_str()))
}

/// The whole path: in a nested axum router the request has only the rest of it.
fn full_path<'a>(uri: &'a Uri, extensions: &'a Extensions) -> &'a str {
    #[cfg(feature = "axum")]
    if let Some(original) = extensions.get::<axum::extract::OriginalUri>() {
        return original.0.path();
    }
    #[cfg(not(feature = "axum"))]
    let _ = extensions;
    uri.path()
}

/// The path and the query of a logged target: `/a?b`, `http://host/a?b` or `*`. The path is empty where there is none.
fn split_target(target: &str) -> (&str, Option<&str>) {
    let target = target.split('#').next().unwrap_or_default();
    let (path, query) = match target.split_once('?') {
        Some((path, query)) => (path, Some(query)),
        None => (target, None),
    };
    if path.starts_with('/') || path == "*" {
        return (path, query);
    }
    match path.split_once("://") {
        Some((scheme, rest)) if !scheme.is_empty() => {
            (rest.find('/').map_or("/", |start| &rest[start..]), query)
        }
        _ => ("", None),
    }
}
