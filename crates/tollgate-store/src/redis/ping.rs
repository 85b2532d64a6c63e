//! A ping: whether a server can serve any call, on a connection that is used only for pings.
//!
//! The ping is a write that changes nothing: it sets an expiry on a key that does not exist. A server that is loading, is a
//! replica, has too few replicas, cannot save, or belongs to a cluster that is down rejects it as it would reject a charge. A
//! server that is out of memory accepts it, and so does a server whose user lacks a privilege that charges need: those failures
//! concern single keys and calls.
//!
//! A connection that was idle for long may be dead without a notice. So the existing connection gets half of the time and a new
//! one the other half; together that is twice the deadline of a call. A late ping on a busy machine does not count as a failure
//! of the server (`remote/deadline.rs`). The breaker of the library calls this through `Store::ping`.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use tokio::time::Instant;

use super::RedisStore;
use super::failure::{self, CallError, Remedy};
use super::node::Node;
use super::slot::slot;
use crate::remote::deadline;
use crate::{NodeId, Scope, StoreError};

/// How many names are tried until one is in a slot of the server. If none is, the ping uses a key of another server; the
/// redirection is an answer too.
const NAMES_TRIED: usize = 1_000;

impl RedisStore {
    pub(super) async fn ping_node(&self, node: NodeId) -> Result<(), StoreError> {
        let route = &self.route;
        let timeout = route.options().timeout;
        let half = Instant::now() + timeout;
        let deadline = half + timeout;
        if route.is_cluster() && node == NodeId::ONLY {
            // The slots are not known yet: if a server answers the query for them now, the cluster is up.
            return route.owner(0, deadline).await.map(drop);
        }
        // A server without slots gets no calls.
        let Some(node) = route.primary(node) else { return Ok(()) };
        let key = self.key_on(&node);
        let connection = route.pings.lock().remove(&node.address);
        if let Some(mut connection) = connection
            && let Some(Ok(())) = deadline::by(half, timeout, send(&mut connection, &key)).await
        {
            route.pings.lock().insert(node.address.clone(), connection);
            return Ok(());
        }
        let pinged = deadline::by(deadline.max(Instant::now() + timeout), timeout, async {
            let mut connection = node.connect_apart().await?;
            send(&mut connection, &key).await?;
            Ok(connection)
        });
        let call_error = match pinged.await {
            Some(Ok(connection)) => {
                route.pings.lock().insert(node.address.clone(), connection);
                return Ok(());
            }
            Some(Err(call_error)) => call_error,
            None => CallError::timeout(false),
        };
        // No call goes to a server that is down, so only this query learns which server replaced it.
        route.learn_soon();
        Err(call_error.error)
    }

    /// A key that does not exist, in a slot of this server.
    fn key_on(&self, node: &Arc<Node>) -> String {
        let name = |number: usize| format!("{}ping:{{{number}}}", self.prefix());
        let of_node = (0..NAMES_TRIED).map(name).find(|name| self.route.has(node, slot(name)));
        of_node.unwrap_or_else(|| name(0))
    }
}

/// Sends the ping. An error that concerns this command only is a success.
async fn send(connection: &mut MultiplexedConnection, key: &str) -> Result<(), CallError> {
    // An expiry in the past: if the key exists after all, it is deleted, which is harmless.
    let mut ping = redis::cmd("PEXPIREAT");
    ping.arg(key).arg(1);
    let call_error = match ping.query_async::<i64>(connection).await {
        Ok(_) => return Ok(()),
        Err(error) => failure::of_call(error),
    };
    match call_error.remedy {
        Remedy::Redirect => Ok(()),
        // Out of memory, or a missing privilege for this command.
        _ if call_error.error.scope() == Scope::Call => Ok(()),
        _ => Err(call_error),
    }
}
