//! Each example runs and says what its reader is promised to see.

use std::process::Command;

#[path = "examples/built.rs"]
mod built;

const EXAMPLES: [&str; 4] = ["hello", "several_limits", "reserve_and_settle", "waiting"];

/// Runs an example and compares all that it prints.
fn check(name: &str, expected: &str) {
    let path = built::built(&EXAMPLES, "", name);
    let output = Command::new(&path).output().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} failed: {errors}");
    assert_eq!(without_times(&String::from_utf8_lossy(&output.stdout)), expected.trim(), "{name}");
    assert_eq!(errors, "", "{name}");
}

/// What was printed, with `…` for the times to wait: examples go by the system clock.
fn without_times(printed: &str) -> String {
    let lines = printed.lines().map(|line| match line.split_once("retry after ") {
        Some((words, _)) => format!("{words}retry after …"),
        None => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn hello() {
    check(
        "hello",
        "
request 1: allowed, 2 of 3 left
request 2: allowed, 1 of 3 left
request 3: allowed, 0 of 3 left
request 4: denied, retry after …
request 5: denied, retry after …
",
    );
}

#[test]
fn several_limits() {
    check(
        "several_limits",
        "
alice views a page:  allowed by per-user, 1 of 2 left
alice views another: allowed by per-user, 0 of 2 left
bob views a page:    allowed by per-user, 1 of 2 left
bob exports:         allowed by per-user, 0 of 2 left
bob exports again:   denied
  everybody alone says: yes
  per-user alone says: no
  exports alone says: no
  exports asks for the longest wait, so it is named
everybody together has used 13; the refused export took nothing
",
    );
}

#[test]
fn reserve_and_settle() {
    check(
        "reserve_and_settle",
        "
reserved 4000 tokens, 1000 are left for others
a second call has to wait: denied by tokens, retry after …
it took 1234, so 3766 are left
a call that failed is cancelled, and 9 requests are left
two calls run at once: true
a third may not: denied by at-once, retry after …
one is done, so it may: true
",
    );
}

#[test]
fn waiting() {
    check(
        "waiting",
        "
the first letter leaves
the second letter leaves
the third letter leaves
the fourth letter leaves
four letters took at least 60 ms: true
a newsletter cannot leave within 5 ms: true
two newsletters at once: denied, the cost is more than the limit ever holds
",
    );
}
