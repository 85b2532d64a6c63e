//! The options of the PostgreSQL store, and the check that they can work.
//!
//! `pool.rs` and `tls.rs` use them; reading the config file is not done here. No message and no debug output contains a
//! password.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::SslMode;

use crate::{Clock, Failure, StoreError};

/// The options of the PostgreSQL store.
///
/// ```
/// use tollgate_store::{PostgresOptions, PostgresStore};
///
/// let options = PostgresOptions { connections: 16, ..PostgresOptions::new("postgres://app@db.internal/app") };
/// assert!(PostgresStore::new(options).is_ok()); // nothing was asked of the server yet
/// let error = PostgresStore::new(PostgresOptions::new("redis://db.internal")).unwrap_err();
/// assert!(error.to_string().contains("store.postgres.url"));
/// ```
#[derive(Clone)]
pub struct PostgresOptions {
    /// The address of the database: `postgres://user@host:port/database`, with `?sslmode=require` for TLS.
    pub url: String,
    /// The password, if it is not in the URL.
    pub password: Option<String>,
    /// The prefix of all tables and functions: `[a-z_]{1,32}`.
    pub prefix: String,
    /// The deadline of a call, including the wait for a connection.
    pub timeout: Duration,
    /// The most connections.
    pub connections: usize,
    /// The number of keys from which on no new keys are accepted ([`takes_new_keys`](crate::PostgresStore::takes_new_keys));
    /// `None`, the default, for no such bound.
    pub max_keys: Option<u64>,
    /// The certificates of both sides.
    pub tls: PostgresTls,
    /// How often a task of the store deletes expired rows. `None` starts no task;
    /// [`PostgresStore::cleanup`](crate::PostgresStore::cleanup) does the same by hand.
    pub cleanup_every: Option<Duration>,
    /// The clock in tests. `None`, the default, is the server's own clock.
    pub clock: Option<Clock>,
}

/// TLS to the server. It is used if the URL asks for it or any of these is set. The server's certificate and name are then always
/// verified; that cannot be switched off.
#[derive(Clone, Debug, Default)]
pub struct PostgresTls {
    /// The authority that signed the server's certificate, as PEM; by default, those that the machine trusts.
    pub ca_file: Option<PathBuf>,
    /// The client certificate, as PEM, if the server requires one.
    pub client_cert_file: Option<PathBuf>,
    /// The key of the client certificate, as PEM.
    pub client_key_file: Option<PathBuf>,
}

impl PostgresOptions {
    /// The default options for the database at `url`.
    pub fn new(url: impl Into<String>) -> PostgresOptions {
        PostgresOptions {
            url: url.into(),
            password: None,
            prefix: "tollgate_".into(),
            timeout: Duration::from_millis(100),
            connections: 8,
            max_keys: None,
            tls: PostgresTls::default(),
            cleanup_every: Some(Duration::from_secs(60)),
            clock: None,
        }
    }

    /// The options as a config of the driver; an error if they are invalid.
    pub(super) fn checked(&self) -> Result<Config, StoreError> {
        let wrong = |message: String| Err(StoreError::invalid(message));
        if !(1..=32).contains(&self.prefix.len())
            || !self.prefix.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        {
            return wrong(format!(
                "store.postgres.prefix = {:?}: must be 1 to 32 of the characters a-z and _, such as \"tollgate_\"",
                self.prefix
            ));
        }
        if self.timeout < Duration::from_millis(1) || self.timeout > Duration::from_secs(3600) {
            return wrong(format!("store.timeout = {:?}: must be from 1 ms to an hour", self.timeout));
        }
        if !(1..=10_000).contains(&self.connections) {
            return wrong(format!(
                "store.postgres.connections = {}: must be from 1 to 10000",
                self.connections
            ));
        }
        if self.tls.client_cert_file.is_some() != self.tls.client_key_file.is_some() {
            return wrong("store.postgres.tls: a client certificate and its key are given together".into());
        }
        if ["prefer", "allow"].iter().any(|mode| self.url.contains(&format!("sslmode={mode}"))) {
            return wrong(
                "store.postgres.url: sslmode=prefer and sslmode=allow give way to an attacker in between; \
                 write sslmode=require (always verified here) or sslmode=disable"
                    .into(),
            );
        }
        // `require` means here what other clients call verify-full.
        let url = self
            .url
            .replace("sslmode=verify-full", "sslmode=require")
            .replace("sslmode=verify-ca", "sslmode=require");
        let mut config = match url.parse::<Config>() {
            Ok(config) if !config.get_hosts().is_empty() => config,
            Ok(_) => {
                return wrong(
                    "store.postgres.url: names no host; write postgres://user@host/database".into(),
                );
            }
            // The driver's message names the invalid option, and never its value.
            Err(error) => {
                return wrong(format!(
                    "store.postgres.url: not a PostgreSQL URL ({}); write postgres://user@host:5432/database",
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
                ));
            }
        };
        if let Some(password) = &self.password {
            config.password(password);
        }
        let tls = &self.tls;
        let wants_tls = tls.ca_file.is_some() || tls.client_cert_file.is_some();
        let mode = match (config.get_ssl_mode(), wants_tls) {
            (SslMode::Require, _) | (SslMode::Prefer, true) => SslMode::Require,
            (SslMode::Disable, true) => {
                return wrong(
                    "store.postgres.url says sslmode=disable, and store.postgres.tls names certificates; drop one"
                        .into(),
                );
            }
            _ => SslMode::Disable,
        };
        config.ssl_mode(mode);
        if config.get_application_name().is_none() {
            config.application_name("tollgate");
        }
        Ok(config)
    }
}

/// Omits the password, also the one in the URL.
impl fmt::Debug for PostgresOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self.checked() {
            Ok(config) => place(&config),
            Err(_) => "(not understood)".into(),
        };
        f.debug_struct("PostgresOptions")
            .field("place", &place)
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("connections", &self.connections)
            .field("tls", &self.tls)
            .field("cleanup_every", &self.cleanup_every)
            .finish_non_exhaustive()
    }
}

/// The address of a database for messages: hosts, ports and the database's name, without secrets.
pub(super) fn place(config: &Config) -> String {
    use tokio_postgres::config::Host;
    let port =
        |index: usize| config.get_ports().get(index).or(config.get_ports().first()).copied().unwrap_or(5432);
    let hosts = config.get_hosts().iter().enumerate().map(|(index, host)| match host {
        Host::Tcp(name) => format!("{name}:{}", port(index)),
        #[cfg(unix)]
        Host::Unix(path) => path.display().to_string(),
    });
    let hosts: Vec<String> = hosts.collect();
    match config.get_dbname() {
        Some(database) => format!("{}/{database}", hosts.join(",")),
        None => hosts.join(","),
    }
}

/// The error for an option that names a missing file.
pub(super) fn missing(message: String, cause: impl fmt::Display) -> StoreError {
    StoreError::failed(Failure::Refused, format!("{message}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setup_that_cannot_work_is_refused_by_field() {
        let with = |change: fn(&mut PostgresOptions)| {
            let mut options = PostgresOptions::new("postgres://app:s3cret@db/app");
            change(&mut options);
            options
        };
        for (options, hint) in [
            (with(|o| o.url = "redis://db".into()), "store.postgres.url"),
            (with(|o| o.url = String::new()), "names no host"),
            (with(|o| o.url = "postgres://db/app?sslmode=prefer".into()), "sslmode=require"),
            (with(|o| o.url = "postgres://db/app?colour=red".into()), "colour"),
            (with(|o| o.prefix = "Robert'); drop".into()), "store.postgres.prefix"),
            (with(|o| o.prefix = String::new()), "store.postgres.prefix"),
            (with(|o| o.timeout = Duration::ZERO), "store.timeout"),
            (with(|o| o.connections = 0), "store.postgres.connections"),
            (with(|o| o.tls.client_key_file = Some("key.pem".into())), "given together"),
            (
                with(|o| {
                    o.url = "postgres://db/app?sslmode=disable".into();
                    o.tls.ca_file = Some("ca.pem".into());
                }),
                "drop one",
            ),
        ] {
            let error = options.checked().unwrap_err();
            assert!(error.is_invalid() && error.to_string().contains(hint), "{error}");
        }
    }

    #[test]
    fn tls_is_all_or_nothing() {
        let mode = |url: &str| PostgresOptions::new(url).checked().unwrap().get_ssl_mode();
        assert_eq!(mode("postgres://db/app"), SslMode::Disable);
        assert_eq!(mode("postgres://db/app?sslmode=require"), SslMode::Require);
        assert_eq!(mode("postgres://db/app?sslmode=verify-full"), SslMode::Require);
        let mut options = PostgresOptions::new("postgres://db/app");
        options.tls.ca_file = Some("ca.pem".into());
        assert_eq!(options.checked().unwrap().get_ssl_mode(), SslMode::Require);
    }

    #[test]
    fn nothing_secret_is_shown() {
        let mut options = PostgresOptions::new("postgres://app:s3cret@db:5433/app");
        options.password = Some("hunter2".into());
        let shown = format!("{options:?}");
        assert!(shown.contains("db:5433/app"), "{shown}");
        assert!(!shown.contains("s3cret") && !shown.contains("hunter2"), "{shown}");
    }
}
