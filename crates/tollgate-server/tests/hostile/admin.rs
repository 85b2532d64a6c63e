//! Who guesses the admin token is slowed down and in the log, and so is what admins do.

use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;

use crate::log::wait_for_line;
use crate::server::{self, POLICY, Tollgate};

const LOGIN: &str = r#"{"limit":"login","key":"user:mallory"}"#;

fn with_token() -> Tollgate {
    let config = format!("[server]\nadmin_token = \"env:OPS\"\n{POLICY}");
    server::with(&config, &[], &[("OPS", "s3cret"), ("RL_LOG_SALT", "salt")])
}

/// The head of an answer to a reset with this token, asked from an address of this machine.
fn reset_from(server: &Tollgate, peer: [u8; 4], token: &str) -> String {
    let request = format!(
        "POST /v1/reset HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{LOGIN}",
        server.http(),
        LOGIN.len()
    );
    let asking = async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::new(IpAddr::from(peer), 0))?;
        let mut stream = socket.connect(server.http()).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let answer = runtime.block_on(asking).expect("an answer");
    answer.split("\r\n\r\n").next().unwrap_or_default().to_owned()
}

/// Anybody could try as many tokens as the network carries, and nobody was reported.
#[test]
fn guesses_are_slowed_down_and_logged() {
    let server = with_token();
    let mut refused = 0;
    for guess in 0..40 {
        let head = reset_from(&server, [127, 0, 0, 2], &format!("guess{guess}"));
        match &head[9..12] {
            "401" => assert!(guess < 10 || refused > 0, "{head}"),
            "429" => {
                refused += 1;
                assert!(head.to_lowercase().contains("retry-after: 1"), "{head}");
            }
            _ => panic!("{head}"),
        }
    }
    assert!(refused > 0, "40 guesses were looked at");
    // Who guesses is not reported the right one by being let in, and others are not concerned.
    let is_let_in = |peer, token| reset_from(&server, peer, token).starts_with("HTTP/1.1 200");
    while !reset_from(&server, [127, 0, 0, 2], "more").starts_with("HTTP/1.1 429") {}
    assert!(is_let_in([127, 0, 0, 3], "s3cret"));
    let line = wait_for_line(&server, |line| line["message"] == "an admin call showed a wrong token");
    assert_eq!((&line["level"], &line["audit"]), (&"WARN".into(), &"reset".into()), "{line}");
    assert_eq!(line["peer"], "127.0.0.2", "{line}");
    let metrics = server.get("/metrics").body;
    for reason in ["token", "slowed"] {
        let name = format!("tollgate_admin_refused_total{{reason=\"{reason}\"}}");
        assert!(metrics.contains(&name), "{name}: {metrics}");
    }
    let said = server.output();
    assert!(!said.contains("guess1") && !said.contains("s3cret"), "{said}");
}

#[test]
fn what_admins_do_is_told_with_who_and_to_whom() {
    let server = with_token();
    let token = "authorization: Bearer s3cret";
    let json = "content-type: application/json";
    for _ in 0..3 {
        server.post("/v1/check", LOGIN);
    }
    assert_eq!(server.ask("POST", "/v1/reset", &[token, json], LOGIN).status, 200);
    assert_eq!(server.ask("POST", "/v1/reload", &[token], "").status, 200);
    let denied = wait_for_line(&server, |line| line["target"] == "tollgate::decision");
    let reset = wait_for_line(&server, |line| line["audit"] == "reset");
    assert_eq!(reset["key_hash"], denied["key_hash"], "{reset}");
    assert_eq!(reset["key_hash"].as_str().map(str::len), Some(32), "{reset}");
    let reported = |line: &Value| {
        [&line["level"], &line["peer"]].map(|value| value.as_str().unwrap_or_default().to_owned())
    };
    assert_eq!(reported(&reset), ["INFO", "127.0.0.1"], "{reset}");
    assert_eq!((&reset["limiter"], &reset["forgotten"]), (&"login".into(), &true.into()), "{reset}");
    let reload = wait_for_line(&server, |line| line["audit"] == "reload");
    assert_eq!(reported(&reload), ["INFO", "127.0.0.1"], "{reload}");
    assert_eq!(reload["applied"], true, "{reload}");
    assert!(!server.output().contains("mallory"));
}

/// Regression: who only looked left no line, and who removed an override no name.
#[test]
fn every_admin_call_is_a_line() {
    type IsIt<'a> = &'a dyn Fn(&Value) -> bool;
    let server = with_token();
    let token = "authorization: Bearer s3cret";
    let json = "content-type: application/json";
    let overridden = r#"{"limit":"login","key":"user:mallory","override":{"limit":9},"by":"dana"}"#;
    let removed = r#"{"limit":"login","key":"user:mallory","by":"erin"}"#;
    let is_by = |line: &Value, by: &str| line["by"] == by;
    let calls: [(&str, &str, &str, &str, IsIt<'_>); 9] = [
        ("POST", "/v1/overrides", overridden, "override", &|line| is_by(line, "dana")),
        ("POST", "/v1/overrides/remove", removed, "override", &|line| {
            is_by(line, "erin") && line["removed"] == true
        }),
        ("GET", "/v1/overrides", "", "override_list", &|_| true),
        ("POST", "/v1/key", r#"{"key":"user:mallory"}"#, "key", &|line| {
            line["key_hash"].as_str().is_some_and(|hash| hash.len() == 32)
        }),
        ("GET", "/v1/llm", "", "llm", &|_| true),
        ("GET", "/v1/jobs", "", "jobs", &|_| true),
        ("POST", "/v1/compare", r#"{"config":"[limits.a]\nunlimited = true\n"}"#, "compare", &|line| {
            line["valid"] == true
        }),
        ("POST", "/v1/reset", LOGIN, "reset", &|line| line["limiter"] == "login"),
        ("POST", "/v1/reload", "", "reload", &|line| line["applied"] == true),
    ];
    for (method, path, body, audit, is_it) in calls {
        // What a page asks for again is no other line.
        for _ in 0..2 {
            let answer = server.ask(method, path, &[token, json], body);
            assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        }
        let line = wait_for_line(&server, |line| line["audit"] == audit && is_it(line));
        assert_eq!((&line["level"], &line["peer"]), (&"INFO".into(), &"127.0.0.1".into()), "{line}");
    }
    server.stop();
    let log = server.output();
    for audit in ["override_list", "key", "llm", "jobs"] {
        assert_eq!(log.matches(&format!("\"audit\":\"{audit}\"")).count(), 1, "{audit}: {log}");
    }
    assert!(!log.contains("mallory") && !log.contains("s3cret"), "{log}");
}
