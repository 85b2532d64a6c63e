//! `[[rules]]`: which recorded requests meet which limit, and who would have paid.
//!
//! A log of requests says nothing of limits, so these rules stand for the tolls that a service would have: the same routes, matched
//! by the same code (`front/http/route.rs`), and the same payers. What each means for a request is worked out in `meet.rs`.
//! Nothing but a replay of logs looks at them: a server with such a config serves as if they were not there.

mod meet;

use std::fmt;

use http::Method;
use ipnet::IpNet;
use tollgate_kernel::MAX_COUNT;

use self::meet::{CostOf, Otherwise, Payer, Said, Texts};
pub use self::meet::{RecordedDue, RecordedRequest};
use super::named;
use super::reader::{Field, Reader, Section};
use crate::front::http::{Matcher, Route, address, canonical_network};
use crate::policy::Rule;

/// The fields of a rule.
const FIELDS: [&str; 10] =
    ["limit", "path", "except", "methods", "clients", "users", "headers", "key", "otherwise", "cost"];

/// The header fields that an access log has.
const HEADERS: [(&str, Said); 2] = [("referer", Said::Referer), ("user-agent", Said::UserAgent)];

/// Which recorded requests meet which limit: the rules of `[[rules]]`.
///
/// ```
/// use tollgate::config::{Config, RecordedRequest};
///
/// let config = Config::parse(r#"
///     [limits.api]
///     strategy = "token_bucket"
///     rate = "10/s"
///     burst = 20
///
///     [limits.login]
///     strategy = "fixed_window"
///     limit = 5
///     window = "1m"
///
///     [[rules]]
///     path = "/api/*"          # /api and all below it
///     limit = "api"
///     key = "user"             # who has logged in, and the address of who has not
///
///     [[rules]]
///     path = "/login"
///     methods = ["POST"]
///     limit = "login"
/// "#)?;
/// let met = |method, path| {
///     let request = RecordedRequest::of("203.0.113.7").asking(method, path);
///     let dues = config.rules.iter().filter_map(|rule| Some((rule.limit(), rule.due(&request)?.key.to_string())));
///     dues.collect::<Vec<_>>()
/// };
/// assert_eq!(met("POST", "/login?next=/"), [("login", "ip:203.0.113.7".to_owned())]);
/// assert_eq!(met("GET", "//api/./users"), [("api", "ip:203.0.113.7".to_owned())]);
/// assert_eq!(met("GET", "/login"), []);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A rule matches a request that is all of what it says; one that says nothing matches every request. Each rule that matches
/// charges its limit, and all of them together are one charge: all or none.
///
/// | of `[[rules]]` | says | unless said |
/// |---|---|---|
/// | `limit` | the limit that is met | |
/// | `path` | one path, `/api/*` for it and all below, or a template such as `/users/{id}` | any |
/// | `except` | paths that are left out | none |
/// | `methods` | such as `["POST"]`; GET covers HEAD | any |
/// | `clients` | addresses and networks | any |
/// | `users` | who has logged in: a name, `prefix*`, or `*` for anybody who has | any |
/// | `headers` | what `referer` and `user-agent` are, written as `users` are | any |
/// | `key` | who pays: `ip`, `user`, `all` together, `referer`, `user-agent`, or a part of the path, such as `{id}` | `ip` |
/// | `otherwise` | who pays where the log does not have the key: the `ip`, one `shared` key, or nobody (`skip`) | `ip` |
/// | `cost` | how much: a number, or `"bytes"` for as many as were sent | 1 |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestRules {
    rules: Vec<RequestRule>,
}

impl RequestRules {
    /// The rules, in the order of the file.
    pub fn iter(&self) -> std::slice::Iter<'_, RequestRule> {
        self.rules.iter()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }
}

impl<'a> IntoIterator for &'a RequestRules {
    type Item = &'a RequestRule;
    type IntoIter = std::slice::Iter<'a, RequestRule>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

/// One rule of `[[rules]]`. Its `Display` is the rule in words, without the limit: `POST /login, by ip`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestRule {
    limit: String,
    route: Matcher,
    /// Whether a path is asked for.
    has_path: bool,
    clients: Vec<IpNet>,
    /// What is said of the user and of header fields: one of the texts must fit.
    said: Vec<(Said, Vec<Texts>)>,
    payer: Payer,
    otherwise: Otherwise,
    cost: CostOf,
    words: String,
}

impl RequestRule {
    /// The limit that is met.
    pub fn limit(&self) -> &str {
        &self.limit
    }
}

impl fmt::Display for RequestRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, by {}", self.words, self.payer.words())?;
        match self.cost {
            CostOf::Number(1) => Ok(()),
            CostOf::Number(cost) => write!(f, ", costing {cost}"),
            CostOf::Bytes => f.write_str(", costing the bytes sent"),
        }
    }
}

/// Reads all rules. `limits` are the names there are, `rules` the limits that could be read.
pub(super) fn read(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    limits: Option<&Section<'_>>,
    rules: &[Rule],
) -> RequestRules {
    let names: Vec<&str> = limits.into_iter().flat_map(Section::fields).map(|field| field.name).collect();
    let sections = reader.sections(field).into_iter().map(Section::showing_all);
    let rules = sections.filter_map(|section| read_rule(reader, &section, &names, rules)).collect();
    RequestRules { rules }
}

/// Reads one rule. Every field is looked at, whatever is wrong with the others.
fn read_rule(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    names: &[&str],
    rules: &[Rule],
) -> Option<RequestRule> {
    reader.only(section, &FIELDS);
    let limit = match section.field("limit") {
        Some(field) => named::read(reader, field, names, rules, "a log does not say when a request is done"),
        None => {
            reader.missing(section, "limit", format!("\"{}\"", names.first().copied().unwrap_or("api")));
            None
        }
    };
    let mut words = Vec::new();
    let route = read_route(reader, section, &mut words);
    let clients = match section.field("clients") {
        Some(field) => read_clients(reader, field, &mut words),
        None => Some(Vec::new()),
    };
    let said = read_said(reader, section, &mut words);
    let payer = read_payer(reader, section, route.as_ref());
    let cost = match section.field("cost") {
        Some(field) => read_cost(reader, field),
        None => Some(CostOf::Number(1)),
    };
    let words = if words.is_empty() { "every request".to_owned() } else { words.join(" ") };
    let (payer, otherwise) = payer?;
    Some(RequestRule {
        limit: limit?,
        route: route?,
        has_path: section.field("path").is_some(),
        clients: clients?,
        said: said?,
        payer,
        otherwise,
        cost: cost?,
        words,
    })
}

/// Reads `path`, `except` and `methods`.
fn read_route(reader: &mut Reader<'_>, section: &Section<'_>, words: &mut Vec<String>) -> Option<Matcher> {
    let mut is_sound = true;
    let mut route = Route::any();
    let mut methods = Vec::new();
    if let Some(field) = section.field("methods") {
        for text in reader.texts(field, "[\"POST\"]").unwrap_or_default() {
            match method(&text) {
                Ok(method) => methods.push(method),
                Err(fix) => reader.mistake(field, fix),
            }
        }
        is_sound &= !methods.is_empty();
        words.push(methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", "));
    }
    if let Some(field) = section.field("path") {
        let place = reader.text(field, "/api/*").map(place);
        match place.map(|place| place.and_then(|route| route.compile().map(|_| route).map_err(told))) {
            Some(Ok(place)) => route = place,
            Some(Err(fix)) => {
                reader.mistake(field, fix);
                is_sound = false;
            }
            None => is_sound = false,
        }
        words.extend(field.as_text().map(str::to_owned));
    }
    if let Some(field) = section.field("except") {
        let texts = reader.texts(field, "[\"/api/health\"]").unwrap_or_default();
        is_sound &= !texts.is_empty();
        for text in &texts {
            match place(text).and_then(|route| route.compile().map(|_| route).map_err(told)) {
                Ok(other) => route = route.except(other),
                Err(fix) => {
                    reader.mistake(field, fix);
                    is_sound = false;
                }
            }
        }
        let every = if section.field("path").is_none() { "every path " } else { "" };
        words.push(format!("{every}except {}", texts.join(", ")));
    }
    route = methods.into_iter().fold(route, Route::method);
    is_sound.then(|| route.compile().ok()).flatten()
}

/// A path as the file writes it: one path, `/api/*`, or a template.
fn place(text: &str) -> Result<Route, String> {
    if let Some(prefix) = text.strip_suffix("/*") {
        // Where a template begins or another star stands, this is no prefix.
        if !prefix.contains(['*', '{', '}']) {
            return Ok(Route::below(if prefix.is_empty() { "/" } else { prefix }));
        }
        return Err("`/*` ends a plain path; in a template write `/{*rest}` for all that follows".to_owned());
    }
    if text.replace("{*", "{").contains('*') {
        return Err(
            "a `*` stands only at the end, as in \"/api/*\"; for the sign itself write %2A".to_owned()
        );
    }
    Ok(Route::at(text))
}

fn told(error: crate::error::Error) -> String {
    error.to_string()
}

fn method(text: &str) -> Result<Method, String> {
    let capitals = text.to_ascii_uppercase();
    match Method::from_bytes(text.as_bytes()) {
        Ok(method) if text == capitals => Ok(method),
        Ok(_) => Err(format!("methods are written in capitals; write \"{capitals}\"")),
        Err(_) => Err(format!("`{}` is no method; write such as \"POST\"", text.escape_debug())),
    }
}

fn read_clients(reader: &mut Reader<'_>, field: &Field<'_>, words: &mut Vec<String>) -> Option<Vec<IpNet>> {
    let texts = reader.texts(field, "[\"10.0.0.0/8\", \"2001:db8::7\"]")?;
    words.push(format!("from {}", texts.join(", ")));
    let mut networks = Vec::new();
    for text in &texts {
        match text.parse::<IpNet>().ok().or_else(|| address(text.as_bytes()).map(IpNet::from)) {
            Some(network) => networks.push(canonical_network(network)),
            None => {
                let fix = format!(
                    "`{}` is no address or network; write such as \"203.0.113.7\" or \"10.0.0.0/8\"",
                    text.escape_debug()
                );
                reader.mistake(field, fix);
            }
        }
    }
    (networks.len() == texts.len()).then_some(networks)
}

/// Reads `users` and `headers`.
fn read_said(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    words: &mut Vec<String>,
) -> Option<Vec<(Said, Vec<Texts>)>> {
    let mut all = Vec::new();
    let mut is_sound = true;
    if let Some(field) = section.field("users") {
        let texts = reader.texts(field, "[\"alice\", \"svc-*\"]").unwrap_or_default();
        is_sound &= !texts.is_empty();
        words.push(format!("of user {}", texts.join(", ")));
        all.push((Said::User, texts.iter().map(|text| Texts::of(text)).collect()));
    }
    if let Some(field) = section.field("headers") {
        match reader.section(field) {
            Some(headers) => is_sound &= read_headers(reader, &headers, &mut all, words),
            None => is_sound = false,
        }
    }
    is_sound.then_some(all)
}

/// Reads what header fields must be, and says whether all of it could be read.
fn read_headers(
    reader: &mut Reader<'_>,
    headers: &Section<'_>,
    all: &mut Vec<(Said, Vec<Texts>)>,
    words: &mut Vec<String>,
) -> bool {
    reader.only(headers, &HEADERS.map(|(name, _)| name));
    let mut is_sound = true;
    for (name, said) in HEADERS {
        let Some(field) = headers.field(name) else { continue };
        match reader.text(field, "curl/*") {
            Some(text) => {
                words.push(format!("with {name} {text}"));
                all.push((said, vec![Texts::of(text)]));
            }
            None => is_sound = false,
        }
    }
    is_sound
}

/// Reads `key` and `otherwise`.
fn read_payer(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    route: Option<&Matcher>,
) -> Option<(Payer, Otherwise)> {
    let payer = match section.field("key") {
        Some(field) => read_key(reader, field, route),
        None => Some(Payer::Client),
    };
    let Some(field) = section.field("otherwise") else { return Some((payer?, Otherwise::Client)) };
    let otherwise = reader.choice(
        field,
        &[("ip", Otherwise::Client), ("shared", Otherwise::Shared), ("skip", Otherwise::Skip)],
    );
    if matches!(payer, Some(Payer::Client | Payer::Everyone)) && otherwise.is_some() {
        reader
            .mistake(field, "says who pays where a log lacks the key, and this key it always has; remove it");
        return None;
    }
    Some((payer?, otherwise?))
}

fn read_key(reader: &mut Reader<'_>, field: &Field<'_>, route: Option<&Matcher>) -> Option<Payer> {
    if let Some(name) = field.as_text().and_then(|text| text.strip_prefix('{')?.strip_suffix('}')) {
        let name = name.trim_start_matches('*');
        // A path that could not be read has been told of already.
        if route?.has_parameter(name) {
            return Some(Payer::Parameter(name.to_owned()));
        }
        reader
            .mistake(field, format!("the rule's path has no `{{{name}}}`; write it as in \"/users/{{id}}\""));
        return None;
    }
    let mut choices =
        vec![("ip", Payer::Client), ("user", Payer::Said(Said::User)), ("all", Payer::Everyone)];
    choices.extend(HEADERS.map(|(name, said)| (name, Payer::Said(said))));
    let choices: Vec<(&str, &Payer)> = choices.iter().map(|(name, payer)| (*name, payer)).collect();
    reader.choice(field, &choices).cloned()
}

fn read_cost(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<CostOf> {
    if field.as_text().is_some_and(|text| !text.bytes().all(|byte| byte.is_ascii_digit())) {
        return reader.choice(field, &[("bytes", CostOf::Bytes)]);
    }
    match reader.whole(field, 1, "")? {
        cost @ 1..=MAX_COUNT => Some(CostOf::Number(cost)),
        _ => {
            reader.mistake(field, format!("is too large; at most {MAX_COUNT}"));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{check, parse};

    const LIMITS: &str = "[limits]\napi = { unlimited = true }\nlogin = { blocked = true }\n\
                          pool = { strategy = 'concurrency', limit = 5, lease = '1s' }\n[[rules]]\n";

    #[test]
    fn rules_are_read_and_said_in_words() {
        for (rule, words) in [
            ("", "every request, by ip"),
            ("except = ['/static/*']", "every path except /static/*, by ip"),
            (
                "path = '/api/*'\nexcept = ['/api/health', '/api/v1/*']",
                "/api/* except /api/health, /api/v1/*, by ip",
            ),
            (
                "methods = ['GET', 'POST']\npath = '/users/{id}'\nkey = '{id}'",
                "GET, POST /users/{id}, by {id}",
            ),
            ("path = '/files/{*path}'\nkey = '{*path}'\ncost = 5", "/files/{*path}, by {path}, costing 5"),
            ("clients = ['10.0.0.0/8', '::1']\nkey = 'all'", "from 10.0.0.0/8, ::1, by all together"),
            ("users = ['a*', '*']\nkey = 'user'\notherwise = 'skip'", "of user a*, *, by user"),
            (
                "headers = { user-agent = 'curl/*', referer = '' }\nkey = 'user-agent'\notherwise = 'shared'\ncost = 'bytes'",
                "with referer  with user-agent curl/*, by user-agent, costing the bytes sent",
            ),
        ] {
            let config = parse(&format!("{LIMITS}limit = 'api'\n{rule}"));
            let found: Vec<_> = config.rules.iter().map(|rule| (rule.limit(), rule.to_string())).collect();
            assert_eq!(found, [("api", words.to_owned())], "{rule}");
        }
        assert!(parse("rules = []").rules.is_empty());
    }

    #[test]
    fn mistakes_are_told() {
        for (rule, field, value, fix) in [
            ("limit = 'logn'", "limit", "'logn'", "there is no such limit; did you mean \"login\"?"),
            ("limit = 'colour'", "limit", "'colour'", "there is no such limit; known: api, login, pool"),
            ("limit = 'pool'", "limit", "'pool'", "a log does not say when a request is done"),
            ("limit = 1", "limit", "1", "must be text in quotes"),
            ("path = 'api'", "path", "'api'", "must start with `/`"),
            ("path = 1", "path", "1", "must be text in quotes, such as \"/api/*\""),
            ("path = '/a*'", "path", "'/a*'", "a `*` stands only at the end"),
            ("path = '/a/*/b'", "path", "'/a/*/b'", "a `*` stands only at the end"),
            ("path = '/a/{b}/*'", "path", "'/a/{b}/*'", "in a template write `/{*rest}`"),
            ("path = '/users/:id'", "path", "'/users/:id'", "a parameter is a whole segment"),
            ("path = '/a?b=1'", "path", "'/a?b=1'", "where a query or fragment begins"),
            ("except = ['x']", "except", "[…]", "must start with `/`"),
            ("except = '/x'", "except", "'/x'", "must be a list of texts, such as [\"/api/health\"]"),
            ("methods = ['post']", "methods", "[…]", "methods are written in capitals; write \"POST\""),
            ("methods = ['P T']", "methods", "[…]", "`P T` is no method"),
            ("methods = []", "methods", "[…]", "must be a list of texts, such as [\"POST\"]"),
            ("clients = ['10.0.0.0/33']", "clients", "[…]", "`10.0.0.0/33` is no address or network"),
            ("clients = ['localhost']", "clients", "[…]", "`localhost` is no address or network"),
            ("users = 'alice'", "users", "'alice'", "must be a list of texts"),
            ("headers = 'curl'", "headers", "'curl'", "must be a table"),
            ("headers = { user-agnet = 'x' }", "headers.user-agnet", "'x'", "did you mean `user-agent`?"),
            ("headers = { referer = 1 }", "headers.referer", "1", "must be text in quotes"),
            (
                "key = 'usr'",
                "key",
                "'usr'",
                "must be one of ip, user, all, referer, user-agent; did you mean \"user\"?",
            ),
            ("key = '{id}'", "key", "'{id}'", "the rule's path has no `{id}`"),
            ("otherwise = 'ip'", "otherwise", "'ip'", "this key it always has; remove it"),
            ("key = 'user'\notherwise = 'deny'", "otherwise", "'deny'", "must be one of ip, shared, skip"),
            ("cost = 0", "cost", "0", "must be at least 1"),
            ("cost = 1.5", "cost", "1.5", "must be a whole number"),
            ("cost = '5'", "cost", "'5'", "must be a number without quotes: cost = 5"),
            ("cost = 'byte'", "cost", "'byte'", "must be one of bytes; did you mean \"bytes\"?"),
            ("cost = 9007199254740992", "cost", "9007199254740992", "is too large; at most 9007199254740991"),
            ("method = ['POST']", "method", "[…]", "unknown field; did you mean `methods`?"),
        ] {
            let line = 5 + rule.lines().count();
            let rest = if rule.starts_with("limit") { "" } else { "\nlimit = 'api'" };
            check(&format!("{LIMITS}{rule}{rest}"), &[(line, &format!("rules[1].{field}"), value, fix)]);
        }
        // Every mistake at once.
        check(
            &format!(
                "{LIMITS}path = 'x'\nmethods = ['get']\nkey = '{{id}}'\ncost = -1\n[[rules]]\nlimit = 'apy'"
            ),
            &[
                (5, "rules[1].limit", "", "is missing; write limit = \"api\""),
                (6, "rules[1].path", "'x'", "must start with `/`"),
                (7, "rules[1].methods", "[…]", "write \"GET\""),
                (9, "rules[1].cost", "-1", "must be at least 1"),
                (11, "rules[2].limit", "'apy'", "did you mean \"api\"?"),
            ],
        );
        check(
            "[[rules]]\nlimit = 'api'",
            &[(2, "rules[1].limit", "'api'", "there are no limits; write [limits.api]")],
        );
        check("[rules]\nlimit = 'api'", &[(1, "rules", "{…}", "must be a list of tables: write [[rules]]")]);
    }
}
