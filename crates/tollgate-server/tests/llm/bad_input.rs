//! Requests that are wrong: a clear error in the provider's own shape, and nothing charged.

use tollgate_testkit::provider::{Provider, openai};

use crate::{chat, gateway, left};

#[test]
fn what_is_wrong_is_said_in_the_providers_shape() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "llm.unknown_model = 'refuse'\n[llm.models.gpt-4o]\nrpm = 10");
    let ok = r#"{"model":"gpt-4o","messages":[]"#;
    for (body, status, param) in [
        ("".to_owned(), 400, None),
        ("{".to_owned(), 400, None),
        ("\u{0}".to_owned(), 400, None),
        ("[]".to_owned(), 400, None),
        (r#"{"messages":[]}"#.to_owned(), 400, Some("model")),
        (r#"{"model":"gpt-4o"}"#.to_owned(), 400, Some("messages")),
        (r#"{"model":"gpt-4o","model":"x","messages":[]}"#.to_owned(), 400, None),
        (format!("{ok},\"max_tokens\":-5}}"), 400, Some("max_tokens")),
        (format!("{ok},\"max_tokens\":99999999999999999999}}"), 400, Some("max_tokens")),
        (format!("{ok},\"stream\":\"yes\"}}"), 400, Some("stream")),
        (r#"{"model":"nobody","messages":[]}"#.to_owned(), 404, None),
    ] {
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!(answer.status, status, "{body}: {answer:?}");
        let error: serde_json::Value =
            serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error}: {answer:?}"));
        assert_eq!(error["error"]["param"].as_str(), param, "{body}: {error}");
        assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        let answer = server.post("/v1/messages", &body);
        let error: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
        assert_eq!(
            (&error["type"], error["error"]["message"].is_string()),
            (&"error".into(), true),
            "{error}"
        );
    }
    assert!(provider.arrivals().is_empty());
    assert_eq!(left(&server, "llm.gpt-4o.rpm"), 10);
    assert_eq!(server.get("/v1/chat/completions").status, 405);
    // A model of another provider's route.
    let answer = server.post("/v1/messages", r#"{"model":"gpt-4o","max_tokens":5,"messages":[]}"#);
    assert!(answer.status == 400 && answer.body.contains("/v1/chat/completions"), "{answer:?}");
}

#[test]
fn a_body_that_is_too_long_is_refused_before_it_is_sent() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10");
    let mut connection = server.connect();
    let length = 33 * 1024 * 1024;
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    connection.send(head.as_bytes()).expect("sent");
    let answer = connection.receive(false).expect("an answer");
    assert_eq!(answer.status, 413, "{answer:?}");
    // A megabyte passes, and is counted off the threads that serve others.
    let long = chat(2_000_000, "").replace("\"hi\"", &format!("\"{}\"", "word ".repeat(200_000)));
    assert_eq!(server.post("/v1/chat/completions", &long).status, 200);
    assert_eq!(server.post("/v1/check", &"x".repeat(70_000)).status, 413, "other routes are as they were");
}

#[test]
fn without_a_section_there_is_no_gateway() {
    let server = tollgate_testkit::tollgate::Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).start();
    assert_eq!(server.post("/v1/chat/completions", "{}").status, 404);
    assert_eq!(server.get("/v1/models").status, 404);
}
