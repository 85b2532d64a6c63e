//! Connects to a remote store.
//!
//! A permanent mistake (address, password, certificate, version, privilege, schema) stops the start with a message that says what
//! to fix. An unreachable store does not: limits fall back until it can be reached. Dangerous settings of the store are logged as
//! warnings. Nothing here counts or decides.

#[cfg(any(feature = "redis", feature = "postgres"))]
use std::sync::Arc;

#[cfg(any(feature = "redis", feature = "postgres"))]
use tollgate_store::{Failure, Store, StoreError};
#[cfg(feature = "postgres")]
use tollgate_store::{PostgresOptions, PostgresStore};
#[cfg(feature = "redis")]
use tollgate_store::{RedisOptions, RedisStore};

use crate::error::Error;

/// A store on Redis.
#[cfg(feature = "redis")]
pub(crate) async fn redis(options: RedisOptions) -> Result<Arc<dyn Store>, Error> {
    let store = RedisStore::new(options)?;
    match store.probe().await {
        Ok(report) => report.warnings.iter().for_each(|warning| tracing::warn!("{warning}")),
        Err(error) => go_on_or_stop(error)?,
    }
    Ok(Arc::new(store))
}

/// A store on PostgreSQL.
#[cfg(feature = "postgres")]
pub(crate) async fn postgres(options: PostgresOptions) -> Result<Arc<dyn Store>, Error> {
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
async fn prepare(store: &PostgresStore) -> Result<(), StoreError> {
    store.migrate().await?;
    store.probe().await?.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(())
}

/// Does so as soon as the server is there: it was not when the process started.
#[cfg(feature = "postgres")]
async fn prepare_when_there(store: &PostgresStore) {
    loop {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        match prepare(store).await {
            Ok(()) => return store.start_cleanup(),
            Err(error) if is_out_of_reach(&error) => {}
            Err(error) => tracing::error!("PostgreSQL is there and cannot be used: {error}"),
        }
    }
}

/// The error where a store is named that this program was built without.
#[cfg(all(feature = "config", not(all(feature = "redis", feature = "postgres"))))]
pub(crate) fn no_feature(name: &str) -> Error {
    Error::call(format!(
        "the store mode is {name}, which this program was built without: enable the feature `{name}`"
    ))
}

/// Warns about a store that cannot be reached. A store that cannot be used stops the start.
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
