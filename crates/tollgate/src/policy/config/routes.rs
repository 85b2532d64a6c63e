//! `[[routes]]`: which requests are charged under which limit, by which key.
//!
//! Each table becomes a [`RouteLimit`], the same that the builder in code makes; `route/` decides what it means for a request.
//! `[[rules]]` is the older name of `[[routes]]` and is still read, with the older names of two fields.

#[cfg(test)]
mod recorded;

use http::{HeaderName, Method, StatusCode};
use ipnet::IpNet;
use tollgate_kernel::MAX_COUNT;

use super::named;
use super::reader::{Field, Reader, Section};
use crate::key::Key;
use crate::policy::Rule;
use crate::route::{KeyExtractor, MissingKey, Route, RouteLimit, Routes, address};

/// The fields of a route.
pub(super) const FIELDS: [&str; 14] = [
    "limit",
    "path",
    "except",
    "method",
    "host",
    "clients",
    "users",
    "headers",
    "key",
    "namespace",
    "folded",
    "if_missing",
    "cost",
    "count_if_status",
];

/// What `[[rules]]` calls some of them.
const OLD_NAMES: [(&str, &str); 2] = [("method", "methods"), ("if_missing", "otherwise")];

/// The values of `key`. The last two are prefixes, which are handled before.
const KEYS: [&str; 9] =
    ["ip", "user", "all", "bearer", "peer", "referer", "user-agent", "header:<name>", "{<parameter>}"];

/// Reads all routes. `limits` are all names of the file, `rules` the limits without mistakes.
pub(super) fn read(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    limits: Option<&Section<'_>>,
    rules: &[Rule],
) -> Vec<RouteLimit> {
    let names: Vec<&str> = limits.into_iter().flat_map(Section::fields).map(|field| field.name).collect();
    let sections: Vec<_> = reader.sections(field).into_iter().map(Section::showing_all).collect();
    let all = sections.len();
    let is_old = field.name == "rules";
    let of = |section| Table { section, is_old };
    let read_one = |section| read_route(reader, &of(section), &names, rules);
    let routes: Vec<RouteLimit> = sections.into_iter().filter_map(read_one).collect();
    // Each could be read; whether they can be together is known only now.
    if routes.len() == all
        && let Err(error) = Routes::new(routes.iter().cloned())
    {
        reader.misnamed(field, error);
    }
    routes
}

/// One `[[routes]]`.
struct Table<'d> {
    section: Section<'d>,
    /// Whether it is a `[[rules]]`.
    is_old: bool,
}

impl<'d> Table<'d> {
    /// A field by its name, or by its old one.
    fn field(&self, name: &str) -> Option<&Field<'d>> {
        let old = OLD_NAMES.iter().find(|(new, _)| *new == name && self.is_old).map(|(_, old)| *old);
        self.section.field(name).or_else(|| self.section.field(old?))
    }
}

/// Reads one route. Every field is read, even if another has a mistake.
fn read_route(
    reader: &mut Reader<'_>,
    table: &Table<'_>,
    names: &[&str],
    rules: &[Rule],
) -> Option<RouteLimit> {
    let mut known = FIELDS.to_vec();
    known.extend(OLD_NAMES.iter().filter(|_| table.is_old).map(|(_, old)| *old));
    reader.only(&table.section, &known);
    for (new, old) in OLD_NAMES.iter().filter(|_| table.is_old) {
        if let (Some(_), Some(field)) = (table.section.field(new), table.section.field(old)) {
            reader.misnamed(field, format!("is the older name of `{new}`, which is there too; remove it"));
        }
    }
    let limit = match table.field("limit") {
        Some(field) => named::read(reader, field, names, rules, None),
        None => {
            let example = format!("\"{}\"", names.first().copied().unwrap_or("api"));
            reader.missing(&table.section, "limit", example);
            None
        }
    };
    let route = read_conditions(reader, table);
    let key = read_key_extractor(reader, table, route.as_ref());
    let concurrency = limit.as_ref().is_some_and(|limit| named::is_concurrency(limit, rules));
    let (cost, statuses) = (table.field("cost"), table.field("count_if_status"));
    let is_by_response =
        |field: &&Field<'_>| field.name == "count_if_status" || field.as_text() == Some("bytes");
    if let Some(field) = [statuses, cost].into_iter().flatten().find(is_by_response).filter(|_| concurrency) {
        reader.mistake(
            field,
            "a concurrency limit is released when the response is done, and not settled; remove it",
        );
        return None;
    }
    let statuses = match statuses {
        Some(field) => read_statuses(reader, field),
        None => Some(Vec::new()),
    };
    let cost = match cost {
        Some(field) => read_cost(reader, field, !statuses.as_ref().is_some_and(Vec::is_empty)),
        None => Some(CostOf::Number(1)),
    };
    let limit = RouteLimit::new(limit?, key?).on(route?);
    let limit = match cost? {
        CostOf::Number(cost) => limit.cost(cost),
        CostOf::Bytes => limit.settle_by_bytes_sent(),
    };
    let statuses = statuses?;
    Some(if statuses.is_empty() { limit } else { limit.count_if_status(statuses) })
}

/// Reads the conditions: `path`, `except`, `method`, `host`, `clients`, `users` and `headers`.
fn read_conditions(reader: &mut Reader<'_>, table: &Table<'_>) -> Option<Route> {
    let mut is_sound = true;
    let mut route = Route::any();
    if let Some(field) = table.field("path") {
        match reader.text(field, "/api/*").map(compiled_path) {
            Some(Ok(path)) => route = path,
            Some(Err(fix)) => {
                reader.mistake(field, fix);
                is_sound = false;
            }
            None => is_sound = false,
        }
    }
    if let Some(field) = table.field("method") {
        let texts = reader.one_or_more(field, "[\"POST\"]").unwrap_or_default();
        is_sound &= !texts.is_empty();
        for text in texts {
            match method(&text) {
                Ok(method) => route = route.method(method),
                Err(fix) => {
                    reader.mistake(field, fix);
                    is_sound = false;
                }
            }
        }
    }
    if let Some(field) = table.field("except") {
        let texts = reader.one_or_more(field, "[\"/api/health\"]").unwrap_or_default();
        is_sound &= !texts.is_empty();
        for text in &texts {
            match compiled_path(text) {
                Ok(other) => route = route.except(other),
                Err(fix) => {
                    reader.mistake(field, fix);
                    is_sound = false;
                }
            }
        }
    }
    if let Some(field) = table.field("host") {
        let texts = reader.one_or_more(field, "[\"api.example.com\"]").unwrap_or_default();
        is_sound &= !texts.is_empty();
        for text in texts {
            if let Err(error) = Route::any().host(text.as_str()).compile() {
                reader.mistake(field, error);
                is_sound = false;
            }
            route = route.host(text);
        }
    }
    if let Some(field) = table.field("clients") {
        match read_networks(reader, field, "[\"10.0.0.0/8\", \"2001:db8::7\"]") {
            Some(networks) => route = route.from_networks(networks),
            None => is_sound = false,
        }
    }
    if let Some(field) = table.field("users") {
        let texts = reader.texts(field, "[\"alice\", \"svc-*\"]").unwrap_or_default();
        is_sound &= !texts.is_empty();
        route = texts.into_iter().fold(route, Route::user);
    }
    if let Some(field) = table.field("headers") {
        match reader.section(field) {
            Some(headers) => {
                for field in headers.fields() {
                    match read_header(reader, field) {
                        Some((name, value)) => route = route.header(name, value),
                        None => is_sound = false,
                    }
                }
            }
            None => is_sound = false,
        }
    }
    is_sound.then_some(route)
}

fn read_header(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<(String, String)> {
    if HeaderName::try_from(field.name).is_err() {
        reader.misnamed(field, "is not the name of a header");
        return None;
    }
    let value = reader.text(field, "curl/*")?;
    Some((field.name.to_ascii_lowercase(), value.to_owned()))
}

/// A path as the file writes it, if it makes sense.
fn compiled_path(text: &str) -> Result<Route, String> {
    let route = path(text)?;
    route.compile().map_err(|error| error.to_string())?;
    Ok(route)
}

/// A path as the file writes it: one path, `/api/*`, or a template.
fn path(text: &str) -> Result<Route, String> {
    if let Some(prefix) = text.strip_suffix("/*") {
        // With a template or another star in it, this is no prefix.
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

fn method(text: &str) -> Result<Method, String> {
    let capitals = text.to_ascii_uppercase();
    match Method::from_bytes(text.as_bytes()) {
        Ok(method) if text == capitals => Ok(method),
        Ok(_) => Err(format!("methods are written in capitals; write \"{capitals}\"")),
        Err(_) => Err(format!("`{}` is no method; write such as \"POST\"", text.escape_debug())),
    }
}

/// Reads addresses and networks.
pub(super) fn read_networks(reader: &mut Reader<'_>, field: &Field<'_>, example: &str) -> Option<Vec<IpNet>> {
    let texts = reader.texts(field, example)?;
    let mut networks = Vec::new();
    for text in &texts {
        match text.parse::<IpNet>().ok().or_else(|| address(text.as_bytes()).map(IpNet::from)) {
            Some(network) => networks.push(network),
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

/// Reads `key`, `namespace`, `folded` and `if_missing`.
fn read_key_extractor(
    reader: &mut Reader<'_>,
    table: &Table<'_>,
    route: Option<&Route>,
) -> Option<KeyExtractor> {
    let mut key = match table.field("key") {
        Some(field) => read_key(reader, field, table, route),
        None => Some(KeyExtractor::ip()),
    };
    if let Some(field) = table.field("namespace") {
        let namespace = reader.text(field, "user")?;
        if let Err(error) = Key::prefix(namespace) {
            reader.mistake(field, error);
            return None;
        }
        key = key.map(|key| key.namespace(namespace));
    }
    if let Some(field) = table.field("folded")
        && reader.truth(field)?
    {
        key = key.map(KeyExtractor::folded);
    }
    let Some(field) = table.field("if_missing") else { return key };
    let missing = reader.choice(field, &MissingKey::ALL)?;
    if key.as_ref().is_some_and(KeyExtractor::is_always_there) {
        reader.mistake(
            field,
            "says what happens to a request without the key, and every request has this one; remove it",
        );
        return None;
    }
    key.map(|key| key.if_missing(missing))
}

fn read_key(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    table: &Table<'_>,
    route: Option<&Route>,
) -> Option<KeyExtractor> {
    let text = reader.text(field, "ip")?;
    if let Some(name) = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')) {
        let name = name.trim_start_matches('*');
        // A path that could not be read was reported already.
        let matcher = route?.compile().ok()?;
        if matcher.has_parameter(name) {
            return Some(KeyExtractor::path_parameter(name));
        }
        let kind = if table.is_old { "rule" } else { "route" };
        let fix = format!("the {kind}'s path has no `{{{name}}}`; write it as in \"/users/{{id}}\"");
        reader.mistake(field, fix);
        return None;
    }
    if let Some(name) = text.strip_prefix("header:") {
        if HeaderName::try_from(name).is_err() {
            reader.mistake(field, "names no header; write such as \"header:x-api-key\"");
            return None;
        }
        return Some(KeyExtractor::header(name));
    }
    let choices: Vec<(&str, &str)> = KEYS.iter().map(|word| (*word, *word)).collect();
    Some(match reader.choice(field, &choices)? {
        "ip" => KeyExtractor::ip(),
        "user" => KeyExtractor::user(),
        "all" => KeyExtractor::constant("all"),
        "bearer" => KeyExtractor::bearer(),
        "peer" => KeyExtractor::peer(),
        header => KeyExtractor::header(header),
    })
}

#[derive(Clone, Copy)]
enum CostOf {
    Number(u64),
    Bytes,
}

fn read_cost(reader: &mut Reader<'_>, field: &Field<'_>, counts_by_status: bool) -> Option<CostOf> {
    if field.as_text().is_some_and(|text| !text.bytes().all(|byte| byte.is_ascii_digit())) {
        let cost = reader.choice(field, &[("bytes", CostOf::Bytes)])?;
        if counts_by_status {
            reader.mistake(
                field,
                "is settled by the bytes, and count_if_status by the status; keep one of them",
            );
            return None;
        }
        return Some(cost);
    }
    match reader.whole(field, 1, "")? {
        cost @ 1..=MAX_COUNT => Some(CostOf::Number(cost)),
        _ => {
            reader.mistake(field, format!("is too large; at most {MAX_COUNT}"));
            None
        }
    }
}

fn read_statuses(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Vec<StatusCode>> {
    let statuses = reader.numbers(field, "[401, 403]")?;
    let codes: Option<Vec<StatusCode>> = statuses
        .into_iter()
        .map(|status| u16::try_from(status).ok().and_then(|status| StatusCode::from_u16(status).ok()))
        .collect();
    if codes.is_none() {
        reader.mistake(field, "each must be a status from 100 to 999, such as 401");
    }
    codes
}

#[cfg(test)]
mod tests {
    use http::StatusCode;

    use super::super::tests::{check, parse};
    use crate::route::{KeyExtractor, MissingKey, Route, RouteLimit};

    const LIMITS: &str = "[limits]\napi = { unlimited = true }\nlogin = { blocked = true }\n\
                          pool = { strategy = 'concurrency', limit = 5, lease = '1s' }\n[[routes]]\n";

    #[test]
    fn routes_are_read_and_described() {
        for (route, words) in [
            ("", "every request, by ip"),
            ("except = ['/static/*']", "every path except /static/*, by ip"),
            (
                "path = '/api/*'\nexcept = ['/api/health', '/api/v1/*']",
                "/api/* except /api/health, /api/v1/*, by ip",
            ),
            (
                "method = ['GET', 'POST']\npath = '/users/{id}'\nkey = '{id}'",
                "GET, POST /users/{id}, by {id}",
            ),
            ("path = '/files/{*path}'\nkey = '{*path}'\ncost = 5", "/files/{*path}, by {path}, costing 5"),
            ("clients = ['10.0.0.0/8', '::1']\nkey = 'all'", "from 10.0.0.0/8, ::1, by all together"),
            ("users = ['a*', '*']\nkey = 'user'\nif_missing = 'skip'", "of user a*, *, by user"),
            (
                "headers = { user-agent = 'curl/*', referer = '' }\nkey = 'user-agent'\nif_missing = 'shared'\ncost = 'bytes'",
                "with user-agent curl/* with referer , by user-agent, costing the bytes sent",
            ),
            ("host = '*.example.com'\nkey = 'header:X-Api-Key'", "of host *.example.com, by x-api-key"),
            (
                "key = 'bearer'\ncount_if_status = [401, 403]",
                "every request, by bearer token, counting status 401, 403",
            ),
            ("path = '/*'\nkey = 'peer'", "/*, by peer"),
        ] {
            let config = parse(&format!("{LIMITS}limit = 'api'\n{route}"));
            let found: Vec<_> =
                config.routes.iter().map(|route| (route.limit(), route.to_string())).collect();
            assert_eq!(found, [(Some("api"), words.to_owned())], "{route}");
        }
        assert!(parse("routes = []").routes.is_empty());
    }

    /// The config and the builder in code make the same thing.
    #[test]
    fn a_route_is_what_the_builder_makes() {
        let limit = |key| RouteLimit::new("api", key);
        for (route, built) in [
            ("", limit(KeyExtractor::ip())),
            (
                "path = '/login'\nmethod = 'POST'\ncount_if_status = [401]",
                limit(KeyExtractor::ip())
                    .on(Route::post("/login"))
                    .count_if_status([StatusCode::UNAUTHORIZED]),
            ),
            (
                "path = '/api/*'\nexcept = '/api/health'\nhost = 'a.example'\nkey = 'header:x-user'\nnamespace = 'user'\n\
                 folded = true\nif_missing = 'ip'\ncost = 3",
                limit(KeyExtractor::header("x-user").namespace("user").folded().if_missing(MissingKey::Ip))
                    .on(Route::below("/api").except(Route::at("/api/health")).host("a.example"))
                    .cost(3),
            ),
            (
                "path = '/t/{id}'\nkey = '{id}'\ncost = 'bytes'\nusers = ['a']\nclients = ['10.0.0.0/8']\nheaders.x-a = 'b*'",
                limit(KeyExtractor::path_parameter("id"))
                    .on(Route::at("/t/{id}")
                        .user("a")
                        .from_networks(["10.0.0.0/8".parse().unwrap()])
                        .header("x-a", "b*"))
                    .settle_by_bytes_sent(),
            ),
        ] {
            assert_eq!(
                parse(&format!("{LIMITS}limit = 'api'\n{route}")).routes,
                std::slice::from_ref(&built),
                "{route}"
            );
            assert_ne!(parse(&format!("{LIMITS}limit = 'login'\n{route}")).routes, [built], "{route}");
        }
    }

    /// `[[rules]]` was the name for a backtest alone.
    #[test]
    fn rules_are_an_older_name() {
        let of = |name: &str, route: &str| {
            parse(&format!("{}limit = 'api'\n{route}", LIMITS.replace("[[routes]]", name))).routes
        };
        let old = of("[[rules]]", "methods = ['POST']\nkey = 'user'\notherwise = 'ip'");
        assert_eq!(old, of("[[routes]]", "method = ['POST']\nkey = 'user'\nif_missing = 'ip'"));
        assert_eq!(old, of("[[rules]]", "method = 'POST'\nkey = 'user'\nif_missing = 'ip'"));
        check(
            "[limits.api]\nunlimited = true\n[[rules]]\nlimit = 'api'\n[[routes]]\nlimit = 'api'",
            &[(3, "rules", "", "write all of them as [[routes]]")],
        );
        let both =
            "[limits.api]\nunlimited = true\n[[rules]]\nlimit = 'api'\nmethod = 'GET'\nmethods = ['POST']";
        check(both, &[(6, "rules[1].methods", "", "is the older name of `method`, which is there too")]);
        check("[rules]\nlimit = 'api'", &[(1, "rules", "{…}", "must be a list of tables: write [[rules]]")]);
    }

    #[test]
    fn mistakes_are_reported() {
        for (route, field, value, fix) in [
            ("limit = 'logn'", "limit", "'logn'", "there is no such limit; did you mean \"login\"?"),
            ("limit = 'colour'", "limit", "'colour'", "there is no such limit; known: api, login, pool"),
            ("limit = 1", "limit", "1", "must be text in quotes"),
            ("path = 'api'", "path", "'api'", "must start with `/`"),
            ("path = 1", "path", "1", "must be text in quotes, such as \"/api/*\""),
            ("path = '/a*'", "path", "'/a*'", "a `*` stands only at the end"),
            ("path = '/a/*/b'", "path", "'/a/*/b'", "a `*` stands only at the end"),
            ("path = '/a/{b}/*'", "path", "'/a/{b}/*'", "in a template write `/{*rest}`"),
            ("path = '/users/:id'", "path", "'/users/:id'", "a parameter is a whole segment"),
            ("path = '/a?b=1'", "path", "'/a?b=1'", "where a query or fragment begins"),
            ("except = ['x']", "except", "[…]", "must start with `/`"),
            ("except = 1", "except", "1", "must be a list of texts, such as [\"/api/health\"]"),
            ("method = ['post']", "method", "[…]", "methods are written in capitals; write \"POST\""),
            ("method = 'post'", "method", "'post'", "methods are written in capitals; write \"POST\""),
            ("method = ['P T']", "method", "[…]", "`P T` is no method"),
            ("method = []", "method", "[…]", "must be a list of texts, such as [\"POST\"]"),
            ("host = 'http://a'", "host", "'http://a'", "write a name without scheme, port or path"),
            ("host = ['a:80']", "host", "[…]", "write a name without scheme, port or path"),
            ("host = '*.'", "host", "'*.'", "write a name without scheme"),
            ("clients = ['10.0.0.0/33']", "clients", "[…]", "`10.0.0.0/33` is no address or network"),
            ("clients = ['localhost']", "clients", "[…]", "`localhost` is no address or network"),
            ("users = 'alice'", "users", "'alice'", "must be a list of texts"),
            ("headers = 'curl'", "headers", "'curl'", "must be a table"),
            ("headers = { 'user agent' = 'x' }", "headers.\"user agent\"", "", "is not the name of a header"),
            ("headers = { referer = 1 }", "headers.referer", "1", "must be text in quotes"),
            ("key = 'usr'", "key", "'usr'", "must be one of ip, user, all, bearer, peer, referer"),
            ("key = 'usr'", "key", "'usr'", "did you mean \"user\"?"),
            ("key = 'header:'", "key", "'header:'", "names no header; write such as \"header:x-api-key\""),
            ("key = 'header:<name>'", "key", "'header:<name>'", "names no header"),
            ("key = '{id}'", "key", "'{id}'", "the route's path has no `{id}`"),
            ("key = '{<parameter>}'", "key", "'{<parameter>}'", "the route's path has no"),
            ("namespace = ''", "namespace", "''", "the namespace is empty"),
            ("folded = 'yes'", "folded", "'yes'", "must be true or false"),
            ("if_missing = 'ip'", "if_missing", "'ip'", "every request has this one; remove it"),
            (
                "key = 'user'\nif_missing = 'allow'",
                "if_missing",
                "'allow'",
                "must be one of deny, ip, shared, skip",
            ),
            ("cost = 0", "cost", "0", "must be at least 1"),
            ("cost = 1.5", "cost", "1.5", "must be a whole number"),
            ("cost = '5'", "cost", "'5'", "must be a number without quotes: cost = 5"),
            ("cost = 'byte'", "cost", "'byte'", "must be one of bytes; did you mean \"bytes\"?"),
            ("cost = 9007199254740992", "cost", "9007199254740992", "is too large; at most 9007199254740991"),
            (
                "count_if_status = 401",
                "count_if_status",
                "401",
                "must be a list of whole numbers, such as [401, 403]",
            ),
            ("count_if_status = [99]", "count_if_status", "[…]", "each must be a status from 100 to 999"),
            ("count_if_status = [70000]", "count_if_status", "[…]", "each must be a status from 100 to 999"),
            ("count_if_status = [401]\ncost = 'bytes'", "cost", "'bytes'", "keep one of them"),
            ("methods = ['POST']", "methods", "[…]", "unknown field; did you mean `method`?"),
            ("otherwise = 'ip'", "otherwise", "'ip'", "unknown field"),
        ] {
            let line = 5 + route.lines().count();
            let rest = if route.starts_with("limit") { "" } else { "\nlimit = 'api'" };
            check(&format!("{LIMITS}{route}{rest}"), &[(line, &format!("routes[1].{field}"), value, fix)]);
        }
        let pool = "limit = 'pool'\ncount_if_status = [401]";
        let fix = "a concurrency limit is released when the response is done";
        check(&format!("{LIMITS}{pool}"), &[(7, "routes[1].count_if_status", "[…]", fix)]);
        // Every mistake at once.
        check(
            &format!(
                "{LIMITS}path = 'x'\nmethod = ['get']\nkey = '{{id}}'\ncost = -1\n[[routes]]\nlimit = 'apy'"
            ),
            &[
                (5, "routes[1].limit", "", "is missing; write limit = \"api\""),
                (6, "routes[1].path", "'x'", "must start with `/`"),
                (7, "routes[1].method", "[…]", "write \"GET\""),
                (9, "routes[1].cost", "-1", "must be at least 1"),
                (11, "routes[2].limit", "'apy'", "did you mean \"api\"?"),
            ],
        );
        check(
            "[[routes]]\nlimit = 'api'",
            &[(2, "routes[1].limit", "'api'", "there are no limits; write [limits.api]")],
        );
        check(
            "[routes]\nlimit = 'api'",
            &[(1, "routes", "{…}", "must be a list of tables: write [[routes]]")],
        );
        let many = |count| {
            format!("[limits.api]\nunlimited = true\n{}", "[[routes]]\nlimit = 'api'\n".repeat(count))
        };
        assert_eq!(parse(&many(64)).routes.len(), 64);
        check(&many(65), &[(3, "routes", "", "a request may meet at most 64 limits")]);
        let paths = |count| many(count).replace("[[routes]]", "[[routes]]\npath = '/a'");
        assert_eq!(parse(&paths(1_024)).routes.len(), 1_024);
        check(&paths(1_025), &[(3, "routes", "", "there may be at most 1024 route limits")]);
    }

    #[test]
    fn a_concurrency_limit_may_be_on_a_route() {
        assert_eq!(parse(&format!("{LIMITS}limit = 'pool'")).routes.len(), 1);
    }
}
