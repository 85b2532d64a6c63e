//! What can be counted of a source tree: which modules import which, the names of the root, and words outside the glossary.
//!
//! `tests/tidy.rs` holds the tree to it; `report.rs` prints it for this tree and for another revision. Plain text is looked at, without a
//! parser, so that old revisions can be counted too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

pub(crate) mod scripts;

/// Words that stand for a term of the field, which is to be used instead. The name of a definition (a function, a type, a constant, a
/// module) has none of them.
const BANNED: [(&str, &str); 37] = [
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
    ("kin", "sibling tables"),
    ("kinship", "sibling tables"),
    ("ledger", "table"),
    ("ledgers", "tables"),
    ("stock", "set of nodes"),
    ("stocks", "sets of nodes"),
    ("kept", "remembered, reserved, retention"),
    ("elsewhere", "remote, redirection"),
    ("together", "batch"),
    ("unwatched", "no telemetry"),
];

/// Words that no identifier has, local variables, fields and parameters included.
const BANNED_EVERYWHERE: [&str; 17] = [
    "told",
    "untold",
    "toll",
    "tolls",
    "question",
    "questions",
    "payer",
    "stead",
    "household",
    "said",
    "elsewhere",
    "verdict",
    "kin",
    "patience",
    "parting",
    "door",
    "beliefs",
];

/// Words that no short identifier has. A name of more than four words is a sentence, such as a test's, and may have them as verbs.
const BANNED_IN_SHORT: [&str; 13] = [
    "around",
    "asks",
    "away",
    "concluded",
    "ledger",
    "manifold",
    "marks",
    "otherwise",
    "sheet",
    "stock",
    "straight",
    "tell",
    "tells",
];

/// Names that have such a word because the field does: a frame of HTTP/2, and numbers around zero.
const ALLOWED_SHORT: [&str; 2] = ["GO_AWAY", "around_zero"];

/// Columns of stored functions. PostgreSQL replaces no function whose columns have other names (ARCHITECTURE.md).
const ALLOWED_COLUMNS: [&str; 1] = ["verdict"];

/// The types that have `rule` for `limit`, which is the word of the glossary: what a policy has under a name, and what Envoy calls so
/// (ARCHITECTURE.md).
const ALLOWED_RULES: [&str; 3] = ["EnvoyRule", "EnvoyRules", "Rule"];

/// Names that no type may have as a whole, where that is so, and what to use instead. A part of a key or of a body is another thing.
const BANNED_TYPES: [(&str, &str, &str); 8] = [
    ("Ask", "crates", "Charge"),
    ("Item", "crates", "StoredCharge"),
    ("Items", "crates", "charges"),
    ("Part", "crates/tollgate-store", "StoredCharge"),
    ("Parts", "crates/tollgate-store", "MergedCharges"),
    ("Place", "crates", "KeyLimit, a slot"),
    ("Places", "crates", "slots"),
    ("Question", "crates", "request"),
];

/// Where names and comments are checked: all production code.
const SOURCES: [&str; 10] = [
    "crates/tollgate-kernel/src",
    "crates/tollgate-store/src",
    "crates/tollgate-store/model/src",
    "crates/tollgate/src",
    "crates/tollgate-jobs/src",
    "crates/tollgate-llm/src",
    "crates/tollgate-server/src",
    "crates/tollgate-testkit/src",
    "crates/tollgate-sim/src",
    "benches/src",
];

/// Names that have such a word for another reason: what is due by a schedule, and how a quota stands, which is a public name.
const ALLOWED: [&str; 5] = ["ping_if_due", "is_due", "DuePoll", "Standing", "standing"];

/// Phrases that comments and messages do not have, and what to write instead (STYLE, section 3).
const BANNED_PHRASES: [(&str, &str); 24] = [
    ("whoever", "name the caller, the client, the task"),
    ("is told", "gets, is reported, is logged"),
    ("are told", "get, are reported, are logged"),
    ("unless said", "by default"),
    ("whom to wake", "a waker"),
    ("elsewhere", "remote, on another server, in another place"),
    ("who waits", "a waiter, a waiting call"),
    ("those who", "callers that, tasks that, readers that"),
    ("only watches", "is a shadow limit"),
    ("merely watch", "are shadow limits"),
    ("does what was asked", "runs the command"),
    ("was told", "got, received, saw"),
    ("were told", "got, received, saw"),
    ("be told", "be reported, be logged, be known"),
    ("nobody is told", "nothing is reported"),
    ("in their stead", "instead of them"),
    ("straight way", "fast path"),
    ("the way around", "the slow path"),
    ("who pays", "the key"),
    ("not told", "not reported, not known"),
    ("tells stderr", "writes to stderr"),
    ("the registry", "the gate"),
    ("a registry", "a gate"),
    ("one registry", "one gate"),
];

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

/// Folders that the map describes as one: a file for each strategy, or for each check of the suite.
const WHOLE_FOLDERS: [&str; 5] = ["algorithm", "conformance", "quick", "several", "upsert"];

/// A checkout of the repository.
pub(crate) struct Tree {
    root: PathBuf,
}

/// All Rust files below a directory.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
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

/// The code of a file, without comments and tests: a test may use what stands above its module.
pub(crate) fn code(text: &str) -> String {
    let end =
        ["#[cfg(test)]\nmod tests", "#[cfg(all(test,"].iter().filter_map(|start| text.find(start)).min();
    let lines = text[..end.unwrap_or(text.len())].lines();
    lines.filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The modules that a piece of code names by `crate::`.
pub(crate) fn imports(code: &str, modules: &BTreeSet<String>) -> BTreeSet<String> {
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

/// A ring of modules, if there is one.
pub(crate) fn ring(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
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

/// The words of a name: `read_kept` and `ReadKept` are `read` and `kept`.
pub(crate) fn words(name: &str) -> Vec<String> {
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
pub(crate) fn defined(code: &str) -> Vec<&str> {
    defined_by(code, &["fn", "struct", "enum", "trait", "type", "mod", "const", "static"])
}

/// The names that a piece of code defines after one of these keywords.
pub(crate) fn defined_by<'c>(code: &'c str, keywords: &[&str]) -> Vec<&'c str> {
    let tokens: Vec<&str> = code
        .split(|character: char| !(character.is_alphanumeric() || character == '_'))
        .filter(|token| !token.is_empty())
        .collect();
    tokens.windows(2).filter(|pair| keywords.contains(&pair[0])).map(|pair| pair[1]).collect()
}

pub(crate) fn banned(name: &str) -> Option<&'static (&'static str, &'static str)> {
    let words = words(name);
    BANNED.iter().find(|(word, _)| words.iter().any(|other| other == word) && !ALLOWED.contains(&name))
}

/// Every identifier of a piece of code. Comments and texts are left out.
pub(crate) fn identifiers(code: &str) -> Vec<&str> {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let prose = |line: &str| line.trim_start().starts_with("//");
    code.lines()
        .filter(|line| !prose(line))
        // Every second piece between quotes is a text; the rest of a line after `//` is a comment.
        .flat_map(|line| line.split(" // ").next().unwrap_or_default().split('"').step_by(2))
        .flat_map(|piece| piece.split(move |character| !is_name(character)))
        .filter(|token| !token.is_empty())
        .collect()
}

/// The first word of a name that no identifier has.
pub(crate) fn banned_everywhere(name: &str) -> Option<&'static str> {
    let words = words(name);
    let has = |word: &&str| words.iter().any(|other| other == word);
    let is_short = words.len() <= 4 && !ALLOWED_SHORT.contains(&name);
    let in_short = || BANNED_IN_SHORT.into_iter().find(has).filter(|_| is_short);
    BANNED_EVERYWHERE.into_iter().find(has).or_else(in_short)
}

/// The public items of a file whose signature has a word: functions with their parameters, fields, and enums with theirs.
pub(crate) fn signatures_with<'c>(code: &'c str, word: &str) -> Vec<&'c str> {
    let production = code.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    // A path is not an identifier.
    let is_named =
        |text: &str| if word.contains(':') { text.contains(word) } else { identifiers(text).contains(&word) };
    let of_enum = |rest: &'c str| rest.starts_with("enum ").then(|| rest.split("\n}").next()).flatten();
    let of_field = |rest: &'c str| {
        let line = rest.lines().next().unwrap_or_default();
        (line.ends_with(',') && line.contains(": ")).then_some(line)
    };
    let publics = production.match_indices("pub ").map(|(at, _)| &production[at + "pub ".len()..]);
    let signature = |rest: &'c str| {
        let until_body = rest.split(['{', ';']).next().unwrap_or_default();
        of_enum(rest).or(of_field(rest)).unwrap_or(until_body)
    };
    publics
        .filter(|rest| !rest.starts_with("use ") && !rest.starts_with("mod "))
        .map(signature)
        .filter(|signature| is_named(signature))
        .collect()
}

/// The names under which a piece of code knows the kernel's `Outcome`, whose numbers are in `Micros`.
pub(crate) fn names_of_numbers(code: &str) -> Vec<&str> {
    let imports = code.split(';').filter_map(|item| item.split_once("use tollgate_kernel::"));
    let names = imports.flat_map(|(_, list)| list.split(['{', '}', ','])).map(str::trim);
    let own = names.filter_map(|name| match name.split_once(" as ") {
        Some(("Outcome", alias)) => Some(alias),
        _ => (name == "Outcome").then_some(name),
    });
    own.chain(names_file(code, "kernel::Outcome").then_some("kernel::Outcome")).collect()
}

/// Whether a text names a file: not as the end of a longer name.
pub(crate) fn names_file(text: &str, file: &str) -> bool {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(file)
        .any(|(at, _)| !text[..at].ends_with(is_name) && !text[at + file.len()..].starts_with(is_name))
}

/// The phrases of the old vocabulary in a line: in its comment, or in its texts. Code is not looked at.
pub(crate) fn phrases_of(line: &str) -> Vec<&'static (&'static str, &'static str)> {
    let prose = match (line.find("//"), line.find('"')) {
        // An address in a text is no comment.
        (Some(comment), Some(text)) => &line[comment.min(text)..],
        (Some(start), None) | (None, Some(start)) => &line[start..],
        (None, None) => return Vec::new(),
    };
    let prose = prose.to_lowercase();
    let is_word = |phrase: &str| {
        prose.match_indices(phrase).any(|(at, _)| {
            let is_letter = |c: char| c.is_alphanumeric() || c == '_' || c == '/';
            !prose[..at].ends_with(is_letter) && !prose[at + phrase.len()..].starts_with(is_letter)
        })
    };
    BANNED_PHRASES.iter().filter(|(phrase, _)| is_word(phrase)).collect()
}

/// Which modules import which. The root of a crate is none of them.
fn graph(files: &[PathBuf], module_of: impl Fn(&Path) -> String) -> BTreeMap<String, BTreeSet<String>> {
    let is_root = |module: &str| matches!(module, "lib" | "main");
    let modules: BTreeSet<String> =
        files.iter().map(|file| module_of(file)).filter(|module| !is_root(module)).collect();
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for file in files {
        let module = module_of(file);
        if !is_root(&module) {
            let mut imported = imports(&code(&fs::read_to_string(file).expect("text")), &modules);
            imported.remove(&module);
            graph.entry(module).or_default().extend(imported);
        }
    }
    graph
}

impl Tree {
    pub(crate) fn at(root: impl Into<PathBuf>) -> Tree {
        Tree { root: root.into() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// All Rust files below a directory of the tree; none if it has no such directory.
    pub(crate) fn files(&self, directory: &str) -> Vec<PathBuf> {
        let directory = self.root.join(directory);
        if directory.is_dir() { files(&directory) } else { Vec::new() }
    }

    fn source(&self) -> PathBuf {
        self.root.join("crates/tollgate/src")
    }

    /// The files of a crate that the map names neither themselves nor by their folder.
    pub(crate) fn unmapped(&self, source: &str, map: &str) -> Vec<String> {
        let directory = self.root.join(source);
        let scripts = scripts::files(&self.root).into_iter().filter(|file| file.starts_with(&directory));
        let is_mapped = |file: &Path| {
            let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let (file_name, stem) = (name(file), name(&file.with_extension("")));
            let folders: Vec<String> = file
                .strip_prefix(&directory)
                .unwrap_or(file)
                .iter()
                .map(|part| part.to_string_lossy().into())
                .collect();
            matches!(&*file_name, "lib.rs" | "tests.rs")
                || names_file(map, &file_name)
                || folders.iter().any(|folder| WHOLE_FOLDERS.contains(&folder.as_str()))
                || (file.with_extension("").is_dir() && names_file(map, &format!("{stem}/")))
        };
        self.files(source)
            .into_iter()
            .chain(scripts)
            .filter(|file| !is_mapped(file))
            .map(|file| file.display().to_string())
            .collect()
    }

    /// The module of the library that a file belongs to.
    fn module_of(&self, path: &Path) -> String {
        let relative = path.strip_prefix(self.source()).expect("below the source").with_extension("");
        let text = relative.to_str().expect("text").replace('\\', "/");
        match APART.iter().find(|(start, _)| text.starts_with(start)) {
            Some((_, module)) => (*module).to_owned(),
            None => text.split('/').next().unwrap_or_default().to_owned(),
        }
    }

    /// Which modules of the library import which.
    pub(crate) fn graph(&self) -> BTreeMap<String, BTreeSet<String>> {
        graph(&files(&self.source()), |file| self.module_of(file))
    }

    /// Which modules of another crate import which: the files and folders of its source.
    pub(crate) fn graph_of(&self, source: &str) -> BTreeMap<String, BTreeSet<String>> {
        let directory = self.root.join(source);
        graph(&self.files(source), |file| {
            let relative = file.strip_prefix(&directory).expect("below the source").with_extension("");
            relative.iter().next().unwrap_or_default().to_string_lossy().into_owned()
        })
    }

    /// The names that the root of the library exports.
    pub(crate) fn root_names(&self) -> BTreeSet<String> {
        let text = code(&fs::read_to_string(self.source().join("lib.rs")).expect("lib.rs"));
        let mut names = BTreeSet::new();
        for item in text.split(';').map(str::trim) {
            let item = item
                .lines()
                .filter(|line| !line.trim_start().starts_with("#["))
                .collect::<Vec<_>>()
                .join(" ");
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
        names
    }

    /// Every definition whose name has a word outside the glossary, with the word to use instead.
    pub(crate) fn banned_names(&self) -> Vec<String> {
        let mut found = Vec::new();
        for file in SOURCES.iter().flat_map(|directory| self.files(directory)) {
            let text = fs::read_to_string(&file).expect("text");
            let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let code = code(&text);
            for name in defined(&code).into_iter().chain([stem]) {
                if let Some((word, instead)) = banned(name) {
                    found.push(format!("{}: `{name}` has `{word}`; use {instead}", file.display()));
                }
            }
            for name in defined_by(&code, &["struct", "enum", "trait"]) {
                if words(name).iter().any(|word| word == "rule" || word == "rules")
                    && !ALLOWED_RULES.contains(&name)
                {
                    found.push(format!("{}: the type `{name}` has `rule`; use limit", file.display()));
                }
                let is_banned = |(banned, place, _): &&(&str, &str, &str)| {
                    *banned == name && file.starts_with(self.root.join(place))
                };
                if let Some((_, _, instead)) = BANNED_TYPES.iter().find(is_banned) {
                    found.push(format!("{}: the type `{name}`; use {instead}", file.display()));
                }
            }
        }
        found
    }

    /// Every identifier with a word that none may have, once for each file. Scripts, statements, the page's code and configurations are
    /// scanned too.
    pub(crate) fn banned_identifiers(&self) -> Vec<String> {
        let mut found = Vec::new();
        let rust = SOURCES.iter().flat_map(|directory| self.files(directory));
        for file in rust.chain(scripts::files(&self.root).into_iter().filter(|file| scripts::is_code(file))) {
            let text = fs::read_to_string(&file).expect("text");
            let is = |wanted: &str| file.extension().is_some_and(|extension| extension == wanted);
            let (is_rust, is_sql) = (is("rs"), is("sql"));
            let names = if is_rust { identifiers(&text) } else { scripts::identifiers(&text) };
            let is_allowed = |name: &&str| is_sql && ALLOWED_COLUMNS.contains(name);
            let names: BTreeSet<&str> = names.into_iter().filter(|name| !is_allowed(name)).collect();
            for (name, word) in names.into_iter().filter_map(|name| Some((name, banned_everywhere(name)?))) {
                found.push(format!("{}: `{name}` has `{word}`", file.display()));
            }
        }
        found
    }

    /// Every line of a comment or a message with a phrase outside plain English, with what to write instead.
    pub(crate) fn banned_phrases(&self) -> Vec<String> {
        let mut found = Vec::new();
        for file in SOURCES.iter().flat_map(|directory| self.files(directory)) {
            let text = fs::read_to_string(&file).expect("text");
            for (number, line) in (1..).zip(text.lines()) {
                for (phrase, instead) in phrases_of(line) {
                    found.push(format!("{}:{number}: `{phrase}`; write {instead}", file.display()));
                }
            }
        }
        found
    }
}
