//! What a call is charged once it has ended.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Duration;

use serde_json::json;
use tollgate_testkit::http::Answer;
use tollgate_testkit::provider::{Provider, Reply, Step, anthropic, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, trail, until};

#[test]
fn b1_what_was_not_used_is_free_again_and_the_trail_says_what_was() {
    let provider = Provider::start(openai);
    let server =
        gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let body =
        chat(900, "").replace("\"input_tokens\":\"8\"", "\"input_tokens\":\"8\",\"output_tokens\":\"12\"");
    for _ in 0..3 {
        assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
    }
    until("all is settled", || left(&server, "llm.gpt-4o.tpm") == 940);
    until("the trail is written", || {
        trail(&server).iter().filter(|line| line["status"] == "success").count() == 3
    });
    let line = &trail(&server)[0];
    for (field, value) in [
        ("model", json!("gpt-4o")),
        ("agent_id", json!("default")),
        ("input_tokens", json!(8)),
        ("output_tokens", json!(12)),
        ("total_tokens", json!(20)),
        ("attempt", json!(1)),
        ("estimated_input", json!(8)),
        ("reserved", json!(900)),
        ("cached_tokens", json!(0)),
        ("source", json!("reported")),
        ("status", json!("success")),
    ] {
        assert_eq!(line[field], value, "{field} in {line}");
    }
    assert!(line["timestamp"].as_str().is_some_and(|at| at.ends_with('Z')), "{line}");
    assert!(
        !std::fs::read_to_string(server.home().join("logs/gateway/rate_limits.jsonl"))
            .unwrap()
            .contains("\"hi\"")
    );
}

#[test]
fn b5_an_answer_without_usage_is_counted_from_its_text() {
    let provider = Provider::start(|_| {
        Reply::json(
            200,
            &json!({ "choices": [{ "message": { "role": "assistant", "content": "hello world" } }] }),
        )
    });
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\ntpm = 1000");
    assert_eq!(server.post("/v1/chat/completions", &chat(500, "")).status, 200);
    until("it is settled", || left(&server, "llm.gpt-4o.tpm") == 1_000 - 8 - 2);
    until("the trail is written", || trail(&server).len() == 1);
    assert_eq!(trail(&server)[0]["source"], "estimated");
}

#[test]
fn b6_the_body_that_is_forwarded_is_the_callers() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 100000");
    let body = "{ \"model\" : \"gpt-4o\",\"messages\":[],\"max_tokens\":1, \"max_completion_tokens\":10000,\"x\":1.50,\"é\":\"\\u00e9\" }";
    assert_eq!(server.post("/v1/chat/completions", body).status, 200);
    let arrival = &provider.arrivals()[0];
    assert_eq!((arrival.raw.as_str(), arrival.path.as_str()), (body, "/v1/chat/completions"));
}

/// A head that says 200, some bytes, and the end of the connection.
fn cut_after(bytes: &[u8]) -> Reply {
    Reply { status: 200, headers: Vec::new(), steps: vec![Step::Send(bytes.to_vec()), Step::Cut] }
}

/// The error of a call whose upstream did not answer, as its provider would say it.
fn assert_is_bad_gateway(answer: &Answer, kind: &str) {
    assert_eq!((answer.status, answer.field("x-should-retry")), (502, Some("false")), "{answer:?}");
    let error: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(error["error"]["type"], kind, "{error}");
    assert!(
        error["error"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("broke off") || text.contains("did not answer"))
    );
}

/// Of a short answer nothing is passed on before it is there, so the client gets an error that it can read, on a connection that goes on.
#[test]
fn an_answer_that_breaks_off_before_it_began_is_an_error_in_the_providers_shape() {
    for (kind, path, expected) in
        [("openai", "/v1/chat/completions", "server_error"), ("anthropic", "/v1/messages", "api_error")]
    {
        for bytes in ["", "{", "{\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":5}"] {
            let provider = Provider::start(move |_| {
                cut_after(bytes.as_bytes()).header("content-type: application/json")
            });
            let server = gateway(
                &provider,
                kind,
                "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 10\ninput_tpm = 1000",
            );
            assert_is_bad_gateway(&server.post(path, &chat(500, "")), expected);
            // It may have run: it counts as it was reserved.
            until("it is settled", || left(&server, "llm.gpt-4o.input_tpm") < 1_000);
            assert_eq!((left(&server, "llm.gpt-4o.rpm"), provider.arrivals().len()), (9, 1), "{kind}");
            until("the trail is written", || trail(&server).len() == 1);
            let line = &trail(&server)[0];
            let reason = "the upstream broke off before its answer began";
            assert_eq!((&line["status"], &line["reason"]), (&json!("error"), &json!(reason)), "{line}");
        }
    }
}

/// The same where it falls silent.
#[test]
fn an_answer_that_falls_silent_before_its_end_is_an_error_in_the_providers_shape() {
    let provider = Provider::start(|_| {
        let steps = vec![Step::Send(b"{".to_vec()), Step::Pause(Duration::from_secs(60))];
        Reply { status: 200, headers: Vec::new(), steps }
    });
    let config = format!(
        "[llm.models.gpt-4o]\nupstream = 'up'\ntpm = 1000\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\n\
         api_key = 'x'\ntimeout = '300ms'\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
    let answer = server.post("/v1/chat/completions", &chat(500, ""));
    assert_eq!((answer.status, answer.field("x-should-retry")), (504, Some("false")), "{answer:?}");
    assert_eq!(left(&server, "llm.gpt-4o.tpm"), 500);
}

#[test]
fn an_upstream_that_misbehaves_leaves_the_quota_true() {
    let whole = |status: u16, body: &'static str| {
        move || Reply { status, headers: Vec::new(), steps: vec![Step::Send(body.as_bytes().to_vec())] }
    };
    type Make = Box<dyn Fn() -> Reply + Send + Sync>;
    let cases: Vec<(&str, Make, u16, u64)> = vec![
        ("garbage", Box::new(whole(200, "<html>")), 200, 500),
        (
            "a lie about usage",
            Box::new(whole(200, r#"{"usage":{"prompt_tokens":99999999999999,"completion_tokens":1}}"#)),
            200,
            500,
        ),
        ("a refusal", Box::new(whole(404, r#"{"error":{"message":"no"}}"#)), 404, 1_000),
        ("a failure", Box::new(whole(500, "{}")), 500, 500),
        ("nothing", Box::new(|| cut_after(b"")), 502, 500),
        ("half of a short answer", Box::new(|| cut_after(b"{\"choices\":[{\"message\":")), 502, 500),
        // Some of it has been passed on, so it breaks off for the client as well.
        ("half of a long answer", Box::new(|| cut_after(&[b' '; 100_000])), 0, 500),
        ("another protocol", Box::new(whole(101, "")), 502, 500),
    ];
    for (name, reply, status, expected) in cases {
        let provider = Provider::start(move |_| reply());
        let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 1000");
        let mut connection = server.connect();
        let lines = format!("content-type: application/json\r\ncontent-length: {}\r\n", chat(500, "").len());
        let request =
            format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{lines}\r\n{}", chat(500, ""));
        connection.send(request.as_bytes()).expect("sent");
        match connection.receive(false) {
            Ok(answer) if status == 502 => assert_is_bad_gateway(&answer, "server_error"),
            Ok(answer) => assert_eq!(answer.status, status, "{name}: {answer:?}"),
            Err(_) => assert_eq!(status, 0, "{name}"),
        }
        until(name, || left(&server, "llm.gpt-4o.tpm") == expected);
        assert_eq!(provider.arrivals().len(), 1, "{name}");
    }
}

/// A stream of which something could not be read may have had more than was counted, so it stays charged as reserved; a lie about usage hides no text.
#[test]
fn a_stream_that_lies_or_cannot_be_read_gives_nothing_unproven_back() {
    const WORDS: &str = r#""choices":[{"index":0,"delta":{"content":"hello world"}}]"#;
    let cases = [
        (format!("data: {{{WORDS}}}\n\ndata: [DONE]\n\n"), 1_000 - 8 - 2),
        (format!("data: {{{WORDS},\"usage\":{{\"prompt_tokens\":-9}}}}\n\ndata: [DONE]\n\n"), 1_000 - 8 - 2),
        (format!("data: {{{WORDS}}}\n\ndata: <html>\n\n"), 500),
        (format!("data: {{{WORDS}}}\r\rdata: [DONE]\r\r"), 500),
    ];
    let streams: Vec<String> = cases.iter().map(|(stream, _)| stream.clone()).collect();
    let provider = Provider::start(move |arrival| Reply::events([streams[arrival.number].clone()]));
    for (number, (stream, expected)) in cases.iter().enumerate() {
        let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 1000");
        let asked = ",\"stream\":true,\"stream_options\":{\"include_usage\":true}";
        let answer = server.post("/v1/chat/completions", &chat(500, asked));
        assert_eq!((answer.status, &answer.body), (200, stream), "{number}");
        until(stream, || left(&server, "llm.gpt-4o.tpm") == *expected);
    }
}

#[test]
fn an_upstream_that_is_not_there_costs_nothing() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let config = std::fs::read_to_string(server.home().join("tollgate.toml")).expect("a config");
    let gone = format!("http://127.0.0.1:{}/v1", tollgate_testkit::free_port());
    server.reload(&config.replace(&format!("http://{}/v1", provider.address()), &gone));
    let answer = server.post("/v1/chat/completions", &chat(500, ""));
    assert_eq!((answer.status, answer.field("x-should-retry")), (502, Some("false")), "{answer:?}");
    assert_eq!((left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")), (10, 1_000));
}

/// A provider that is away for a moment, as in a deployment: nothing was sent, so nothing is repeated.
#[test]
fn an_upstream_that_comes_back_is_asked_again() {
    let port = tollgate_testkit::free_port();
    let config = format!(
        "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://127.0.0.1:{port}/v1'\n\
         api_key = 'x'\n[limits.x]\nunlimited = true\n"
    );
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
    let answer = std::thread::scope(|scope| {
        let asked = scope.spawn(|| server.post("/v1/chat/completions", &chat(500, "")));
        let failed = "tollgate_llm_attempts_total{model=\"gpt-4o\",outcome=\"failed\"}";
        until("it was tried", || server.get("/metrics").body.contains(failed));
        let listener = TcpListener::bind(("127.0.0.1", port)).expect("the port is free");
        listener.set_nonblocking(true).expect("set");
        let mut accepted = None;
        until("it is tried again", || {
            accepted = listener.accept().ok();
            accepted.is_some()
        });
        let (mut stream, _) = accepted.expect("a call");
        stream.set_nonblocking(false).expect("set");
        let mut read = [0; 8_192];
        assert_ne!(stream.read(&mut read).expect("a request"), 0);
        let body = r#"{"usage":{"prompt_tokens":8,"completion_tokens":2},"choices":[]}"#;
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("answered");
        asked.join().expect("an answer")
    });
    assert_eq!(answer.status, 200, "{answer:?}");
    until("it is settled", || left(&server, "llm.gpt-4o.tpm") == 990);
    assert_eq!(left(&server, "llm.gpt-4o.rpm"), 9, "what was not sent is no request");
}

#[test]
fn anthropics_messages_are_settled_with_their_own_usage() {
    let provider = Provider::start(anthropic);
    let server = gateway(
        &provider,
        "anthropic",
        "[llm.models.claude-x]\nrpm = 10\ninput_tpm = 1000\noutput_tpm = 1000",
    );
    let body = r#"{"model":"claude-x","max_tokens":50,"messages":[{"role":"user","content":"hi"}],"metadata":{"input_tokens":"30"}}"#;
    let lines = ["content-type: application/json", "anthropic-version: 2023-06-01"];
    for streamed in ["", ",\"stream\":true"] {
        let body = body.replace(",\"metadata\"", &format!("{streamed},\"metadata\""));
        let answer = server.ask("POST", "/v1/messages", &lines, &body);
        assert_eq!(answer.status, 200, "{answer:?}");
        assert!(answer.field("anthropic-ratelimit-input-tokens-remaining").is_some(), "{answer:?}");
    }
    until("both are settled", || {
        (left(&server, "llm.claude-x.input_tpm"), left(&server, "llm.claude-x.output_tpm")) == (940, 900)
    });
    assert_eq!(provider.arrivals()[0].header("x-api-key"), Some("provider-key"));
    assert_eq!(provider.arrivals()[0].path, "/v1/messages");
}

/// The call takes longer than the ten seconds that other requests have.
#[test]
fn a_server_that_is_told_to_stop_lets_calls_end() {
    let provider = Provider::start(|arrival| {
        let reply = openai(arrival);
        let pause = Duration::from_secs(12) / u32::try_from(reply.steps.len()).expect("few");
        reply.paced(pause)
    });
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\ntpm = 1000");
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| server.post("/v1/chat/completions", &chat(100, ",\"stream\":true")));
        until("it has arrived", || provider.arrivals().len() == 1);
        let ended = server.stop();
        assert_eq!(ended.code, Some(0), "{}", ended.output);
        assert!(asked.join().expect("an answer").body.ends_with("data: [DONE]\n\n"));
    });
    assert_eq!(trail(&server).len(), 1);
}
