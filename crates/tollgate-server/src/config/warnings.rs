//! What a server would miss on this machine although its config is sound, and variables that set nothing.
//!
//! These are warnings and no mistakes. A machine that builds has no secrets, and a name that begins with `TOLLGATE_` may be somebody
//! else's. A name within a section that has variables (`TOLLGATE_STORE_…`) is a mistake already, found by the library.

use std::path::Path;

use tollgate::config::{Extension, Password, StoreMode, is_service_link, nearest};
use tollgate_llm::LlmSection;

use super::{Config, ServerConfig};
use crate::cli;

/// Sections whose names of variables are checked where the config is read.
const CHECKED: [&str; 5] = ["STORE_", "LIMITS_", "REQUESTS_", "SERVER_", "LLM_"];

/// Variables that begin as ours do and set nothing. Those that the config names (`env:TOLLGATE_TOKEN`) are in use.
pub(crate) fn of_variables<'a>(
    variables: impl IntoIterator<Item = (&'a str, &'a str)>,
    config: &str,
) -> Vec<String> {
    let known = known();
    let unused = variables.into_iter().filter(|(variable, value)| {
        let rest = variable.strip_prefix("TOLLGATE_");
        rest.is_some_and(|rest| !CHECKED.iter().any(|section| rest.starts_with(section)))
            && !value.is_empty()
            && !known.iter().any(|name| name == variable)
            && !is_service_link(variable, value)
            && !config.contains(&format!("env:{variable}"))
    });
    unused
        .map(|(variable, _)| format!("environment {variable}: sets nothing{}", suggestion(variable, &known)))
        .collect()
}

/// All variables that do not depend on the names of limits.
fn known() -> Vec<String> {
    let of_section = |section: &dyn Extension| {
        let names = section.variables().iter();
        names
            .map(|(field, _)| format!("TOLLGATE_{}_{}", section.name(), field).to_uppercase())
            .collect::<Vec<_>>()
    };
    let mut known: Vec<String> = tollgate::config::Config::variables().collect();
    known.extend(of_section(&ServerConfig::default()));
    known.extend(of_section(&LlmSection::default()));
    known.extend(cli::variables());
    known
}

/// What may have been meant: a name that lacks its section, or one with a slip.
fn suggestion(variable: &str, known: &[String]) -> String {
    let field = variable.strip_prefix("TOLLGATE").unwrap_or(variable);
    let lower: Vec<String> = known.iter().map(|name| name.to_lowercase()).collect();
    let meant = known.iter().find(|name| name.ends_with(field)).cloned().or_else(|| {
        nearest(&variable.to_lowercase(), lower.iter().map(String::as_str)).map(str::to_uppercase)
    });
    match (field, meant) {
        ("_CONFIG", _) => "; name the config with --config".to_owned(),
        ("_LISTEN", _) => "; did you mean `TOLLGATE_SERVER_HTTP`?".to_owned(),
        (_, Some(meant)) => format!("; did you mean `{meant}`?"),
        (_, None) => "; docs/config.md lists the variables".to_owned(),
    }
}

/// Secrets that are not set, and files that are not there.
pub(crate) fn of_machine(config: &Config, lookup: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut found = Vec::new();
    let mut secret = |field: &str, password: Option<&Password>| {
        if let Some(Password::Env(name)) = password
            && lookup(name).is_none_or(|value| value.is_empty())
        {
            found.push(format!(
                "{field}: the environment variable {name} is not set here; the config needs it to be used"
            ));
        }
    };
    let Config { gate, server, jobs, llm, .. } = config;
    secret("server.admin_token", server.admin_token.as_ref());
    secret("server.resp_password", server.resp_password.as_ref());
    let redis = gate.store.redis.as_ref().filter(|_| gate.store.mode == StoreMode::Redis);
    // The database of the store is that of jobs too, where they have none of their own.
    let has_jobs_there = !jobs.is_empty() && jobs.database.is_none();
    let postgres = gate.store.postgres.as_ref();
    let postgres = postgres.filter(|_| gate.store.mode == StoreMode::Postgres || has_jobs_there);
    secret("store.redis.password", redis.and_then(|redis| redis.password.as_ref()));
    secret("store.postgres.password", postgres.and_then(|postgres| postgres.password.as_ref()));
    let upstreams = llm.iter().flat_map(|llm| &llm.upstreams);
    for upstream in upstreams.clone() {
        for key in &upstream.keys {
            secret(&format!("llm.upstreams.{}", upstream.name), Some(&key.key));
        }
    }
    for client in llm.iter().flat_map(|llm| &llm.clients) {
        secret(&format!("llm.clients.{}.key", client.name), Some(&client.key));
    }
    let mut file = |field: String, path: Option<&Path>| {
        if let Some(path) = path.filter(|path| !path.is_file()) {
            found.push(format!("{field}: there is no file {} here", path.display()));
        }
    };
    if let Some(redis) = redis {
        file("store.redis.ca_file".to_owned(), redis.ca_file.as_deref());
        file("store.redis.cert_file".to_owned(), redis.cert_file.as_deref());
        file("store.redis.key_file".to_owned(), redis.key_file.as_deref());
    }
    if let Some(postgres) = postgres {
        file("store.postgres.ca_file".to_owned(), postgres.ca_file.as_deref());
        file("store.postgres.cert_file".to_owned(), postgres.cert_file.as_deref());
        file("store.postgres.key_file".to_owned(), postgres.key_file.as_deref());
    }
    for upstream in upstreams {
        file(format!("llm.upstreams.{}.ca_file", upstream.name), upstream.ca_file.as_deref());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::parse;

    #[test]
    fn a_variable_that_sets_nothing_is_named_with_what_was_meant() {
        for (variable, expected) in [
            ("TOLLGATE_FOO", Some("docs/config.md lists the variables")),
            ("TOLLGATE_LOG", Some("did you mean `TOLLGATE_SERVER_LOG`?")),
            ("TOLLGATE_MODE", Some("did you mean `TOLLGATE_STORE_MODE`?")),
            ("TOLLGATE_ADMIN_TOKNE", Some("did you mean `TOLLGATE_ADMIN_TOKEN`?")),
            ("TOLLGATE_CONFIG", Some("name the config with --config")),
            ("TOLLGATE_LISTEN", Some("did you mean `TOLLGATE_SERVER_HTTP`?")),
            ("TOLLGATE_JOBS_DATABASE", Some("sets nothing")),
            // Of the command line, of a section that is checked, of the config, and of others.
            ("TOLLGATE_SERVER", None),
            ("TOLLGATE_ADMIN_TOKEN", None),
            ("TOLLGATE_STORE_MODE", None),
            ("TOLLGATE_LIMITS_API_RATE", None),
            ("TOLLGATE_OPS", None),
            ("TOLLGATE_SERVICE_HOST", None),
            ("PATH", None),
        ] {
            let found = of_variables([(variable, "1")], "[server]\nadmin_token = 'env:TOLLGATE_OPS'\n");
            match expected {
                Some(expected) => {
                    assert!(found.len() == 1 && found[0].contains(expected), "{variable}: {found:?}")
                }
                None => assert!(found.is_empty(), "{variable}: {found:?}"),
            }
        }
        assert!(of_variables([("TOLLGATE_FOO", "")], "").is_empty(), "a variable without a value is not set");
    }

    #[test]
    fn what_a_server_would_miss_is_named_by_field() {
        let config = parse(
            "[server]\nadmin_token = 'env:A'\nresp_password = 'env:B'\n\
             [store]\nmode = 'redis'\nredis = { url = 'rediss://a', password = 'env:C', ca_file = '/none/ca.pem' }\n\
             postgres = { url = 'postgres://a', password = 'env:UNUSED' }\n\
             [llm.upstreams.up]\nkind = 'openai'\nbase_url = 'http://a/v1'\napi_key = 'env:D'\n\
             [llm.clients.me]\nkey = 'env:E'\n",
        );
        let fields = |found: &[String]| -> Vec<String> {
            found.iter().map(|line| line.split(':').next().unwrap_or_default().to_owned()).collect()
        };
        let all = of_machine(&config, |_| None);
        assert_eq!(
            fields(&all),
            [
                "server.admin_token",
                "server.resp_password",
                "store.redis.password",
                "llm.upstreams.up",
                "llm.clients.me.key",
                "store.redis.ca_file"
            ]
        );
        assert!(all[0].contains("variable A is not set"), "{all:?}");
        assert_eq!(
            fields(&of_machine(&config, |name| (name != "B").then(|| "x".to_owned()))),
            ["server.resp_password", "store.redis.ca_file"]
        );
        assert_eq!(of_machine(&parse("[server]\nadmin_token = 'plain'\n"), |_| None), [""; 0]);
    }
}
