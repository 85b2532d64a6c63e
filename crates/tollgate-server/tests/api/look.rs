//! What can be looked at, and what only admins may do.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::server::{self, POLICY, command, home, steady};

#[test]
fn limits_and_standings() {
    let server = server::start();
    let limits: Value = serde_json::from_str(&server.get("/v1/limits").body).unwrap();
    let limits = limits["limits"].as_array().unwrap();
    let names: Vec<&str> = limits.iter().map(|limit| limit["limit"].as_str().unwrap()).collect();
    assert_eq!(names, ["api", "login", "watched", "uploads", "even", "free", "shut"]);
    let expected = json!({
        "limit": "api", "strategy": "token_bucket", "rule": "1/h, bursts of 3", "capacity": 3, "window_ms": 10_800_000,
        "shadow": false, "fallback": "local", "overrides": 1, "store": "memory",
    });
    assert_eq!(limits[0], expected);
    assert_eq!((&limits[5]["capacity"], &limits[6]["capacity"]), (&Value::Null, &json!(0)));
    assert_eq!(limits[2]["shadow"], true);
    let fresh = r#"{"limit":"api","allowed":true,"capacity":3,"remaining":3,"retry_after_ms":0,"reset_after_ms":0,"used":0}"#;
    let used = r#"{"limit":"api","allowed":true,"capacity":3,"remaining":1,"retry_after_ms":0,"reset_after_ms":~,"used":2}"#;
    let free = r#"{"limit":"free","allowed":true,"capacity":null,"remaining":null,"retry_after_ms":0,"reset_after_ms":0}"#;
    assert_eq!(server.get("/v1/status?limit=api&key=user:1").body, fresh);
    server.post("/v1/check", r#"{"limit":"api","key":{"namespace":"ip","key":"::1"},"cost":2}"#);
    for path in [
        "/v1/status?limit=api&key=ip:%253A%253A1",
        "/v1/status?key=::1&limit=api&namespace=ip",
        "/v1/status?limit=api&key=%3a%3a1&namespace=ip",
    ] {
        assert_eq!(steady(&server.get(path).body), used, "{path}");
    }
    assert_eq!(server.get("/v1/status?limit=free&key=user:1").body, free);
}

#[test]
fn health_and_metrics() {
    let server = server::start();
    for (path, kind, body) in [
        ("/healthz", "text/plain; charset=utf-8", "ok\n"),
        ("/readyz", "text/plain; charset=utf-8", "ready\n"),
    ] {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.field("content-type"), &*answer.body), (200, Some(kind), body));
        let head = server.ask("HEAD", path, &[], "");
        assert_eq!(
            (head.status, head.field("content-length"), &*head.body),
            (200, answer.field("content-length"), "")
        );
    }
    for _ in 0..3 {
        server.post("/v1/check", r#"{"limit":"login","key":"tenant-a:secret-name"}"#);
    }
    let answer = server.get("/metrics");
    assert_eq!(answer.field("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    for (decision, count) in [("allow", 2), ("deny", 1)] {
        let line = answer.body.lines().find(|line| {
            line.starts_with("rate_limiter_decisions_total{")
                && line.contains("limiter=\"login\"")
                && line.contains(&format!("decision=\"{decision}\""))
        });
        let line = line.unwrap_or_else(|| panic!("no {decision} in {}", answer.body));
        assert!(line.ends_with(&format!(" {count}")), "{line}");
    }
    assert!(!answer.body.contains("secret-name"), "{}", answer.body);
    for sample in answer.body.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let name = sample.split(['{', ' ']).next().unwrap_or_default();
        let is_of = |name: &str| answer.body.contains(&format!("# HELP {name} "));
        let stem = ["_sum", "_count", "_bucket"].iter().find_map(|end| name.strip_suffix(end));
        assert!(is_of(name) || stem.is_some_and(is_of), "{name} has no HELP");
    }
    let about: Value = serde_json::from_str(&server.get("/v1/server").body).unwrap();
    assert_eq!(about["store"]["mode"], "memory");
    assert_eq!((&about["draining"], &about["reloads"]), (&json!(false), &json!([])));
}

#[test]
fn resetting_takes_the_token_once_there_is_one() {
    let body = r#"{"limit":"login","key":"user:1"}"#;
    let open = server::start();
    assert_eq!(open.post("/v1/reset", body).body, r#"{"reset":false}"#);
    open.post("/v1/check", body);
    assert_eq!(open.post("/v1/reset", body).body, r#"{"reset":true}"#);
    assert!(open.get("/v1/status?limit=login&key=user:1").body.contains("\"used\":0"));

    let config = format!("[server]\nadmin_token = \"env:OPS\"\n{POLICY}");
    let shut = server::with(&config, &[], &[("OPS", "s3cret")]);
    shut.post("/v1/check", body);
    let json = "content-type: application/json";
    for (line, status) in [
        ("x: y", 401),
        ("authorization: s3cret", 401),
        ("authorization: Bearer", 401),
        ("authorization: Bearer ", 401),
        ("authorization: Bearer s3cre", 401),
        ("authorization: Bearer s3crets", 401),
        ("authorization: Basic s3cret", 401),
        ("authorization: Bearer s3cret", 200),
        ("authorization: bearer s3cret", 200),
        ("authorization: BEARER s3cret", 200),
    ] {
        let answer = shut.ask("POST", "/v1/reset", &[json, line], body);
        assert_eq!(answer.status, status, "{line}: {}", answer.body);
        assert_eq!(answer.field("www-authenticate"), (status == 401).then_some("Bearer"), "{line}");
    }
    assert_eq!(shut.ask("POST", "/v1/reload", &[], "").status, 401);
    // Deciding is for everybody.
    assert_eq!(shut.post("/v1/check", body).status, 200);
}

/// A page that a browser shows may ask this machine, and a name of its own may come to mean this address.
#[test]
fn without_a_token_no_page_from_elsewhere_is_an_admin() {
    let server = server::start();
    let body = r#"{"limit":"login","key":"user:1"}"#;
    let here = server.http();
    for (host, origin, status) in [
        (here.to_string(), None, 200),
        (here.to_string(), Some(format!("http://{here}")), 200),
        ("localhost:8080".into(), None, 200),
        ("LocalHost".into(), Some("http://localhost".into()), 200),
        ("[::1]:8080".into(), Some("http://[::1]:8080".into()), 200),
        (here.to_string(), Some("http://evil.example".into()), 403),
        (here.to_string(), Some("http://localhost:1".into()), 403),
        (here.to_string(), Some("null".into()), 403),
        ("evil.example".into(), Some("http://evil.example".into()), 403),
        ("evil.example:8080".into(), None, 403),
        ("localhost.evil.example".into(), None, 403),
        ("127.0.0.1.evil.example".into(), None, 403),
    ] {
        let origin_line = origin.as_ref().map(|origin| format!("origin: {origin}\r\n")).unwrap_or_default();
        for (path, body) in [("/v1/reset", body), ("/v1/check", body)] {
            let mut connection = server.connect();
            let length = body.len();
            let request = format!(
                "POST {path} HTTP/1.1\r\nhost: {host}\r\n{origin_line}content-type: application/json\r\n\
                 content-length: {length}\r\n\r\n{body}"
            );
            connection.send(request.as_bytes()).unwrap();
            let answer = connection.receive(false).unwrap();
            let expected = if path == "/v1/reset" { status } else { 200 };
            assert_eq!(answer.status, expected, "{path} {host} {origin:?}: {}", answer.body);
        }
    }
    let answer = server.ask("POST", "/v1/reload", &["origin: http://evil.example"], "");
    assert_eq!(answer.status, 403, "{}", answer.body);
    assert!(answer.body.contains("server.admin_token"), "{}", answer.body);
}

/// Nobody answers there. Who asks is reported that, and the log where it is.
#[test]
fn a_fault_does_not_tell_where_the_store_is() {
    let config = format!(
        "[store]\nmode = \"redis\"\nfallback = \"closed\"\nredis = {{ url = \"redis://127.0.0.1:9\" }}\n{POLICY}"
    );
    let server = server::with(&config, &[], &[]);
    let json = ["content-type: application/json"];
    let key = r#"{"limit":"login","key":"user:1"}"#;
    let settle = r#"{"reservation":"0123456789abcdef0123456789abcdef","actual":1}"#;
    for (method, path, body) in [
        ("GET", "/v1/status?limit=login&key=user:1", ""),
        ("POST", "/v1/reset", key),
        ("POST", "/v1/settle", settle),
    ] {
        let answer = server.ask(method, path, &json, body);
        assert_eq!(answer.status, 503, "{path}: {}", answer.body);
        assert!(answer.body.contains("the store could not answer ("), "{path}: {}", answer.body);
        assert!(!answer.body.contains("127.0.0.1"), "{path}: {}", answer.body);
    }
}

/// Each door by itself.
#[test]
fn listening_beyond_this_machine_takes_a_secret_or_a_word() {
    let home = home();
    std::fs::write(home.join("tollgate.toml"), POLICY).unwrap();
    let token = [("TOLLGATE_SERVER_ADMIN_TOKEN", "env:OPS"), ("OPS", "s3cret")];
    let password = [("TOLLGATE_SERVER_RESP_PASSWORD", "env:OPS"), ("OPS", "s3cret")];
    let none: &[(&str, &str)] = &[];
    for (door, secret, said) in [
        ("--listen", none, Some("set server.admin_token")),
        ("--listen", &password, Some("set server.admin_token")),
        ("--listen", &token, None),
        ("--resp", none, Some("set server.resp_password")),
        ("--resp", &token, Some("set server.resp_password")),
        ("--resp", &password, None),
        ("--grpc", none, Some("gRPC asks nobody for a secret")),
        ("--grpc", &[token, password].concat(), Some("gRPC asks nobody for a secret")),
    ] {
        let reached = |server: &server::Tollgate| match door {
            "--listen" => server.http(),
            "--resp" => server.resp(),
            _ => server.grpc(),
        };
        let far = [door, "0.0.0.0:0"];
        if let Some(said) = said {
            let near = ["--listen", "--resp", "--grpc"].into_iter().filter(|near| *near != door);
            let near = near.flat_map(|near| [near, "127.0.0.1:0"]);
            let args = ["serve", "--config", "tollgate.toml"].into_iter().chain(far).chain(near);
            let mut refused = command(&home, &args.collect::<Vec<_>>(), secret);
            let mut refused = refused.stderr(Stdio::piped()).spawn().unwrap();
            let mut reported = String::new();
            // A line, not all until the end: one that serves after all has none.
            BufReader::new(refused.stderr.take().unwrap()).read_line(&mut reported).unwrap();
            if !reported.contains(said) {
                refused.kill().unwrap();
            }
            assert_eq!(refused.wait().unwrap().code(), Some(2), "{door}: {reported}");
            assert!(reported.contains(said) && reported.contains("--without-token"), "{door}: {reported}");
        }
        let word = said.map(|_| "--without-token");
        let server = server::with(POLICY, &far.into_iter().chain(word).collect::<Vec<_>>(), secret);
        assert!(reached(&server).ip().is_unspecified(), "{door}: {}", reached(&server));
    }
}

/// A namespace that a caller chose was a label that every scraper could read.
#[test]
fn metrics_name_only_namespaces_that_the_config_does() {
    let config = format!("[server]\nnamespaces = [\"tenant\"]\n{POLICY}");
    let server = server::with(&config, &[], &[]);
    let check = |key: &str| {
        let answer = server.post("/v1/check", &format!(r#"{{"limit":"api","key":"{key}"}}"#));
        assert_eq!(answer.status, 200, "{}", answer.body);
    };
    for key in ["alice@example.com:1", "tenant:1", "user:1", "1", "bob:1"] {
        check(key);
    }
    assert_eq!(server.get("/v1/gate/api/192.0.2.1?as=ip").status, 200);
    let metrics = server.get("/metrics").body;
    let mut named: Vec<String> = metrics
        .lines()
        .filter(|line| line.starts_with("rate_limiter_decisions_total{") && line.contains("limiter=\"api\""))
        .filter_map(|line| {
            let namespace = line.split("namespace=\"").nth(1)?.split('"').next()?;
            Some(format!("{namespace} {}", line.rsplit(' ').next()?))
        })
        .collect();
    named.sort();
    // The policy has an override for `user:vip`.
    assert_eq!(named, ["default 1", "ip 1", "other 2", "tenant 1", "user 1"], "{metrics}");
    assert!(!metrics.contains("alice") && !metrics.contains("bob"), "{metrics}");
}
