//! `[[envoy]]`: which descriptors of Envoy meet which limit.
//!
//! A rule names a domain, a list of entries and a limit. It matches a descriptor whose entries have exactly these keys in this
//! order, so what envoyproxy/ratelimit nests is written here as one list. Of several rules that match, the most specific
//! wins; `tree.rs` finds it. The key is not made here: the server makes it from the descriptor.

mod tree;

use std::collections::BTreeMap;

use tollgate::Key;
use tollgate::config::{Extension, Field, Limits, Reader, Section};

use self::tree::Node;

/// How many entries a rule may have: more than anybody nests, and few enough to walk.
const MOST_ENTRIES: usize = 16;

/// Which descriptors of Envoy meet which limit: the rules of `[[envoy]]`.
///
/// ```toml
/// [[envoy]]
/// domain = "edge"
/// entries = ["path=/login", "remote_address"]  # each address by itself
/// limit = "login"
///
/// [[envoy]]
/// domain = "edge"
/// entries = ["path=/login", "remote_address=10.*"]
/// unlimited = true
/// ```
///
/// An entry is `key` for any value, `key=value` for this one, or `key=prefix*` for all that begin so. Of the rules that match,
/// the one wins that is more specific at the first entry at which they differ: a value before a prefix, a longer prefix before
/// a shorter one, and a prefix before any value.
///
/// | of `[[envoy]]` | meaning | default |
/// |---|---|---|
/// | `domain` | the domain that Envoy names | |
/// | `entries` | the keys of the descriptor, in its order, and which values match | |
/// | `limit` | the limit that it meets; every descriptor has a counter of its own | |
/// | `unlimited` | `true` in place of `limit`: it passes, uncounted | `false` |
/// | `shared` | keys of entries whose values share one counter | none |
/// | `headers` | whether the caller gets the rate-limit headers of the limit | `true` |
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EnvoyRules {
    rules: Vec<EnvoyRule>,
    /// The places of the rules above, by domain.
    domains: BTreeMap<String, Node>,
}

/// One rule of `[[envoy]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EnvoyRule {
    /// The domain that Envoy names.
    pub(crate) domain: String,
    /// The entries of the descriptors that it matches.
    pub(crate) entries: Vec<EnvoyEntry>,
    /// The limit that they meet; `None` lets them pass, uncounted.
    pub(crate) limit: Option<String>,
    /// Whether the caller gets the headers of the limit.
    pub(crate) headers: bool,
}

/// One entry of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EnvoyEntry {
    /// The entry's key.
    pub(crate) key: String,
    /// Which values match.
    pub(crate) value: EnvoyValue,
    /// Whether all values that match share one counter.
    pub(crate) shared: bool,
}

/// Which values of an entry match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EnvoyValue {
    /// This one.
    Exact(String),
    /// All that begin so.
    Prefix(String),
    /// All.
    Any,
}

impl EnvoyRules {
    /// The rules, in the order of the file.
    pub(crate) fn rules(&self) -> &[EnvoyRule] {
        &self.rules
    }

    /// The most specific rule that matches a descriptor of these entries. They are bytes, as Envoy sends what clients put into headers;
    /// what is not text matches a rule that takes any value, or a prefix that it begins with.
    pub(crate) fn find(&self, domain: &str, entries: &[(&[u8], &[u8])]) -> Option<&EnvoyRule> {
        self.domains.get(domain)?.find(entries).map(|index| &self.rules[index])
    }

    /// Adds a rule, unless one for the same descriptors is there; then that one's place in the list is the error.
    fn add(&mut self, rule: EnvoyRule) -> Result<(), usize> {
        let index = self.rules.len();
        self.domains.entry(rule.domain.clone()).or_default().add(&rule.entries, index)?;
        self.rules.push(rule);
        Ok(())
    }
}

impl Extension for EnvoyRules {
    fn name(&self) -> &'static str {
        "envoy"
    }

    fn read(&mut self, reader: &mut Reader<'_>, field: &Field<'_>, limits: &mut Limits<'_>) {
        for section in reader.sections(field) {
            let section = section.showing_all();
            let read = read_rule(reader, &section, limits);
            if let Some(Err(other)) = read.map(|rule| self.add(rule))
                && let Some(entries) = section.field("entries")
            {
                let fix = format!("rule {} has the same domain and entries; keep one of them", other + 1);
                reader.mistake(entries, fix);
            }
        }
    }
}

fn read_rule(reader: &mut Reader<'_>, section: &Section<'_>, limits: &Limits<'_>) -> Option<EnvoyRule> {
    reader.only(section, &["domain", "entries", "limit", "unlimited", "shared", "headers"]);
    let domain = match section.field("domain") {
        Some(field) => read_domain(reader, field),
        None => {
            reader.missing(section, "domain", "\"edge\", as Envoy's filter names it");
            None
        }
    };
    let entries = match section.field("entries") {
        Some(field) => read_entries(reader, field),
        None => {
            reader.missing(section, "entries", "[\"remote_address\"]");
            None
        }
    };
    let limit = read_limit(reader, section, limits);
    let headers = section.field("headers").and_then(|field| reader.truth(field)).unwrap_or(true);
    let mut entries = entries?;
    if let Some(field) = section.field("shared") {
        read_shared(reader, field, &mut entries);
    }
    Some(EnvoyRule { domain: domain?, entries, limit: limit?, headers })
}

/// Reads a domain: it becomes the namespace of keys.
fn read_domain(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let domain = reader.text(field, "edge")?;
    match Key::new(domain, "any") {
        Ok(_) => Some(domain.to_owned()),
        Err(_) => {
            reader.mistake(field, "must have 1 to 1,024 bytes and no control characters");
            None
        }
    }
}

fn read_entries(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Vec<EnvoyEntry>> {
    let texts = reader.texts(field, "[\"remote_address\", \"path=/login\"]")?;
    if texts.len() > MOST_ENTRIES {
        reader.mistake(field, format!("has {} entries; at most {MOST_ENTRIES}", texts.len()));
        return None;
    }
    let mut entries = Vec::new();
    for text in &texts {
        match entry_of(text) {
            Ok(entry) => entries.push(entry),
            Err(fix) => reader.mistake(field, fix),
        }
    }
    (entries.len() == texts.len()).then_some(entries)
}

/// Reads `key`, `key=value` or `key=prefix*`.
fn entry_of(text: &str) -> Result<EnvoyEntry, String> {
    let (key, value) = match text.split_once('=') {
        None => (text, EnvoyValue::Any),
        Some((key, "*")) => return Err(format!("`{key}=*` matches any value; write \"{key}\" for that")),
        Some((key, value)) => match value.strip_suffix('*') {
            Some(prefix) => (key, EnvoyValue::Prefix(prefix.to_owned())),
            None => (key, EnvoyValue::Exact(value.to_owned())),
        },
    };
    if key.is_empty() {
        return Err("an entry has no key; write \"key\", \"key=value\" or \"key=prefix*\"".to_owned());
    }
    Ok(EnvoyEntry { key: key.to_owned(), value, shared: false })
}

/// Reads `limit` or `unlimited`: `Some(None)` for what passes, and `None` where a mistake says why.
fn read_limit(reader: &mut Reader<'_>, section: &Section<'_>, limits: &Limits<'_>) -> Option<Option<String>> {
    let unlimited = section.field("unlimited");
    let is_unlimited = match unlimited {
        Some(field) => reader.truth(field)?,
        None => false,
    };
    let Some(field) = section.field("limit") else {
        if !is_unlimited {
            let example = limits.names().first().copied().unwrap_or("api");
            reader.missing(section, "limit", format!("\"{example}\", or unlimited = true"));
            return None;
        }
        return Some(None);
    };
    if is_unlimited {
        reader.mistake(field, "does not go with unlimited = true; remove one of the two");
        return None;
    }
    limits.read_name(reader, field, Some("Envoy does not say when a request is done")).map(Some)
}

/// Reads which entries share one counter.
fn read_shared(reader: &mut Reader<'_>, field: &Field<'_>, entries: &mut [EnvoyEntry]) {
    for key in reader.texts(field, "[\"path\"]").unwrap_or_default() {
        let mut found = false;
        for entry in entries.iter_mut().filter(|entry| entry.key == key) {
            entry.shared = !matches!(entry.value, EnvoyValue::Exact(_));
            found |= entry.shared;
        }
        if !found {
            let fix = format!("`{key}` is no entry of this rule that matches several values");
            reader.mistake(field, fix);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::{check, parse};

    const LIMITS: &str = "[limits]\napi = { unlimited = true }\nlogin = { blocked = true }\n\
                          pool = { strategy = 'concurrency', limit = 5, lease = '1s' }\n[[envoy]]\n";

    /// Every mistake of one rule, whose fields start in line 6, by its field, value and a part of the fix.
    fn refused(rule: &str, expected: &[(usize, &str, &str, &str)]) {
        check(&format!("{LIMITS}{rule}"), expected);
    }

    #[test]
    fn rules_are_read() {
        let rule = "domain = 'edge'\nentries = ['a', 'b=c', 'd=e*', 'f=']\nlimit = 'api'\nshared = ['a']\nheaders = false";
        let config = parse(&format!("{LIMITS}{rule}"));
        let [rule] = config.envoy.rules() else { panic!("one rule") };
        assert_eq!((&*rule.domain, rule.limit.as_deref(), rule.headers), ("edge", Some("api"), false));
        let entries: Vec<_> = rule
            .entries
            .iter()
            .map(|entry| format!("{} {:?} {}", entry.key, entry.value, entry.shared))
            .collect();
        assert_eq!(
            entries,
            ["a Any true", "b Exact(\"c\") false", "d Prefix(\"e\") false", "f Exact(\"\") false"]
        );
        assert_eq!(parse("").envoy.rules().len(), 0);
        assert_eq!(parse("envoy = []").envoy.rules().len(), 0);
    }

    #[test]
    fn the_most_specific_rule_wins() {
        let config = parse(
            r#"
            [limits.login]
            strategy = "fixed_window"
            limit = 5
            window = "1m"

            [[envoy]]
            domain = "edge"
            entries = ["path=/login", "remote_address"]
            limit = "login"

            [[envoy]]
            domain = "edge"
            entries = ["path=/login", "remote_address=10.*"]
            unlimited = true
            "#,
        );
        let path: (&[u8], &[u8]) = (b"path", b"/login");
        let rule = |address: &[u8]| config.envoy.find("edge", &[path, (b"remote_address", address)]);
        assert_eq!(rule(b"192.0.2.1").and_then(|rule| rule.limit.as_deref()), Some("login"));
        assert_eq!(rule(b"10.0.0.1").map(|rule| rule.limit.as_deref()), Some(None));
        assert_eq!(config.envoy.find("edge", &[path]), None);
    }

    #[test]
    fn mistakes_are_reported() {
        let fields = |entries: &str, limit: &str| format!("domain = 'edge'\nentries = {entries}\n{limit}");
        for (entries, limit, line, field, value, fix) in [
            (
                "['a']",
                "limit = 'logn'",
                8,
                "envoy[1].limit",
                "'logn'",
                "there is no such limit; did you mean \"login\"?",
            ),
            ("['a']", "limit = 'colour'", 8, "envoy[1].limit", "'colour'", "known: api, login, pool"),
            (
                "['a']",
                "limit = 'pool'",
                8,
                "envoy[1].limit",
                "'pool'",
                "Envoy does not say when a request is done",
            ),
            ("['a']", "limit = 1", 8, "envoy[1].limit", "1", "must be text in quotes"),
            ("['a']", "", 5, "envoy[1].limit", "", "is missing; write limit = \"api\", or unlimited = true"),
            ("['a']", "unlimited = false", 5, "envoy[1].limit", "", "is missing"),
            ("['a']", "unlimited = 1", 8, "envoy[1].unlimited", "1", "must be true or false"),
            ("['a']", "limt = 'api'\nlimit = 'api'", 8, "envoy[1].limt", "'api'", "did you mean `limit`?"),
            ("[]", "limit = 'api'", 7, "envoy[1].entries", "[…]", "must be a list of texts"),
            ("'a'", "limit = 'api'", 7, "envoy[1].entries", "'a'", "must be a list of texts"),
            ("['=b']", "limit = 'api'", 7, "envoy[1].entries", "[…]", "an entry has no key"),
            ("['a=*']", "limit = 'api'", 7, "envoy[1].entries", "[…]", "write \"a\" for that"),
            (
                "['a=b']",
                "limit = 'api'\nshared = ['a']",
                9,
                "envoy[1].shared",
                "[…]",
                "`a` is no entry of this rule",
            ),
            (
                "['a']",
                "limit = 'api'\nheaders = 'yes'",
                9,
                "envoy[1].headers",
                "'yes'",
                "must be true or false",
            ),
        ] {
            refused(&fields(entries, limit), &[(line, field, value, fix)]);
        }
        let many = format!("[{}]", vec!["'a'"; 17].join(","));
        refused(
            &fields(&many, "limit = 'api'"),
            &[(7, "envoy[1].entries", "[…]", "has 17 entries; at most 16")],
        );
        refused(
            "limit = 'api'\nunlimited = true",
            &[
                (5, "envoy[1].domain", "", "is missing; write domain = \"edge\""),
                (5, "envoy[1].entries", "", "is missing; write entries = [\"remote_address\"]"),
                (6, "envoy[1].limit", "'api'", "does not go with unlimited = true"),
            ],
        );
        refused(
            "domain = ''\nentries = ['a']\nlimit = 'api'",
            &[(6, "envoy[1].domain", "''", "must have 1 to 1,024 bytes")],
        );
        refused(
            "domain = 'e'\nentries = ['a', 'b=c']\nlimit = 'api'\n\
             [[envoy]]\ndomain = 'e'\nentries = ['a', 'b=c']\nunlimited = true",
            &[(11, "envoy[2].entries", "[…]", "rule 1 has the same domain and entries")],
        );
        check("envoy = 1", &[(1, "envoy", "***", "must be a list of tables: write [[envoy]]")]);
        check("[envoy]\ndomain = 'e'", &[(1, "envoy", "{…}", "must be a list of tables")]);
    }
}
