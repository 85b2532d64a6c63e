//! What answers are written over: never what is read, links stay links, modes stay modes, and stdout is stdout by any name.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::binary::{Ended, Scratch};

const POLICY: &str = "[limits.api]\nstrategy = \"token_bucket\"\nrate = \"10/s\"\nburst = 20\n";
const LOG: &str = "time,limit,key\n1,api,user:1\n2,api,user:2\n3,api,user:3\n";

fn scratch(name: &str) -> Scratch {
    let scratch = Scratch::new(name);
    scratch.write("policy.toml", POLICY);
    scratch.write("log.csv", LOG);
    scratch
}

/// Runs with a file as stdin and, if one is named, a file as stdout.
fn run_on_files(scratch: &Scratch, args: &[&str], stdin: &str, stdout: Option<&str>) -> Ended {
    let mut command = scratch.command(args);
    command.stdin(File::open(scratch.path(stdin)).unwrap()).stdout(Stdio::piped());
    if let Some(name) = stdout {
        command.stdout(File::create(scratch.path(name)).unwrap());
    }
    let output = command.stderr(Stdio::piped()).output().unwrap();
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The log was gone: what stdin was read from had been replaced by what was written.
#[test]
fn what_stdin_reads_is_not_overwritten() {
    let scratch = scratch("stdin-target");
    symlink("log.csv", scratch.path("link.csv")).unwrap();
    fs::hard_link(scratch.path("log.csv"), scratch.path("twin.csv")).unwrap();
    let before = scratch.files();
    for (config, log, stdin, option, target, what) in [
        ("policy.toml", "-", "log.csv", "--decisions", "log.csv", "one of the logs"),
        ("policy.toml", "-", "log.csv", "--report", "log.csv", "one of the logs"),
        ("policy.toml", "-", "log.csv", "--decisions", "link.csv", "one of the logs"),
        ("policy.toml", "-", "link.csv", "--decisions", "log.csv", "one of the logs"),
        ("policy.toml", "-", "log.csv", "--decisions", "twin.csv", "one of the logs"),
        ("policy.toml", "/dev/stdin", "log.csv", "--decisions", "log.csv", "one of the logs"),
        ("-", "log.csv", "policy.toml", "--decisions", "policy.toml", "the config"),
    ] {
        let args = ["backtest", "--config", config, log, option, target];
        let ended = run_on_files(&scratch, &args, stdin, None);
        ended.could_not(&args.join(" "));
        let reported = format!("tollgate: error: cannot write {target}: it is {what}; name another file\n");
        assert_eq!(ended.stderr, reported, "{args:?}");
        assert_eq!((scratch.read("log.csv"), scratch.read("policy.toml")), (LOG.into(), POLICY.into()));
        assert_eq!(scratch.files(), before, "{args:?}");
    }
    // Beside it there is room, and a stdin that nobody reads is no input.
    for log in ["-", "log.csv"] {
        let args = ["backtest", "--config", "policy.toml", log, "--decisions", "out.jsonl"];
        run_on_files(&scratch, &args, "log.csv", None).done(log);
        run_on_files(
            &scratch,
            &["backtest", "--config", "policy.toml", log, "--report", "/dev/null"],
            "log.csv",
            None,
        )
        .done(log);
    }
    run_on_files(
        &scratch,
        &["backtest", "--config", "policy.toml", "log.csv", "--decisions", "out.jsonl"],
        "out.jsonl",
        None,
    )
    .done("a stdin that is not read");
    assert_eq!(scratch.read("out.jsonl").lines().count(), 3);
}

/// What only its owner could read was there for everybody afterwards.
#[test]
fn a_file_that_is_replaced_keeps_its_mode() {
    let scratch = scratch("modes");
    for mode in [0o600, 0o640, 0o666, 0o400] {
        for (option, name) in [("--decisions", "out.jsonl"), ("--report", "out.html")] {
            scratch.write(name, "before\n");
            fs::set_permissions(scratch.path(name), fs::Permissions::from_mode(mode)).unwrap();
            scratch.run(&["backtest", "--config", "policy.toml", "log.csv", option, name]).done(name);
            let found = fs::metadata(scratch.path(name)).unwrap().permissions().mode() & 0o7777;
            assert_eq!(found, mode, "{name}: {found:o} was {mode:o}");
            assert_ne!(scratch.read(name), "before\n");
            fs::remove_file(scratch.path(name)).unwrap();
        }
    }
}

/// A link to a file that is not there yet was replaced, and the file never came.
#[test]
fn links_to_missing_files_are_followed() {
    let scratch = scratch("dangling");
    fs::create_dir(scratch.path("deep")).unwrap();
    symlink("deep/real.jsonl", scratch.path("one.jsonl")).unwrap();
    symlink("../one.jsonl", scratch.path("deep/two.jsonl")).unwrap();
    let run = |target: &str| {
        scratch.run(&["backtest", "--config", "policy.toml", "log.csv", "--decisions", target])
    };
    for link in ["one.jsonl", "deep/two.jsonl"] {
        run(link).done(link);
        assert!(scratch.path(link).is_symlink(), "{link}");
        assert_eq!(scratch.read("deep/real.jsonl").lines().count(), 3, "{link}");
        fs::remove_file(scratch.path("deep/real.jsonl")).unwrap();
    }
    let both = ["backtest", "--config", "policy.toml", "log.csv", "--decisions", "one.jsonl", "--report"];
    for report in ["deep/two.jsonl", "deep/real.jsonl", "deep/../one.jsonl"] {
        let ended = scratch.run(&[&both[..], &[report]].concat());
        ended.could_not(report);
        let reported = format!("--decisions and --report both name {report}; name two files\n");
        assert!(ended.stderr.ends_with(&reported), "{report}: {}", ended.stderr);
    }
    symlink("nowhere/real.jsonl", scratch.path("lost.jsonl")).unwrap();
    symlink("ring.jsonl", scratch.path("ring.jsonl")).unwrap();
    for (target, reported) in [
        ("lost.jsonl", "No such file or directory"),
        ("ring.jsonl", "Too many levels of symbolic links"),
        ("new/", "it is a directory; name a file in it"),
    ] {
        let ended = run(target);
        ended.could_not(target);
        assert!(
            ended.stderr.starts_with(&format!("tollgate: error: cannot write {target}: {reported}")),
            "{ended:?}"
        );
    }
    assert!(scratch.path("lost.jsonl").is_symlink() && scratch.path("ring.jsonl").is_symlink());
}

/// Decisions and the summary came mixed, or one over the other.
#[test]
fn stdout_is_stdout_by_any_name() {
    let scratch = scratch("stdout-names");
    let alone = |text: &str, ended: &Ended, what: &str| {
        ended.done(what);
        assert_eq!(text.lines().count(), 3, "{what}: {text}");
        assert!(text.lines().all(|line| line.starts_with("{\"line\":")), "{what}: {text}");
        assert!(ended.stderr.starts_with("3 requests of 3 keys"), "{what}: {}", ended.stderr);
    };
    let args = |target| ["backtest", "--config", "policy.toml", "log.csv", "--decisions", target];
    for target in ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"] {
        let ended = scratch.run(&args(target));
        alone(&ended.stdout, &ended, target);
    }
    for target in ["-", "/dev/stdout", "out.jsonl"] {
        let ended = run_on_files(&scratch, &args(target), "log.csv", Some("out.jsonl"));
        alone(&scratch.read("out.jsonl"), &ended, target);
    }
    for (decisions, report) in [("-", "/dev/stdout"), ("/dev/stdout", "-"), ("/dev/stdout", "/dev/fd/1")] {
        let ended = scratch.run(&[&args(decisions)[..], &["--report", report]].concat());
        ended.could_not(report);
        assert!(ended.stderr.contains("--decisions and --report both name "), "{}", ended.stderr);
    }
    // What goes nowhere may go there twice, and the summary with it.
    let mut command = scratch.command(&[&args("/dev/null")[..], &["--report", "/dev/null"]].concat());
    let output = command.stdout(Stdio::null()).output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

/// What was half written lay about, one more file for each run that somebody ended.
#[test]
fn signals_leave_nothing_behind() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        let scratch = scratch("signals");
        scratch.write("out.jsonl", "before\n");
        let before = scratch.files();
        let args =
            ["backtest", "--config", "policy.toml", "-", "--decisions", "out.jsonl", "--report", "out.html"];
        // Its stdin stays open, so that it waits for the rest of the log.
        let mut child = scratch.command(&args).stdin(Stdio::piped()).spawn().unwrap();
        let stdin = child.stdin.take();
        let deadline = Instant::now() + Duration::from_secs(60);
        while scratch.files().len() < before.len() + 2 {
            assert!(Instant::now() < deadline, "no drafts: {:?}", scratch.files());
            std::thread::sleep(Duration::from_millis(5));
        }
        kill_process(Pid::from_child(&child), signal).unwrap();
        let status = child.wait().unwrap();
        drop(stdin);
        assert_eq!(scratch.files(), before, "{signal:?}");
        assert_eq!(scratch.read("out.jsonl"), "before\n");
        assert_eq!((status.code(), status.signal()), (Some(code), None));
    }
}
