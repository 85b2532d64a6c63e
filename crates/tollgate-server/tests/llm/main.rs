//! The gateway of language models against a scripted provider that judges it. Scenarios that need no process are in the tests of
//! `tollgate-llm`, on a clock that is moved by hand.

mod admission;
mod bad_input;
#[path = "../../../tollgate/tests/telemetry/collector.rs"]
#[allow(dead_code)] // Not all that is received is looked at here.
mod collector;
mod feedback;
mod https;
mod judged;
mod modes;
mod operations;
mod reloads;
mod retries;
#[cfg(feature = "services")]
mod routes;
mod run;
#[cfg(feature = "services")]
mod sdk_errors;
#[cfg(feature = "services")]
mod sdks;
mod settlement;
#[cfg(feature = "services")]
mod several;
mod streaming;

use std::time::{Duration, Instant};

use tollgate_testkit::provider::Provider;
use tollgate_testkit::tollgate::Tollgate;

/// A gateway before a provider of either kind, with these models and what else is said of `[llm]`.
fn gateway(provider: &Provider, kind: &str, rest: &str) -> Tollgate {
    let base = match kind {
        "openai" => format!("http://{}/v1", provider.address()),
        _ => format!("http://{}", provider.address()),
    };
    let config = format!(
        "{rest}\n[llm.upstreams.up]\nkind = '{kind}'\nbase_url = '{base}'\napi_key = 'provider-key'\n[limits.x]\nunlimited = true\n"
    );
    Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config).start()
}

/// A request that reserves so many tokens of gpt-4o and is reported to have used as many.
fn chat(tokens: u64, more: &str) -> String {
    let cap = tokens - 8;
    format!(
        r#"{{"model":"gpt-4o","messages":[{{"role":"user","content":"hi"}}],"max_tokens":{cap},"metadata":{{"input_tokens":"8"}}{more}}}"#
    )
}

/// What is left of a limit of the upstream.
fn left(server: &Tollgate, limit: &str) -> u64 {
    let body = server.get(&format!("/v1/status?limit={limit}&key=llm:up")).body;
    let status: serde_json::Value =
        serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
    status["remaining"].as_u64().unwrap_or_else(|| panic!("{body}"))
}

/// Waits until something is so; fails after a while.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The lines of the trail.
fn trail(server: &Tollgate) -> Vec<serde_json::Value> {
    let text =
        std::fs::read_to_string(server.home().join("logs/gateway/rate_limits.jsonl")).unwrap_or_default();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}
