//! Finds the changes of a new config: limits that are added, removed and changed, other sections, and fields that need a restart.
//!
//! Limits of jobs are limits like others here. Keys of overrides, and users, addresses and headers of routes are left out, because logs have more readers
//! than configs; of `[server]` and `[store]` only the names of fields are shown, because values may be secrets.

use std::collections::BTreeMap;

use tollgate::route::RouteLimit;
use tollgate::{Allowance, Fallback, Rule, Strategy};
use tollgate_jobs::JobsConfig;

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
        let rules = |config: &Config| {
            // Both were built once already.
            let jobs = config.jobs.rules().unwrap_or_default();
            config.gate.policy.rules().iter().cloned().chain(jobs).collect::<Vec<Rule>>()
        };
        let (before, after) = (&rules(old)[..], &rules(new)[..]);
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
        changes.extend(routes(&old.gate.routes, &new.gate.routes));
        changes.extend(settings_of_jobs(&old.jobs, &new.jobs));
        for (section, is_changed) in [
            ("[requests]", old.gate.requests != new.gate.requests),
            ("[[envoy]]", old.envoy != new.envoy),
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
        // By default the store's.
        let name = |rule: &Rule| rule.own_fallback().map_or("that of the store", Fallback::name);
        notes.push(format!("fallback {} -> {}", name(old), name(new)));
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

/// How many routes of which limits come, go and change.
fn routes(old: &[RouteLimit], new: &[RouteLimit]) -> Option<String> {
    if old == new {
        return None;
    }
    // By limit: how many are only in the one, and only in the other. Equal ones are paired off.
    let mut counts: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    let mut left: Vec<&RouteLimit> = old.iter().collect();
    for route in new {
        match left.iter().position(|other| *other == route) {
            Some(same) => drop(left.remove(same)),
            None => counts.entry(route.limit().unwrap_or_default()).or_default().1 += 1,
        }
    }
    for route in left {
        counts.entry(route.limit().unwrap_or_default()).or_default().0 += 1;
    }
    let parts = counts.into_iter().flat_map(|(limit, (gone, come))| {
        let changed = gone.min(come);
        [(come - changed, "added"), (gone - changed, "removed"), (changed, "changed")]
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(move |(count, what)| format!("{count} of limit {limit} {what}"))
    });
    let parts: Vec<String> = parts.collect();
    Some(match parts.is_empty() {
        true => "~ [[routes]]: in another order".to_owned(),
        false => format!("~ [[routes]]: {}", parts.join(", ")),
    })
}

/// What differs of jobs beside their limits, by the names of the fields.
fn settings_of_jobs(old: &JobsConfig, new: &JobsConfig) -> Vec<String> {
    let mut changes = Vec::new();
    if old.database != new.database {
        changes.push("~ jobs.database".to_owned());
    }
    for (scope, new) in new.scopes() {
        let Some((_, old)) = old.scopes().find(|(other, _)| *other == scope) else { continue };
        let fields = [
            ("on_exceeded", old.on_exceeded != new.on_exceeded),
            ("max_delay", old.max_delay != new.max_delay),
            ("give_up_after", old.give_up_after != new.give_up_after),
            ("key", old.key != new.key),
            ("if_missing", old.if_missing != new.if_missing),
            ("limits", old.limits != new.limits),
            ("limit_key", old.limit_key != new.limit_key),
        ];
        let fields: Vec<&str> =
            fields.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect();
        if !fields.is_empty() {
            changes.push(format!("~ {}: {}", scope.limit_name(), fields.join(", ")));
        }
    }
    changes
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
                "~ limit a: 5 per 1m window (fallback that of the store -> open; 2 overrides added, 2 overrides removed, 1 override changed)",
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
                "~ [[routes]]: 1 of limit a added",
                "~ server.namespaces",
                "! server.http needs a restart",
                "! server.admin_token needs a restart",
                "! store.timeout needs a restart",
            ],
        );
    }

    /// They were named by their section alone.
    #[test]
    fn jobs_are_compared_by_their_limits_and_routes_by_what_they_limit() {
        let jobs =
            |limit: u64, rest: &str| format!("[jobs.types.mail]\nlimit = {limit}\nwindow = '1h'\n{rest}");
        check(&jobs(5, ""), &jobs(5, ""), &[]);
        check(
            &jobs(5, "concurrency = 2\n"),
            &jobs(
                7,
                "on_exceeded = 'skip'\nmax_delay = '1m'\nfallback = 'closed'\n[jobs.queues.slow]\nlimit = 1\nwindow = '1s'\n",
            ),
            &[
                "+ limit jobs.queue.slow: 1 in any 1s",
                "~ limit jobs.type.mail: 5 in any 1h -> 7 in any 1h (fallback that of the store -> closed)",
                "- limit jobs.type.mail.running: 2 at once, leases of 30s",
                "~ jobs.type.mail: on_exceeded, max_delay",
            ],
        );
        let routes = |routes: &[(&str, &str)]| {
            let one = |(limit, path): &(&str, &str)| {
                format!("[[routes]]\nlimit = '{limit}'\npath = '{path}'\nusers = ['mallory']\n")
            };
            let limits = "limits.a.blocked = true\nlimits.b.blocked = true\n";
            limits.to_owned() + &routes.iter().map(one).collect::<String>()
        };
        let (a, b, other) = (("a", "/a"), ("b", "/b"), ("a", "/other"));
        check(&routes(&[a, b]), &routes(&[b, a]), &["~ [[routes]]: in another order"]);
        check(
            &routes(&[a, b]),
            &routes(&[other]),
            &["~ [[routes]]: 1 of limit a changed, 1 of limit b removed"],
        );
        check(&routes(&[a]), &routes(&[a, a, b]), &["~ [[routes]]: 1 of limit a added, 1 of limit b added"]);
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
