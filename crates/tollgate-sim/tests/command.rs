//! The binary as it is started: one seed is one run, to the byte.

use std::path::PathBuf;
use std::process::Command;

/// What it prints of a thousand processes, and every event of theirs.
fn run(seed: &str, name: &str) -> (String, Vec<u8>) {
    let log = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.log", std::process::id()));
    let run = ["partition", "--nodes", "1000", "--seconds", "2", "--rate", "2", "--loss-ppm", "1000"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate-sim"));
    let output = command.args(run).args(["--seed", seed, "--json", "--log"]).arg(&log).output();
    let output = output.expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && errors.is_empty(), "{}: {errors}", output.status);
    let events = std::fs::read(&log).expect("a log");
    let _ = std::fs::remove_file(log);
    (String::from_utf8(output.stdout).expect("UTF-8"), events)
}

#[test]
fn a_thousand_processes_are_the_same_run_whenever_they_are_started() {
    let (first, second, other) = (run("7", "first"), run("7", "second"), run("8", "other"));
    assert!(first.0.contains("\"nodes\":1000"), "{}", first.0);
    assert!(first.1.iter().filter(|byte| **byte == b'\n').count() > 3_000, "{} bytes", first.1.len());
    assert_eq!(first.0, second.0);
    assert!(first.1 == second.1, "the events differ");
    assert_ne!(first.0, other.0);
    assert!(first.1 != other.1, "another seed is another run");
}
