//! What must hold of the source tree: modules import in one direction, the root exports fit on one screen, and names are words of the
//! field (STYLE, section 2).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// How many names the root may export.
const MOST_NAMES: usize = 40;

/// Words that stand for a term of the field, which is to be used instead. A definition (a function, a type, a constant, a module) has
/// none of them in its name; local variables are not looked at.
const BANNED: [(&str, &str); 27] = [
    ("straight", "fast path"),
    ("payer", "key, key extractor"),
    ("toll", "route limit, charge"),
    ("tolls", "route limits, charges"),
    ("due", "charge"),
    ("dues", "charges"),
    ("question", "request, charge"),
    ("questions", "requests, charges"),
    ("said", "outcome, reported limit"),
    ("told", "reported, logged"),
    ("untold", "suppressed"),
    ("marks", "headers"),
    ("sheet", "header template"),
    ("standing", "outcome"),
    ("met", "outcome"),
    ("meets", "matches"),
    ("verdict", "decision"),
    ("concluded", "decision"),
    ("household", "peer prefix"),
    ("manifold", "multiplexed"),
    ("parting", "lingering close"),
    ("patience", "timeout"),
    ("patient", "timed stream"),
    ("door", "listener, connection limit"),
    ("doors", "listeners"),
    ("beliefs", "denial cache"),
    ("stead", "fallback"),
];

/// Where names are looked at. The store crate has words of its own still.
const NAMED: [&str; 4] =
    ["crates/tollgate/src", "crates/tollgate-server/src", "crates/tollgate-testkit/src", "benches/src"];

/// Names that have such a word for another reason.
const ALLOWED: [&str; 1] = ["ping_if_due"];

/// Phrases of the old vocabulary in texts that users read.
const PHRASES: [&str; 7] =
    ["only watch", "who pays", "Who pays", "unless said", "is as new", "told here", "kept in\""];

/// Which files of a module are another, because they stand at another step: what a config reads is above the policy that it makes.
const APART: [(&str, &str); 1] = [("policy/config", "config")];

/// Re-exports of the root, and the modules that they are of.
const ALIASES: [(&str, &str); 5] = [
    ("config", "config"),
    ("headers", "response"),
    ("problem", "response"),
    ("grpc", "response"),
    ("Tollgate", "tollgate"),
];

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src")
}

/// All Rust files below a directory.
fn files(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path());
    let mut found = Vec::new();
    for path in entries {
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The module that a file belongs to.
fn module_of(path: &Path) -> String {
    let relative = path.strip_prefix(source()).expect("below the source").with_extension("");
    let text = relative.to_str().expect("text").replace('\\', "/");
    match APART.iter().find(|(start, _)| text.starts_with(start)) {
        Some((_, module)) => (*module).to_owned(),
        None => text.split('/').next().unwrap_or_default().to_owned(),
    }
}

/// The code of a file, without comments and tests: a test may use what stands above its module.
fn code(text: &str) -> String {
    let end =
        ["#[cfg(test)]\nmod tests", "#[cfg(all(test,"].iter().filter_map(|start| text.find(start)).min();
    let lines = text[..end.unwrap_or(text.len())].lines();
    lines.filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The modules that a piece of code names by `crate::`.
fn imports(code: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    for (at, _) in code.match_indices("crate::") {
        if code[..at].ends_with(is_name) || code[..at].ends_with("pub(in ") {
            continue;
        }
        let rest = &code[at + "crate::".len()..];
        // One name, or a list of them in braces.
        let names: Vec<&str> = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default().split(',').map(str::trim).collect(),
            None => vec![rest],
        };
        for name in names {
            let path: Vec<&str> = name.split("::").collect();
            let first = path[0].split(|character| !is_name(character)).next().unwrap_or_default();
            let second = path.get(1).map(|part| part.split(|c| !is_name(c)).next().unwrap_or_default());
            let module = match (first, second) {
                ("policy", Some("config")) => "config".to_owned(),
                _ => ALIASES
                    .iter()
                    .find(|(alias, _)| *alias == first)
                    .map_or_else(|| first.to_owned(), |(_, module)| (*module).to_owned()),
            };
            if modules.contains(&module) {
                found.insert(module);
            }
        }
    }
    found
}

/// Who imports whom.
fn graph() -> BTreeMap<String, BTreeSet<String>> {
    let files = files(&source());
    let modules: BTreeSet<String> =
        files.iter().map(|file| module_of(file)).filter(|module| module != "lib").collect();
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in files.iter().filter(|file| module_of(file) != "lib") {
        let (module, text) = (module_of(file), fs::read_to_string(file).expect("text"));
        let mut imported = imports(&code(&text), &modules);
        imported.remove(&module);
        graph.entry(module).or_default().extend(imported);
    }
    graph
}

/// A ring of modules, if there is one.
fn ring(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn walk(
        graph: &BTreeMap<String, BTreeSet<String>>,
        at: &str,
        path: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(start) = path.iter().position(|module| module == at) {
            return Some(path[start..].iter().cloned().chain([at.to_owned()]).collect());
        }
        if done.contains(at) {
            return None;
        }
        path.push(at.to_owned());
        let found = graph.get(at).into_iter().flatten().find_map(|next| walk(graph, next, path, done));
        path.pop();
        done.insert(at.to_owned());
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| walk(graph, module, &mut Vec::new(), &mut done))
}

#[test]
fn no_modules_import_each_other_in_a_ring() {
    let graph = graph();
    assert!(graph["engine"].contains("remote") && graph["limiter"].contains("engine"), "{graph:?}");
    if let Some(ring) = ring(&graph) {
        panic!("modules import each other in a ring: {}", ring.join(" -> "));
    }
}

/// The check above can fail.
#[test]
fn a_ring_is_found() {
    let modules: BTreeSet<String> = ["a", "b", "c", "config", "response"].map(str::to_owned).into();
    for (code, expected) in [
        ("use crate::a::{X, Y};", &["a"][..]),
        ("use crate::{a, b::Z};", &["a", "b"]),
        ("let x = crate::headers::render();", &["response"]),
        ("use crate::policy::config::Config;", &["config"]),
        ("use tollgate_crate::a::X;", &[]),
        ("use crate::d::X;", &[]),
    ] {
        let found: Vec<String> = imports(code, &modules).into_iter().collect();
        assert_eq!(found, expected, "{code}");
    }
    let of = |edges: &[(&str, &str)]| {
        let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in edges {
            graph.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        ring(&graph)
    };
    assert_eq!(of(&[("a", "b"), ("a", "c"), ("b", "c")]), None);
    assert_eq!(of(&[("a", "b"), ("b", "c"), ("c", "b")]).unwrap(), ["b", "c", "b"]);
}

#[test]
fn the_root_exports_at_most_forty_names() {
    let text = code(&fs::read_to_string(source().join("lib.rs")).expect("lib.rs"));
    let mut names = BTreeSet::new();
    for item in text.split(';').map(str::trim) {
        let item =
            item.lines().filter(|line| !line.trim_start().starts_with("#[")).collect::<Vec<_>>().join(" ");
        if let Some(module) = item.trim().strip_prefix("pub mod ") {
            names.insert(module.trim().to_owned());
        } else if let Some(path) = item.trim().strip_prefix("pub use ") {
            let last = |name: &str| {
                let name = name.trim().rsplit("::").next().unwrap_or_default();
                name.rsplit(" as ").next().unwrap_or_default().trim().to_owned()
            };
            match path.split_once('{') {
                Some((_, list)) => {
                    names.extend(
                        list.trim_end_matches('}').split(',').map(last).filter(|name| !name.is_empty()),
                    );
                }
                None => _ = names.insert(last(path)),
            }
        }
    }
    assert!(names.contains("Tollgate") && names.contains("ChargeId") && names.contains("store"), "{names:?}");
    assert!(names.len() <= MOST_NAMES, "{} names: {names:?}", names.len());
}

/// The words of a name: `read_kept` and `ReadKept` are `read` and `kept`.
fn words(name: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut before = '_';
    for character in name.chars() {
        let starts = before == '_' || character.is_uppercase() && !before.is_uppercase();
        match words.last_mut() {
            Some(word) if !starts => word.extend(character.to_lowercase()),
            _ if character != '_' => words.push(character.to_lowercase().collect()),
            _ => {}
        }
        before = character;
    }
    words.iter().map(|word| word.trim_end_matches('_').to_owned()).collect()
}

/// The names that a piece of code defines.
fn defined(code: &str) -> Vec<&str> {
    const KEYWORDS: [&str; 8] = ["fn", "struct", "enum", "trait", "type", "mod", "const", "static"];
    let tokens: Vec<&str> = code
        .split(|character: char| !(character.is_alphanumeric() || character == '_'))
        .filter(|token| !token.is_empty())
        .collect();
    tokens.windows(2).filter(|pair| KEYWORDS.contains(&pair[0])).map(|pair| pair[1]).collect()
}

fn banned(name: &str) -> Option<&'static (&'static str, &'static str)> {
    let words = words(name);
    BANNED.iter().find(|(word, _)| words.iter().any(|other| other == word) && !ALLOWED.contains(&name))
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn names_are_words_of_the_field() {
    let mut found = Vec::new();
    for directory in NAMED {
        for file in files(&repository().join(directory)) {
            let text = fs::read_to_string(&file).expect("text");
            let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let code = code(&text);
            for name in defined(&code).into_iter().chain([stem]) {
                if let Some((word, instead)) = banned(name) {
                    found.push(format!("{}: `{name}` has `{word}`; use {instead}", file.display()));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The check above can fail.
#[test]
fn a_banned_word_is_found() {
    assert_eq!(words("OF_ONE_PEER"), ["of", "one", "peer"]);
    assert_eq!(words("NoPayer"), ["no", "payer"]);
    assert_eq!(
        defined("pub(crate) async fn ask(x: Toll) {}\nstruct Toll;\nmod told;"),
        ["ask", "Toll", "told"]
    );
    for (name, is_banned) in [
        ("Toll", true),
        ("no_payer", true),
        ("Tollgate", false),
        ("untouched", false),
        ("OF_ONE_PEER_MANIFOLD", true),
    ] {
        assert_eq!(banned(name).is_some(), is_banned, "{name}");
    }
}

/// Help, messages, the page and the documents are in plain words.
#[test]
fn texts_that_users_read_have_no_private_phrases() {
    let root = repository();
    let mut texts = vec![root.join("README.md"), root.join("crates/tollgate-server/src/cli.rs")];
    for directory in
        ["docs", "crates/tollgate-server/src/front/page", "crates/tollgate-server/src/front/json"]
    {
        let entries = fs::read_dir(root.join(directory)).expect("a directory");
        texts.extend(entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file()));
    }
    let mut found = Vec::new();
    for path in texts {
        let text = fs::read_to_string(&path).expect("text");
        found.extend(
            PHRASES
                .iter()
                .filter(|phrase| text.contains(**phrase))
                .map(|phrase| format!("{}: {phrase}", path.display())),
        );
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
