//! Counts a source tree: `cargo run -p tollgate --example tree [REVISION]`, for this checkout and, with a revision, for that one beside it.
//!
//! The counts are made by plain text search, alike for both, so that they can be compared; names are printed where a number alone would
//! say little. Needs `git` and `tar` for a revision.

#[path = "tree.rs"]
#[allow(dead_code, reason = "the tests use all of it")]
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use tree::{Tree, code, ring};

/// Production code: what a user builds. The suite for authors of stores and the helpers of tests are not among it.
const PRODUCTION: [&str; 6] = [
    "crates/tollgate-kernel/src",
    "crates/tollgate-store/src",
    "crates/tollgate/src",
    "crates/tollgate-jobs/src",
    "crates/tollgate-llm/src",
    "crates/tollgate-server/src",
];

/// The library, whose modules import in one direction.
const LIBRARY: &str = "crates/tollgate/src";

/// Where a charge passes between a face and a store.
const PATH_OF_A_CHARGE: [&str; 3] =
    ["crates/tollgate-store/src", "crates/tollgate/src", "crates/tollgate-server/src/front"];

fn main() -> Result<(), Box<dyn Error>> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut columns = vec![("this tree".to_owned(), Counts::of(&Tree::at(&here)))];
    if let Some(revision) = std::env::args().nth(1) {
        let other = std::env::temp_dir().join(format!("tollgate-tree-{}", std::process::id()));
        let counted = check_out(&here, &revision, &other).map(|()| Counts::of(&Tree::at(&other)));
        let _ = fs::remove_dir_all(&other);
        columns.insert(0, (revision, counted?));
    }
    print!("| |");
    columns.iter().for_each(|(name, _)| print!(" {name} |"));
    print!("\n|---|");
    columns.iter().for_each(|_| print!("--:|"));
    println!();
    for (row, name) in ROWS.iter().enumerate() {
        print!("| {name} |");
        columns.iter().for_each(|(_, counts)| print!(" {} |", counts.numbers[row]));
        println!();
    }
    for (name, counts) in &columns {
        println!("\n{name}:");
        counts.names.iter().for_each(|(what, names)| println!("  {what}: {}", names.join(", ")));
    }
    Ok(())
}

/// Puts the files of a revision into a directory.
fn check_out(repository: &Path, revision: &str, into: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(into)?;
    let mut archive = Command::new("git")
        .args(["-C", &repository.display().to_string(), "archive", "--end-of-options", revision])
        .stdout(Stdio::piped())
        .spawn()?;
    let files = archive.stdout.take().ok_or("git has no output")?;
    let unpacked = Command::new("tar").arg("-x").arg("-C").arg(into).stdin(files).status()?;
    if !archive.wait()?.success() || !unpacked.success() {
        return Err(format!("cannot read the revision {revision}").into());
    }
    Ok(())
}

const ROWS: [&str; 11] = [
    "production lines (no tests, comments or blank lines)",
    "production files",
    "files past 500 lines, tests included",
    "names exported by the library's root",
    "struct types that carry a charge between face and store",
    "struct types that carry an answer between face and store",
    "modules of the library that charge counters or a store",
    "modules of the library in an import cycle",
    "modules of the other crates in an import cycle",
    "names with words outside the glossary, local variables included",
    "lines of comments and messages outside plain English",
];

struct Counts {
    numbers: [usize; ROWS.len()],
    names: Vec<(&'static str, Vec<String>)>,
}

impl Counts {
    fn of(tree: &Tree) -> Counts {
        let is_test =
            |part: Component<'_>| part.as_os_str() == "conformance" || part.as_os_str() == "tests.rs";
        let is_production = |file: &PathBuf| !file.components().any(is_test);
        let files: Vec<PathBuf> =
            PRODUCTION.iter().flat_map(|directory| tree.files(directory)).filter(is_production).collect();
        let texts: Vec<String> = files.iter().map(|file| fs::read_to_string(file).expect("text")).collect();
        let lines = |text: &String| code(text).lines().filter(|line| !line.trim().is_empty()).count();
        let long = texts.iter().filter(|text| text.lines().count() > 500).count();
        let charges =
            structs(tree, |fields| fields.contains("cost") && has(fields, &["key", "limit", "entry"]));
        let answers =
            structs(tree, |fields| has(fields, &["allowed", "outcome", "outcomes", "readings", "decision"]));
        let charging = charging_modules(tree);
        let cycles = in_a_cycle(&tree.graph());
        let others = PRODUCTION.iter().filter(|source| **source != LIBRARY);
        let cycles_of_others: Vec<String> = others
            .flat_map(|source| {
                let name = source.split('/').nth(1).unwrap_or_default();
                in_a_cycle(&tree.graph_of(source)).into_iter().map(move |module| format!("{name}: {module}"))
            })
            .collect();
        let numbers = [
            texts.iter().map(lines).sum(),
            files.len(),
            long,
            tree.root_names().len(),
            charges.len(),
            answers.len(),
            charging.len(),
            cycles.len(),
            cycles_of_others.len(),
            tree.banned_names().len() + tree.banned_identifiers().len(),
            tree.banned_phrases().len(),
        ];
        let names = vec![
            ("charges", charges),
            ("answers", answers),
            ("charging", charging),
            ("in a cycle", cycles),
            ("in a cycle of another crate", cycles_of_others),
        ];
        Counts { numbers, names }
    }
}

fn has(fields: &BTreeSet<&str>, names: &[&str]) -> bool {
    names.iter().any(|name| fields.contains(name))
}

/// The struct types on the path of a charge whose fields are such, by name.
fn structs(tree: &Tree, is_such: impl Fn(&BTreeSet<&str>) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for file in PATH_OF_A_CHARGE.iter().flat_map(|directory| tree.files(directory)) {
        if file.components().any(|part| part.as_os_str() == "conformance") {
            continue;
        }
        let text = code(&fs::read_to_string(&file).expect("text"));
        for (at, _) in text.match_indices("struct ") {
            let rest = &text[at + "struct ".len()..];
            let Some(end) = rest.find(['{', ';', '(']).filter(|end| rest[*end..].starts_with('{')) else {
                continue;
            };
            let body = rest[end + 1..].split("\n}").next().unwrap_or_default();
            let field = |line: &'_ str| -> Option<usize> { line.find(": ") };
            let fields: BTreeSet<&str> = body
                .lines()
                .filter_map(|line| field(line).and_then(|end| line[..end].split_whitespace().last()))
                .collect();
            if is_such(&fields) {
                let name = rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                found.push(name.to_owned());
            }
        }
    }
    found
}

/// The modules of the library that charge counters in this process or call a store to do so.
fn charging_modules(tree: &Tree) -> Vec<String> {
    let calls: Vec<String> =
        ["memory", "store", "remote"].iter().map(|receiver| format!("{receiver}.charge")).collect();
    let mut modules = BTreeSet::new();
    for file in tree.files("crates/tollgate/src") {
        let text = code(&fs::read_to_string(&file).expect("text"));
        let text: String = text.split_whitespace().collect();
        if calls.iter().any(|call| text.contains(call.as_str())) {
            let relative =
                file.strip_prefix(tree.root().join("crates/tollgate/src")).expect("below the source");
            let module = relative.with_extension("");
            let first =
                module.components().next().map(|part| part.as_os_str().to_string_lossy().into_owned());
            modules.extend(first);
        }
    }
    modules.into_iter().collect()
}

/// The modules that import themselves through others.
fn in_a_cycle(graph: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let reaches = |from: &String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            for other in graph.get(module).into_iter().flatten().filter(|other| seen.insert((*other).clone()))
            {
                next.push(other);
            }
        }
        seen.contains(from)
    };
    let found: Vec<String> = graph.keys().filter(|module| reaches(module)).cloned().collect();
    assert_eq!(found.is_empty(), ring(graph).is_none(), "both ways to look for a cycle agree");
    found
}
