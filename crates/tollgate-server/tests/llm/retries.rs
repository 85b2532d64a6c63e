//! What follows when a provider refuses a call, is overloaded, or is not there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tollgate_testkit::provider::{Arrival, Provider, Reply, Step, anthropic, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, trail, until};

/// A refusal with these header lines.
fn refusal(status: u16, code: &str, lines: &[&str]) -> Reply {
    let reply = Reply::json(status, &json!({ "error": { "message": "no", "type": code, "code": code } }));
    lines.iter().fold(reply, |reply, line| reply.header(line))
}

/// Runs several at once: most of their time is waiting.
fn together<T: Send>(cases: Vec<T>, run: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        let threads: Vec<_> = cases.into_iter().map(|case| scope.spawn(|| run(case))).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("a case fails"));
    });
}

#[test]
fn d1_a_429_is_waited_out_once_for_as_long_as_it_says() {
    let cases: Vec<(&[&str], u64)> = vec![
        (&["retry-after-ms: 150"], 150),
        (&["retry-after-ms: 150", "retry-after: 30"], 150),
        (&["retry-after: 1"], 1_000),
        (&["retry-after: 0.4"], 400),
        (&["date: Sun, 06 Nov 1994 08:49:37 GMT", "retry-after: Sun, 06 Nov 1994 08:49:38 GMT"], 1_000),
        (&["x-ratelimit-remaining-requests: 0", "x-ratelimit-reset-requests: 350ms"], 350),
        (
            &[
                "x-ratelimit-remaining-requests: 5",
                "x-ratelimit-reset-requests: 9s",
                "x-ratelimit-remaining-tokens: 0",
                "x-ratelimit-reset-tokens: 0.3",
            ],
            300,
        ),
    ];
    together(cases, |(lines, ms)| {
        let provider = Provider::start(move |arrival| match arrival.number {
            0 => refusal(429, "rate_limit_exceeded", lines),
            _ => openai(arrival),
        });
        let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 10\ntpm = 1000");
        assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200, "{lines:?}");
        let arrivals = provider.arrivals();
        assert_eq!(arrivals.len(), 2, "{lines:?}: one wait");
        let waited = arrivals[1].at - arrivals[0].at;
        assert!(waited >= Duration::from_millis(ms), "{lines:?}: {waited:?}");
        assert!(waited < Duration::from_millis(ms + 5_000), "{lines:?}: {waited:?}");
        until("both attempts count as requests, and one as tokens", || {
            (left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")) == (8, 900)
        });
    });
}

/// The reset of Anthropic is a point in time, by the provider's own clock.
#[test]
fn d1_a_reset_at_a_point_in_time_is_waited_for() {
    let lines = [
        "date: Sun, 06 Nov 1994 08:49:37 GMT",
        "anthropic-ratelimit-requests-remaining: 0",
        "anthropic-ratelimit-requests-reset: 1994-11-06T08:49:38Z",
    ];
    let provider = Provider::start(move |arrival| match arrival.number {
        0 => refusal(429, "rate_limit_error", &lines),
        _ => anthropic(arrival),
    });
    let server = gateway(&provider, "anthropic", "[llm.models.claude-x]\nrpm = 10");
    let body = r#"{"model":"claude-x","max_tokens":5,"messages":[]}"#;
    assert_eq!(server.post("/v1/messages", body).status, 200);
    let arrivals = provider.arrivals();
    assert!(arrivals.len() == 2 && arrivals[1].at - arrivals[0].at >= Duration::from_secs(1));
}

#[test]
fn d2_a_bill_that_is_not_paid_is_passed_on_at_once() {
    let codes = [
        "insufficient_quota",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "project_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
        "enforced_spend_limit_reached",
    ];
    let provider = Provider::start(move |arrival| match arrival.body["user"].as_str() {
        Some("enforced_spend_limit_reached") => Reply::json(
            429,
            &json!({ "error": { "details": { "error_code": "enforced_spend_limit_reached" } } }),
        ),
        Some(code) => refusal(429, code, &["retry-after: 1"]),
        None => openai(arrival),
    });
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100\ntpm = 10000");
    for (sent, code) in (1..).zip(codes) {
        let answer = server.post("/v1/chat/completions", &chat(100, &format!(",\"user\":\"{code}\"")));
        assert_eq!((answer.status, answer.field("x-should-retry")), (429, Some("false")), "{answer:?}");
        assert!(answer.body.contains(code), "{}", answer.body);
        assert_eq!(provider.arrivals().len(), sent, "{code}: one attempt");
    }
    // No key was parked: the next call goes at once.
    let lines = ["content-type: application/json", "x-stainless-read-timeout: 0.2"];
    assert_eq!(server.ask("POST", "/v1/chat/completions", &lines, &chat(100, "")).status, 200);
    until("no tokens were used", || left(&server, "llm.gpt-4o.tpm") == 9_900);
}

/// What a caller writes into its request cannot make a refusal look like one of the bill.
#[test]
fn d2_a_message_that_quotes_a_billing_code_is_none() {
    let provider = Provider::start(|arrival| match arrival.number {
        0 => Reply::json(
            429,
            &json!({ "error": { "message": "insufficient_quota", "code": "rate_limit_exceeded" } }),
        )
        .header("retry-after-ms: 10"),
        _ => openai(arrival),
    });
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
}

#[test]
fn d3_an_overload_is_waited_out_apart_from_limits() {
    let provider = Provider::start(|arrival| match (arrival.body["model"].as_str(), arrival.number) {
        (Some("gpt-4o"), 0) => refusal(529, "overloaded_error", &["retry-after-ms: 700"]),
        _ => openai(arrival),
    });
    let server = gateway(
        &provider,
        "openai",
        "[llm.models.gpt-4o]\nrpm = 100\ntpm = 10000\n[llm.models.gpt-4o-mini]\nrpm = 100",
    );
    std::thread::scope(|scope| {
        let first = scope.spawn(|| server.post("/v1/chat/completions", &chat(100, "")));
        until("it has arrived", || provider.arrivals().len() == 1);
        std::thread::sleep(Duration::from_millis(100));
        // Others of the model wait, and are not charged meanwhile; other models go on.
        let second = scope.spawn(|| server.post("/v1/chat/completions", &chat(100, "")));
        let other = chat(100, "").replace("gpt-4o", "gpt-4o-mini");
        assert_eq!(server.post("/v1/chat/completions", &other).status, 200);
        for answer in [first.join().expect("an answer"), second.join().expect("an answer")] {
            assert_eq!(answer.status, 200, "{answer:?}");
        }
    });
    let arrivals = provider.arrivals();
    let of_model: Vec<&Arrival> =
        arrivals.iter().filter(|arrival| arrival.body["model"] == "gpt-4o").collect();
    assert_eq!(of_model.len(), 3, "one overload, and both calls");
    assert!(of_model[1].at - of_model[0].at >= Duration::from_millis(700));
    until("an overload is a request without tokens", || {
        (left(&server, "llm.gpt-4o.rpm"), left(&server, "llm.gpt-4o.tpm")) == (97, 9_800)
    });
    let check = server.post("/v1/llm/check", &chat(100, "")).body;
    assert!(check.contains("\"can_proceed\":true"), "nothing is parked: {check}");
}

#[test]
fn d3_an_overload_longer_than_the_caller_waits_is_said_at_once() {
    let provider = Provider::start(|_| refusal(529, "overloaded_error", &["retry-after: 25"]));
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 100");
    let lines = ["content-type: application/json", "x-stainless-read-timeout: 2"];
    for arrivals in [1, 1] {
        let began = Instant::now();
        let answer = server.ask("POST", "/v1/chat/completions", &lines, &chat(100, ""));
        assert!(began.elapsed() < Duration::from_secs(20) && answer.status >= 500, "{answer:?}");
        let ms: u64 = answer.field("retry-after-ms").and_then(|ms| ms.parse().ok()).expect("a hint");
        assert!((1..=25_000).contains(&ms), "{answer:?}");
        assert_eq!(provider.arrivals().len(), arrivals, "the second is not sent");
    }
    assert_eq!(left(&server, "llm.gpt-4o.rpm"), 99);
    // One attempt, and one request that was refused without an attempt.
    until("the trail is written", || trail(&server).len() == 2);
    let lines = trail(&server);
    assert_eq!((&lines[0]["status"], &lines[0]["http_status"]), (&json!("error"), &json!(529)), "{lines:?}");
    assert_eq!(
        (&lines[1]["status"], &lines[1]["reason"]),
        (&json!("rate_limited"), &json!("the provider is overloaded")),
        "{lines:?}"
    );
    assert!(lines[1]["wait_seconds"].as_f64().is_some_and(|wait| wait > 0.0), "{lines:?}");
}

/// An answer may take minutes. The others do not wait for all of it, once the first after an overload was not refused.
#[test]
fn d3_others_follow_a_first_that_takes_long() {
    let second = Arc::new(AtomicBool::new(false));
    let has_followed = Arc::new(AtomicBool::new(false));
    let (arrived, followed) = (second, has_followed.clone());
    let provider = Provider::start(move |arrival| match arrival.number {
        0 => refusal(529, "overloaded_error", &["retry-after-ms: 300"]),
        1 => {
            // The first is not answered before another one is there.
            let began = Instant::now();
            while !arrived.load(Ordering::SeqCst) && began.elapsed() < Duration::from_secs(15) {
                std::thread::sleep(Duration::from_millis(5));
            }
            followed.store(arrived.load(Ordering::SeqCst), Ordering::SeqCst);
            openai(arrival)
        }
        _ => {
            arrived.store(true, Ordering::SeqCst);
            openai(arrival)
        }
    });
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100");
    let ask = || assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    std::thread::scope(|scope| {
        scope.spawn(ask);
        until("the first is sent again", || provider.arrivals().len() == 2);
        scope.spawn(ask);
    });
    assert!(has_followed.load(Ordering::SeqCst), "another one was sent while the first was not answered");
}

/// A short hint is over before the next attempt, so the group is free again each time. That must not go on without end.
#[test]
fn d1_a_429_with_a_short_hint_is_passed_on_after_three_attempts() {
    let two = "keys = [{ key = 'k1', group = 'one' }, { key = 'k2', group = 'two' }]";
    let cases = vec![
        ("[llm.models.gpt-4o]\nrpm = 10000", "api_key = 'k'", 3),
        ("[llm.models.gpt-4o]", "api_key = 'k'", 3),
        ("", "api_key = 'k'", 3),
        // Each group is tried once without counting, but for the last of them.
        ("[llm.models.gpt-4o]\nrpm = 10000", two, 4),
        ("[llm.models.gpt-4o]", two, 4),
    ];
    together(cases, |(model, keys, expected)| {
        let provider = Provider::start(|_| refusal(429, "rate_limit_exceeded", &["retry-after-ms: 1"]));
        let config = format!(
            "llm.max_wait = '10s'\n{model}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\n{keys}\n\
             [limits.x]\nunlimited = true\n",
            provider.address()
        );
        let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
        let answer = server.post("/v1/chat/completions", &chat(100, ""));
        let sent = provider.arrivals().len();
        assert_eq!(
            (answer.status, answer.field("x-should-retry")),
            (429, Some("false")),
            "{model}: {answer:?}"
        );
        assert_eq!(sent, expected, "{model} {keys}");
    });
}

/// A request that waits in two attempts is one request that had to wait.
#[test]
fn g1_a_request_that_waits_twice_has_one_line_of_it() {
    let provider = Provider::start(|arrival| match arrival.number {
        0 | 1 => refusal(429, "rate_limit_exceeded", &["retry-after-ms: 300"]),
        _ => openai(arrival),
    });
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\nrpm = 100");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    let is = |status: &str| trail(&server).iter().filter(|line| line["status"] == status).count();
    until("the trail is written", || is("success") == 1);
    assert_eq!((is("rate_limited"), is("error")), (1, 2), "{:?}", trail(&server));
}

/// Sends as an SDK does that retries twice by itself.
fn like_an_sdk(server: &Tollgate) -> (u16, u32) {
    for count in 0..3 {
        let lines =
            ["content-type: application/json".to_owned(), format!("x-stainless-retry-count: {count}")];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let answer = server.ask("POST", "/v1/chat/completions", &lines, &chat(100, ""));
        let retries = matches!(answer.status, 408 | 409 | 429 | 500..);
        if !retries || answer.field("x-should-retry") == Some("false") {
            return (answer.status, count + 1);
        }
    }
    (0, 3)
}

#[test]
fn d4_retries_of_the_sdk_and_of_the_gateway_are_three_together() {
    type Script = Box<dyn Fn(&Arrival) -> Reply + Send + Sync>;
    let hanging_up = |_: &Arrival| Reply { status: 200, headers: vec![], steps: vec![Step::Cut] };
    // What the SDK sees at last, how often it has asked for that, and what has arrived at the provider.
    let cases: Vec<(&str, Script, u16, u32, usize)> = vec![
        ("limited", Box::new(|_| refusal(429, "slow_down", &["retry-after-ms: 10"])), 429, 1, 3),
        ("overloaded", Box::new(|_| refusal(529, "overloaded_error", &["retry-after-ms: 10"])), 529, 1, 3),
        ("failing", Box::new(|_| refusal(500, "server_error", &[])), 500, 3, 3),
        // It may have run, so nobody sends it again.
        ("hanging up", Box::new(hanging_up), 502, 1, 1),
        (
            "failing and overloaded",
            Box::new(|arrival| match arrival.number {
                0 => refusal(500, "server_error", &[]),
                _ => refusal(529, "overloaded_error", &["retry-after-ms: 10"]),
            }),
            529,
            2,
            3,
        ),
        (
            "limited and hanging up",
            Box::new(move |arrival| match arrival.number {
                0 => refusal(429, "slow_down", &["retry-after-ms: 10"]),
                _ => hanging_up(arrival),
            }),
            502,
            1,
            2,
        ),
    ];
    together(cases, |(name, script, status, asked, arrived)| {
        let provider = Provider::start(script);
        let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100");
        assert_eq!(like_an_sdk(&server), (status, asked), "{name}");
        assert_eq!(provider.arrivals().len(), arrived, "{name}");
    });
    let provider = Provider::start(openai);
    let server = gateway(&provider, "openai", "[llm.models.gpt-4o]\nrpm = 100");
    let config = std::fs::read_to_string(server.home().join("tollgate.toml")).expect("a config");
    let gone = format!("http://127.0.0.1:{}/v1", tollgate_testkit::free_port());
    server.reload(&config.replace(&format!("http://{}/v1", provider.address()), &gone));
    assert_eq!(like_an_sdk(&server), (502, 1), "the SDK does not try a dead upstream again");
}

#[test]
fn d5_a_retry_at_the_advertised_millisecond_succeeds() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.window = '1s'\nllm.max_wait = '1ms'\n[llm.models.gpt-4o]\nrpm = 4\ntpm = 1000",
    );
    let ask = || server.post("/v1/chat/completions", &chat(150, ""));
    let mut refused = 0;
    while refused < 6 {
        let answer = ask();
        if answer.status == 200 {
            continue;
        }
        refused += 1;
        assert_eq!(answer.status, 429, "{answer:?}");
        let ms: u64 = answer.field("retry-after-ms").and_then(|ms| ms.parse().ok()).expect("a hint");
        assert!((1..=1_000).contains(&ms) && answer.field("x-should-retry").is_none(), "{answer:?}");
        std::thread::sleep(Duration::from_millis(ms));
        assert_eq!(ask().status, 200, "refusal {refused}");
    }
}

#[test]
fn d5_a_wait_that_sdks_misread_says_not_to_retry() {
    let provider = Provider::start(|arrival| match arrival.body["user"].as_str() {
        Some(_) => refusal(429, "rate_limit_exceeded", &["retry-after: 3000"]),
        None => openai(arrival),
    });
    let server = gateway(
        &provider,
        "openai",
        "llm.max_wait = '100ms'\n[llm.models.gpt-4o]\nrpd = 1\n[llm.models.gpt-4o-mini]\nrpm = 5",
    );
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    let ours = server.post("/v1/chat/completions", &chat(100, ""));
    let mini = |more: &str| chat(100, more).replace("gpt-4o", "gpt-4o-mini");
    let theirs = server.post("/v1/chat/completions", &mini(",\"user\":\"x\""));
    let parked = server.post("/v1/chat/completions", &mini(""));
    for answer in [ours, theirs, parked] {
        assert_eq!((answer.status, answer.field("x-should-retry")), (429, Some("false")), "{answer:?}");
        let ms: u64 = answer.field("retry-after-ms").and_then(|ms| ms.parse().ok()).expect("a hint");
        assert!(ms > 2_000_000, "{answer:?}");
        assert!(answer.field("x-ratelimit-limit-requests").is_some(), "{answer:?}");
    }
    assert_eq!(provider.arrivals().len(), 2, "a parked group is not probed");
}

#[test]
fn d6_a_wait_longer_than_the_sdks_timeout_is_refused_at_once() {
    let provider = Provider::start(|arrival| openai(arrival).paced(Duration::from_millis(300)));
    let server =
        gateway(&provider, "openai", "llm.max_wait = '600s'\n[llm.models.gpt-4o]\nrpm = 2\ntpm = 100000");
    let refused = |timeout: &str| {
        let lines = ["content-type: application/json", timeout];
        let began = Instant::now();
        let answer = server.ask("POST", "/v1/chat/completions", &lines, &chat(100, ""));
        assert_eq!(answer.status, 429, "{answer:?}");
        // The caller would wait for 9 s.
        assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
        answer.field("retry-after-ms").and_then(|ms| ms.parse::<u64>().ok()).expect("a hint")
    };
    std::thread::scope(|scope| {
        // While calls run that may give tokens back: they give no requests back.
        let asked: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| server.post("/v1/chat/completions", &chat(100, ",\"stream\":true"))))
            .collect();
        until("both have arrived", || provider.arrivals().len() == 2);
        let ms = refused("x-stainless-read-timeout: 12");
        assert!((50_000..=60_000).contains(&ms), "{ms}");
        asked.into_iter().for_each(|asked| assert_eq!(asked.join().expect("an answer").status, 200));
    });
    // Six wait already: two in each of the next three minutes.
    let body = chat(100, "");
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut waiting = Vec::new();
    for _ in 0..6 {
        let mut connection = server.connect();
        connection.send([head.as_bytes(), body.as_bytes()].concat().as_slice()).expect("sent");
        waiting.push(connection);
    }
    let in_line = |count: usize| {
        server.get("/metrics").body.contains(&format!("tollgate_llm_queue{{model=\"gpt-4o\"}} {count}"))
    };
    until("six wait", || in_line(6));
    let ms = refused("x-stainless-read-timeout: 70");
    assert!(ms >= 180_000, "{ms}");
    drop(waiting);
    until("nobody waits", || in_line(0));
    assert_eq!(provider.arrivals().len(), 2);
}

/// A provider that asks for no other attempt gets none of this group of keys; that of another group is another quota.
#[test]
fn d1_a_provider_that_asks_for_no_retry_gets_none() {
    let two = "keys = [{ key = 'k1', group = 'one' }, { key = 'k2', group = 'two' }]";
    let never: &[&str] = &["retry-after-ms: 10", "x-should-retry: false"];
    let cases = vec![
        (429, "[llm.models.gpt-4o]\nrpm = 100", "api_key = 'k'", 1),
        (429, "[llm.models.gpt-4o]", "api_key = 'k'", 1),
        (429, "", "api_key = 'k'", 1),
        (429, "[llm.models.gpt-4o]\nrpm = 100", two, 2),
        (529, "[llm.models.gpt-4o]\nrpm = 100", "api_key = 'k'", 1),
    ];
    together(cases, |(status, model, keys, expected)| {
        let provider = Provider::start(move |_| refusal(status, "rate_limit_exceeded", never));
        let config = format!(
            "llm.max_wait = '10s'\n{model}\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\n{keys}\n\
             [limits.x]\nunlimited = true\n",
            provider.address()
        );
        let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
        let answer = server.post("/v1/chat/completions", &chat(100, ""));
        assert_eq!((answer.status, answer.field("x-should-retry")), (status, Some("false")), "{answer:?}");
        assert_eq!(provider.arrivals().len(), expected, "{status} {model} {keys}");
    });
}
