//! The parts of compose.yml fit together: what each names, the other has.

use serde_json::Value;

use crate::server::of_repository;
use crate::yaml;

fn read(path: &str) -> String {
    std::fs::read_to_string(of_repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// The file of the repository that is mounted at this place of a service.
fn mounted<'a>(service: &'a Value, place: &str) -> &'a str {
    let volume = texts(&service["volumes"]).into_iter().find_map(|volume| {
        let (file, rest) = volume.strip_prefix("./")?.split_once(':')?;
        (rest == format!("{place}:ro")).then_some(file)
    });
    volume.unwrap_or_else(|| panic!("nothing is mounted read-only at {place}: {service:#}"))
}

#[test]
fn the_server_waits_for_a_healthy_redis_that_evicts_nothing() {
    let compose = yaml::read(&read("compose.yml"));
    let services = &compose["services"];
    let names: Vec<&String> = services.as_object().expect("services").keys().collect();
    assert_eq!(names, ["collector", "prometheus", "redis", "tollgate"]);
    let (server, redis) = (&services["tollgate"], &services["redis"]);
    assert_eq!(server["depends_on"]["redis"]["condition"], "service_healthy");
    assert_eq!(redis["healthcheck"]["test"], serde_json::json!(["CMD", "redis-cli", "ping"]));
    for field in ["interval", "timeout", "retries"] {
        assert!(redis["healthcheck"][field].is_string(), "{field}");
    }
    assert!(redis["command"].to_string().contains(r#""--maxmemory-policy","noeviction""#), "{redis:#}");
    // The image has a check of its own, by a command that the server knows.
    let dockerfile = read("Dockerfile");
    let check =
        dockerfile.lines().find_map(|line| line.strip_prefix("HEALTHCHECK ")).expect("a health check");
    let command: Vec<String> =
        serde_json::from_str(check.split_once("CMD ").expect("a command").1).expect("words");
    assert_eq!(command, ["/usr/local/bin/tollgate", "limits", "--json"]);
    assert_eq!(server["build"], ".");
    for service in [server, redis] {
        assert_eq!(service["restart"], "unless-stopped");
    }
    assert_eq!((&server["read_only"], &server["cap_drop"]), (&"true".into(), &serde_json::json!(["ALL"])));
}

/// The server takes what the file gives it, and listens where the file says.
#[test]
fn the_servers_environment_is_one_that_it_knows() {
    let compose = yaml::read(&read("compose.yml"));
    let server = &compose["services"]["tollgate"];
    let command = texts(&server["command"]);
    assert_eq!(command[..2], ["serve", "--config"]);
    let variables = server["environment"].as_object().expect("variables").iter();
    let variables: Vec<(String, String)> =
        variables.map(|(name, value)| (name.clone(), value.as_str().expect("a text").to_owned())).collect();
    let token = variables.iter().find(|(name, _)| name == "TOLLGATE_SERVER_ADMIN_TOKEN").expect("a token");
    assert!(token.1.starts_with("${TOLLGATE_TOKEN:?"), "without a token it does not start: {}", token.1);
    let ours = variables.iter().filter(|(name, _)| !name.starts_with("OTEL_")).cloned();
    let config = tollgate::config::Config::parse_with_env(&read(mounted(server, command[2])), ours)
        .unwrap_or_else(|mistakes| panic!("{mistakes}"));
    assert_eq!(config.store.mode, tollgate::config::StoreMode::Redis);
    let redis = config.store.redis.expect("an address");
    assert_eq!(redis.urls, ["redis://redis:6379"]);
    let port = command.iter().position(|word| *word == "--listen").map(|at| command[at + 1]);
    assert_eq!(port, Some("0.0.0.0:8080"));
    assert_eq!(texts(&server["ports"]), ["127.0.0.1:8080:8080"], "from this machine alone");
}

#[test]
fn prometheus_and_the_collector_ask_the_server_and_hear_it() {
    let compose = yaml::read(&read("compose.yml"));
    let services = &compose["services"];
    let (prometheus, collector) = (&services["prometheus"], &services["collector"]);
    for service in [prometheus, collector] {
        assert_eq!(texts(&service["depends_on"]), ["tollgate"]);
    }
    let target = |scrape: &Value| scrape["static_configs"][0]["targets"].clone();
    let scraped = yaml::read(&read(mounted(prometheus, "/etc/prometheus/prometheus.yml")));
    assert_eq!(target(&scraped["scrape_configs"][0]), serde_json::json!(["tollgate:8080"]));
    for rules in texts(&scraped["rule_files"]) {
        let rules = yaml::read(&read(mounted(prometheus, &format!("/etc/prometheus/{rules}"))));
        assert!(!rules["groups"].as_array().expect("groups").is_empty());
    }

    let command = texts(&collector["command"]);
    assert_eq!(command[0], "--config");
    let config = yaml::read(&read(mounted(collector, command[1])));
    // Spans are sent to where it listens.
    let endpoint =
        services["tollgate"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"].as_str().expect("an endpoint");
    let port = endpoint.strip_prefix("http://collector:").expect("the service of that name");
    let listens = &config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"];
    assert_eq!(listens, &format!("0.0.0.0:{port}"));
    let scrape = &config["receivers"]["prometheus"]["config"]["scrape_configs"][0];
    assert_eq!(target(scrape), serde_json::json!(["tollgate:8080"]));
    // Whatever a pipeline names is defined, and whatever is defined is in a pipeline.
    let pipelines = config["service"]["pipelines"].as_object().expect("pipelines");
    assert_eq!(pipelines.keys().collect::<Vec<_>>(), ["metrics", "traces"]);
    for kind in ["receivers", "processors", "exporters"] {
        let mut used: Vec<&str> = pipelines.values().flat_map(|pipeline| texts(&pipeline[kind])).collect();
        used.sort_unstable();
        used.dedup();
        let defined: Vec<&String> = config[kind].as_object().expect(kind).keys().collect();
        assert_eq!(used, defined, "{kind}");
    }
}
