//! The mistakes of a config for all readers: without the keys of its overrides.
//!
//! Such a key is often a person, and the page, `/v1/server` and the log have more readers than the config. Line and column stay,
//! so a reader of the file finds the position.

use tollgate::config::{Mistake, Mistakes};

/// The text before a key in the name of a field.
const BEFORE: &str = ".overrides.";

/// What names them all.
const AT_THE_END: &str = ".overrides";

/// What a key that is there twice is reported as; its name follows.
const DUPLICATE: &str = "not valid TOML: duplicate key";

/// The fields of an override. Other names may be the second half of a key without quotes.
const FIELDS: [&str; 15] = [
    "strategy",
    "subsecond",
    "rate",
    "burst",
    "capacity",
    "limit",
    "window",
    "align",
    "lease",
    "unlimited",
    "blocked",
    "shadow",
    "fallback",
    "subject",
    "slice",
];

/// One line for each mistake.
pub(super) fn masked(mistakes: &Mistakes) -> String {
    mistakes.iter().map(mask).collect::<Vec<_>>().join("\n")
}

fn mask(mistake: &Mistake) -> String {
    let mut shown = mistake.clone();
    // The first is taken: a limit that has this in its name is masked more than it need be, and no key less.
    if let Some((limit, rest)) = mistake.field.split_once(BEFORE) {
        let field = rest.rsplit_once('.').map(|(_, field)| field).filter(|field| FIELDS.contains(field));
        shown.field =
            format!("{limit}{BEFORE}\"…\"{}", field.map(|field| format!(".{field}")).unwrap_or_default());
        // A fix may name the field once more, or end with another spelling of the key.
        let fix = mistake.fix.replace(&mistake.field, &shown.field);
        shown.fix = fix.split("; did you mean \"").next().unwrap_or_default().to_owned();
    }
    // Which table the key is in is not known, so it may be that of overrides.
    if mistake.fix.starts_with(DUPLICATE) {
        shown.fix = format!("{DUPLICATE}; keep one of the two, or give one of them another name");
    }
    // A single key instead of a table.
    if mistake.field.ends_with(AT_THE_END) && !mistake.value.is_empty() {
        shown.value = "…".to_owned();
    }
    shown.to_string()
}

#[cfg(test)]
mod tests {
    use tollgate::config::Config;

    use super::*;

    #[test]
    fn keys_of_overrides_are_masked_and_nothing_else_is() {
        fn check(overrides: &str, expected: &str) {
            let limit = "limits.a.strategy = 'fixed_window'\nlimits.a.limit = 5\nlimits.a.window = '1m'\n";
            let mistakes = Config::parse(&format!("{limit}{overrides}\n")).expect_err(overrides);
            let shown = masked(&mistakes);
            assert!(shown.contains(expected), "{overrides}: {shown}");
            assert!(!shown.contains("alice") && !shown.contains("smith"), "{overrides}: {shown}");
            assert_eq!(shown.lines().count(), mistakes.iter().count(), "{overrides}: {shown}");
        }
        let of_limit = r#"line 4, limits.a.overrides."…".limit = 0: must be at least 1"#;
        check("limits.a.overrides.'alice@x.com'.limit = 0", of_limit);
        check("limits.a.overrides.alice.limit = 0", of_limit);
        check("limits.a.overrides.'alice.limit'.limit = 0", of_limit);
        check("limits.a.overrides.'alice\".overrides.\"smith'.limit = 0", of_limit);
        check("limits.a.overrides.'alice@x.com' = {}", r#"line 4, limits.a.overrides."…": says nothing"#);
        check(
            "limits.a.overrides.'alice@x.com' = 7",
            r#"limits.a.overrides."…" = 7: must be a table: write [limits.a.overrides."…"] and its fields"#,
        );
        // Not a valid key, and its message may contain one.
        check("limits.a.overrides.'100%:alice'.limit = 3", r#"line 4, limits.a.overrides."…": "#);
        // A key with a dot that wants quotes.
        check(
            "limits.a.overrides.alice.smith.limit = 3",
            r#"line 4, limits.a.overrides."…" = {…}: unknown field"#,
        );
        let twice = "line 4, column 49: not valid TOML: duplicate key; keep one of the two";
        check("limits.a.overrides = { 'alice' = { limit = 3 }, 'alice' = { limit = 4 } }", twice);
        check("limits.a.overrides.'alice", "line 4, column");
        check(
            "limits.b.overrides = 7",
            "limits.b.overrides = …: must be a table: write [limits.b.overrides]",
        );
        check("limits.a.overrides = 'alice'", "limits.a.overrides = …: must be a table");
        check("limits.a.overrides = ['alice', 'smith']", "limits.a.overrides = …: must be a table");
        check("limits.a.burst = 0\nlimits.a.lmit = 3", "did you mean `limit`?");
    }
}
