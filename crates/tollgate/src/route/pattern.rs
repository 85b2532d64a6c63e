//! Which requests a route limit applies to: by path, method, host, client network, user and header.
//!
//! Each route is independent: it matches a request or not, whatever other routes do, so adding one never removes another's limit.
//! A router may read a path differently than this module (`/files/../x` is a file to one and `/x` to another), so there are two
//! ways to match. [`Matcher::charges`] matches in doubt: the raw path, the normalised path (`path.rs`), with or without a
//! trailing slash, or the route that axum matched; any of several values of a header. [`Matcher::frees`], for exceptions and
//! skips, matches only without doubt.

use std::fmt;

use http::{HeaderName, Method};
use ipnet::IpNet;

use super::client::canonical_network;
use super::request::RequestHead;
use super::template::{Template, literal};
use crate::error::Error;

/// Which requests a [`RouteLimit`](super::RouteLimit) applies to.
///
/// ```
/// use tollgate::route::Route;
///
/// let everything = Route::any();
/// let one_user = Route::at("/users/{id}");
/// let uploads = Route::post("/files/{*path}");
/// let api = Route::below("/api").except(Route::get("/api/health"));
/// let bots = Route::any().header("user-agent", "curl/*").host("api.example.com");
/// ```
///
/// A path template has the form of axum 0.8: `{id}` is one segment and `{*path}` all segments that follow, at least one. Each
/// route is independent: `/users/{id}` also matches `/users/me`, unless that is [excepted](Route::except). A request must meet
/// every condition of the route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    at: At,
    methods: Vec<Method>,
    except: Vec<Route>,
    hosts: Vec<String>,
    networks: Vec<IpNet>,
    users: Vec<String>,
    headers: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum At {
    Any,
    Template(String),
    Below(String),
}

impl Route {
    fn new(at: At) -> Route {
        Route {
            at,
            methods: Vec::new(),
            except: Vec::new(),
            hosts: Vec::new(),
            networks: Vec::new(),
            users: Vec::new(),
            headers: Vec::new(),
        }
    }

    /// Every request.
    pub fn any() -> Route {
        Route::new(At::Any)
    }

    /// Requests whose path fits a template, by any method.
    pub fn at(template: impl Into<String>) -> Route {
        Route::new(At::Template(template.into()))
    }

    /// Requests for this path and everything below it: `/api` covers `/api` and `/api/users`, not `/apis`.
    pub fn below(prefix: impl Into<String>) -> Route {
        Route::new(At::Below(prefix.into()))
    }

    /// GET requests whose path fits a template, and HEAD requests, which are answered like them.
    pub fn get(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::GET)
    }

    /// POST requests whose path fits a template.
    pub fn post(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::POST)
    }

    /// PUT requests whose path fits a template.
    pub fn put(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::PUT)
    }

    /// PATCH requests whose path fits a template.
    pub fn patch(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::PATCH)
    }

    /// DELETE requests whose path fits a template.
    pub fn delete(template: impl Into<String>) -> Route {
        Route::at(template).method(Method::DELETE)
    }

    /// Only requests by this method; several may be given. GET covers HEAD.
    #[must_use]
    pub fn method(mut self, method: Method) -> Route {
        self.methods.push(method);
        self
    }

    /// Without the requests that the other route matches. A request is excepted only without a doubt: its path must be written
    /// plainly (no needless escapes, dots or doubled slashes), and axum must not have matched another route.
    #[must_use]
    pub fn except(mut self, other: Route) -> Route {
        self.except.push(other);
        self
    }

    /// Only requests to this host, such as `api.example.com` or `*.example.com`; several may be given. The port and the case do
    /// not matter.
    #[must_use]
    pub fn host(mut self, host: impl Into<String>) -> Route {
        self.hosts.push(host.into());
        self
    }

    /// Only requests whose client's address is in one of these networks.
    #[must_use]
    pub fn from_networks(mut self, networks: impl IntoIterator<Item = IpNet>) -> Route {
        self.networks.extend(networks.into_iter().map(canonical_network));
        self
    }

    /// Only requests of this [authenticated user](super::AuthenticatedUser): a name, `prefix*`, or `*` for every authenticated
    /// user; several may be given.
    #[must_use]
    pub fn user(mut self, user: impl Into<String>) -> Route {
        self.users.push(user.into());
        self
    }

    /// Only requests with this header field: its text, `prefix*`, or `*` for any text. Each header that is given must match.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Route {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// What of it an access log does not have.
    pub(crate) fn not_in_access_logs(&self) -> Option<String> {
        if !self.hosts.is_empty() {
            return Some("the host".to_owned());
        }
        let unlogged = |(name, _): &&(String, String)| !super::request::is_logged(name);
        let own = self.headers.iter().find(unlogged).map(|(name, _)| format!("the header `{name}`"));
        own.or_else(|| self.except.iter().find_map(Route::not_in_access_logs))
    }

    /// Compiles the route; the error names the part that is wrong, and why.
    pub(crate) fn compile(&self) -> Result<Matcher, Error> {
        let path_matcher = match &self.at {
            At::Any => PathMatcher::Any,
            At::Template(template) => PathMatcher::Template(Template::parse(template)?),
            At::Below(prefix) => PathMatcher::Below(literal(prefix)?.trim_end_matches('/').to_owned()),
        };
        let except = self.except.iter().map(Route::compile).collect::<Result<_, _>>()?;
        let header = |(name, value): &(String, String)| match HeaderName::try_from(name.as_str()) {
            Ok(name) => Ok((name, TextPattern::new(value))),
            Err(_) => Err(Error::call(format!("`{}` is not the name of a header", name.escape_debug()))),
        };
        Ok(Matcher {
            path_matcher,
            methods: self.methods.clone(),
            except,
            hosts: self.hosts.iter().map(|host| HostPattern::parse(host)).collect::<Result<_, _>>()?,
            networks: self.networks.clone(),
            users: self.users.iter().map(|user| TextPattern::new(user)).collect(),
            headers: self.headers.iter().map(header).collect::<Result<_, _>>()?,
        })
    }
}

/// The route in words: `POST /login`, `every request`.
impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut words: Vec<String> = Vec::new();
        if !self.methods.is_empty() {
            words.push(self.methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", "));
        }
        words.extend(self.path_words());
        if !self.except.is_empty() {
            let every = if self.at == At::Any { "every path " } else { "" };
            let paths: Vec<String> = self.except.iter().map(Route::to_string).collect();
            words.push(format!("{every}except {}", paths.join(", ")));
        }
        if !self.hosts.is_empty() {
            words.push(format!("of host {}", self.hosts.join(", ")));
        }
        if !self.networks.is_empty() {
            let network = |network: &IpNet| match network.prefix_len() == network.max_prefix_len() {
                true => network.addr().to_string(),
                false => network.to_string(),
            };
            let networks: Vec<String> = self.networks.iter().map(network).collect();
            words.push(format!("from {}", networks.join(", ")));
        }
        if !self.users.is_empty() {
            words.push(format!("of user {}", self.users.join(", ")));
        }
        words.extend(self.headers.iter().map(|(name, value)| format!("with {name} {value}")));
        f.write_str(if words.is_empty() { "every request" } else { "" })?;
        f.write_str(&words.join(" "))
    }
}

impl Route {
    /// The path as the config writes it.
    fn path_words(&self) -> Option<String> {
        match &self.at {
            At::Any => None,
            At::Template(template) => Some(template.clone()),
            At::Below(prefix) => Some(format!("{}/*", prefix.trim_end_matches('/'))),
        }
    }
}

/// A compiled route.
#[derive(Clone, Debug)]
pub(crate) struct Matcher {
    path_matcher: PathMatcher,
    methods: Vec<Method>,
    except: Vec<Matcher>,
    hosts: Vec<HostPattern>,
    networks: Vec<IpNet>,
    users: Vec<TextPattern>,
    headers: Vec<(HeaderName, TextPattern)>,
}

#[derive(Clone, Debug)]
enum PathMatcher {
    Any,
    Template(Template),
    /// Without a trailing slash.
    Below(String),
}

impl Matcher {
    /// Whether the request matches, for a caller that would charge it: in doubt it does. A router may see another path than we
    /// do, so the raw path, the normalised path or the router's match is enough.
    pub(crate) fn charges(&self, request: &RequestHead<'_>) -> bool {
        let path_matcher = match &self.path_matcher {
            PathMatcher::Any => true,
            // A log line without a path.
            _ if request.path().is_empty() => false,
            PathMatcher::Template(template) => {
                template.matches(request.path())
                    || (!request.is_plain() && template.matches(request.raw_path()))
                    || request.matched().is_some_and(|other| template.equals(other))
            }
            PathMatcher::Below(prefix) => {
                is_below(prefix, request.path())
                    || (!request.is_plain() && is_below(prefix, request.raw_path()))
                    || request.matched().is_some_and(|other| is_below(prefix, other))
            }
        };
        let has_header = |(name, pattern): &(HeaderName, TextPattern)| {
            request.values(name).any(|value| pattern.matches(value))
        };
        path_matcher
            && self.is_by_method(request.known_method())
            && (self.hosts.is_empty() || request.hosts().any(|host| self.has_host(host)))
            && self.is_from(request)
            && self.headers.iter().all(has_header)
            && !self.except.iter().any(|other| other.frees(request))
    }

    /// Whether the request matches, for a caller that would let it pass uncharged: in doubt it does not. The raw path must be the
    /// normalised one, to the last slash, and the router must not have matched another route.
    pub(crate) fn frees(&self, request: &RequestHead<'_>) -> bool {
        let path_matcher = match &self.path_matcher {
            PathMatcher::Any => true,
            _ if request.path().is_empty() => false,
            PathMatcher::Template(template) => {
                let is_ended = request.path().len() > 1 && request.path().ends_with('/');
                request.is_plain()
                    && template.is_ended == is_ended
                    && template.matches(request.path())
                    && request.matched().is_none_or(|other| template.equals(other))
            }
            PathMatcher::Below(prefix) => {
                request.is_plain()
                    && is_below(prefix, request.path())
                    && request.matched().is_none_or(|other| is_below(prefix, other))
            }
        };
        let has_header = |(name, pattern): &(HeaderName, TextPattern)| {
            let mut values = request.values(name);
            values.next().is_some_and(|value| pattern.matches(value)) && values.next().is_none()
        };
        let has_host = || request.hosts().next().is_some() && request.hosts().all(|host| self.has_host(host));
        path_matcher
            && self.is_by_method(request.known_method())
            && (self.hosts.is_empty() || has_host())
            && self.is_from(request)
            && self.headers.iter().all(has_header)
            && !self.except.iter().any(|other| other.charges(request))
    }

    fn is_by_method(&self, method: Option<&Method>) -> bool {
        let Some(method) = method else { return self.methods.is_empty() };
        let is = |wanted: &Method| wanted == method || (wanted == Method::GET && method == Method::HEAD);
        self.methods.is_empty() || self.methods.iter().any(is)
    }

    fn has_host(&self, host: &[u8]) -> bool {
        self.hosts.iter().any(|pattern| pattern.matches(host))
    }

    /// Whether client and user match.
    fn is_from(&self, request: &RequestHead<'_>) -> bool {
        let is_in = |address| self.networks.iter().any(|network| network.contains(&address));
        let is_user = |user: &str| self.users.iter().any(|pattern| pattern.matches(user.as_bytes()));
        (self.networks.is_empty() || request.client().is_some_and(is_in))
            && (self.users.is_empty() || request.user().is_some_and(is_user))
    }

    /// Whether it looks at the path.
    pub(crate) fn needs_path(&self) -> bool {
        !matches!(self.path_matcher, PathMatcher::Any) || self.except.iter().any(Matcher::needs_path)
    }

    /// Whether it matches every request.
    pub(crate) fn matches_all(&self) -> bool {
        matches!(self.path_matcher, PathMatcher::Any)
            && self.methods.is_empty()
            && self.except.is_empty()
            && self.hosts.is_empty()
            && self.networks.is_empty()
            && self.users.is_empty()
            && self.headers.is_empty()
    }

    /// A parameter of its template.
    pub(crate) fn parameter<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        match &self.path_matcher {
            PathMatcher::Template(template) => template.parameter(path, name),
            PathMatcher::Any | PathMatcher::Below(_) => None,
        }
    }

    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        matches!(&self.path_matcher, PathMatcher::Template(template) if template.has_parameter(name))
    }
}

/// A text, or all that begin so.
#[derive(Clone, Debug)]
enum TextPattern {
    Exact(String),
    /// The empty prefix is every text there is.
    Prefix(String),
}

impl TextPattern {
    /// Reads `text` or `prefix*`.
    fn new(text: &str) -> TextPattern {
        match text.strip_suffix('*') {
            Some(prefix) => TextPattern::Prefix(prefix.to_owned()),
            None => TextPattern::Exact(text.to_owned()),
        }
    }

    fn matches(&self, found: &[u8]) -> bool {
        match self {
            TextPattern::Exact(text) => text.as_bytes() == found,
            TextPattern::Prefix(prefix) => found.starts_with(prefix.as_bytes()),
        }
    }
}

/// A host, or all hosts below one. Both in lower case.
#[derive(Clone, Debug)]
enum HostPattern {
    Exact(String),
    /// With its leading dot.
    Below(String),
}

impl HostPattern {
    /// Reads `example.com` or `*.example.com`.
    fn parse(text: &str) -> Result<HostPattern, Error> {
        let host = text.to_ascii_lowercase();
        let (name, is_below) = match host.strip_prefix("*.") {
            Some(rest) => (rest, true),
            None => (host.as_str(), false),
        };
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let is_address = name.starts_with('[') && name.ends_with(']') && !is_below;
        if name.is_empty() || !(is_address || name.bytes().all(is_name)) {
            return Err(Error::call(format!(
                "the host `{}`: write a name without scheme, port or path, such as `api.example.com` or `*.example.com`",
                text.escape_debug()
            )));
        }
        let name = name.trim_end_matches('.').to_owned();
        Ok(if is_below { HostPattern::Below(format!(".{name}")) } else { HostPattern::Exact(name) })
    }

    fn matches(&self, host: &[u8]) -> bool {
        let host = without_port(host.trim_ascii());
        let host = host.strip_suffix(b".").unwrap_or(host);
        match self {
            HostPattern::Exact(name) => host.eq_ignore_ascii_case(name.as_bytes()),
            HostPattern::Below(suffix) => host
                .split_at_checked(host.len().wrapping_sub(suffix.len()))
                .is_some_and(|(name, end)| !name.is_empty() && end.eq_ignore_ascii_case(suffix.as_bytes())),
        }
    }
}

/// A host without its port; an IPv6 address keeps its brackets.
fn without_port(host: &[u8]) -> &[u8] {
    let after_address = host.iter().rposition(|&byte| byte == b']').unwrap_or(0);
    match host[after_address..].iter().position(|&byte| byte == b':') {
        Some(colon) => &host[..after_address + colon],
        None => host,
    }
}

/// Whether a path is this one, or one below it.
fn is_below(prefix: &str, path: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
