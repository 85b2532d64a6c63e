//! Who pays for a request, and what happens when nobody does.

use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderName;
use http::header::AUTHORIZATION;
use unicode_normalization::UnicodeNormalization;

use super::client::Group;
use super::head::{Field, Head};
use super::route::Matcher;
use crate::error::Error;
use crate::key::{Key, KeyError};

/// Who pays for a request.
///
/// ```
/// use tollgate::http::{Missing, Payer};
///
/// let everyone = Payer::everyone();
/// let address = Payer::client();
/// let user = Payer::header("x-user").namespace("user").otherwise(Missing::Client);
/// let tenant = Payer::by("tenant", |request| request.header("host").map(str::to_owned));
/// ```
///
/// A request without what the payer asks for is [denied](Missing::Deny), unless said otherwise: it is never free by accident.
/// What is there and makes no sense as a key (empty, given twice, not text, over 1,024 bytes) is always denied.
///
/// A limit on what a client merely claims (a header, a path) is only as good as the claim: whoever makes one up for each request
/// has a fresh limit each time. Put the layer behind the one that checks it, or a limit on the [client](Payer::client) beside it.
#[derive(Clone)]
pub struct Payer {
    from: From,
    namespace: String,
    missing: Missing,
    is_folded: bool,
}

#[derive(Clone)]
enum From {
    Everyone,
    Client,
    Peer,
    Header(String),
    Bearer,
    Parameter(String),
    By(By),
}

type By = Arc<dyn Fn(&Head<'_>) -> Option<String> + Send + Sync>;

/// What a request is charged to that does not say who pays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missing {
    /// Nobody: it is denied.
    #[default]
    Deny,
    /// One key for all such requests, apart from every other payer.
    Shared,
    /// The client's address; denied if not even that is known.
    Client,
}

impl Payer {
    fn new(namespace: &str, from: From) -> Payer {
        Payer { from, namespace: namespace.to_owned(), missing: Missing::Deny, is_folded: false }
    }

    /// All together: one key for every request.
    pub fn everyone() -> Payer {
        Payer::new("all", From::Everyone)
    }

    /// The client's address, as [`ClientAddress`](super::ClientAddress) finds it; IPv6 addresses pay by network.
    pub fn client() -> Payer {
        Payer::new("ip", From::Client)
    }

    /// The address at the other end of the connection, be it a proxy's.
    pub fn peer() -> Payer {
        Payer::new("peer", From::Peer)
    }

    /// What a header field says, such as `x-api-key`.
    pub fn header(name: impl Into<String>) -> Payer {
        let name = name.into();
        Payer::new(&name.to_ascii_lowercase(), From::Header(name))
    }

    /// The token of `Authorization: Bearer …`. Another scheme is as good as none.
    pub fn bearer() -> Payer {
        Payer::new("bearer", From::Bearer)
    }

    /// A parameter of the route's template, unescaped.
    pub fn parameter(name: impl Into<String>) -> Payer {
        let name = name.into();
        Payer::new(&name, From::Parameter(name.clone()))
    }

    /// What an outer layer has put into the request's extensions, such as who has logged in.
    ///
    /// ```
    /// use tollgate::http::Payer;
    ///
    /// #[derive(Clone)]
    /// struct User { id: u64 }
    ///
    /// let user = Payer::extension("user", |user: &User| user.id.to_string());
    /// ```
    pub fn extension<T: Send + Sync + 'static>(
        namespace: &str,
        key: impl Fn(&T) -> String + Send + Sync + 'static,
    ) -> Payer {
        Payer::by(namespace, move |head| head.extension::<T>().map(&key))
    }

    /// Whoever the function says.
    pub fn by(namespace: &str, key: impl Fn(&Head<'_>) -> Option<String> + Send + Sync + 'static) -> Payer {
        Payer::new(namespace, From::By(Arc::new(key)))
    }

    /// The namespace of the key, which metrics show and overrides name; unless said, the source's own (`ip`, `bearer`, the
    /// header's or parameter's name, `all`).
    #[must_use]
    pub fn namespace(mut self, namespace: &str) -> Payer {
        namespace.clone_into(&mut self.namespace);
        self
    }

    /// Who pays for a request without one.
    #[must_use]
    pub fn otherwise(self, missing: Missing) -> Payer {
        Payer { missing, ..self }
    }

    /// One spelling for names that a login would not tell apart: without spaces around them, in lower case, and in the
    /// compatibility form of Unicode (NFKC). Use it where the login does the same, and only there.
    #[must_use]
    pub fn folded(self) -> Payer {
        Payer { is_folded: true, ..self }
    }

    /// The namespaces of the keys that it finds.
    pub(super) fn namespaces(&self) -> impl Iterator<Item = &str> {
        let of_client = (self.missing == Missing::Client).then_some("ip");
        std::iter::once(self.namespace.as_str()).chain(of_client)
    }

    /// Made ready for requests of a route.
    pub(super) fn compile(&self, route: &Matcher) -> Result<Source, Error> {
        let from = match &self.from {
            From::Everyone => Found::Everyone,
            From::Client => Found::Client,
            From::Peer => Found::Peer,
            From::Bearer => Found::Bearer,
            From::By(by) => Found::By(by.clone()),
            From::Header(name) => match HeaderName::try_from(name.as_str()) {
                Ok(name) => Found::Header(name),
                Err(_) => {
                    let name = name.escape_debug();
                    return Err(Error::call(format!("`{name}` is not the name of a header field")));
                }
            },
            From::Parameter(name) if !route.has_parameter(name) => {
                return Err(Error::call(format!(
                    "the payer is the path parameter `{}`, and the route's template has none of that name",
                    name.escape_debug()
                )));
            }
            From::Parameter(name) => Found::Parameter(name.clone()),
        };
        let prefix = Key::prefix(&self.namespace)?;
        // A key of three parts is nobody's who is found in a request.
        let shared = Key::with_version(&self.namespace, "missing", "shared")?;
        let client = Key::prefix("ip")?;
        Ok(Source { from, prefix, shared, client, missing: self.missing, is_folded: self.is_folded })
    }
}

impl fmt::Debug for Payer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Payer");
        shown.field("namespace", &self.namespace).field("otherwise", &self.missing).finish_non_exhaustive()
    }
}

/// A payer that is ready to be found in requests.
pub(super) struct Source {
    from: Found,
    /// Before the key, in its canonical text.
    prefix: String,
    shared: Key<'static>,
    client: String,
    missing: Missing,
    is_folded: bool,
}

enum Found {
    Everyone,
    Client,
    Peer,
    Header(HeaderName),
    Bearer,
    Parameter(String),
    By(By),
}

/// Why nobody pays.
#[derive(Debug)]
pub(super) enum Unpaid {
    /// The request does not say.
    Missing,
    /// What it says makes no sense as a key.
    Malformed(Option<KeyError>),
    /// Nobody has told us where the request comes from.
    NoAddress,
}

impl fmt::Display for Unpaid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unpaid::Missing => f.write_str("the request does not say who pays"),
            Unpaid::Malformed(Some(error)) => error.fmt(f),
            Unpaid::Malformed(None) => f.write_str("the field that says who pays is there twice, or is not text"),
            Unpaid::NoAddress => f.write_str(
                "the address of the client is not known; serve axum with into_make_service_with_connect_info, or put a \
                 tollgate::http::PeerAddress into each request's extensions",
            ),
        }
    }
}

impl Source {
    pub(super) fn find(&self, head: &Head<'_>) -> Result<Key<'static>, Unpaid> {
        let text: Cow<'_, str> = match &self.from {
            Found::Everyone => return Ok(self.key("all")?),
            Found::Client => return address(head, head.client(), &self.prefix),
            Found::Peer => return address(head, head.peer(), &self.prefix),
            Found::Header(name) => match head.field(name) {
                Field::Text(text) => text.into(),
                Field::Missing => return self.missing(head),
                Field::Malformed => return Err(Unpaid::Malformed(None)),
            },
            Found::Bearer => match head.field(&AUTHORIZATION) {
                Field::Text(text) => match bearer(text) {
                    Some(token) => token.into(),
                    None => return self.missing(head),
                },
                Field::Missing => return self.missing(head),
                Field::Malformed => return Err(Unpaid::Malformed(None)),
            },
            Found::Parameter(name) => match head.parameter(name) {
                Some(text) => text,
                None => return self.missing(head),
            },
            Found::By(by) => match by(head) {
                Some(text) => text.into(),
                None => return self.missing(head),
            },
        };
        let text = if self.is_folded { folded(&text).into() } else { text };
        Ok(self.key(&text)?)
    }

    fn key(&self, text: &str) -> Result<Key<'static>, KeyError> {
        Key::after_prefix(&self.prefix, text)
    }

    fn missing(&self, head: &Head<'_>) -> Result<Key<'static>, Unpaid> {
        match self.missing {
            Missing::Deny => Err(Unpaid::Missing),
            Missing::Shared => Ok(self.shared.clone()),
            Missing::Client => address(head, head.client(), &self.client),
        }
    }
}

impl std::convert::From<KeyError> for Unpaid {
    fn from(error: KeyError) -> Unpaid {
        Unpaid::Malformed(Some(error))
    }
}

/// The key of an address, which pays by network.
fn address(head: &Head<'_>, address: Option<IpAddr>, prefix: &str) -> Result<Key<'static>, Unpaid> {
    let address = address.ok_or(Unpaid::NoAddress)?;
    // On the stack, as the key itself is allocated.
    let mut group = Group::default();
    head.write_group(address, &mut group);
    Ok(Key::after_prefix(prefix, group.as_str())?)
}

/// The token of a bearer authorization; schemes are written in any case.
fn bearer(text: &str) -> Option<&str> {
    let (scheme, token) = text.trim().split_once(' ')?;
    let token = token.trim_start();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn folded(text: &str) -> String {
    // Lower case may bring compositions of its own, and composing may bring capitals: once more is enough.
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
