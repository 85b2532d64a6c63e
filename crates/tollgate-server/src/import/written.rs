//! The config that an import writes: limits, then what says who meets them, with the lines that each came from.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use super::name;

/// What came of a file.
pub(super) struct Imported {
    pub(super) toml: String,
    pub(super) limits: usize,
    pub(super) rules: usize,
    /// `12: what could not be carried over`.
    pub(super) notes: Vec<String>,
    /// Where the limits and the rules stood, by name and in order.
    pub(super) limit_lines: HashMap<String, usize>,
    pub(super) rule_lines: Vec<usize>,
}

impl Imported {
    /// The line of what became a field of the config, such as `limits.a.limit` or `envoy[2].domain`.
    pub(super) fn line_of(&self, field: &str) -> Option<usize> {
        if let Some(rest) = field.strip_prefix("envoy[").or_else(|| field.strip_prefix("routes[")) {
            let number: usize = rest.split(']').next()?.parse().ok()?;
            return self.rule_lines.get(number.checked_sub(1)?).copied();
        }
        let rest = field.strip_prefix("limits.")?;
        let of = |name: &str| self.limit_lines.get(name).copied();
        // The name of a limit may have points in it.
        of(rest).or_else(|| rest.match_indices('.').rev().find_map(|(end, _)| of(&rest[..end])))
    }
}

/// A config that is being written.
#[derive(Default)]
pub(super) struct Written {
    limits: String,
    rules: String,
    limit_count: usize,
    names: HashSet<String>,
    notes: Vec<(usize, String)>,
    limit_lines: HashMap<String, usize>,
    rule_lines: Vec<usize>,
}

impl Written {
    /// Notes what could not be carried over.
    pub(super) fn note(&mut self, line: usize, what: impl Into<String>) {
        self.notes.push((line, what.into()));
    }

    /// Writes a limit with these fields, whose values are TOML. Returns its name, which is like `wanted`.
    pub(super) fn limit(&mut self, wanted: &str, line: usize, fields: &[(&str, String)]) -> String {
        let name = name::given(wanted, &mut self.names);
        self.limit_count += 1;
        self.limit_lines.insert(name.clone(), line);
        // Writing to a string cannot fail.
        let _ = writeln!(self.limits, "\n[limits.{}]", quoted(&name));
        write_fields(&mut self.limits, fields);
        name
    }

    /// Writes a rule of a table such as `routes`.
    pub(super) fn rule(&mut self, table: &str, line: usize, fields: &[(&str, String)]) {
        self.rule_lines.push(line);
        let _ = writeln!(self.rules, "\n[[{table}]]");
        write_fields(&mut self.rules, fields);
    }

    /// Writes a table that is neither.
    pub(super) fn table(&mut self, header: &str, fields: &[(&str, String)]) {
        let _ = writeln!(self.limits, "\n[{header}]");
        write_fields(&mut self.limits, fields);
    }

    /// How many limits a table stands for.
    pub(super) fn count_limits(&mut self, limits: usize) {
        self.limit_count += limits;
    }

    pub(super) fn finish(mut self) -> Imported {
        self.notes.sort_by_key(|(line, _)| *line);
        Imported {
            toml: self.limits + &self.rules,
            limits: self.limit_count,
            rules: self.rule_lines.len(),
            notes: self.notes.iter().map(|(line, what)| format!("{line}: {what}")).collect(),
            limit_lines: self.limit_lines,
            rule_lines: self.rule_lines,
        }
    }
}

fn write_fields(out: &mut String, fields: &[(&str, String)]) {
    for (name, value) in fields {
        let _ = writeln!(out, "{name} = {value}");
    }
}

/// A text as TOML has it; the escapes of JSON are among those of TOML.
pub(super) fn quoted(text: &str) -> String {
    // JSON leaves DEL as it is, which TOML does not allow.
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A list of texts.
pub(super) fn list<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> String {
    let texts: Vec<String> = texts.into_iter().map(|text| quoted(text.as_ref())).collect();
    format!("[{}]", texts.join(", "))
}

/// What came of a text is a valid config with these routes, each with its limit in words, and notes that begin so.
#[cfg(test)]
pub(super) fn check_import<E: std::fmt::Display>(
    imported: Result<Imported, E>,
    text: &str,
    routes: &[&str],
    notes: &[&str],
) {
    let imported = imported.unwrap_or_else(|why| panic!("{why}\n{text}"));
    let config = crate::config::Config::parse(&imported.toml);
    let config = config.unwrap_or_else(|why| panic!("{why}\n{}", imported.toml));
    let shown = |route: &tollgate::route::RouteLimit| {
        let name = route.limit().unwrap_or_default();
        let rule = config.gate.policy.find(name).expect("it is there");
        format!("{route}: {name} {}", crate::validate::words(rule))
    };
    let found: Vec<String> = config.gate.routes.iter().map(shown).collect();
    assert_eq!(found, routes, "{}", imported.toml);
    assert_eq!(imported.notes.len(), notes.len(), "{:?}", imported.notes);
    for (found, expected) in imported.notes.iter().zip(notes) {
        assert!(found.starts_with(expected), "{found}");
    }
}
