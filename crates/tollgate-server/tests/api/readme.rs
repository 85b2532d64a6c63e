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

/// The blocks of a text in a language, as `rust` or `rust,no_run`.
fn blocks<'a>(text: &'a str, language: &'a str) -> impl Iterator<Item = &'a str> {
    text.split("```").skip(1).step_by(2).filter_map(move |block| {
        let (head, body) = block.split_once('\n')?;
        (head.split(',').next() == Some(language)).then_some(body)
    })
}

/// What rustdoc hides, everybody else sees: lines that begin with `# `, and programs without a `main`.
#[test]
fn every_program_of_the_readme_is_whole_as_it_stands() {
    let readme = std::fs::read_to_string(of_repository("README.md")).unwrap();
    let programs: Vec<&str> = blocks(&readme, "rust").collect();
    assert!(programs.len() >= 12, "{}", programs.len());
    for program in programs {
        for line in program.lines().map(str::trim_start) {
            assert!(line != "#" && !line.starts_with("# "), "a reader sees `{line}` in\n{program}");
        }
        assert!(program.contains("fn main()"), "{program}");
        let features = program.lines().next().and_then(|line| line.strip_prefix("// features = "));
        let features = features.unwrap_or_else(|| panic!("its features are not named:\n{program}"));
        for (code, feature) in [
            ("axum::", "\"axum\""),
            ("tollgate::http", "\"axum\""),
            ("tollgate::config", "\"config\""),
            ("\n        .redis(", "\"redis\""),
            ("Tollgate::open(", "\"postgres\""),
        ] {
            assert!(!program.contains(code) || features.contains(feature), "{feature}:\n{program}");
        }
    }
    // The dependencies are those that the programs are compiled with here.
    let dependencies =
        blocks(&readme, "toml").find(|block| block.starts_with("[dependencies]")).expect("them");
    let workspace = std::fs::read_to_string(of_repository("Cargo.toml")).unwrap();
    for (name, shown) in [("axum", "axum = \"0.8\""), ("tokio", "tokio = { version = \"1\"")] {
        assert!(dependencies.contains(shown), "{dependencies}");
        let version = shown.split('"').nth(1).unwrap();
        assert!(workspace.contains(&format!("\n{name} = {{ version = \"{version}\"")), "{name} {version}");
    }
}

/// The README, the docs, the server and the demo each had other numbers under the same names.
#[test]
fn there_is_one_example_policy() {
    let limits = |text: &str| {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let lines = lines.map(|line| line.split(" #").next().unwrap_or_default().trim());
        let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
        let mut tables = lines.split(|line| line.starts_with('[')).skip(1).map(<[&str]>::to_vec);
        let names = lines.iter().filter(|line| line.starts_with('['));
        let pairs: Vec<(String, Vec<&str>)> = names
            .map(|name| (*name).to_owned())
            .zip(tables.by_ref())
            .filter(|(name, _)| name.starts_with("[limits."))
            .collect();
        pairs
            .into_iter()
            .map(|(name, lines)| (name, lines.join("\n")))
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    let example = std::fs::read_to_string(of_repository("examples/tollgate.toml")).unwrap();
    let example = limits(&example);
    assert_eq!(example.len(), 6, "{example:?}");
    let mut compared = 0;
    for file in ["README.md", "docs/server.md", "docs/routes.md", "docs/operations.md"] {
        let text = std::fs::read_to_string(of_repository(file)).unwrap();
        for block in blocks(&text, "toml").chain(blocks(&text, "rust")) {
            for (name, fields) in limits(block.split("\"#").next().unwrap_or_default()) {
                if let Some(expected) = example.get(&name) {
                    assert_eq!(&fields, expected, "{file}: {name}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared >= 5, "{compared}");
    // What a server serves without a config, and what the demo shows.
    for command in ["serve", "demo"] {
        let server = server::builder().command(command).start();
        let answer: serde_json::Value = serde_json::from_str(&server.get("/v1/limits").body).unwrap();
        let served = answer["limits"].as_array().unwrap().iter();
        let mut served: Vec<String> =
            served.map(|limit| format!("[limits.{}]", limit["limit"].as_str().unwrap())).collect();
        served.sort();
        assert_eq!(served, example.keys().cloned().collect::<Vec<_>>(), "{command}");
    }
}
