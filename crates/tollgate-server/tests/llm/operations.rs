//! What operators see of the gateway: the trail, metrics and spans; and what a kill leaves behind.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use tollgate_testkit::http::Connection;
use tollgate_testkit::provider::{Provider, Reply, Step, anthropic, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::collector::Collector;
use crate::{chat, gateway, left, trail, until};

fn backtest(server: &Tollgate) -> String {
    let args = ["backtest", "--config", "tollgate.toml", "logs/gateway/rate_limits.jsonl"];
    let output = server.tollgate(&args, &[]);
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    said
}

/// One line for each attempt, and one for each request that waited or was refused; sums as the provider has them; replayable.
#[test]
fn g1_the_trail_has_every_attempt_to_the_token() {
    const SECRET: &str = "a prompt that nobody may read";
    let provider = Provider::start(|arrival| match arrival.body["user"].as_str() {
        Some("limited-once") if arrival.number % 2 == 0 => {
            Reply::json(429, &json!({ "error": { "code": "rate_limit_exceeded" } }))
                .header("retry-after-ms: 5")
        }
        Some("wrong") => Reply::json(400, &json!({ "error": { "message": "no" } })),
        _ => openai(arrival),
    });
    let server = gateway(
        &provider,
        "openai",
        "llm.log_dir = 'logs'\nllm.max_wait = '3s'\n[llm.models.gpt-4o]\nrpm = 1000\ntpm = 20000",
    );
    let ask = |tokens: u64, more: &str| {
        let body = chat(tokens, more).replace("\"hi\"", &format!("{SECRET:?}"));
        let lines = ["content-type: application/json", "x-agent-id: nightly"];
        server.ask("POST", "/v1/chat/completions", &lines, &body).status
    };
    for number in 0..20 {
        let more = if number % 2 == 0 { ",\"stream\":true" } else { "" };
        assert_eq!(ask(100 + number, more), 200);
    }
    for _ in 0..4 {
        assert_eq!(ask(150, ",\"user\":\"limited-once\""), 200);
    }
    assert_eq!(ask(150, ",\"user\":\"wrong\""), 400);
    assert_eq!(ask(30_000, ""), 400, "never fits");
    until("all is settled", || left(&server, "llm.gpt-4o.tpm") == 20_000 - 20 * 100 - 190 - 4 * 150);
    assert_eq!(ask(19_900, ""), 429, "there is no room in time");
    let arrivals = provider.arrivals();
    let of = |status: &str| -> Vec<Value> {
        trail(&server).into_iter().filter(|line| line["status"] == status).collect()
    };
    // A call that waits for a group that the provider refused has its line, too.
    let limited = || -> Vec<Value> {
        of("rate_limited")
            .into_iter()
            .filter(|line| line["reason"].as_str().is_some_and(|why| why.contains("TPM")))
            .collect()
    };
    until("the trail is complete", || {
        (of("success").len(), of("error").len(), limited().len()) == (24, arrivals.len() - 24, 2)
    });
    let (lines, success) = (trail(&server), of("success"));
    assert_eq!(arrivals.len(), 24 + 4 + 1);
    let sum = |field: &str| success.iter().map(|line| line[field].as_u64().expect("a count")).sum::<u64>();
    assert_eq!(sum("total_tokens"), 20 * 100 + 190 + 4 * 150);
    assert_eq!((sum("input_tokens"), sum("total_tokens") - sum("output_tokens")), (24 * 8, 24 * 8));
    assert!(success.iter().all(|line| line["source"] == "reported" && line["group"] == "up"));
    let attempts = success.iter().map(|line| line["attempt"].as_u64().expect("a number")).max();
    assert_eq!(attempts, Some(2), "the second attempt is numbered");
    assert!(lines.iter().all(|line| line["agent_id"] == "nightly" && line["request_id"].is_string()));
    let text =
        std::fs::read_to_string(server.home().join("logs/gateway/rate_limits.jsonl")).expect("a trail");
    assert!(!text.contains(SECRET) && !text.contains("provider-key") && !text.contains("Hello"), "{text}");
    let said = backtest(&server);
    for limit in ["llm.gpt-4o.rpm", "llm.gpt-4o.tpm"] {
        assert!(said.contains(limit), "{said}");
    }
}

/// What it says of a request's name and of who is behind it.
#[test]
fn g1_agents_and_requests_are_named_as_the_contract_says() {
    let provider = Provider::start(anthropic);
    let rest = "llm.log_dir = 'logs'\n[llm.models.claude-x]\nrpm = 100\n[llm.clients.team]\nkey = 'team-key'";
    let server = gateway(&provider, "anthropic", rest);
    let body = |more: &str| format!(r#"{{"model":"claude-x","max_tokens":5,"messages":[]{more}}}"#);
    let all = r#","metadata":{"user_id":"of metadata"},"safety_identifier":"of safety","user":"of user""#;
    let cases = [
        (&["x-agent-id: of header"][..], all, "of header"),
        (&[], all, "of metadata"),
        (&[], r#","safety_identifier":"of safety","user":"of user""#, "of safety"),
        (&[], r#","user":"of user""#, "of user"),
        (&[], r#","metadata":{"user_id":7},"user":["x"]"#, "team"),
        (&[], "", "team"),
    ];
    for (number, (lines, more, agent)) in (1..).zip(cases) {
        let id = format!("x-request-id: request-{number}");
        let lines = [&["content-type: application/json", "x-api-key: team-key", &id], lines].concat();
        let answer = server.ask("POST", "/v1/messages", &lines, &body(more));
        let expected = format!("request-{number}");
        assert_eq!(
            (answer.status, answer.field("x-request-id")),
            (200, Some(expected.as_str())),
            "{answer:?}"
        );
        until("it is written", || trail(&server).len() == number);
        let line = &trail(&server)[number - 1];
        assert_eq!((&line["agent_id"], &line["request_id"]), (&agent.into(), &expected.into()), "{line}");
    }
    for strange in ["", "two words", &"x".repeat(200)] {
        let id = format!("x-request-id: {strange}");
        let lines = ["content-type: application/json", "x-api-key: team-key", &id];
        let answer = server.ask("POST", "/v1/messages", &lines, &body(""));
        assert!(answer.field("x-request-id").is_some_and(|id| id.starts_with("req_")), "{answer:?}");
    }
}

#[test]
fn g1_a_killed_gateway_leaves_whole_lines() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 1000000");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut connection = Connection::open(server.http());
                let (body, lines) = (chat(100, ""), "content-type: application/json");
                let request = format!(
                    "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{lines}\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                while connection.send(request.as_bytes()).is_ok() && connection.receive(false).is_ok() {}
            });
        }
        until("there is a trail", || provider.arrivals().len() > 300);
        server.signal(Signal::KILL);
    });
    server.ended();
    let lines = trail(&server);
    assert!(!lines.is_empty() && lines.len() <= provider.arrivals().len(), "{}", lines.len());
    backtest(&server);
}

/// Lines that the disk does not take are counted, and calls go on.
#[test]
fn g1_lines_that_cannot_be_written_are_counted() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 10");
    let dropped =
        |server: &Tollgate| number(&server.get("/metrics").body, "tollgate_llm_trail_dropped_total");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    until("the trail is written", || trail(&server).len() == 1);
    assert_eq!(dropped(&server), 0.0);

    // A device that is always full.
    let logs = tempfile::tempdir().expect("a directory");
    std::fs::create_dir(logs.path().join("gateway")).expect("made");
    std::os::unix::fs::symlink("/dev/full", logs.path().join("gateway/rate_limits.jsonl")).expect("linked");
    let rest = format!("llm.log_dir = '{}'\n[llm.models.gpt-4o]\nrpm = 10", logs.path().display());
    let server = gateway(&provider, "openai", &rest);
    for _ in 0..3 {
        assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    }
    until("all three are counted", || dropped(&server) == 3.0);
    let log = server.output();
    assert_eq!(log.matches("the trail of language-model calls cannot be written").count(), 1, "{log}");
}

/// The number of a series.
fn number(metrics: &str, series: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.and_then(|number| number.trim().parse().ok())
        .unwrap_or_else(|| panic!("{series} is not in\n{metrics}"))
}

#[test]
fn g1_metrics_count_what_became_of_calls() {
    let provider = Provider::start(|arrival| match (arrival.body["user"].as_str(), arrival.number) {
        (Some("limited"), 1) => Reply::json(429, &json!({ "error": {} })).header("retry-after-ms: 5"),
        (Some("overloaded"), 3) => Reply::json(529, &json!({})).header("retry-after-ms: 5"),
        (Some("broken"), _) => openai(arrival).cut_after(1),
        (Some("failed"), _) => Reply::json(500, &json!({})),
        _ => openai(arrival),
    });
    let server =
        gateway(&provider, "openai", "llm.max_wait = '1s'\n[llm.models.gpt-4o]\nrpm = 10\ntpm = 100000");
    let ask = |more: &str| server.post("/v1/chat/completions", &chat(100, more)).status;
    assert_eq!((ask(""), ask(",\"user\":\"limited\"")), (200, 200));
    assert_eq!((ask(",\"user\":\"overloaded\""), ask(",\"user\":\"failed\"")), (200, 500));
    let mut connection = server.connect();
    let body = chat(100, ",\"user\":\"broken\",\"stream\":true");
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    connection.send([head.as_bytes(), body.as_bytes()].concat().as_slice()).expect("sent");
    assert!(connection.receive(false).is_err(), "it breaks off");
    let unknown = chat(100, "").replace("gpt-4o", "nobody-knows");
    assert_eq!(server.post("/v1/chat/completions", &unknown).status, 200);
    for _ in 0..3 {
        assert_eq!(ask(""), 200);
    }
    assert_eq!(ask(""), 429);
    let expected = [
        ("requests_total", "outcome=\"answered\"", 8.0),
        ("requests_total", "outcome=\"refused\"", 1.0),
        ("attempts_total", "outcome=\"success\"", 6.0),
        ("attempts_total", "outcome=\"limited\"", 1.0),
        ("attempts_total", "outcome=\"overloaded\"", 1.0),
        ("attempts_total", "outcome=\"failed\"", 1.0),
        ("attempts_total", "outcome=\"broken\"", 1.0),
        ("tokens_total", "kind=\"input\"", 7.0 * 8.0),
        ("usage", "limit=\"RPM\"", 1.0),
    ];
    let series = |name: &str, label: &str| format!("tollgate_llm_{name}{{model=\"gpt-4o\",{label}}}");
    until("all is settled", || {
        number(&server.get("/metrics").body, &series("attempts_total", "outcome=\"broken\"")) == 1.0
    });
    let metrics = server.get("/metrics").body;
    for (name, label, value) in expected {
        assert_eq!(number(&metrics, &series(name, label)), value, "{name} {label}\n{metrics}");
    }
    assert_eq!(number(&metrics, "tollgate_llm_queue{model=\"gpt-4o\"}"), 0.0);
    assert_eq!(number(&metrics, "tollgate_llm_wait_seconds_count{model=\"gpt-4o\"}"), 10.0);
    let other = "tollgate_llm_attempts_total{model=\"other\",outcome=\"success\"}";
    assert_eq!(number(&metrics, other), 1.0, "a name that callers make up is no label");
    assert!(!metrics.contains("nobody-knows"), "{metrics}");
}

#[test]
fn m8_a_call_is_a_span_with_its_wait_reservation_attempts_and_settlement() {
    let collector = Collector::start();
    let provider = Provider::start(|arrival| match arrival.number {
        0 => Reply::json(429, &json!({ "error": {} })).header("retry-after-ms: 5"),
        _ => openai(arrival),
    });
    let config = format!(
        "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\n\
         api_key = 'provider-key'\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate"))
        .config(&config)
        .envs(&[("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint())])
        .start();
    let lines = ["content-type: application/json", "x-request-id: mine"];
    assert_eq!(server.ask("POST", "/v1/chat/completions", &lines, &chat(100, "")).status, 200);
    until("it is settled", || left(&server, "llm.gpt-4o.tpm") == 900);
    assert_eq!(server.stop().code, Some(0), "spans are sent at the end");
    let spans = collector.spans();
    let call = spans.iter().find(|span| span.name == "llm_call");
    let call = call.unwrap_or_else(|| panic!("{spans:?}"));
    assert_eq!(call.brief(&["model", "request_id"]), "gpt-4o mine");
    let mut children: BTreeMap<&str, usize> = BTreeMap::new();
    for span in spans.iter().filter(|span| span.parent_id == call.span_id) {
        assert_eq!(span.trace_id, call.trace_id);
        *children.entry(span.name.as_str()).or_default() += 1;
    }
    for (name, least) in [("wait", 2), ("reserve", 2), ("attempt", 2), ("settle", 1)] {
        assert!(children.get(name).is_some_and(|count| *count >= least), "{name}: {children:?}");
    }
    let shown = format!("{spans:?}");
    assert!(!shown.contains("provider-key") && !shown.contains("\"hi\""), "{shown}");
}

/// Half a stream, a stream of nothing, and nothing: an error in the provider's own shape, and the quota true afterwards.
#[test]
fn an_upstream_that_is_silent_is_given_up() {
    let silence = || Step::Pause(Duration::from_secs(20));
    type Make = Box<dyn Fn() -> Reply + Send + Sync>;
    let events = || Reply::events([": nothing\n\n".to_owned()]);
    let cases: Vec<(&str, Make, Option<u16>)> = vec![
        (
            "no head",
            Box::new(move || {
                std::thread::sleep(Duration::from_secs(20));
                Reply::json(200, &json!({}))
            }),
            Some(504),
        ),
        ("no event", Box::new(move || Reply { steps: vec![silence()], ..events() }), Some(504)),
        ("cut before an event", Box::new(move || Reply { steps: vec![Step::Cut], ..events() }), Some(502)),
        (
            "half a stream",
            Box::new(move || {
                let word =
                    b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"one\"}}]}\n\n".to_vec();
                Reply { steps: vec![Step::Send(word), silence()], ..events() }
            }),
            None,
        ),
    ];
    std::thread::scope(|scope| {
        for (name, reply, status) in cases {
            scope.spawn(move || {
                let provider = Provider::start(move |_| reply());
                let base = format!("http://{}/v1", provider.address());
                let config = format!(
                    "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = '{base}'\n\
                     api_key = 'x'\ntimeout = '500ms'\n[limits.x]\nunlimited = true\n"
                );
                let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
                let body = chat(500, ",\"stream\":true");
                let head =
                    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
                let mut connection = server.connect();
                connection.send([head.as_bytes(), body.as_bytes()].concat().as_slice()).expect("sent");
                let answer = connection.receive(false);
                let tokens = match (&answer, status) {
                    (Ok(answer), Some(status)) => {
                        assert_eq!(answer.status, status, "{name}: {answer:?}");
                        let error: Value = serde_json::from_str(&answer.body).expect("JSON");
                        assert!(error["error"]["message"].is_string(), "{name}: {error}");
                        assert_eq!(answer.field("x-should-retry"), Some("false"), "{name}");
                        assert_eq!(answer.field("x-ratelimit-limit-tokens"), Some("1000"), "{name}");
                        500
                    }
                    (Err(_), None) => 8 + 1,
                    other => panic!("{name}: {other:?}"),
                };
                until(name, || left(&server, "llm.gpt-4o.tpm") == 1_000 - tokens);
                assert_eq!((provider.arrivals().len(), left(&server, "llm.gpt-4o.rpm")), (1, 9), "{name}");
            });
        }
    });
}

/// An upstream that does not answer is in the log with its name, its host and the cause, once and not for every call.
#[test]
fn a_dead_upstream_is_logged_with_its_host_and_cause() {
    let port = tollgate_testkit::free_port();
    let config = format!(
        "[llm.models.gpt-4o]\nrpm = 1000\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://127.0.0.1:{port}/v1'\n\
         api_key = 'provider-key'\n[limits.x]\nunlimited = true\n"
    );
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
    for _ in 0..3 {
        let answer = server.post("/v1/chat/completions", &chat(100, ""));
        assert_eq!(answer.status, 502, "{answer:?}");
        assert!(answer.body.contains("cannot be reached") && !answer.body.contains(&port.to_string()));
    }
    let warnings = || -> Vec<Value> {
        let output = server.output();
        let lines = output.lines().filter(|line| line.contains("the upstream cannot be reached"));
        lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    until("the log has a line", || !warnings().is_empty());
    let found = warnings();
    // One at once, and one more where these calls took longer than ten seconds.
    assert!(found.len() <= 2, "{found:?}");
    let line = found[0].to_string();
    let host = format!("127.0.0.1:{port}");
    for wanted in ["\"up\"", host.as_str(), "gpt-4o", "refused", "WARN"] {
        assert!(line.contains(wanted), "{wanted} is not in {line}");
    }
    assert!(!server.output().contains("provider-key"));
    let metrics = server.get("/metrics").body;
    let failed = "tollgate_llm_attempts_total{model=\"gpt-4o\",outcome=\"failed\"} 9";
    assert!(metrics.contains(failed), "{metrics}");
}

/// Counts of models whose vocabulary is not public are estimates, and say so.
#[test]
fn counts_of_the_command_are_exact_or_estimates() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10");
    std::fs::write(server.home().join("text"), "hello world ".repeat(50)).expect("written");
    let count = |model: &str, more: &[&str]| {
        let args = [&["llm", "count", "text", "--model", model], more].concat();
        let output = server.tollgate(&args, &[]);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let exact: Value = serde_json::from_str(&count("gpt-4o", &["--json"])).expect("JSON");
    let estimate: Value = serde_json::from_str(&count("claude-sonnet-4-5", &["--json"])).expect("JSON");
    let tokens = exact["tokens"].as_u64().expect("a count");
    assert_eq!((&exact["exact"], &exact["counted_tokens"]), (&json!(true), &json!(tokens)));
    assert_eq!((&estimate["exact"], &estimate["counted_tokens"]), (&json!(false), &json!(tokens)));
    let estimated = (tokens * 12).div_ceil(10);
    assert_eq!(estimate["tokens"], estimated);
    let text = count("claude-sonnet-4-5", &[]);
    assert!(text.starts_with(&format!("about {estimated} tokens ({tokens} by o200k_base")), "{text}");
    assert!(count("gpt-4o", &[]).starts_with(&format!("{tokens} tokens (o200k_base")));
}
