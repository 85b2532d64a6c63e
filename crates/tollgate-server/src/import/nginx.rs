//! nginx's `limit_req` as ours: `limit_req_zone` names a key and a rate, `limit_req` says where it applies.
//!
//! nginx lets one request through and `burst` more; what is above the rate waits, or with `nodelay` does not. That is a leaky bucket, or a token bucket, of
//! `burst + 1`. A `limit_req` in a location takes the place of those around it, and of several locations the longest path wins; so a route
//! is written for each context where the limits change, without the paths below it that have their own. Requests whose key is empty are not counted, there and here.
//!
//! The file is read as nginx reads it (`syntax.rs`), but `include` is not followed.

mod syntax;

use std::collections::{HashMap, HashSet};

use self::syntax::Directive;
use super::written::{Imported, Written, list, quoted};

/// A zone: what is counted by, and how fast.
struct Zone {
    /// As our routes name it; `None` if we cannot.
    key: Option<&'static str>,
    header: Option<String>,
    rate: String,
}

/// One `limit_req`: the zone, what may wait, and whether it has to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Applied {
    zone: String,
    burst: u64,
    is_delayed: bool,
    is_dry_run: bool,
}

/// A context with limits: a server or a location.
struct Context {
    line: usize,
    /// `None` for a whole server.
    path: Option<String>,
    is_exact: bool,
    limits: Vec<Applied>,
}

#[derive(Default)]
struct Import {
    zones: HashMap<String, Zone>,
    /// The limits that are written, by what they are of.
    limits: HashMap<Applied, String>,
    /// The routes that are written, by their fields.
    routes: HashSet<Vec<String>>,
    written: Written,
}

/// What a block hands down to those in it.
#[derive(Clone, Default)]
struct Inherited {
    limits: Vec<Applied>,
    is_dry_run: bool,
}

/// Carries a file over, or says why it cannot be read at all.
pub(super) fn import(text: &str) -> Result<Imported, String> {
    let directives = syntax::read(text)?;
    let mut import = Import::default();
    import.read_zones(&directives);
    if import.zones.is_empty() {
        return Err("there is no `limit_req_zone` in it; name the file that has the zones".to_owned());
    }
    let servers = count_servers(&directives);
    import.block(&directives, &Inherited::default(), servers > 1);
    Ok(import.written.finish())
}

fn count_servers(directives: &[Directive]) -> usize {
    let of = |directive: &Directive| match directive.name() {
        "server" => 1,
        _ => count_servers(&directive.block),
    };
    directives.iter().map(of).sum()
}

impl Import {
    fn read_zones(&mut self, directives: &[Directive]) {
        for directive in directives {
            match directive.name() {
                "limit_req_zone" => self.zone(directive),
                "include" => self.written.note(directive.line, "`include` was not followed; import the other file too"),
                "limit_conn_zone" | "limit_conn" => self.written.note(
                    directive.line,
                    "`limit_conn` counts connections under way; write a `concurrency` limit and a route by hand",
                ),
                "limit_req_status" => self.written.note(
                    directive.line,
                    "`limit_req_status` was left out: refusals are 429; `GET /v1/gate?deny=403` gives another",
                ),
                _ => self.read_zones(&directive.block),
            }
        }
    }

    fn zone(&mut self, directive: &Directive) {
        let mut words = directive.words.iter().skip(1);
        let key = words.next().map(String::as_str).unwrap_or_default();
        let value = |name: &str| directive.words.iter().find_map(|word| word.strip_prefix(name));
        let name = value("zone=").and_then(|zone| zone.split(':').next()).filter(|name| !name.is_empty());
        let rate = value("rate=").and_then(rate);
        let (Some(name), Some(rate)) = (name, rate) else {
            return self
                .written
                .note(directive.line, "a zone without a name and a rate such as 10r/s was left out");
        };
        let (known, header) = match key {
            "$binary_remote_addr" | "$remote_addr" => (Some("ip"), None),
            "$remote_user" => (Some("user"), None),
            "$server_name" | "$host" | "$http_host" => (None, None),
            _ => match key.strip_prefix("$http_") {
                Some(header) if !header.is_empty() => (None, Some(header.replace('_', "-"))),
                None if !key.is_empty() && !key.contains('$') => (Some("all"), None),
                _ => (None, None),
            },
        };
        if known.is_none() && header.is_none() {
            self.written.note(
                directive.line,
                format!("zone `{name}` was left out, because we have no key for `{key}`"),
            );
        }
        self.zones.insert(name.to_owned(), Zone { key: known, header, rate });
    }

    fn block(&mut self, directives: &[Directive], outer: &Inherited, has_hosts: bool) {
        let here = self.own(directives, outer);
        for directive in directives {
            match directive.name() {
                "server" => self.server(directive, &here, has_hosts),
                _ => self.block(&directive.block, &here, has_hosts),
            }
        }
    }

    /// What holds in a block: its own limits, or else those around it.
    fn own(&mut self, directives: &[Directive], outer: &Inherited) -> Inherited {
        let mut here = outer.clone();
        for directive in directives.iter().filter(|directive| directive.name() == "limit_req_dry_run") {
            here.is_dry_run = directive.words.get(1).is_some_and(|word| word == "on");
        }
        let own: Vec<Applied> = directives
            .iter()
            .filter(|directive| directive.name() == "limit_req")
            .filter_map(|directive| self.applied(directive))
            .collect();
        if directives.iter().any(|directive| directive.name() == "limit_req") {
            here.limits = own;
        }
        for limit in &mut here.limits {
            limit.is_dry_run = here.is_dry_run;
        }
        here
    }

    fn applied(&mut self, directive: &Directive) -> Option<Applied> {
        let value = |name: &str| directive.words.iter().find_map(|word| word.strip_prefix(name));
        let zone = value("zone=").unwrap_or_default().to_owned();
        match self.zones.get(&zone) {
            None => {
                self.written.note(
                    directive.line,
                    format!("`limit_req` names the zone `{zone}`, which is not in this file"),
                );
                return None;
            }
            Some(Zone { key: None, header: None, .. }) => return None,
            Some(_) => {}
        }
        let burst = value("burst=").map_or(Ok(0), str::parse::<u64>);
        let Some(burst) = burst.ok().filter(|&burst| burst < 1 << 40) else {
            self.written.note(directive.line, "`burst` is no number, and the `limit_req` was left out");
            return None;
        };
        if value("delay=").is_some() {
            self.written.note(
                directive.line,
                "`delay` was left out: here all that is above the rate waits, or nothing does",
            );
        }
        let is_delayed = burst > 0 && !directive.words.iter().any(|word| word == "nodelay");
        Some(Applied { zone, burst, is_delayed, is_dry_run: false })
    }

    fn server(&mut self, server: &Directive, outer: &Inherited, has_hosts: bool) {
        let here = self.own(&server.block, outer);
        let hosts =
            self.hosts(server, has_hosts && (!here.limits.is_empty() || has_own_limits(&server.block)));
        let mut contexts =
            vec![Context { line: server.line, path: None, is_exact: false, limits: here.limits.clone() }];
        self.locations(&server.block, &here, &mut contexts);
        // The shortest first, so that each finds the context around it before itself.
        contexts.sort_by_key(|context| context.path.as_ref().map_or(0, String::len));
        let mut kept: Vec<Context> = Vec::new();
        for context in contexts {
            let outer = kept.iter().rev().find(|other| other.covers(&context));
            if outer.is_none_or(|outer| outer.limits != context.limits) {
                kept.push(context);
            }
        }
        for (index, context) in kept.iter().enumerate() {
            let except: Vec<String> = kept[index + 1..]
                .iter()
                .filter(|other| context.covers(other))
                .map(Context::pattern)
                .filter(|pattern| *pattern != context.pattern())
                .collect();
            if context.path.is_none()
                && kept[index + 1..].iter().any(|other| other.path.as_deref() == Some("/") && !other.is_exact)
            {
                continue;
            }
            for limit in &context.limits {
                self.route(context, limit, &except, &hosts);
            }
        }
    }

    /// The hosts of a server, as our routes name them; none where there is no other server, or where it takes what the
    /// others leave.
    fn hosts(&mut self, server: &Directive, needs_names: bool) -> Vec<String> {
        if !needs_names {
            return Vec::new();
        }
        let names = server.block.iter().filter(|directive| directive.name() == "server_name");
        let names = names.flat_map(|directive| directive.words.iter().skip(1));
        let (mut hosts, mut odd) = (Vec::new(), Vec::new());
        for name in names.filter(|name| !matches!(name.as_str(), "_" | "")) {
            match name.strip_prefix('.') {
                // This one and all below it.
                Some(bare) => hosts.extend([bare.to_owned(), format!("*.{bare}")]),
                None if name.starts_with('~') || name.ends_with(".*") || name.contains('$') => odd.push(name),
                None => hosts.push(name.clone()),
            }
        }
        match (&odd[..], hosts.is_empty()) {
            ([], false) => {}
            ([first, ..], false) => self.written.note(
                server.line,
                format!("the host `{first}` was left out, and nothing limits it: our routes match names and *.NAME"),
            ),
            (_, true) => self.written.note(
                server.line,
                "this server takes the hosts that no other has; its limits hold for every host here, also beside those of other servers: write `host` by hand",
            ),
        }
        hosts
    }

    fn locations(&mut self, directives: &[Directive], outer: &Inherited, contexts: &mut Vec<Context>) {
        for location in directives.iter().filter(|directive| directive.name() == "location") {
            let here = self.own(&location.block, outer);
            let words: Vec<&str> = location.words.iter().skip(1).map(String::as_str).collect();
            let (path, is_exact) = match words[..] {
                ["=", path] => (path, true),
                ["^~", path] => (path, false),
                [path] if path.starts_with('/') => (path, false),
                _ => {
                    let what = words.join(" ");
                    if here.limits != outer.limits {
                        self.written.note(
                            location.line,
                            format!(
                                "`location {what}` was left out: our routes match paths, not expressions"
                            ),
                        );
                    }
                    continue;
                }
            };
            if path.contains(['{', '}', '*']) || !path.starts_with('/') {
                self.written.note(
                    location.line,
                    format!("`location {path}` was left out: our routes cannot name this path"),
                );
                continue;
            }
            if !is_exact && !path.ends_with('/') && here.limits != outer.limits {
                self.written.note(
                    location.line,
                    format!("`location {path}` also matches paths such as {path}x there; here it is {path} and all below it"),
                );
            }
            contexts.push(Context {
                line: location.line,
                path: Some(path.to_owned()),
                is_exact,
                limits: here.limits.clone(),
            });
            self.locations(&location.block, &here, contexts);
        }
    }

    fn route(&mut self, context: &Context, limit: &Applied, except: &[String], hosts: &[String]) {
        let Some(zone) = self.zones.get(&limit.zone) else { return };
        let name = match self.limits.get(limit) {
            Some(name) => name.clone(),
            None => {
                if self.limits.keys().any(|other| other.zone == limit.zone) {
                    self.written.note(
                        context.line,
                        format!("zone `{}` is used with different bursts, which count together there and apart here", limit.zone),
                    );
                }
                let size = (limit.burst + 1).to_string();
                let mut fields = match limit.is_delayed {
                    true => vec![
                        ("strategy", quoted("leaky_bucket")),
                        ("rate", quoted(&zone.rate)),
                        ("capacity", size),
                    ],
                    false => vec![
                        ("strategy", quoted("token_bucket")),
                        ("rate", quoted(&zone.rate)),
                        ("burst", size),
                    ],
                };
                if limit.is_dry_run {
                    fields.push(("shadow", "true".to_owned()));
                }
                let name = self.written.limit(&limit.zone, context.line, &fields);
                self.limits.insert(limit.clone(), name.clone());
                name
            }
        };
        let mut fields = vec![("limit", quoted(&name))];
        if context.path.is_some() {
            fields.push(("path", quoted(&context.pattern())));
        }
        if !except.is_empty() {
            fields.push(("except", list(except)));
        }
        if !hosts.is_empty() {
            fields.push(("host", list(hosts)));
        }
        let key = zone
            .key
            .map_or_else(|| format!("header:{}", zone.header.as_deref().unwrap_or_default()), str::to_owned);
        fields.push(("key", quoted(&key)));
        if key != "all" && key != "ip" {
            fields.push(("if_missing", quoted("skip")));
        }
        // Servers for several ports have the same hosts and limits: a second route would charge each request twice.
        if self.routes.insert(fields.iter().map(|(name, value)| format!("{name}={value}")).collect()) {
            self.written.rule("routes", context.line, &fields);
        }
    }
}

/// Whether a block has limits of its own, at any depth.
fn has_own_limits(directives: &[Directive]) -> bool {
    directives.iter().any(|directive| directive.name() == "limit_req" || has_own_limits(&directive.block))
}

impl Context {
    /// As our routes write it.
    fn pattern(&self) -> String {
        match &self.path {
            None => "/*".to_owned(),
            Some(path) if self.is_exact => path.clone(),
            Some(path) => format!("{}/*", path.trim_end_matches('/')),
        }
    }

    /// Whether the other is a part of it.
    fn covers(&self, other: &Context) -> bool {
        match (&self.path, &other.path) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(own), Some(other)) => {
                let own = own.trim_end_matches('/');
                !self.is_exact
                    && other.strip_prefix(own).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            }
        }
    }
}

/// `10r/s` as `10/s`; `None` for what is no rate.
fn rate(text: &str) -> Option<String> {
    let (count, unit) = text.split_once("r/")?;
    let count: u64 = count.parse().ok().filter(|&count| count > 0)?;
    matches!(unit, "s" | "m").then(|| format!("{count}/{unit}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::written::check_import;

    fn check(text: &str, routes: &[&str], notes: &[&str]) {
        check_import(import(text), text, routes, notes);
    }

    #[test]
    fn zones_become_limits_and_contexts_routes() {
        check(
            "limit_req_zone $binary_remote_addr zone=one:10m rate=10r/s;\n\
             limit_req_zone $http_x_api_key zone=two:10m rate=30r/m;\n\
             limit_req_zone $server_port zone=three:1m rate=1r/s; # no key of ours\n\
             server {\n  limit_req zone=one burst=20 nodelay;\n\
               location / { proxy_pass http://a; }\n\
               location /login/ {\n    limit_req zone=one burst=5;\n    limit_req zone=two;\n  }\n\
               location = /health { limit_req zone=three; }\n}\n",
            &[
                "every path except /login/*, /health, by ip: one 10/s, bursts of 21",
                "/login/*, by ip: one-2 10/s evenly, up to 6 waiting",
                "/login/*, by x-api-key: two 30/m, bursts of 1",
            ],
            &[
                "3: zone `three` was left out, because we have no key for `$server_port`",
                "7: zone `one` is used with different bursts",
            ],
        );
    }

    #[test]
    fn what_cannot_be_carried_over_is_noted() {
        check(
            "http {\n include other.conf;\n limit_req_zone fixed zone=all:1m rate=5r/s;\n limit_req_zone $remote_user zone=odd:1m rate=5/s;\n limit_conn_zone $server_name zone=c:1m;\n\
             server {\n location ~ \\.php$ { limit_req zone=all; }\n location /a { limit_req zone=all burst=2 delay=1; limit_req_dry_run on; }\n location /b/ { limit_req zone=none; }\n limit_req_status 444;\n }\n}\n",
            &["/a/*, by all together: all 5/s evenly, up to 3 waiting (shadow)"],
            &[
                "2: `include` was not followed",
                "4: a zone without a name and a rate",
                "5: `limit_conn` counts",
                "7: `location ~ \\.php$` was left out",
                "8: `delay` was left out",
                "8: `location /a` also matches",
                "9: `limit_req` names the zone `none`",
                "10: `limit_req_status` was left out",
            ],
        );
        for text in ["", "server {", "}", "limit_req_zone", "a \"b", "user www;"] {
            assert!(import(text).is_err(), "{text}");
        }
    }

    #[test]
    fn servers_are_distinguished_by_host() {
        let text = "limit_req_zone $binary_remote_addr zone=z:1m rate=1r/s;\nserver { server_name a.example.com; limit_req zone=z; }\nserver { server_name _; limit_req zone=z burst=1 nodelay; }\n";
        let imported = import(text).unwrap();
        assert!(imported.toml.contains("host = [\"a.example.com\"]"), "{}", imported.toml);
        assert_eq!((imported.limits, imported.rules), (2, 2));
        assert_eq!(imported.notes.len(), 2, "{:?}", imported.notes);
        assert!(imported.notes[0].starts_with("3: this server takes the hosts that no other has"));
    }

    /// Regression: a second server for another port made a second route, and each request was charged twice; a name with a point before it
    /// made a config that is not valid; an expression was passed over without a word.
    #[test]
    fn servers_with_the_same_hosts_are_one_and_every_kind_of_name_is_read_or_noted() {
        let zone = "limit_req_zone $binary_remote_addr zone=z:1m rate=1r/s;\nlimit_req zone=z;\n";
        check(
            &format!(
                "{zone}server {{ listen 80; server_name .a.com; }}\nserver {{ listen 443 ssl; server_name .a.com; }}"
            ),
            &["of host a.com, *.a.com, by ip: z 1/s, bursts of 1"],
            &[],
        );
        check(
            &format!(
                "{zone}server {{ server_name a.com ~^b[.]com$; }}\nserver {{ server_name ~^c; }}\nserver {{ server_name $hostname d.com; limit_req zone=z burst=1; }}"
            ),
            &[
                "of host a.com, by ip: z 1/s, bursts of 1",
                "every request, by ip: z 1/s, bursts of 1",
                "of host d.com, by ip: z-2 1/s evenly, up to 2 waiting",
            ],
            &[
                "3: the host `~^b[.]com$` was left out",
                "4: this server takes the hosts that no other has",
                "5: the host `$hostname` was left out",
                "5: zone `z` is used with different bursts",
            ],
        );
    }
}
