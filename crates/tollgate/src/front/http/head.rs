//! A request as rules see it: everything but its body.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::net::{IpAddr, SocketAddr};

use http::{Extensions, HeaderMap, HeaderName, Method, Request, Uri};

use super::client::{ClientAddress, Group};
use super::path::{self, BadPath, EncodedSeparators};
use super::route::{Asked, Matcher};

/// The address at the other end of the connection, for services that are not axum's: put it into the extensions of each
/// request, or say [where it is](super::LimitLayerBuilder::peer_from).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// How the addresses of a request are found.
#[derive(Clone)]
pub(super) struct Identity {
    pub(super) client: ClientAddress,
    pub(super) peer_from: Option<fn(&Extensions) -> Option<SocketAddr>>,
}

/// A request as rules, costs and payers see it: everything but its body.
pub struct Head<'a> {
    method: &'a Method,
    uri: &'a Uri,
    headers: &'a HeaderMap,
    extensions: &'a Extensions,
    /// In its one spelling, if a rule asks for it.
    path: Option<Cow<'a, str>>,
    identity: &'a Identity,
    client: OnceCell<Option<IpAddr>>,
    /// The route on whose behalf somebody is looking.
    route: Cell<Option<&'a Matcher>>,
}

impl<'a> Head<'a> {
    /// The head of a request; an error if its path has no one spelling, and that is asked for.
    pub(super) fn new<B>(
        request: &'a Request<B>,
        identity: &'a Identity,
        separators: Option<EncodedSeparators>,
    ) -> Result<Head<'a>, BadPath> {
        let raw = || full_path(request.uri(), request.extensions());
        let path = separators.map(|separators| path::normalized(raw(), separators)).transpose()?;
        Ok(Head {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            extensions: request.extensions(),
            path,
            identity,
            client: OnceCell::new(),
            route: Cell::new(None),
        })
    }

    /// The same, seen on behalf of a route, whose parameters it then has.
    pub(super) fn on_behalf_of(&self, route: &'a Matcher) -> &Head<'a> {
        self.route.set(Some(route));
        self
    }

    /// The method.
    pub fn method(&self) -> &Method {
        self.method
    }

    /// The address as it was asked for.
    pub fn uri(&self) -> &Uri {
        self.uri
    }

    /// The path that rules are compared with: unescaped where that changes nothing, without `.`, `..` and doubled slashes. In a
    /// nested axum router it is the whole path, not only what is left of it. If no rule asks for paths, it is as it came.
    pub fn path(&self) -> &str {
        match &self.path {
            Some(path) => path,
            None => full_path(self.uri, self.extensions),
        }
    }

    /// All header fields.
    pub fn headers(&self) -> &HeaderMap {
        self.headers
    }

    /// The text of a header field; `None` if it is not there, is there twice, or is not text.
    pub fn header(&self, name: impl TryInto<HeaderName>) -> Option<&str> {
        match self.field(&name.try_into().ok()?) {
            Field::Text(text) => Some(text),
            Field::Missing | Field::Malformed => None,
        }
    }

    /// What an outer layer knows of the request, such as who has logged in.
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.extensions.get()
    }

    /// The address at the other end of the connection.
    pub fn peer(&self) -> Option<IpAddr> {
        self.peer_address().map(|address| super::client::canonical(address.ip()))
    }

    /// The client's address: the peer's, or what trusted proxies say. See [`ClientAddress`].
    pub fn client(&self) -> Option<IpAddr> {
        *self.client.get_or_init(|| {
            let peer = self.peer_address().map(|address| address.ip());
            self.identity.client.resolve(peer, self.headers)
        })
    }

    /// A parameter of the template that the rule names, unescaped.
    pub fn parameter(&self, name: &str) -> Option<Cow<'_, str>> {
        self.route.get()?.parameter(self.path(), name).map(path::decoded)
    }

    fn peer_address(&self) -> Option<SocketAddr> {
        if let Some(find) = self.identity.peer_from {
            return find(self.extensions);
        }
        let given = self.extensions.get::<PeerAddress>().map(|peer| peer.0);
        #[cfg(feature = "axum")]
        let given = given
            .or_else(|| self.extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|info| info.0));
        given
    }

    /// How the client's address is shown in keys.
    pub(super) fn write_group(&self, address: IpAddr, to: &mut Group) {
        // There is room for the longest.
        let _ = self.identity.client.write_group(address, to);
    }

    pub(super) fn field(&self, name: &HeaderName) -> Field<'_> {
        let Some(value) = self.headers.get(name) else { return Field::Missing };
        // Two of them are two stories, and the service might believe the other. Nearly always no field is there twice, and then
        // this one need not be looked up again.
        let has_twice = self.headers.len() != self.headers.keys_len();
        if has_twice && self.headers.get_all(name).iter().nth(1).is_some() {
            return Field::Malformed;
        }
        // Nearly all are visible ASCII, which is sooner seen than any UTF-8.
        let text = value.to_str().or_else(|_| std::str::from_utf8(value.as_bytes()));
        text.map_or(Field::Malformed, Field::Text)
    }
}

impl Asked for Head<'_> {
    fn method(&self) -> Option<&Method> {
        Some(self.method)
    }

    fn path(&self) -> &str {
        Head::path(self)
    }

    fn raw_path(&self) -> &str {
        full_path(self.uri, self.extensions)
    }

    fn is_plain(&self) -> bool {
        !matches!(self.path, Some(Cow::Owned(_)))
    }

    fn matched(&self) -> Option<&str> {
        #[cfg(feature = "axum")]
        return self.extensions.get::<axum::extract::MatchedPath>().map(|matched| matched.as_str());
        #[cfg(not(feature = "axum"))]
        None
    }
}

/// What a header field holds.
pub(super) enum Field<'a> {
    Text(&'a str),
    Missing,
    Malformed,
}

/// The whole path: in a nested axum router the request has only what is left of it.
fn full_path<'a>(uri: &'a Uri, extensions: &'a Extensions) -> &'a str {
    #[cfg(feature = "axum")]
    if let Some(original) = extensions.get::<axum::extract::OriginalUri>() {
        return original.0.path();
    }
    #[cfg(not(feature = "axum"))]
    let _ = extensions;
    uri.path()
}
