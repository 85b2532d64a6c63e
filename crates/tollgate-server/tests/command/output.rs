//! Where answers go: files that appear whole, pipes that close early, notes, and the examples of the repository.

use std::process::Stdio;

use crate::binary::Scratch;

const POLICY: &str = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 20\n";

fn log(rows: usize) -> String {
    (0..rows)
        .fold("time,limit,key\n".to_string(), |text, row| text + &format!("{row}.5,api,user:{}\n", row % 100))
}

#[test]
fn decisions_replace_a_file_whole_or_not_at_all() {
    let scratch = Scratch::new("replace");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", log(3));
    scratch.write("bad.csv", log(3) + "x,api,a\n");
    scratch.write("out.jsonl", "before\n");
    let run = |log| {
        scratch.run(&["backtest", "--strict", "--config", "policy.toml", log, "--decisions", "out.jsonl"])
    };
    run("bad.csv").could_not("bad.csv");
    assert_eq!(scratch.read("out.jsonl"), "before\n");
    run("log.csv").done("log.csv");
    assert_eq!(scratch.read("out.jsonl").lines().count(), 3);
    assert_eq!(scratch.files(), ["bad.csv", "log.csv", "out.jsonl", "policy.toml"]);
}

#[cfg(unix)]
#[test]
fn decisions_follow_a_link_and_spare_devices() {
    let scratch = Scratch::new("links");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", log(3));
    scratch.write("real.jsonl", "");
    std::os::unix::fs::symlink("real.jsonl", scratch.path("link.jsonl")).unwrap();
    scratch
        .run(&["backtest", "--config", "policy.toml", "log.csv", "--decisions", "link.jsonl"])
        .done("a link");
    assert!(scratch.path("link.jsonl").is_symlink());
    assert_eq!(scratch.read("real.jsonl").lines().count(), 3);
    scratch
        .run(&["backtest", "--config", "policy.toml", "log.csv", "--decisions", "/dev/null"])
        .done("/dev/null");
    assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
}

#[test]
fn decisions_on_stdout_stand_alone() {
    let scratch = Scratch::new("stdout");
    scratch.write("policy.toml", POLICY);
    let args = ["backtest", "--config", "policy.toml", "-", "--decisions", "-"];
    let ended = scratch.run_with(&args, log(3).as_bytes());
    ended.done("stdin to stdout");
    assert_eq!(ended.stdout.lines().count(), 3);
    assert!(ended.stdout.lines().all(|line| line.starts_with("{\"line\":")), "{}", ended.stdout);
    assert!(ended.stderr.starts_with("3 requests of 3 keys"), "{}", ended.stderr);
}

#[test]
fn the_config_may_come_from_stdin() {
    let scratch = Scratch::new("config-stdin");
    scratch.write("log.csv", log(3));
    let ended = scratch.run_with(&["backtest", "--config", "-", "log.csv"], POLICY.as_bytes());
    ended.done("config from stdin");
    assert!(ended.stdout.starts_with("3 requests of 3 keys"), "{}", ended.stdout);
}

#[test]
fn a_header_and_no_lines_is_no_traffic() {
    let scratch = Scratch::new("no-traffic");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", "time,limit,key\n");
    let args = ["backtest", "--config", "policy.toml", "log.csv", "--decisions", "out.jsonl"];
    let ended = scratch.run(&args);
    ended.done("no traffic");
    assert_eq!(ended.stdout, "0 requests of 0 keys\n");
    assert_eq!(scratch.read("out.jsonl"), "");
}

#[test]
fn ignored_columns_are_noted_once() {
    let scratch = Scratch::new("ignored");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", "time,path,limit,key,status\n1,/,api,a,200\n2,/,api,a,200\n");
    scratch
        .write("log.jsonl", "{\"time\":1,\"limit\":\"api\",\"key\":\"a\",\"agent\":{\"x\":[1]}}\n".repeat(2));
    let ended = scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "log.jsonl"]);
    ended.done("ignored columns");
    assert_eq!(ended.stderr, "tollgate: note: ignored what a backtest does not read: agent, path, status\n");
    assert!(ended.stdout.starts_with("4 requests of 1 key,"), "{}", ended.stdout);
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let scratch = Scratch::new("pipe");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", log(20_000));
    for args in [
        &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "-"][..],
        &["backtest", "--config", "policy.toml", "log.csv"],
        &["backtest", "--config", "policy.toml", "log.csv", "--json"],
        &["validate", "policy.toml"],
        &["validate", "policy.toml", "--json"],
        &["--help"],
        &["--version"],
    ] {
        let mut child = scratch.command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {stderr}");
        assert!(!stderr.contains("panicked") && !stderr.contains("error"), "{args:?}: {stderr}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported() {
    let scratch = Scratch::new("full");
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", log(3));
    for (args, observed) in [
        (
            &["backtest", "--config", "policy.toml", "log.csv"][..],
            "cannot write to stdout: No space left on device",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--json"],
            "cannot write to stdout: No space left",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "-"],
            "cannot write to stdout: No space left",
        ),
        (
            &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "/dev/full"],
            "cannot write /dev/full: No space",
        ),
        (&["validate", "policy.toml"], "cannot write to stdout: No space left"),
        (&["validate", "policy.toml", "--json"], "cannot write to stdout: No space left"),
    ] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = scratch.command(args).stdout(full).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(&format!("tollgate: error: {observed}")), "{args:?}: {stderr}");
    }
}

#[test]
fn help_and_version_are_answers() {
    let scratch = Scratch::new("help");
    for (args, said) in [
        (&["--version"][..], concat!("tollgate ", env!("CARGO_PKG_VERSION"))),
        (&["--help"], "tollgate backtest --config examples/tollgate.toml examples/traffic.csv"),
        (&["backtest", "--help"], "A time is RFC 3339"),
        (&["validate", "--help"], "every mistake is reported on stderr"),
        (&["bench", "--help"], "Latency is sampled"),
    ] {
        let ended = scratch.run(args);
        ended.done(&args.join(" "));
        assert!(ended.stdout.contains(said), "{args:?}: {}", ended.stdout);
    }
    let ended = scratch.run(&[]);
    assert_eq!(ended.code, Some(2));
    assert!(ended.stderr.contains("Usage: tollgate <COMMAND>"), "{}", ended.stderr);
}

#[test]
fn the_examples_run() {
    let scratch = Scratch::new("examples");
    let example = |name: &str| format!("{}/../../examples/{name}", env!("CARGO_MANIFEST_DIR"));
    let (policy, csv, jsonl) = (example("tollgate.toml"), example("traffic.csv"), example("traffic.jsonl"));
    scratch.run(&["validate", &policy]).done("validate");
    for log in [&csv, &jsonl] {
        let ended = scratch.run(&["backtest", "--config", &policy, log]);
        ended.done(log);
        assert_eq!(ended.stderr, "");
        assert!(ended.stdout.contains("user:7"), "{}", ended.stdout);
    }
    let ended = scratch.run(&["backtest", "--config", &policy, &example("access.log")]);
    ended.done("access.log");
    // A scraper, and what asks for files alone.
    for said in ["ip:198.51.100.23", "42 requests met no route", "shadow limits would have denied 10 more"] {
        assert!(ended.stdout.contains(said), "{said}: {}", ended.stdout);
    }
    let ended = scratch.run(&["backtest", "--config", &policy, &csv, "--json"]);
    let summary: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(summary["denied"].as_u64().unwrap() > 0 && summary["would_deny"].as_u64().unwrap() > 0);
    let met = |limit: &serde_json::Value| limit["requests"].as_u64().unwrap() > 0;
    // A log does not say how long an upload took.
    let limits = summary["limits"].as_array().unwrap();
    assert!(limits.iter().all(|limit| met(limit) != (limit["limit"] == "uploads")), "{limits:?}");
}
