//! Logs of a hundred entries a key, ours and the text-book script's. They are written once and copied, and the copies are put back
//! before every turn: a turn adds an entry to a log with each check, and none is so old that it runs out.

use redis::aio::MultiplexedConnection;
use tollgate_store::{Cost, Store, StoredCharge, StoredLimit};

use crate::stores::load::Keys;

/// How many entries each key has.
const ENTRIES: usize = 100;

/// Twice as many, so that nothing is denied.
pub(super) const LIMIT: u64 = 200;
pub(super) const LIMIT_TEXT: &str = "200";

/// Nothing runs out while the bench runs.
pub(super) const WINDOW_SECONDS: u64 = 3_600;
pub(super) const WINDOW_TEXT: &str = "3600";

/// What the names of all copies begin with.
const COPY: &str = "copy:";

/// The keys of full logs, with a copy of each.
#[derive(Clone)]
pub(super) struct FullLogs {
    connection: MultiplexedConnection,
    names: Keys,
}

impl FullLogs {
    /// Charges each key of a log for each of its entries, and copies all keys of the server that begin with this prefix.
    pub(super) async fn of_store(
        mut connection: MultiplexedConnection,
        store: &dyn Store,
        prefix: &str,
        limit: &StoredLimit,
        keys: &Keys,
    ) -> Result<FullLogs, String> {
        let items: Vec<StoredCharge<'_>> =
            keys.iter().map(|key| StoredCharge { limit, key, cost: Cost::ONE, shadow: false }).collect();
        // One after the other: charges of a key in one script have one instant, and would be one entry.
        for _ in 0..ENTRIES {
            for charged in store.charge_each(&items).await {
                charged.map_err(|error| format!("filling `{}`: {error}", limit.name))?;
            }
        }
        let mut list = redis::cmd("KEYS");
        list.arg(format!("{prefix}*:{}", limit.name));
        let names: Vec<String> =
            list.query_async(&mut connection).await.map_err(|error| format!("listing the logs: {error}"))?;
        if names.len() != keys.len() {
            return Err(format!("{} logs have {} keys", keys.len(), names.len()));
        }
        FullLogs::copied(connection, names.into()).await
    }

    /// Writes the sets that the text-book script would have written.
    pub(super) async fn of_textbook(
        mut connection: MultiplexedConnection,
        names: Keys,
    ) -> Result<FullLogs, String> {
        let failed = |error| format!("filling the text-book logs: {error}");
        let (seconds, micros): (u64, u64) =
            redis::cmd("TIME").query_async(&mut connection).await.map_err(failed)?;
        let now_us = seconds * 1_000_000 + micros;
        for some in names.chunks(100) {
            let mut pipe = redis::pipe();
            for name in some {
                let add = pipe.cmd("ZADD").arg(name);
                for entry in 0..ENTRIES as u64 {
                    let member = tollgate_store::ChargeId::random().to_string();
                    add.arg(now_us - 1_000 * entry).arg(member);
                }
                add.ignore().cmd("EXPIRE").arg(name).arg(WINDOW_SECONDS).ignore();
            }
            pipe.query_async::<()>(&mut connection).await.map_err(failed)?;
        }
        FullLogs::copied(connection, names).await
    }

    async fn copied(connection: MultiplexedConnection, names: Keys) -> Result<FullLogs, String> {
        let logs = FullLogs { connection, names };
        logs.copy(|name| (name.to_owned(), format!("{COPY}{name}"))).await?;
        Ok(logs)
    }

    /// Makes all logs as they were at first.
    pub(super) async fn restore(self) -> Result<(), String> {
        self.copy(|name| (format!("{COPY}{name}"), name.to_owned())).await
    }

    async fn copy(&self, from_and_to: impl Fn(&str) -> (String, String)) -> Result<(), String> {
        let mut connection = self.connection.clone();
        for some in self.names.chunks(1_000) {
            let mut pipe = redis::pipe();
            for name in some {
                let (from, to) = from_and_to(name);
                pipe.cmd("COPY").arg(from).arg(to).arg("REPLACE");
            }
            let copied: Vec<u32> =
                pipe.query_async(&mut connection).await.map_err(|error| format!("copying logs: {error}"))?;
            if copied.contains(&0) {
                return Err("a log that was to be copied is not there".into());
            }
        }
        Ok(())
    }
}
