//! `tollgate import`: what is handed over is valid, and what is left out is told.

use super::binary::Scratch;

/// As the documentation of envoyproxy/ratelimit has it, and a little of everything else.
const YAML: &str = r#"
domain: edge
descriptors:
  - key: database
    value: users
    rate_limit: &five_hundred
      unit: second
      requests_per_unit: 500
  - key: database
    value: default
    rate_limit: *five_hundred
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit: { unit: day, requests_per_unit: 5, name: texts, replaces: [{ name: calls }] }
  - key: to_number
    rate_limit: { unit: month, requests_per_unit: 100, name: calls }
  - key: path
    value: /api/*
    share_threshold: true
    shadow_mode: true
    detailed_metric: true
    rate_limit: { unit: year, requests_per_unit: 1000000 }
  - key: remote_address
    value: 50.0.0.5
    rate_limit: { unit: second, requests_per_unit: 0 }
  - key: remote_address
    value: 10.0.0.1
    rate_limit: { unlimited: true }
"#;

#[test]
fn an_imported_config_is_valid() {
    let scratch = Scratch::new("import");
    scratch.write("ratelimit.yaml", YAML);
    let imported = scratch.run(&["import", "envoy", "ratelimit.yaml", "--output", "tollgate.toml"]);
    imported.done("import");
    assert_eq!(imported.stdout, "");
    assert_eq!(
        imported.stderr,
        "ratelimit.yaml:16: `replaces` was left out: where both match, both limits apply\n\
         ratelimit.yaml:19: `detailed_metric` was left out: metrics are labelled by limit, never by value\n\
         6 limits and 7 rules; 2 things could not be carried over\n",
    );
    let text = scratch.read("tollgate.toml");
    for part in [
        "[limits.\"edge-database_users\"]\nstrategy = \"fixed_window\"\nlimit = 500\nwindow = \"1s\"\nalign = \"clock\"\n",
        "entries = [\"message_type=marketing\", \"to_number\"]\nlimit = \"texts\"\n",
        "window = \"30d\"\n",
        "shadow = true\n",
        "entries = [\"path=/api/*\"]\nlimit = \"edge-path_api\"\nshared = [\"path\"]\n",
        "blocked = true\n",
        "entries = [\"remote_address=10.0.0.1\"]\nunlimited = true\n",
    ] {
        assert!(text.contains(part), "{part}\nin\n{text}");
    }
    let valid = scratch.run(&["validate", "tollgate.toml"]);
    valid.done("validate");
    assert!(valid.stdout.contains("6 limits"), "{valid:?}");

    let told = scratch.run_with(&["import", "envoy", "-"], b"domain: a\n");
    told.done("stdin");
    assert!(told.stdout.starts_with("# Made from \"stdin\" of envoyproxy/ratelimit.\n"), "{told:?}");
    assert_eq!(told.stderr, "0 limits and 0 rules; 0 things could not be carried over\n");
}

#[test]
fn what_cannot_be_imported_is_said() {
    let scratch = Scratch::new("import_refused");
    for (yaml, said) in [
        ("", "cannot import ratelimit.yaml: it is empty"),
        ("a: [", "cannot import ratelimit.yaml: it is not YAML"),
        ("descriptors: []", "there is no `domain`"),
        ("domain: \"a\\x01b\"\ndescriptors: [{key: a}]", "what came of it is not valid"),
    ] {
        scratch.write("ratelimit.yaml", yaml);
        let ended = scratch.run(&["import", "envoy", "ratelimit.yaml"]);
        ended.could_not(yaml);
        assert!(ended.stderr.contains(said), "{yaml}: {ended:?}");
    }
    scratch.run(&["import", "envoy", "missing.yaml"]).could_not("no file");
    scratch.run(&["import", "traefik", "x"]).could_not("nobody's");
}
