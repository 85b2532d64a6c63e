//! Streams: what the client sees of them, and what becomes of a call whose stream does not end well.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;
use tollgate_testkit::provider::{Provider, Reply, Step, anthropic, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, trail, until};

/// Sends a request and reads up to some text; the connection is left open.
fn begin(server: &Tollgate, body: &str, up_to: &str) -> (TcpStream, String) {
    let mut stream = TcpStream::connect(server.http()).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).expect("sent");
    let mut read = Vec::new();
    let mut piece = [0; 4_096];
    while !String::from_utf8_lossy(&read).contains(up_to) {
        let length = stream.read(&mut piece).expect("an answer");
        assert_ne!(length, 0, "{}", String::from_utf8_lossy(&read));
        read.extend_from_slice(&piece[..length]);
    }
    (stream, String::from_utf8_lossy(&read).into_owned())
}

#[test]
fn c1_usage_is_asked_for_and_hidden_unless_the_client_asks() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 10000");
    for (options, seen) in [
        ("", 0),
        (",\"stream_options\":{\"include_usage\":true}", 1),
        (",\"stream_options\":{\"include_usage\":false}", 0),
        (",\"stream_options\":null", 0),
    ] {
        let answer = server.post("/v1/chat/completions", &chat(100, &format!(",\"stream\":true{options}")));
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.field("content-type"), Some("text/event-stream"));
        assert_eq!(answer.body.matches("\"choices\":[]").count(), seen, "{options}: {}", answer.body);
        assert!(
            answer.body.ends_with("data: [DONE]\n\n") && answer.body.contains(" there"),
            "{}",
            answer.body
        );
    }
    assert!(
        provider.arrivals().iter().all(|arrival| arrival.body["stream_options"]["include_usage"] == true)
    );
    until("all are settled by what was reported", || left(&server, "llm.gpt-4o.tpm") == 10_000 - 400);
}

/// More output than its limit: the answer ends when the provider's does, and the excess is a debt.
#[test]
fn c2_an_answer_ends_when_it_ends_and_not_when_it_is_settled() {
    let provider = Provider::start(|_| {
        let event =
            |name: &str, data: &str| format!("event: {name}\ndata: {{\"type\":\"{name}\",{data}}}\n\n");
        let start = event("message_start", r#""message":{"usage":{"input_tokens":9,"output_tokens":1}}"#);
        let more = (1..=15).map(move |step| {
            event("message_delta", &format!(r#""delta":{{}},"usage":{{"output_tokens":{}}}"#, 100 * step))
        });
        let stop = "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n".to_owned();
        Reply::events([start].into_iter().chain(more).chain([stop])).paced(Duration::from_millis(150))
    });
    let server = gateway(
        &provider,
        "anthropic",
        "llm.window = '9s'\n[llm.models.claude-x]\noutput_tpm = 1000\nrpm = 100",
    );
    let body = r#"{"model":"claude-x","max_tokens":5000,"messages":[],"stream":true}"#;
    let head =
        format!("POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let mut stream = TcpStream::connect(server.http()).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    stream.write_all(head.as_bytes()).expect("sent");
    let (mut read, mut piece) = (String::new(), [0; 4_096]);
    let mut stopped = None;
    while !read.ends_with("0\r\n\r\n") {
        let length = stream.read(&mut piece).expect("the rest");
        assert_ne!(length, 0, "{read}");
        read.push_str(&String::from_utf8_lossy(&piece[..length]));
        if stopped.is_none() && read.contains("event: message_stop") {
            stopped = Some(Instant::now());
        }
    }
    let late = stopped.expect("a whole stream").elapsed();
    assert!(late <= Duration::from_secs(1), "{late:?}");
    until("the excess is charged", || {
        server
            .get("/metrics")
            .body
            .contains("tollgate_llm_attempts_total{model=\"claude-x\",outcome=\"success\"} 1")
    });
    assert_eq!(left(&server, "llm.claude-x.output_tpm"), 0);
}

#[test]
fn c3_a_client_that_leaves_is_charged_for_what_was_streamed() {
    let provider = Provider::start(|arrival| {
        let word = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"}}]}\n\n".to_owned();
        let _ = arrival;
        Reply::events(std::iter::repeat_n(word, 500)).paced(Duration::from_millis(10))
    });
    let server = gateway(
        &provider,
        "openai",
        "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\ntpm = 1000\nconcurrency = 1",
    );
    let (stream, _) = begin(&server, &chat(900, ",\"stream\":true"), " word");
    assert_eq!((left(&server, "llm.gpt-4o.tpm"), left(&server, "llm.gpt-4o.concurrency")), (100, 0));
    drop(stream);
    until("the upstream is closed", || provider.cut() == 1);
    until("its place is free", || left(&server, "llm.gpt-4o.concurrency") == 1);
    until("the trail is written", || trail(&server).len() == 1);
    let line = &trail(&server)[0];
    let output = line["output_tokens"].as_u64().expect("a count");
    assert!((1..=200).contains(&output) && line["source"] == "estimated", "{line}");
    assert_eq!(line["status"], "left");
    assert_eq!(left(&server, "llm.gpt-4o.tpm"), 1_000 - 8 - output);
}

#[test]
fn c3_a_client_that_leaves_just_before_the_usage_is_charged_too() {
    let provider = Provider::start(|arrival| openai(arrival).paced(Duration::from_millis(150)));
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 1000");
    let (stream, _) = begin(&server, &chat(900, ",\"stream\":true"), "\"stop\"");
    drop(stream);
    // "Hello there" is two tokens; if the usage came first, it says 892.
    until("it is settled", || left(&server, "llm.gpt-4o.tpm") != 100);
    assert_eq!(left(&server, "llm.gpt-4o.tpm"), 1_000 - 8 - 2);
}

#[test]
fn c3_many_that_leave_leak_nothing() {
    let provider = Provider::start(|arrival| openai(arrival).paced(Duration::from_millis(20)));
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nconcurrency = 8\nrpm = 100000");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..125 {
                    drop(begin(&server, &chat(50, ",\"stream\":true"), "Hel"));
                }
            });
        }
    });
    until("all places are free", || left(&server, "llm.gpt-4o.concurrency") == 8);
    assert_eq!(provider.arrivals().len(), 1_000);
}

#[test]
fn c4_an_upstream_that_breaks_off_is_broken_off_for_the_client_and_charged_once() {
    let provider = Provider::start(|arrival| openai(arrival).cut_after(2));
    let server =
        gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    let (mut stream, read) = begin(&server, &chat(900, ",\"stream\":true"), "lo");
    let mut rest = Vec::new();
    // Either an error or an end without the last chunk: no client takes it for a whole answer.
    let _ = stream.read_to_end(&mut rest);
    let whole = read + &String::from_utf8_lossy(&rest);
    assert!(!whole.contains("0\r\n\r\n") && !whole.contains("[DONE]"), "{whole}");
    until("it is settled", || left(&server, "llm.gpt-4o.tpm") == 1_000 - 8 - 1);
    assert_eq!(
        (provider.arrivals().len(), left(&server, "llm.gpt-4o.rpm")),
        (1, 9),
        "nothing is tried again"
    );
    until("the trail is written", || trail(&server).len() == 1);
    assert_eq!(trail(&server)[0]["status"], "broken");
}

#[test]
fn c5_a_stream_that_begins_with_an_error_is_tried_again() {
    let error = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n";
    let provider = Provider::start(move |arrival| match arrival.number {
        0 => Reply::events([error.to_owned(), String::new()]),
        _ => anthropic(arrival),
    });
    let server = gateway(&provider, "anthropic", "[llm.models.claude-x]\nrpm = 10");
    let body =
        r#"{"model":"claude-x","max_tokens":50,"messages":[{"role":"user","content":"hi"}],"stream":true}"#;
    let answer = server.post("/v1/messages", body);
    assert!(answer.body.contains("message_stop") && !answer.body.contains("overloaded"), "{}", answer.body);
    assert_eq!((provider.arrivals().len(), left(&server, "llm.claude-x.rpm")), (2, 8));
}

#[test]
fn c5_an_error_after_content_is_passed_through() {
    let provider = Provider::start(|arrival| {
        let mut reply = anthropic(arrival);
        reply.steps.truncate(4);
        let error = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
        reply.steps.push(Step::Send(error.into()));
        reply
    });
    let server = gateway(&provider, "anthropic", "[llm.models.claude-x]\nrpm = 10");
    let body = r#"{"model":"claude-x","max_tokens":50,"messages":[],"stream":true}"#;
    assert!(server.post("/v1/messages", body).body.ends_with("\"overloaded_error\"}}\n\n"));
    assert_eq!(provider.arrivals().len(), 1);
}

#[test]
fn c6_a_client_that_leaves_the_line_costs_nothing() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 1000\nrpm = 10");
    assert_eq!(server.post("/v1/chat/completions", &chat(1_000, "")).status, 200);
    let body = chat(500, "");
    let mut stream = TcpStream::connect(server.http()).expect("connected");
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).expect("sent");
    let waiting = |count: &str| {
        server.get("/metrics").body.contains(&format!("tollgate_llm_queue{{model=\"gpt-4o\"}} {count}"))
    };
    until("it waits", || waiting("1"));
    drop(stream);
    until("it has left the line", || waiting("0"));
    assert_eq!((provider.arrivals().len(), left(&server, "llm.gpt-4o.rpm")), (1, 9));
}

#[test]
fn c7_bytes_pass_unchanged() {
    let pieces: Vec<Vec<u8>> = vec![
        b": comment\r\n\r\nevent: unknown\r\ndata: {\"x\" : [1.0e5, \"\\u00e9\"]}\r\n\r\n".to_vec(),
        "data: {\"choices\":[{\"delta\":{\"content\":\"h".into(),
        vec![0xc3],
        vec![0xa9, b'"'],
        b"}}]}\n\ndata: not json\n\n\n\n".to_vec(),
        b"data: [DONE]\n\ntrailing".to_vec(),
    ];
    let expected: Vec<u8> = pieces.concat();
    let provider = Provider::start(move |_| {
        let mut reply = Reply::events([]);
        reply.steps = pieces.iter().cloned().map(Step::Send).collect();
        reply.header("x-custom: kept")
    });
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 100000");
    for options in ["", ",\"stream_options\":{\"include_usage\":true}"] {
        let answer = server.post("/v1/chat/completions", &chat(100, &format!(",\"stream\":true{options}")));
        assert_eq!(answer.body.as_bytes(), expected, "{options}");
        assert_eq!(answer.field("x-custom"), Some("kept"));
    }
}

/// A client that leaves between the head of its answer and the first event has its line in the trail.
#[test]
fn c3_a_client_that_leaves_before_the_first_event_is_in_the_trail() {
    let provider = Provider::start(|arrival| {
        // What is reported shows when the head has arrived.
        openai(arrival).paced(Duration::from_secs(5)).header("x-ratelimit-remaining-requests: 20")
    });
    let server =
        gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 100\ntpm = 1000");
    let body = chat(900, ",\"stream\":true");
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut connection = server.connect();
    connection.send([head.as_bytes(), body.as_bytes()].concat().as_slice()).expect("sent");
    until("the head has arrived", || left(&server, "llm.gpt-4o.rpm") < 50);
    drop(connection);
    until("the trail is written", || trail(&server).len() == 1);
    let line = &trail(&server)[0];
    assert_eq!(
        (&line["status"], &line["reserved"], &line["attempt"]),
        (&json!("error"), &json!(900), &json!(1))
    );
    assert!(line["reason"].as_str().is_some_and(|reason| reason.contains("the client left")), "{line}");
    assert_eq!(left(&server, "llm.gpt-4o.tpm"), 100);
}

/// What comes before an error does not hide what the error says, in the same piece or in an earlier one.
#[test]
fn c5_an_error_behind_a_ping_is_understood() {
    const ERROR: &str = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n";
    const PING: &str = "event: ping\ndata: {\"type\":\"ping\"}\n\n";
    for pieces in [
        vec![format!("{PING}{ERROR}")],
        vec![PING.to_owned(), ERROR.to_owned()],
        vec![": nothing\n\n".to_owned(), PING.to_owned(), ERROR.to_owned()],
    ] {
        let sent = pieces.clone();
        let provider = Provider::start(move |arrival| match arrival.number {
            0 => Reply::events(sent.clone()).paced(Duration::from_millis(100)).header("retry-after-ms: 10"),
            _ => anthropic(arrival),
        });
        let server = gateway(&provider, "anthropic", "[llm.models.claude-x]\nrpm = 10");
        let body = r#"{"model":"claude-x","max_tokens":5,"messages":[],"stream":true}"#;
        let answer = server.post("/v1/messages", body);
        assert!(answer.status == 200 && answer.body.contains("message_stop"), "{pieces:?}: {answer:?}");
        assert_eq!(provider.arrivals().len(), 2, "{pieces:?}");
    }
}

/// An answer of which a part is passed on has the length of that part.
#[test]
fn c5_an_error_with_much_behind_it_is_a_whole_answer() {
    let error = "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"}}\n\n";
    let provider =
        Provider::start(move |_| Reply::events([format!("{error}{}", ": nothing\n".repeat(100_000))]));
    let server = gateway(&provider, "anthropic", "[llm.models.claude-x]\nrpm = 10");
    let body = r#"{"model":"claude-x","max_tokens":5,"messages":[],"stream":true}"#;
    let answer = server.post("/v1/messages", body);
    assert!(answer.status == 200 && answer.body.starts_with(error), "{}", answer.status);
    assert_eq!(provider.arrivals().len(), 1, "it is not sent again");
}

/// An upstream that compresses a stream, though it is asked not to: nothing of it can be read, so it is passed on as it comes, and stays
/// charged as reserved.
#[test]
fn c7_a_stream_that_is_compressed_passes_as_it_comes() {
    let provider = Provider::start(|_| {
        let mut reply = Reply::events([]).header("content-encoding: gzip");
        reply.steps = [b"\x1f\x8b\x08 first".to_vec(), b" last\xff\n\n".to_vec()]
            .into_iter()
            .flat_map(|piece| [Step::Send(piece), Step::Pause(Duration::from_millis(1_500))])
            .collect();
        reply
    });
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 1000");
    let (mut stream, head) = begin(&server, &chat(500, ",\"stream\":true"), "first");
    assert!(head.contains("content-encoding: gzip") && !head.contains("last"), "{head}");
    let mut rest = Vec::new();
    let mut piece = [0; 4_096];
    while !rest.ends_with(b"0\r\n\r\n") {
        let length = stream.read(&mut piece).expect("the rest");
        assert_ne!(length, 0);
        rest.extend_from_slice(&piece[..length]);
    }
    let is_whole = rest.windows(8).any(|window| window == b" last\xff\n\n");
    assert!(is_whole, "{rest:?}");
    until("it is settled", || server.get("/metrics").body.contains("outcome=\"success\"} 1"));
    assert_eq!(left(&server, "llm.gpt-4o.tpm"), 500);
}
