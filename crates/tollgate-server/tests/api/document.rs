//! `/openapi.json` says what is answered, no more and no less.

use std::collections::BTreeSet;

use serde_json::Value;
use tollgate::config::Config;
use tollgate_jobs::{Job, JobGate, JobsConfig};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::provider::{self, Provider};

use crate::server;

const EXAMPLE: &str = include_str!("../../../../examples/tollgate.toml");

fn document() -> Value {
    serde_json::from_str(include_str!("../../src/front/json/openapi.json")).expect("JSON")
}

/// Every operation: its path, its method and what is said of it.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().expect("paths");
    let each = paths.iter().flat_map(|(path, item)| {
        let methods = item.as_object().expect("methods");
        methods.iter().map(move |(method, operation)| (path.as_str(), method.as_str(), operation))
    });
    each.collect()
}

/// The addresses that the sources match on.
#[test]
fn every_route_is_in_it_and_nothing_else() {
    let sources = [
        include_str!("../../src/front/json.rs"),
        include_str!("../../src/front/json/look.rs"),
        include_str!("../../src/front/models.rs"),
    ];
    let mut routes =
        BTreeSet::from(["/v1/gate", "/v1/gate/{limit}", "/v1/gate/{limit}/{key}"].map(str::to_owned));
    routes.extend(tollgate_llm::Api::ALL.map(|api| api.path().to_owned()));
    for line in sources.iter().flat_map(|source| source.lines()) {
        let literals = line.trim().strip_prefix('"').and_then(|rest| rest.split_once("\" =>"));
        if let Some((route, _)) = literals.filter(|(route, _)| route.starts_with('/')) {
            routes.extend(route.split("\" | \"").map(str::to_owned));
        }
    }
    let document = document();
    // A page for people is not part of the API.
    let is_page = |route: &String| route == "/" || route.starts_with("/page") || route.starts_with("/assets");
    let routes: BTreeSet<String> = routes.into_iter().filter(|route| !is_page(route)).collect();
    let documented: BTreeSet<String> =
        operations(&document).into_iter().map(|(path, _, _)| path.to_owned()).collect();
    assert!(documented.len() > 10, "{documented:?}");
    assert_eq!(routes, documented);
}

#[test]
fn it_is_what_the_server_hands_out() {
    let server = server::start();
    let answer = server.get("/openapi.json");
    assert_eq!(answer.field("content-type"), Some("application/json"));
    assert_eq!(serde_json::from_str::<Value>(&answer.body).expect("JSON"), document());
}

/// Every example is answered with what the document says that it is.
#[test]
fn every_example_is_answered_as_it_says() {
    let routes =
        "[requests]\ntrusted_proxies = [\"127.0.0.1\"]\n[[routes]]\npath = \"/login\"\nlimit = \"login\"\n";
    let database = PostgresServer::start();
    let jobs = format!(
        "[jobs]\ndatabase = '{}'\n[jobs.types.send_email]\nlimit = 2\nwindow = '1h'\n",
        database.url("postgres")
    );
    job_tables(&jobs);
    let server = server::with(&format!("{EXAMPLE}\n{routes}\n{jobs}"), &[], &[]);
    let document = document();
    let mut asked = 0;
    for (path, method, operation) in operations(&document).into_iter().filter(|one| !is_of_models(one.2)) {
        let ok = &operation["responses"]["200"];
        let examples = operation["requestBody"]["content"]["application/json"]["examples"].as_object();
        let bodies: Vec<String> = match examples {
            Some(examples) => examples.values().map(|example| example["value"].to_string()).collect(),
            None => vec![String::new()],
        };
        for body in bodies {
            let address = filled(path, operation);
            let kind = if body.is_empty() { "accept: */*" } else { "content-type: application/json" };
            let mut lines = headers(operation);
            lines.extend([kind.to_owned(), "x-forwarded-for: 192.0.2.1".to_owned()]);
            let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
            let answer = server.ask(&method.to_uppercase(), &address, &lines, &body);
            assert_eq!(answer.status, 200, "{method} {address} {body}: {}", answer.body);
            for name in ok["headers"].as_object().into_iter().flat_map(|headers| headers.keys()) {
                assert!(answer.field(name).is_some(), "{address} has no {name}");
            }
            let kind = answer.field("content-type").map(|kind| kind.split(';').next().unwrap_or_default());
            let content = ok["content"].as_object();
            assert_eq!(kind, content.and_then(|kinds| kinds.keys().next()).map(String::as_str), "{address}");
            if let Some(example) = content.and_then(|kinds| kinds.get("application/json")?.get("example")) {
                let found: Value = serde_json::from_str(&answer.body).expect("JSON");
                same_shape(&found, example, path);
            }
            asked += 1;
        }
    }
    assert!(asked > 15, "{asked} examples");
}

/// Whether it is an operation of the gateway of language models, which is there if a config has upstreams.
fn is_of_models(operation: &Value) -> bool {
    operation["tags"][0] == "models"
}

/// The gateway's routes are answered as the document says, refuse other methods in their provider's shape, and are not there without an upstream.
#[test]
fn routes_of_models_are_answered_as_it_says() {
    let provider = Provider::start(provider::any);
    let config = format!(
        "[llm.upstreams.openai]\nkind = 'openai'\nbase_url = 'http://{0}/v1'\napi_key = 'x'\n\
         [llm.upstreams.anthropic]\nkind = 'anthropic'\nbase_url = 'http://{0}'\napi_key = 'x'\n\
         [llm.models.gpt-4o]\nupstream = 'openai'\nrpm = 100\n[limits.x]\nunlimited = true\n",
        provider.address()
    );
    let (server, without) = (server::with(&config, &[], &[]), server::start());
    let document = document();
    let of_models: Vec<_> =
        operations(&document).into_iter().filter(|(_, _, operation)| is_of_models(operation)).collect();
    assert_eq!(of_models.len(), 7);
    for (path, method, operation) in of_models {
        let examples = &operation["requestBody"]["content"]["application/json"]["examples"];
        let bodies: Vec<String> = match examples.as_object() {
            Some(examples) => examples.values().map(|example| example["value"].to_string()).collect(),
            None => vec![String::new()],
        };
        let lines = ["content-type: application/json"];
        for body in &bodies {
            let answer = server.ask(&method.to_uppercase(), path, &lines, body);
            assert_eq!(answer.status, 200, "{method} {path} {body}: {}", answer.body);
            let found: Value = serde_json::from_str(&answer.body).expect("JSON");
            let content = &operation["responses"]["200"]["content"]["application/json"];
            if !content["example"].is_null() {
                same_shape(&found, &content["example"], path);
            }
        }
        let other = if method == "get" { "POST" } else { "GET" };
        let answer = server.ask(other, path, &[], "");
        assert_eq!(answer.status, 405, "{other} {path}");
        assert_eq!(answer.field("allow"), Some(method.to_uppercase().as_str()), "{other} {path}");
        let found: Value = serde_json::from_str(&answer.body).expect("JSON");
        assert!(found["error"]["message"].is_string(), "{path}: {found}");
        assert_eq!(without.ask(&method.to_uppercase(), path, &lines, &bodies[0]).status, 404, "{path}");
    }
}

/// Makes the tables of jobs, and has one of them wait.
fn job_tables(config: &str) {
    let mut jobs = JobsConfig::default();
    let config = Config::parse_with(config, [], &mut [&mut jobs]).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let gate = JobGate::from_config(&config, &jobs).await.unwrap().connect().await.unwrap();
        for id in ["1", "2", "3"] {
            let plan = gate.plan(&Job::new(id, "send_email", "mail")).unwrap();
            drop(gate.enter(&plan).await);
        }
    });
}

#[test]
fn other_methods_are_refused_as_it_says() {
    let server = server::start();
    let document = document();
    for (path, method, operation) in operations(&document).into_iter().filter(|one| !is_of_models(one.2)) {
        assert!(operation["responses"]["405"].is_object(), "{path}");
        let address = filled(path, operation);
        for other in ["GET", "POST", "DELETE", "OPTIONS"] {
            if document["paths"][path].get(other.to_lowercase()).is_some() {
                continue;
            }
            let answer = server.ask(other, &address, &[], "");
            assert_eq!(answer.status, 405, "{other} {address}");
            assert_eq!(answer.field("content-type"), Some("application/problem+json"), "{other} {address}");
            let allow = answer.field("allow").unwrap_or_default();
            assert!(allow.contains(&method.to_uppercase()), "{other} {address}: {allow}");
        }
    }
}

/// The header parameters as in their examples.
fn headers(operation: &Value) -> Vec<String> {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let of_header =
        parameters.filter(|parameter| parameter["in"] == "header" && parameter["name"] != "X-Forwarded-For");
    let line = |parameter: &Value| {
        Some(format!("{}: {}", parameter["name"].as_str()?, parameter["example"].as_str()?))
    };
    of_header.filter_map(line).collect()
}

/// A path with its parameters as in their examples.
fn filled(path: &str, operation: &Value) -> String {
    let mut address = path.to_owned();
    let mut query = Vec::new();
    for parameter in operation["parameters"].as_array().into_iter().flatten() {
        if parameter["in"] == "header" {
            continue;
        }
        let name = parameter["name"].as_str().expect("a name");
        let value = match &parameter["example"] {
            Value::String(text) => text.clone(),
            Value::Null => continue,
            other => other.to_string(),
        };
        match parameter["in"].as_str() {
            Some("path") => address = address.replace(&format!("{{{name}}}"), &value),
            _ => query.push(format!("{name}={value}")),
        }
    }
    if query.is_empty() { address } else { format!("{address}?{}", query.join("&")) }
}

/// The same fields of the same kinds, whatever their values; what may be null may be.
fn same_shape(found: &Value, example: &Value, place: &str) {
    match (found, example) {
        (Value::Object(found), Value::Object(example)) => {
            let [found_names, names] = [found, example].map(|object| object.keys().collect::<BTreeSet<_>>());
            assert_eq!(found_names, names, "{place}");
            for (name, value) in found {
                same_shape(value, &example[name], &format!("{place} {name}"));
            }
        }
        (Value::Array(found), Value::Array(example)) => {
            for value in found {
                same_shape(value, &example[0], place);
            }
        }
        (Value::Null, _) | (_, Value::Null) => {}
        _ => {
            let kind = |value: &Value| (value.is_string(), value.is_number(), value.is_boolean());
            assert_eq!(kind(found), kind(example), "{place}: {found} is not like {example}");
        }
    }
}
