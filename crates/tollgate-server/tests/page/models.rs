//! The view of language models: a gateway before a scripted provider, with calls that were settled, one that is under way and two that wait.

use std::time::Duration;

use serde_json::{Value, json};
use tollgate_testkit::http::Connection;
use tollgate_testkit::provider::{Provider, Reply, openai};

use crate::browser::Browser;
use crate::server::{self, Tollgate};
use crate::{accessible, sound, text};

const CONFIG: &str = r#"
[server]
admin_token = "open sesame"
[llm]
window = "1h"
margin = "0s"
max_wait = "10m"
[llm.models.gpt-4o]
upstream = "up"
rpm = 10
tpm = 1000
[llm.models.gpt-4o-mini]
upstream = "two"
rpm = 10
[llm.clients.search-team]
key = "search-key"
weight = 3
[llm.clients.nightly]
key = "nightly-key"
priority = "batch"
"#;

/// A request that reserves so many tokens and uses as many; `act` says what the provider does.
fn chat(tokens: u64, act: &str) -> String {
    let cap = tokens - 8;
    let metadata = json!({ "input_tokens": "8", "act": act });
    json!({ "model": "gpt-4o", "messages": [{ "role": "user", "content": "hi" }], "max_tokens": cap, "metadata": metadata }).to_string()
}

fn lines(key: &str) -> [String; 2] {
    ["content-type: application/json".to_owned(), format!("authorization: Bearer {key}")]
}

fn call(server: &Tollgate, key: &str, body: &str) -> u16 {
    let lines = lines(key);
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    server.ask("POST", "/v1/chat/completions", &lines, body).status
}

/// A call that is not waited for: it ends with the server.
fn begin(server: &Tollgate, key: &'static str, body: String) {
    let address = server.http();
    std::thread::spawn(move || {
        let lines = lines(key);
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        let call = || Connection::open(address).ask_with_body("POST", "/v1/chat/completions", &lines, &body);
        // The server is gone before it answers.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    });
}

fn limited() -> Reply {
    Reply::json(429, &json!({ "error": { "message": "slow down", "type": "tokens" } }))
        .header("retry-after: 5000")
}

#[test]
fn who_waits_for_what_and_why_is_said_in_words_to_admins() {
    let provider = Provider::start(|arrival| match arrival.body["metadata"]["act"].as_str() {
        Some("hold") => openai(arrival).paced(Duration::from_secs(120)),
        Some("limit") if arrival.header("authorization") == Some("Bearer second-key") => limited(),
        Some("limit-all") => limited(),
        _ => openai(arrival).header("x-ratelimit-remaining-requests: 1000"),
    });
    let upstream = format!(
        "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{0}/v1'\nkeys = [{{ key = 'provider-key', group = 'org-1' }}]\n\
         [llm.upstreams.two]\nkind = 'openai'\nbase_url = 'http://{0}/v1'\n\
         keys = [{{ key = 'second-key', group = 'org-2' }}, {{ key = 'third-key', group = 'org-3' }}]\n",
        provider.address()
    );
    let server = server::with_config(&format!("{CONFIG}{upstream}"));
    let browser = Browser::start();
    browser.media("light");
    browser.size(1400, 1000);
    browser.open(&format!("{}/models", server.url()));
    browser.until("document.getElementById('link').dataset.state === 'live'");

    // It names clients, so it is for admins.
    assert_eq!(server.get("/v1/llm").status, 401);
    browser.until("!document.getElementById('models-token-form').hidden");
    accessible(&browser, "models, asking for the token");
    browser.type_in("#models-token", "wrong");
    browser.click("#models-token-form button");
    browser.until("document.getElementById('models-problem').textContent === 'That is not the admin token.'");
    browser.type_in("#models-token", "open sesame");
    browser.click("#models-token-form button");
    browser.until("!document.getElementById('models-all').hidden");
    browser.until("document.querySelectorAll('#models-rows tr').length === 2");
    sound(&browser, "models, empty");
    accessible(&browser, "models, empty");
    browser.picture("models-empty");

    // Three calls of 200 tokens are settled, one is under way.
    for _ in 0..3 {
        assert_eq!(call(&server, "search-key", &chat(200, "")), 200);
    }
    begin(&server, "search-key", chat(200, "hold"));
    let cell =
        |index: u8| format!("document.querySelector('#models-rows tr[data-model=gpt-4o]').cells[{index}]");
    browser.until(&format!("{}.textContent === '4 of 10'", cell(1)));
    browser.until(&format!("{}.textContent === '800 of 1,000'", cell(2)));
    browser.until(&format!(
        "{}.querySelector('svg').getAttribute('aria-label') === '800 of 1,000 TPM used, 200 of them reserved'",
        cell(2)
    ));
    browser.until("document.querySelector('#models-clients tr')?.textContent === 'search-team3100 %'");
    browser.until("document.getElementById('models-estimates').textContent.includes('gpt-4oexact')");
    browser.until("document.getElementById('models-facts').textContent.includes('Under way now1 call')");

    let answer = server.ask("GET", "/v1/llm", &["authorization: Bearer open sesame"], "");
    let model: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert_eq!(model["models"][0]["limits"][1]["reserved"], json!(200), "{}", answer.body);

    // One needs more than is left; a batch call waits behind it.
    begin(&server, "search-key", chat(500, ""));
    browser.until("document.querySelectorAll('#models-line li').length === 1");
    begin(&server, "nightly-key", chat(100, ""));
    browser.until("document.querySelectorAll('#models-line li').length === 2");
    browser.until("document.getElementById('models-line-count').textContent === '2 of 2, next first'");
    let item = |index: u8| text(&browser, &format!("#models-line li:nth-child({index})"));
    let (first, second) = (item(1), item(2));
    assert!(first.starts_with("1search-team interactive · gpt-4o · 500 tokens"), "{first}");
    assert!(
        first.contains("It needs 500 tokens, and 800 of 1,000 TPM are used or reserved. Enough of them leaves the window in "),
        "{first}"
    );
    assert!(second.starts_with("2nightly batch · gpt-4o · 100 tokens"), "{second}");
    assert!(
        second
            .contains("It is batch, so interactive calls go first; in 15 min it is treated as one of them."),
        "{second}"
    );
    assert!(second.contains("gives up in 10 min") || second.contains("gives up in 9 min"), "{second}");
    browser.until(&format!("{}.textContent === '2'", cell(3)));

    browser.until(&format!("{}.textContent === 'here'", cell(6)));
    let group = |name: &str| {
        format!(
            "[...document.querySelectorAll('#models-groups tr')].find((row) => row.textContent.startsWith('{name}')).textContent"
        )
    };
    browser.until(&format!("{}.includes('in useits reports agree with our count')", group("org-1")));
    browser.until(&format!("{}.includes('in usenothing reported yet')", group("org-3")));

    // The provider says 429 to one key of another model. Another group takes its calls, so no caller sees it.
    let mini = |act: &str| chat(9, act).replace("gpt-4o", "gpt-4o-mini");
    for _ in 0..3 {
        assert_eq!(call(&server, "search-key", &mini("limit")), 200);
    }
    browser.until(&format!("{}.includes('parked')", group("org-2")));
    browser.until(&format!("{}.includes('takes the calls of org-2')", group("org-3")));
    let alert = "document.querySelector('.alert[data-key=models-parked]')?.textContent";
    browser.until(&format!("{alert}.includes('Calls go to org-3; no caller saw a 429.')"));
    browser.until(&format!("/asked to leave alone: two org-2 at [0-9:]{{8}}\\./.test({alert})"));
    let passed_on = "[...document.querySelectorAll('#models-sums > div')].at(-1).textContent";
    browser.until(&format!("{passed_on} === '429s that reached a caller0'"));
    // With nobody left to take it, one reaches a caller.
    assert_eq!(call(&server, "search-key", &mini("limit-all")), 429);
    browser.until(&format!("{passed_on} === '429s that reached a caller1'"));
    browser.until(&format!("{alert}.startsWith('2 groups of keys are parked.')"));

    // When they were parked is marked in the chart, whichever time it shows.
    let drawn = "document.getElementById('models-chart').textContent";
    browser.until(&format!("!{drawn}.includes('parked')"));
    browser.run("const of = document.getElementById('models-of'); of.value = 'gpt-4o-mini'; of.dispatchEvent(new Event('change'))");
    browser.until(&format!("{drawn}.includes('org-3 parked')"));
    for (range, words, bars) in
        [("5m", "last 5 minutes", 60), ("24h", "last 24 hours", 96), ("1h", "last hour", 60)]
    {
        browser.click(&format!("#models-range [data-range='{range}']"));
        browser.until(&format!(
            "document.getElementById('models-chart').getAttribute('aria-label').startsWith('Tokens a minute of gpt-4o-mini, {words}')"
        ));
        browser.run("document.getElementById('models-numbers').open = false");
        browser.run("document.getElementById('models-numbers').open = true");
        browser.until(&format!("document.querySelectorAll('#models-numbers tbody tr').length === {bars}"));
        browser.until(&format!("{drawn}.includes('org-3 parked')"));
    }
    browser.run("document.getElementById('models-numbers').open = false");

    for (scheme, name, width, height) in
        [("light", "wall", 1400, 1000), ("dark", "phone", 390, 800), ("light", "narrow", 320, 700)]
    {
        browser.media(scheme);
        browser.size(width, height);
        sound(&browser, &format!("models, {scheme}, {name}"));
        accessible(&browser, &format!("models, {scheme}, {name}"));
        browser.picture(&format!("models-{name}-{scheme}"));
    }
    let answer = server.ask("GET", "/v1/llm", &["authorization: Bearer open sesame"], "");
    for hidden in ["search-key", "nightly-key", "provider-key", "second-key", "third-key", "sesame", "\"hi\""]
    {
        assert!(!answer.body.contains(hidden), "{hidden}: {}", answer.body);
    }
    assert_eq!(browser.run("return JSON.stringify(localStorage) + document.cookie"), json!("{}"));
}
