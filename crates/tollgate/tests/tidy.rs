//! What must hold of the source tree: modules import in one direction, and the root exports fit on one screen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// How many names the root may export.
const MOST_NAMES: usize = 40;

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
