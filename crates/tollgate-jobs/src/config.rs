//! `[jobs]`: what types of jobs, queues and all jobs together may do.
//!
//! The numbers of a limit are read by the library; what belongs to jobs alone is read here. The limits that come of it are put
//! beside those of `[limits]`, so that nothing else has to know that they are of jobs.

use tollgate::config::{Extension, Field, Limits, Reader, Section, limit_fields, nearest, url_fault};
use tollgate::{Limit, Rule, Strategy};

use crate::limits::{DEFAULT_LEASE, JobLimits, JobScope, JobsConfig, MissingField, OnExceeded};

/// The fields of a scope that are not those of a limit on starts.
const OF_JOBS: [&str; 13] = [
    "also",
    "concurrency",
    "lease",
    "on_exceeded",
    "max_delay",
    "give_up_after",
    "key",
    "if_missing",
    "limits",
    "limit_key",
    "shadow",
    "fallback",
    "overrides",
];

impl Extension for JobsConfig {
    fn name(&self) -> &'static str {
        "jobs"
    }

    fn read(&mut self, reader: &mut Reader<'_>, field: &Field<'_>, limits: &mut Limits<'_>) {
        if let Some(section) = reader.section(field) {
            *self = read(reader, section, limits);
        }
    }
}

fn read(reader: &mut Reader<'_>, section: Section<'_>, all: &mut Limits<'_>) -> JobsConfig {
    let section = section.showing(&["global", "queues", "types"]);
    reader.only(&section, &["database", "global", "queues", "types"]);
    let mut jobs = JobsConfig {
        database: section.field("database").and_then(|field| read_database(reader, field)),
        ..JobsConfig::default()
    };
    if let Some(field) = section.field("global") {
        jobs.global = read_scope(reader, field, JobScope::Global, all);
    }
    for (name, of_types) in [("queues", false), ("types", true)] {
        let Some(scopes) = section.field(name).and_then(|field| reader.section(field)) else { continue };
        for field in scopes.fields() {
            let scope = if of_types { JobScope::Type(field.name) } else { JobScope::Queue(field.name) };
            let Some(limits) = read_scope(reader, field, scope, all) else { continue };
            let list = if of_types { &mut jobs.types } else { &mut jobs.queues };
            list.push((field.name.to_owned(), limits));
        }
    }
    jobs
}

fn read_database(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let url = reader.text(field, "postgres://localhost/app")?;
    match url_fault(url, &["postgres", "postgresql"]) {
        Some(fault) => {
            reader.mistake(field, fault);
            None
        }
        None => Some(url.to_owned()),
    }
}

fn read_scope(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    scope: JobScope<'_>,
    all: &mut Limits<'_>,
) -> Option<JobLimits> {
    let section = reader.section(field)?;
    reader.only(&section, &limit_fields().chain(OF_JOBS).collect::<Vec<_>>());
    let mut limits = JobLimits::default();
    // A lease is that of `concurrency` here, and of no strategy of starts.
    if let Some((limit, overrides)) = reader.limit(&section.without(&["lease"]), Strategy::SlidingWindow) {
        (limits.limit, limits.overrides) = (Some(limit), overrides);
    } else if let Some(field) = section.field("overrides").filter(|_| section.field("limit").is_none()) {
        reader.mistake(field, "belongs to a limit on starts, and there is none; write limit and window");
    }
    for also in section.field("also").map(|field| reader.sections(field)).unwrap_or_default() {
        reader.only(&also, &limit_fields().collect::<Vec<_>>());
        limits.also.extend(reader.limit(&also, Strategy::SlidingWindow).map(|(limit, _)| limit));
    }
    limits.concurrency = read_concurrency(reader, &section);
    let behaviours = OnExceeded::ALL.map(|behaviour| (behaviour.name(), behaviour));
    let on_exceeded = section.field("on_exceeded").and_then(|field| reader.choice(field, &behaviours));
    limits.on_exceeded = on_exceeded.unwrap_or_default();
    let max_delay = section.field("max_delay").and_then(|field| reader.span(field, "30m"));
    limits.max_delay = max_delay;
    let give_up_after = section.field("give_up_after").and_then(|field| reader.span(field, "6h"));
    limits.give_up_after = give_up_after;
    limits.key = section.field("key").and_then(|field| reader.text(field, "tenant")).map(str::to_owned);
    let missing = [("shared", MissingField::Shared), ("deny", MissingField::Deny)];
    let if_missing = section.field("if_missing").and_then(|field| reader.choice(field, &missing));
    limits.if_missing = if_missing.unwrap_or_default();
    if let Some(field) = section.field("limits") {
        limits.limits = read_limits(reader, field, all.names());
    }
    limits.limit_key =
        section.field("limit_key").and_then(|field| reader.text(field, "global")).map(str::to_owned);
    limits.shadow = section.field("shadow").and_then(|field| reader.truth(field)).unwrap_or(false);
    limits.fallback = section.field("fallback").and_then(|field| reader.fallback(field));
    if !has_numbers(&section, &limits) {
        return None;
    }
    if let Some(fault) = limits.fault(scope) {
        let named = ["give_up_after", "max_delay", "limit_key", "key"];
        let at = named.iter().filter(|name| fault.contains(*name)).find_map(|name| section.field(name));
        match at {
            Some(field) => reader.mistake(field, fault),
            None => reader.mistaken(&section, fault),
        }
        return None;
    }
    add_rules(reader, field, scope, &limits, all);
    Some(limits)
}

/// Whether the limits are as they were written: a number that could not be read was complained about already.
fn has_numbers(section: &Section<'_>, limits: &JobLimits) -> bool {
    let is_written = |name| section.field(name).is_some();
    let starts = is_written("limit") || is_written("window") || is_written("strategy") || is_written("rate");
    starts == limits.limit.is_some()
        && is_written("concurrency") == limits.concurrency.is_some()
        && is_written("also") != limits.also.is_empty()
        && is_written("limits") != limits.limits.is_empty()
}

fn read_concurrency(reader: &mut Reader<'_>, section: &Section<'_>) -> Option<Limit> {
    let lease = section.field("lease").and_then(|field| reader.span(field, "30s"));
    let Some(field) = section.field("concurrency") else {
        if let Some(field) = section.field("lease") {
            reader.mistake(field, "is the lease of `concurrency`, which is not there; write concurrency = 5");
        }
        return None;
    };
    let count = reader.whole(field, 5, "; for no such limit leave it out")?;
    let lease = match (section.field("lease"), lease) {
        (Some(_), None) => return None,
        (_, lease) => lease.unwrap_or(DEFAULT_LEASE),
    };
    match Limit::concurrency(count, lease) {
        Ok(limit) => Some(limit),
        Err(error) => {
            reader.mistake(field, error.fix());
            None
        }
    }
}

/// Names of `[limits]`, each of which must be there.
fn read_limits(reader: &mut Reader<'_>, field: &Field<'_>, known: &[&str]) -> Vec<String> {
    let names = reader.texts(field, "[\"stripe\"]").unwrap_or_default();
    for name in names.iter().filter(|name| !known.contains(&name.as_str())) {
        let fix = match nearest(name, known.iter().copied()) {
            Some(guess) => format!("there is no limit `{name}`; did you mean \"{guess}\"?"),
            None if known.is_empty() => format!("there is no limit `{name}`; write [limits.{name}]"),
            None => format!("there is no limit `{name}`; known: {}", known.join(", ")),
        };
        reader.mistake(field, fix);
    }
    names
}

/// Adds the limits of a scope to all others, if they can have their names.
fn add_rules(
    reader: &mut Reader<'_>,
    field: &Field<'_>,
    scope: JobScope<'_>,
    limits: &JobLimits,
    all: &mut Limits<'_>,
) {
    let longest = limits.named(scope).into_iter().map(|(name, _)| name).max_by_key(String::len);
    if let Some(fix) = longest.as_deref().and_then(Rule::name_fault) {
        reader.misnamed(field, format!("its limit is called `{}`, and {fix}", scope.limit_name()));
        return;
    }
    let alone = JobsConfig {
        global: (scope == JobScope::Global).then(|| limits.clone()),
        queues: match scope {
            JobScope::Queue(name) => vec![(name.to_owned(), limits.clone())],
            _ => Vec::new(),
        },
        types: match scope {
            JobScope::Type(name) => vec![(name.to_owned(), limits.clone())],
            _ => Vec::new(),
        },
        ..JobsConfig::default()
    };
    match alone.rules() {
        Ok(new) => {
            match new.iter().find(|rule| all.rules().iter().any(|other| other.name() == rule.name())) {
                Some(rule) => {
                    let fix = format!(
                        "its limit `{}` is there already; give one of them another name",
                        rule.name()
                    );
                    reader.misnamed(field, fix);
                }
                None => all.add(new),
            }
        }
        Err(error) => reader.misnamed(field, error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use tollgate::Fallback;
    use tollgate::config::{Config, Mistakes};

    use super::*;
    use crate::limits::DEFAULT_MAX_DELAY;

    fn parse(text: &str) -> Result<(Config, JobsConfig), Mistakes> {
        let mut jobs = JobsConfig::default();
        Ok((Config::parse_with(text, [], &mut [&mut jobs])?, jobs))
    }

    /// `docs/config.md` has every field of `[jobs]`, and no other, with type, default and reload.
    #[test]
    fn every_field_is_documented_and_nothing_else() {
        const PAGE: &str = include_str!("../../../docs/config.md");
        const STRANGE: &str = "zzzzzzzzzzzzzzzzzzzzzzzzzzz";
        for (heading, file) in [("## `[jobs]`", "[jobs]"), ("## `[jobs.types.NAME]`", "[jobs.types.a]")] {
            let mistakes = parse(&format!("{file}\n{STRANGE} = 1\n")).expect_err(heading).to_string();
            let (_, known) = mistakes.split_once("known here: ").unwrap_or_else(|| panic!("{mistakes}"));
            let known: BTreeSet<&str> =
                known.lines().next().unwrap_or_default().split(", ").map(str::trim).collect();
            let section =
                PAGE.split(heading).nth(1).expect(heading).split("\n## ").next().unwrap_or_default();
            let mut documented = BTreeSet::new();
            for row in section.lines().filter_map(|line| line.strip_prefix("| `")) {
                let cells: Vec<&str> = row.trim_end_matches(" |").split(" | ").collect();
                assert_eq!(cells.len(), 6, "{heading}: {row}");
                assert!(cells.iter().all(|cell| !cell.trim().is_empty()), "{heading}: {row}");
                assert!(["yes", "restart"].contains(&cells[4]), "{heading}: {row}");
                assert_eq!(cells[3], "–", "no field of jobs has a variable");
                assert!(documented.insert(cells[0].trim_end_matches('`')), "{heading}: {row} is there twice");
            }
            assert_eq!(documented, known, "{heading}");
        }
        let (_, jobs) = parse("[jobs.types.a]\nlimit = 1\nwindow = '1h'\nconcurrency = 1").unwrap();
        let limits = &jobs.types[0].1;
        assert_eq!((limits.max_delay, DEFAULT_MAX_DELAY), (None, Duration::from_secs(300)));
        assert_eq!(DEFAULT_LEASE, Duration::from_secs(30));
        assert_eq!(limits.on_exceeded.name(), "delay");
    }

    /// The config that docs/jobs.md shows is whole.
    #[test]
    fn the_config_of_the_page_is_valid() {
        const PAGE: &str = include_str!("../../../docs/jobs.md");
        let mut blocks = PAGE.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next());
        let block = blocks.find(|block| block.contains("[jobs]")).expect("a config");
        let (config, jobs) = parse(block).unwrap_or_else(|mistakes| panic!("{mistakes}\nin\n{block}"));
        assert!(config.policy.find("stripe").is_ok());
        assert_eq!(jobs.types[0].1.limits, ["stripe"]);
        assert!(crate::open::database(&config, &jobs).is_ok(), "it names the database");
    }

    /// All mistakes of a file, each by line, field, value and a part of the fix.
    fn check(text: &str, expected: &[(usize, &str, &str, &str)]) {
        let mistakes = parse(text).expect_err(text);
        for (mistake, (line, field, value, fix)) in mistakes.iter().zip(expected) {
            let found = (mistake.line, mistake.field.as_str(), mistake.value.as_str());
            assert_eq!(found, (*line, *field, *value), "{mistakes}\nin\n{text}");
            assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
        }
        assert_eq!(mistakes.iter().count(), expected.len(), "{mistakes}\nin\n{text}");
    }

    /// The section as the contract has it.
    const EXAMPLE: &str = r#"
[limits.stripe]
strategy = "token_bucket"
rate = "10/s"
burst = 20

[jobs]
database = "postgres://jobs.example/app"
global = { limit = 1000, window = "1m" }
[jobs.queues.external-api]
limit = 30
window = "1m"
on_exceeded = "delay"
[jobs.types.send_email]
limit = 100
window = "1h"
max_delay = "30m"
also = [{ limit = 2, window = "1s" }]
concurrency = 5
lease = "45s"
key = "tenant"
limits = ["stripe"]
limit_key = "account:{account}"
give_up_after = "6h"
[jobs.types.refresh_cache]
strategy = "token_bucket"
rate = "60/m"
burst = 1
on_exceeded = "skip"
shadow = true
fallback = "closed"
if_missing = "deny"
"#;

    #[test]
    fn the_documented_section_is_read_in_full() {
        let (config, jobs) = parse(EXAMPLE).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        assert_eq!(jobs.database.as_deref(), Some("postgres://jobs.example/app"));
        assert!(!format!("{jobs:?}").contains("jobs.example"), "an address may have a password in it");
        let email = &jobs.types[0].1;
        assert_eq!(email.max_delay, Some(Duration::from_secs(1_800)));
        assert_eq!(email.give_up_after, Some(Duration::from_secs(21_600)));
        assert_eq!((email.key.as_deref(), email.if_missing), (Some("tenant"), MissingField::Shared));
        assert_eq!(
            (&*email.limits, email.limit_key.as_deref()),
            (&["stripe".to_owned()][..], Some("account:{account}"))
        );
        let cache = &jobs.types[1].1;
        assert_eq!((cache.on_exceeded, cache.max_delay), (OnExceeded::Skip, None));
        assert_eq!(
            (cache.shadow, cache.fallback, cache.if_missing),
            (true, Some(Fallback::Closed), MissingField::Deny)
        );
        let rules: Vec<_> =
            config.policy.rules().iter().map(|rule| (rule.name(), rule.allowance().to_string())).collect();
        let expected = [
            ("stripe", "10/s, bursts of 20"),
            ("jobs.global", "1000 in any 1m"),
            ("jobs.queue.external-api", "30 in any 1m"),
            ("jobs.type.send_email", "100 in any 1h"),
            ("jobs.type.send_email.also-1", "2 in any 1s"),
            ("jobs.type.send_email.running", "5 at once, leases of 45s"),
            ("jobs.type.refresh_cache", "60/m, bursts of 1"),
        ];
        assert_eq!(rules, expected.map(|(name, words)| (name, words.to_owned())));
    }

    #[test]
    fn every_mistake_says_where_it_is_and_what_to_write() {
        let scope = "jobs.types.a";
        for (fields, field, value, fix) in [
            ("limit = 0\nwindow = '1m'", "limit", "0", "must be at least 1"),
            ("limit = 5\nwindow = '0s'", "window", "'0s'", "longer than zero"),
            ("limit = 5", "window", "", "is missing; write window"),
            (
                "limit = 5\nwindow = '1m'\non_exceeded = 'wait'",
                "on_exceeded",
                "'wait'",
                "must be one of delay, reject, skip",
            ),
            (
                "limit = 5\nwindow = '1m'\nlimits = ['strpe']",
                "limits",
                "[…]",
                "there is no limit `strpe`; did you mean \"stripe\"?",
            ),
            (
                "limit = 5\nwindow = '1m'\nmax_delay = '2h'\ngive_up_after = '1h'",
                "give_up_after",
                "'1h'",
                "max_delay (7200s) is longer than give_up_after (3600s)",
            ),
            ("limit = 5\nwindow = '1m'\nlease = '10s'", "lease", "'10s'", "concurrency = 5"),
            ("concurrency = 0", "concurrency", "0", "must be at least 1"),
            ("strategy = 'concurrency'\nlimit = 5", "strategy", "'concurrency'", "concurrency = 5"),
            ("limt = 5\nconcurrency = 1", "limt", "5", "did you mean `limit`?"),
            ("limit = 5\nwindow = '250ms'", "window", "'250ms'", "subsecond = true"),
            (
                "limits = ['stripe']\nkey = 'tenant'\nlimit_key = 'account:{tenant'",
                "limit_key",
                "'account:{tenant'",
                "a `{` without a `}`; write limit_key = \"account:{tenant}\"",
            ),
            (
                "concurrency = 1\noverrides = { 'job:a' = { limit = 2 } }",
                "overrides",
                "{…}",
                "write limit and window",
            ),
        ] {
            let text = format!("[limits.stripe]\nblocked = true\n[{scope}]\n{fields}\n");
            let mistakes = parse(&text).expect_err(&text);
            let found: Vec<_> = mistakes.iter().collect();
            let [mistake] = found.as_slice() else { panic!("{mistakes}\nin\n{text}") };
            let path = format!("{scope}.{field}");
            assert_eq!((mistake.field.as_str(), mistake.value.as_str()), (&*path, value), "{mistakes}");
            assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
        }
        check("[jobs.types.a]\n", &[(1, "jobs.types.a", "", "limits nothing")]);
        check(
            "[jobs.types.SendEmail]\nconcurrency = 1",
            &[(1, "jobs.types.SendEmail", "", "only the characters a-z")],
        );
        check(
            "[jobs]\nglobal = { limit = 1, window = '1s', key = 'tenant' }",
            &[(2, "jobs.global.key", "'tenant'", "is not split by a field")],
        );
        check(
            "[jobs]\ndatabase = 'mysql://u:p@x'",
            &[(2, "jobs.database", "***", "must start with postgres:// or postgresql://")],
        );
        check(
            "[limits.'jobs.type.a']\nblocked = true\n[jobs.types.a]\nlimit = 1\nwindow = '1s'",
            &[(3, "jobs.types.a", "", "its limit `jobs.type.a` is there already")],
        );
    }
}
