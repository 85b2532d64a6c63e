//! `[server]`: where to listen, how many to listen to, what is logged, and what its operator must show.
//!
//! Addresses are checked for their form and kept as text: a host name is looked up when the server binds, not here.

use std::net::IpAddr;

use tollgate::Key;
use tollgate::config::{
    Extension, Field, Limits, Password, Reader, Section, VariableKind, host_fault, url_fault,
};
use tollgate_kernel::Micros;

/// Where the server listens, and what its operator must show. A face without an address is left to the server's own default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServerConfig {
    /// `host:port` of the HTTP API and the dashboard.
    pub(crate) http: Option<String>,
    /// `host:port` of the gRPC service that Envoy calls.
    pub(crate) grpc: Option<String>,
    /// `host:port` of the face that speaks the Redis protocol.
    pub(crate) resp: Option<String>,
    /// The token that the API asks for before it changes limits or resets keys. `Debug` does not show it.
    pub(crate) admin_token: Option<Password>,
    /// Whether the page shows keys as they are. By default it shows their hashes.
    pub(crate) show_keys: bool,
    /// The password of clients of the Redis protocol; none by default.
    pub(crate) resp_password: Option<Password>,
    /// How many connections each face has at once; the server's default if `None`.
    pub(crate) max_connections: Option<usize>,
    /// How many of them one peer may have: an IPv4 address, or a /64 of IPv6.
    pub(crate) max_connections_per_peer: Option<usize>,
    /// How many calls to a shared store one peer may have in flight, over all its connections; the server's default if `None`.
    pub(crate) store_calls_per_peer: Option<usize>,
    /// Peers whose calls are not counted, because they speak for others: addresses, of IPv6 the /64 around each. Those on the server's
    /// own machine by default.
    pub(crate) trusted_peers: Option<Vec<IpAddr>>,
    /// What the server writes to its log.
    pub(crate) log: LogLevel,
    /// Where the log goes.
    pub(crate) log_to: LogTarget,
    /// How many lines about decisions are written in a second; the library's default if `None`.
    pub(crate) log_lines: Option<u64>,
    /// Whether every line about a decision is written: also those above `log_lines`, and every denial of one key.
    pub(crate) log_all: bool,
    /// How long the server goes on accepting connections after a signal to stop, while it reports that it is not ready. None by default.
    pub(crate) drain_delay: Micros,
    /// The longest time to live that a caller may ask for a reservation; the server's default if `None`.
    pub(crate) max_ttl: Option<Micros>,
    /// How long at most a key stays in the store whose limit came with the call (`CL.THROTTLE`, Envoy): the window, or the time in
    /// which an empty bucket fills; the server's default if `None`.
    pub(crate) max_period: Option<Micros>,
    /// What this server is called among those on its store; the machine's name and its port by default.
    pub(crate) name: Option<String>,
    /// Where the dashboards of this installation are, for a link on the page.
    pub(crate) grafana: Option<String>,
    /// Namespaces of keys that metrics show by name, beside those that the file names anyway: in overrides and as domains of Envoy.
    pub(crate) namespaces: Vec<String>,
}

/// What the server writes to its log: everything up to a level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LogLevel {
    /// Nothing.
    Off,
    /// What failed.
    Error,
    /// And what may need a look.
    Warn,
    /// And denials, reloads and resets.
    #[default]
    Info,
    /// And every decision.
    Debug,
}

/// Where the server's log goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LogTarget {
    /// Standard output.
    #[default]
    Stdout,
    /// Standard error, where the lines of the start are.
    Stderr,
}

/// The most connections that can be asked for: as many as there are ports, which is where one address ends.
const MOST_CONNECTIONS: usize = 65_535;

/// The longest drain delay: a supervisor would have killed the server by then.
const LONGEST_DRAIN: Micros = Micros::from_secs(600);

/// How many namespaces metrics show by name, and how long such a name may be: a label is no place for a kilobyte.
const MOST_NAMESPACES: usize = 32;
const LONGEST_NAMESPACE: usize = 64;

const LOG_LEVELS: [(&str, LogLevel); 5] = [
    ("info", LogLevel::Info),
    ("off", LogLevel::Off),
    ("error", LogLevel::Error),
    ("warn", LogLevel::Warn),
    ("debug", LogLevel::Debug),
];

const LOG_TARGETS: [(&str, LogTarget); 2] = [("stdout", LogTarget::Stdout), ("stderr", LogTarget::Stderr)];

/// The fields that an environment variable may set: all.
const VARIABLES: [(&str, VariableKind); 20] = [
    ("http", VariableKind::Text),
    ("grpc", VariableKind::Text),
    ("resp", VariableKind::Text),
    ("admin_token", VariableKind::Text),
    ("show_keys", VariableKind::Truth),
    ("resp_password", VariableKind::Text),
    ("max_connections", VariableKind::Number),
    ("max_connections_per_peer", VariableKind::Number),
    ("store_calls_per_peer", VariableKind::Number),
    ("trusted_peers", VariableKind::Texts),
    ("log", VariableKind::Text),
    ("log_to", VariableKind::Text),
    ("log_lines", VariableKind::Number),
    ("log_all", VariableKind::Truth),
    ("drain_delay", VariableKind::Text),
    ("max_ttl", VariableKind::Text),
    ("max_period", VariableKind::Text),
    ("name", VariableKind::Text),
    ("grafana", VariableKind::Text),
    ("namespaces", VariableKind::Texts),
];

/// More lines in a second than any log takes.
const MOST_LOG_LINES: u64 = 1_000_000;

impl Extension for ServerConfig {
    fn name(&self) -> &'static str {
        "server"
    }

    fn variables(&self) -> &'static [(&'static str, VariableKind)] {
        &VARIABLES
    }

    fn read(&mut self, reader: &mut Reader<'_>, field: &Field<'_>, _limits: &mut Limits<'_>) {
        if let Some(section) = reader.section(field) {
            *self = ServerConfig::of(reader, section);
        }
    }
}

/// The fields in which two values of a type differ, by name. All fields of the type must be listed.
macro_rules! changed_fields {
    ($one:expr, $other:expr, $type:ident { $($field:ident),* $(,)? }) => {{
        let $type { $($field),* } = $one;
        let mut names = Vec::new();
        $(if *$field != $other.$field { names.push(stringify!($field)); })*
        names
    }};
}

impl ServerConfig {
    /// The fields in which two differ, by name.
    pub(crate) fn changed_fields(&self, other: &ServerConfig) -> Vec<&'static str> {
        changed_fields!(
            self,
            other,
            ServerConfig {
                http,
                grpc,
                resp,
                admin_token,
                show_keys,
                resp_password,
                max_connections,
                max_connections_per_peer,
                store_calls_per_peer,
                trusted_peers,
                log,
                log_to,
                log_lines,
                log_all,
                drain_delay,
                max_ttl,
                max_period,
                name,
                grafana,
                namespaces,
            }
        )
    }

    fn of(reader: &mut Reader<'_>, section: Section<'_>) -> ServerConfig {
        let harmless = [
            "http",
            "grpc",
            "resp",
            "show_keys",
            "max_connections",
            "max_connections_per_peer",
            "store_calls_per_peer",
            "trusted_peers",
            "log",
            "log_to",
            "log_lines",
            "log_all",
            "drain_delay",
            "max_ttl",
            "max_period",
            "name",
            "grafana",
            "namespaces",
        ];
        let section = section.showing(&harmless);
        reader.only(&section, &[&harmless[..], &["admin_token", "resp_password"]].concat());
        let admin_token = section.field("admin_token").and_then(|f| reader.password(f, "ADMIN_TOKEN"));
        let resp_password = section.field("resp_password").and_then(|f| reader.password(f, "RESP_PASSWORD"));
        let show_keys = section.field("show_keys").and_then(|f| reader.truth(f)).unwrap_or_default();
        let mut connections =
            |name| section.field(name).and_then(|f| reader.connections(f, MOST_CONNECTIONS));
        let [max_connections, max_connections_per_peer, store_calls_per_peer] =
            ["max_connections", "max_connections_per_peer", "store_calls_per_peer"].map(&mut connections);
        let trusted_peers = section.field("trusted_peers").and_then(|f| read_peers(reader, f));
        let log = section.field("log").and_then(|f| reader.choice(f, &LOG_LEVELS)).unwrap_or_default();
        let log_to = section.field("log_to").and_then(|f| reader.choice(f, &LOG_TARGETS)).unwrap_or_default();
        let log_lines = section.field("log_lines").and_then(|f| read_log_lines(reader, f));
        let log_all = section.field("log_all").and_then(|f| reader.truth(f)).unwrap_or_default();
        let drain_delay = section.field("drain_delay").and_then(|f| read_drain_delay(reader, f));
        let max_ttl = section.field("max_ttl").and_then(|f| read_max_ttl(reader, f));
        let max_period = section.field("max_period").and_then(|f| reader.span(f, "7d")).map(Micros::from);
        let name = section.field("name").and_then(|f| read_name(reader, f));
        let grafana = section.field("grafana").and_then(|f| read_grafana(reader, f));
        let namespaces = section.field("namespaces").and_then(|f| read_namespaces(reader, f));
        let mut read = |name, example| read_address(reader, section.field(name)?, example);
        ServerConfig {
            http: read("http", "127.0.0.1:8080"),
            grpc: read("grpc", "127.0.0.1:8081"),
            resp: read("resp", "127.0.0.1:6380"),
            admin_token,
            show_keys,
            resp_password,
            max_connections,
            max_connections_per_peer,
            store_calls_per_peer,
            trusted_peers,
            log,
            log_to,
            log_lines,
            log_all,
            drain_delay: drain_delay.unwrap_or_default(),
            max_ttl,
            max_period,
            name,
            grafana,
            namespaces: namespaces.unwrap_or_default(),
        }
    }
}

fn read_log_lines(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<u64> {
    let lines = reader.whole(field, 100, "; log = \"off\" writes none")?;
    if lines > MOST_LOG_LINES {
        reader.mistake(field, format!("must be at most {MOST_LOG_LINES}; log_all = true writes every line"));
        return None;
    }
    Some(lines)
}

/// A time to live is written in milliseconds, so the bound of it is at least one.
fn read_max_ttl(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Micros> {
    let span = Micros::from(reader.span(field, "1d")?);
    if span < Micros::from_millis(1) {
        reader.mistake(field, "must be at least 1ms");
        return None;
    }
    Some(span)
}

fn read_peers(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Vec<IpAddr>> {
    let texts = reader.texts(field, "[\"10.0.0.5\"]")?;
    let peers: Result<Vec<IpAddr>, _> = texts.iter().map(|text| text.parse()).collect();
    match peers {
        Ok(peers) => Some(peers),
        Err(_) => {
            reader.mistake(field, "each must be an IP address, such as \"10.0.0.5\" or \"fd00::5\"");
            None
        }
    }
}

fn read_name(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let name = reader.text(field, "gate-1")?;
    let is_sound = (1..=64).contains(&name.chars().count()) && !name.chars().any(char::is_control);
    if !is_sound {
        reader.mistake(field, "must have 1 to 64 characters, none of them a control character");
        return None;
    }
    Some(name.to_owned())
}

/// It becomes a link, so nothing but the web is linked to.
fn read_grafana(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let example = "https://grafana.example.com/d/tollgate";
    let url = reader.text(field, example)?;
    match url_fault(url, &["https", "http"]) {
        None => Some(url.to_owned()),
        Some(fault) => {
            reader.mistake(field, format!("{fault}; write it as in \"{example}\""));
            None
        }
    }
}

fn read_namespaces(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Vec<String>> {
    let names = reader.texts(field, "[\"user\", \"tenant\"]")?;
    if names.len() > MOST_NAMESPACES {
        reader.mistake(field, format!("has {} names; at most {MOST_NAMESPACES}", names.len()));
        return None;
    }
    if names.iter().any(|name| name.len() > LONGEST_NAMESPACE || Key::new(name, "any").is_err()) {
        let fix = format!("each must have 1 to {LONGEST_NAMESPACE} bytes and no control characters");
        reader.mistake(field, fix);
        return None;
    }
    Some(names)
}

fn read_drain_delay(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Micros> {
    let span = Micros::from(reader.span_or_zero(field, "5s")?);
    if span > LONGEST_DRAIN {
        reader.mistake(field, format!("must be at most {LONGEST_DRAIN}: a balancer notices sooner"));
        return None;
    }
    Some(span)
}

fn read_address(reader: &mut Reader<'_>, field: &Field<'_>, example: &str) -> Option<String> {
    let text = reader.text(field, example)?;
    match address_fix(text, example) {
        None => Some(text.to_owned()),
        Some(fix) => {
            reader.mistake(field, fix);
            None
        }
    }
}

/// What is wrong with an address to listen on, and what to write instead. A port alone is repeated with a host.
pub(crate) fn address_fix(text: &str, example: &str) -> Option<String> {
    let fault = address_fault(text)?;
    let port = text.strip_prefix(':').unwrap_or(text).parse::<u16>();
    let example = port.map_or_else(|_| example.to_owned(), |port| format!("127.0.0.1:{port}"));
    Some(format!("{fault}; write host:port, such as \"{example}\""))
}

/// What is wrong with `host:port`.
fn address_fault(text: &str) -> Option<&'static str> {
    let Some((host, port)) = text.rsplit_once(':') else { return Some("has no port") };
    if port.is_empty() || !port.bytes().all(|byte| byte.is_ascii_digit()) || port.parse::<u16>().is_err() {
        return Some("has no port between 0 and 65535 after its last `:`");
    }
    if host.is_empty() {
        return Some("has no host (0.0.0.0 listens everywhere)");
    }
    host_fault(host)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::tests::{check, parse};

    #[test]
    fn every_field_has_a_variable() {
        let values = [
            ("HTTP", "0.0.0.0:1"),
            ("GRPC", "0.0.0.0:2"),
            ("RESP", "0.0.0.0:3"),
            ("ADMIN_TOKEN", "env:OPS"),
            ("SHOW_KEYS", "true"),
            ("RESP_PASSWORD", "env:RESP"),
            ("MAX_CONNECTIONS", "500"),
            ("MAX_CONNECTIONS_PER_PEER", "50"),
            ("STORE_CALLS_PER_PEER", "20"),
            ("TRUSTED_PEERS", "10.0.0.5,fd00::5"),
            ("LOG", "debug"),
            ("LOG_TO", "stderr"),
            ("LOG_LINES", "7"),
            ("LOG_ALL", "true"),
            ("DRAIN_DELAY", "5s"),
            ("MAX_TTL", "1h"),
            ("MAX_PERIOD", "1d"),
            ("NAME", "gate-1"),
            ("GRAFANA", "https://grafana.example.com/d/tollgate"),
            ("NAMESPACES", "user,tenant"),
        ];
        let names: Vec<String> = VARIABLES.iter().map(|(field, _)| field.to_uppercase()).collect();
        assert_eq!(values.map(|(name, _)| name.to_owned()).to_vec(), names, "all there are");
        let variables = values.map(|(name, value)| (format!("TOLLGATE_SERVER_{name}"), value.to_owned()));
        let read = Config::parse_with_env("", variables).unwrap_or_else(|mistakes| panic!("{mistakes}"));
        let server = read.server;
        // Each has another value than by default, so each was set.
        assert_eq!(server.changed_fields(&ServerConfig::default()).len(), VARIABLES.len());
        let faces = [server.http, server.grpc, server.resp].map(Option::unwrap);
        assert_eq!(faces, ["0.0.0.0:1", "0.0.0.0:2", "0.0.0.0:3"]);
        assert_eq!(server.admin_token, Some(Password::Env("OPS".to_owned())));
        assert_eq!(server.resp_password, Some(Password::Env("RESP".to_owned())));
        assert_eq!((server.max_connections, server.max_connections_per_peer), (Some(500), Some(50)));
        assert_eq!(server.store_calls_per_peer, Some(20));
        assert_eq!(server.trusted_peers.map(|peers| peers.len()), Some(2));
        assert_eq!((server.log, server.drain_delay), (LogLevel::Debug, Micros::from_secs(5)));
    }

    #[test]
    fn a_name_and_a_link_are_checked() {
        for (text, fix) in [
            ("name = ''", "must have 1 to 64 characters"),
            ("name = \"a\\u001bb\"", "none of them a control character"),
            ("grafana = 'javascript:alert(1)'", "must start with https:// or http://"),
            ("grafana = 'grafana.example.com'", "must start with https:// or http://"),
            ("grafana = 'https://a b'", "has a space"),
        ] {
            let mistakes = Config::parse(&format!("[server]\n{text}")).expect_err(text).to_string();
            assert!(mistakes.contains(fix), "{text}: {mistakes}");
        }
    }

    #[test]
    fn addresses_are_checked() {
        for address in ["localhost:0", "0.0.0.0:65535", "[::1]:8080", "my-host_1.example:80"] {
            assert_eq!(parse(&format!("server.http = '{address}'")).server.http.as_deref(), Some(address));
        }
        for (address, fix) in [
            ("'8080'", "has no port; write host:port, such as \"127.0.0.1:8080\""),
            ("''", "has no port"),
            ("':8080'", "has no host (0.0.0.0 listens everywhere)"),
            ("'localhost:'", "has no port between 0 and 65535"),
            ("'localhost:http'", "has no port between"),
            ("'localhost:65536'", "has no port between"),
            ("'localhost:+80'", "has no port between"),
            ("'::1:8080'", "has an IPv6 address without its brackets"),
            ("'[::1:8080'", "has no IPv6 address between its brackets"),
            ("'[x]:8080'", "has no IPv6 address between its brackets"),
            ("'256.1.1.1:80'", "has no valid IPv4 address"),
            ("'a b:80'", "has a host with other characters"),
            ("'http://a:80'", "has an IPv6 address without its brackets"),
            ("8080", "must be text in quotes, such as \"127.0.0.1:8080\""),
        ] {
            check(&format!("[server]\nhttp = {address}"), &[(2, "server.http", address, fix)]);
        }
        check("[server]\nhtp = 'x'", &[(2, "server.htp", "***", "did you mean `http`?")]);
    }
    #[test]
    fn the_admin_token_is_read_as_passwords_are_and_never_shown() {
        for (text, token) in [
            ("", None),
            ("server.admin_token = 'env:OPS'", Some(Password::Env("OPS".to_owned()))),
            ("server.admin_token = 'open sesame'", Some(Password::Plain("open sesame".to_owned()))),
        ] {
            let server = parse(text).server;
            assert_eq!(server.admin_token, token);
            assert!(!format!("{server:?}").contains("sesame"));
        }
        let password = parse("server.resp_password = 'sesame'").server;
        assert_eq!(password.resp_password, Some(Password::Plain("sesame".to_owned())));
        assert!(!format!("{password:?}").contains("sesame"));
        let by_env = [("TOLLGATE_SERVER_ADMIN_TOKEN".to_owned(), "env:OPS".to_owned())];
        let config = Config::parse_with_env("server.admin_token = 'other'", by_env).unwrap();
        assert_eq!(config.server.admin_token, Some(Password::Env("OPS".to_owned())));
        for (value, fix) in [
            ("''", "is empty; remove it, or write \"env:ADMIN_TOKEN\""),
            ("'env:'", "names no environment variable; write it as in \"env:ADMIN_TOKEN\""),
            ("5", "must be text in quotes, such as \"env:ADMIN_TOKEN\""),
        ] {
            check(&format!("[server]\nadmin_token = {value}"), &[(2, "server.admin_token", "***", fix)]);
        }
        check(
            "[server]\nadmin_tokn = 'x'",
            &[(2, "server.admin_tokn", "***", "did you mean `admin_token`?")],
        );
    }
    #[test]
    fn keys_are_shown_only_if_configured() {
        for (text, shows) in
            [("", false), ("server.show_keys = true", true), ("server.show_keys = false", false)]
        {
            assert_eq!(parse(text).server.show_keys, shows, "{text}");
        }
        let by_env = [("TOLLGATE_SERVER_SHOW_KEYS".to_owned(), "true".to_owned())];
        assert!(Config::parse_with_env("", by_env).unwrap().server.show_keys);
        check("[server]\nshow_keys = 1", &[(2, "server.show_keys", "1", "must be true or false")]);
    }

    #[test]
    fn connections_are_counted_from_one() {
        let server = parse("server.max_connections = 500\nserver.max_connections_per_peer = 50").server;
        assert_eq!((server.max_connections, server.max_connections_per_peer), (Some(500), Some(50)));
        assert_eq!(parse("").server.max_connections, None);
        for (field, value, fix) in [
            ("max_connections", "0", "must be at least 1"),
            ("max_connections", "65_536", "must be at most 65535"),
            ("max_connections_per_peer", "-1", "must be at least 1"),
            ("max_connections_per_peer", "'many'", "must be a whole number"),
            ("store_calls_per_peer", "0", "must be at least 1"),
        ] {
            check(&format!("[server]\n{field} = {value}"), &[(2, &format!("server.{field}"), value, fix)]);
        }
        check(
            "[server]\ntrusted_peers = ['10.0.0.0/8']",
            &[(2, "server.trusted_peers", "[…]", "each must be an IP address")],
        );
    }

    #[test]
    fn the_log_has_levels() {
        for (text, level) in [
            ("", LogLevel::Info),
            ("server.log = 'off'", LogLevel::Off),
            ("server.log = 'error'", LogLevel::Error),
            ("server.log = 'warn'", LogLevel::Warn),
            ("server.log = 'info'", LogLevel::Info),
            ("server.log = 'debug'", LogLevel::Debug),
        ] {
            assert_eq!(parse(text).server.log, level, "{text}");
        }
        let fix = "must be one of info, off, error, warn, debug; did you mean \"warn\"?";
        check("[server]\nlog = 'warm'", &[(2, "server.log", "'warm'", fix)]);
    }

    #[test]
    fn the_target_and_the_rate_of_the_log_are_configured() {
        let default = parse("").server;
        assert_eq!((default.log_to, default.log_lines, default.log_all), (LogTarget::Stdout, None, false));
        let server =
            parse("server.log_to = 'stderr'\nserver.log_lines = 1_000\nserver.log_all = true").server;
        assert_eq!((server.log_to, server.log_lines, server.log_all), (LogTarget::Stderr, Some(1_000), true));
        for (field, value, fix) in [
            ("log_to", "'stdot'", "must be one of stdout, stderr; did you mean \"stdout\"?"),
            ("log_lines", "0", "must be at least 1; log = \"off\" writes none"),
            ("log_lines", "1_000_001", "must be at most 1000000; log_all = true"),
            ("log_all", "0", "must be true or false"),
        ] {
            check(&format!("[server]\n{field} = {value}"), &[(2, &format!("server.{field}"), value, fix)]);
        }
    }

    #[test]
    fn the_fields_that_differ_are_named() {
        let [one, other] =
            ["server.http = 'a:1'\nserver.log = 'off'", "server.http = 'a:1'\nserver.resp = 'b:2'"]
                .map(|text| parse(text).server);
        assert_eq!(one.changed_fields(&other), ["resp", "log"]);
        assert!(one.changed_fields(&one).is_empty());
    }

    #[test]
    fn an_end_may_be_put_off_for_a_while() {
        for (text, secs) in [
            ("", 0),
            ("server.drain_delay = '0s'", 0),
            ("server.drain_delay = '5s'", 5),
            ("server.drain_delay = '10m'", 600),
        ] {
            assert_eq!(parse(text).server.drain_delay, Micros::from_secs(secs), "{text}");
        }
        for (value, fix) in [
            ("'601s'", "must be at most 10m"),
            ("5", "must be a duration in quotes"),
            ("'soon'", "write a whole number and a unit"),
        ] {
            check(&format!("[server]\ndrain_delay = {value}"), &[(2, "server.drain_delay", value, fix)]);
        }
    }

    #[test]
    fn what_callers_choose_has_bounds() {
        let server = parse("server.max_ttl = '90s'\nserver.max_period = '30d'").server;
        assert_eq!(server.max_ttl, Some(Micros::from_secs(90)));
        assert_eq!(server.max_period, Some(Micros::from_secs(30 * 86_400)));
        assert_eq!((parse("").server.max_ttl, parse("").server.max_period), (None, None));
        let by_env = [("TOLLGATE_SERVER_MAX_PERIOD".to_owned(), "1h".to_owned())];
        let config = Config::parse_with_env("", by_env).unwrap();
        assert_eq!(config.server.max_period, Some(Micros::from_secs(3_600)));
        for (field, value, fix) in [
            ("max_ttl", "'0s'", "must be"),
            ("max_ttl", "'999us'", "must be at least 1ms"),
            ("max_ttl", "60", "must be a duration in quotes, such as \"1d\""),
            ("max_period", "'0s'", "must be"),
            ("max_period", "'soon'", "write a whole number and a unit"),
        ] {
            check(&format!("[server]\n{field} = {value}"), &[(2, &format!("server.{field}"), value, fix)]);
        }
    }

    #[test]
    fn namespaces_of_metrics_are_named() {
        assert_eq!(parse("server.namespaces = ['user', 'a:b']").server.namespaces, ["user", "a:b"]);
        assert!(parse("").server.namespaces.is_empty());
        let by_env = [("TOLLGATE_SERVER_NAMESPACES".to_owned(), "user,tenant".to_owned())];
        assert_eq!(Config::parse_with_env("", by_env).unwrap().server.namespaces, ["user", "tenant"]);
        let many = format!("{:?}", vec!["x"; 33]);
        for (value, shown, fix) in [
            ("'user'", "'user'", "must be a list of texts, such as [\"user\", \"tenant\"]"),
            ("['']", "[…]", "each must have 1 to 64 bytes and no control characters"),
            (&*many, "[…]", "has 33 names; at most 32"),
        ] {
            check(&format!("[server]\nnamespaces = {value}"), &[(2, "server.namespaces", shown, fix)]);
        }
    }
}
