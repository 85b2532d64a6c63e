//! Configs that change while calls run.

use std::time::Duration;

use tollgate_testkit::provider::{Provider, Reply, openai};
use tollgate_testkit::tollgate::Tollgate;

use crate::{chat, gateway, left, until};

fn upstream(provider: &Provider) -> String {
    format!(
        "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\napi_key = 'provider-key'\n",
        provider.address()
    )
}

/// Whether the server is a gateway is decided when it starts. All else in the file is applied.
#[test]
fn a_section_that_comes_or_goes_waits_for_a_restart_and_holds_up_nothing_else() {
    let provider = Provider::start(openai);
    let window =
        |limit: u64| format!("[limits.api]\nstrategy = 'fixed_window'\nlimit = {limit}\nwindow = '1h'\n");
    let models = format!("{}[llm.models.gpt-4o]\nrpm = 2\n", upstream(&provider));
    let capacity = |server: &Tollgate| {
        let body = server.get("/v1/status?limit=api&key=user:1").body;
        serde_json::from_str::<serde_json::Value>(&body).expect("JSON")["capacity"].as_u64()
    };
    let reload = |server: &Tollgate, config: &str| {
        server.write_config(config);
        let answer = server.post("/v1/reload", "");
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.body
    };

    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate"))
        .config(&format!("llm.max_wait = '1ms'\n{models}{}", window(5)))
        .start();
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 200);
    let said = reload(&server, &window(7));
    assert!(said.contains("\"restart\":[\"llm.upstreams\"]"), "{said}");
    assert!(!said.contains("llm.gpt-4o.rpm"), "its limits stay: {said}");
    assert_eq!(capacity(&server), Some(7));
    let answers = [(); 2].map(|()| server.post("/v1/chat/completions", &chat(100, "")).status);
    assert_eq!(answers, [200, 429], "the gateway goes on under its limits");

    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&window(5)).start();
    let said = reload(&server, &format!("{models}{}", window(7)));
    assert!(said.contains("\"restart\":[\"llm.upstreams\"]"), "{said}");
    assert_eq!(capacity(&server), Some(7));
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 404);
    // It is the same after another reload, until the restart.
    assert!(reload(&server, &format!("{models}{}", window(8))).contains("llm.upstreams"));
    assert_eq!(capacity(&server), Some(8));
}

/// A gateway that others reach has clients. A file without them would let everybody spend the provider's quota, so it is refused.
#[test]
fn a_reload_does_not_open_the_gateway_to_everybody() {
    let provider = Provider::start(openai);
    let models = format!(
        "server.admin_token = 'admin'\nserver.resp_password = 'resp'\n{}[llm.models.gpt-4o]\nrpm = 100\n",
        upstream(&provider)
    );
    let client = "[llm.clients.team]\nkey = 'team-key'\n";
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate"))
        .config(&format!("{models}{client}"))
        .args(["--listen", "0.0.0.0:0"])
        .start();
    server.write_config(&models);
    let answer = server.ask("POST", "/v1/reload", &["authorization: Bearer admin"], "");
    assert!(answer.status == 400 && answer.body.contains("[llm.clients]"), "{answer:?}");
    assert_eq!(server.post("/v1/chat/completions", &chat(100, "")).status, 401);
    // Another client may take its place.
    server.write_config(&format!("{models}{}", client.replace("team", "crew")));
    let answer = server.ask("POST", "/v1/reload", &["authorization: Bearer admin"], "");
    assert_eq!(answer.status, 200, "{answer:?}");
    let ask = |key: &str| {
        let lines = ["content-type: application/json".to_owned(), format!("authorization: Bearer {key}")];
        let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
        server.ask("POST", "/v1/chat/completions", &lines, &chat(100, "")).status
    };
    assert_eq!((ask("team-key"), ask("crew-key")), (401, 200));
}

/// What was reserved under the old numbers is settled where it was reserved, and who waits goes by the new ones.
#[test]
fn a_limit_that_changes_under_calls_loses_nothing() {
    let provider = Provider::start(|arrival| match arrival.body["user"].as_str() {
        Some(_) => openai(arrival).paced(Duration::from_millis(800)),
        None => openai(arrival),
    });
    let config = |tpm: u64| format!("[llm.models.gpt-4o]\nrpm = 100\ntpm = {tpm}");
    let server = gateway(&provider, "openai", &config(1_000));
    let text = std::fs::read_to_string(server.home().join("tollgate.toml")).expect("a config");
    std::thread::scope(|scope| {
        // It reserves 900 and reports 100.
        let body = chat(900, ",\"user\":\"slow\"")
            .replace("\"input_tokens\":\"8\"", "\"input_tokens\":\"8\",\"output_tokens\":\"92\"");
        let slow = scope.spawn({
            let server = &server;
            move || server.post("/v1/chat/completions", &body)
        });
        until("it is under way", || provider.arrivals().len() == 1);
        let waits = scope.spawn(|| server.post("/v1/chat/completions", &chat(600, "")));
        until("one waits", || server.get("/metrics").body.contains("tollgate_llm_queue{model=\"gpt-4o\"} 1"));
        server.reload(&text.replace("tpm = 1000", "tpm = 1600"));
        assert_eq!(waits.join().expect("an answer").status, 200);
        assert_eq!(slow.join().expect("an answer").status, 200);
    });
    until("both are settled", || left(&server, "llm.gpt-4o.tpm") == 1_600 - 100 - 600);
    server.reload(&text.replace("tpm = 1000", "tpm = 500"));
    let check = server.post("/v1/llm/check", &chat(100, "")).body;
    assert!(check.contains("\"can_proceed\":false") && check.contains("/ 500 TPM"), "{check}");
}

/// A call waits while the provider's keys change: it goes with a key of the new config, and neither with one that is gone nor with the caller's own, which is a
/// key of the gateway.
#[test]
fn a_call_that_waits_while_keys_change_goes_with_the_new_ones() {
    let provider = Provider::start(openai);
    let config = |keys: &str, clients: &str| {
        format!(
            "[llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://{}/v1'\n{keys}\n[llm.models.gpt-4o]\nrpm = 1\n{clients}",
            provider.address()
        )
    };
    let team = "[llm.clients.team]\nkey = 'team-key'\n";
    let old = config("keys = [{ key = 'old-key', group = 'one' }]", team);
    for (new, expected) in [
        (config("keys = [{ key = 'new-key', group = 'two' }]", team), Some("Bearer new-key")),
        // Callers are to bring their own keys from now on, and this one has shown a key of the gateway.
        (config("", ""), None),
    ] {
        let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&old).start();
        let before = provider.arrivals().len();
        let ask = || {
            let lines =
                ["content-type: application/json", "authorization: Bearer team-key", "x-api-key: team-key"];
            server.ask("POST", "/v1/chat/completions", &lines, &chat(100, "")).status
        };
        assert_eq!(ask(), 200);
        std::thread::scope(|scope| {
            let waits = scope.spawn(ask);
            until("one waits", || {
                server.get("/metrics").body.contains("tollgate_llm_queue{model=\"gpt-4o\"} 1")
            });
            server.reload(&new);
            assert_eq!(waits.join().expect("an answer"), 200, "the new group has room");
        });
        let arrivals = provider.arrivals();
        let sent: Vec<_> = arrivals[before..].iter().map(|one| one.header("authorization")).collect();
        assert_eq!(sent, [Some("Bearer old-key"), expected]);
        assert!(arrivals.iter().all(|one| one.header("x-api-key").is_none()));
    }
}

/// Nobody could tell two clients apart that show one key, also where it is in two variables.
#[test]
fn two_clients_with_one_key_are_refused() {
    let provider = Provider::start(openai);
    let models = format!("{}[llm.models.gpt-4o]\nrpm = 100\n", upstream(&provider));
    let client = |name: &str, variable: &str| format!("[llm.clients.{name}]\nkey = 'env:{variable}'\n");
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate"))
        .config(&format!("{models}{}", client("team", "TEAM_KEY")))
        .envs(&[("TEAM_KEY", "one-and-the-same"), ("CREW_KEY", "one-and-the-same")])
        .start();
    server.write_config(&format!("{models}{}{}", client("team", "TEAM_KEY"), client("crew", "CREW_KEY")));
    let answer = server.post("/v1/reload", "");
    assert!(answer.status == 400 && answer.body.contains("llm.clients.crew.key"), "{answer:?}");
    assert!(!answer.body.contains("one-and-the-same"), "{answer:?}");
}

/// A reload that changes something else keeps what is known of an upstream: that it is overloaded, and which key is next.
#[test]
fn a_reload_of_something_else_keeps_the_upstream() {
    let provider = Provider::start(|arrival| match arrival.body["user"].as_str() {
        Some(_) => Reply::json(529, &serde_json::json!({})).header("retry-after: 60"),
        None => openai(arrival),
    });
    let keys = "keys = [{ key = 'k1', group = 'one' }, { key = 'k2', group = 'one' }]";
    let config = |key: &str| {
        format!(
            "llm.max_wait = '1ms'\n{}[llm.models.gpt-4o]\nrpm = 100\n",
            upstream(&provider).replace("api_key = 'provider-key'", &keys.replace("k2", key))
        )
    };
    let server = Tollgate::builder(env!("CARGO_BIN_EXE_tollgate")).config(&config("k2")).start();
    let ask = |more: &str| server.post("/v1/chat/completions", &chat(100, more)).status;
    assert_eq!(ask(""), 200);
    server.reload(&config("k2").replace("rpm = 100", "rpm = 200"));
    assert_eq!(ask(""), 200);
    let sent: Vec<String> =
        provider.arrivals().iter().filter_map(|one| one.header("authorization").map(str::to_owned)).collect();
    assert_eq!(sent, ["Bearer k1", "Bearer k2"], "the next key is the next");
    assert_eq!(ask(",\"user\":\"overloaded\""), 529);
    server.reload(&config("k2").replace("rpm = 100", "rpm = 300"));
    assert_eq!((ask(""), provider.arrivals().len()), (503, 3), "it is still overloaded");
    // Another key is another upstream.
    server.reload(&config("k3"));
    assert_eq!((ask(""), provider.arrivals().len()), (200, 4));
}
