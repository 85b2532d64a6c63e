//! From a configuration to a registry on the store that it names.
//!
//! What is wrong for good (an address, a password, a certificate, a version, a right, a schema) stops the start with a message
//! that says what to mend. A store that is merely out of reach does not: limits fall back until it is there. What is dangerous
//! about its settings is warned of. Nothing here counts or decides.

use std::sync::Arc;

use tollgate_store::Store;
#[cfg(any(feature = "redis", feature = "postgres"))]
use tollgate_store::{Failure, StoreError};

use crate::builder::TollgateBuilder;
#[cfg(any(feature = "redis", feature = "postgres"))]
use crate::config::Password;
use crate::config::{Config, StoreMode};
use crate::error::Error;
use crate::registry::Tollgate;

impl Tollgate {
    /// The registry that a configuration describes, on the store that it names. `[store] mode`, or `RL_STORAGE_MODE` in the
    /// environment, is all that it takes to count elsewhere; the features `redis` and `postgres` must be there for it.
    ///
    /// A shared store needs a tokio runtime. One that cannot be reached now is warned of, and limits fall back until it can.
    ///
    /// ```
    /// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
    /// use tollgate::Tollgate;
    /// use tollgate::config::Config;
    ///
    /// let text = "[limits.api]\nstrategy = 'token_bucket'\nrate = '10/s'\nburst = 20\n";
    /// let config = Config::parse_with_env(text, std::env::vars())?;
    /// let gate = Tollgate::open(&config).await?;
    /// assert!(gate.acquire("user:42", "api").await?.allowed());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn open(config: &Config) -> Result<Tollgate, Error> {
        Tollgate::opening(config).await?.build()
    }

    /// The same, not yet built: already on the store that the configuration names, for whoever adds an observer, telemetry, a
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
    /// assert_eq!(gate.rules().len(), 2);
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

/// The store that a configuration names, unless it is the memory of this process.
async fn store(config: &Config) -> Result<Option<Arc<dyn Store>>, Error> {
    match config.store.mode {
        StoreMode::Memory => Ok(None),
        StoreMode::Redis => redis(config).await.map(Some),
        StoreMode::Postgres => postgres(config).await.map(Some),
    }
}

#[cfg(feature = "redis")]
async fn redis(config: &Config) -> Result<Arc<dyn Store>, Error> {
    use tollgate_store::{RedisOptions, RedisStore};
    let Some(redis) = &config.store.redis else { return Err(no_address("redis")) };
    let mut options = match redis.cluster {
        true => RedisOptions::cluster(redis.urls.clone()),
        false => RedisOptions::new(redis.urls.first().cloned().unwrap_or_default()),
    };
    options.username = redis.username.clone();
    options.password = resolved(redis.password.as_ref())?;
    options.timeout = config.store.timeout.into();
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
    let store = RedisStore::new(options)?;
    match store.probe().await {
        Ok(report) => report.warnings.iter().for_each(|warning| tracing::warn!("{warning}")),
        Err(error) => go_on_or_stop(error)?,
    }
    Ok(Arc::new(store))
}

#[cfg(feature = "postgres")]
async fn postgres(config: &Config) -> Result<Arc<dyn Store>, Error> {
    use tollgate_store::{PostgresOptions, PostgresStore};
    let Some(postgres) = &config.store.postgres else { return Err(no_address("postgres")) };
    let mut options = PostgresOptions::new(postgres.url.clone());
    options.password = resolved(postgres.password.as_ref())?;
    options.prefix = postgres.prefix.clone();
    options.timeout = config.store.timeout.into();
    options.tls.ca_file = postgres.ca_file.clone();
    options.tls.client_cert_file = postgres.cert_file.clone();
    options.tls.client_key_file = postgres.key_file.clone();
    if let Some(connections) = postgres.connections.or(config.store.connections) {
        options.connections = connections;
    }
    let store = PostgresStore::new(options)?;
    match prepare(&store).await {
        Ok(()) => store.start_cleanup(),
        Err(error) => {
            go_on_or_stop(error)?;
            let store = store.clone();
            tokio::spawn(async move { prepare_when_there(&store).await });
        }
    }
    Ok(Arc::new(store))
}

/// Brings the schema up to date and looks the server over.
#[cfg(feature = "postgres")]
async fn prepare(store: &tollgate_store::PostgresStore) -> Result<(), StoreError> {
    store.migrate().await?;
    store.probe().await?.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(())
}

/// Does so as soon as the server is there: it was not when the process started.
#[cfg(feature = "postgres")]
async fn prepare_when_there(store: &tollgate_store::PostgresStore) {
    loop {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        match prepare(store).await {
            Ok(()) => return store.start_cleanup(),
            Err(error) if is_out_of_reach(&error) => {}
            Err(error) => tracing::error!("PostgreSQL is there and cannot be used: {error}"),
        }
    }
}

#[cfg(not(feature = "redis"))]
async fn redis(_: &Config) -> Result<Arc<dyn Store>, Error> {
    Err(no_feature("redis"))
}

#[cfg(not(feature = "postgres"))]
async fn postgres(_: &Config) -> Result<Arc<dyn Store>, Error> {
    Err(no_feature("postgres"))
}

#[cfg(not(all(feature = "redis", feature = "postgres")))]
fn no_feature(name: &str) -> Error {
    Error::call(format!(
        "the store mode is {name}, which this program was built without: enable the feature `{name}`"
    ))
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

/// A store that is out of reach is warned of; one that cannot be used stops the start.
#[cfg(any(feature = "redis", feature = "postgres"))]
fn go_on_or_stop(error: StoreError) -> Result<(), Error> {
    if !is_out_of_reach(&error) {
        return Err(error.into());
    }
    tracing::warn!("the store is out of reach, and limits fall back until it is there: {error}");
    Ok(())
}

#[cfg(any(feature = "redis", feature = "postgres"))]
fn is_out_of_reach(error: &StoreError) -> bool {
    use Failure::{Connection, Full, Late, NotReady, Overloaded, Timeout};
    matches!(error.failure(), Some(Connection | Full | Late | NotReady | Overloaded | Timeout))
}
