//! How to reach a remote store: addresses, logins and certificates.
//!
//! Passwords, and addresses that may contain one, are never printed: not by `Debug`, not in a mistake. The safest form of a
//! password is the name of an environment variable (`env:NAME`); the program that connects looks it up with
//! [`Password::resolve`]. Nothing here connects or opens a file.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;

use super::reader::{Field, Reader, Section};

/// The most connections to PostgreSQL.
const MOST_POSTGRES_CONNECTIONS: usize = 1_024;

/// How to reach Redis.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisConfig {
    /// `redis://` or, for TLS, `rediss://`; may hold a password. At least one; several are servers of one cluster.
    pub urls: Vec<String>,
    /// Whether the addresses are of a Redis Cluster.
    pub cluster: bool,
    /// The user to log in as, if it is not in the address.
    pub username: Option<String>,
    /// The password, if it is not in the address.
    pub password: Option<Password>,
    /// The certificates to trust the server by, in address of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's own certificate, and its key.
    pub cert_file: Option<PathBuf>,
    /// The key of `cert_file`.
    pub key_file: Option<PathBuf>,
    /// The beginning of every key in Redis; the store's default if `None`.
    pub prefix: Option<String>,
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("urls", &self.urls.iter().map(|url| redacted(url)).collect::<Vec<_>>())
            .field("cluster", &self.cluster)
            .field("username", &self.username.as_ref().map(|_| Hidden))
            .field("password", &self.password)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("prefix", &self.prefix)
            .finish()
    }
}

/// How to reach PostgreSQL.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PostgresConfig {
    /// `postgres://` or `postgresql://`; may hold a password.
    pub url: String,
    /// The beginning of every table's name; `tollgate_` by default.
    pub prefix: String,
    /// The password, if it is not in the address.
    pub password: Option<Password>,
    /// The certificates to trust the server by, in address of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's own certificate, and its key.
    pub cert_file: Option<PathBuf>,
    /// The key of `cert_file`.
    pub key_file: Option<PathBuf>,
    /// The number of connections, if it differs from `[store]`.
    pub connections: Option<usize>,
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("url", &redacted(&self.url))
            .field("prefix", &self.prefix)
            .field("password", &self.password)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("connections", &self.connections)
            .finish()
    }
}

/// A placeholder for a hidden value.
struct Hidden;

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
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

impl Password {
    /// The password itself. A password in the environment is looked up, and the error names a variable that is not set.
    ///
    /// ```
    /// use tollgate::config::Password;
    ///
    /// let password = Password::Env("REDIS_PASSWORD".to_owned());
    /// assert_eq!(password.resolve(|_| Some("hunter2".to_owned())).as_deref(), Ok("hunter2"));
    /// assert_eq!(
    ///     password.resolve(|_| None).unwrap_err(),
    ///     "the password is in the environment variable REDIS_PASSWORD, which is not set",
    /// );
    /// ```
    pub fn resolve(&self, lookup: impl FnOnce(&str) -> Option<String>) -> Result<String, String> {
        match self {
            Password::Plain(password) => Ok(password.clone()),
            Password::Env(name) => lookup(name).filter(|password| !password.is_empty()).ok_or_else(|| {
                format!("the password is in the environment variable {name}, which is not set")
            }),
        }
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Password::Env(name) => write!(f, "env:{name}"),
            Password::Plain(_) => f.write_str("***"),
        }
    }
}

/// An address without its possible secrets: login and query.
fn redacted(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    // From the last `@`, because a password may hold one, and before looking for a `?`, because it may hold that too.
    let (login, address) = rest.rsplit_once('@').map_or(("", rest), |(_, address)| ("***@", address));
    match address.split_once('?') {
        None => format!("{scheme}://{login}{address}"),
        Some((address, _)) => format!("{scheme}://{login}{address}?***"),
    }
}

/// The fields of a connection with nothing secret in them.
const PLAIN: [&str; 6] = ["cluster", "ca_file", "cert_file", "key_file", "prefix", "connections"];

const REDIS: [&str; 9] =
    ["url", "urls", "cluster", "username", "password", "ca_file", "cert_file", "key_file", "prefix"];

const POSTGRES: [&str; 7] = ["url", "prefix", "password", "ca_file", "cert_file", "key_file", "connections"];

const REDIS_URL: (&[&str], &str) = (&["redis", "rediss"], "redis://127.0.0.1:6379");

pub(super) fn read_redis(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<RedisConfig> {
    let section = reader.section(field)?.showing(&PLAIN);
    reader.only(&section, &REDIS);
    let urls = match (section.field("url"), section.field("urls")) {
        (Some(_), Some(urls)) => {
            reader
                .misnamed(urls, "stands beside url; keep url for one server, urls for several of a cluster");
            None
        }
        (None, Some(urls)) => read_urls(reader, urls),
        _ => read_url(reader, &section, REDIS_URL.0, REDIS_URL.1).map(|url| vec![url]),
    };
    let written = section.field("cluster").and_then(|field| Some((field, reader.truth(field)?)));
    let is_several = urls.as_ref().is_some_and(|urls| urls.len() > 1);
    if let (Some((field, false)), true) = (written, is_several) {
        reader.mistake(field, "several addresses are of one cluster; remove this, or name one address");
    }
    let username = section.field("username").and_then(|field| reader.text(field, "tollgate"));
    let password = section.field("password").and_then(|field| reader.password(field, "REDIS_PASSWORD"));
    let [ca_file, cert_file, key_file] = read_certificates(reader, &section);
    let prefix = section.field("prefix").and_then(|field| read_redis_prefix(reader, field));
    Some(RedisConfig {
        urls: urls?,
        cluster: written.map_or(is_several, |(_, cluster)| cluster),
        username: username.map(str::to_owned),
        password,
        ca_file,
        cert_file,
        key_file,
        prefix,
    })
}

fn read_redis_prefix(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<String> {
    let prefix = reader.text(field, "tollgate:")?;
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
    if !(1..=64).contains(&prefix.len()) || !prefix.bytes().all(sound) {
        reader.mistake(
            field,
            "must be 1 to 64 characters A-Z, a-z, 0-9, `_`, `.`, `:` and `-`, such as \"tollgate:\"",
        );
    }
    Some(prefix.to_owned())
}

pub(super) fn read_postgres(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<PostgresConfig> {
    let section = reader.section(field)?.showing(&PLAIN);
    reader.only(&section, &POSTGRES);
    let url = read_url(reader, &section, &["postgres", "postgresql"], "postgres://localhost/app");
    let password = section.field("password").and_then(|field| reader.password(field, "REDIS_PASSWORD"));
    let [ca_file, cert_file, key_file] = read_certificates(reader, &section);
    let connections =
        section.field("connections").and_then(|field| reader.connections(field, MOST_POSTGRES_CONNECTIONS));
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
    let prefix = prefix.to_owned();
    Some(PostgresConfig { url: url?, prefix, password, ca_file, cert_file, key_file, connections })
}

/// Reads the paths of certificates: the trusted authorities and the client's own.
fn read_certificates(reader: &mut Reader<'_>, section: &Section<'_>) -> [Option<PathBuf>; 3] {
    let files = ["ca_file", "cert_file", "key_file"].map(|name| {
        let field = section.field(name)?;
        let path = reader.text(field, "/etc/tollgate/ca.pem")?;
        if path.is_empty() {
            reader.mistake(field, "is empty; remove it, or name a file");
        }
        Some(PathBuf::from(path))
    });
    for (one, other) in [("cert_file", "key_file"), ("key_file", "cert_file")] {
        if section.field(one).is_some() && section.field(other).is_none() {
            reader.missing(section, other, format!("\"/etc/tollgate/{other}.pem\", which {one} needs"));
        }
    }
    files
}

/// Reads the addresses of several servers of a cluster.
fn read_urls(reader: &mut Reader<'_>, field: &Field<'_>) -> Option<Vec<String>> {
    let (schemes, example) = REDIS_URL;
    let urls = reader.texts(field, &format!("[\"{example}\"]"))?;
    for (index, url) in urls.iter().enumerate() {
        if let Some(fault) = url_fault(url, schemes) {
            reader.mistake(field, format!("address {} {fault}; write it as in \"{example}\"", index + 1));
            return None;
        }
    }
    Some(urls)
}

/// Reads an address of one of these schemes. The message shows none of it.
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
    match url_fault(url, schemes) {
        None => Some(url.to_owned()),
        Some(fault) => {
            reader.mistake(field, format!("{fault}; write it as in \"{example}\""));
            None
        }
    }
}

/// What is wrong with an address, without showing any of it.
pub fn url_fault(url: &str, schemes: &[&str]) -> Option<String> {
    match url.split_once("://") {
        Some((scheme, rest)) if schemes.contains(&scheme) => {
            if url.chars().any(|character| character.is_whitespace() || character.is_control()) {
                Some("has a space or a control character in it, which must be percent-encoded".to_owned())
            } else {
                redis_host_fault(scheme, rest).map(str::to_owned)
            }
        }
        _ => {
            let shown = schemes.iter().map(|scheme| format!("{scheme}://")).collect::<Vec<_>>().join(" or ");
            Some(format!("must start with {shown}"))
        }
    }
}

/// What is wrong with the host of a Redis address. PostgreSQL's may be left out, be several or be in the query.
fn redis_host_fault(scheme: &str, rest: &str) -> Option<&'static str> {
    if !scheme.starts_with("redis") {
        return None;
    }
    let address = rest.rsplit_once('@').map_or(rest, |(_, address)| address);
    let address = address.split(['/', '?', '#']).next().unwrap_or_default();
    match address.rsplit_once(':') {
        Some((host, port)) if !address.ends_with(']') => match port.parse::<u16>() {
            Ok(1..) => host_fault(host),
            _ => Some("has no port between 1 and 65535 after its host"),
        },
        _ => host_fault(address),
    }
}

/// What is wrong with a host: a name, an IPv4 address, or an IPv6 address in brackets.
pub fn host_fault(host: &str) -> Option<&'static str> {
    let name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    if host.is_empty() {
        Some("has no host")
    } else if let Some(address) = host.strip_prefix('[') {
        let address = address.strip_suffix(']').and_then(|address| address.parse::<Ipv6Addr>().ok());
        address.is_none().then_some("has no IPv6 address between its brackets")
    } else if host.contains(':') {
        Some("has an IPv6 address without its brackets, as in [::1]")
    } else if !host.bytes().all(name) {
        Some("has a host with other characters than letters, digits, `.`, `-` and `_`")
    } else if host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        host.parse::<Ipv4Addr>().is_err().then_some("has no valid IPv4 address")
    } else {
        None
    }
}

impl Reader<'_> {
    /// Reads a password, or the name of the environment variable that holds it, such as `example`.
    pub fn password(&mut self, field: &Field<'_>, example: &str) -> Option<Password> {
        let text = self.text(field, &format!("env:{example}"))?;
        let name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let fix = match text.strip_prefix("env:") {
            _ if text.is_empty() => format!("is empty; remove it, or write \"env:{example}\""),
            Some(variable) if variable.is_empty() || !variable.bytes().all(name) => {
                format!("names no environment variable; write it as in \"env:{example}\"")
            }
            Some(variable) => return Some(Password::Env(variable.to_owned())),
            None => return Some(Password::Plain(text.to_owned())),
        };
        self.mistake(field, fix);
        None
    }

    /// Reads how many connections to keep.
    pub fn connections(&mut self, field: &Field<'_>, most: usize) -> Option<usize> {
        let connections = usize::try_from(self.whole(field, 4, "")?).unwrap_or(usize::MAX);
        if connections > most {
            self.mistake(field, format!("must be at most {most}"));
            return None;
        }
        Some(connections)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::super::tests::{check, parse};

    #[test]
    fn connections_are_checked() {
        for (field, value, shown, fix) in [
            ("redis.cluster", "'yes'", "'yes'", "must be true or false"),
            ("redis.password", "''", "***", "is empty; remove it"),
            ("redis.password", "'env:'", "***", "names no environment variable"),
            ("redis.password", "'env:$X'", "***", "names no environment variable"),
            ("redis.username", "7", "***", "must be text in quotes"),
            ("redis.prefix", "'a{b}'", "'a{b}'", "must be 1 to 64 characters A-Z, a-z, 0-9"),
            ("redis.prefix", "''", "''", "must be 1 to 64 characters"),
            ("redis.ca_file", "''", "''", "is empty; remove it, or name a file"),
            ("redis.urls", "['redis://b']", "", "stands beside url; keep url for one server"),
            ("redis.connections", "7", "7", "unknown field; known here: url, urls, cluster, username"),
            ("postgres.connections", "1025", "1025", "must be at most 1024"),
            ("postgres.password", "'env:'", "***", "names no environment variable"),
            ("postgres.prefix", "'Tollgate'", "'Tollgate'", "must be 1 to 32 characters a-z and `_`"),
            ("postgres.prefix", "''", "''", "must be 1 to 32 characters"),
            (
                "postgres.prefix",
                "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'",
                "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'",
                "must be 1 to 32",
            ),
            ("postgres.prefix", "7", "7", "must be text in quotes, such as \"tollgate_\""),
            ("postgres.schema", "'x'", "***", "unknown field; known here: url, prefix, password, ca_file"),
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
            assert_eq!(parse(&format!("store.redis.url = '{url}'")).store.redis.unwrap().urls, [url]);
        }
        for (urls, fix) in [
            ("'redis://a'", "must be a list of texts, such as [\"redis://127.0.0.1:6379\"]"),
            ("[]", "must be a list of texts"),
            ("['redis://a', 7]", "must be a list of texts"),
            ("['redis://a', 'redis://b:x']", "address 2 has no port between 1 and 65535 after its host"),
        ] {
            let shown = if urls.starts_with('[') { "[…]" } else { "***" };
            check(&format!("store.redis.urls = {urls}"), &[(1, "store.redis.urls", shown, fix)]);
        }
        for (file, missing) in [("cert_file", "key_file"), ("key_file", "cert_file")] {
            let text = format!("store.redis = {{ url = 'redis://a', {file} = 'a.pem' }}");
            check(&text, &[(1, &format!("store.redis.{missing}"), "", "is missing; write")]);
        }
        check(
            "[store.redis]\nurls = ['redis://a', 'redis://b']\ncluster = false",
            &[(3, "store.redis.cluster", "false", "several addresses are of one cluster")],
        );
    }

    #[test]
    fn every_field_of_a_connection_is_read() {
        let store = parse(
            "[store.redis]\nurls = ['redis://a', 'redis://b']\nusername = 'u'\npassword = 'p'\nca_file = 'ca'\n\
             cert_file = 'cert'\nkey_file = 'key'\nprefix = 'app:'\n[store.postgres]\nurl = 'postgres://a'\n\
             password = 'env:PGPASSWORD'\nca_file = 'ca'\ncert_file = 'cert'\nkey_file = 'key'\nconnections = 9",
        )
        .store;
        let redis = store.redis.unwrap();
        assert_eq!((redis.urls, redis.cluster), (vec!["redis://a".to_owned(), "redis://b".to_owned()], true));
        assert_eq!((redis.username.as_deref(), redis.prefix.as_deref()), (Some("u"), Some("app:")));
        assert_eq!(redis.password.unwrap().resolve(|_| None).as_deref(), Ok("p"));
        let postgres = store.postgres.unwrap();
        assert_eq!(postgres.connections, Some(9));
        let password = postgres.password.unwrap();
        assert_eq!(password.resolve(|name| Some(name.to_lowercase())).as_deref(), Ok("pgpassword"));
        for unset in [None, Some(String::new())] {
            assert!(
                password.resolve(|_| unset.clone()).unwrap_err().contains("PGPASSWORD, which is not set")
            );
        }
        for files in [
            [redis.ca_file, redis.cert_file, redis.key_file],
            [postgres.ca_file, postgres.cert_file, postgres.key_file],
        ] {
            let names = files.map(|file| file.unwrap().display().to_string());
            assert_eq!(names, ["ca", "cert", "key"]);
        }
        assert!(parse("store.redis = { urls = ['redis://a'], cluster = true }").store.redis.unwrap().cluster);
        assert!(!parse("store.redis = { urls = ['redis://a'] }").store.redis.unwrap().cluster);
    }

    /// Wherever a secret is written, right or wrong, no message and no `Debug` shows it.
    #[test]
    fn secrets_are_never_shown() {
        for text in [
            "store.redis = { url = 'redis://user:hunter2@a b' }",
            "store.redis = { url = 'redis:/:hunter2@a' }",
            "store.redis = { url = 'hunter2' }",
            "store.redis = { url = ['redis://:hunter2@a'] }",
            "store.redis = { urls = ['redis://:hunter2@a', 'x'] }",
            "store.redis = { url = 'redis://a', username = ['hunter2'] }",
            "store.postgres = { url = 'postgres://a', password = 'env:hunter2!' }",
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
            (
                "store.redis = { urls = ['redis://u:hunter2@a', 'redis://b'] }",
                "[\"redis://***@a\", \"redis://b\"]",
            ),
            ("store.redis = { url = 'redis://a', username = 'hunter2' }", "username: Some(***)"),
            ("store.postgres = { url = 'postgres://a', password = 'hunter2' }", "password: Some(***)"),
            ("store.postgres = { url = 'postgres://u:hunter2@a/app' }", "postgres://***@a/app"),
            ("store.postgres = { url = 'postgres:///app?password=hunter2' }", "postgres:///app?***"),
        ] {
            let config = format!("{:?}", parse(text));
            assert!(config.contains(shown) && !config.contains("hunter2"), "{config}");
        }
    }
}
