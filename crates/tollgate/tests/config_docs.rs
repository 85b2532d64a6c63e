//! `docs/config.md` has every field of the library's sections, and no other. `[server]`, `[[envoy]]` and `[llm]` have the same test in the
//! server (`src/config.rs`), and `[jobs]` in `tollgate-jobs` (`src/config.rs`).
//!
//! The known fields are read from the error that an unknown field gets, so this test needs nothing but the public API.

use std::collections::{BTreeMap, BTreeSet};

use tollgate::config::Config;

const PAGE: &str = include_str!("../../../docs/config.md");

/// A name that is near to no field, so that the error lists those that there are.
const STRANGE: &str = "zzzzzzzzzzzzzzzzzzzzzzzzzzz";

/// The sections that are documented, each with a file that has the strange field in it.
const SECTIONS: [(&str, &str); 6] = [
    ("[store]", "[store]\nZ = 1"),
    ("[store.redis]", "[store.redis]\nurl = 'redis://a'\nZ = 1"),
    ("[store.postgres]", "[store.postgres]\nurl = 'postgres://a/b'\nZ = 1"),
    ("[limits.NAME]", "[limits.api]\nblocked = true\nZ = 1"),
    ("[requests]", "[requests]\nZ = 1"),
    ("[[routes]]", "[limits.api]\nblocked = true\n[[routes]]\nlimit = 'api'\nZ = 1"),
];

/// How the names of the sections begin that the page has and another crate reads.
const OF_OTHERS: [&str; 4] = ["[server]", "[[envoy]]", "[jobs", "[llm"];

fn is_of_another(section: &str) -> bool {
    OF_OTHERS.iter().any(|start| section.starts_with(start))
}

/// The fields that a file may have where it has a strange one.
fn known(file: &str) -> BTreeSet<String> {
    let mistakes = Config::parse(&file.replace('Z', STRANGE)).expect_err("an unknown field").to_string();
    let (_, list) = mistakes.split_once("known here: ").unwrap_or_else(|| panic!("{mistakes}"));
    list.lines().next().unwrap_or_default().split(", ").map(str::to_owned).collect()
}

/// A row of a table: field, type, default, variable, reload, meaning.
type Row = Vec<String>;

/// The rows of each section.
fn documented() -> BTreeMap<String, Vec<Row>> {
    let mut sections: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    let mut section = None;
    for line in PAGE.lines() {
        if let Some(name) = line.strip_prefix("## ") {
            section = Some(name.trim_matches('`').to_owned());
        } else if let (Some(section), Some(row)) = (&section, line.strip_prefix("| `")) {
            let cells: Row = row.trim_end_matches(" |").split(" | ").map(str::to_owned).collect();
            assert_eq!(cells.len(), 6, "{section}: {line}");
            sections.entry(section.clone()).or_default().push(cells);
        }
    }
    sections
}

fn field(row: &Row) -> String {
    row[0].trim_end_matches('`').to_owned()
}

#[test]
fn every_field_is_documented_and_nothing_else() {
    let documented = documented();
    let ours = documented.keys().filter(|section| !is_of_another(section)).count();
    assert_eq!(ours, SECTIONS.len(), "{:?}", documented.keys());
    for (section, file) in SECTIONS {
        let rows = documented.get(section).unwrap_or_else(|| panic!("{section} is not documented"));
        let fields: Vec<String> = rows.iter().map(field).collect();
        let unique: BTreeSet<String> = fields.iter().cloned().collect();
        assert_eq!(unique.len(), fields.len(), "{section}: a field is there twice");
        assert_eq!(unique, known(file), "{section}");
        for row in rows {
            assert!(["yes", "restart"].contains(&&*row[4]), "{section}: {row:?}");
            assert!(row.iter().all(|cell| !cell.trim().is_empty()), "{section}: {row:?}");
        }
    }
}

/// Each section of the file has a heading.
#[test]
fn every_section_is_documented() {
    let headings: String = PAGE.lines().filter(|line| line.starts_with("## ")).collect();
    for section in known("Z = 1") {
        let is_there =
            headings.contains(&format!("[{section}]")) || headings.contains(&format!("[{section}."));
        // `[[rules]]` is the older name of `[[routes]]`; the others belong to crates that document them.
        let is_of_another_crate = section == "rules";
        assert!(is_there || is_of_another_crate, "[{section}] is not documented");
    }
}

/// A variable that the page names sets its field, and a field without one has none.
#[test]
fn variables_are_those_that_there_are() {
    let file = "[limits.api]\nblocked = true\n";
    let sets_nothing = |variable: &str| {
        let read = Config::parse_with_env(file, [(variable.to_owned(), "?".to_owned())]);
        read.is_err_and(|mistakes| mistakes.to_string().contains("sets nothing"))
    };
    for (section, rows) in documented().into_iter().filter(|(name, _)| !is_of_another(name)) {
        let path = section.trim_matches(['[', ']']).replace("NAME", "api");
        for row in rows {
            let name = format!("{path}_{}", field(&row)).replace('.', "_").to_uppercase();
            let variable = format!("TOLLGATE_{name}");
            match row[3].as_str() {
                "–" if section.starts_with("[[") => {}
                "–" => assert!(sets_nothing(&variable), "{variable} is not documented"),
                shown => {
                    assert_eq!(shown.trim_matches('`').replace("<NAME>", "API"), variable, "{section}");
                    assert!(!sets_nothing(&variable), "{variable} sets nothing");
                }
            }
        }
    }
}
