//! Requests that are wrong: a clear error in the provider's own shape, and nothing charged.

use tollgate_testkit::provider::{Provider, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, until};

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
        (format!("{ok},\"max_tokens\":100000001}}"), 400, Some("max_tokens")),
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

/// The same on the routes whose bodies have `input`.
#[test]
fn what_is_wrong_with_input_is_said_in_the_providers_shape() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.unknown_model = 'refuse'\n[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000",
    );
    let ok = r#"{"model":"gpt-4o","input":"hi""#;
    let long = format!("{ok},\"instructions\":\"{}\"}}", "word ".repeat(2_000));
    for path in ["/v1/responses", "/v1/embeddings"] {
        for (body, status, param) in [
            ("".to_owned(), 400, None),
            ("{".to_owned(), 400, None),
            ("\u{0}".to_owned(), 400, None),
            ("[]".to_owned(), 400, None),
            ("\"hi\"".to_owned(), 400, None),
            (r#"{"input":"hi"}"#.to_owned(), 400, Some("model")),
            (r#"{"model":"","input":"hi"}"#.to_owned(), 400, Some("model")),
            (r#"{"model":7,"input":"hi"}"#.to_owned(), 400, None),
            (format!("{ok},\"input\":\"hi\"}}"), 400, None),
            (format!("{ok},\"max_output_tokens\":-5}}"), 400, Some("max_output_tokens")),
            (format!("{ok},\"max_output_tokens\":1.5}}"), 400, Some("max_output_tokens")),
            (format!("{ok},\"max_output_tokens\":100000001}}"), 400, Some("max_output_tokens")),
            (format!("{ok},\"stream\":\"yes\"}}"), 400, Some("stream")),
            (format!("{ok},\"x\":{}}}", "[".repeat(100_000)), 400, None),
            (r#"{"model":"nobody","input":"hi"}"#.to_owned(), 404, None),
            (long.clone(), 400, None),
        ] {
            let answer = server.post(path, &body);
            let name = format!("{path}: {}", &body[..body.len().min(80)]);
            assert_eq!(answer.status, status, "{name}: {answer:?}");
            let error: serde_json::Value =
                serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error}: {answer:?}"));
            assert_eq!(error["error"]["param"].as_str(), param, "{name}: {error}");
            assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        }
    }
    let missing = server.post("/v1/embeddings", r#"{"model":"gpt-4o"}"#);
    assert!(missing.status == 400 && missing.body.contains("input is missing"), "{missing:?}");
    assert!(provider.arrivals().is_empty());
    assert_eq!((left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")), (10, 1_000));
}

/// `/v1/llm/check` takes the body of any route, and reserves for it what the route would.
#[test]
fn a_check_takes_the_bodies_of_all_routes() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.default_output_tokens = 70\n[llm.models.gpt-4o]\nupstream = 'up'\nrpm = 10\n\
         [llm.models.claude-x]\nupstream = 'other'\nrpm = 10\n[llm.upstreams.other]\nkind = 'anthropic'\nbase_url = 'http://127.0.0.1:9'\napi_key = 'x'",
    );
    for (body, input, output) in [
        (r#"{"model":"gpt-4o","messages":[{"role":"user","content":"hi"}],"max_tokens":20}"#, 8, 20),
        (r#"{"model":"gpt-4o","input":"hi","max_output_tokens":20}"#, 4, 20),
        (r#"{"model":"gpt-4o","input":[{"role":"user","content":"hi"}]}"#, 8, 70),
        (r#"{"model":"text-embedding-3-small","input":["hello world","hi"]}"#, 3, 0),
        (r#"{"model":"text-embedding-3-small","input":"hello world"}"#, 2, 0),
    ] {
        let reported = check(&server, body);
        assert_eq!(reported["can_proceed"], true, "{body}: {reported}");
        let tokens = (reported["input_tokens"].as_u64(), reported["reserved_tokens"].as_u64());
        assert_eq!(tokens, (Some(input), Some(input + output)), "{body}: {reported}");
    }
    // The cap bounds what is guessed for a model of Anthropic's, whose upstream is enough to know it by.
    let body = r#"{"model":"claude-x","max_tokens":5000,"messages":[{"role":"user","content":"hi"}]}"#;
    let reported = check(&server, body);
    let more = reported["reserved_tokens"]
        .as_u64()
        .zip(reported["input_tokens"].as_u64())
        .map(|(all, input)| all - input);
    assert_eq!(more, Some(70), "{reported}");
    let nothing = server.post("/v1/llm/check", r#"{"model":"gpt-4o"}"#);
    assert!(nothing.status == 400 && nothing.body.contains("messages is missing"), "{nothing:?}");
    assert!(provider.arrivals().is_empty() && left(&server, "llm.gpt-4o.rpm") == 10);
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

/// What a request would reserve.
fn check(server: &Tollgate, body: &str) -> serde_json::Value {
    let answer = server.post("/v1/llm/check", body);
    assert_eq!(answer.status, 200, "{answer:?}");
    serde_json::from_str(&answer.body).expect("JSON")
}

#[test]
fn contents_of_every_shape_are_counted_and_passed_on() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100\ntpm = 1000000");
    let body = |content: &str, more: &str| {
        format!(
            r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":{content}}}],"max_tokens":10{more}}}"#
        )
    };
    let text = r#"{"type":"text","text":"hello world"}"#;
    for (content, tokens) in [
        ("null".to_owned(), 7),
        ("\"hello world\"".to_owned(), 9),
        ("[]".to_owned(), 7),
        (format!("[{text}]"), 9),
        (format!("[{text},{{\"type\":\"image_url\",\"image_url\":{{\"url\":\"data:\"}}}}]"), 9 + 765),
        (r#"[{"type":"image_url","image_url":{"url":"x","detail":"low"}}]"#.to_owned(), 7 + 85),
        (r#"[{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}]"#.to_owned(), 7 + 1_000),
        (r#"[{"type":"file","file":{"file_id":"f"}}]"#.to_owned(), 7 + 3_000),
        ("7".to_owned(), 8),
        ("{}".to_owned(), 8),
    ] {
        let reported = check(&server, &body(&content, ""));
        assert_eq!(reported["input_tokens"], tokens, "{content}");
        assert_eq!(reported["reserved_tokens"], tokens + 10, "{content}");
        assert_eq!(server.post("/v1/chat/completions", &body(&content, "")).status, 200, "{content}");
        assert!(provider.arrivals().last().is_some_and(|arrival| arrival.raw == body(&content, "")));
    }
    // Of two caps that disagree, the larger one is what may be used.
    for (caps, output) in [
        (r#","max_completion_tokens":700"#, 700),
        (r#","max_completion_tokens":3"#, 10),
        (r#","max_completion_tokens":700,"n":3"#, 2_100),
    ] {
        assert_eq!(check(&server, &body("null", caps))["reserved_tokens"], 7 + output, "{caps}");
    }
}

/// An image of 30 MB in a body counts a stated number of tokens, as any other, and is passed on byte by byte: in a message, and in what a tool has answered.
#[test]
fn images_of_30_mb_count_as_images() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100\ntpm = 3000");
    let image = "QUJD".repeat(7_500_000);
    let of_chat = format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{image}"}}}}]}}],"max_tokens":10,"stream":true}}"#
    );
    let of_responses = format!(
        r#"{{"model":"gpt-4o","input":[{{"type":"function_call_output","call_id":"c","output":[{{"type":"input_image","image_url":"data:image/png;base64,{image}"}}]}}],"max_output_tokens":10}}"#
    );
    for (path, body, input) in
        [("/v1/chat/completions", &of_chat, 3 + 1 + 765 + 3), ("/v1/responses", &of_responses, 3 + 765 + 3)]
    {
        assert_eq!(check(&server, body)["input_tokens"], input, "{path}");
        let answer = server.post(path, body);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        let arrived = provider.arrivals().pop().expect("it arrived");
        // The usage of a stream is asked for.
        let asked = arrived.raw.replace("\"stream_options\":{\"include_usage\":true},", "");
        assert!(asked == *body, "{path}: {} and {} bytes", asked.len(), body.len());
    }
}

#[test]
fn tools_with_huge_schemas_are_counted_as_they_are_sent() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 100000");
    let properties: Vec<String> =
        (0..40_000).map(|number| format!(r#""field_{number}":{{"type":"string"}}"#)).collect();
    let tools = format!(
        r#"[{{"type":"function","function":{{"name":"f","parameters":{{"type":"object","properties":{{{}}}}}}}}}]"#,
        properties.join(",")
    );
    let body = chat(100, &format!(",\"tools\":{tools}"));
    let answer = server.post("/v1/chat/completions", &body);
    assert_eq!((answer.status, answer.field("x-should-retry")), (400, Some("false")), "{answer:?}");
    assert!(answer.body.contains("/ 100000 TPM"), "{}", answer.body);
    assert!(provider.arrivals().is_empty() && left(&server, "llm.gpt-4o.tpm") == 100_000);
    let deep = chat(100, &format!(",\"tools\":{}{}", "[".repeat(100_000), "]".repeat(100_000)));
    assert_eq!(server.post("/v1/chat/completions", &deep).status, 400, "nested without end");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200, "it goes on");
}

#[test]
fn an_unknown_model_passes_with_one_warning() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 1");
    let body = chat(100, "").replace("gpt-4o", "some-new-model");
    for _ in 0..3 {
        assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
    }
    let warnings = || server.output().matches("a model is called that has no limits").count();
    until("it is logged", || warnings() > 0);
    assert_eq!((warnings(), provider.arrivals().len()), (1, 3), "{}", server.output());
}

#[test]
fn a_body_of_33_mib_without_a_length_is_refused_too() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10");
    let mut connection = server.connect();
    connection
        .send(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        .expect("sent");
    let chunk = [format!("{:x}\r\n", 1024 * 1024).as_bytes(), &vec![b'x'; 1024 * 1024], b"\r\n"].concat();
    for _ in 0..33 {
        // It may have answered and stopped reading.
        if connection.send(&chunk).is_err() {
            break;
        }
    }
    let answer = connection.receive(false).expect("an answer");
    assert_eq!(answer.status, 413, "{answer:?}");
    let error: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(error["error"]["type"], "request_too_large", "in the shape of the route");
    assert!(provider.arrivals().is_empty());
}

#[test]
fn names_that_become_the_same_limit_are_refused_at_the_start() {
    let home = tempfile::tempdir().expect("a directory");
    let config = "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n\
                  [llm.models.'GPT/4']\nrpm = 5\n[llm.models.'gpt-4']\nrpm = 5\n";
    std::fs::write(home.path().join("tollgate.toml"), config).expect("written");
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_tollgate"));
    let mut command = tollgate_testkit::tollgate::program(binary, home.path());
    let output = command.args(["validate", "tollgate.toml"]).output().expect("it runs");
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("shares the limit gpt-4 with GPT/4"), "{said}");
}
