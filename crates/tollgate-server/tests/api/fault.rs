//! What is wrong with a call: the status, and words that help. Nothing is charged, nothing breaks.

use crate::server::{self, Tollgate};

/// A request that is refused: its status, and what the problem says.
fn check(server: &Tollgate, method: &str, path: &str, lines: &[&str], body: &str, status: u16, said: &str) {
    let answer = server.ask(method, path, lines, body);
    let shown = &body[..body.len().min(100)];
    assert_eq!(answer.status, status, "{method} {path} {shown}: {}", answer.body);
    assert_eq!(answer.field("content-type"), Some("application/problem+json"), "{method} {path}");
    let problem: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(problem["status"], status, "{method} {path}");
    let detail = problem["detail"].as_str().expect("a detail");
    assert!(detail.contains(said), "{method} {path} {shown}: {detail}");
}

fn malformed(server: &Tollgate, path: &str, body: &str, said: &str) {
    check(server, "POST", path, &["content-type: application/json"], body, 400, said);
}

#[test]
fn a_body_that_makes_no_sense_is_told_what_would() {
    let server = server::start();
    for (body, said) in [
        ("", "EOF"),
        ("null", "it must be an object, not null"),
        ("[]", "it must be an object, not an array"),
        (r#"["api","k",1]"#, "it must be an object"),
        ("{}", "write either"),
        (r#"{"limit":"api"}"#, "write either"),
        (r#"{"limit":"api","key":"k"} x"#, "trailing"),
        (r#"{"limit":"api","key":"k","kind":1}"#, "unknown field"),
        (r#"{"limit":"api","limit":"api","key":"k"}"#, "the field `limit` is there twice"),
        (r#"{"limit":"api","key":"k","cost":0}"#, "at least 1"),
        (r#"{"limit":"api","key":"k","cost":-1}"#, "`cost` must be a whole number from 1"),
        (r#"{"limit":"api","key":"k","cost":1.5}"#, "`cost` must be a whole number"),
        (r#"{"limit":"api","key":"k","cost":1e3}"#, "`cost` must be a whole number"),
        (r#"{"limit":"api","key":"k","cost":"1"}"#, "not a string"),
        (r#"{"limit":"api","key":"k","cost":18446744073709551616}"#, "`cost` must be a whole number"),
        (r#"{"limit":"api","key":""}"#, "the key is empty"),
        (r#"{"limit":"api","key":"a:b:c:d"}"#, "did you mean `a:b%3Ac%3Ad`?"),
        (r#"{"limit":"api","key":"a\u0000b"}"#, "control character"),
        (r#"{"limit":"api","key":"k","ttl_ms":1}"#, "is for /v1/reserve"),
        (r#"{"charges":[]}"#, "0 entries"),
    ] {
        malformed(&server, "/v1/check", body, said);
    }
    let one = r#"{"limit":"api","key":"k"}"#;
    malformed(&server, "/v1/check", &format!(r#"{{"charges":[{}]}}"#, vec![one; 65].join(",")), "65 entries");
    let many = vec![one; 1_025].join(",");
    malformed(&server, "/v1/checks", &format!(r#"{{"checks":[{many}]}}"#), "1025 entries");
    malformed(&server, "/v1/checks", r#"{"checks":[]}"#, "0 entries");
    malformed(&server, "/v1/reserve", r#"{"limit":"api","key":"k","ttl_ms":0}"#, "ttl_ms");
    malformed(&server, "/v1/reserve", r#"{"limit":"api","key":"k","ttl_ms":86400001}"#, "ttl_ms");
    malformed(&server, "/v1/settle", r#"{"reservation":"x","actual":1}"#, "32 hexadecimal digits");
    let zeros = format!(r#"{{"reservation":"{}","actual":1}}"#, "0".repeat(32));
    malformed(&server, "/v1/settle", &zeros, "no reservation is named by zeros alone");
    let id = "0123456789abcdef0123456789abcdef";
    let negative = format!(r#"{{"reservation":"{id}","actual":-1}}"#);
    malformed(&server, "/v1/settle", &negative, "`actual` must be a whole number from 0");
    let negative = format!(r#"{{"reservation":"{id}","actual":{{"api":-1}}}}"#);
    malformed(&server, "/v1/settle", &negative, "`actual.api` must be a whole number from 0");
    malformed(&server, "/v1/settle", &format!(r#"{{"reservation":"{id}"}}"#), "ask /v1/cancel");
    malformed(&server, "/v1/cancel", &format!(r#"{{"reservation":"{id}","actual":1}}"#), "is for /v1/settle");
    malformed(&server, "/v1/check", &format!(r#"{{"limit":{}"#, "[".repeat(60_000)), "the body");
    let long = format!(r#"{{"limit":"api","key":"{}"}}"#, "k".repeat(1_025));
    malformed(&server, "/v1/check", &long, "1024");
    let left = server.get("/v1/status?limit=api&key=k").body;
    assert!(left.contains("\"used\":0"), "something was charged: {left}");
}

/// In a batch of a thousand checks, "unknown limit" alone helped nobody.
#[test]
fn the_wrong_one_of_several_is_named() {
    let server = server::start();
    let good = r#"{"limit":"api","key":"k"}"#;
    let json = ["content-type: application/json"];
    for (wrong, status, field, said) in [
        (r#"{"limit":"nope","key":"k"}"#, 404, ".limit: ", "unknown limit"),
        (r#"{"limit":"A b","key":"k"}"#, 400, ".limit: ", "there can be no limit of this name"),
        (r#"{"limit":"api","key":""}"#, 400, ".key: ", "the key is empty"),
        (r#"{"limit":"api","key":{"namespace":"","key":"a"}}"#, 400, ".key: ", "empty"),
        (r#"{"limit":"api","key":"k","cost":0}"#, 400, ".cost: ", "must be at least 1"),
        (r#"{"limit":"api","key":"k","cost":-1}"#, 400, ".cost` must be", "a whole number"),
        (r#"{"limit":"api"}"#, 400, "`: ", "missing field `key`"),
        (r#"{"limit":"api","key":"k","costs":1}"#, 400, "`: ", "unknown field `costs`"),
        (r#"{"limit":"api","limit":"api","key":"k"}"#, 400, "`: ", "the field `limit` is there twice"),
        ("7", 400, "` must be", "an object"),
    ] {
        for (path, list) in [("/v1/checks", "checks"), ("/v1/check", "charges"), ("/v1/peek", "charges")] {
            let body = format!(r#"{{"{list}":[{good},{good},{wrong},{good}]}}"#);
            check(&server, "POST", path, &json, &body, status, said);
            check(&server, "POST", path, &json, &body, status, &format!("{list}[2]{field}"));
        }
    }
    let lease = r#"{"limit":"uploads","key":"k"}"#;
    malformed(
        &server,
        "/v1/checks",
        &format!(r#"{{"checks":[{good},{lease}]}}"#),
        "checks[1].limit: `uploads` is",
    );
    let left = server.get("/v1/status?limit=api&key=k").body;
    assert!(left.contains("\"used\":0"), "something was charged: {left}");
}

/// A name that no limit can have reached the store with a settlement, where PostgreSQL took the zero in it for a fault of its own.
#[test]
fn a_name_that_no_limit_can_have_is_refused_everywhere() {
    let server = server::start();
    let id = "0123456789abcdef0123456789abcdef";
    let long = "a".repeat(65);
    for name in ["a\\u0000b", "A", "a b", "a/b", "\\u00e4", "", &long, "'; drop table x; --"] {
        let said = "there can be no limit of this name";
        let key = format!(r#"{{"limit":"{name}","key":"k"}}"#);
        malformed(&server, "/v1/check", &key, said);
        malformed(&server, "/v1/peek", &key, said);
        malformed(&server, "/v1/reserve", &key, said);
        malformed(&server, "/v1/reset", &key, said);
        malformed(&server, "/v1/checks", &format!(r#"{{"checks":[{key}]}}"#), said);
        let settle = format!(r#"{{"reservation":"{id}","actual":{{"api":1,"{name}":1}}}}"#);
        malformed(&server, "/v1/settle", &settle, said);
    }
    for name in ["a%00b", "A", "a%20b", "%ff", "%c3%a4"] {
        let said = "there can be no limit of this name";
        check(&server, "GET", &format!("/v1/gate/{name}/k"), &[], "", 400, said);
        check(&server, "GET", &format!("/v1/status?limit={name}&key=k"), &[], "", 400, said);
    }
    let many: Vec<String> = (0..65).map(|number| format!("\"l{number}\":1")).collect();
    let settle = format!(r#"{{"reservation":"{id}","actual":{{{}}}}}"#, many.join(","));
    malformed(&server, "/v1/settle", &settle, "names 65 limits; a charge has at most 64");
    for actual in ["-1", "1.5", "\"1\"", "null", "{\"api\":-1}", "{\"api\":1.5}", "18446744073709551616"] {
        let settle = format!(r#"{{"reservation":"{id}","actual":{actual}}}"#);
        malformed(&server, "/v1/settle", &settle, "the body");
    }
}

#[test]
fn a_time_to_live_has_a_bound_that_the_config_says() {
    let server = server::with(&format!("[server]\nmax_ttl = \"30s\"\n{}", server::POLICY), &[], &[]);
    let reserve = |ttl: &str| format!(r#"{{"limit":"api","key":"k"{ttl}}}"#);
    for ttl in ["", r#","ttl_ms":1"#, r#","ttl_ms":30000"#] {
        assert_eq!(server.post("/v1/reserve", &reserve(ttl)).status, 200, "{ttl}");
    }
    for ttl in [r#","ttl_ms":30001"#, r#","ttl_ms":18446744073709551615"#] {
        malformed(&server, "/v1/reserve", &reserve(ttl), "must be from 1 to 30000 (30s, server.max_ttl)");
    }
}

#[test]
fn a_question_that_is_cut_off_anywhere_is_no_question() {
    let server = server::start();
    let mut connection = server.connect();
    let whole = r#"{"charges":[{"limit":"api","key":{"namespace":"ip","key":"::1"},"cost":1}]}"#;
    for end in 0..whole.len() {
        let body = &whole[..end];
        let head = format!(
            "POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {end}\r\n\r\n"
        );
        connection.send(head.as_bytes()).unwrap();
        connection.send(body.as_bytes()).unwrap();
        let answer = connection.receive(false).unwrap();
        assert_eq!(answer.status, 400, "{body}: {}", answer.body);
    }
    let answer = connection.ask_with_body("POST", "/v1/check", &["content-type: application/json"], whole);
    assert!(answer.body.contains("\"remaining\":2"), "{}", answer.body);
}

#[test]
fn wrong_addresses_methods_and_kinds() {
    let server = server::start();
    let json = ["content-type: application/json"];
    let ask = r#"{"limit":"api","key":"k"}"#;
    for (method, path, lines, body, status, said) in [
        ("GET", "/nothing", &[] as &[&str], "", 404, "/openapi.json lists"),
        ("GET", "/v1/", &[], "", 404, "/openapi.json lists"),
        ("POST", "/v1/chekc", &json, ask, 404, "/openapi.json lists"),
        ("GET", "/v1/status?limit=apo&key=k", &[], "", 404, "did you mean `api`?"),
        ("GET", "/v1/status?limit=api", &[], "", 400, "/v1/status?limit=…&key=…"),
        ("GET", "/v1/status?limit=api&key=a:b:c:d", &[], "", 400, "did you mean `a:b%3Ac%3Ad`?"),
        (
            "POST",
            "/v1/check",
            &json,
            r#"{"limit":"nope","key":"k"}"#,
            404,
            "unknown limit `nope`; known: api",
        ),
        ("POST", "/v1/check", &json, r#"{"limit":"","key":"k"}"#, 400, "1 to 64 characters"),
        ("POST", "/v1/reset", &json, r#"{"limit":"nope","key":"k"}"#, 404, "unknown limit `nope`"),
        ("GET", "/v1/check", &[], "", 405, "answers to POST"),
        ("DELETE", "/v1/reset", &json, ask, 405, "answers to POST"),
        ("GET", "/v1/reload", &[], "", 405, "answers to POST"),
        ("POST", "/v1/limits", &json, ask, 405, "answers to GET, HEAD"),
        ("PUT", "/v1/gate/api/k", &json, ask, 405, "answers to GET, HEAD"),
        ("POST", "/v1/check", &[], ask, 415, "Content-Type: application/json"),
        ("POST", "/v1/check", &["content-type: text/plain"], ask, 415, "Content-Type: application/json"),
        ("POST", "/v1/check", &["content-type: application/jsonx"], ask, 415, "Content-Type"),
    ] {
        check(&server, method, path, lines, body, status, said);
    }
    let allowed = server.ask("PATCH", "/v1/check", &[], "");
    assert_eq!(allowed.field("allow"), Some("POST"));
    let known = server.post("/v1/check", r#"{"limit":"nope","key":"k"}"#).body;
    let expected = r#""known-limits":["api","login","watched","uploads","even","free","shut"]"#;
    assert!(known.contains(expected), "{known}");
    let kind = ["content-type: APPLICATION/json; charset=utf-8"];
    assert_eq!(server.ask("POST", "/v1/check", &kind, ask).status, 200);
}

#[test]
fn a_body_has_a_longest_length() {
    let server = server::start();
    let padded = |length: usize| {
        let ask = r#"{"limit":"api","key":"k"}"#;
        format!("{ask}{}", " ".repeat(length - ask.len()))
    };
    assert_eq!(server.post("/v1/check", &padded(64 * 1024)).status, 200);
    let json = ["content-type: application/json"];
    check(&server, "POST", "/v1/check", &json, &padded(64 * 1024 + 1), 413, "longer than 65536 bytes");
    // In chunks nobody says how long it will be.
    let mut connection = server.connect();
    connection
        .send(b"POST /v1/check HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        .unwrap();
    let chunk = format!("8000\r\n{}\r\n", " ".repeat(0x8000));
    for _ in 0..3 {
        // It may be refused, and hung up on, before all of it is sent.
        let _ = connection.send(chunk.as_bytes());
    }
    let answer = connection.receive(false).expect("an answer");
    assert_eq!(answer.status, 413, "{}", answer.body);
}
