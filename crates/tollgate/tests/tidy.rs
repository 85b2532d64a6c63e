//! What must hold of the source tree: modules import in one direction, the root exports fit on one screen, and names are words of the
//! field (STYLE, section 2).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

#[path = "tidy/tree.rs"]
mod tree;

use tree::{Tree, banned, defined, defined_by, imports, phrases_of, ring, words};

/// How many names the root may export.
const MOST_NAMES: usize = 40;

/// Phrases of the old vocabulary in texts that users read.
const PHRASES: [&str; 13] = [
    "only watch",
    "who pays",
    "Who pays",
    "unless said",
    "Unless said",
    "whoever",
    "Whoever",
    "is told",
    "are told",
    "elsewhere",
    "is as new",
    "told here",
    "kept in\"",
];

fn tree() -> Tree {
    Tree::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
}

#[test]
fn no_modules_import_each_other_in_a_ring() {
    let graph = tree().graph();
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
    let names = tree().root_names();
    assert!(names.contains("Tollgate") && names.contains("ChargeId") && names.contains("store"), "{names:?}");
    assert!(names.len() <= MOST_NAMES, "{} names: {names:?}", names.len());
}

#[test]
fn names_are_words_of_the_field() {
    let found = tree().banned_names();
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

#[test]
fn comments_and_messages_are_plain_english() {
    let found = tree().banned_phrases();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The check above can fail.
#[test]
fn a_banned_phrase_is_found() {
    for (line, count) in [
        ("    // Whoever asks is told.", 2),
        ("//! A store elsewhere.", 1),
        ("    let message = \"whoever waits\";", 1),
        ("    let elsewhere = find();", 0),
        ("    (\"DATABASE_URL\", \"postgres://elsewhere/app\"),", 0),
        ("    // The retold story.", 0),
    ] {
        assert_eq!(phrases_of(line).len(), count, "{line}");
    }
    assert_eq!(defined_by("type Item = X; struct Item;", &["struct", "enum"]), ["Item"]);
}

/// Help, messages, the page and the documents are in plain words.
#[test]
fn texts_that_users_read_have_no_private_phrases() {
    let tree = tree();
    let root = tree.root();
    let mut texts = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "crates/tollgate-server/src/cli.rs"]
        .map(|file| root.join(file))
        .to_vec();
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
