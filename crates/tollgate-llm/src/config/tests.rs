//! What `[llm]` becomes, and what is said about its mistakes.

use tollgate::Limit;
use tollgate::config::{Config, Mistakes};

use super::*;

fn read(text: &str) -> Result<(Config, Option<LlmConfig>), Mistakes> {
    let mut llm = LlmSection::default();
    Ok((Config::parse_with(text, [], &mut [&mut llm])?, llm.config))
}

fn parse(text: &str) -> (Config, LlmConfig) {
    let (config, llm) = read(text).unwrap_or_else(|mistakes| panic!("{mistakes}\nin\n{text}"));
    (config, llm.expect("a section"))
}

/// All mistakes of a file, each by line, field, value and a part of the fix.
fn check(text: &str, expected: &[(usize, &str, &str, &str)]) {
    let mistakes = read(text).expect_err(text);
    for (mistake, (line, field, value, fix)) in mistakes.iter().zip(expected) {
        let found = (mistake.line, mistake.field.as_str(), mistake.value.as_str());
        assert_eq!(found, (*line, *field, *value), "{mistakes}\nin\n{text}");
        assert!(mistake.fix.contains(fix), "{mistake}\nlacks\n{fix}");
    }
    assert_eq!(mistakes.iter().count(), expected.len(), "{mistakes}\nin\n{text}");
}

#[test]
fn every_variable_sets_its_field() {
    let values = [
        ("LOG_DIR", "logs"),
        ("WINDOW", "10s"),
        ("MAX_WAIT", "30s"),
        ("MARGIN", "50ms"),
        ("DEFAULT_OUTPUT_TOKENS", "500"),
        ("UNKNOWN_MODEL", "refuse"),
        ("ON_OVERSIZE", "alone"),
        ("MAX_WAITING", "7"),
        ("MEMORY_MIB", "64"),
    ];
    let names: Vec<String> = VARIABLES.iter().map(|(field, _)| field.to_uppercase()).collect();
    assert_eq!(values.map(|(name, _)| name.to_owned()).to_vec(), names, "all there are");
    let variables = values.map(|(name, value)| (format!("TOLLGATE_LLM_{name}"), value.to_owned()));
    let mut llm = LlmSection::default();
    Config::parse_with("", variables, &mut [&mut llm]).unwrap_or_else(|mistakes| panic!("{mistakes}"));
    let llm = llm.config.expect("a section");
    assert_eq!((llm.window.as_secs(), llm.max_wait.as_secs(), llm.default_output_tokens), (10, 30, 500));
    assert_eq!(
        (llm.max_waiting, llm.memory, llm.margin.map(|margin| margin.as_millis())),
        (7, 64 << 20, Some(50))
    );
    assert_eq!((llm.unknown_model, llm.on_oversize), (UnknownModel::Refuse, Oversize::Alone));
    assert_eq!(llm.log_dir, Some(PathBuf::from("logs")));
    let misspelt = [("TOLLGATE_LLM_WINDW".to_owned(), "10s".to_owned())];
    let mistakes = Config::parse_with("", misspelt, &mut [&mut LlmSection::default()]).unwrap_err();
    assert!(mistakes.to_string().contains("did you mean `TOLLGATE_LLM_WINDOW`?"), "{mistakes}");
}

/// As the documentation has it.
const EXAMPLE: &str = r#"
[llm]
log_dir = "logs"
window = "60s"
max_wait = "60s"
default_output_tokens = 1000
unknown_model = "pass"
on_oversize = "reject"
[llm.upstreams.openai]
kind = "openai"
base_url = "https://api.openai.com/v1"
keys = [{ key = "env:OPENAI_API_KEY", group = "org-1" }]
[llm.models."gpt-4o"]
upstream = "openai"
rpm = 500
tpm = 30_000
quota = "gpt-4o-family"
[llm.clients.search-team]
key = "env:SEARCH_KEY"
weight = 3
priority = "interactive"
models."gpt-4o" = { tpm = 10_000 }
"#;

#[test]
fn the_documented_section_becomes_ordinary_limits() {
    let (config, llm) = parse(EXAMPLE);
    let rules: Vec<(&str, String)> =
        config.policy.rules().iter().map(|rule| (rule.name(), rule.allowance().to_string())).collect();
    let expected = [
        ("llm.gpt-4o-family.rpm", "500 in any 1m0.1s"),
        ("llm.gpt-4o-family.tpm", "30000 in any 1m0.1s"),
        ("llm.client.search-team.gpt-4o-family.tpm", "10000 in any 1m0.1s"),
    ];
    assert_eq!(rules.len(), expected.len(), "{rules:?}");
    for ((name, _), (expected, _)) in rules.iter().zip(expected) {
        assert_eq!(*name, expected);
    }
    assert_eq!(llm.models[0].limits.iter().map(|limit| limit.unit).collect::<Vec<_>>(), ["RPM", "TPM"]);
    assert_eq!(llm.clients[0].limits["gpt-4o"][0].counts, Counts::Tokens);
    assert_eq!(llm.upstreams[0].keys[0].group, "org-1");
    let shown = format!("{llm:?}");
    assert!(!shown.contains("sk-"), "{shown}");
}

/// The margin is a share of short windows, and what the file says wherever it says something.
#[test]
fn a_call_counts_a_little_longer_than_its_window() {
    let counted = |rest: &str, model: &str| {
        let text = format!(
            "{rest}\n[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n[llm.models.x]\n{model}"
        );
        let limits: Vec<Limit> = parse(&text)
            .0
            .policy
            .rules()
            .iter()
            .filter_map(|rule| match rule.allowance() {
                tollgate::Allowance::Limited(limit) => Some(*limit),
                _ => None,
            })
            .collect();
        limits
    };
    let window = |count: u64, millis: u64| Limit::sliding_window(count, Micros::from_millis(millis)).unwrap();
    assert_eq!(counted("", "rpm = 5"), [window(5, 60_250)]);
    assert_eq!(counted("llm.window = '2s'", "rpm = 5"), [window(5, 2_050)]);
    assert_eq!(counted("llm.margin = '0s'", "rpm = 5"), [window(5, 60_000)]);
    assert_eq!(counted("llm.margin = '300ms'\nllm.window = '2s'", "rpm = 5"), [window(5, 2_300)]);
    assert_eq!(counted("", "rpm = 600\nslice = '1s'"), [window(600, 60_250), window(10, 1_025)]);
    assert_eq!(counted("", "rpd = 7"), [window(7, 86_400_000)], "a day is long enough");
}

#[test]
fn models_share_a_quota_only_where_they_say_so() {
    let base = "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n[llm.models]\n";
    let (shared, llm) = parse(&format!("{base}x = {{ rpm = 5, quota = 'q' }}\ny = {{ quota = 'q' }}"));
    assert_eq!(llm.models[0].limits, llm.models[1].limits);
    assert_eq!(shared.policy.rules().len(), 1);
    for (models, field, fix) in [
        (
            "'GPT/4' = { rpm = 5 }\n'gpt-4' = { rpm = 5 }",
            "llm.models.gpt-4",
            "shares the limit gpt-4 with GPT/4",
        ),
        ("x = { rpm = 5, quota = 'y' }\ny = { rpm = 5 }", "llm.models.y", "has the name of the quota of x"),
        (
            "x = { rpm = 5, quota = 'q' }\ny = { rpm = 6, quota = 'q' }",
            "llm.models.y",
            "other numbers than x",
        ),
    ] {
        check(&format!("{base}{models}"), &[(6, field, "", fix)]);
    }
}

/// No number is lost without a word: two tables that make one limit say the same of it.
#[test]
fn one_limit_has_one_number() {
    let base =
        "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'x'\n[llm.models]\n";
    let (shared, llm) =
        parse(&format!("{base}x = {{ quota = 'q' }}\ny = {{ rpm = 5, shadow = true, quota = 'q' }}"));
    assert_eq!(
        (llm.models[0].limits.len(), shared.policy.rules().len()),
        (1, 1),
        "the second gives the numbers"
    );
    assert_eq!(llm.models[0].limits, llm.models[1].limits);
    assert!(shared.policy.rules()[0].is_shadow());
    let two = "x = { rpm = 5, quota = 'q' }\ny = { quota = 'q' }\n";
    for (text, line, field, value, fix) in [
        (
            "x = { rpm = 5, quota = 'q' }\ny = { quota = 'q', shadow = true }".to_owned(),
            7,
            "llm.models.y.shadow",
            "true",
            "is decided by x",
        ),
        (
            "x = { quota = 'q', fallback = 'open' }\ny = { quota = 'q', rpm = 5 }".to_owned(),
            6,
            "llm.models.x.fallback",
            "'open'",
            "is decided by y",
        ),
        (
            format!("{two}[llm.clients.c]\nkey = 'k'\nmodels = {{ x = {{ tpm = 10 }}, y = {{ tpm = 5 }} }}"),
            10,
            "llm.clients.c.models.y",
            "",
            "llm.client.c.q.tpm has another number in llm.clients.c.models.x",
        ),
        (
            "x = { rpm = 5, quota = 'c' }\ny = { rpm = 5, quota = 'b.c' }\n\
             [llm.clients.'a.b']\nkey = 'k'\nmodels.x = { tpm = 10 }\n\
             [llm.clients.a]\nkey = 'l'\nmodels.y = { tpm = 5 }"
                .to_owned(),
            13,
            "llm.clients.a.models.y",
            "",
            "llm.client.a.b.c.tpm has another number in llm.clients.a.b.models.x",
        ),
    ] {
        check(&format!("{base}{text}"), &[(line, field, value, fix)]);
    }
    // What is the same in both is no mistake.
    parse(&format!(
        "{base}{two}[llm.clients.c]\nkey = 'k'\nmodels = {{ x = {{ tpm = 10 }}, y = {{ tpm = 10 }} }}"
    ));
}

#[test]
fn mistakes_are_named_by_field_and_line() {
    let base = "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n";
    for (text, line, field, value, fix) in [
        ("[llm.models.x]\nrpm = 0", 5, "llm.models.x.rpm", "0", "leave it out for no such limit"),
        ("[llm.models.x]\ntmp = 5", 5, "llm.models.x.tmp", "5", "did you mean `tpm`?"),
        ("[llm.models.x]\nupstream = 'b'", 5, "llm.models.x.upstream", "'b'", "no such upstream"),
        ("[llm.models.x]\nslice = '1s'", 5, "llm.models.x.slice", "", "divides rpm"),
        ("[llm]\nwindow = '0s'", 5, "llm.window", "'0s'", ""),
        ("[llm]\nwindow = 60", 5, "llm.window", "60", "must be a duration in quotes"),
        (
            "[llm.clients.c]\nkey = 'k'\n[llm.clients.d]\nkey = 'k'",
            6,
            "llm.clients.d",
            "",
            "has the key of c",
        ),
        ("[llm.clients.c]\nweight = 2", 4, "llm.clients.c.key", "", "is missing"),
        (
            "[limits.company]\nblocked = true\n[llm.models.x]\nlimits = ['compny']",
            7,
            "llm.models.x.limits",
            "",
            "did you mean \"company\"?",
        ),
        ("[llm.models.x]\nlimits = ['any']", 5, "llm.models.x.limits", "", "write [limits.any]"),
        (
            "[limits.run]\nstrategy = 'concurrency'\nlimit = 1\nlease = '9s'\n[llm.models.x]\nlimits = ['run']",
            9,
            "llm.models.x.limits",
            "",
            "write concurrency here",
        ),
        ("[llm.models.x]\nlimit_key = 'a'", 5, "llm.models.x.limit_key", "", "there are none"),
        (
            "[limits.c]\nblocked = true\n[llm.models.x]\nlimits = ['c']\nlimit_key = 'a:{tenant}'",
            8,
            "llm.models.x.limit_key",
            "'a:{tenant}'",
            "{client} and {model}",
        ),
    ] {
        let text = format!("{base}{text}");
        let Err(mistakes) = read(&text) else { panic!("{text} was accepted") };
        let found = mistakes.iter().any(|mistake| {
            mistake.line == line
                && mistake.field == field
                && (value.is_empty() || mistake.value == value)
                && mistake.fix.contains(fix)
        });
        assert!(found, "{text}:\n{mistakes}");
    }
    check(
        "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'ftp://x'",
        &[(3, "llm.upstreams.a.base_url", "'ftp://x'", "must be an address such as")],
    );
}

#[test]
fn keys_are_never_shown() {
    let text =
        "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\napi_key = 'sk-secret'\n";
    assert!(!format!("{:?}", parse(text)).contains("sk-secret"));
    let mistakes = read(&text.replace("api_key", "apikey")).unwrap_err().to_string();
    assert!(!mistakes.contains("sk-secret"), "{mistakes}");
}
