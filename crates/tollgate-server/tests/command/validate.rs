//! `tollgate validate`: exit codes, and that every mistake has its line.

use crate::binary::Scratch;

const GOOD: &str = r#"
[limits.api]
strategy = "token_bucket"
rate = "10/s"
burst = 20

[limits.login]
strategy = "fixed_window"
limit = 5
window = "1m"
shadow = true
overrides = { "user:42" = { limit = 50 } }

[limits.internal]
unlimited = true
"#;

#[test]
fn a_valid_file_is_told_in_words() {
    let scratch = Scratch::new("valid");
    scratch.write("good.toml", GOOD);
    let expected = "\
good.toml is valid: 3 limits

LIMIT      STRATEGY      RULE
api        token_bucket  10/s, bursts of 20
login      fixed_window  5 per 1m window (shadow)
  user:42                50 per 1m window instead
internal   -             unlimited
";
    let ended = scratch.run(&["validate", "good.toml"]);
    ended.done("good.toml");
    assert_eq!(ended.stdout, expected);
    assert_eq!(ended.stderr, "");
    let ended = scratch.run_with(&["validate", "-"], GOOD.as_bytes());
    ended.done("stdin");
    assert_eq!(ended.stdout, expected.replace("good.toml", "stdin"));

    let ended = scratch.run(&["validate", "good.toml", "--json"]);
    ended.done("--json");
    let answer: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(answer["valid"], true);
    assert_eq!(answer["mistakes"].as_array().unwrap().len(), 0);
    assert_eq!(answer["limits"][1]["limit"], "login");
    assert_eq!(answer["limits"][1]["strategy"], "fixed_window");
    assert_eq!(answer["limits"][1]["rule"], "5 per 1m window");
    assert_eq!(answer["limits"][1]["shadow"], true);
    assert_eq!(answer["limits"][1]["overrides"][0]["key"], "user:42");
    assert_eq!(answer["limits"][2]["strategy"], serde_json::Value::Null);
}

#[test]
fn every_mistake_is_told_with_its_line() {
    let scratch = Scratch::new("invalid");
    scratch.write(
        "bad.toml",
        "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 0\n\n\
         [limits.login]\nstrategy = \"fixed_window\"\nlimit = 5\nwindow = \"soon\"\n\n\
         [limits.export]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 5\nbursts = 9\n",
    );
    let ended = scratch.run(&["validate", "bad.toml"]);
    ended.could_not("bad.toml");
    for (line, field) in [(4, "burst"), (9, "window"), (15, "bursts")] {
        let reported = ended.stderr.lines().any(|reported| {
            reported.starts_with(&format!("bad.toml:{line}: "))
                && reported.split(" = ").next().unwrap().ends_with(field)
        });
        assert!(reported, "{line} {field}: {}", ended.stderr);
    }
    assert!(ended.stderr.ends_with("tollgate: error: 3 mistakes in bad.toml\n"), "{}", ended.stderr);

    let ended = scratch.run(&["validate", "bad.toml", "--json"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(2), ""));
    let answer: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(answer["valid"], false);
    let lines: Vec<u64> = answer["mistakes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mistake| mistake["line"].as_u64().unwrap())
        .collect();
    assert_eq!(lines, [4, 9, 15]);
    for mistake in answer["mistakes"].as_array().unwrap() {
        for part in ["field", "value", "fix"] {
            assert!(!mistake[part].as_str().unwrap().is_empty(), "{part}: {mistake}");
        }
    }
}

#[test]
fn what_cannot_be_read_is_one_line() {
    let scratch = Scratch::new("unreadable");
    scratch.write("latin1.toml", b"[limits.api]\n# caf\xe9\n");
    scratch.write("broken.toml", "[limits.api\nrate = 1\n");
    scratch.write("huge.toml", vec![b'#'; 17 * 1024 * 1024]);
    for (file, reported) in [
        ("none.toml", "cannot read none.toml: No such file or directory"),
        (".", "cannot read .: it is a directory; name a file in it"),
        ("latin1.toml", "cannot read latin1.toml: line 2 is not UTF-8; save the file as UTF-8"),
        ("huge.toml", "cannot read huge.toml: it is longer than 16 MiB and no config"),
    ] {
        for args in [&["validate", file][..], &["validate", file, "--json"]] {
            let ended = scratch.run(args);
            ended.could_not(file);
            assert_eq!(ended.stderr, format!("tollgate: error: {reported}\n"));
        }
    }
    let ended = scratch.run(&["validate", "broken.toml"]);
    ended.could_not("broken.toml");
    // Where there is no field to name, the column is reported.
    assert!(ended.stderr.starts_with("broken.toml:1:12: not valid TOML"), "{}", ended.stderr);
}

/// The environment goes before the file, and its mistakes are reported by the name of the variable.
#[test]
fn the_environment_is_read_and_checked_too() {
    let scratch = Scratch::new("environment");
    scratch.write("good.toml", GOOD);
    let validate = |variables: &[(&str, &str)]| {
        let output = scratch
            .command(&["validate", "good.toml"])
            .envs(variables.iter().copied())
            .output()
            .expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let (code, said, _) = validate(&[("TOLLGATE_LIMITS_API_BURST", "99")]);
    assert_eq!(code, Some(0));
    assert!(said.contains("10/s, bursts of 99"), "{said}");
    let (code, said, _) = validate(&[("RL_STORAGE_MODE", "redis"), ("REDIS_ADDR", "127.0.0.1:6379")]);
    assert_eq!(code, Some(0), "{said}");
    for (variables, reported) in [
        (&[("RL_STORAGE_MODE", "rediss")][..], "environment RL_STORAGE_MODE"),
        (&[("TOLLGATE_STORE_TIMEOT", "1s")], "TOLLGATE_STORE_TIMEOUT"),
        (&[("TOLLGATE_LIMITS_API_BURST", "0")], "environment TOLLGATE_LIMITS_API_BURST"),
        (&[("RL_STORAGE_MODE", "redis")], "store.redis"),
    ] {
        let (code, _, errors) = validate(variables);
        assert_eq!(code, Some(2), "{variables:?}");
        assert!(errors.contains(reported), "{variables:?}: {errors}");
    }
}

/// What is sound and could not be served here passed without a word.
#[test]
fn what_a_server_would_miss_here_is_a_warning() {
    let scratch = Scratch::new("warnings");
    scratch.write(
        "secret.toml",
        "[server]\nadmin_token = \"env:OPS\"\n[store]\nmode = \"redis\"\n\
         redis = { url = \"rediss://127.0.0.1\", ca_file = \"no-ca.pem\" }\n",
    );
    let validate = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = scratch.command(&[&["validate", "secret.toml"], args].concat());
        let output =
            command.env_remove("OPS").envs(variables.iter().copied()).output().expect("the binary runs");
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let both = [
        "server.admin_token: the environment variable OPS is not set here; the config needs it to be used",
        "store.redis.ca_file: there is no file no-ca.pem here",
    ];
    let (code, said, warned) = validate(&[], &[]);
    assert_eq!(code, Some(0), "a machine that builds has no secrets: {warned}");
    assert!(said.starts_with("secret.toml is valid"), "{said}");
    assert_eq!(warned, both.map(|line| format!("tollgate: warning: {line}\n")).concat());
    let (code, said, warned) = validate(&["--strict"], &[]);
    assert_eq!((code, said.as_str()), (Some(2), ""), "{warned}");
    assert_eq!(
        warned,
        format!(
            "{}\ntollgate: error: 2 warnings in secret.toml, and --strict refuses them\n",
            both.join("\n")
        )
    );
    for (args, code, valid) in [(&["--json"][..], 0, true), (&["--json", "--strict"], 2, false)] {
        let (ended, said, warned) = validate(args, &[]);
        assert_eq!((ended, warned.as_str()), (Some(code), ""), "{args:?}");
        let answer: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!(
            (&answer["valid"], &answer["warnings"]),
            (&valid.into(), &both.as_slice().into()),
            "{args:?}"
        );
    }
    scratch.write("no-ca.pem", "");
    let (code, _, warned) = validate(&["--strict"], &[("OPS", "s3cret")]);
    assert_eq!((code, warned.as_str()), (Some(0), ""));
    assert!(!warned.contains("s3cret"));
    // A name that begins as ours do, in no section of ours.
    let (code, _, warned) =
        validate(&[], &[("OPS", "s3cret"), ("TOLLGATE_FOO", "1"), ("TOLLGATE_LOG", "off")]);
    assert_eq!(code, Some(0), "{warned}");
    assert_eq!(
        warned,
        "tollgate: warning: environment TOLLGATE_FOO: sets nothing; docs/config.md lists the variables\n\
         tollgate: warning: environment TOLLGATE_LOG: sets nothing; did you mean `TOLLGATE_SERVER_LOG`?\n"
    );
    assert_eq!(validate(&["--strict"], &[("OPS", "s3cret"), ("TOLLGATE_FOO", "1")]).0, Some(2));
}
