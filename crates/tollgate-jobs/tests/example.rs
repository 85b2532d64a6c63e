//! The example runs and says what its reader is promised to see.

use std::process::Command;

#[path = "../../tollgate/tests/examples/built.rs"]
mod built;

#[test]
fn jobs() {
    let path = built::built(&["jobs"], "", "jobs");
    let output = Command::new(&path).output().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = printed.lines().collect();
    let [status, rest @ ..] = lines.as_slice() else { panic!("{printed}") };
    assert!(status.starts_with("e-mail: ") && status.ends_with(" wait"), "{status}");
    assert_eq!(
        rest,
        [
            "outbound: 12 e-mails and 3 calls ran, 3 calls were rejected",
            "cache: refreshed once a minute, skipped in between",
        ]
    );
}
