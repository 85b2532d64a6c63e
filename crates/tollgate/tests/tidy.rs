//! What must hold of the source tree: modules import in one direction, the root exports fit on one screen, and names are words of the
//! field (STYLE, section 2).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

#[path = "tidy/tree.rs"]
mod tree;

use tree::{
    Tree, banned, banned_everywhere, code, defined, defined_by, identifiers, imports, names_file,
    names_of_numbers, phrases_of, ring, signatures_with, words,
};

/// How many names the root may export.
const MOST_NAMES: usize = 40;

/// Phrases of the old vocabulary in texts that users read.
const PHRASES: [&str; 19] = [
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
    "not told",
    "long way",
    "its doors",
    "doors of",
    "it meets",
    "the registry",
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

/// So are the kernel, the stores and the crate for language models. The other crates are only counted, by the report.
#[test]
fn no_modules_of_three_other_crates_import_each_other_in_a_ring() {
    for (source, from, to) in [
        ("crates/tollgate-kernel/src", "limit", "algorithm"),
        ("crates/tollgate-store/src", "redis", "remote"),
        ("crates/tollgate-llm/src", "limits", "seen"),
    ] {
        let graph = tree().graph_of(source);
        assert!(graph[from].contains(to), "{graph:?}");
        if let Some(ring) = ring(&graph) {
            panic!("{source}: modules import each other in a ring: {}", ring.join(" -> "));
        }
    }
}

#[test]
fn the_imports_of_another_crate_are_found() {
    let graph = tree().graph_of("crates/tollgate-server/src");
    assert!(graph["front"].contains("app") && !graph.contains_key("main"), "{graph:?}");
    assert!(tree().graph_of("crates/no-such/src").is_empty());
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

/// `Micros` is the unit of decisions, and of the types for authors of stores. The library's own interface has `Duration`.
#[test]
fn no_public_signature_of_the_library_has_micros() {
    let mut found = Vec::new();
    for file in tree().files("crates/tollgate/src") {
        let text = code(&fs::read_to_string(&file).expect("text"));
        found.extend(
            signatures_with(&text, "Micros").into_iter().map(|one| format!("{}: {one}", file.display())),
        );
    }
    assert!(found.is_empty(), "{found:#?}");
}

/// The numbers of the kernel's outcome are in `Micros`. Two public items hand it out, beside `tollgate::store`.
#[test]
fn the_numbers_of_the_kernel_are_public_in_two_places() {
    let mut found = BTreeSet::new();
    for file in tree().files("crates/tollgate/src") {
        let text = code(&fs::read_to_string(&file).expect("text"));
        for name in names_of_numbers(&text) {
            let stem = file.file_stem().unwrap_or_default().to_string_lossy();
            found.extend(
                signatures_with(&text, name).into_iter().map(|one| format!("{stem}: {}", one.trim())),
            );
        }
    }
    let expected = ["headers: outcome: Outcome,", "outcome: fn numbers(&self) -> &kernel::Outcome"];
    assert_eq!(found, expected.map(str::to_owned).into(), "ARCHITECTURE.md has this list too");
}

/// The clock is in the store crate and exported by the library's root. It has `Micros` for instants, and no other item may.
#[test]
fn the_clock_has_micros_only_where_an_instant_is_read_or_taken() {
    let path = tree().root().join("crates/tollgate-store/src/clock.rs");
    let text = code(&fs::read_to_string(path).expect("text"));
    let names: BTreeSet<&str> = signatures_with(&text, "Micros")
        .into_iter()
        .map(|one| one.trim_start_matches("fn ").split('(').next().unwrap_or_default())
        .collect();
    assert_eq!(
        names,
        BTreeSet::from(["advance", "alarm", "at", "next_alarm", "now", "recent", "server_now", "set"]),
        "ARCHITECTURE.md has this list too"
    );
}

/// The check above can fail.
#[test]
fn a_unit_in_a_public_signature_is_found() {
    for (code, count) in [
        ("pub fn a(&self) -> Option<Micros> {", 1),
        ("pub const fn a(\n    b: u8,\n    now: Micros,\n) -> u8 {", 1),
        ("pub struct A {\n    pub b: Micros,\n}", 1),
        ("pub enum A {\n    B {\n        c: Micros,\n    },\n}", 1),
        ("pub fn a() -> u8 {\n    let b = Micros::ZERO;\n}", 0),
        ("pub(crate) fn a(b: Micros) {", 0),
        ("pub use tollgate_kernel::Micros;", 0),
        ("pub struct A {\n    b: Micros,\n}", 0),
        ("#[cfg(test)]\nmod tests {\n    pub fn a(b: Micros) {}\n}", 0),
    ] {
        assert_eq!(signatures_with(code, "Micros").len(), count, "{code}");
    }
    for (code, names) in [
        ("use tollgate_kernel::{Limit, Outcome};", &["Outcome"][..]),
        ("use tollgate_kernel::Outcome as Numbers;", &["Numbers"]),
        ("use crate::outcome::Outcome;\nfn a(b: &kernel::Outcome) {}", &["kernel::Outcome"]),
        ("use crate::outcome::Outcome;", &[]),
    ] {
        assert_eq!(names_of_numbers(code), names, "{code}");
    }
    assert_eq!(signatures_with("pub fn a() -> &kernel::Outcome {", "kernel::Outcome").len(), 1);
}

/// The map has each file of the three crates that decide, by its own name or, where it describes one as a whole, by its folder's.
#[test]
fn the_map_has_every_module() {
    let tree = tree();
    let map = fs::read_to_string(tree.root().join("ARCHITECTURE.md")).expect("the map");
    for source in ["crates/tollgate-kernel/src", "crates/tollgate-store/src", "crates/tollgate/src"] {
        let unmapped = tree.unmapped(source, &map);
        assert!(unmapped.is_empty(), "ARCHITECTURE.md does not name these: {unmapped:#?}");
        assert!(!tree.unmapped(source, "").is_empty(), "{source}: the check can fail");
    }
    assert!(names_file("`a/bucket.lua`", "bucket.lua") && !names_file("`any_bucket.lua`", "bucket.lua"));
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

/// Local variables, fields and parameters too.
#[test]
fn no_identifier_has_a_private_word() {
    let found = tree().banned_identifiers();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// The check above can fail.
#[test]
fn a_private_word_in_an_identifier_is_found() {
    let code = "// told\nlet told = ask(\"a toll\", door); // said\nstruct A { is_told: bool }";
    let found: Vec<&str> =
        identifiers(code).into_iter().filter(|name| banned_everywhere(name).is_some()).collect();
    assert_eq!(found, ["told", "door", "is_told"]);
    for (name, word) in [
        ("Tollgate", None),
        ("asks", Some("asks")),
        ("tellDecision", Some("tell")),
        ("KEPT_STRAIGHT", Some("straight")),
        ("what_the_provider_asks_for_is_waited_for", None),
        ("GO_AWAY", None),
    ] {
        assert_eq!(banned_everywhere(name), word, "{name}");
    }
}

/// The check above can fail: what is not Rust is scanned too.
#[test]
fn a_private_word_in_a_script_is_found() {
    let code = "// told\n/** told */\n  const { said } = ask(\"told\", 'told'); // told\n\
                const b = `told ${f({ toll: 1 })} told ${payer} told`;\n# told\nset $door told; # told\nkey's told\nkin";
    let names = tree::scripts::identifiers(code);
    let found: Vec<&str> = names.into_iter().filter(|name| banned_everywhere(name).is_some()).collect();
    assert_eq!(found, ["said", "toll", "payer", "door", "told", "kin"]);
    let files = tree::scripts::files(tree().root());
    for name in [
        "overview.js",
        "Caddyfile",
        "nginx.conf",
        "tollgate.lua",
        "alerts.yml",
        "token_bucket.lua",
        "hold.lua",
        "settle.sql",
        "apalis.sql",
    ] {
        assert!(files.iter().any(|file| file.ends_with(name)), "{name}");
    }
    assert!(!files.iter().any(|file| file.ends_with("migrations/1.sql")));
    let names = tree::scripts::identifiers(
        "-- told\nselect s.*, said.a -- told\nfrom patience as s where x = 'told';\n\
                                            local door = hold.question -- told\nlocal n = #payer",
    );
    let found: Vec<&str> = names.into_iter().filter(|name| banned_everywhere(name).is_some()).collect();
    assert_eq!(found, ["said", "patience", "door", "question", "payer"]);
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
        ("/// Those who wait.", 1),
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
    texts.extend(tree::scripts::files(root).into_iter().filter(|path| path.starts_with(root.join("deploy"))));
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
