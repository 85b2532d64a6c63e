//! Whether the server can serve anybody at all: a ping, on a connection outside the pool, which no caller can hold up.
//!
//! It asks whether the server takes writes, because one that follows another, or was set to read only, refuses every charge. A
//! connection that was idle for long may be dead without anybody having said so. So the kept one is given half of the time, and
//! a new one the other half; together that is twice a call's deadline. A process that is merely busy does not take its own
//! lateness for the server's (`shared/deadline.rs`).

use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::PostgresStore;
use super::fault::{Fault, Stage};
use crate::remote::deadline;
use crate::{Failure, StoreError};

/// A connection that nothing but pings goes over. Dropped, it is closed, whatever it waits for.
pub(super) struct PingLink {
    client: Client,
    driver: AbortHandle,
}

impl Drop for PingLink {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl PostgresStore {
    pub(super) async fn ping_server(&self) -> Result<(), StoreError> {
        let timeout = self.inner.timeout;
        let half = Instant::now() + timeout;
        let deadline = half + timeout;
        let kept = self.inner.ping.lock().take();
        if let Some(kept) = kept
            && let Some(Ok(())) = deadline::by(half, timeout, self.send(&kept)).await
        {
            *self.inner.ping.lock() = Some(kept);
            return Ok(());
        }
        let pool = &self.inner.pool;
        let asked = deadline::by(deadline.max(Instant::now() + timeout), timeout, async {
            let opened = pool.open_apart().await;
            let (client, driver) =
                opened.map_err(|error| Fault::of(error, Stage::Before, "connecting", &pool.place).error)?;
            let link = PingLink { client, driver };
            self.send(&link).await?;
            Ok(link)
        });
        match asked.await {
            Some(Ok(link)) => {
                *self.inner.ping.lock() = Some(link);
                Ok(())
            }
            Some(Err(error)) => Err(error),
            None => Err(Fault::timeout(Stage::Looking, "a ping", &pool.place).error),
        }
    }

    async fn send(&self, link: &PingLink) -> Result<(), StoreError> {
        let place = &self.inner.pool.place;
        let asked = link.client.simple_query("select current_setting('transaction_read_only')").await;
        let said = asked.map_err(|error| Fault::of(error, Stage::Looking, "a ping", place).error)?;
        let is_read_only = said.iter().any(|message| match message {
            SimpleQueryMessage::Row(row) => row.get(0) == Some("on"),
            _ => false,
        });
        match is_read_only {
            false => Ok(()),
            true => Err(StoreError::failed(
                Failure::NotReady,
                format!(
                    "PostgreSQL at {place} takes no writes: it follows another server, or is set to read only"
                ),
            )),
        }
    }
}
