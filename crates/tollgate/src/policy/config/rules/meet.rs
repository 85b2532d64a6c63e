//! A recorded request against a rule: whether it is met, who pays and how much.
//!
//! Paths are matched by the routes of the HTTP layer and keys are made as its payers make them, so that a replay means what the
//! service would have done. A log knows less than the service did: what it lacks, `otherwise` says who pays for.

use std::borrow::Cow;
use std::net::IpAddr;

use http::Method;
use tollgate_kernel::MAX_COUNT;

use super::RequestRule;
use crate::front::http::{Asked, ClientAddress, EncodedSeparators, address, decoded, normalized};
use crate::key::Key;

/// A request as an access log has it.
///
/// ```
/// use tollgate::config::RecordedRequest;
///
/// let request = RecordedRequest::of("2001:db8::7").asking("GET", "/users/7?tab=2").user(Some("alice")).bytes(2326);
/// assert_eq!(request.path(), Some("/users/7"));
/// // A line that is no request is one all the same: somebody sent it.
/// assert_eq!(RecordedRequest::of("203.0.113.7").path(), None);
/// ```
#[derive(Clone, Debug)]
pub struct RecordedRequest<'a> {
    client: &'a str,
    address: Option<IpAddr>,
    method: Option<Method>,
    raw_path: &'a str,
    /// In its one spelling; empty where there is none.
    path: Cow<'a, str>,
    user: Option<&'a str>,
    referer: Option<&'a str>,
    user_agent: Option<&'a str>,
    bytes: u64,
}

impl<'a> RecordedRequest<'a> {
    /// From a client: an address, or the name of a host where the log has names.
    pub fn of(client: &'a str) -> RecordedRequest<'a> {
        RecordedRequest {
            client,
            address: address(client.as_bytes()),
            method: None,
            raw_path: "",
            path: Cow::Borrowed(""),
            user: None,
            referer: None,
            user_agent: None,
            bytes: 0,
        }
    }

    /// The method and what was asked for: a path and perhaps a query, or a whole address as proxies are asked.
    #[must_use]
    pub fn asking(mut self, method: &str, target: &'a str) -> RecordedRequest<'a> {
        self.method = Method::from_bytes(method.as_bytes()).ok();
        self.raw_path = path_of(target);
        // An encoded slash is data to whoever wrote the log. What has no one spelling is compared as it came.
        self.path = match self.raw_path {
            "" => Cow::Borrowed(""),
            raw => normalized(raw, EncodedSeparators::Keep).unwrap_or(Cow::Borrowed(raw)),
        };
        self
    }

    /// Who had logged in.
    #[must_use]
    pub fn user(self, user: Option<&'a str>) -> RecordedRequest<'a> {
        RecordedRequest { user, ..self }
    }

    /// The header field `Referer`.
    #[must_use]
    pub fn referer(self, referer: Option<&'a str>) -> RecordedRequest<'a> {
        RecordedRequest { referer, ..self }
    }

    /// The header field `User-Agent`.
    #[must_use]
    pub fn user_agent(self, user_agent: Option<&'a str>) -> RecordedRequest<'a> {
        RecordedRequest { user_agent, ..self }
    }

    /// How many bytes were sent.
    #[must_use]
    pub fn bytes(self, bytes: u64) -> RecordedRequest<'a> {
        RecordedRequest { bytes, ..self }
    }

    /// The path that rules are compared with, if it asks for one.
    pub fn path(&self) -> Option<&str> {
        (!self.path.is_empty()).then_some(&*self.path)
    }

    fn said(&self, what: Said) -> Option<&'a str> {
        match what {
            Said::User => self.user,
            Said::Referer => self.referer,
            Said::UserAgent => self.user_agent,
        }
    }
}

/// The path of what was asked for, without the query: of `/a?b`, `http://host/a?b` or `*`. Empty where there is none.
fn path_of(target: &str) -> &str {
    let end = target.find(['?', '#']).unwrap_or(target.len());
    let target = &target[..end];
    if target.starts_with('/') || target == "*" {
        return target;
    }
    match target.split_once("://") {
        Some((scheme, rest)) if !scheme.is_empty() => rest.find('/').map_or("/", |start| &rest[start..]),
        _ => "",
    }
}

impl Asked for RecordedRequest<'_> {
    fn method(&self) -> Option<&Method> {
        self.method.as_ref()
    }

    fn path(&self) -> &str {
        &self.path
    }

    fn raw_path(&self) -> &str {
        self.raw_path
    }

    fn is_plain(&self) -> bool {
        matches!(self.path, Cow::Borrowed(_))
    }

    fn matched(&self) -> Option<&str> {
        None
    }
}

/// What a request owes under a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordedDue {
    /// Who pays.
    pub key: Key<'static>,
    /// How much, at least 1.
    pub cost: u64,
}

impl RequestRule {
    /// What a request owes; `None` if it does not meet this rule, or costs nothing under it.
    pub fn due(&self, request: &RecordedRequest<'_>) -> Option<RecordedDue> {
        let is_met = (!self.has_path || request.path().is_some())
            && self.route.charges(request)
            && (self.clients.is_empty() || self.is_from(request.address))
            && self.said.iter().all(|(what, texts)| {
                request.said(*what).is_some_and(|found| texts.iter().any(|text| text.fit(found)))
            });
        let cost = match self.cost {
            CostOf::Number(cost) => cost,
            CostOf::Bytes => request.bytes.min(MAX_COUNT),
        };
        if !is_met || cost == 0 {
            return None;
        }
        Some(RecordedDue { key: self.key(request)?, cost })
    }

    fn is_from(&self, address: Option<IpAddr>) -> bool {
        address.is_some_and(|address| self.clients.iter().any(|network| network.contains(&address)))
    }

    /// Who pays; `None` where nobody does.
    fn key(&self, request: &RecordedRequest<'_>) -> Option<Key<'static>> {
        let (namespace, found) = match &self.payer {
            Payer::Client => return client(request),
            Payer::Everyone => return Key::new("all", "all").ok(),
            Payer::Said(what) => (what.namespace(), request.said(*what).map(Cow::Borrowed)),
            Payer::Parameter(name) => (&**name, self.route.parameter(&request.path, name).map(decoded)),
        };
        // What makes no sense as a key is as good as none.
        found.and_then(|text| Key::new(namespace, &text).ok()).or_else(|| match self.otherwise {
            Otherwise::Client => client(request),
            Otherwise::Shared => Key::with_version(namespace, "missing", "shared").ok(),
            Otherwise::Skip => None,
        })
    }
}

/// The key of a client: its address, which pays by network, or its name where the log has names.
fn client(request: &RecordedRequest<'_>) -> Option<Key<'static>> {
    match request.address {
        Some(address) => Key::new("ip", &ClientAddress::peer().group(address)).ok(),
        None => Key::new("ip", request.client).or_else(|_| Key::new("ip", "unknown")).ok(),
    }
}

/// Who pays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Payer {
    Client,
    Everyone,
    Said(Said),
    Parameter(String),
}

impl Payer {
    /// As the file writes it.
    pub(super) fn words(&self) -> Cow<'static, str> {
        match self {
            Payer::Client => "ip".into(),
            Payer::Everyone => "all together".into(),
            Payer::Said(what) => what.namespace().into(),
            Payer::Parameter(name) => format!("{{{name}}}").into(),
        }
    }
}

/// What a request says of who sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    User,
    Referer,
    UserAgent,
}

impl Said {
    fn namespace(self) -> &'static str {
        match self {
            Said::User => "user",
            Said::Referer => "referer",
            Said::UserAgent => "user-agent",
        }
    }
}

/// Who pays where the log does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Otherwise {
    Client,
    Shared,
    Skip,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CostOf {
    Number(u64),
    Bytes,
}

/// Which texts are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Texts {
    Exact(String),
    /// All that begin so; the empty one is every text there is.
    Prefix(String),
}

impl Texts {
    /// Reads `text` or `prefix*`.
    pub(super) fn of(text: &str) -> Texts {
        match text.strip_suffix('*') {
            Some(prefix) => Texts::Prefix(prefix.to_owned()),
            None => Texts::Exact(text.to_owned()),
        }
    }

    fn fit(&self, found: &str) -> bool {
        match self {
            Texts::Exact(text) => text == found,
            Texts::Prefix(prefix) => found.starts_with(prefix.as_str()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::parse;
    use super::*;

    /// What a request owes under one rule: its key and cost, or `-`.
    fn owed(rule: &str, request: &RecordedRequest<'_>) -> String {
        let config =
            parse(&format!("[limits]\napi = {{ unlimited = true }}\n[[rules]]\nlimit = 'api'\n{rule}"));
        let due = config.rules.iter().next().expect("a rule").due(request);
        due.map_or("-".to_owned(), |due| format!("{} {}", due.key, due.cost))
    }

    #[test]
    fn a_rule_is_met_by_what_it_says() {
        for (rule, method, target, is_met) in [
            ("", "GET", "/", true),
            ("path = '/login'", "GET", "/login", true),
            ("path = '/login'", "GET", "/login/", true),
            ("path = '/login'", "GET", "/login?next=/a/b", true),
            ("path = '/login'", "GET", "//x/..//%6Cogin", true),
            ("path = '/login'", "GET", "http://example.com/login?x", true),
            ("path = '/login'", "GET", "/logins", false),
            ("path = '/login'", "GET", "/Login", false),
            ("path = '/api/*'", "GET", "/api", true),
            ("path = '/api/*'", "GET", "/api/users/7", true),
            ("path = '/api/*'", "GET", "/apis", false),
            ("path = '/api/*'", "GET", "/files/../api/x", true),
            ("path = '/api/*'", "GET", "/api/100%", true),
            ("path = '/*'", "GET", "/", true),
            ("path = '/*'", "OPTIONS", "*", false),
            ("path = '/*'", "CONNECT", "example.com:443", false),
            ("", "CONNECT", "example.com:443", true),
            ("methods = ['CONNECT']", "CONNECT", "example.com:443", true),
            ("path = '/'", "GET", "http://example.com", true),
            ("path = '/users/{id}'", "GET", "/users/7", true),
            ("path = '/users/{id}'", "GET", "/users/7/posts", false),
            ("path = '/a%2Fb'", "GET", "/a%2fb", true),
            ("path = '/a/b'", "GET", "/a%2fb", false),
            ("path = '/api/*'\nexcept = ['/api/health']", "GET", "/api/health", false),
            ("path = '/api/*'\nexcept = ['/api/health']", "GET", "/api//health", true),
            ("path = '/api/*'\nexcept = ['/api/v1/*']", "GET", "/api/v1/x", false),
            ("except = ['/static/*']", "GET", "/static/a.css", false),
            ("except = ['/static/*']", "GET", "/a.css", true),
            ("methods = ['GET']", "GET", "/", true),
            ("methods = ['GET']", "HEAD", "/", true),
            ("methods = ['GET', 'PUT']", "POST", "/", false),
            ("methods = ['GET', 'PUT']", "PUT", "/", true),
            ("methods = ['GET']", "get", "/", false),
            ("clients = ['203.0.113.0/24']", "GET", "/", true),
            ("clients = ['::ffff:203.0.113.0/120']", "GET", "/", true),
            ("clients = ['203.0.113.7']", "GET", "/", true),
            ("clients = ['203.0.113.8', '::/0']", "GET", "/", false),
            ("users = ['alice']", "GET", "/", true),
            ("users = ['bob', 'al*']", "GET", "/", true),
            ("users = ['*']", "GET", "/", true),
            ("users = ['Alice', 'bob']", "GET", "/", false),
            ("headers = { user-agent = 'curl/*' }", "GET", "/", true),
            ("headers = { user-agent = 'curl' }", "GET", "/", false),
            ("headers = { referer = '*' }", "GET", "/", false),
            (
                "path = '/a'\nmethods = ['GET']\nclients = ['203.0.113.7']\nusers = ['alice']",
                "GET",
                "/a",
                true,
            ),
            (
                "path = '/a'\nmethods = ['GET']\nclients = ['203.0.113.7']\nusers = ['bob']",
                "GET",
                "/a",
                false,
            ),
        ] {
            let request = RecordedRequest::of("203.0.113.7").asking(method, target);
            let request = request.user(Some("alice")).user_agent(Some("curl/8.0"));
            assert_eq!(owed(rule, &request) != "-", is_met, "{rule:?} {method} {target}");
        }
    }

    /// What was no request came from somebody, and meets what asks for neither a path nor a method.
    #[test]
    fn what_was_no_request_meets_what_asks_for_none() {
        let request = RecordedRequest::of("203.0.113.7");
        for (rule, is_met) in [
            ("", true),
            ("clients = ['203.0.113.7']", true),
            ("except = ['/static/*']", true),
            ("path = '/*'", false),
            ("path = '/{*all}'", false),
            ("methods = ['GET']", false),
        ] {
            assert_eq!(owed(rule, &request) != "-", is_met, "{rule:?}");
        }
    }

    #[test]
    fn keys_are_those_of_the_http_layer() {
        let long = "x".repeat(1_025);
        for (rule, client, user, agent, target, expected) in [
            ("", "203.0.113.7", None, None, "/", "ip:203.0.113.7 1"),
            ("", "::ffff:203.0.113.7", None, None, "/", "ip:203.0.113.7 1"),
            ("", "2001:db8:1:2:3:4:5:6", None, None, "/", "ip:2001%3Adb8%3A1%3A2%3A%3A/64 1"),
            ("", "crawler.example.com", None, None, "/", "ip:crawler.example.com 1"),
            ("", "unix:", None, None, "/", "ip:unix%3A 1"),
            ("", &long, None, None, "/", "ip:unknown 1"),
            ("key = 'all'\ncost = 7", "203.0.113.7", None, None, "/", "all:all 7"),
            ("key = 'user'", "203.0.113.7", Some("a:b"), None, "/", "user:a%3Ab 1"),
            ("key = 'user'", "203.0.113.7", None, None, "/", "ip:203.0.113.7 1"),
            ("key = 'user'\notherwise = 'skip'", "203.0.113.7", None, None, "/", "-"),
            ("key = 'user'\notherwise = 'shared'", "203.0.113.7", None, None, "/", "user:missing:shared 1"),
            ("key = 'user-agent'", "203.0.113.7", None, Some("curl/8"), "/", "user-agent:curl/8 1"),
            ("key = 'user-agent'", "203.0.113.7", None, Some(""), "/", "ip:203.0.113.7 1"),
            ("key = 'user-agent'", "203.0.113.7", None, Some("a\nb"), "/", "ip:203.0.113.7 1"),
            ("key = 'user-agent'", "203.0.113.7", None, Some(&long), "/", "ip:203.0.113.7 1"),
            ("path = '/users/{id}'\nkey = '{id}'", "203.0.113.7", None, None, "/users/a%20b/", "id:a b 1"),
            ("cost = 'bytes'", "203.0.113.7", None, None, "/", "ip:203.0.113.7 2326"),
        ] {
            let request =
                RecordedRequest::of(client).asking("GET", target).user(user).user_agent(agent).bytes(2326);
            assert_eq!(owed(rule, &request), expected, "{rule:?} {client:.20} {target}");
        }
        // What sends nothing costs nothing, and more than can be counted is as much as can.
        assert_eq!(owed("cost = 'bytes'", &RecordedRequest::of("::1")), "-");
        let most = RecordedRequest::of("10.0.0.1").bytes(u64::MAX);
        assert_eq!(owed("cost = 'bytes'", &most), format!("ip:10.0.0.1 {MAX_COUNT}"));
    }
}
