//! The example runs and prints what its reader is promised to see.

use std::process::Command;

#[path = "../../tollgate/tests/examples/built.rs"]
mod built;

#[test]
fn llm() {
    let path = built::built(&["llm"], "", "llm");
    let output = Command::new(&path).output().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines, ["8 input tokens, 108 reserved, can proceed: true", "12 of 12 answered"]);
}
