//! The key of a request: where it is found, and what happens to a request without one.
//!
//! The tower layer, the server's gate and backtest share these rules: a request without a key is denied and nothing is charged,
//! unless [`KeyExtractor::if_missing`] says otherwise. A malformed key is always denied.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderName;
use http::header::AUTHORIZATION;
use unicode_normalization::UnicodeNormalization;

use super::client::ClientGroup;
use super::pattern::Matcher;
use super::request::{Field, RequestHead};
use crate::error::Error;
use crate::key::{Key, KeyError, KeyRoom, RoomKey};

/// Finds the key in a request.
///
/// ```
/// use tollgate::route::{KeyExtractor, MissingKey};
///
/// let all = KeyExtractor::constant("all");
/// let address = KeyExtractor::ip();
/// let user = KeyExtractor::header("x-user").namespace("user").if_missing(MissingKey::Ip);
/// let tenant = KeyExtractor::function("tenant", |request| request.header("host").map(str::to_owned));
/// ```
///
/// A request without the key is [denied](MissingKey::Deny) by default: it never passes uncharged by accident. A malformed key
/// (empty, given twice, not text, over 1,024 bytes) is always denied. Both are logged (WARN) and charge nothing.
///
/// A key that a client can choose (a header, a path) is weak: a client that sends a new one with each request gets a fresh limit
/// each time. Put the layer inside the one that authenticates, or add a limit by [address](KeyExtractor::ip).
#[derive(Clone)]
pub struct KeyExtractor {
    source: Source,
    namespace: String,
    missing: MissingKey,
    is_folded: bool,
}

#[derive(Clone)]
enum Source {
    Constant(String),
    Ip,
    Peer,
    User,
    Header(String),
    Bearer,
    PathParameter(String),
    Function(Function),
}

type Function = Arc<dyn Fn(&RequestHead<'_>) -> Option<String> + Send + Sync>;

/// What happens to a request that does not have the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissingKey {
    /// It is denied, and nothing is charged.
    #[default]
    Deny,
    /// Its key is the client's address (`ip:…`); it is denied if that is not known either.
    Ip,
    /// All such requests share one key, apart from every other.
    Shared,
    /// This limit does not apply to it.
    Skip,
}

impl MissingKey {
    /// All of them, by the names that the config has.
    pub const ALL: [(&'static str, MissingKey); 4] = [
        ("deny", MissingKey::Deny),
        ("ip", MissingKey::Ip),
        ("shared", MissingKey::Shared),
        ("skip", MissingKey::Skip),
    ];
}

impl KeyExtractor {
    fn new(namespace: &str, source: Source) -> KeyExtractor {
        KeyExtractor { source, namespace: namespace.to_owned(), missing: MissingKey::Deny, is_folded: false }
    }

    /// The same key for every request, in the namespace `all`.
    pub fn constant(key: impl Into<String>) -> KeyExtractor {
        KeyExtractor::new("all", Source::Constant(key.into()))
    }

    /// The client's address, as [`ClientAddress`](super::ClientAddress) finds it; IPv6 addresses are grouped by network.
    pub fn ip() -> KeyExtractor {
        KeyExtractor::new("ip", Source::Ip)
    }

    /// The address at the other end of the connection, even if that is a proxy.
    pub fn peer() -> KeyExtractor {
        KeyExtractor::new("peer", Source::Peer)
    }

    /// The [authenticated user](super::AuthenticatedUser).
    pub fn user() -> KeyExtractor {
        KeyExtractor::new("user", Source::User)
    }

    /// The text of a header field, such as `x-api-key`.
    pub fn header(name: impl Into<String>) -> KeyExtractor {
        let name = name.into();
        KeyExtractor::new(&name.to_ascii_lowercase(), Source::Header(name))
    }

    /// The token of `Authorization: Bearer …`. A request with another scheme has none.
    pub fn bearer() -> KeyExtractor {
        KeyExtractor::new("bearer", Source::Bearer)
    }

    /// A parameter of the route's path template, unescaped.
    pub fn path_parameter(name: impl Into<String>) -> KeyExtractor {
        let name = name.into();
        KeyExtractor::new(&name, Source::PathParameter(name.clone()))
    }

    /// A value that an outer layer has put into the request's extensions, such as the authenticated account.
    ///
    /// ```
    /// use tollgate::route::KeyExtractor;
    ///
    /// #[derive(Clone)]
    /// struct Account { id: u64 }
    ///
    /// let account = KeyExtractor::extension("account", |account: &Account| account.id.to_string());
    /// ```
    pub fn extension<T: Send + Sync + 'static>(
        namespace: &str,
        key: impl Fn(&T) -> String + Send + Sync + 'static,
    ) -> KeyExtractor {
        KeyExtractor::function(namespace, move |request| request.extension::<T>().map(&key))
    }

    /// The result of a function; `None` is a missing key.
    pub fn function(
        namespace: &str,
        key: impl Fn(&RequestHead<'_>) -> Option<String> + Send + Sync + 'static,
    ) -> KeyExtractor {
        KeyExtractor::new(namespace, Source::Function(Arc::new(key)))
    }

    /// The namespace of the key, which metrics show and overrides name. By default the source's own: `ip`, `user`, `bearer`, the
    /// name of the header or parameter, `all`.
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> KeyExtractor {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// What happens to a request that does not have the key; by default it is denied.
    #[must_use]
    pub fn if_missing(self, missing: MissingKey) -> KeyExtractor {
        KeyExtractor { missing, ..self }
    }

    /// One spelling for names that a login treats as equal: trimmed, in lower case, and in the compatibility form of Unicode
    /// (NFKC). Use it only if the login does the same.
    #[must_use]
    pub fn folded(self) -> KeyExtractor {
        KeyExtractor { is_folded: true, ..self }
    }

    /// Whether every request has this key.
    #[cfg(feature = "config")]
    pub(crate) fn is_always_there(&self) -> bool {
        matches!(self.source, Source::Constant(_) | Source::Ip | Source::Peer)
    }

    /// What of it an access log does not have.
    pub(crate) fn not_in_access_logs(&self) -> Option<String> {
        match &self.source {
            Source::Header(name) if !super::request::is_logged(name) => Some(format!("the header `{name}`")),
            Source::Bearer => Some("the header `authorization`".to_owned()),
            Source::Peer => Some("the peer's address".to_owned()),
            Source::Function(_) => Some("what a function looks at".to_owned()),
            _ => None,
        }
    }

    /// The namespaces of the keys that it finds.
    pub(crate) fn namespaces(&self) -> impl Iterator<Item = &str> {
        let of_client = (self.missing == MissingKey::Ip).then_some("ip");
        std::iter::once(self.namespace.as_str()).chain(of_client)
    }

    /// Compiles it for the requests of a route.
    pub(crate) fn compile(&self, route: &Matcher) -> Result<CompiledKey, Error> {
        let from = match &self.source {
            Source::Constant(key) => Found::Constant(Key::new(&self.namespace, key)?),
            Source::Ip => Found::Ip,
            Source::Peer => Found::Peer,
            Source::User => Found::User,
            Source::Bearer => Found::Bearer,
            Source::Function(function) => Found::Function(function.clone()),
            Source::Header(name) => match HeaderName::try_from(name.as_str()) {
                Ok(name) => Found::Header(name),
                Err(_) => {
                    let name = name.escape_debug();
                    return Err(Error::call(format!("`{name}` is not the name of a header field")));
                }
            },
            Source::PathParameter(name) if !route.has_parameter(name) => {
                return Err(Error::call(format!(
                    "the key is the path parameter `{}`, and the route's template has none of that name",
                    name.escape_debug()
                )));
            }
            Source::PathParameter(name) => Found::PathParameter(name.clone()),
        };
        let prefix = Key::prefix(&self.namespace)?;
        // A key of three parts cannot be found in a request.
        let shared = Key::with_version(&self.namespace, "missing", "shared")?;
        let client = Key::prefix("ip")?;
        Ok(CompiledKey { from, prefix, shared, client, missing: self.missing, is_folded: self.is_folded })
    }
}

/// The key in words: `ip`, `user`, `all together`, the name of a header, `{id}`.
impl fmt::Display for KeyExtractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Constant(_) => f.write_str("all together"),
            Source::Ip => f.write_str("ip"),
            Source::Peer => f.write_str("peer"),
            Source::User => f.write_str("user"),
            Source::Header(name) => f.write_str(&name.to_ascii_lowercase()),
            Source::Bearer => f.write_str("bearer token"),
            Source::PathParameter(name) => write!(f, "{{{name}}}"),
            Source::Function(_) => f.write_str(&self.namespace),
        }
    }
}

impl fmt::Debug for KeyExtractor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("KeyExtractor");
        shown.field("namespace", &self.namespace).field("if_missing", &self.missing).finish_non_exhaustive()
    }
}

/// Equal if they find the same key in every request; functions are equal only to themselves.
impl PartialEq for KeyExtractor {
    fn eq(&self, other: &KeyExtractor) -> bool {
        let is_same_source = match (&self.source, &other.source) {
            (Source::Constant(one), Source::Constant(other)) => one == other,
            (Source::Header(one), Source::Header(other)) => one.eq_ignore_ascii_case(other),
            (Source::PathParameter(one), Source::PathParameter(other)) => one == other,
            (Source::Function(one), Source::Function(other)) => {
                std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
            }
            (one, other) => std::mem::discriminant(one) == std::mem::discriminant(other),
        };
        is_same_source
            && self.namespace == other.namespace
            && self.missing == other.missing
            && self.is_folded == other.is_folded
    }
}

impl Eq for KeyExtractor {}

/// A compiled key extractor.
pub(crate) struct CompiledKey {
    from: Found,
    /// Before the key, in its canonical text.
    prefix: String,
    shared: Key<'static>,
    client: String,
    missing: MissingKey,
    is_folded: bool,
}

enum Found {
    Constant(Key<'static>),
    Ip,
    Peer,
    User,
    Header(HeaderName),
    Bearer,
    PathParameter(String),
    Function(Function),
}

/// Why a request has no key. Never contains a value of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoKey {
    /// The request does not have it.
    Missing,
    /// It is there, and malformed.
    Malformed(Option<KeyError>),
    /// The client's address is not known.
    NoAddress,
}

impl fmt::Display for NoKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoKey::Missing => f.write_str("the request does not have the key"),
            NoKey::Malformed(Some(error)) => error.fmt(f),
            NoKey::Malformed(None) => f.write_str("the key is given twice, is not text, or is not clear from the path"),
            NoKey::NoAddress => f.write_str(
                "the client's address is not known; serve axum with into_make_service_with_connect_info, or put a \
                 tollgate::http::Peer into each request's extensions",
            ),
        }
    }
}

impl std::error::Error for NoKey {}

impl CompiledKey {
    /// The key of a request, written into `room` if it is joined from parts; `None` if the limit does not apply to the request.
    #[inline]
    pub(crate) fn find(
        &self,
        request: &RequestHead<'_>,
        room: &mut KeyRoom,
    ) -> Result<Option<RoomKey<'_>>, NoKey> {
        let text: Cow<'_, str> = match &self.from {
            Found::Constant(key) => return Ok(Some(RoomKey::Whole(key.canonical()))),
            Found::Ip => return client(request, &self.prefix, room),
            Found::Peer => return address(request, request.peer(), &self.prefix, room),
            Found::User => match request.user() {
                Some(user) => user.into(),
                None => return self.missing(request, room),
            },
            Found::Header(name) => match request.field(name) {
                Field::Text(text) => text.into(),
                Field::Missing => return self.missing(request, room),
                Field::Malformed => return Err(NoKey::Malformed(None)),
            },
            Found::Bearer => match request.field(&AUTHORIZATION) {
                Field::Text(text) => match bearer(text) {
                    Some(token) => token.into(),
                    None => return self.missing(request, room),
                },
                Field::Missing => return self.missing(request, room),
                Field::Malformed => return Err(NoKey::Malformed(None)),
            },
            Found::PathParameter(name) => match request.parameter(name) {
                Some(text) => text,
                // The route matched in doubt, by another reading of the path: a router may see a parameter where we see none.
                None if self.missing == MissingKey::Skip => return Err(NoKey::Malformed(None)),
                None => return self.missing(request, room),
            },
            Found::Function(function) => match function(request) {
                Some(text) => text.into(),
                None => return self.missing(request, room),
            },
        };
        let text = if self.is_folded { folded(&text).into() } else { text };
        Ok(Some(room.write(&self.prefix, &text)?))
    }

    #[cold]
    fn missing(&self, request: &RequestHead<'_>, room: &mut KeyRoom) -> Result<Option<RoomKey<'_>>, NoKey> {
        match self.missing {
            MissingKey::Deny => Err(NoKey::Missing),
            MissingKey::Shared => Ok(Some(RoomKey::Whole(self.shared.canonical()))),
            MissingKey::Ip => client(request, &self.client, room),
            MissingKey::Skip => Ok(None),
        }
    }
}

impl From<KeyError> for NoKey {
    fn from(error: KeyError) -> NoKey {
        NoKey::Malformed(Some(error))
    }
}

/// The key of the client: its address, or its name where a log has names.
fn client(
    request: &RequestHead<'_>,
    prefix: &str,
    room: &mut KeyRoom,
) -> Result<Option<RoomKey<'static>>, NoKey> {
    match request.client_name() {
        Some(name) => Ok(Some(room.write(prefix, name)?)),
        None => address(request, request.client(), prefix, room),
    }
}

/// The key of an address, which is grouped by network.
fn address(
    request: &RequestHead<'_>,
    address: Option<IpAddr>,
    prefix: &str,
    room: &mut KeyRoom,
) -> Result<Option<RoomKey<'static>>, NoKey> {
    let address = address.ok_or(NoKey::NoAddress)?;
    let mut group = ClientGroup::default();
    request.write_group(address, &mut group);
    Ok(Some(room.write(prefix, group.as_str())?))
}

/// The token of a bearer authorization; schemes are written in any case.
fn bearer(text: &str) -> Option<&str> {
    let (scheme, token) = text.trim().split_once(' ')?;
    let token = token.trim_start();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn folded(text: &str) -> String {
    // Lower case may make new compositions, and composing may make capitals: a second pass is enough.
    let once = |text: &str| text.nfkc().collect::<String>().to_lowercase();
    once(&once(text.trim())).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_login_would_not_tell_apart_are_one() {
        for (text, expected) in [
            ("Alice", "alice"),
            ("  alice\t", "alice"),
            ("ＡＬＩＣＥ", "alice"),
            ("ﬁnn", "finn"),
            ("e\u{301}va", "\u{e9}va"),
            ("\u{a0}bob", "bob"),
            ("", ""),
        ] {
            assert_eq!(folded(text), expected, "{text}");
            assert_eq!(folded(&folded(text)), folded(text), "{text}");
        }
    }

    #[test]
    fn a_bearer_token_is_what_follows_the_scheme() {
        for (text, expected) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc", Some("abc")),
            ("BEARER a b", Some("a b")),
            ("Basic abc", None),
            ("Bearer", None),
            ("Bearer ", None),
            ("", None),
        ] {
            assert_eq!(bearer(text), expected, "{text:?}");
        }
    }
}
