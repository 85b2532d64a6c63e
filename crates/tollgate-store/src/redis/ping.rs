//! Whether a server can serve anybody at all: a ping, on a connection that nothing else goes over.
//!
//! The ping is a write that changes nothing: an expiry for a key that nobody has. A server that is loading, follows another, has
//! too few replicas, cannot save or belongs to a cluster that is down refuses it as it would refuse a charge. One that is out of
//! memory takes it, and so does one whose user misses a right that charges need: those are told key by key, and call by call.
//!
//! A connection that was idle for long may be dead without anybody having said so. So the kept one is given half of the time,
//! and a new one the other half; together that is twice a call's deadline. A process that is merely busy does not take its own
//! lateness for the server's (`shared/deadline.rs`).

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use tokio::time::Instant;

use super::RedisStore;
use super::failure::{self, CallError, Remedy};
use super::node::Node;
use super::slot::slot;
use crate::remote::deadline;
use crate::{NodeId, Scope, StoreError};

/// How many names are tried until one falls into a slot of the server; a server with few slots is asked for another's key
/// then, and says so, which is an answer too.
const NAMES_TRIED: usize = 1_000;

impl RedisStore {
    pub(super) async fn ping_node(&self, node: NodeId) -> Result<(), StoreError> {
        let route = &self.route;
        let timeout = route.options().timeout;
        let half = Instant::now() + timeout;
        let deadline = half + timeout;
        if route.is_cluster() && node == NodeId::ONLY {
            // Nobody has said yet where the slots are: whoever does so now answers for the cluster.
            return route.owner(0, deadline).await.map(drop);
        }
        // A server that has no slots any more is nobody's concern.
        let Some(node) = route.primary(node) else { return Ok(()) };
        let key = self.key_on(&node);
        let kept = route.pings.lock().remove(&node.address);
        if let Some(mut kept) = kept
            && let Some(Ok(())) = deadline::by(half, timeout, send(&mut kept, &key)).await
        {
            route.pings.lock().insert(node.address.clone(), kept);
            return Ok(());
        }
        let asked = deadline::by(deadline.max(Instant::now() + timeout), timeout, async {
            let mut connection = node.connect_apart().await?;
            send(&mut connection, &key).await?;
            Ok(connection)
        });
        let call_error = match asked.await {
            Some(Ok(connection)) => {
                route.pings.lock().insert(node.address.clone(), connection);
                return Ok(());
            }
            Some(Err(call_error)) => call_error,
            None => CallError::timeout(false),
        };
        // While it is taken to be down no call goes there, and none would learn who has taken its place.
        route.learn_soon();
        Err(call_error.error)
    }

    /// A key that nobody has, in a slot of this server.
    fn key_on(&self, node: &Arc<Node>) -> String {
        let name = |number: usize| format!("{}ping:{{{number}}}", self.prefix());
        let of_node = (0..NAMES_TRIED).map(name).find(|name| self.route.has(node, slot(name)));
        of_node.unwrap_or_else(|| name(0))
    }
}

/// Asks, and tells an answer that holds for this question alone from one that holds for any.
async fn send(connection: &mut MultiplexedConnection, key: &str) -> Result<(), CallError> {
    // An instant that has passed: a key that should be there after all is gone, as nobody would miss it.
    let mut question = redis::cmd("PEXPIREAT");
    question.arg(key).arg(1);
    let call_error = match question.query_async::<i64>(connection).await {
        Ok(_) => return Ok(()),
        Err(error) => failure::of_call(error),
    };
    match call_error.remedy {
        Remedy::Redirect => Ok(()),
        // Full, or a right that this command needs.
        _ if call_error.error.scope() == Scope::Call => Ok(()),
        _ => Err(call_error),
    }
}
