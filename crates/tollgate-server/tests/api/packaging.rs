//! Every file that the packaging names is there.

use crate::server::of_repository;

fn read(path: &str) -> String {
    std::fs::read_to_string(of_repository(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn what_the_image_and_the_composition_name_is_there() {
    let dockerfile = read("Dockerfile");
    for line in dockerfile.lines().filter(|line| line.starts_with("COPY ") && !line.contains("--from")) {
        let names: Vec<&str> = line.split_whitespace().skip(1).collect();
        for name in &names[..names.len() - 1] {
            assert!(of_repository(name).exists(), "the Dockerfile names {name}");
        }
    }
    assert!(dockerfile.contains("\nUSER ") && dockerfile.contains("\nHEALTHCHECK "));
    let compose = read("compose.yml");
    let mounted: Vec<&str> = compose
        .split_whitespace()
        .filter_map(|word| word.trim_matches('"').strip_prefix("./"))
        .map(|word| word.split(':').next().unwrap_or_default())
        .collect();
    assert!(mounted.len() >= 3, "{mounted:?}");
    for path in mounted {
        assert!(of_repository(path).exists(), "compose.yml names {path}");
    }
}

/// Proxies ask what the server answers.
#[test]
fn proxies_ask_at_addresses_that_there_are() {
    for file in [
        "deploy/nginx/nginx.conf",
        "deploy/haproxy/tollgate.lua",
        "deploy/traefik/tollgate.yml",
        "deploy/caddy/Caddyfile",
    ] {
        let read = read(file);
        // A comment asks for nothing.
        let is_said =
            |line: &&str| !line.trim_start().starts_with('#') && !line.trim_start().starts_with("-- ");
        let asked: String = read.lines().filter(is_said).flat_map(|line| [line, "\n"]).collect();
        // By the routes of the config, whose key groups the 2^64 addresses of an IPv6 client.
        let gates: Vec<&str> =
            asked.match_indices("/v1/gate").map(|(at, _)| &asked[at + "/v1/gate".len()..]).collect();
        assert_eq!(gates.len(), 1, "{file}");
        assert!(
            // With `?` alone Caddy drops the query of its client.
            gates[0].starts_with(['"', '\n', ';'])
                || ["?deny=403;", "?\n"].iter().any(|end| gates[0].starts_with(end)),
            "{file}: {}",
            gates[0]
        );
    }
    // And the config that their comments name trusts them.
    let config = tollgate::config::Config::parse(&read("deploy/tollgate.toml")).expect("a sound config");
    assert!(!config.routes.is_empty());
    assert!(config.requests.reader().trusts("127.0.0.1".parse().expect("an address")));
    let unit = read("deploy/systemd/tollgate.service");
    for line in ["ExecReload=/bin/kill -HUP $MAINPID", "NoNewPrivileges=yes", "DynamicUser=yes"] {
        assert!(unit.lines().any(|found| found == line), "{line}");
    }
}
