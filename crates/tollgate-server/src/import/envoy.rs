//! The configuration of envoyproxy/ratelimit as ours.
//!
//! Its descriptors are nested; ours are lists, so each path from the root to a limit becomes one rule. Its windows are
//! aligned to the clock, and so are those that are made of them. What it matches and we do not is noted, with its line.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use super::name;
use super::written::{Imported, quoted};
use super::yaml::{self, Node};

/// How deep descriptors may be nested: a rule has as many entries.
const DEEPEST: usize = 16;

/// A file, being carried over.
#[derive(Default)]
struct Import {
    limits: String,
    rules: String,
    limit_count: usize,
    rule_count: usize,
    names: HashSet<String>,
    /// The rules there are, by domain and entries.
    seen: HashSet<(String, Vec<String>)>,
    notes: Vec<String>,
    limit_lines: HashMap<String, usize>,
    rule_lines: Vec<usize>,
}

/// One level of a descriptor.
#[derive(Clone)]
struct Step {
    /// As our rules write it.
    entry: String,
    /// The key alone, if all values of this level pay together.
    shared: Option<String>,
}

/// Carries a file over, or says why it cannot be read at all.
pub(super) fn import(text: &str) -> Result<Imported, String> {
    let documents = yaml::read(text)?;
    if documents.is_empty() {
        return Err("it is empty".to_owned());
    }
    let mut import = Import::default();
    for document in &documents {
        let Some(domain) = document.field("domain").and_then(Node::text) else {
            return Err(format!(
                "line {}: there is no `domain`, which names what Envoy asks about",
                document.line
            ));
        };
        import.only(document, &["domain", "descriptors"]);
        if let Some(descriptors) = document.field("descriptors") {
            import.descriptors(domain, &[], descriptors);
        }
    }
    let Import { limits, rules, limit_count, rule_count, mut notes, limit_lines, rule_lines, .. } = import;
    notes.sort_by_key(|note| note.split(':').next().and_then(|line| line.parse::<usize>().ok()));
    let toml = format!("{limits}{rules}");
    Ok(Imported { toml, limits: limit_count, rules: rule_count, notes, limit_lines, rule_lines })
}

impl Import {
    fn note(&mut self, node: &Node, what: impl AsRef<str>) {
        self.notes.push(format!("{}: {}", node.line, what.as_ref()));
    }

    /// Notes the fields that are not among the known ones.
    fn only(&mut self, node: &Node, known: &[&str]) {
        for (name, value) in node.map().unwrap_or_default() {
            if !known.contains(&name.as_str()) {
                self.note(value, format!("`{name}` is not known here and was left out"));
            }
        }
    }

    /// Whether a field says true.
    fn truth(&mut self, node: &Node, name: &str) -> bool {
        let Some(field) = node.field(name) else { return false };
        match field.text() {
            Some("true" | "True" | "TRUE") => true,
            Some("false" | "False" | "FALSE") => false,
            _ => {
                self.note(field, format!("`{name}` is neither true nor false and was left out"));
                false
            }
        }
    }

    fn descriptors(&mut self, domain: &str, path: &[Step], node: &Node) {
        let Some(siblings) = node.list() else {
            return self.note(node, "`descriptors` is not a list and was left out");
        };
        for descriptor in siblings {
            self.descriptor(domain, path, descriptor, siblings);
        }
    }

    fn descriptor(&mut self, domain: &str, path: &[Step], node: &Node, siblings: &[Node]) {
        const KNOWN: [&str; 8] = [
            "key",
            "value",
            "rate_limit",
            "descriptors",
            "shadow_mode",
            "detailed_metric",
            "value_to_metric",
            "share_threshold",
        ];
        self.only(node, &KNOWN);
        for name in ["detailed_metric", "value_to_metric"] {
            if self.truth(node, name) {
                self.note(
                    node,
                    format!("`{name}` was left out: metrics are labelled by limit, never by value"),
                );
            }
        }
        let Some(step) = self.step(node) else { return };
        let mut path = path.to_vec();
        path.push(step);
        if path.len() > DEEPEST {
            return self.note(node, format!("nested deeper than {DEEPEST} and left out"));
        }
        let below = node.field("descriptors");
        match node.field("rate_limit") {
            Some(limit) => self.rate_limit(domain, &path, node, limit),
            // A descriptor that is named without a limit has none, though a less specific one may be there for others.
            None if below.is_none() || has_less_specific(node, siblings) => {
                self.rule(domain, &path, node, None)
            }
            None => {}
        }
        if let Some(below) = below {
            self.descriptors(domain, &path, below);
        }
    }

    fn step(&mut self, node: &Node) -> Option<Step> {
        let key = node.field("key").and_then(Node::text).unwrap_or_default();
        if key.is_empty() || key.contains('=') {
            self.note(node, "a descriptor without a key, or with `=` in it, was left out with all below it");
            return None;
        }
        let is_shared = self.truth(node, "share_threshold");
        let (entry, is_exact) = match value_of(node) {
            None | Some("*") => (key.to_owned(), false),
            Some(value) => (format!("{key}={value}"), !value.ends_with('*')),
        };
        if is_shared && is_exact {
            self.note(node, "`share_threshold` says nothing where one value matches, and was left out");
        }
        Some(Step { entry, shared: (is_shared && !is_exact).then(|| key.to_owned()) })
    }

    fn rate_limit(&mut self, domain: &str, path: &[Step], node: &Node, limit: &Node) {
        self.only(limit, &["unit", "requests_per_unit", "unlimited", "name", "replaces"]);
        if let Some(replaces) = limit.field("replaces") {
            self.note(replaces, "`replaces` was left out: where both match, both limits apply");
        }
        let is_shadow = self.truth(node, "shadow_mode");
        if self.truth(limit, "unlimited") {
            return self.rule(domain, path, node, None);
        }
        let count = limit.field("requests_per_unit").and_then(Node::text).map_or(Ok(0), str::parse::<u32>);
        let window = limit.field("unit").and_then(Node::text).and_then(window_of);
        let (Ok(count), Some(window)) = (count, window) else {
            return self.note(limit, "a rate limit without a unit and a number that we know was left out");
        };
        let entries: Vec<&str> = path.iter().map(|step| step.entry.as_str()).collect();
        let wanted = limit.field("name").and_then(Node::text).filter(|name| !name.is_empty());
        let wanted = wanted.map_or_else(|| format!("{domain}-{}", entries.join("-")), str::to_owned);
        if self.seen.contains(&key_of(domain, path)) {
            return self.rule(domain, path, node, None);
        }
        let name = name::given(&wanted, &mut self.names);
        self.limit_count += 1;
        self.limit_lines.insert(name.clone(), limit.line);
        let _ = match count {
            0 => write!(self.limits, "\n[limits.{}]\nblocked = true\n", quoted(&name)),
            _ => write!(
                self.limits,
                "\n[limits.{}]\nstrategy = \"fixed_window\"\nlimit = {count}\nwindow = \"{window}\"\nalign = \"clock\"\n",
                quoted(&name),
            ),
        };
        if is_shadow {
            self.limits.push_str("shadow = true\n");
        }
        self.rule(domain, path, node, Some(&name));
    }

    /// Writes a rule, unless there is one for the same descriptors.
    fn rule(&mut self, domain: &str, path: &[Step], node: &Node, limit: Option<&str>) {
        if !self.seen.insert(key_of(domain, path)) {
            return self
                .note(node, "another descriptor before it matches the same, and this one was left out");
        }
        self.rule_count += 1;
        self.rule_lines.push(node.line);
        let listed =
            |texts: Vec<&String>| texts.into_iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", ");
        let entries = listed(path.iter().map(|step| &step.entry).collect());
        let _ = write!(self.rules, "\n[[envoy]]\ndomain = {}\nentries = [{entries}]\n", quoted(domain));
        let _ = match limit {
            Some(name) => writeln!(self.rules, "limit = {}", quoted(name)),
            None => writeln!(self.rules, "unlimited = true"),
        };
        let shared = listed(path.iter().filter_map(|step| step.shared.as_ref()).collect());
        if !shared.is_empty() {
            let _ = writeln!(self.rules, "shared = [{shared}]");
        }
    }
}

fn key_of(domain: &str, path: &[Step]) -> (String, Vec<String>) {
    (domain.to_owned(), path.iter().map(|step| step.entry.clone()).collect())
}

/// The value that a descriptor names, if it names one.
fn value_of(node: &Node) -> Option<&str> {
    node.field("value").and_then(Node::text).filter(|value| !value.is_empty())
}

/// Whether another descriptor of the same level would match where this one does, and less precisely.
fn has_less_specific(node: &Node, siblings: &[Node]) -> bool {
    let key = |node: &Node| node.field("key").and_then(Node::text).map(str::to_owned);
    value_of(node).is_some_and(|value| {
        siblings.iter().filter(|other| key(other) == key(node)).any(|other| match value_of(other) {
            None => true,
            Some(pattern) => {
                pattern != value && pattern.strip_suffix('*').is_some_and(|prefix| value.starts_with(prefix))
            }
        })
    })
}

/// A unit as a window; months and years are as long as envoyproxy/ratelimit has them.
fn window_of(unit: &str) -> Option<&'static str> {
    Some(match unit.to_ascii_lowercase().as_str() {
        "second" => "1s",
        "minute" => "1m",
        "hour" => "1h",
        "day" => "1d",
        "week" => "7d",
        "month" => "30d",
        "year" => "365d",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {

    use super::*;
    use crate::config::Config;

    /// What a file becomes, rule by rule (`entries: what they meet`), and what is noted.
    fn check(descriptors: &str, rules: &[&str], notes: &[&str]) {
        let text = format!("domain: edge\ndescriptors:\n{descriptors}");
        let imported = import(&text).unwrap_or_else(|why| panic!("{why}\n{text}"));
        let config = Config::parse(&imported.toml).unwrap_or_else(|why| panic!("{why}\n{}", imported.toml));
        let found: Vec<String> = config
            .envoy
            .rules()
            .iter()
            .map(|rule| {
                let entries: Vec<String> = rule
                    .entries
                    .iter()
                    .map(|entry| {
                        let shared = if entry.shared { " together" } else { "" };
                        format!("{} {:?}{shared}", entry.key, entry.value)
                    })
                    .collect();
                let limit = rule.limit.as_ref().map_or("unlimited".to_owned(), |name| {
                    let rule = config.gate.policy.find(name).expect("it is there");
                    format!("{name} {}{}", rule.allowance(), if rule.is_shadow() { " watching" } else { "" })
                });
                format!("{}: {limit}", entries.join(", "))
            })
            .collect();
        assert_eq!(found, rules, "{}", imported.toml);
        assert_eq!((imported.limits, imported.rules), (config.gate.policy.rules().len(), found.len()));
        assert_eq!(imported.notes.len(), notes.len(), "{:?}", imported.notes);
        for (found, expected) in imported.notes.iter().zip(notes) {
            assert!(found.contains(expected), "{found}");
        }
    }

    #[test]
    fn nested_descriptors_become_lists() {
        check(
            "  - key: path\n    value: /login\n    descriptors:\n      - key: remote_address\n        rate_limit: {unit: minute, requests_per_unit: 5}\n    rate_limit: {unit: SECOND, requests_per_unit: 100}\n",
            &[
                "path Exact(\"/login\"): edge-path_login 100 per 1s window of the clock",
                "path Exact(\"/login\"), remote_address Any: edge-path_login-remote_address 5 per 1m window of the clock",
            ],
            &[],
        );
        for (unit, words) in [
            ("hour", "3 per 1h"),
            ("day", "3 per 1d"),
            ("week", "3 per 7d"),
            ("month", "3 per 30d"),
            ("year", "3 per 365d"),
        ] {
            let words = format!("a Any: n {words} window of the clock");
            check(
                &format!("  - {{key: a, rate_limit: {{unit: {unit}, requests_per_unit: 3, name: n}}}}\n"),
                &[&words],
                &[],
            );
        }
    }

    #[test]
    fn what_is_special_is_carried_over() {
        check(
            "  - {key: a, value: x*, share_threshold: true, shadow_mode: true, rate_limit: {unit: day, requests_per_unit: 7, name: N}}\n\
             \x20 - {key: a, value: xy, rate_limit: {unlimited: true}}\n\
             \x20 - {key: a, value: 007, rate_limit: {unit: day, requests_per_unit: 0}}\n\
             \x20 - {key: a, value: xyz}\n\
             \x20 - {key: b, value: c, descriptors: [{key: d, rate_limit: {unit: day, requests_per_unit: 1}}]}\n\
             \x20 - {key: b, rate_limit: {unit: day, requests_per_unit: 2}}\n",
            &[
                "a Prefix(\"x\") together: n 7 per 1d window of the clock watching",
                "a Exact(\"xy\"): unlimited",
                "a Exact(\"007\"): edge-a_007 blocked",
                "a Exact(\"xyz\"): unlimited",
                "b Exact(\"c\"): unlimited",
                "b Exact(\"c\"), d Any: edge-b_c-d 1 per 1d window of the clock",
                "b Any: edge-b 2 per 1d window of the clock",
            ],
            &[],
        );
    }

    #[test]
    fn what_cannot_be_carried_over_is_noted() {
        let limit = "rate_limit: {unit: day, requests_per_unit: 1, name: n";
        check(
            &format!(
                "  - {{key: a, {limit}, replaces: [{{name: m}}]}}}}\n\
                 \x20 - {{key: a, {limit}}}}}\n\
                 \x20 - {{key: b, value: '*', detailed_metric: true, {limit}}}, quota_mode: true}}\n\
                 \x20 - {{key: b, {limit}}}}}\n\
                 \x20 - {{key: c, rate_limit: {{unit: fortnight, requests_per_unit: 1}}}}\n\
                 \x20 - {{key: c=d, {limit}}}}}\n\
                 \x20 - {{key: e, value: f, share_threshold: true, {limit}}}}}\n"
            ),
            &[
                "a Any: n 1 per 1d window of the clock",
                "b Any: n-2 1 per 1d window of the clock",
                "e Exact(\"f\"): n-3 1 per 1d window of the clock",
            ],
            &[
                "3: `replaces` was left out",
                "4: another descriptor before it matches the same",
                "5: `quota_mode` is not known here",
                "5: `detailed_metric` was left out",
                "6: another descriptor",
                "7: a rate limit without a unit",
                "8: a descriptor without a key",
                "9: `share_threshold` says nothing",
            ],
        );
        for (text, why) in
            [("", "it is empty"), ("descriptors: []", "line 1: there is no `domain`"), ("{", "not YAML")]
        {
            assert!(import(text).map(|_| ()).unwrap_err().contains(why), "{text}");
        }
        assert_eq!(import("domain: 'a\"b'").unwrap().rules, 0);
    }
}
