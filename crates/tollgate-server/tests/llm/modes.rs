//! Limits of models are ordinary limits: in shadow mode they refuse nothing and count what they would have refused, and single groups of
//! keys may have other numbers.

use tollgate_testkit::provider::{Provider, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, until};

/// The decisions about a limit with these labels.
fn decisions(server: &Tollgate, labels: &[&str]) -> f64 {
    let metrics = server.get("/metrics").body;
    let lines = metrics.lines().filter(|line| line.starts_with("rate_limiter_decisions_total{"));
    let of = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    of.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[test]
fn a_model_in_shadow_mode_sends_beyond_its_limit_and_counts_what_it_would_have_refused() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.max_wait = '1ms'\n[llm.models.gpt-4o]\nrpm = 2\ntpm = 100000\nshadow = true",
    );
    for sent in 1..=5 {
        let answer = server.post("/v1/chat/completions", &chat(100, ""));
        assert_eq!((answer.status, provider.arrivals().len()), (200, sent), "{answer:?}");
    }
    let of = |limiter: &str, decision: &str| {
        let limiter = format!("limiter=\"llm.gpt-4o.{limiter}\"");
        decisions(&server, &["shadow=\"true\"", &limiter, &format!("decision=\"{decision}\"")])
    };
    assert_eq!((of("rpm", "allow"), of("rpm", "deny")), (2.0, 3.0), "{}", server.get("/metrics").body);
    assert_eq!((of("tpm", "allow"), of("tpm", "deny")), (5.0, 0.0));
    let usage = "tollgate_llm_usage{model=\"gpt-4o\",limit=\"RPM\"} 1";
    assert!(server.get("/metrics").body.contains(usage), "{}", server.get("/metrics").body);
    // A request that could never fit passes, too.
    assert_eq!(server.post("/v1/chat/completions", &chat(200_000, "")).status, 200);
    assert_eq!(provider.arrivals().len(), 6);
}

#[test]
fn an_override_changes_what_one_group_of_keys_may() {
    let provider = Provider::start(openai);
    let config = format!(
        "llm.max_wait = '1ms'\n[llm.models.gpt-4o]\nrpm = 2\n[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\n\
         keys = [{{ key = 'k1', group = 'one' }}, {{ key = 'k2', group = 'two' }}]\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start();
    let ask = || server.post("/v1/chat/completions", &chat(100, "")).status;
    // Each group has two a minute, and calls take the groups in turn.
    let mut answered = 0;
    for _ in 0..12 {
        answered += usize::from(ask() == 200);
    }
    assert_eq!(answered, 4);
    let raise = r#"{"limit":"llm.gpt-4o.rpm","key":"llm:one","override":{"limit":5}}"#;
    let answer = server.post("/v1/overrides", raise);
    assert_eq!(answer.status, 200, "{answer:?}");
    let capacity = |group: &str| {
        let body = server.get(&format!("/v1/status?limit=llm.gpt-4o.rpm&key=llm:{group}")).body;
        let status: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        (status["capacity"].as_u64(), status["remaining"].as_u64())
    };
    assert_eq!((capacity("one"), capacity("two")), ((Some(5), Some(3)), (Some(2), Some(0))));
    for _ in 0..12 {
        answered += usize::from(ask() == 200);
    }
    assert_eq!(answered, 7, "what was used before stays used");
    let keys = |key: &str| {
        let shown = format!("Bearer {key}");
        let arrivals = provider.arrivals();
        arrivals.iter().filter(|arrival| arrival.header("authorization") == Some(&shown)).count()
    };
    assert_eq!((keys("k1"), keys("k2")), (5, 2));
}

/// An override of a client's own limit, by the client's key.
#[test]
fn an_override_blocks_one_client_alone() {
    let provider = Provider::start(openai);
    let server = gateway(
        &provider,
        "openai",
        "llm.max_wait = '1ms'\n[llm.models.gpt-4o]\nrpm = 100\n\
         [llm.clients.team]\nkey = 'team-key'\nmodels.gpt-4o = { rpm = 50 }\n\
         [llm.clients.crew]\nkey = 'crew-key'\nmodels.gpt-4o = { rpm = 50 }",
    );
    let block = r#"{"limit":"llm.client.team.gpt-4o.rpm","key":"llm:team","override":{"blocked":true}}"#;
    let answer = server.post("/v1/overrides", block);
    assert_eq!(answer.status, 200, "{answer:?}");
    let ask = |key: &str| {
        let lines = ["content-type: application/json".to_owned(), format!("x-api-key: {key}")];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        server.ask("POST", "/v1/chat/completions", &lines, &chat(100, ""))
    };
    let refused = ask("team-key");
    assert!(matches!(refused.status, 400 | 429), "{refused:?}");
    assert_eq!(ask("crew-key").status, 200);
    until("nothing of the refused call is charged", || left(&server, "llm.gpt-4o.rpm") == 99);
}
