//! A ping: whether the server can serve any call, on a connection outside the pool, which no call can block.
//!
//! The ping checks whether the server accepts writes, because a standby, or a server set to read only, rejects every charge. A
//! connection that was idle for long may be dead without a notice. So the existing connection gets half of the time and a new one
//! the other half; together that is twice the deadline of a call. A late ping on a busy machine does not count as a failure of
//! the server (`remote/deadline.rs`). The breaker of the library calls this through `Store::ping`.

use tokio::task::AbortHandle;
use tokio::time::Instant;
use tokio_postgres::{Client, SimpleQueryMessage};

use super::PostgresStore;
use super::fault::{Fault, Stage};
use crate::remote::deadline;
use crate::{Failure, StoreError};

/// A connection that is used only for pings. It is closed when dropped, whatever it waits for.
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
        let link = self.inner.ping.lock().take();
        if let Some(link) = link
            && let Some(Ok(())) = deadline::by(half, timeout, self.send(&link)).await
        {
            *self.inner.ping.lock() = Some(link);
            return Ok(());
        }
        let pool = &self.inner.pool;
        let pinged = deadline::by(deadline.max(Instant::now() + timeout), timeout, async {
            let opened = pool.open_apart().await;
            let (client, driver) =
                opened.map_err(|error| Fault::of(error, Stage::Before, "connecting", &pool.place).error)?;
            let link = PingLink { client, driver };
            self.send(&link).await?;
            Ok(link)
        });
        match pinged.await {
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
        let answer = link.client.simple_query("select current_setting('transaction_read_only')").await;
        let messages = answer.map_err(|error| Fault::of(error, Stage::Looking, "a ping", place).error)?;
        let is_read_only = messages.iter().any(|message| match message {
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
