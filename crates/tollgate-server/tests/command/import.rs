//! `tollgate import`: what is handed over is valid, and what is left out is reported.

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
    let import = ["import", "envoy", "ratelimit.yaml", "--output", "tollgate.toml", "--partial"];
    let imported = scratch.run(&import);
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

    let reported = scratch.run_with(&["import", "envoy", "-"], b"domain: a\n");
    reported.done("stdin");
    assert!(reported.stdout.starts_with("# Made from \"stdin\" of envoyproxy/ratelimit.\n"), "{reported:?}");
    assert_eq!(reported.stderr, "0 limits and 0 rules; 0 things could not be carried over\n");
}

/// It ended with 0, and a script that imports and serves went on without some of the limits.
#[test]
fn a_script_can_tell_whether_all_was_carried_over() {
    let scratch = Scratch::new("import_partly");
    let whole = "domain: a\ndescriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]\n";
    let partly = whole.replace("key: b", "key: b, detailed_metric: true");
    let note = "ratelimit.yaml:2: `detailed_metric` was left out";
    for (yaml, is_whole) in [(whole, true), (&*partly, false)] {
        scratch.write("ratelimit.yaml", yaml);
        for (option, code) in [(None, if is_whole { 0 } else { 2 }), (Some("--partial"), 0)] {
            let mut call = vec!["import", "envoy", "ratelimit.yaml"];
            call.extend(option);
            let ended = scratch.run(&call);
            assert_eq!(ended.code, Some(code), "{yaml} {option:?}: {ended:?}");
            assert!(ended.stdout.contains("[[envoy]]"), "the config is written in any case: {ended:?}");
            assert_eq!(ended.stderr.contains(note), !is_whole, "{ended:?}");
            let last = ended.stderr.lines().last().unwrap_or_default();
            assert_eq!(last.starts_with("tollgate: error: 1 limit and 1 rule; 1 thing"), code == 2, "{last}");
        }
    }
}

/// It replaced the file that was there, with all that somebody had changed in it.
#[test]
fn a_file_that_is_there_is_replaced_only_by_force() {
    let scratch = Scratch::new("import_over");
    scratch.write("ratelimit.yaml", "domain: a\ndescriptors: [{key: b}]\n");
    scratch.write("tollgate.toml", "mine");
    let import = ["import", "envoy", "ratelimit.yaml", "--output", "tollgate.toml"];
    let refused = scratch.run(&import);
    refused.could_not("a file that is there");
    assert!(refused.stderr.contains("cannot write tollgate.toml: it is there already"), "{refused:?}");
    assert!(refused.stderr.contains("say --force to replace it"), "{refused:?}");
    assert_eq!(scratch.read("tollgate.toml"), "mine");
    scratch.run(&[&import[..], &["--force"]].concat()).done("--force");
    assert!(scratch.read("tollgate.toml").contains("[[envoy]]"));
}

#[test]
fn what_cannot_be_imported_is_reported() {
    let scratch = Scratch::new("import_refused");
    for (yaml, said) in [
        ("", "cannot import ratelimit.yaml: it is empty"),
        ("a: 1\nb: [", "cannot import ratelimit.yaml: line 3 column 1: it is not YAML"),
        ("\ndescriptors: []", "line 2: there is no `domain`"),
        ("domain: \"a\\x01b\"\ndescriptors: [{key: a}]", "what came of it is not valid"),
        (
            "domain: \"a\\x01b\"\ndescriptors:\n- {key: a, value: b}\n- {key: c}",
            "ratelimit.yaml:4: envoy[2].domain",
        ),
    ] {
        scratch.write("ratelimit.yaml", yaml);
        let ended = scratch.run(&["import", "envoy", "ratelimit.yaml"]);
        ended.could_not(yaml);
        assert!(ended.stderr.contains(said), "{yaml}: {ended:?}");
    }
    scratch.run(&["import", "envoy", "missing.yaml"]).could_not("no file");
    scratch.run(&["import", "traefik", "x"]).could_not("nobody's");
}

/// Each importer writes a config that `validate` finds sound, and lists what it left out.
#[test]
fn other_limiters_are_imported_too() {
    let scratch = Scratch::new("import_others");
    for (from, file, text, summary, part) in [
        (
            "nginx",
            "nginx.conf",
            "http { limit_req_zone $binary_remote_addr zone=one:10m rate=10r/s; server { location /api/ { limit_req zone=one burst=9 nodelay; } } }",
            "1 limit and 1 rule; 0 things could not be carried over\n",
            "[limits.\"one\"]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 10\n",
        ),
        (
            "kong",
            "kong.yaml",
            "services: [{name: a, plugins: [{name: rate-limiting, config: {minute: 5}}], routes: [{name: r, paths: [/r/]}]}]",
            "1 limit and 1 rule; 0 things could not be carried over\n",
            "path = \"/r/*\"\nkey = \"user\"\nif_missing = \"ip\"\n",
        ),
        (
            "limitador",
            "limits.yaml",
            "- {namespace: a, max_value: 5, seconds: 60, variables: [user]}",
            "1 limit and 1 rule; 0 things could not be carried over\n",
            "entries = [\"user\"]\n",
        ),
        (
            "litellm",
            "config.yaml",
            "model_list: [{model_name: gpt-4o, litellm_params: {model: openai/gpt-4o, rpm: 5}}]",
            "1 limit and 0 rules; 0 things could not be carried over\n",
            "[llm.models.\"gpt-4o\"]\nupstream = \"openai\"\nrpm = 5\n",
        ),
    ] {
        scratch.write(file, text);
        let out = format!("{from}.toml");
        let imported = scratch.run(&["import", from, file, "--output", &out]);
        imported.done(from);
        assert_eq!(imported.stderr, summary, "{from}");
        assert!(scratch.read(&out).contains(part), "{from}: {}", scratch.read(&out));
        scratch.run(&["validate", "--config", &out]).done(from);
        // What is no such file is refused in one line.
        scratch.write(file, "[");
        scratch.run(&["import", from, file]).could_not(from);
    }
}
