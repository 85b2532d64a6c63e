//! The limits file of Kuadrant's limitador as ours: a list of limits, each with a namespace, conditions and variables of a descriptor.
//!
//! Its window opens at the first request of a counter, and so does ours. A condition that compares one entry of the descriptor with a text becomes
//! `key=value`, a variable becomes `key`; whatever else a condition says is noted.
//!
//! There a descriptor meets every limit whose entries it has, in any order and among others. Here it meets the most specific rule with exactly its
//! entries. Which descriptors come the file does not say, so where that may differ it is noted, once for each namespace.

use std::collections::HashSet;

use super::written::{Imported, Written, list, quoted};
use super::yaml::{self, Node};

/// Carries a file over, or says why it cannot be read at all.
pub(super) fn import(text: &str) -> Result<Imported, String> {
    let documents = yaml::read(text)?;
    let Some(document) = documents.first() else { return Err("it is empty".to_owned()) };
    let Some(limits) = document.list() else {
        return Err(format!("line {}: it is not a list of limits", document.line));
    };
    let mut written = Written::default();
    let mut seen = Vec::new();
    for limit in limits {
        one(&mut written, &mut seen, limit);
    }
    note_descriptors(&mut written, &seen);
    Ok(written.finish())
}

/// A limit that became a rule.
struct Seen {
    line: usize,
    namespace: String,
    entries: Vec<String>,
}

/// Notes the namespaces whose descriptors may meet other limits than there.
fn note_descriptors(written: &mut Written, all: &[Seen]) {
    let mut noted = HashSet::new();
    for (index, one) in all.iter().enumerate() {
        let is_second = all[..index].iter().any(|other| other.namespace == one.namespace);
        if (one.entries.len() > 1 || is_second) && noted.insert(&one.namespace) {
            written.note(
                one.line,
                format!(
                    "in `{}` a descriptor meets all limits whose entries it has there, and here the one rule with exactly its entries in this order: \
                     compare the entries with the descriptors that are sent",
                    one.namespace
                ),
            );
        }
    }
}

fn one(written: &mut Written, seen: &mut Vec<Seen>, node: &Node) {
    let text = |name: &str| node.field(name).and_then(Node::text).filter(|text| !text.is_empty());
    for (name, field) in node.map().unwrap_or_default() {
        if !["namespace", "max_value", "seconds", "conditions", "variables", "name", "id"].contains(&&**name)
        {
            written.note(field.line, format!("`{name}` is not known here and was left out"));
        }
    }
    let number = |name: &str| text(name).and_then(|text| text.parse::<u64>().ok());
    let (Some(namespace), Some(max), Some(seconds)) =
        (text("namespace"), number("max_value"), number("seconds"))
    else {
        return written.note(
            node.line,
            "a limit without `namespace`, `max_value` and `seconds` that are whole numbers was left out",
        );
    };
    let mut entries = Vec::new();
    for (field, is_condition) in [("conditions", true), ("variables", false)] {
        let Some(list) = node.field(field) else { continue };
        for item in list.list().unwrap_or_default() {
            let read =
                item.text().and_then(|text| if is_condition { condition(text) } else { variable(text) });
            match read {
                Some(entry) => entries.push(entry),
                None => {
                    let what = item.text().unwrap_or("what is no text");
                    return written.note(
                        item.line,
                        format!("the limit was left out, because we do not match `{what}`"),
                    );
                }
            }
        }
    }
    if entries.is_empty() {
        return written.note(
            node.line,
            "a limit without conditions and variables was left out: our rules name at least one entry of the descriptor",
        );
    }
    if seen.iter().any(|other| other.namespace == namespace && other.entries == entries) {
        return written.note(
            node.line,
            "another limit before it matches the same, and this one was left out: write a second limit by hand",
        );
    }
    seen.push(Seen { line: node.line, namespace: namespace.to_owned(), entries: entries.clone() });
    let wanted = text("name").map_or_else(|| format!("{namespace}-{}", entries.join("-")), str::to_owned);
    let name = match max {
        0 => written.limit(&wanted, node.line, &[("blocked", "true".to_owned())]),
        _ => written.limit(
            &wanted,
            node.line,
            &[
                ("strategy", quoted("fixed_window")),
                ("limit", max.to_string()),
                ("window", quoted(&format!("{seconds}s"))),
            ],
        ),
    };
    written.rule(
        "envoy",
        node.line,
        &[("domain", quoted(namespace)), ("entries", list(&entries)), ("limit", quoted(&name))],
    );
}

/// The entry that `descriptors[0]['method'] == 'GET'` or the older `method == "GET"` says; `None` for others.
fn condition(text: &str) -> Option<String> {
    let (left, right) = text.split_once("==")?;
    let key = variable(left)?;
    let right = right.trim();
    let value = ['\'', '"'].iter().find_map(|&quote| right.strip_prefix(quote)?.strip_suffix(quote))?;
    // In an entry a star at the end is any ending, and a quote inside would be an expression that we do not read.
    (!value.is_empty() && !value.contains(['\'', '"', '\\']) && !value.ends_with('*'))
        .then(|| format!("{key}={value}"))
}

/// The key that `descriptors[0]['user_id']`, `descriptors[0].user_id` or the older `user_id` names; `None` for others.
fn variable(text: &str) -> Option<String> {
    let text = text.trim();
    let key = match text.strip_prefix("descriptors[0]") {
        Some(rest) => match rest.strip_prefix('.') {
            Some(name) => name,
            None => ['\'', '"'].iter().find_map(|&quote| {
                rest.strip_prefix('[')?.strip_suffix(']')?.trim().strip_prefix(quote)?.strip_suffix(quote)
            })?,
        },
        None => text,
    };
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-:/".contains(&byte);
    (!key.is_empty() && key.bytes().all(is_name)).then(|| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn limits_are_carried_over() {
        let text = "- namespace: toystore\n  max_value: 10\n  seconds: 60\n  conditions:\n  - \"descriptors[0]['req.method'] == 'GET'\"\n  variables: [\"descriptors[0]['user_id']\"]\n\
                    - {namespace: toystore, max_value: 0, seconds: 1, conditions: ['app == \"x\"'], name: closed}\n";
        let imported = import(text).unwrap();
        let config = Config::parse(&imported.toml).unwrap_or_else(|why| panic!("{why}\n{}", imported.toml));
        let rules: Vec<String> = config
            .gate
            .policy
            .rules()
            .iter()
            .map(|rule| format!("{}: {}", rule.name(), rule.allowance()))
            .collect();
        assert_eq!(rules, ["toystore-req.method_get-user_id: 10 per 1m window", "closed: blocked"]);
        assert!(
            imported.toml.contains("domain = \"toystore\"\nentries = [\"req.method=GET\", \"user_id\"]\n"),
            "{}",
            imported.toml
        );
        assert_eq!((imported.limits, imported.rules, imported.notes.len()), (2, 2, 1));
        assert!(
            imported.notes[0].starts_with("1: in `toystore` a descriptor meets all limits"),
            "{:?}",
            imported.notes
        );
        assert_eq!(
            (imported.line_of("limits.closed.limit"), imported.line_of("envoy[1].domain")),
            (Some(7), Some(1))
        );
    }

    #[test]
    fn what_cannot_be_carried_over_is_noted_with_its_line() {
        let limit = "namespace: a, max_value: 1, seconds: 1";
        let text = format!(
            "- {{{limit}}}\n- {{{limit}, conditions: ['descriptors[0].x != \"y\"']}}\n- {{{limit}, conditions: ['int(x) == 5']}}\n\
             - {{{limit}, conditions: ['x == \"y*\"']}}\n- {{{limit}, variables: [x], delay: 5}}\n- {{{limit}, variables: [x]}}\n- {{namespace: a, max_value: -1, seconds: 1}}\n- 7\n"
        );
        let imported = import(&text).unwrap();
        let expected = [
            "1: a limit without conditions",
            "2: the limit was left out, because we do not match `descriptors[0].x != \"y\"`",
            "3: the limit was left out, because we do not match `int(x) == 5`",
            "4: the limit was left out",
            "5: `delay` is not known here",
            "6: another limit before it matches the same",
            "7: a limit without",
            "8: a limit without",
        ];
        assert_eq!(imported.notes.len(), expected.len(), "{:?}", imported.notes);
        for (note, expected) in imported.notes.iter().zip(expected) {
            assert!(note.starts_with(expected), "{note}");
        }
        assert_eq!(imported.limits, 1);
        for text in ["", "a: 1", "{"] {
            assert!(import(text).is_err(), "{text}");
        }
    }
}
