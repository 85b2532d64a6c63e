//! Finds the changes of a new config: limits that are added, removed and changed, other sections, and fields that need a restart.
//!
//! Keys of overrides are left out, because logs have more readers than configs; of `[server]` and `[store]` only the names of
//! fields are shown, because values may be secrets.

use std::collections::BTreeMap;

use tollgate::{Allowance, Rule, Strategy};

use super::keep_fixed;
use crate::config::Config;
use crate::difference::Difference;
use crate::figures::counted;
use crate::validate;

impl Difference {
    /// From the config in force to another.
    pub(crate) fn between(old: &Config, new: &Config) -> Difference {
        let mut applied = new.clone();
        let restart = keep_fixed(old, &mut applied);
        let new = &applied;
        let mut changes = Vec::new();
        let (before, after) = (old.gate.policy.rules(), new.gate.policy.rules());
        let named = |rules: &[Rule], name: &str| rules.iter().find(|rule| rule.name() == name).cloned();
        let names: BTreeMap<&str, ()> = before.iter().chain(after).map(|rule| (rule.name(), ())).collect();
        for name in names.into_keys() {
            changes.extend(match (named(before, name), named(after, name)) {
                (None, Some(new)) => Some(format!("+ limit {name}: {}", validate::words(&new))),
                (Some(old), None) => Some(format!("- limit {name}: {}", validate::words(&old))),
                (Some(old), Some(new)) => changed(&old, &new),
                (None, None) => None,
            });
        }
        for (section, is_changed) in [
            ("[requests]", old.gate.requests != new.gate.requests),
            ("[[routes]]", old.gate.routes != new.gate.routes),
            ("[[envoy]]", old.envoy != new.envoy),
            ("[jobs]", old.jobs != new.jobs),
            ("[llm]", old.llm != new.llm),
            ("server.namespaces", old.server.namespaces != new.server.namespaces),
        ] {
            if is_changed {
                changes.push(format!("~ {section}"));
            }
        }
        Difference { changes, restart }
    }
}

/// A limit that stays, if anything of it differs.
fn changed(old: &Rule, new: &Rule) -> Option<String> {
    if old == new {
        return None;
    }
    let mut notes = Vec::new();
    if begins_anew(old.allowance(), new.allowance()) {
        notes.push("strategy changed: counters begin anew".to_owned());
    }
    if old.own_fallback() != new.own_fallback() {
        notes.push("fallback changed".to_owned());
    }
    if old.subject() != new.subject() {
        notes.push("subject changed".to_owned());
    }
    notes.extend(overrides(old, new));
    let (from, to) = (validate::words(old), validate::words(new));
    let words = if from == to { from } else { format!("{from} -> {to}") };
    let notes = if notes.is_empty() { String::new() } else { format!(" ({})", notes.join("; ")) };
    Some(format!("~ limit {}: {words}{notes}", new.name()))
}

/// Whether the counters are of no use under the new strategy. Both buckets have the same state.
fn begins_anew(old: &Allowance, new: &Allowance) -> bool {
    let (Allowance::Limited(old), Allowance::Limited(new)) = (old, new) else { return false };
    let kind = |strategy| match strategy {
        Strategy::LeakyBucket => Strategy::TokenBucket,
        other => other,
    };
    kind(old.strategy()) != kind(new.strategy())
}

/// How many keys have an override that they had not before, and so on.
fn overrides(old: &Rule, new: &Rule) -> Option<String> {
    let of = |rule: &Rule| -> BTreeMap<String, Allowance> {
        rule.overrides().iter().map(|(key, other)| (key.canonical().to_owned(), *other)).collect()
    };
    let (before, after) = (of(old), of(new));
    let count = |one: &BTreeMap<String, Allowance>, differs: &dyn Fn(&String, &Allowance) -> bool| {
        one.iter().filter(|(key, allowance)| differs(key, allowance)).count() as u64
    };
    let parts = [
        (count(&after, &|key, _| !before.contains_key(key)), "added"),
        (count(&before, &|key, _| !after.contains_key(key)), "removed"),
        (count(&after, &|key, new| before.get(key).is_some_and(|old| old != new)), "changed"),
    ];
    let words: Vec<String> = parts
        .iter()
        .filter(|(count, _)| *count > 0)
        .map(|(count, what)| format!("{} {what}", counted(*count, "override")))
        .collect();
    (!words.is_empty()).then(|| words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::parse;

    fn check(old: &str, new: &str, expected: &[&str]) {
        let difference = Difference::between(&parse(old), &parse(new));
        assert_eq!(difference.lines().collect::<Vec<_>>(), expected, "{old}\n->\n{new}");
    }

    #[test]
    fn limits_come_go_and_change() {
        let window = |name: &str, limit: u64, rest: &str| {
            format!("[limits.{name}]\nstrategy = 'fixed_window'\nlimit = {limit}\nwindow = '1m'\n{rest}")
        };
        let bucket = |strategy: &str, size: &str| {
            format!("[limits.a]\nstrategy = '{strategy}'\nrate = '1/s'\n{size} = 9\n")
        };
        check(&window("a", 5, ""), &window("a", 5, ""), &[]);
        check(&window("a", 5, ""), &window("a", 7, ""), &["~ limit a: 5 per 1m window -> 7 per 1m window"]);
        check(
            &window("b", 5, ""),
            &window("a", 5, "shadow = true\n"),
            &["+ limit a: 5 per 1m window (shadow)", "- limit b: 5 per 1m window"],
        );
        check(
            &window("a", 5, ""),
            &bucket("token_bucket", "burst"),
            &["~ limit a: 5 per 1m window -> 1/s, bursts of 9 (strategy changed: counters begin anew)"],
        );
        let kept = Difference::between(
            &parse(&bucket("token_bucket", "burst")),
            &parse(&bucket("leaky_bucket", "capacity")),
        );
        assert!(kept.changes.len() == 1 && !kept.changes[0].contains("anew"), "{kept:?}");
        check(&window("a", 5, ""), "limits.a.blocked = true", &["~ limit a: 5 per 1m window -> blocked"]);
        check(
            &window(
                "a",
                5,
                "overrides = { 'alice' = { limit = 1 }, 'bob' = { limit = 2 }, 'eve' = { limit = 3 } }\n",
            ),
            &window(
                "a",
                5,
                "fallback = 'open'\noverrides = { 'bob' = { limit = 9 }, 'carol' = { limit = 3 }, 'dan' = { limit = 3 } }\n",
            ),
            &[
                "~ limit a: 5 per 1m window (fallback changed; 2 overrides added, 2 overrides removed, 1 override changed)",
            ],
        );
    }

    #[test]
    fn other_sections_and_restarts_are_named_without_values() {
        let limit = "limits.a.blocked = true\n";
        check(
            &format!("server.http = 'a:1'\n{limit}"),
            &format!(
                "server.http = 'b:2'\nserver.admin_token = 'secret'\nserver.namespaces = ['u']\nstore.timeout = '1s'\n{limit}[[routes]]\nlimit = 'a'\n"
            ),
            &[
                "~ [[routes]]",
                "~ server.namespaces",
                "! server.http needs a restart",
                "! server.admin_token needs a restart",
                "! store.timeout needs a restart",
            ],
        );
    }

    #[test]
    fn a_line_of_the_log_has_an_end() {
        let limits: String = (0..30).map(|n| format!("limits.l{n:02}.blocked = true\n")).collect();
        let line = Difference::between(&parse(""), &parse(&limits)).in_one_line();
        assert!(
            line.starts_with("+ limit l00: blocked; + limit l01")
                && line.ends_with("l19: blocked; and 10 more"),
            "{line}"
        );
    }
}
