//! Logs with many entries a key. They are written once and copied, and the copies are put back before every turn: a turn adds an entry
//! to a log with each check, and none is so old that it runs out.

use std::sync::Arc;

use tokio_postgres::{Client, NoTls};
use tollgate_store::{Cost, Limit, Micros, PostgresOptions, PostgresStore, Store, StoredCharge, StoredLimit};

use crate::stores::load::Keys;

/// The limit, which is the highest whose logs stay in their states, and how many entries each key has. A turn of a thousand keys adds
/// up to twenty to a key.
const LIMIT: u64 = 100;
const ENTRIES: usize = 80;

/// Nothing runs out while the bench runs.
const WINDOW: Micros = Micros::from_secs(3_600);

/// The tables are apart from those of all other cells.
const PREFIX: &str = "logs_";

/// A store with full logs, and the connection that restores them.
#[derive(Clone)]
pub(super) struct FullLogs {
    pub(super) store: Arc<dyn Store>,
    pub(super) limit: StoredLimit,
    client: Arc<Client>,
}

impl FullLogs {
    pub(super) async fn fill(options: PostgresOptions, url: &str, keys: &Keys) -> Result<FullLogs, String> {
        let failed = |error: tokio_postgres::Error| format!("copying the logs: {error}");
        let options = PostgresOptions { prefix: PREFIX.to_owned(), ..options };
        let store = PostgresStore::connect(options).await.map_err(|error| error.to_string())?;
        let limit = Limit::sliding_window(LIMIT, WINDOW).map_err(|error| error.to_string())?;
        let limit = StoredLimit::new("log", limit);
        let items: Vec<StoredCharge<'_>> = keys
            .iter()
            .map(|key| StoredCharge { limit: &limit, key, cost: Cost::ONE, shadow: false })
            .collect();
        for _ in 0..ENTRIES {
            for charged in store.charge_each(&items).await {
                charged.map_err(|error| format!("filling the logs: {error}"))?;
            }
        }
        let (client, connection) = tokio_postgres::connect(url, NoTls).await.map_err(failed)?;
        tokio::spawn(connection);
        client.batch_execute("create table logs_copy as select * from logs_state").await.map_err(failed)?;
        Ok(FullLogs { store: Arc::new(store), limit, client: Arc::new(client) })
    }

    /// Makes all logs as they were at first.
    pub(super) async fn restore(self) -> Result<(), String> {
        let restore =
            "truncate logs_state; insert into logs_state select * from logs_copy; analyze logs_state";
        self.client.batch_execute(restore).await.map_err(|error| format!("restoring the logs: {error}"))
    }
}
