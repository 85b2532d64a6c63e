//! Quotas that are not just requests and tokens a minute, before a judge: slices of a minute, input that a cache has read, and output that
//! counts as it is produced.

use std::time::Duration;

use serde_json::{Value, json};
use tollgate_testkit::provider::{Allowed, Arrival, Provider, Reply, anthropic, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, trail, until};

/// A provider that judges requests by the second sees a tenth of a window of ten seconds in each.
#[test]
fn a7_a_provider_that_judges_by_the_second_is_kept_to() {
    let allowed = Allowed { requests: 10, tokens: 1_000_000, window: Duration::from_secs(1) };
    let provider = Provider::judging(allowed, openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.window = '10s'\nllm.margin = '400ms'\n[llm.models.gpt-4o]\nrpm = 100\nslice = '1s'",
    );
    std::thread::scope(|scope| {
        for _ in 0..15 {
            scope.spawn(|| {
                for _ in 0..2 {
                    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
                }
            });
        }
    });
    provider.assert_clean();
    let arrivals = provider.arrivals();
    assert_eq!(arrivals.len(), 30);
    assert!(arrivals[29].at - arrivals[0].at >= Duration::from_secs(2), "ten in each second");
}

/// Calls that use half as much again as they reserve. In no window are there more tokens than the limit and what the calls in flight used beyond what they
/// had reserved: the excess of each is a debt that later calls wait for. Without that, ten calls of 150 tokens would fit each window.
#[test]
fn b3_the_overshoot_is_what_calls_in_flight_used_beyond_what_they_reserved() {
    const LIMIT: u64 = 1_000;
    const CLIENTS: usize = 5;
    let (window, reserved, used) = (Duration::from_secs(3), 100, 150);
    let allowed = Allowed { requests: u64::MAX, tokens: u64::MAX, window };
    let provider = Provider::judging(allowed, |arrival| openai(arrival).paced(Duration::from_millis(200)));
    let server = gateway(
        &provider,
        "openai",
        "llm.log_dir = 'logs'\nllm.window = '3s'\nllm.margin = '300ms'\n[llm.models.gpt-4o]\ntpm = 1000",
    );
    let body = chat(reserved, "").replace(
        "\"input_tokens\":\"8\"",
        &format!("\"input_tokens\":\"8\",\"output_tokens\":\"{}\"", used - 8),
    );
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                for _ in 0..4 {
                    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
                }
            });
        }
    });
    let arrivals = provider.arrivals();
    assert_eq!((arrivals.len(), arrivals.iter().all(|arrival| arrival.tokens == used)), (4 * CLIENTS, true));
    // Each client has one call in flight.
    let most = LIMIT + CLIENTS as u64 * used.saturating_sub(reserved);
    // As in the judge: two arrivals may be nearer to each other than they were sent.
    let slack = Duration::from_millis(50);
    let fullest = arrivals.iter().map(|last| {
        let in_window =
            |arrival: &&Arrival| arrival.at <= last.at && last.at.duration_since(arrival.at) + slack < window;
        arrivals.iter().filter(in_window).map(|arrival| arrival.tokens).sum::<u64>()
    });
    let fullest = fullest.max().expect("arrivals");
    assert!(fullest <= most, "{fullest} tokens in a window: more than {most}");
    // The bound by the trail, which has both numbers of every call.
    until("the trail is written", || trail(&server).len() >= 4 * CLIENTS);
    for line in trail(&server).iter().filter(|line| line["status"] == "success") {
        assert_eq!((&line["total_tokens"], &line["reserved"]), (&json!(used), &json!(reserved)), "{line}");
    }
}

/// How many of so many calls are let in at once, each with an input of 100 tokens, 80 of which come from a cache.
fn cached_calls(server: &Tollgate, calls: usize, counts: bool) -> usize {
    let text = "word ".repeat(70);
    let metadata =
        json!({ "input_tokens": 20, "cached_tokens": 80, "output_tokens": 0, "cache_reads_count": counts });
    let body = json!({
        "model": "claude-x", "max_tokens": 5, "metadata": metadata, "messages": [{ "role": "user", "content": text }],
    });
    let ask = |_| {
        let answer = server.post("/v1/messages", &body.to_string());
        // What is not used comes back when the answer has ended.
        until("it is settled", || server.get("/v1/llm").body.contains("\"open\":0"));
        usize::from(answer.status == 200)
    };
    (0..calls).map(ask).sum()
}

/// Five times what a naive count lets in, and the judge is clean; for a model whose cache reads count, no more than the naive count.
#[test]
fn b7_what_a_cache_has_read_counts_where_the_provider_counts_it() {
    let allowed = Allowed { requests: 1_000, tokens: 2_000, window: Duration::from_secs(60) };
    for (more, counts, expected) in [("", false, 90..=100), ("\ncount_cache_reads = true", true, 18..=20)] {
        let provider = Provider::judging(allowed, anthropic);
        let rest = format!(
            "llm.log_dir = 'logs'\nllm.max_wait = '1ms'\n[llm.models.claude-x]\ninput_tpm = 2000{more}"
        );
        let server = gateway(&provider, "anthropic", &rest);
        let passed = cached_calls(&server, 110, counts);
        assert!(expected.contains(&passed), "{more}: {passed}");
        provider.assert_clean();
        assert_eq!(provider.arrivals().len(), passed);
        let each = if counts { 100 } else { 20 };
        assert_eq!(left(&server, "llm.claude-x.input_tpm"), 2_000 - each * passed as u64, "{more}");
        let is_noted = |line: &Value| {
            (&line["cached_tokens"], &line["input_tokens"], &line["source"])
                == (&json!(80), &json!(100), &json!("reported"))
        };
        until("the trail is complete", || {
            trail(&server).iter().filter(|line| is_noted(line)).count() == passed
        });
    }
}

/// OpenAI counts all input, so what came from a cache is noted and charged.
#[test]
fn b7_what_a_cache_has_read_counts_for_openai() {
    let allowed = Allowed { requests: 100, tokens: 1_000, window: Duration::from_secs(60) };
    let provider = Provider::judging(allowed, openai);
    let server = gateway(&provider, "openai", "llm.log_dir = 'logs'\n[llm.models.gpt-4o]\ntpm = 1000");
    let cached = |more: &str| {
        let metadata = "\"input_tokens\":\"200\",\"cached_tokens\":\"150\",\"output_tokens\":\"10\"";
        chat(300, more).replace("\"input_tokens\":\"8\"", metadata)
    };
    for more in ["", ",\"stream\":true"] {
        assert_eq!(server.post("/v1/chat/completions", &cached(more)).status, 200);
    }
    until("both are settled", || left(&server, "llm.gpt-4o.tpm") == 1_000 - 2 * 210);
    until("the trail has both", || trail(&server).len() == 2);
    for line in trail(&server) {
        assert_eq!((&line["cached_tokens"], &line["input_tokens"]), (&json!(150), &json!(200)), "{line}");
    }
    provider.assert_clean();
}

/// A stream whose reports of output add up to themselves: each has all output so far. It produces for longer than a window, so at its end only
/// what the last window produced is still charged. Charged at its beginning it would all be free again, and at its end all be taken.
#[test]
fn c2_output_counts_as_it_is_produced_and_reports_are_cumulative() {
    const OUTPUT: u64 = 300;
    let window = Duration::from_secs(2);
    let event = |kind: &str, data: Value| format!("event: {kind}\ndata: {data}\n\n");
    let delta = move |output: u64| {
        event(
            "message_delta",
            json!({ "type": "message_delta", "delta": {}, "usage": { "output_tokens": output } }),
        )
    };
    let provider = Provider::judging(Allowed { requests: 2, tokens: 1_000, window }, move |arrival| {
        let whole = anthropic(arrival).steps;
        let reports = (1..=30).map(|tenth| delta(tenth * OUTPUT / 30));
        let mut reply = Reply::events(reports).paced(Duration::from_millis(100));
        reply.steps.splice(0..0, whole[..6].iter().cloned());
        reply.steps.extend(whole.last().cloned());
        reply
    });
    let rest =
        "llm.window = '2s'\nllm.margin = '0s'\nllm.log_dir = 'logs'\n[llm.models.claude-x]\noutput_tpm = 400";
    let server = gateway(&provider, "anthropic", rest);
    let body = format!(r#"{{"model":"claude-x","max_tokens":{OUTPUT},"messages":[],"stream":true}}"#);
    // The first count of all loads the vocabulary, which takes long on a busy machine.
    assert_eq!(
        server.post("/v1/llm/check", &body.replace("[]", r#"[{"role":"user","content":"hi"}]"#)).status,
        200
    );
    let answer = server.post("/v1/messages", &body);
    let free = left(&server, "llm.claude-x.output_tpm");
    assert!(answer.status == 200 && answer.body.ends_with("\"message_stop\"}\n\n"), "{answer:?}");
    assert!((400 - OUTPUT + 10..400).contains(&free), "{free}");
    until("the trail is written", || trail(&server).len() == 1);
    assert_eq!(trail(&server)[0]["output_tokens"], OUTPUT, "the last report, and not their sum");
    // Two windows after its end nothing is charged, and another one goes.
    until("all has left the window", || left(&server, "llm.claude-x.output_tpm") == 400);
    assert_eq!(server.post("/v1/messages", &body).status, 200);
    provider.assert_clean();
}
