//! Names in what is not Rust: the scripts and statements of the stores, the page's code, and configurations for other programs.

use std::fs;
use std::path::{Path, PathBuf};

/// Where such files are, and how their names end.
const PLACES: [(&str, &[&str]); 5] = [
    ("crates/tollgate-kernel/src", &["lua", "sql"]),
    ("crates/tollgate-store/src", &["lua", "sql"]),
    ("crates/tollgate-jobs/src", &["lua", "sql"]),
    ("crates/tollgate-server/src/front/page", &["js"]),
    ("deploy", &["Caddyfile", "cfg", "conf", "json", "lua", "service", "toml", "yaml", "yml"]),
];

/// A migration that has run cannot change.
const UNCHANGEABLE: &str = "migrations";

/// What the scanner stands in.
enum Inside {
    /// Code, and how many braces are open in it.
    Code(u32),
    /// A text between backquotes, in which `${` begins code.
    Template,
}

/// All such files of a tree.
pub(crate) fn files(root: &Path) -> Vec<PathBuf> {
    fn walk(directory: &Path, ends: &[&str], found: &mut Vec<PathBuf>) {
        let Ok(entries) = fs::read_dir(directory) else { return };
        for path in entries.map(|entry| entry.expect("an entry").path()) {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() && name != UNCHANGEABLE {
                walk(&path, ends, found);
            } else if ends.contains(&name.rsplit('.').next().unwrap_or_default()) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    for (directory, ends) in PLACES {
        walk(&root.join(directory), ends, &mut found);
    }
    found.sort();
    found
}

/// Whether a file has code. The others have data with names of other programs, and prose.
pub(crate) fn is_code(file: &Path) -> bool {
    let is_data = |extension: &std::ffi::OsStr| ["json", "yaml", "yml"].iter().any(|data| extension == *data);
    !file.extension().is_some_and(is_data)
}

/// Every identifier of a script or a configuration. Comments and texts are left out; a text ends with its line.
pub(crate) fn identifiers(text: &str) -> Vec<&str> {
    let is_name = |character: char| character.is_alphanumeric() || character == '_';
    let (mut found, mut stack) = (Vec::new(), vec![Inside::Code(0)]);
    for line in text.lines() {
        let is_comment =
            ["//", "/*", "*", "#", "--"].iter().any(|start| line.trim_start().starts_with(start));
        let mut rest = if is_comment { "" } else { line };
        while let Some(character) = rest.chars().next() {
            let after = &rest[character.len_utf8()..];
            rest = after;
            let depth = stack.len();
            match (stack.last_mut(), character) {
                (Some(Inside::Template), '\\') => rest = after.get(1..).unwrap_or_default(),
                (Some(Inside::Template), '`') => _ = stack.pop(),
                (Some(Inside::Template), '$') if after.starts_with('{') => {
                    rest = &after[1..];
                    stack.push(Inside::Code(0));
                }
                (Some(Inside::Template), _) => {}
                (_, '`') => stack.push(Inside::Template),
                (_, '"' | '\'') => rest = after.split_once(character).map_or("", |(_, rest)| rest),
                (_, ' ') if ["// ", "# ", "-- "].iter().any(|start| after.starts_with(start)) => rest = "",
                (Some(Inside::Code(open)), '{') => *open += 1,
                (Some(Inside::Code(0)), '}') if depth > 1 => _ = stack.pop(),
                (Some(Inside::Code(open)), '}') => *open = open.saturating_sub(1),
                (_, first) if is_name(first) => {
                    let length = after.find(|inner| !is_name(inner)).unwrap_or(after.len());
                    let start = line.len() - after.len() - first.len_utf8();
                    found.push(&line[start..start + first.len_utf8() + length]);
                    rest = &after[length..];
                }
                _ => {}
            }
        }
    }
    found
}
