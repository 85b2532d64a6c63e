//! Who is let through, who waits, and what callers are reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tollgate_testkit::http::Connection;
use tollgate_testkit::provider::{Allowed, Provider, openai};

use crate::{chat, gateway, left, trail, until};

/// 500 calls of 64 clients against both limits: none fails, no window is above either, and hardly any window is left unused. A call counts for
/// its window and a margin, which is large here because the machine may be busy; so much is not used by design.
#[test]
fn a1_many_clients_at_both_limits_and_the_judge_is_clean() {
    const CALLS: usize = 500;
    let (window, margin) = (Duration::from_secs(2), Duration::from_millis(500));
    let allowed = Allowed { requests: 125, tokens: 3_000, window };
    let provider = Provider::judging(allowed, openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.window = '2s'\nllm.margin = '500ms'\n[llm.models.gpt-4o]\nrpm = 125\ntpm = 3000",
    );
    let next = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..64)
        .map(|_| {
            let (next, address) = (next.clone(), server.http());
            std::thread::spawn(move || {
                let mut connection = Connection::open(address);
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= CALLS {
                        return;
                    }
                    let body = chat(if number % 2 == 0 { 16 } else { 32 }, "");
                    let lines = ["content-type: application/json"];
                    let answer = connection.ask_with_body("POST", "/v1/chat/completions", &lines, &body);
                    assert_eq!(answer.status, 200, "{}", answer.body);
                }
            })
        })
        .collect();
    clients.into_iter().for_each(|client| client.join().expect("no client fails"));
    provider.assert_clean();
    let arrivals = provider.arrivals();
    assert_eq!((arrivals.len(), arrivals.iter().map(|arrival| arrival.tokens).sum::<u64>()), (CALLS, 12_000));
    let took = arrivals[CALLS - 1].at - arrivals[0].at;
    // Four windows of 125: the last 125 go three windows after the first, and a little later with their margins. Another window and a half
    // is for a busy machine: one that loses more leaves quota unused.
    let (least, most) = (window * 3, (window + margin) * 3 + window * 3 / 2);
    eprintln!("{CALLS} calls in {took:?}; at least {least:?}");
    assert!((least..=most).contains(&took), "{took:?} of {least:?} to {most:?}");
}

/// Forty calls at once, ten of which there is room for: ten arrive at once, the others wait for the next windows, and none fails. With the
/// margin that there is by default, which covers what calls differ in their way to the provider.
#[test]
fn a1_and_a3_are_clean_with_the_default_margin() {
    let window = Duration::from_secs(4);
    let provider = Provider::judging(Allowed { requests: 10, tokens: 1_000_000, window }, openai);
    let server = gateway(&provider, "openai", "llm.window = '4s'\n[llm.models.gpt-4o]\nrpm = 10");
    let clients: Vec<_> = (0..40)
        .map(|_| {
            let address = server.http();
            std::thread::spawn(move || {
                let lines = ["content-type: application/json"];
                let body = chat(100, "");
                Connection::open(address).ask_with_body("POST", "/v1/chat/completions", &lines, &body).status
            })
        })
        .collect();
    until("ten are sent at once", || provider.arrivals().len() >= 10);
    let statuses: Vec<u16> =
        clients.into_iter().map(|client| client.join().expect("no client fails")).collect();
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    provider.assert_clean();
    let arrivals = provider.arrivals();
    assert_eq!(arrivals.len(), 40);
    let took = arrivals[39].at - arrivals[0].at;
    // Three windows: the last ten go three windows after the first.
    assert!(took >= window * 3 - Duration::from_millis(50), "{took:?}");
}

#[test]
fn a5_what_can_never_fit_is_refused_at_once() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\ntpm = 1000");
    let answer = server.post("/v1/chat/completions", &chat(50_000, ""));
    assert_eq!((answer.status, answer.field("x-should-retry")), (400, Some("false")), "{answer:?}");
    assert!(answer.body.contains("Token limit exceeded: 50000 tokens / 1000 TPM"), "{}", answer.body);
    assert!(answer.field("retry-after").is_none() && provider.arrivals().is_empty());
}

#[test]
fn a_refusal_has_the_providers_shape_and_a_true_hint() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.log_dir = 'logs'\nllm.max_wait = '1ms'\n[llm.models.gpt-4o]\nrpm = 1",
    );
    let first = server.post("/v1/chat/completions", &chat(100, ""));
    assert_eq!(first.field("x-ratelimit-limit-requests"), Some("1"));
    assert_eq!(first.field("x-ratelimit-remaining-requests"), Some("0"));
    assert!(first.field("x-request-id").is_some_and(|id| id.starts_with("req_")));
    let lines = ["content-type: application/json", "x-request-id: mine", "x-agent-id: crawler"];
    let answer = server.ask("POST", "/v1/chat/completions", &lines, &chat(100, ""));
    assert_eq!(answer.status, 429, "{answer:?}");
    let error: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(error["error"]["message"], "Rate limit exceeded: 1 requests / 1 RPM");
    assert_eq!(
        (&error["error"]["type"], &error["error"]["code"]),
        (&"requests".into(), &"rate_limit_exceeded".into())
    );
    assert_eq!(answer.field("x-request-id"), Some("mine"));
    let ms: u64 = answer.field("retry-after-ms").and_then(|ms| ms.parse().ok()).expect("a hint");
    assert!((50_000..=60_000).contains(&ms), "{ms}");
    assert_eq!(answer.field("retry-after"), Some(ms.div_ceil(1_000).to_string().as_str()));
    until("the trail has both", || trail(&server).len() == 2);
    let line = &trail(&server)[1];
    assert_eq!(
        (&line["status"], &line["request_id"], &line["agent_id"], &line["reason"]),
        (
            &"rate_limited".into(),
            &"mine".into(),
            &"crawler".into(),
            &"Rate limit exceeded: 1 requests / 1 RPM".into()
        )
    );
    assert!(line["wait_seconds"].as_f64().is_some_and(|wait| wait > 50.0), "{line}");
    let metrics = server.get("/metrics").body;
    for series in [
        "tollgate_llm_requests_total{model=\"gpt-4o\",outcome=\"refused\"} 1",
        "tollgate_llm_usage{",
        "tollgate_llm_queue{model=\"gpt-4o\"} 0",
    ] {
        assert!(metrics.contains(series), "{series} is not in\n{metrics}");
    }
}

#[test]
fn a_check_says_whether_a_request_could_proceed_and_charges_nothing() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 1\ntpm = 1000");
    let check = || -> serde_json::Value {
        serde_json::from_str(&server.post("/v1/llm/check", &chat(100, "")).body).expect("JSON")
    };
    for _ in 0..3 {
        assert_eq!(
            check(),
            serde_json::json!({ "can_proceed": true, "reason": null, "wait_seconds": 0.0, "input_tokens": 8, "reserved_tokens": 100 })
        );
    }
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    let denied = check();
    assert_eq!(
        (&denied["can_proceed"], &denied["reason"]),
        (&false.into(), &"Rate limit exceeded: 1 requests / 1 RPM".into())
    );
    assert!(denied["wait_seconds"].as_f64().is_some_and(|wait| (50.0..=60.0).contains(&wait)), "{denied}");
    assert_eq!(left(&server, "llm.gpt-4o.tpm"), 900);
    let models = server.get("/v1/models").body;
    assert!(models.contains("\"id\":\"gpt-4o\""), "{models}");
}

#[test]
fn clients_show_keys_of_the_gateway_and_the_provider_sees_its_own() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "[llm.models.gpt-4o]\nrpm = 100\n[llm.clients.team]\nkey = 'team-key'\nmodels.gpt-4o = { rpm = 1 }",
    );
    let ask = |key: &str| {
        let lines = [
            "content-type: application/json".to_owned(),
            key.to_owned(),
            "x-stainless-read-timeout: 0.1".to_owned(),
        ];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        server.ask("POST", "/v1/chat/completions", &lines, &chat(100, ""))
    };
    for wrong in [
        "x-none: 1",
        "authorization: Bearer nobody",
        "authorization: Bearer team-ke",
        "authorization: Bearer ",
    ] {
        let answer = ask(wrong);
        assert_eq!(answer.status, 401, "{wrong}: {answer:?}");
        assert!(answer.body.contains("invalid_api_key"), "{}", answer.body);
    }
    assert_eq!(ask("authorization: Bearer team-key").status, 200);
    assert_eq!(ask("x-api-key: team-key").status, 429, "its own limit, by either header");
    let arrival = &provider.arrivals()[0];
    assert_eq!(arrival.header("authorization"), Some("Bearer provider-key"));
    assert!(arrival.header("x-api-key").is_none() && !arrival.raw.contains("team-key"));
}

/// Where the upstream has keys of its own, nothing that a caller shows beside them names another account. What stands behind the path is the caller's: SDKs of
/// Anthropic ask for beta features so.
#[test]
fn what_a_caller_shows_beside_the_providers_key_is_not_passed_on() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100");
    let lines = [
        "authorization: Bearer mine",
        "x-api-key: mine",
        "api-key: mine",
        "x-goog-api-key: mine",
        "openai-organization: mine",
        "openai-project: mine",
        "cookie: mine",
        "x-forwarded-for: mine",
        "connection: close, x-hop",
        "x-hop: mine",
        "openai-beta: kept",
    ];
    let path = "/v1/chat/completions?beta=true&x=%20y";
    assert_eq!(server.ask("POST", path, &lines, &chat(100, "")).status, 200);
    let arrival = &provider.arrivals()[0];
    assert_eq!((arrival.path.as_str(), arrival.header("openai-beta")), (path, Some("kept")));
    assert_eq!(arrival.header("authorization"), Some("Bearer provider-key"));
    assert!(!arrival.headers.iter().any(|line| line.contains("mine")), "{:?}", arrival.headers);
}

/// A key that is missing or wrong is said in the shape of the provider whose SDK asks: by the route, and on shared routes by its header.
#[test]
fn a_401_has_the_providers_shape() {
    let provider = Provider::start(tollgate_testkit::provider::anthropic);
    let server = gateway(
        &provider,
        "anthropic",
        "[llm.models.claude-x]\nrpm = 100\n[llm.clients.team]\nkey = 'team-key'",
    );
    let body = r#"{"model":"claude-x","max_tokens":5,"messages":[]}"#;
    let version = "anthropic-version: 2023-06-01";
    let ask = |method: &str, path: &str, lines: &[&str]| {
        let answer = server.ask(method, path, lines, if method == "POST" { body } else { "" });
        let said: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
        (answer, said)
    };
    for lines in [&[version][..], &[version, "x-api-key: nobody"], &["authorization: Bearer nobody"]] {
        let (answer, said) = ask("POST", "/v1/messages", lines);
        assert_eq!(answer.status, 401, "{answer:?}");
        let id = answer.field("x-request-id").expect("an id");
        let message = said["error"]["message"].as_str().expect("a message");
        let error = serde_json::json!({ "type": "authentication_error", "message": message });
        assert_eq!(said, serde_json::json!({ "type": "error", "error": error, "request_id": id }));
        assert!(message.contains("key") && !message.contains("nobody"), "{message}");
    }
    for (method, path) in [("GET", "/v1/models"), ("POST", "/v1/llm/check")] {
        let (answer, said) = ask(method, path, &[version]);
        assert_eq!(
            (answer.status, &said["error"]["type"]),
            (401, &"authentication_error".into()),
            "{answer:?}"
        );
        let (answer, said) = ask(method, path, &[]);
        assert_eq!((answer.status, &said["error"]["code"]), (401, &"invalid_api_key".into()), "{answer:?}");
    }
    assert_eq!(ask("POST", "/v1/messages", &["x-api-key: team-key"]).0.status, 200);
    assert_eq!((provider.arrivals().len(), left(&server, "llm.claude-x.rpm")), (1, 99));
}

#[test]
fn a_429_of_the_provider_is_waited_out_and_each_attempt_counts() {
    let provider = Provider::start(|arrival| match arrival.number {
        0 => tollgate_testkit::provider::Reply::json(
            429,
            &serde_json::json!({ "error": { "code": "rate_limit_exceeded" } }),
        )
        .header("retry-after-ms: 150"),
        _ => openai(arrival),
    });
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    assert_eq!(provider.arrivals().len(), 2);
    until("both attempts count as requests, and one as tokens", || {
        (left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")) == (8, 900)
    });
}

/// An upstream that asks for longer than anybody can wait is believed, and its refusal passed on.
#[test]
fn an_absurd_wait_of_the_provider_is_not_waited_for() {
    for wait in ["1e19", "99999999999999999999", "-1", "nan", "soon"] {
        let provider = Provider::start(move |arrival| match arrival.number {
            0..3 => tollgate_testkit::provider::Reply::json(
                429,
                &serde_json::json!({ "error": { "code": "rate_limit_exceeded" } }),
            )
            .header(&format!("retry-after: {wait}")),
            _ => openai(arrival),
        });
        let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
        assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 429, "{wait}");
        until("what was not run costs no tokens", || left(&server, "llm.gpt-4o.tpm") == 1_000);
    }
}

#[test]
fn a_reload_changes_the_limits_of_models() {
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    let config = std::fs::read_to_string(server.home().join("tollgate.toml")).expect("a config");
    server.reload(&config.replace("rpm = 10", "rpm = 20\ntpm = 500"));
    assert_eq!((left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")), (19, 500));
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    assert_eq!((left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")), (18, 400));
}

/// The reason of a refusal in the trail tells a model that nobody knows from one that is out of quota.
#[test]
fn a_refusal_in_the_trail_says_what_kind_it_is() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.log_dir = 'logs'\nllm.max_wait = '1ms'\nllm.unknown_model = 'refuse'\n[llm.models.gpt-4o]\nrpm = 1",
    );
    let ask =
        |model: &str| server.post("/v1/chat/completions", &chat(100, "").replace("gpt-4o", model)).status;
    assert_eq!([ask("gpt-4o"), ask("gpt-4o"), ask("nobody-knows")], [200, 429, 404]);
    until("the trail is written", || trail(&server).len() == 3);
    let lines = trail(&server);
    let refused = lines.iter().filter(|line| line["status"] == "rate_limited");
    let mut reasons: Vec<&str> = refused.map(|line| line["reason"].as_str().expect("a reason")).collect();
    reasons.sort();
    assert!(
        matches!(reasons[..], [limit, model] if limit.contains("/ 1 RPM") && model.contains("nobody-knows")),
        "{reasons:?}"
    );
}
