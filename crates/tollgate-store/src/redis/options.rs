//! The options of the Redis store: addresses, login, TLS, timeouts.
//!
//! Checks them before anything is sent, and builds the client for each server. `route.rs` uses both; reading the config file is
//! not done here. No message and no debug output contains a password.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use redis::{Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, TlsCertificates};

use crate::{Failure, ManualClock, StoreError};

/// How to reach Redis, and how to use it.
///
/// ```
/// use tollgate_store::RedisOptions;
/// let options = RedisOptions::new("redis://127.0.0.1:6379");
/// assert_eq!(options.timeout.as_millis(), 100);
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisOptions {
    /// `redis://host:port`, or `rediss://` for TLS: one server, or some of a cluster's.
    pub urls: Vec<String>,
    /// Whether the servers are a Redis Cluster.
    pub cluster: bool,
    /// The ACL user, if it is not in the address.
    pub username: Option<String>,
    /// The password, if it is not in the address.
    pub password: Option<String>,
    /// The prefix of all key names.
    pub prefix: String,
    /// The deadline of one call, connecting included.
    pub timeout: Duration,
    /// How many connections to each server. Each carries many calls at a time, so one is enough for one core.
    pub connections: usize,
    /// The number of keys on each server from which on it takes no new keys
    /// ([`takes_new_keys`](crate::RedisStore::takes_new_keys)); with `None` only the server's memory counts.
    pub max_keys: Option<u64>,
    /// The certificate authority to trust instead of the system's, as PEM.
    pub ca_file: Option<PathBuf>,
    /// The client certificate, as PEM, if the server requires one.
    pub cert_file: Option<PathBuf>,
    /// The key of the client certificate, as PEM.
    pub key_file: Option<PathBuf>,
    /// For tests: the time to use instead of the server's. Nothing then expires by the server's clock.
    pub clock: Option<ManualClock>,
}

impl RedisOptions {
    /// One server at `url`, or a seed of a cluster, and defaults for the rest.
    pub fn new(url: impl Into<String>) -> RedisOptions {
        RedisOptions {
            urls: vec![url.into()],
            cluster: false,
            username: None,
            password: None,
            prefix: "tollgate:".to_owned(),
            timeout: Duration::from_millis(100),
            connections: 1,
            max_keys: None,
            ca_file: None,
            cert_file: None,
            key_file: None,
            clock: None,
        }
    }

    /// The servers of a cluster: any of them, preferably all.
    pub fn cluster<U: Into<String>>(urls: impl IntoIterator<Item = U>) -> RedisOptions {
        let urls = urls.into_iter().map(Into::into).collect();
        RedisOptions { urls, cluster: true, ..RedisOptions::new("") }
    }

    pub(crate) fn check(&self) -> Result<(), StoreError> {
        let wrong = |message: String| Err(StoreError::failed(Failure::Refused, message));
        if self.urls.is_empty() {
            return wrong("no address of a Redis server; give one, such as redis://127.0.0.1:6379".into());
        }
        if self.urls.len() > 1 && !self.cluster {
            return wrong(
                "several addresses are for a cluster; say that it is one, or give one address".into(),
            );
        }
        let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"_.:-".contains(&byte);
        if self.prefix.len() > 64 || !self.prefix.bytes().all(sound) {
            return wrong(
                "the prefix may have up to 64 characters A-Z, a-z, 0-9, `_`, `.`, `:` and `-`".into(),
            );
        }
        if self.timeout < Duration::from_millis(1) || self.timeout > Duration::from_secs(60) {
            return wrong(format!("the timeout {:?} is not between 1 ms and 60 s", self.timeout));
        }
        if !(1..=64).contains(&self.connections) {
            return wrong(format!("{} connections are not between 1 and 64", self.connections));
        }
        if self.cert_file.is_some() != self.key_file.is_some() {
            return wrong("a client certificate needs both its cert_file and its key_file".into());
        }
        Ok(())
    }

    /// The connection settings of each address.
    pub(crate) fn addresses(&self) -> Result<Vec<ConnectionInfo>, StoreError> {
        self.urls.iter().map(|url| read_url(url)).collect()
    }

    /// A client for a server at `addr`, with all other settings from `like`.
    pub(crate) fn client(&self, addr: ConnectionAddr, like: &ConnectionInfo) -> Result<Client, StoreError> {
        let mut settings = like.redis_settings().clone().set_skip_set_lib_name();
        if let Some(username) = &self.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        let is_tls = matches!(addr, ConnectionAddr::TcpTls { .. });
        let tcp = like.tcp_settings().clone().set_nodelay(true);
        let info = like.clone().set_addr(addr).set_redis_settings(settings).set_tcp_settings(tcp);
        let has_files = self.ca_file.is_some() || self.cert_file.is_some();
        let client = match is_tls {
            true => {
                // Other code in this process may have installed a provider already; any is good.
                let _ = rustls::crypto::ring::default_provider().install_default();
                match has_files {
                    true => Client::build_with_tls(info, self.certificates()?),
                    false => Client::open(info),
                }
            }
            false if has_files => {
                return Err(StoreError::failed(
                    Failure::Refused,
                    "certificates are given, but the address begins with redis://; write rediss:// for TLS",
                ));
            }
            false => Client::open(info),
        };
        client.map_err(|error| refused("the address or the certificates will not do", error))
    }

    fn certificates(&self) -> Result<TlsCertificates, StoreError> {
        let root_cert = self.ca_file.as_deref().map(read_file).transpose()?;
        let client_tls = match (&self.cert_file, &self.key_file) {
            (Some(cert), Some(key)) => {
                Some(ClientTlsConfig { client_cert: read_file(cert)?, client_key: read_file(key)? })
            }
            _ => None,
        };
        Ok(TlsCertificates { client_tls, root_cert })
    }
}

/// Omits passwords, also those in addresses.
impl fmt::Debug for RedisOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let urls: Vec<String> = self.urls.iter().map(|url| shown(url)).collect();
        f.debug_struct("RedisOptions")
            .field("urls", &urls)
            .field("cluster", &self.cluster)
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("connections", &self.connections)
            .field("max_keys", &self.max_keys)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .finish_non_exhaustive()
    }
}

/// An address without login and query. If they cannot be distinguished, the whole address is hidden.
fn shown(url: &str) -> String {
    let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
    if rest.find(['?', '#']).is_some_and(|query| rest.rfind('@').is_some_and(|login| query < login)) {
        return format!("{scheme}://***");
    }
    let (login, place) = rest.rsplit_once('@').map_or(("", rest), |(_, place)| ("***@", place));
    let place = place.split(['?', '#']).next().unwrap_or_default();
    format!("{scheme}://{login}{place}")
}

fn refused(what: &str, error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::failed(Failure::Refused, format!("{what}: {error}")).caused_by(error)
}

fn read_url(url: &str) -> Result<ConnectionInfo, StoreError> {
    let wrong =
        |fix: &str| StoreError::failed(Failure::Refused, format!("the Redis address {}: {fix}", shown(url)));
    if url.split_once("://").is_none_or(|(scheme, _)| !["redis", "rediss"].contains(&scheme)) {
        return Err(wrong("must begin with redis:// or, for TLS, rediss://"));
    }
    // The client's error is not shown: it may quote a password.
    let info = url
        .into_connection_info()
        .map_err(|_| wrong("is not of the form redis://user:password@host:port/db"))?;
    match info.addr() {
        ConnectionAddr::TcpTls { insecure: true, .. } => Err(wrong(
            "asks for TLS without verification; remove #insecure and give a ca_file if the authority is your own",
        )),
        _ => Ok(info),
    }
}

fn read_file(path: &Path) -> Result<Vec<u8>, StoreError> {
    std::fs::read(path).map_err(|error| refused(&format!("could not read {}", path.display()), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_will_not_do_is_refused_with_a_reason() {
        let with = |change: &dyn Fn(&mut RedisOptions)| {
            let mut options = RedisOptions::new("redis://127.0.0.1:6379");
            change(&mut options);
            let built = options.check().and_then(|()| {
                let info = options.addresses()?.remove(0);
                options.client(info.addr().clone(), &info).map(drop)
            });
            built.expect_err("refused").to_string()
        };
        for (error, part) in [
            (with(&|o| o.urls.clear()), "no address"),
            (with(&|o| o.urls.push("redis://b".into())), "several addresses are for a cluster"),
            (with(&|o| o.urls = vec!["http://u:secret@h".into()]), "http://***@h: must begin with redis://"),
            (with(&|o| o.urls = vec!["redis://:secret@h:notaport".into()]), "is not of the form"),
            (with(&|o| o.urls = vec!["rediss://h:1/#insecure".into()]), "remove #insecure"),
            (with(&|o| o.prefix = "{a}".into()), "the prefix may have"),
            (with(&|o| o.timeout = Duration::ZERO), "not between 1 ms and 60 s"),
            (with(&|o| o.connections = 0), "0 connections"),
            (with(&|o| o.cert_file = Some("c.pem".into())), "both its cert_file and its key_file"),
            (with(&|o| o.ca_file = Some("c.pem".into())), "write rediss:// for TLS"),
            (
                with(&|o| {
                    o.urls = vec!["rediss://h:1".into()];
                    o.ca_file = Some("/nowhere/ca.pem".into());
                }),
                "could not read /nowhere/ca.pem",
            ),
        ] {
            assert!(error.contains(part), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn no_password_is_shown() {
        let mut options = RedisOptions::new("redis://user:secret@host:1/2?x=secret");
        options.password = Some("secret".to_owned());
        let shown = format!("{options:?}");
        assert!(shown.contains("redis://***@host:1/2") && !shown.contains("secret"), "{shown}");
    }
}
