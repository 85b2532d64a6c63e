//! The announcement of `tollgate serve` at start, for people: what it serves, at which address, and a command to try.
//!
//! The command fits the config: a limit that can be charged, a concurrency limit, language models, background jobs, or none of
//! these. It is the last line, so that a program that starts a server knows that the announcement is complete.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tollgate::Rule;

use super::Listeners;
use crate::app::App;
use crate::cli::ServeArgs;
use crate::config::Config;
use crate::failure::print_line;
use crate::validate::is_concurrency;

/// Prints the announcement.
pub(super) fn announce(args: &ServeArgs, address: SocketAddr, listeners: &Listeners, app: &App) {
    let state = app.state();
    let file = args.config.as_ref().map(|file| file.display().to_string());
    let policy = match &file {
        Some(file) => file.clone(),
        None if args.is_demo => "the example policy to made-up callers".to_owned(),
        None => "the example policy (name your own with --config)".to_owned(),
    };
    print_line(format_args!("tollgate serves {policy}, counting in {}", state.config.gate.store.mode.name()));
    print_line(format_args!("  page   http://{address}/"));
    print_line(format_args!("  API    http://{address}/v1/check"));
    let address_of = |listener: &Option<TcpListener>| listener.as_ref().and_then(|one| one.local_addr().ok());
    if let Some(resp) = address_of(&listeners.resp) {
        print_line(format_args!("  RESP   redis://{resp}"));
    }
    if let Some(grpc) = address_of(&listeners.grpc) {
        print_line(format_args!("  Envoy  grpc://{grpc}"));
    }
    if app.models().is_some() {
        print_line(format_args!("  models http://{address}/v1 (OpenAI), http://{address} (Anthropic)"));
    }
    print_line(format_args!("  docs   http://{address}/openapi.json"));
    print_line(format_args!("  try    {}", line_to_try(&state.config, file.as_deref(), address)));
}

/// A command to try with this config.
fn line_to_try(config: &Config, file: Option<&str>, address: SocketAddr) -> String {
    let post = |path: &str, headers: &str, body: &str| {
        format!("curl -s http://{address}{path} -H 'content-type: application/json'{headers} -d '{body}'")
    };
    let policy = &config.gate.policy;
    // The limits of [jobs] and [llm] are charged by jobs and models.
    let is_plain = |name: &&str| !name.starts_with("jobs.") && !name.starts_with("llm.");
    let plain: Vec<&str> = policy.rules().iter().map(Rule::name).filter(is_plain).collect();
    if let Some(limit) = plain.iter().find(|name| !is_concurrency(policy, name)) {
        return post("/v1/check", "", &format!("{{\"limit\":\"{limit}\",\"key\":\"user:42\"}}"));
    }
    if let Some(limit) = plain.first() {
        let body = format!("{{\"limit\":\"{limit}\",\"key\":\"user:42\",\"ttl_ms\":1000}}");
        return post("/v1/reserve", "", &body);
    }
    if let Some(llm) = &config.llm
        && let Some(model) = llm.models.first()
    {
        let header = if llm.clients.is_empty() { "" } else { " -H 'authorization: Bearer KEY-OF-A-CLIENT'" };
        let model = serde_json::Value::from(model.name.as_str()).to_string().replace('\'', "'\\''");
        let message = "{\"role\":\"user\",\"content\":\"hello\"}";
        let body = format!("{{\"model\":{model},\"messages\":[{message}]}}");
        return post("/v1/llm/check", header, &body);
    }
    match file {
        Some(file) if !config.jobs.is_empty() => format!("tollgate jobs status --config {file}"),
        Some(file) => {
            format!("add a limit to {file}, as in docs/config.md; a change is read while this runs")
        }
        None => format!("curl -s http://{address}/v1/server"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::parse;

    #[test]
    fn the_line_to_try_fits_the_config() {
        let upstream = "[llm.upstreams.a]\nkind = 'openai'\nbase_url = 'http://localhost/v1'\n";
        let model = format!("{upstream}[llm.models.\"it's\"]\nrpm = 5\n");
        let client =
            format!("{}[llm.clients.b]\nkey = 'c'\n", model.replace("/v1'\n", "/v1'\napi_key = 'd'\n"));
        let jobs = "[jobs.types.mail]\nlimit = 2\nwindow = '1s'\n";
        let lease = "[limits.pool]\nstrategy = 'concurrency'\nlimit = 1\nlease = '1s'\n";
        let plain = "[limits.api]\nunlimited = true\n";
        for (config, expected) in [
            (
                format!("{lease}{plain}{jobs}{model}"),
                "/v1/check -H 'content-type: application/json' -d '{\"limit\":\"api\",",
            ),
            (lease.to_owned(), "/v1/reserve -H 'content-type: application/json' -d '{\"limit\":\"pool\","),
            (
                format!("{jobs}{model}"),
                "/v1/llm/check -H 'content-type: application/json' -d '{\"model\":\"it'\\''s\",",
            ),
            (client, " -H 'authorization: Bearer KEY-OF-A-CLIENT' -d '"),
            (jobs.to_owned(), "tollgate jobs status --config my.toml"),
            (upstream.to_owned(), "add a limit to my.toml"),
            (String::new(), "add a limit to my.toml"),
        ] {
            let line = line_to_try(&parse(&config), Some("my.toml"), SocketAddr::from(([127, 0, 0, 1], 1)));
            assert!(line.contains(expected), "{config}\n{line}");
        }
    }
}
