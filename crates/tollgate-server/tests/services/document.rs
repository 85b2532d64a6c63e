//! Schemathesis makes up requests from `/openapi.json` and holds the answers to it.

use std::path::PathBuf;
use std::process::Command;

use crate::server::{self, Tollgate, of_repository};

/// A program of the Python environment that `./test` makes.
fn of_environment(name: &str) -> PathBuf {
    let program = of_repository("target/schemathesis/bin").join(name);
    assert!(program.exists(), "schemathesis is not installed: ./test does it");
    program
}

/// Runs schemathesis on a document; the limits of the example policy answer.
fn check(server: &Tollgate, document: &str) {
    let file = server.home().join("openapi.json");
    std::fs::write(&file, document).unwrap();
    // What is too long is refused for that before anybody looks at what is in it.
    let settings = "checks.negative_data_rejection.expected-statuses = [400, 404, 405, 413, 415]\n";
    std::fs::write(server.home().join("schemathesis.toml"), settings).unwrap();
    let checks = "not_a_server_error,status_code_conformance,content_type_conformance,\
        response_schema_conformance,response_headers_conformance,negative_data_rejection";
    let output = Command::new(of_environment("schemathesis"))
        .current_dir(server.home())
        .args(["run", "openapi.json", "--url", &server.url(), "--checks", checks])
        .args(["--max-examples", "30", "--seed", "1", "--no-color", "--suppress-health-check", "all"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("passed"), "{said}");
}

#[test]
fn no_made_up_request_is_answered_otherwise_than_it_says() {
    let server = server::with(include_str!("../../../../examples/tollgate.toml"), &[], &[]);
    let document = include_str!("../../src/front/json/openapi.json");
    check(&server, document);
    // Made-up names of limits are unknown ones. With those that there are, requests get to be decided.
    let mut narrow: serde_json::Value = serde_json::from_str(document).unwrap();
    let limits: serde_json::Value = serde_json::from_str(&server.get("/v1/limits").body).unwrap();
    let names = limits["limits"].as_array().unwrap().iter().map(|limit| limit["limit"].clone());
    narrow["components"]["schemas"]["LimitName"] = serde_json::json!({ "enum": names.collect::<Vec<_>>() });
    check(&server, &narrow.to_string());
    assert_eq!(server.get("/readyz").body, "ready\n", "it is as well as before");
}

/// Containers are not started here, but what starts them is YAML.
#[test]
fn the_yaml_of_the_packaging_is_yaml() {
    let script = "import sys, yaml\nfor name in sys.argv[1:]:\n    assert isinstance(yaml.safe_load(open(name)), dict), name";
    let files = [
        "compose.yml",
        "deploy/prometheus/prometheus.yml",
        "deploy/otel/collector.yml",
        "deploy/traefik/tollgate.yml",
    ];
    let output =
        Command::new(of_environment("python")).args(["-c", script]).args(files.map(of_repository)).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
