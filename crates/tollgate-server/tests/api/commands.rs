//! The commands that ask a server: what they print, where, and how they end.

use tollgate_testkit::free_port;

use crate::server::{self, POLICY, Tollgate, command, home};

/// A call: its exit code, and what stands on stdout and stderr (`""` where nothing may).
fn check(server: &Tollgate, args: &str, env: &[(&str, &str)], code: i32, stdout: &str, stderr: &str) {
    let args: Vec<&str> = args.split(' ').collect();
    let output = server.tollgate(&args, env);
    let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert_eq!(output.status.code(), Some(code), "{args:?}: {out}{err}");
    for (said, expected) in [(&out, stdout), (&err, stderr)] {
        assert!(said.contains(expected), "{args:?}: {said}");
        assert_eq!(said.is_empty(), expected.is_empty(), "{args:?}: {said}");
    }
    if code == 2 {
        assert!(err.starts_with("tollgate: error: ") && err.lines().count() == 1, "{args:?}: {err}");
    }
}

#[test]
fn a_check_ends_as_it_was_decided() {
    let server = server::start();
    check(&server, "check login user:1", &[], 0, "allowed by login: 1 of 2 left, full again in 60 min\n", "");
    check(&server, "check login user:1 --cost 2", &[], 1, "denied by login: 1 of 2 left, retry after ", "");
    check(&server, "check login user:1 --cost 3", &[], 1, "the cost is above the capacity", "");
    check(&server, "check login user:1 --json", &[], 0, "\"allowed\":true", "");
    check(&server, "check login user:1 --json", &[], 1, "\"allowed\":false", "");
    check(&server, "check free user:1", &[], 0, "allowed by free: unlimited\n", "");
    check(&server, "check shut user:1", &[], 1, "denied by shut: 0 of 0 left, blocked\n", "");
    check(&server, "check even user:1", &[], 0, "allowed by even: 1 of 2 left, full again in 60 min\n", "");
    check(&server, "check even user:1", &[], 0, "; start after a delay of 60 min", "");
    check(&server, "check logn user:1", &[], 2, "", "did you mean `login`?");
    check(&server, "check login a:b:c:d", &[], 2, "", "did you mean `a:b%3Ac%3Ad`?");
    check(&server, "check login user:1 --cost 0", &[], 2, "", "invalid value '0' for '--cost <N>'");
    check(&server, "check login user:1 --server ftp://a", &[], 2, "", "write it as http://");
    let ours = server.http().to_string();
    check(
        &server,
        &format!("check login user:1 --server https://{ours}"),
        &[],
        2,
        "",
        "does not speak TLS; if it is plain HTTP, as `tollgate serve` is, write http://",
    );
    let left = std::net::SocketAddr::from(([127, 0, 0, 1], free_port()));
    check(&server, &format!("check login user:1 --server http://{left}"), &[], 2, "", "start one with");
}

#[test]
fn a_key_is_looked_at_and_forgotten() {
    let config = format!("[server]\nadmin_token = \"env:OPS\"\n{POLICY}");
    let server = server::with(&config, &[], &[("OPS", "s3cret")]);
    check(&server, "status login user:1", &[], 0, "login: 2 of 2 left\n", "");
    check(&server, "check login user:1 --cost 2", &[], 0, "allowed", "");
    check(&server, "status login user:1", &[], 0, "login: 0 of 2 left, retry after ", "");
    check(&server, "status login user:1 --json", &[], 0, "\"used\":2}", "");
    check(&server, "reset login user:1", &[], 2, "", "the server said 401: this call needs the admin token");
    let none = "no token was sent: name it in TOLLGATE_ADMIN_TOKEN or with --token";
    check(&server, "reset login user:1", &[], 2, "", none);
    let wrong = "the server said 401: the admin token is wrong; compare TOLLGATE_ADMIN_TOKEN or --token with server.admin_token";
    check(&server, "reset login user:1 --token guess", &[], 2, "", wrong);
    check(&server, "reset login user:1", &[("TOLLGATE_ADMIN_TOKEN", "guess")], 2, "", wrong);
    let basic = server.ask("POST", "/v1/reset", &["authorization: Basic czNjcmV0"], "{}");
    assert!(basic.status == 401 && basic.body.contains("is not of the form `Bearer …`"), "{}", basic.body);
    let shown = [("TOLLGATE_ADMIN_TOKEN", "s3cret")];
    check(&server, "reset login user:1", &shown, 0, "forgotten\n", "");
    check(
        &server,
        "reset login user:1 --token s3cret --yes",
        &[],
        0,
        "nothing to forget: the key has no counters\n",
        "",
    );
    check(&server, "reset login user:1 --json", &shown, 0, "{\"reset\":false}\n", "");
    check(&server, "status login user:1", &[], 0, "login: 2 of 2 left\n", "");
}

/// The rules of a backtest are in the config that is served, and change nothing there.
#[test]
fn rules_for_access_logs_are_let_stand() {
    let rules = "[[rules]]\npath = \"/login\"\nlimit = \"login\"\n";
    let server = server::with(&format!("{POLICY}\n{rules}"), &[], &[]);
    check(&server, "check login user:1", &[], 0, "allowed by login: 1 of 2 left", "");
}

#[test]
fn limits_and_top_are_tables() {
    let server = server::start();
    server.post("/v1/check", r#"{"limit":"login","key":"user:1","cost":9}"#);
    check(&server, "limits", &[], 0, "api      token_bucket  1/h, bursts of 3", "");
    check(&server, "limits", &[], 0, "watched  fixed_window  1 per 1h window (shadow)", "");
    check(&server, "limits --json", &[], 0, "{\"limits\":[{", "");
    check(&server, "top", &[], 0, "store memory up", "");
    let output = server.tollgate(&["top"], &[]);
    let page = String::from_utf8(output.stdout).unwrap();
    let login = page.lines().find(|line| line.starts_with("login")).expect("a row");
    let words: Vec<&str> = login.split_whitespace().collect();
    assert_eq!(words[..11], ["login", "2", "per", "1h", "window", "-", "-", "100.0", "%", "0", "1"]);
    assert!(
        words[11].ends_with('…') && words[12..] == ["1", "local"],
        "who is denied most, by hash: {login}"
    );
    assert!(!page.contains("sort:"), "no help where nobody presses keys: {page}");
    assert!(!page.contains('\u{1b}'), "no colour where there is no terminal: {page}");
}

/// `--listen 8085` was answered with "invalid socket address".
#[test]
fn an_address_to_listen_on_is_asked_for_in_its_form() {
    let home = home();
    for (option, address, expected) in [
        (
            "--listen",
            "8085",
            "cannot listen on \"8085\" for http: it has no port; write host:port, such as \"127.0.0.1:8085\"",
        ),
        (
            "--listen",
            ":8085",
            "it has no host (0.0.0.0 listens everywhere); write host:port, such as \"127.0.0.1:8085\"",
        ),
        ("--listen", "localhost", "it has no port; write host:port, such as \"127.0.0.1:8080\" (--listen)"),
        ("--grpc", "127.0.0.1:x", "such as \"127.0.0.1:8081\" (--grpc)"),
        ("--resp", "::1:6380", "an IPv6 address without its brackets, as in [::1]"),
    ] {
        let mut args = vec!["serve", option, address];
        if option != "--listen" {
            args.extend(["--listen", "127.0.0.1:0"]);
        }
        let output = command(&home, &args, &[]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    let _ = std::fs::remove_dir_all(&home);
}

/// Named a limit `api` that the config does not have.
#[test]
fn the_line_to_try_works_as_printed() {
    for (config, expected) in [
        (POLICY, "\"allowed\":true"),
        ("[limits.pool]\nstrategy = 'concurrency'\nlimit = 1\nlease = '1s'\n", "\"reservation\":\""),
        (
            "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://127.0.0.1:1/v1'\n[llm.models.m]\nrpm = 5\n",
            "\"can_proceed\":true",
        ),
    ] {
        let server = server::with(config, &[], &[]);
        let said = server.output();
        let line =
            said.lines().find_map(|line| line.trim_start().strip_prefix("try ")).expect("a line to try");
        let output = std::process::Command::new("sh").args(["-euc", line]).output().unwrap();
        let answer = String::from_utf8(output.stdout).unwrap();
        assert!(answer.contains(expected), "{line}: {answer}");
    }
    let server = server::with("", &[], &[]);
    assert!(server.output().contains("  try    add a limit to tollgate.toml"), "{}", server.output());
}

/// What a file would change, before it is in place.
#[test]
fn a_config_is_compared_with_that_of_a_server() {
    let config = format!("[server]\nadmin_token = \"env:OPS\"\n{POLICY}");
    let server = server::with(&config, &[], &[("OPS", "s3cret")]);
    let home = home();
    let url = format!("http://{}", server.http());
    let validate = |text: &str, rest: &[&str]| {
        std::fs::write(home.join("next.toml"), text).unwrap();
        let args = [&["validate", "--config", "next.toml", "--against", &url], rest].concat();
        let output =
            command(&home, &args, &[("OPS", "x"), ("TOLLGATE_ADMIN_TOKEN", "s3cret")]).output().unwrap();
        let [out, err] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        (output.status.code(), out, err)
    };
    let (code, out, err) = validate(&config, &[]);
    assert!(
        code == Some(0) && out.ends_with(&format!("\nThe server at {url} has the same.\n")),
        "{out}{err}"
    );
    let next = config
        .replace("limit = 2\nwindow", "limit = 5\nwindow")
        .replace("[server]\n", "[server]\nhttp = \"127.0.0.1:1\"\n")
        .replace("[limits.shut]\nblocked", "[limits.open]\nunlimited")
        .replace(
            "strategy = \"leaky_bucket\"\nrate = \"1/h\"\ncapacity = 2",
            "strategy = \"sliding_window\"\nlimit = 2\nwindow = \"1h\"",
        );
    let (code, out, err) = validate(&next, &[]);
    let expected = format!(
        "\nWhat it would change at {url}\n\
         ~ limit even: 1/h evenly, up to 2 waiting -> 2 in any 1h (strategy changed: counters begin anew)\n\
         ~ limit login: 2 per 1h window -> 5 per 1h window\n\
         + limit open: unlimited\n\
         - limit shut: blocked\n\
         ! server.http needs a restart\n"
    );
    assert!(code == Some(0) && out.ends_with(&expected), "{out}{err}\nhas not\n{expected}");
    let (code, out, _) = validate(&next, &["--json"]);
    assert!(code == Some(0) && out.contains(r#""restart":["server.http"]}"#), "{out}");
    // Nothing was changed, and what a reload would refuse is refused here.
    assert!(server.get("/v1/limits").body.contains("\"shut\""));
    let (code, _, err) = validate("[limits]\n", &[]);
    assert!(code == Some(2) && err.contains("it has no limits; the one in force has 7"), "{err}");
    let (code, _, err) = validate("limits.a.blocked = 7", &[]);
    assert!(code == Some(2) && err.contains("1 mistake in next.toml"), "{err}");
    let (code, _, err) = validate(&config, &["--token", "wrong"]);
    assert!(code == Some(2) && err.contains("the server said 401"), "{err}");
    let both = command(&home, &["validate", "next.toml", "--config", "next.toml"], &[]).output().unwrap();
    assert_eq!(both.status.code(), Some(2), "{both:?}");
    let _ = std::fs::remove_dir_all(home);
}

#[test]
fn completions_and_the_manual_know_every_command() {
    let home = home();
    let run = |args: &[&str]| {
        let output = command(&home, args, &[]).output().unwrap();
        assert!(output.status.success(), "{args:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let all = [
        "serve", "check", "status", "reset", "override", "limits", "top", "validate", "backtest", "suggest",
        "hash", "bench",
    ];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = run(&["completions", shell]);
        for name in all {
            assert!(text.contains(name), "{shell} does not know {name}");
        }
    }
    let manual = run(&["man"]);
    for name in all {
        assert!(manual.contains(&format!("tollgate\\-{name}(1)")), "the manual does not know {name}");
        let page = run(&["man", name]);
        assert!(page.contains(&format!(".TH tollgate-{name} 1")), "{page}");
    }
    let unknown = command(&home, &["man", "sreve"], &[]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(2));
    let _ = std::fs::remove_dir_all(&home);
}
