//! Rate limits of Kong's declarative config (decK) as ours: the plugins `rate-limiting` and `rate-limiting-advanced`.
//!
//! Of several plugins of one name the one of the route goes before that of its service, and that before the global one; so each of Kong's routes meets the
//! limits of one of them. A plugin counts together what all routes in its scope bring, and so does the limit that is made of it. Windows are aligned to the
//! clock there, and here; those of `rate-limiting-advanced` slide by two counters, unless they are `fixed`.
//!
//! A request meets one route there, and here all that match. So a route is written without the paths below its own that other routes
//! take; where that is no matter of paths alone, it is noted.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::written::{Imported, Written, list, quoted};
use super::yaml::{self, Node};

const PLUGINS: [&str; 2] = ["rate-limiting", "rate-limiting-advanced"];

/// The limits that were made of a plugin, and the key of their routes.
#[derive(Clone)]
struct Carried {
    limits: Vec<String>,
    key: Vec<(&'static str, String)>,
}

/// A route of Kong, as far as it says which requests are its own.
struct Taken<'a> {
    route: &'a Node,
    name: &'a str,
    methods: BTreeSet<&'a str>,
    hosts: BTreeSet<&'a str>,
    paths: Vec<&'a str>,
    /// Whether there is more to it than methods, hosts and plain paths.
    is_odd: bool,
}

#[derive(Default)]
struct Import<'a> {
    written: Written,
    taken: Vec<Taken<'a>>,
    /// By the line of the plugin: what was made of it.
    carried: HashMap<usize, Option<Carried>>,
    /// The routes that are written, by their fields.
    rules: HashSet<Vec<String>>,
    has_plain_paths: Option<usize>,
}

/// Carries a file over, or says why it cannot be read at all.
pub(super) fn import(text: &str) -> Result<Imported, String> {
    let documents = yaml::read(text)?;
    let Some(document) = documents.first() else { return Err("it is empty".to_owned()) };
    if document.map().is_none()
        || ["services", "routes", "plugins"].iter().all(|field| document.field(field).is_none())
    {
        return Err(format!(
            "line {}: it has no `services`, `routes` or `plugins`; is it a declarative config of Kong?",
            document.line
        ));
    }
    let nested = items(document, "services").iter().flat_map(|service| items(service, "routes"));
    let taken = nested.chain(items(document, "routes")).map(Taken::of).collect();
    let mut import = Import { taken, ..Import::default() };
    let global = import.plugin(document, "", true);
    let mut count = 0;
    for service in items(document, "services") {
        let name = text_of(service, "name").unwrap_or("service");
        let own =
            import.plugin(service, name, false).or(import.referring(document, "service", name)).or(global);
        for route in items(service, "routes") {
            count += 1;
            import.route(document, route, own);
        }
    }
    for route in items(document, "routes") {
        count += 1;
        let service =
            route.field("service").and_then(|service| service.text().or_else(|| text_of(service, "name")));
        let own = service.and_then(|name| import.referring(document, "service", name)).or(global);
        import.route(document, route, own);
    }
    if let (0, Some(plugin)) = (count, global) {
        let written = import.carry(plugin, "global");
        import.routes(plugin.line, written, &[]);
    }
    for consumer in items(document, "consumers").iter().chain(items(document, "consumer_groups")) {
        for plugin in items(consumer, "plugins").iter().filter(|plugin| is_ours(plugin)) {
            let name = text_of(consumer, "username").or_else(|| text_of(consumer, "name")).unwrap_or("?");
            import.written.note(plugin.line, format!("the limits of the consumer `{name}` were left out; write them as overrides of user:{name}"));
        }
    }
    if let Some(line) = import.has_plain_paths {
        import.written.note(
            line,
            "paths match by characters there, so /a matches /ab too; here /a is /a and all below it",
        );
    }
    Ok(import.written.finish())
}

fn items<'a>(node: &'a Node, field: &str) -> &'a [Node] {
    node.field(field).and_then(Node::list).unwrap_or_default()
}

fn text_of<'a>(node: &'a Node, field: &str) -> Option<&'a str> {
    node.field(field).and_then(Node::text).filter(|text| !text.is_empty())
}

fn is_ours(plugin: &Node) -> bool {
    let is_on = text_of(plugin, "enabled") != Some("false");
    is_on && text_of(plugin, "name").is_some_and(|name| PLUGINS.contains(&name))
}

/// What a plugin that stands on its own refers to.
fn reference<'a>(plugin: &'a Node, scope: &str) -> Option<&'a str> {
    let field = plugin.field(scope)?;
    field.text().or_else(|| text_of(field, "name")).filter(|name| !name.is_empty())
}

/// What routes may ask for that ours do not.
const NOT_OURS: [&str; 5] = ["headers", "snis", "sources", "destinations", "expression"];

fn texts<'a>(node: &'a Node, field: &str) -> Vec<&'a str> {
    items(node, field).iter().filter_map(Node::text).collect()
}

/// Whether our routes can name a path.
fn is_plain(path: &str) -> bool {
    path.starts_with('/') && !path.contains(['{', '}', '*', '(', '\\', '$'])
}

/// A path and all below it.
fn below(path: &str) -> String {
    format!("{}/*", path.trim_end_matches('/'))
}

impl<'a> Taken<'a> {
    fn of(route: &'a Node) -> Taken<'a> {
        let mut paths = texts(route, "paths");
        if paths.is_empty() {
            paths.push("/");
        }
        let has_field = |field: &&str| {
            route.field(field).is_some_and(|node| node.list().is_none_or(|all| !all.is_empty()))
        };
        Taken {
            route,
            name: text_of(route, "name").unwrap_or("route"),
            methods: texts(route, "methods").into_iter().collect(),
            hosts: texts(route, "hosts").into_iter().collect(),
            paths,
            is_odd: NOT_OURS.iter().any(has_field),
        }
    }

    /// The paths strictly below this one that the other takes from it for sure.
    fn taken_below(&self, other: &Taken<'a>, path: &str) -> Vec<&'a str> {
        let is_alike =
            self.methods == other.methods && self.hosts == other.hosts && !other.is_odd && !self.is_odd;
        let is_below = |other: &&&str| is_plain(other) && covers(path, other) && below(other) != below(path);
        other.paths.iter().filter(|_| is_alike).filter(is_below).copied().collect()
    }

    /// Whether both may match one request in another way than that the path of one is below that of the other.
    fn overlaps(&self, other: &Taken<'a>, path: &str) -> bool {
        let meet = |one: &BTreeSet<&str>, two: &BTreeSet<&str>| {
            one.is_empty() || two.is_empty() || !one.is_disjoint(two)
        };
        let is_alike =
            self.methods == other.methods && self.hosts == other.hosts && !other.is_odd && !self.is_odd;
        let on_one_path = |theirs: &&str| {
            is_plain(theirs)
                && (covers(path, theirs) || covers(theirs, path))
                && (!is_alike || below(theirs) == below(path))
        };
        meet(&self.methods, &other.methods)
            && meet(&self.hosts, &other.hosts)
            && other.paths.iter().any(on_one_path)
    }
}

/// Whether one path is the other, or above it.
fn covers(path: &str, other: &str) -> bool {
    let path = path.trim_end_matches('/');
    other.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl<'a> Import<'a> {
    /// The plugin of a scope, among those that stand in it.
    fn plugin<'b>(&mut self, node: &'b Node, scope: &str, is_global: bool) -> Option<&'b Node> {
        let refers = |plugin: &&Node| {
            ["service", "route", "consumer", "consumer_group"]
                .iter()
                .any(|scope| reference(plugin, scope).is_some())
        };
        let mut ours = items(node, "plugins")
            .iter()
            .filter(|plugin| is_ours(plugin))
            .filter(|plugin| !(is_global && refers(plugin)));
        let first = ours.next();
        for plugin in ours {
            self.written
                .note(plugin.line, format!("a second rate-limiting plugin of {scope:?} was left out"));
        }
        for plugin in items(node, "plugins") {
            if text_of(plugin, "name") == Some("response-ratelimiting") {
                self.written.note(plugin.line, "`response-ratelimiting` was left out: it counts what the upstream says; settle a reservation instead");
            }
            if is_global
                && is_ours(plugin)
                && reference(plugin, "consumer").or(reference(plugin, "consumer_group")).is_some()
            {
                self.written.note(
                    plugin.line,
                    "limits of single consumers were left out; write them as overrides of user:NAME",
                );
            }
        }
        first
    }

    /// The plugin of the whole file that refers to a service or a route.
    fn referring<'b>(&mut self, document: &'b Node, scope: &str, name: &str) -> Option<&'b Node> {
        let is_it = |plugin: &&Node| {
            is_ours(plugin)
                && reference(plugin, scope) == Some(name)
                && reference(plugin, "consumer").is_none()
        };
        items(document, "plugins").iter().find(is_it)
    }

    fn route(&mut self, document: &Node, route: &Node, outer: Option<&Node>) {
        let name = text_of(route, "name").unwrap_or("route");
        let own = self.plugin(route, name, false).or(self.referring(document, "route", name));
        let Some(plugin) = own.or(outer) else { return };
        let mut fields = Vec::new();
        let methods = texts(route, "methods");
        if !methods.is_empty() {
            fields.push(("method", list(methods)));
        }
        let (hosts, odd): (Vec<&str>, Vec<&str>) =
            texts(route, "hosts").into_iter().partition(|host| !host.ends_with('*'));
        if !odd.is_empty() {
            self.written.note(
                route.line,
                format!("the route `{name}` was left out, because we do not match the host {}", odd[0]),
            );
            return;
        }
        if !hosts.is_empty() {
            fields.push(("host", list(hosts)));
        }
        for field in NOT_OURS {
            if let Some(node) =
                route.field(field).filter(|node| node.list().is_none_or(|list| !list.is_empty()))
            {
                self.written.note(
                    node.line,
                    format!("`{field}` of the route `{name}` was left out, and its limits apply without it"),
                );
            }
        }
        let carried = self.carry(plugin, name);
        let own = Taken::of(route);
        let mut overlapping = BTreeSet::new();
        for path in own.paths.iter().copied() {
            if !is_plain(path) {
                self.written.note(route.line, format!("the path `{path}` of the route `{name}` was left out: our routes match paths, not expressions"));
                continue;
            }
            if !path.ends_with('/') {
                self.has_plain_paths.get_or_insert(route.line);
            }
            let mut fields = fields.clone();
            if path != "/" {
                fields.push(("path", quoted(&below(path))));
            }
            let others = || self.taken.iter().filter(|other| !std::ptr::eq(other.route, route));
            // A longer path of the same route is a rule of its own too.
            let except: BTreeSet<String> =
                self.taken.iter().flat_map(|other| own.taken_below(other, path)).map(below).collect();
            if !except.is_empty() {
                fields.push(("except", list(except)));
            }
            overlapping.extend(
                others().filter(|other| own.overlaps(other, path)).map(|other| other.name.to_owned()),
            );
            self.routes(route.line, carried.clone(), &fields);
        }
        if let Some(other) = overlapping.first().filter(|_| carried.is_some()) {
            let more = match overlapping.len() {
                1 => String::new(),
                count => format!(" (and {} others)", count - 1),
            };
            self.written.note(
                route.line,
                format!("a request that the routes `{name}` and `{other}`{more} match meets one of them there, and the limits of all of them here"),
            );
        }
    }

    fn routes(&mut self, line: usize, carried: Option<Carried>, fields: &[(&str, String)]) {
        let Some(Carried { limits, key }) = carried else { return };
        for limit in limits {
            let mut all = vec![("limit", quoted(&limit))];
            all.extend(fields.iter().cloned());
            all.extend(key.iter().cloned());
            // A second of the same would charge each request twice.
            if self.rules.insert(all.iter().map(|(name, value)| format!("{name}={value}")).collect()) {
                self.written.rule("routes", line, &all);
            }
        }
    }

    /// Makes limits of a plugin, once.
    fn carry(&mut self, plugin: &Node, scope: &str) -> Option<Carried> {
        if let Some(carried) = self.carried.get(&plugin.line) {
            return carried.clone();
        }
        let carried = self.make(plugin, scope);
        self.carried.insert(plugin.line, carried.clone());
        carried
    }

    fn make(&mut self, plugin: &Node, scope: &str) -> Option<Carried> {
        let Some(config) = plugin.field("config") else {
            self.written.note(plugin.line, "a plugin without `config` was left out");
            return None;
        };
        let by = text_of(config, "limit_by").or_else(|| text_of(config, "identifier")).unwrap_or("consumer");
        let key = match by {
            "consumer" | "credential" => vec![("key", quoted("user")), ("if_missing", quoted("ip"))],
            "ip" => vec![("key", quoted("ip"))],
            "service" => vec![("key", quoted("all"))],
            "header" => match text_of(config, "header_name") {
                Some(name) => vec![
                    ("key", quoted(&format!("header:{}", name.to_ascii_lowercase()))),
                    ("if_missing", quoted("ip")),
                ],
                None => vec![("key", quoted("ip"))],
            },
            other => {
                self.written.note(config.line, format!("the limits of {scope:?} were left out, because we have no key for `limit_by: {other}`"));
                return None;
            }
        };
        if by == "credential" {
            self.written.note(
                config.line,
                "`limit_by: credential` became the authenticated user, who may have several credentials",
            );
        }
        let is_advanced = text_of(plugin, "name") == Some("rate-limiting-advanced");
        let windows = if is_advanced { self.advanced(config)? } else { self.plain(config) };
        if windows.is_empty() {
            self.written.note(config.line, "a plugin without a limit that is a whole number was left out");
            return None;
        }
        let is_sliding = is_advanced && text_of(config, "window_type") != Some("fixed");
        let limits = windows
            .into_iter()
            .map(|(count, window)| {
                let mut fields = vec![
                    ("strategy", quoted(if is_sliding { "sliding_window_counter" } else { "fixed_window" })),
                    ("limit", count.to_string()),
                    ("window", quoted(&window)),
                ];
                if !is_sliding {
                    fields.push(("align", quoted("clock")));
                }
                self.written.limit(&format!("{scope}-{window}"), config.line, &fields)
            })
            .collect();
        Some(Carried { limits, key })
    }

    fn plain(&mut self, config: &Node) -> Vec<(u64, String)> {
        let mut windows = Vec::new();
        for (period, window) in [
            ("second", "1s"),
            ("minute", "1m"),
            ("hour", "1h"),
            ("day", "1d"),
            ("month", "30d"),
            ("year", "365d"),
        ] {
            let Some(node) = config.field(period) else { continue };
            match node.text().and_then(|text| text.parse::<u64>().ok()).filter(|&count| count > 0) {
                Some(count) => windows.push((count, window.to_owned())),
                None if node.text().is_some_and(|text| matches!(text, "" | "null" | "~")) => continue,
                None => self
                    .written
                    .note(node.line, format!("`{period}` is no whole number above 0 and was left out")),
            }
            if ["month", "year"].contains(&period) {
                self.written
                    .note(node.line, format!("`{period}` became {window}: windows have a fixed length here"));
            }
        }
        windows
    }

    fn advanced(&mut self, config: &Node) -> Option<Vec<(u64, String)>> {
        let numbers = |field: &str| -> Option<Vec<u64>> {
            items(config, field)
                .iter()
                .map(|node| node.text()?.parse().ok().filter(|&number| number > 0))
                .collect()
        };
        match (numbers("limit"), numbers("window_size")) {
            (Some(limits), Some(sizes)) if limits.len() == sizes.len() => {
                Some(limits.into_iter().zip(sizes.into_iter().map(|size| format!("{size}s"))).collect())
            }
            _ => {
                self.written.note(config.line, "`limit` and `window_size` are not lists of whole numbers of one length, and the plugin was left out");
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::written::check_import;

    fn check(text: &str, routes: &[&str], notes: &[&str]) {
        check_import(import(text), text, routes, notes);
    }

    #[test]
    fn the_nearest_plugin_counts() {
        check(
            "_format_version: '3.0'\nplugins:\n- name: rate-limiting\n  config: {minute: 100, limit_by: ip}\n- {name: cors}\nservices:\n\
             - name: shop\n  plugins:\n  - name: rate-limiting\n    config: {second: 5, hour: 1000, policy: redis}\n  routes:\n  - {name: cart, paths: [/cart/], methods: [GET, POST]}\n\
             \x20 - name: pay\n    paths: [/pay/]\n    plugins:\n    - {name: rate-limiting-advanced, config: {limit: [3], window_size: [90], identifier: header, header_name: X-Team}}\n\
             - name: blog\n  routes: [{name: posts, paths: [/]}]\n",
            &[
                "GET, POST /cart/*, by user: cart-1s 5 per 1s window of the clock",
                "GET, POST /cart/*, by user: cart-1h 1000 per 1h window of the clock",
                "/pay/*, by x-team: pay-90s about 3 in any 1m30s",
                "every path except /pay/*, by ip: posts-1m 100 per 1m window of the clock",
            ],
            &[
                "12: a request that the routes `cart` and `posts` match meets one of them there",
                "18: a request that the routes `posts` and `cart` match meets one of them there",
            ],
        );
    }

    /// Regression: a request below two paths met the limits of both routes, and where both had the global plugin it was charged twice.
    #[test]
    fn a_request_meets_the_route_of_the_longest_path_alone() {
        check(
            "plugins: [{name: rate-limiting, config: {minute: 9, limit_by: ip}}]\nservices: [{name: a, routes: [{name: all, paths: [/]}, {name: api, paths: [/api]}, {name: v2, paths: [/api/v2/, /api]}]}]\n",
            &[
                "every path except /api/*, /api/v2/*, by ip: all-1m 9 per 1m window of the clock",
                "/api/* except /api/v2/*, by ip: all-1m 9 per 1m window of the clock",
                "/api/v2/*, by ip: all-1m 9 per 1m window of the clock",
            ],
            &[
                "2: a request that the routes `api` and `v2` match",
                "2: a request that the routes `v2` and `api` match",
                "2: paths match by characters",
            ],
        );
        // Of others that may match the same it is not known here which one it would be.
        check(
            "plugins: [{name: rate-limiting, config: {minute: 9}}]\nroutes: [{name: get, paths: [/a/], methods: [GET]}, {name: post, paths: [/a/], methods: [POST]}, {name: of-host, paths: [/a/b/], methods: [GET], hosts: [a.com]}]\n",
            &[
                "GET /a/*, by user: get-1m 9 per 1m window of the clock",
                "POST /a/*, by user: get-1m 9 per 1m window of the clock",
                "GET /a/b/* of host a.com, by user: get-1m 9 per 1m window of the clock",
            ],
            &[
                "2: a request that the routes `get` and `of-host` match",
                "2: a request that the routes `of-host` and `get` match",
            ],
        );
    }

    #[test]
    fn what_cannot_be_carried_over_is_noted() {
        check(
            "services:\n- name: a\n  plugins:\n  - {name: rate-limiting, config: {month: 5, day: x}}\n  routes:\n  - {name: r, paths: ['~/x\\d', /y], hosts: [a.com], headers: {h: [v]}}\n\
             consumers:\n- username: bob\n  plugins:\n  - {name: rate-limiting, config: {minute: 9}}\nplugins:\n- {name: rate-limiting, config: {minute: 1, limit_by: path}}\n- {name: response-ratelimiting}\n\
             routes:\n- {name: s, paths: [/s/]}\n- {name: t, hosts: ['t.*'], plugins: [{name: rate-limiting, config: {second: 1}}]}\n",
            &["/y/* of host a.com, by user: r-30d 5 per 30d window of the clock"],
            &[
                "4: `day` is no whole number",
                "4: `month` became 30d",
                "6: `headers` of the route `r`",
                "6: the path `~/x\\d` of the route `r`",
                "6: paths match by characters",
                "10: the limits of the consumer `bob`",
                "12: the limits of \"s\" were left out",
                "13: `response-ratelimiting`",
                "16: the route `t` was left out",
            ],
        );
        for text in ["", "a: 1", "[]", "{"] {
            assert!(import(text).is_err(), "{text}");
        }
    }
}
