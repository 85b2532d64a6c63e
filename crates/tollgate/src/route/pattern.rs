//! Which requests a route limit applies to: by path, method, host, client network, user and header.
//!
//! Each route is independent: it matches a request or it does not, whatever other routes say, so adding one can never take
//! another's limit away. A router may read a path differently than we do (`/files/../x` is a file to one and `/x` to another),
//! so there are two ways to match. [`Matcher::charges`] matches in doubt: the path as it came, its one spelling (`path.rs`), with
//! or without a slash at its end, or the route that axum matched; any of several values of a header. [`Matcher::frees`], for
//! exceptions and skips, matches only without a doubt.

use std::fmt;

use http::{HeaderName, Method};
use ipnet::IpNet;

use super::client::canonical_network;
use super::path::{self, EncodedSeparators};
use super::request::RequestHead;
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

    /// Only requests of this [authenticated user](super::AuthenticatedUser): a name, `prefix*`, or `*` for anybody who is
    /// authenticated; several may be given.
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

    /// Compiles the route; the error says which part is wrong, and why.
    pub(crate) fn compile(&self) -> Result<Matcher, Error> {
        let place = match &self.at {
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
            place,
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
    place: PathMatcher,
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
    /// do, so it is enough that the path fits as it came, or in its one spelling, or that the router matched it so.
    pub(crate) fn charges(&self, request: &RequestHead<'_>) -> bool {
        let place = match &self.place {
            PathMatcher::Any => true,
            // A line of a log that has no path.
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
        place
            && self.is_by_method(request.known_method())
            && (self.hosts.is_empty() || request.hosts().any(|host| self.has_host(host)))
            && self.is_from(request)
            && self.headers.iter().all(has_header)
            && !self.except.iter().any(|other| other.frees(request))
    }

    /// Whether the request matches, for a caller that would let it pass uncharged: in doubt it does not. The path must be
    /// written in its one spelling, to the last slash, and the router must not have matched it to anything else.
    pub(crate) fn frees(&self, request: &RequestHead<'_>) -> bool {
        let place = match &self.place {
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
        place
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

    /// Whether client and user are meant.
    fn is_from(&self, request: &RequestHead<'_>) -> bool {
        let is_in = |address| self.networks.iter().any(|network| network.contains(&address));
        let is_user = |user: &str| self.users.iter().any(|pattern| pattern.matches(user.as_bytes()));
        (self.networks.is_empty() || request.client().is_some_and(is_in))
            && (self.users.is_empty() || request.user().is_some_and(is_user))
    }

    /// Whether it looks at the path.
    pub(crate) fn needs_path(&self) -> bool {
        !matches!(self.place, PathMatcher::Any) || self.except.iter().any(Matcher::needs_path)
    }

    /// Whether it matches every request.
    pub(crate) fn matches_all(&self) -> bool {
        matches!(self.place, PathMatcher::Any)
            && self.methods.is_empty()
            && self.except.is_empty()
            && self.hosts.is_empty()
            && self.networks.is_empty()
            && self.users.is_empty()
            && self.headers.is_empty()
    }

    /// A parameter of its template.
    pub(crate) fn parameter<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        match &self.place {
            PathMatcher::Template(template) => template.parameter(path, name),
            PathMatcher::Any | PathMatcher::Below(_) => None,
        }
    }

    pub(crate) fn has_parameter(&self, name: &str) -> bool {
        matches!(&self.place, PathMatcher::Template(template) if template.has_parameter(name))
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

/// A path with holes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Template {
    segments: Vec<Segment>,
    /// Whether it is written with a slash at its end.
    is_ended: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Text(String),
    One(String),
    Rest(String),
}

impl Template {
    fn parse(text: &str) -> Result<Template, Error> {
        let wrong = |why: &str| Error::call(format!("the route `{}`: {why}", text.escape_debug()));
        let Some(inside) = text.strip_prefix('/') else {
            return Err(wrong("must start with `/`"));
        };
        let mut segments = Vec::new();
        for part in inside.strip_suffix('/').unwrap_or(inside).split('/') {
            if matches!(segments.last(), Some(Segment::Rest(_))) {
                return Err(wrong("nothing may follow `{*…}`"));
            }
            let hole = part.strip_prefix('{').and_then(|part| part.strip_suffix('}'));
            let segment = match (hole, hole.and_then(|hole| hole.strip_prefix('*'))) {
                (_, Some(name)) => Segment::Rest(name.to_owned()),
                (Some(name), None) => Segment::One(name.to_owned()),
                (None, None) if part.contains(['{', '}']) || part.starts_with([':', '*']) => {
                    return Err(wrong("a parameter is a whole segment, written `{name}` or `{*name}`"));
                }
                (None, None) => {
                    Segment::Text(literal(&format!("/{part}"))?.trim_start_matches('/').to_owned())
                }
            };
            if let Segment::One(name) | Segment::Rest(name) = &segment {
                let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
                let is_taken = segments.iter().any(
                    |other| matches!(other, Segment::One(other) | Segment::Rest(other) if other == name),
                );
                if !is_name || is_taken {
                    return Err(wrong("each parameter needs a name of its own, of letters, digits and `_`"));
                }
            }
            segments.push(segment);
        }
        Ok(Template { segments, is_ended: inside.ends_with('/') })
    }

    fn matches(&self, path: &str) -> bool {
        self.walk(path, |_, _| {}).is_some()
    }

    /// Whether it is the same as another's text but for the names of parameters.
    fn equals(&self, other: &str) -> bool {
        let Ok(other) = Template::parse(other) else { return false };
        let alike = |pair: (&Segment, &Segment)| match pair {
            (Segment::Text(one), Segment::Text(other)) => one == other,
            (one, other) => std::mem::discriminant(one) == std::mem::discriminant(other),
        };
        self.segments.len() == other.segments.len() && self.segments.iter().zip(&other.segments).all(alike)
    }

    fn has_parameter(&self, name: &str) -> bool {
        let is = |segment: &Segment| matches!(segment, Segment::One(one) | Segment::Rest(one) if one == name);
        self.segments.iter().any(is)
    }

    fn parameter<'p>(&self, path: &'p str, name: &str) -> Option<&'p str> {
        let mut found = None;
        self.walk(path, |parameter, text| {
            if parameter == name {
                found = Some(text);
            }
        })?;
        found
    }

    /// Compares a path segment by segment and hands each parameter to `found`; `None` if the path does not fit.
    fn walk<'p>(&self, path: &'p str, mut found: impl FnMut(&str, &'p str)) -> Option<()> {
        let mut rest = path.strip_prefix('/')?;
        // A trailing slash makes no difference.
        rest = rest.strip_suffix('/').unwrap_or(rest);
        let mut is_over = false;
        for segment in &self.segments {
            if is_over {
                return None;
            }
            let (part, after) = match (segment, rest.split_once('/')) {
                (Segment::Rest(_), _) | (_, None) => (rest, None),
                (_, Some((part, after))) => (part, Some(after)),
            };
            match segment {
                Segment::Text(text) if part == text => {}
                Segment::One(name) | Segment::Rest(name) if !part.is_empty() => found(name, part),
                _ => return None,
            }
            (rest, is_over) = after.map_or(("", true), |after| (after, false));
        }
        is_over.then_some(())
    }
}

/// A text that paths are compared with, in their spelling.
fn literal(text: &str) -> Result<String, Error> {
    let wrong = |why: &str| Error::call(format!("the route `{}`: {why}", text.escape_debug()));
    if !text.starts_with('/') {
        return Err(wrong("must start with `/`"));
    }
    let normalized = path::normalized(text, EncodedSeparators::Keep);
    normalized.map(|path| path.into_owned()).map_err(|error| wrong(&error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a template finds in a path: `None`, or its parameters as `name=text`.
    fn check(template: &str, path: &str, expected: Option<&str>) {
        let template = Template::parse(template).expect("a sound template");
        let mut parameters = Vec::new();
        let found = template.walk(path, |name, text| parameters.push(format!("{name}={text}")));
        assert_eq!(found.map(|()| parameters.join(" ")).as_deref(), expected, "{template:?} {path}");
    }

    #[test]
    fn a_template_fits_whole_paths() {
        check("/", "/", Some(""));
        check("/", "/a", None);
        check("/login", "/login", Some(""));
        check("/login", "/login/", Some(""));
        check("/login/", "/login", Some(""));
        check("/login", "/logins", None);
        check("/login", "/login/x", None);
        check("/login", "", None);
        check("/login", "*", None);
        check("/users/{id}", "/users/7", Some("id=7"));
        check("/users/{id}", "/users/me/", Some("id=me"));
        check("/users/{id}", "/users/", None);
        check("/users/{id}", "/users", None);
        check("/users/{id}/posts/{post}", "/users/7/posts/9", Some("id=7 post=9"));
        check("/users/{id}/posts", "/users/7/likes", None);
        check("/files/{*path}", "/files/a/b/c", Some("path=a/b/c"));
        check("/files/{*path}", "/files", None);
        check("/files/{*path}", "/files/", None);
        check("/{*all}", "/a/b", Some("all=a/b"));
        check("/%75sers", "/users", Some(""));
    }

    #[test]
    fn a_template_that_will_not_do_says_why() {
        for (template, why) in [
            ("login", "must start with `/`"),
            ("", "must start with `/`"),
            ("/users/{}", "each parameter needs a name"),
            ("/users/{id}/{id}", "each parameter needs a name of its own"),
            ("/users/{i d}", "each parameter needs a name"),
            ("/users/a{id}", "a parameter is a whole segment"),
            ("/users/:id", "a parameter is a whole segment"),
            ("/files/{*path}/x", "nothing may follow"),
            ("/a%zz", "the route `/a%zz`"),
        ] {
            let error = Route::at(template).compile().expect_err(template).to_string();
            assert!(error.contains(why), "{template}: {error}");
        }
        assert!(Route::below("api").compile().is_err());
        assert!(Route::any().except(Route::at("x")).compile().is_err());
    }

    #[test]
    fn templates_are_equal_whatever_their_parameters_are_called() {
        for (one, other, equal) in [
            ("/users/{id}", "/users/{user_id}", true),
            ("/users/{id}", "/users/{*id}", false),
            ("/users/{id}", "/users/me", false),
            ("/users", "/users/", true),
            ("/users/{id}", "/users/{id}/posts", false),
            ("/users", "no template", false),
        ] {
            assert_eq!(Template::parse(one).unwrap().equals(other), equal, "{one} {other}");
        }
    }
}
