//! What the workspace may depend on: licences, second versions of a crate, crates that are banned, and where they come from. `deny.toml`
//! at the root says it, in the format of cargo-deny.
//!
//! cargo-deny itself takes longer to compile than this takes to run, so its rules are applied here to what `cargo metadata` says. Advisories
//! are not among them: their database is a git repository, and it changes without a commit of ours. docs/testing.md has the last run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// A crate of the graph.
#[derive(Clone, Debug)]
struct Package {
    name: String,
    version: String,
    licence: Option<String>,
    /// `None` for crates of the workspace.
    source: Option<String>,
    /// What it depends on in any version.
    wildcards: Vec<String>,
}

/// `deny.toml`, as far as it is held here.
struct Rules {
    allowed: BTreeSet<String>,
    /// By the name of the crate.
    exceptions: BTreeMap<String, BTreeSet<String>>,
    /// Licences of crates whose manifest names none, by `name@=version`.
    clarified: BTreeMap<String, String>,
    /// `name@version` to the reason.
    skipped: BTreeMap<String, String>,
    banned: BTreeMap<String, String>,
    registries: BTreeSet<String>,
    allows_wildcards: bool,
    /// Crates of the workspace may name each other by their path alone.
    allows_wildcard_paths: bool,
}

fn root() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn texts(value: Option<&toml::Value>) -> BTreeSet<String> {
    let list = value.and_then(toml::Value::as_array).map(Vec::as_slice).unwrap_or_default();
    list.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

impl Rules {
    fn read(text: &str) -> Rules {
        let file: toml::Table = text.parse().expect("deny.toml is TOML");
        let tables = |section: &str, name: &str| {
            let list = file[section].get(name).and_then(toml::Value::as_array).cloned().unwrap_or_default();
            list.into_iter().map(|entry| entry.as_table().expect("a table").clone()).collect::<Vec<_>>()
        };
        let text = |table: &toml::Table, field: &str| {
            let text = table.get(field).and_then(toml::Value::as_str).map(str::trim).unwrap_or_default();
            assert!(!text.is_empty(), "deny.toml: an entry needs a `{field}`: {table:?}");
            text.to_owned()
        };
        let with_reason = |name: &str| {
            tables("bans", name).iter().map(|entry| (text(entry, "crate"), text(entry, "reason"))).collect()
        };
        Rules {
            allowed: texts(file["licenses"].get("allow")),
            exceptions: tables("licenses", "exceptions")
                .iter()
                .map(|entry| (text(entry, "crate"), texts(entry.get("allow"))))
                .collect(),
            clarified: tables("licenses", "clarify")
                .iter()
                .map(|entry| (text(entry, "crate"), text(entry, "expression")))
                .collect(),
            skipped: with_reason("skip"),
            banned: with_reason("deny"),
            registries: texts(file["sources"].get("allow-registry")),
            allows_wildcards: file["bans"].get("wildcards").and_then(toml::Value::as_str) != Some("deny"),
            allows_wildcard_paths: file["bans"].get("allow-wildcard-paths").and_then(toml::Value::as_bool)
                == Some(true),
        }
    }

    /// Everything that the graph has and these rules do not allow, and every entry that nothing needs.
    fn mistakes(&self, packages: &[Package]) -> Vec<String> {
        let mut mistakes = Vec::new();
        let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        let mut used = BTreeSet::new();
        for package in packages {
            let Package { name, version, .. } = package;
            versions.entry(name).or_default().insert(version);
            for other in package.wildcards.iter().filter(|_| !self.allows_wildcards) {
                mistakes.push(format!("{name} {version} depends on any version of {other}: say which"));
            }
            let Some(source) = &package.source else { continue };
            if !self.registries.iter().any(|registry| source == &format!("registry+{registry}")) {
                mistakes
                    .push(format!("{name} {version} comes from {source}, which [sources] does not allow"));
            }
            if let Some(reason) = self.banned.get(name) {
                mistakes.push(format!("{name} {version} is banned: {reason}"));
            }
            let exact = format!("{name}@={version}");
            let licence = package.licence.as_ref().or_else(|| {
                let clarified = self.clarified.get(&exact)?;
                used.insert(exact.clone());
                Some(clarified)
            });
            let is_allowed = |licence: &str| {
                self.allowed.contains(licence)
                    || self.exceptions.get(name).is_some_and(|allowed| {
                        used.insert(name.clone());
                        allowed.contains(licence)
                    })
            };
            match licence.map(|licence| (licence, satisfies(licence, is_allowed))) {
                None => mistakes.push(format!("{name} {version} names no licence: clarify it in [licenses]")),
                Some((_, Some(true))) => {}
                Some((licence, Some(false))) => {
                    mistakes
                        .push(format!("{name} {version} has the licence `{licence}`, which is not allowed"));
                }
                Some((licence, None)) => {
                    mistakes.push(format!("{name} {version}: `{licence}` is no expression of licences"));
                }
            }
        }
        for (name, versions) in &versions {
            let skipped = |version: &&&str| self.skipped.contains_key(&format!("{name}@{version}"));
            let others: Vec<&&str> = versions.iter().filter(|version| !skipped(version)).collect();
            if others.len() > 1 {
                mistakes.push(format!(
                    "{name} is there in the versions {others:?}: move to one, or give a reason in [bans] skip"
                ));
            }
            if versions.len() > 1 {
                used.extend(versions.iter().map(|version| format!("{name}@{version}")));
            }
        }
        let entries = self.skipped.keys().chain(self.exceptions.keys()).chain(self.clarified.keys());
        mistakes.extend(
            entries
                .filter(|entry| !used.contains(*entry))
                .map(|entry| format!("nothing needs the entry `{entry}`")),
        );
        mistakes
    }
}

/// Whether an SPDX expression holds, if these licences are allowed; `None` if it is none. `/` is how old manifests write `OR`.
fn satisfies(expression: &str, mut is_allowed: impl FnMut(&str) -> bool) -> Option<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let mut words = spaced.split_whitespace().peekable();
    let holds = any_of(&mut words, &mut is_allowed)?;
    words.next().is_none().then_some(holds)
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, is_allowed: &mut impl FnMut(&str) -> bool) -> Option<bool> {
    let mut holds = all_of(words, is_allowed)?;
    while words.next_if_eq(&"OR").is_some() {
        holds |= all_of(words, is_allowed)?;
    }
    Some(holds)
}

fn all_of(words: &mut Words<'_>, is_allowed: &mut impl FnMut(&str) -> bool) -> Option<bool> {
    let mut holds = one(words, is_allowed)?;
    while words.next_if_eq(&"AND").is_some() {
        holds &= one(words, is_allowed)?;
    }
    Some(holds)
}

fn one(words: &mut Words<'_>, is_allowed: &mut impl FnMut(&str) -> bool) -> Option<bool> {
    match words.next()? {
        "(" => {
            let holds = any_of(words, is_allowed)?;
            (words.next()? == ")").then_some(holds)
        }
        ")" | "OR" | "AND" | "WITH" => None,
        licence if words.next_if_eq(&"WITH").is_some() => {
            let exception = words.next()?;
            Some(is_allowed(&format!("{licence} WITH {exception}")))
        }
        licence => Some(is_allowed(licence)),
    }
}

/// All crates that are compiled on Linux with all features, with those of builds and tests.
fn packages(rules: &Rules) -> Vec<Package> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root()).args(["metadata", "--format-version", "1", "--locked", "--all-features"]);
    let output =
        cargo.args(["--filter-platform", "x86_64-unknown-linux-gnu"]).output().expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let nodes = metadata["resolve"]["nodes"].as_array().expect("a graph");
    let ids: BTreeSet<&str> = nodes.iter().filter_map(|node| node["id"].as_str()).collect();
    let listed = metadata["packages"].as_array().expect("packages").iter();
    let text = |value: &Value| value.as_str().map(str::to_owned);
    listed
        .filter(|package| package["id"].as_str().is_some_and(|id| ids.contains(id)))
        .map(|package| Package {
            name: text(&package["name"]).expect("a name"),
            version: text(&package["version"]).expect("a version"),
            licence: text(&package["license"]),
            source: text(&package["source"]),
            wildcards: wildcards(package, rules.allows_wildcard_paths),
        })
        .collect()
}

/// What a package of the graph depends on in any version.
fn wildcards(package: &Value, allows_paths: bool) -> Vec<String> {
    let any = package["dependencies"].as_array().into_iter().flatten().filter(|other| other["req"] == "*");
    let named = any.filter(|other| !(allows_paths && other["path"].is_string()));
    named.filter_map(|other| other["name"].as_str().map(str::to_owned)).collect()
}

#[test]
fn the_graph_keeps_to_the_rules() {
    let rules =
        Rules::read(&std::fs::read_to_string(root().join("deny.toml")).expect("deny.toml at the root"));
    let packages = packages(&rules);
    assert!(packages.len() > 100, "{} packages", packages.len());
    let mistakes = rules.mistakes(&packages);
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
}

const RULES: &str = r#"
[licenses]
allow = ["MIT", "ISC"]
exceptions = [{ crate = "data", allow = ["CC0-1.0"] }]
[[licenses.clarify]]
crate = "silent@=1.0.0"
expression = "MIT"
[bans]
wildcards = "deny"
allow-wildcard-paths = true
skip = [{ crate = "twice@1.0.0", reason = "of old" }]
deny = [{ crate = "bad", reason = "it is bad" }]
[sources]
allow-registry = ["https://crates"]
"#;

/// A graph that uses every exception, with more.
fn graph(more: &[(&str, &str, Option<&str>, &str)]) -> Vec<Package> {
    let registry = "registry+https://crates";
    let fine = [
        ("plain", "1.0.0", Some("MIT"), registry),
        ("data", "1.0.0", Some("CC0-1.0"), registry),
        ("silent", "1.0.0", None, registry),
        ("twice", "1.0.0", Some("ISC"), registry),
        ("twice", "2.0.0", Some("ISC"), registry),
    ];
    let package = |(name, version, licence, source): &(&str, &str, Option<&str>, &str)| Package {
        name: (*name).to_owned(),
        version: (*version).to_owned(),
        licence: licence.map(str::to_owned),
        source: Some((*source).to_owned()),
        wildcards: Vec::new(),
    };
    fine.iter().chain(more).map(package).collect()
}

/// The check above can fail, in each of its parts.
#[test]
fn what_is_not_allowed_is_found() {
    let rules = Rules::read(RULES);
    let registry = "registry+https://crates";
    let check = |more: &[(&str, &str, Option<&str>, &str)], expected: &str| {
        assert_eq!(rules.mistakes(&graph(more)).join("\n"), expected);
    };
    check(&[], "");
    check(
        &[("gpl", "1.0.0", Some("GPL-3.0"), registry)],
        "gpl 1.0.0 has the licence `GPL-3.0`, which is not allowed",
    );
    check(
        &[("other", "1.0.0", Some("CC0-1.0"), registry)],
        "other 1.0.0 has the licence `CC0-1.0`, which is not allowed",
    );
    check(&[("none", "1.0.0", None, registry)], "none 1.0.0 names no licence: clarify it in [licenses]");
    check(&[("odd", "1.0.0", Some("MIT OR"), registry)], "odd 1.0.0: `MIT OR` is no expression of licences");
    check(&[("bad", "1.0.0", Some("MIT"), registry)], "bad 1.0.0 is banned: it is bad");
    check(
        &[("far", "1.0.0", Some("MIT"), "git+https://x")],
        "far 1.0.0 comes from git+https://x, which [sources] does not allow",
    );
    check(
        &[("plain", "2.0.0", Some("MIT"), registry)],
        "plain is there in the versions [\"1.0.0\", \"2.0.0\"]: move to one, or give a reason in [bans] skip",
    );
    assert_eq!(
        rules.mistakes(&[]),
        ["twice@1.0.0", "data", "silent@=1.0.0"].map(|entry| format!("nothing needs the entry `{entry}`"))
    );
}

#[test]
fn a_dependency_on_any_version_is_found() {
    let rules = Rules::read(RULES);
    let package = serde_json::json!({ "dependencies": [
        { "name": "exact", "req": "^1.0.0" },
        { "name": "any", "req": "*" },
        { "name": "beside", "req": "*", "path": "/beside" },
    ] });
    assert_eq!(wildcards(&package, rules.allows_wildcard_paths), ["any"]);
    assert_eq!(wildcards(&package, false), ["any", "beside"]);
    let mut graph = graph(&[]);
    graph[0].wildcards = vec!["any".to_owned()];
    assert_eq!(rules.mistakes(&graph), ["plain 1.0.0 depends on any version of any: say which"]);
    assert!(Rules::read(&RULES.replace("\"deny\"\nallow", "\"allow\"\nallow")).mistakes(&graph).is_empty());
}

#[test]
fn expressions_of_licences_are_read() {
    for (expression, expected) in [
        ("MIT", Some(true)),
        ("GPL-3.0", Some(false)),
        ("GPL-3.0 OR MIT", Some(true)),
        ("MIT/Apache-2.0", Some(true)),
        ("MIT AND GPL-3.0", Some(false)),
        ("GPL-3.0 OR MIT AND ISC", Some(true)),
        ("(GPL-3.0 OR MIT) AND ISC", Some(true)),
        ("(GPL-3.0 OR MIT) AND Zlib", Some(false)),
        ("MIT WITH some-exception", Some(false)),
        ("MIT WITH some-exception OR ISC", Some(true)),
        ("", None),
        ("MIT MIT", None),
        ("(MIT", None),
        ("AND", None),
    ] {
        assert_eq!(
            satisfies(expression, |licence| ["MIT", "ISC"].contains(&licence)),
            expected,
            "{expression}"
        );
    }
}
