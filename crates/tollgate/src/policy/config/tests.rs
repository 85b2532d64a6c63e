//! Tests of whole files, and the helpers that the tests of single sections use.

use std::time::Duration;

use proptest::prelude::*;
use tollgate_store::{MemoryOptions, WhenFull};

use super::*;
use crate::key::Key;
use crate::policy::{Allowance, Fallback};

/// Every section, and every field of the library's own.
const EXAMPLE: &str = r#"
[server]                         # read by the server
http = "127.0.0.1:8080"

[store]
mode = "memory"                  # memory | redis | postgres
fallback = "local"               # open | closed | local; a limit may override it
timeout = "100ms"
max_keys = 10_000_000
redis = { url = "redis://127.0.0.1:6379", cluster = false }   # rediss:// for TLS; password = "env:REDIS_PASSWORD"
postgres = { url = "postgres://localhost/app", prefix = "tollgate_" }

[limits.api]
strategy = "token_bucket"
rate = "10/s"                    # count/period: 10/s, 100/m, 5000/h, 1000000/d, 3/250ms
burst = 20

[limits.login]
strategy = "fixed_window"
limit = 5
window = "1m"
shadow = true                    # decide, count, but never deny

[limits.per-user]
strategy = "sliding_window"
limit = 100
window = "1m"
overrides = { "user:42" = { limit = 1000 } }

[jobs]                           # read by tollgate-jobs
[llm]                            # read by tollgate-llm
"#;

pub(super) fn parse(text: &str) -> Config {
    Config::parse(text).unwrap_or_else(|mistakes| panic!("{mistakes}\nin\n{text}"))
}

#[test]
fn the_documented_example_is_read_in_full() {
    let config = parse(EXAMPLE);
    assert_eq!((config.store.mode, config.store.fallback), (StoreMode::Memory, Fallback::Local));
    assert_eq!((config.store.timeout, config.store.max_keys), (Duration::from_millis(100), 10_000_000));
    let redis = config.store.redis.as_ref().unwrap();
    assert_eq!((&*redis.urls[0], redis.cluster, &redis.password), ("redis://127.0.0.1:6379", false, &None));
    let postgres = config.store.postgres.as_ref().unwrap();
    assert_eq!((&*postgres.url, &*postgres.prefix), ("postgres://localhost/app", "tollgate_"));
    let rules: Vec<_> = config
        .policy
        .rules()
        .iter()
        .map(|rule| (rule.name(), rule.allowance().to_string(), rule.is_shadow()))
        .collect();
    assert_eq!(
        rules,
        [
            ("api", "10/s, bursts of 20".to_owned(), false),
            ("login", "5 per 1m window".to_owned(), true),
            ("per-user", "100 in any 1m".to_owned(), false),
        ]
    );
    let user = config.policy.find("per-user").unwrap().allowance_for(&Key::parse("user:42").unwrap());
    assert_eq!(user.to_string(), "1000 in any 1m");
}

#[test]
fn what_is_left_out_has_a_default() {
    assert_eq!(parse(""), Config::default());
    assert_eq!(
        parse("rules = []\n[requests]\n[jobs]\n[llm]\n[limits]\n[store]\n[server]"),
        Config::default()
    );
    let store = StoreConfig::default();
    assert_eq!((store.mode, store.fallback), (StoreMode::Memory, Fallback::Local));
    assert_eq!((store.when_full, store.max_keys), (WhenFull::Share, 10_000_000));
    assert_eq!(store.timeout, Duration::from_millis(100));
    let memory = MemoryOptions::default();
    assert_eq!((store.when_full, store.max_keys), (memory.when_full, memory.max_keys));
    let store = parse("store.mode = 'postgres'\nstore.postgres.url = 'postgresql:///app'").store;
    assert_eq!(store.postgres.unwrap().prefix, "tollgate_");
    for mode in StoreMode::ALL {
        assert_eq!(mode.to_string(), mode.name());
    }
}

#[test]
fn every_field_is_read() {
    let store = parse(
            "[store]\nmode = 'redis'\nfallback = 'local'\ntimeout = '1s'\nmax_keys = 1\nwhen_full = 'deny'\n\
             redis = { url = 'rediss://u:p@[::1]:6380/1?x=y', cluster = true, password = 'env:REDIS_PASSWORD' }",
        )
        .store;
    assert_eq!((store.mode, store.fallback), (StoreMode::Redis, Fallback::Local));
    assert_eq!((store.timeout, store.max_keys), (Duration::from_secs(1), 1));
    assert_eq!(store.when_full, WhenFull::Deny);
    let redis = store.redis.unwrap();
    assert!(redis.cluster);
    assert_eq!(redis.password, Some(Password::Env("REDIS_PASSWORD".to_owned())));

    for (fields, words) in [
        ("strategy = 'token_bucket'\nrate = '3/250ms'\nburst = 1", "3/250ms, bursts of 1"),
        ("strategy = 'leaky_bucket'\nrate = '100/m'\ncapacity = 0x10", "100/m evenly, up to 16 waiting"),
        ("strategy = 'fixed_window'\nlimit = +5\nwindow = '1d'", "5 per 1d window"),
        ("strategy = 'fixed_window'\nlimit = 5\nwindow = '1d'\nalign = 'first'", "5 per 1d window"),
        (
            "strategy = 'fixed_window'\nlimit = 5\nwindow = '1d'\nalign = 'clock'",
            "5 per 1d window of the clock",
        ),
        ("strategy = 'sliding_window'\nlimit = 1_000\nwindow = '1s'", "1000 in any 1s"),
        ("strategy = 'sliding_window_counter'\nlimit = 5\nwindow = '1h30m'", "about 5 in any 1h30m"),
        ("strategy = 'concurrency'\nlimit = 5\nlease = '100ms'", "5 at once, leases of 100ms"),
        ("strategy = 'sliding_window'\nlimit = 5\nwindow = '250ms'\nsubsecond = true", "5 in any 250ms"),
        (
            "unlimited = false\nblocked = false\nstrategy = 'concurrency'\nlimit = 5\nlease = '1s'",
            "5 at once, leases of 1s",
        ),
    ] {
        let policy = parse(&format!("[limits.a]\n{fields}\n")).policy;
        assert_eq!(policy.find("a").unwrap().allowance().to_string(), words);
    }

    let policy =
        parse("limits.'a.b' = { unlimited = true, fallback = 'closed' }\nlimits._-9 = { blocked = true }")
            .policy;
    assert_eq!(policy.find("a.b").unwrap().allowance(), &Allowance::Unlimited);
    assert_eq!(policy.find("a.b").unwrap().own_fallback(), Some(Fallback::Closed));
    assert_eq!(policy.find("_-9").unwrap().allowance(), &Allowance::Blocked);
}

/// All mistakes of a file, each by line, field, value and a part of the fix.
pub(super) fn check(text: &str, expected: &[(usize, &str, &str, &str)]) {
    let mistakes = Config::parse(text).expect_err(text);
    for (mistake, (line, field, value, fix)) in mistakes.iter().zip(expected) {
        let found = (mistake.line, mistake.field.as_str(), mistake.value.as_str());
        assert_eq!(found, (*line, *field, *value), "{mistakes}\nin\n{text}");
        assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
        assert!(mistake.to_string().contains(&mistake.fix));
    }
    assert_eq!(mistakes.iter().count(), expected.len(), "{mistakes}\nin\n{text}");
}

/// The same for a limit whose fields start in line 3.
pub(super) fn check_limit(strategy: &str, fields: &str, expected: &[(usize, &str, &str, &str)]) {
    check(&format!("[limits.a]\nstrategy = '{strategy}'\n{fields}"), expected);
}

#[test]
fn what_is_missing_is_named_with_an_example() {
    check(
        "\n[limits.a]",
        &[(
            2,
            "limits.a.strategy",
            "",
            "is missing; write strategy = \"token_bucket\" (or leaky_bucket, fixed_window",
        )],
    );
    check("[limits.a]\nblocked = false", &[(1, "limits.a.strategy", "", "is missing")]);
    for (strategy, missing) in [
        ("token_bucket", [("rate", "rate = \"10/s\""), ("burst", "burst = 20")]),
        ("leaky_bucket", [("rate", "rate = \"10/s\""), ("capacity", "capacity = 20")]),
        ("fixed_window", [("limit", "limit = 100"), ("window", "window = \"1m\"")]),
        ("sliding_window", [("limit", "limit = 100"), ("window", "window = \"1m\"")]),
        ("sliding_window_counter", [("limit", "limit = 100"), ("window", "window = \"1m\"")]),
        ("concurrency", [("limit", "limit = 100"), ("lease", "lease = \"30s\"")]),
    ] {
        let fields = missing.map(|(name, _)| format!("limits.a.{name}"));
        let [one, other] = [0, 1].map(|n| (1, fields[n].as_str(), "", missing[n].1));
        check_limit(strategy, "", &[one, other]);
    }
    check(
        "[store]\nmode = 'redis'",
        &[(1, "store.redis", "", "is missing; write redis = { url = \"redis://127.0.0.1:6379\" }")],
    );
    check(
        "[store]\nmode = 'postgres'\nredis = {}",
        &[
            (1, "store.postgres", "", "is missing; write postgres = { url"),
            (3, "store.redis.url", "", "is missing; write url = \"redis://127.0.0.1:6379\""),
        ],
    );
}

#[test]
fn unknown_names_are_refused_with_the_nearest_known() {
    check_limit(
        "token_bucket",
        "rte = '10/s'\nrate = '10/s'\nbrust = 1\nburst = 2\ncolour = 'red'",
        &[
            (3, "limits.a.rte", "'10/s'", "unknown field; did you mean `rate`?"),
            (5, "limits.a.brust", "1", "unknown field; did you mean `burst`?"),
            (7, "limits.a.colour", "'red'", "unknown field; known here: strategy, subsecond, rate, burst"),
        ],
    );
    check_limit(
        "tokenbucket",
        "",
        &[(2, "limits.a.strategy", "'tokenbucket'", "did you mean \"token_bucket\"?")],
    );
    check_limit(
        "gcra",
        "",
        &[(2, "limits.a.strategy", "'gcra'", "must be one of token_bucket, leaky_bucket")],
    );
    check(
        "[limits.a]\nstrategy = 1",
        &[(2, "limits.a.strategy", "1", "must be text in quotes, such as \"token_bucket\"")],
    );
    check(
        "[limits.a.b]\nunlimited = true",
        &[
            (1, "limits.a.strategy", "", "is missing"),
            (1, "limits.a.b", "{…}", "(a name with a dot in it is written in quotes)"),
        ],
    );
    check(
        "[limit.a]\n[sever]\n[colour]",
        &[
            (1, "limit", "{…}", "unknown field; did you mean `limits`?"),
            (2, "sever", "{…}", "did you mean `server`?"),
            (
                3,
                "colour",
                "{…}",
                "unknown field; known here: server, store, limits, jobs, llm, requests, routes",
            ),
        ],
    );
    let long = "x".repeat(65);
    for (name, path, fix) in [
        ("API", "limits.API", "a name has only the characters a-z, 0-9, `_`, `.` and `-`"),
        ("'ap i'", "limits.\"ap i\"", "a name has only"),
        ("\"a\\u0000\"", "limits.\"a\\0\"", "a name has only"),
        ("''", "limits.\"\"", "a name has 1 to 64 characters"),
        (&long, &format!("limits.{}…", &long[1..]), "a name has at most 64 characters"),
    ] {
        check(&format!("[limits.{name}]\nblocked = true"), &[(1, path, "", fix)]);
    }
    check("limits = 5", &[(1, "limits", "***", "must be a table: write [limits]")]);
    check("[[limits.a]]\nblocked = true", &[(1, "limits.a", "[…]", "must be a table: write [limits.a]")]);
}

#[test]
fn a_file_that_is_no_toml_is_reported_by_line() {
    for (text, line, fix) in [
        ("[limits.a]\nrate = \n", 2, "not valid TOML: string values must be quoted"),
        ("[limits.a]\r\nrate = 10/s\r\n", 2, "not valid TOML"),
        ("a = 1\na = 2\n", 2, "not valid TOML: duplicate key a; keep one of the two"),
        ("[jobs.types.mail]\n[jobs.types.mail]\n", 2, "duplicate key mail; keep one"),
        ("[limits.a\n", 1, "not valid TOML: unclosed table"),
        ("\n\nx = \"abc\n", 3, "not valid TOML: invalid basic string"),
        ("= 3", 1, "not valid TOML"),
        ("\u{0}", 1, "not valid TOML"),
    ] {
        check(text, &[(line, "", "", fix)]);
    }
    // Every such line, once.
    check("a = \nb = 1\nc = \n", &[(1, "", "", "quoted"), (3, "", "", "quoted")]);
    let mistakes = Config::parse("é = \"x").unwrap_err();
    assert!(mistakes.to_string().starts_with("line 1, column "), "{mistakes}");
}

#[test]
fn columns_count_characters_and_mistakes_keep_the_order_of_the_file() {
    let mistakes =
        Config::parse("limits.z = 1\nlimits.'é'.overrides = { 'ü' = { limit = 0 } }\nlimits.a = 2")
            .unwrap_err();
    let offsets: Vec<_> = (&mistakes).into_iter().map(|mistake| (mistake.line, mistake.column)).collect();
    assert_eq!(offsets, [(1, 8), (2, 8), (2, 8), (2, 34), (3, 8)]);
    assert_eq!(mistakes.to_string().lines().count(), 5);
    assert!(std::error::Error::source(&mistakes).is_none());
}

#[test]
fn a_long_or_broken_value_is_cut_to_one_line() {
    let text = format!("[limits.a]\nstrategy = \"\"\"\n{}\"\"\"", "x".repeat(1000));
    let shown = Config::parse(&text).unwrap_err().to_string();
    assert!(shown.starts_with("line 2, limits.a.strategy = \"\"\"\\nxxx"), "{shown}");
    assert!(shown.contains("xxx…: must be one of") && shown.lines().count() == 1, "{shown}");
}

#[test]
fn keys_of_overrides_stay_out_of_debug() {
    let config = parse("limits.a = { blocked = true, overrides.alice.unlimited = true }");
    assert!(!format!("{config:?}").contains("alice"));
}

/// `PROPTEST_CASES` random files, or 10,000.
fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").unwrap_or_default().parse().unwrap_or(10_000);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// One careless edit: the position, the length removed, the text inserted.
fn edit() -> impl Strategy<Value = (prop::sample::Index, usize, String)> {
    let inserted = prop_oneof![
        3 => proptest::sample::select(vec![
            "", "=", "[", "]", "{", "}", "\"", "'", "\"\"\"", "\n", "\r", "#", ".", ",", "-", "0", "99999999999999999999", "%", "é",
            "\0", "true", "nan", "1979-05-27", "limits.", "overrides.", "strategy = ", "unlimited = true\n", "[limits.x]\n",
        ])
        .prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
    ];
    (any::<prop::sample::Index>(), prop_oneof![3 => Just(0), 3 => 0..4usize, 1 => 0..200usize], inserted)
}

proptest! {
    #![proptest_config(cases())]

    /// Any edits of a sound file give a sound configuration or mistakes that lie in the file, and never a panic.
    #[test]
    fn a_damaged_file_is_read_or_refused(edits in prop::collection::vec(edit(), 1..6), keep in any::<prop::sample::Index>(), truncate: bool) {
        let mut text: Vec<char> = EXAMPLE.chars().collect();
        for (at, removed, inserted) in edits {
            let at = at.index(text.len() + 1);
            let end = (at + removed).min(text.len());
            text.splice(at..end, inserted.chars());
        }
        if truncate {
            text.truncate(keep.index(text.len() + 1));
        }
        let text: String = text.into_iter().collect();
        if let Err(mistakes) = Config::parse(&text) {
            let lines = text.matches('\n').count() + 1;
            prop_assert!(mistakes.iter().count() > 0);
            prop_assert_eq!(mistakes.to_string().lines().count(), mistakes.iter().count());
            for mistake in &mistakes {
                prop_assert!((1..=lines).contains(&mistake.line) && mistake.column >= 1, "{}", mistake);
                prop_assert!(!mistake.fix.is_empty());
            }
        }
    }
}
