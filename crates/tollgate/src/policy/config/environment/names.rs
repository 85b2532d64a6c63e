//! The names of environment variables, and the field of the file that each sets.
//!
//! `environment.rs` reads their values. Fields of limits come from the file, and those of other crates from their extensions.

use std::collections::BTreeMap;

use toml::de::DeTable;

use crate::policy::config::limits;

/// The form of an environment variable's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VariableKind {
    /// A text.
    Text,
    /// A whole number.
    Number,
    /// `true` or `false`.
    Truth,
    /// Texts with commas between.
    Texts,
}

/// The fields of `[store]` and `[requests]`.
pub(super) const FIELDS: [(&str, VariableKind); 31] = [
    ("store.mode", VariableKind::Text),
    ("store.fallback", VariableKind::Text),
    ("store.fallback_instances", VariableKind::Number),
    ("store.timeout", VariableKind::Text),
    ("store.denial_cache", VariableKind::Text),
    ("store.connections", VariableKind::Number),
    ("store.max_keys", VariableKind::Number),
    ("store.when_full", VariableKind::Text),
    ("store.clock", VariableKind::Text),
    ("store.redis.url", VariableKind::Text),
    ("store.redis.urls", VariableKind::Texts),
    ("store.redis.cluster", VariableKind::Truth),
    ("store.redis.username", VariableKind::Text),
    ("store.redis.password", VariableKind::Text),
    ("store.redis.ca_file", VariableKind::Text),
    ("store.redis.cert_file", VariableKind::Text),
    ("store.redis.key_file", VariableKind::Text),
    ("store.redis.prefix", VariableKind::Text),
    ("store.postgres.url", VariableKind::Text),
    ("store.postgres.prefix", VariableKind::Text),
    ("store.postgres.password", VariableKind::Text),
    ("store.postgres.ca_file", VariableKind::Text),
    ("store.postgres.cert_file", VariableKind::Text),
    ("store.postgres.key_file", VariableKind::Text),
    ("store.postgres.connections", VariableKind::Number),
    ("requests.trusted_proxies", VariableKind::Texts),
    ("requests.client_header", VariableKind::Text),
    ("requests.ipv4_prefix", VariableKind::Number),
    ("requests.ipv6_prefix", VariableKind::Number),
    ("requests.encoded_separators", VariableKind::Text),
    ("requests.user_header", VariableKind::Text),
];

/// Short names that set a field, and the store mode that they belong to, if any.
pub(super) const SHORT: [(&str, &str, VariableKind, Option<&str>); 5] = [
    ("RL_STORAGE_MODE", "store.mode", VariableKind::Text, None),
    ("RL_TIMEOUT", "store.timeout", VariableKind::Text, None),
    ("RL_POOL_SIZE", "store.connections", VariableKind::Number, None),
    ("REDIS_CLUSTER", "store.redis.cluster", VariableKind::Truth, Some("redis")),
    ("DATABASE_URL", "store.postgres.url", VariableKind::Text, Some("postgres")),
];

/// Our sections, as names of variables have them.
pub(super) const SECTIONS: [&str; 3] = ["STORE_", "LIMITS_", "REQUESTS_"];

/// A section that an extension reads, and the fields of it that a variable may set.
pub(in crate::policy::config) type Declared = (&'static str, &'static [(&'static str, VariableKind)]);

/// The variables of `[store]` and `[requests]`.
pub(in crate::policy::config) fn variables() -> impl Iterator<Item = String> {
    FIELDS.iter().map(|(path, _)| format!("TOLLGATE_{}", path.replace('.', "_").to_uppercase()))
}

/// Whether Kubernetes or Docker set this variable for the address of a service: for a service named `tollgate-server` they set
/// `TOLLGATE_SERVER_SERVICE_HOST`, `TOLLGATE_SERVER_PORT` and `TOLLGATE_SERVER_PORT_8080_TCP_ADDR`. These variables set nothing
/// here.
///
/// ```
/// use tollgate::config::is_service_link;
///
/// assert!(is_service_link("TOLLGATE_SERVER_PORT", "tcp://10.0.0.1:8080"));
/// assert!(!is_service_link("TOLLGATE_SERVER_PORT", "8080"));
/// ```
pub fn is_service_link(variable: &str, value: &str) -> bool {
    let is_protocol =
        |text: &str| ["TCP", "UDP", "SCTP"].contains(&text.split('_').next().unwrap_or_default());
    let is_port = |rest: &str| {
        let number = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
        number.len() < rest.len() && number.strip_prefix('_').is_some_and(is_protocol)
    };
    let is_url = || ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.starts_with(scheme));
    variable.ends_with("_SERVICE_HOST")
        || variable.ends_with("_SERVICE_PORT")
        || variable.contains("_SERVICE_PORT_")
        || variable.ends_with("_PORT") && is_url()
        || variable.match_indices("_PORT_").any(|(at, mark)| is_port(&variable[at + mark.len()..]))
}

pub(super) fn unknown(name: &str) -> String {
    match name.starts_with("LIMITS_") {
        true => {
            "sets nothing; it is TOLLGATE_LIMITS_<NAME>_<FIELD>, of a limit that the file has and a field that limits \
             have"
                .to_owned()
        }
        false => "sets nothing; its section has no such field".to_owned(),
    }
}

pub(super) type Path = Vec<String>;

/// What our names set, without their beginning. A name that fits two fields has both.
pub(super) fn known_names(
    file: &DeTable<'_>,
    declared: &[Declared],
) -> BTreeMap<String, Vec<(Path, VariableKind)>> {
    let mut known: BTreeMap<String, Vec<(Path, VariableKind)>> = BTreeMap::new();
    let mut add = |path: Path, kind| {
        let name = path.join("_").to_uppercase().replace(['-', '.'], "_");
        known.entry(name).or_default().push((path, kind));
    };
    for (path, kind) in FIELDS {
        add(path.split('.').map(str::to_owned).collect(), kind);
    }
    for (section, fields) in declared {
        for (field, kind) in *fields {
            add(vec![(*section).to_owned(), (*field).to_owned()], *kind);
        }
    }
    let limits = file.get("limits").and_then(|limits| limits.get_ref().as_table());
    for (limit, _) in limits.into_iter().flat_map(|limits| limits.iter()) {
        for (field, kind) in limits::scalars() {
            add(vec!["limits".to_owned(), limit.get_ref().to_string(), field.to_owned()], kind);
        }
    }
    known
}
