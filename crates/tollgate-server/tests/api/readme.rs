//! What the README shows is what happens.

use crate::server::{self, command, home, of_repository, steady};

/// The blocks between the README's markers, each a command and what it prints.
fn shown() -> Vec<(String, String)> {
    let readme = std::fs::read_to_string(of_repository("README.md")).unwrap();
    let (_, rest) = readme.split_once("<!-- run by tests: begin -->\n").expect("the first marker");
    let (shown, _) = rest.split_once("<!-- run by tests: end -->\n").expect("the second marker");
    let mut blocks = shown.split("```").skip(1).step_by(2);
    let mut pairs = Vec::new();
    while let Some(asked) = blocks.next() {
        let asked = asked.strip_prefix("sh\n").expect("a command");
        let answer = blocks.next().expect("what it prints");
        let (_, answer) = answer.split_once('\n').expect("what it prints");
        pairs.push((asked.to_owned(), answer.to_owned()));
    }
    pairs
}

#[test]
fn the_readme_shows_what_happens() {
    let server = server::builder().start();
    let pairs = shown();
    assert!(pairs.len() >= 3, "{pairs:?}");
    for (asked, expected) in pairs {
        let asked = asked.replace("127.0.0.1:8080", &server.http().to_string());
        let binary = std::path::Path::new(env!("CARGO_BIN_EXE_tollgate")).parent().unwrap();
        let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap_or_default());
        let mut shell = std::process::Command::new("sh");
        shell.args(["-euc", &asked]).env("PATH", path).env("TOLLGATE_SERVER", server.url());
        let output = shell.output().unwrap();
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(plain(&said), plain(&expected), "{asked}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Without line breaks, and without what depends on the moment.
fn plain(text: &str) -> String {
    let mut words: Vec<&str> = text.split_whitespace().collect();
    for at in 1..words.len() {
        if matches!(words[at - 1], "in" | "after") {
            words[at] = "~";
        }
    }
    steady(&words.concat())
}

#[test]
fn its_first_command_serves_without_anything() {
    let readme = std::fs::read_to_string(of_repository("README.md")).unwrap();
    let first = readme.lines().find(|line| line.starts_with("cargo ")).expect("a command");
    assert_eq!(first, "cargo run --release -- serve");
    let directory = home();
    // A port of our own: the usual one may be taken where tests run.
    let output = command(&directory, &["serve", "--listen", "127.0.0.1:no"], &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let server = server::builder().start();
    assert_eq!(server.get("/readyz").body, "ready\n");
}
