//! Builds a gate from a configuration, on the store that the configuration names. `connect.rs` connects to the store.

use std::sync::Arc;

use tollgate_store::{Clock, Store};

use crate::builder::TollgateBuilder;
#[cfg(any(feature = "redis", feature = "postgres"))]
use crate::config::Password;
use crate::config::{ClockMode, Config, StoreMode};
use crate::connect;
use crate::error::Error;
use crate::tollgate::Tollgate;

impl Tollgate {
    /// The gate that a configuration describes, on the store that it names. To count in another store, set `[store] mode` or the
    /// environment variable `RL_STORAGE_MODE`; the features `redis` and `postgres` must be enabled for it.
    ///
    /// A shared store needs a tokio runtime. If it cannot be reached now, a warning is logged and limits fall back until it can.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::Tollgate;
    /// use tollgate::config::Config;
    ///
    /// let text = "[limits.api]\nstrategy = 'token_bucket'\nrate = '10/s'\nburst = 20\n";
    /// let config = Config::parse_with_env(text, std::env::vars())?;
    /// let gate = Tollgate::open(&config).await?;
    /// assert!(gate.check("api", "user:42").await?.is_allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open(config: &Config) -> Result<Tollgate, Error> {
        Tollgate::opening(config).await?.build()
    }

    /// The same, not yet built: already on the store that the configuration names, for programs that add an observer, telemetry, a
    /// clock or further limits.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::config::Config;
    /// use tollgate::{Limit, Tollgate};
    ///
    /// let config = Config::parse("[limits.api]\nunlimited = true\n")?;
    /// let login = Limit::token_bucket("1/s", 5)?;
    /// let gate = Tollgate::opening(&config).await?.limit("login", login).build()?;
    /// assert_eq!(gate.policy().rules().len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn opening(config: &Config) -> Result<TollgateBuilder, Error> {
        let builder = Tollgate::builder().config(config);
        Ok(match store(config).await? {
            Some(store) => builder.store(store),
            None => builder,
        })
    }
}

/// The store that a configuration names; `None` for the memory store.
async fn store(config: &Config) -> Result<Option<Arc<dyn Store>>, Error> {
    match config.store.mode {
        StoreMode::Memory => Ok(None),
        StoreMode::Redis => redis(config).await.map(Some),
        StoreMode::Postgres => postgres(config).await.map(Some),
    }
}

#[cfg(feature = "redis")]
async fn redis(config: &Config) -> Result<Arc<dyn Store>, Error> {
    use tollgate_store::RedisOptions;
    let Some(redis) = &config.store.redis else { return Err(no_address("redis")) };
    let mut options = match redis.cluster {
        true => RedisOptions::cluster(redis.urls.clone()),
        false => RedisOptions::new(redis.urls.first().cloned().unwrap_or_default()),
    };
    options.username = redis.username.clone();
    options.password = resolved(redis.password.as_ref())?;
    options.timeout = config.store.timeout;
    options.max_keys = u64::try_from(config.store.max_keys).ok();
    options.ca_file = redis.ca_file.clone();
    options.cert_file = redis.cert_file.clone();
    options.key_file = redis.key_file.clone();
    if let Some(prefix) = &redis.prefix {
        options.prefix = prefix.clone();
    }
    if let Some(connections) = config.store.connections {
        options.connections = connections;
    }
    connect::redis(options).await
}

#[cfg(feature = "postgres")]
async fn postgres(config: &Config) -> Result<Arc<dyn Store>, Error> {
    use tollgate_store::PostgresOptions;
    let Some(postgres) = &config.store.postgres else { return Err(no_address("postgres")) };
    let mut options = PostgresOptions::new(postgres.url.clone());
    options.password = resolved(postgres.password.as_ref())?;
    options.prefix = postgres.prefix.clone();
    options.timeout = config.store.timeout;
    options.max_keys = u64::try_from(config.store.max_keys).ok();
    options.tls.ca_file = postgres.ca_file.clone();
    options.tls.client_cert_file = postgres.cert_file.clone();
    options.tls.client_key_file = postgres.key_file.clone();
    if let Some(connections) = postgres.connections.or(config.store.connections) {
        options.connections = connections;
    }
    connect::postgres(options).await
}

#[cfg(not(feature = "redis"))]
async fn redis(_: &Config) -> Result<Arc<dyn Store>, Error> {
    Err(connect::no_feature("redis"))
}

#[cfg(not(feature = "postgres"))]
async fn postgres(_: &Config) -> Result<Arc<dyn Store>, Error> {
    Err(connect::no_feature("postgres"))
}

#[cfg(any(feature = "redis", feature = "postgres"))]
fn no_address(name: &str) -> Error {
    Error::call(format!("the store mode is {name}, and no address is given: write store.{name}.url"))
}

#[cfg(any(feature = "redis", feature = "postgres"))]
fn resolved(password: Option<&Password>) -> Result<Option<String>, Error> {
    let lookup = |name: &str| std::env::var(name).ok();
    password.map(|password| password.resolve(lookup)).transpose().map_err(Error::call)
}

impl TollgateBuilder {
    /// Applies everything that a configuration says about limits and how they are counted. The caller connects the store that it
    /// names and passes it to [`store`](Self::store).
    ///
    /// ```
    /// use tollgate::Tollgate;
    /// use tollgate::config::Config;
    ///
    /// let config = Config::parse("[store]\nmax_keys = 1_000\n[limits.api]\nunlimited = true\n")?;
    /// let gate = Tollgate::builder().config(&config).build()?;
    /// assert_eq!(gate.policy().rules()[0].name(), "api");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn config(mut self, config: &Config) -> Self {
        let store = &config.store;
        self.namespaces.extend(config.namespaces().map(str::to_owned));
        if store.clock == ClockMode::Coarse {
            self = self.clock(Clock::coarse());
        }
        self.policy(config.policy.clone())
            .max_keys(store.max_keys)
            .when_full(store.when_full)
            .fallback(store.fallback)
            .instances(store.fallback_instances)
            .denial_cache(store.denial_cache)
    }
}
