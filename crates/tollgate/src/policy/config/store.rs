//! `[store]`: where state lives, and what happens when it cannot be reached.
//!
//! Passwords and addresses that may contain one are never printed: not by `Debug`, not in a mistake. A password is best
//! named by the environment variable that holds it (`env:NAME`); looking that up is for whoever connects.

use std::fmt;

use tollgate_kernel::Micros;
use tollgate_store::WhenFull;

use super::limits::read_fallback;
use super::reader::{Field, Reader, Section};
use super::server::host_fault;
use crate::policy::Fallback;

/// Where state lives, and what happens when it cannot be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreConfig {
    /// Which store; memory unless said otherwise.
    pub mode: StoreMode,
    /// What to answer when the store cannot, for limits that do not say; open unless said otherwise.
    pub fallback: Fallback,
    /// The deadline of one call; 100 ms unless said otherwise.
    pub timeout: Micros,
    /// How many keys the memory store holds at most; 10,000,000 unless said otherwise.
    pub max_keys: usize,
    /// What becomes of new keys when the memory store is full; they share unless said otherwise.
    pub when_full: WhenFull,
    /// How to reach Redis; always there in the mode `redis`.
    pub redis: Option<RedisConfig>,
    /// How to reach PostgreSQL; always there in the mode `postgres`.
    pub postgres: Option<PostgresConfig>,
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig {
            mode: StoreMode::default(),
            fallback: Fallback::default(),
            timeout: Micros::from_millis(100),
            max_keys: 10_000_000,
            when_full: WhenFull::default(),
            redis: None,
            postgres: None,
        }
    }
}

/// Which store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StoreMode {
    /// The memory of this process.
    #[default]
    Memory,
    /// Redis, one server or a cluster.
    Redis,
    /// PostgreSQL.
    Postgres,
}

impl StoreMode {
    /// All three, in the order of the documentation.
    pub const ALL: [StoreMode; 3] = [StoreMode::Memory, StoreMode::Redis, StoreMode::Postgres];

    /// The name used in configuration, metrics and documentation.
    pub const fn name(self) -> &'static str {
        match self {
            StoreMode::Memory => "memory",
            StoreMode::Redis => "redis",
            StoreMode::Postgres => "postgres",
        }
    }
}

impl fmt::Display for StoreMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How to reach Redis.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisConfig {
    /// `redis://` or, for TLS, `rediss://`; may hold a password.
    pub url: String,
    /// Whether the address is of a Redis Cluster.
    pub cluster: bool,
    /// The password, if it is not in the address.
    pub password: Option<Password>,
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("url", &redacted(&self.url))
            .field("cluster", &self.cluster)
            .field("password", &self.password)
            .finish()
    }
}

/// How to reach PostgreSQL.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PostgresConfig {
    /// `postgres://` or `postgresql://`; may hold a password.
    pub url: String,
    /// The beginning of every table's name; `tollgate_` unless said otherwise.
    pub prefix: String,
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("url", &redacted(&self.url))
            .field("prefix", &self.prefix)
            .finish()
    }
}

/// A password, or where to find it. `Debug` shows only the latter.
#[derive(Clone, PartialEq, Eq)]
pub enum Password {
    /// In the environment variable of this name.
    Env(String),
    /// The password itself.
    Plain(String),
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Password::Env(name) => write!(f, "env:{name}"),
            Password::Plain(_) => f.write_str("***"),
        }
    }
}

/// An address without what could be secret in it: who logs in, and the query.
fn redacted(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    // From the last `@`, because a password may hold one, and before looking for a `?`, because it may hold that too.
    let (login, place) = rest.rsplit_once('@').map_or(("", rest), |(_, place)| ("***@", place));
    match place.split_once('?') {
        None => format!("{scheme}://{login}{place}"),
        Some((place, _)) => format!("{scheme}://{login}{place}?***"),
    }
}

impl StoreConfig {
    pub(super) fn read(reader: &mut Reader<'_>, section: Section<'_>) -> StoreConfig {
        let section = section.showing(&["mode", "fallback", "timeout", "max_keys", "when_full"]);
        reader.only(&section, &["mode", "fallback", "timeout", "max_keys", "when_full", "redis", "postgres"]);
        let modes = StoreMode::ALL.map(|mode| (mode.name(), mode));
        let fulls = [("share", WhenFull::Share), ("deny", WhenFull::Deny)];
        let default = StoreConfig::default();
        let mode = section.field("mode").and_then(|field| reader.choice(field, &modes));
        let mode = mode.unwrap_or(default.mode);
        let wants = |wanted, name| mode == wanted && section.field(name).is_none();
        if wants(StoreMode::Redis, "redis") {
            reader.missing(&section, "redis", "{ url = \"redis://127.0.0.1:6379\" }");
        }
        if wants(StoreMode::Postgres, "postgres") {
            reader.missing(&section, "postgres", "{ url = \"postgres://localhost/app\" }");
        }
        let read = |name| section.field(name);
        StoreConfig {
            mode,
            fallback: read("fallback").and_then(|f| read_fallback(reader, f)).unwrap_or(default.fallback),
            timeout: read("timeout").and_then(|f| reader.span(f, "100ms")).unwrap_or(default.timeout),
            max_keys: read("max_keys").and_then(|f| read_max_keys(reader, f)).unwrap_or(default.max_keys),
            when_full: read("when_full").and_then(|f| reader.choice(f, &fulls)).unwrap_or(default.when_full),
            redis: read("redis").and_then(|f| read_redis(reader, f)),
            postgres: read("postgres").and_then(|f| read_postgres(reader, f)),
        }
    }
}

fn read_max_keys(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<usize> {
    let keys = reader.whole(field, 10_000_000, "")?;
    let keys = usize::try_from(keys).ok().filter(|keys| *keys <= 1 << 40);
    if keys.is_none() {
        reader.mistake(
            field,
            "is more than any memory holds; write the most keys to remember, such as 10_000_000",
        );
    }
    keys
}

fn read_redis(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<RedisConfig> {
    let section = reader.section(field)?.showing(&["cluster"]);
    reader.only(&section, &["url", "cluster", "password"]);
    let url = read_url(reader, &section, &["redis", "rediss"], "redis://127.0.0.1:6379");
    let cluster = section.field("cluster").and_then(|field| reader.truth(field));
    let password = section.field("password").and_then(|field| read_password(reader, field));
    Some(RedisConfig { url: url?, cluster: cluster.unwrap_or(false), password })
}

fn read_postgres(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<PostgresConfig> {
    let section = reader.section(field)?.showing(&["prefix"]);
    reader.only(&section, &["url", "prefix"]);
    let url = read_url(reader, &section, &["postgres", "postgresql"], "postgres://localhost/app");
    let prefix = match section.field("prefix") {
        None => "tollgate_",
        Some(field) => {
            let prefix = reader.text(field, "tollgate_")?;
            let sound = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            if !(1..=32).contains(&prefix.len()) || !prefix.bytes().all(sound) {
                reader.mistake(field, "must be 1 to 32 characters a-z and `_`, such as \"tollgate_\"");
            }
            prefix
        }
    };
    Some(PostgresConfig { url: url?, prefix: prefix.to_owned() })
}

/// Reads an address of one of these schemes. What is wrong is told without showing any of it.
fn read_url(
    reader: &mut Reader<'_>,
    section: &Section<'_>,
    schemes: &[&str],
    example: &str,
) -> Option<String> {
    let Some(field) = section.field("url") else {
        reader.missing(section, "url", format!("\"{example}\""));
        return None;
    };
    let url = reader.text(field, example)?;
    let schemes_shown =
        || schemes.iter().map(|scheme| format!("{scheme}://")).collect::<Vec<_>>().join(" or ");
    let fault = match url.split_once("://") {
        Some((scheme, rest)) if schemes.contains(&scheme) => {
            if url.chars().any(|character| character.is_whitespace() || character.is_control()) {
                Some("has a space or a control character in it, which must be percent-encoded".to_owned())
            } else {
                redis_host_fault(scheme, rest).map(str::to_owned)
            }
        }
        _ => Some(format!("must start with {}", schemes_shown())),
    };
    match fault {
        None => Some(url.to_owned()),
        Some(fault) => {
            reader.mistake(field, format!("{fault}; write it as in \"{example}\""));
            None
        }
    }
}

/// What is wrong with the host of a Redis address. PostgreSQL's may be left out, be several or be in the query.
fn redis_host_fault(scheme: &str, rest: &str) -> Option<&'static str> {
    if !scheme.starts_with("redis") {
        return None;
    }
    let place = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    let place = place.split(['/', '?', '#']).next().unwrap_or_default();
    match place.rsplit_once(':') {
        Some((host, port)) if !place.ends_with(']') => match port.parse::<u16>() {
            Ok(1..) => host_fault(host),
            _ => Some("has no port between 1 and 65535 after its host"),
        },
        _ => host_fault(place),
    }
}

/// Reads a password, or the name of the environment variable that holds it.
fn read_password(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Password> {
    let text = reader.text(field, "env:REDIS_PASSWORD")?;
    let name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match text.strip_prefix("env:") {
        _ if text.is_empty() => {
            reader.mistake(field, "is empty; remove it, or write \"env:REDIS_PASSWORD\"");
            None
        }
        Some(variable) if variable.is_empty() || !variable.bytes().all(name) => {
            reader.mistake(field, "names no environment variable; write it as in \"env:REDIS_PASSWORD\"");
            None
        }
        Some(variable) => Some(Password::Env(variable.to_owned())),
        None => Some(Password::Plain(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{check, parse};

    #[test]
    fn the_store_is_checked() {
        for (field, value, fix) in [
            ("mode", "'redsi'", "must be one of memory, redis, postgres; did you mean \"redis\"?"),
            ("fallback", "'none'", "must be one of open, closed, local"),
            ("timeout", "100", "must be a duration in quotes, such as \"100ms\""),
            ("timeout", "'0ms'", "must be longer than zero"),
            ("max_keys", "0", "must be at least 1"),
            ("max_keys", "1_000.5", "must be a whole number, such as 10000000"),
            ("max_keys", "9007199254740991", "is more than any memory holds"),
            ("when_full", "'drop'", "must be one of share, deny"),
            ("when_full", "true", "must be text in quotes, such as \"share\""),
        ] {
            check(&format!("[store]\n{field} = {value}"), &[(2, &format!("store.{field}"), value, fix)]);
        }
        for (field, value, shown, fix) in [
            ("redis.cluster", "'yes'", "'yes'", "must be true or false"),
            ("redis.password", "''", "***", "is empty; remove it"),
            ("redis.password", "'env:'", "***", "names no environment variable"),
            ("redis.password", "'env:$X'", "***", "names no environment variable"),
            ("postgres.prefix", "'Tollgate'", "'Tollgate'", "must be 1 to 32 characters a-z and `_`"),
            ("postgres.prefix", "''", "''", "must be 1 to 32 characters"),
            (
                "postgres.prefix",
                "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'",
                "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'",
                "must be 1 to 32",
            ),
            ("postgres.prefix", "7", "7", "must be text in quotes, such as \"tollgate_\""),
            ("postgres.schema", "'x'", "***", "unknown field; known here: url, prefix"),
        ] {
            let text =
                format!("[store]\nredis.url = 'redis://a'\npostgres.url = 'postgres://a'\n{field} = {value}");
            check(&text, &[(4, &format!("store.{field}"), shown, fix)]);
        }
        for (kind, url, fix) in [
            (
                "redis",
                "'http://a'",
                "must start with redis:// or rediss://; write it as in \"redis://127.0.0.1:6379\"",
            ),
            ("redis", "'localhost:6379'", "must start with redis://"),
            ("redis", "'redis://'", "has no host"),
            ("redis", "'redis://u:p@:6379'", "has no host"),
            ("redis", "'redis://a:0'", "has no port between 1 and 65535"),
            ("redis", "'redis://a:b/1'", "has no port between 1 and 65535"),
            ("redis", "'redis://::1'", "has an IPv6 address without its brackets"),
            ("redis", "'redis://a b'", "has a space or a control character"),
            ("redis", "6379", "must be text in quotes"),
            ("postgres", "'mysql://a'", "must start with postgres:// or postgresql://"),
            ("postgres", "'host=a password=b'", "must start with postgres://"),
        ] {
            let expected = (1, format!("store.{kind}.url"));
            check(&format!("store.{kind}.url = {url}"), &[(expected.0, &expected.1, "***", fix)]);
        }
        for url in ["redis://a", "redis://[::1]", "rediss://:p%40@a.b:1/0", "redis://u:p@10.0.0.1?timeout=1s"]
        {
            assert_eq!(parse(&format!("store.redis.url = '{url}'")).store.redis.unwrap().url, url);
        }
    }

    /// Wherever a secret is written, right or wrong, no message and no `Debug` shows it.
    #[test]
    fn secrets_are_never_shown() {
        for text in [
            "store.redis = { url = 'redis://user:hunter2@a b' }",
            "store.redis = { url = 'redis:/:hunter2@a' }",
            "store.redis = { url = 'hunter2' }",
            "store.redis = { url = ['redis://:hunter2@a'] }",
            "store.redis = { uri = 'redis://:hunter2@a' }",
            "store.redis = { url = 'redis://a', passwrd = 'hunter2' }",
            "store.redis = { url = 'redis://a', password = ['hunter2'] }",
            "store.redis = { url = 'redis://a', password = { is = 'hunter2' } }",
            "store.redis = { url = 'redis://a', password = 'env:hunter2!' }",
            "store.redis = { url = 'redis://a:hunter2' }",
            "store.redis = 'redis://:hunter2@a'",
            "store.postgres = 'postgres://u:hunter2@a'",
            "store.postgres = { url = 'postgre://u:hunter2@a/app' }",
            "store.password = 'hunter2'",
            "store = 'redis://:hunter2@a'",
            "password = 'hunter2'",
            "redis.password = 'hunter2'",
            "[store]\nredis = { url = \"redis://a\", password = \"hunter2 }\n",
            "[store]\nredis = { url = \"redis://a\", password = hunter2 }\n",
        ] {
            let mistakes = Config::parse(text).expect_err(text);
            assert!(!format!("{mistakes} {mistakes:?}").contains("hunter2"), "{mistakes}");
        }
        for (text, shown) in [
            ("store.redis = { url = 'redis://u:hunter2@a:1/0' }", "redis://***@a:1/0"),
            ("store.redis = { url = 'redis://:hun@hunter2@a' }", "redis://***@a"),
            ("store.redis = { url = 'redis://:hunter2/?@a' }", "redis://***@a"),
            ("store.redis = { url = 'redis://a?password=hunter2' }", "redis://a?***"),
            ("store.redis = { url = 'redis://a', password = 'hunter2' }", "password: Some(***)"),
            ("store.redis = { url = 'redis://a', password = 'env:PASS' }", "password: Some(env:PASS)"),
            ("store.postgres = { url = 'postgres://u:hunter2@a/app' }", "postgres://***@a/app"),
            ("store.postgres = { url = 'postgres:///app?password=hunter2' }", "postgres:///app?***"),
        ] {
            let config = format!("{:?}", parse(text));
            assert!(config.contains(shown) && !config.contains("hunter2"), "{config}");
        }
    }
}
