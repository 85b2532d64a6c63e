//! What we are compared with on Redis, over the same client: a raw `INCR`, and the text-book script.

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd};
use tollgate_testkit::redis::RedisServer;

use super::{BURST, PER_SECOND};
use crate::stores::load::{Answer, Caller, Draw, Keys};

/// As many as the store lets wait on a connection.
const CALLS_WAITING: usize = 8_192;

const TEXTBOOK: &str = include_str!("textbook/gcra.lua");

/// A connection for many callers, as the store has it.
pub(super) async fn connect(server: &RedisServer) -> Result<MultiplexedConnection, String> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(CALLS_WAITING);
    let connect =
        async { Client::open(server.url())?.get_multiplexed_async_connection_with_config(&config).await };
    connect.await.map_err(|error| format!("connecting to Redis: {error}"))
}

#[derive(Clone)]
pub(super) struct Incr(pub(super) MultiplexedConnection);

impl Caller for Incr {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let counted: Result<i64, _> = redis::cmd("INCR").arg(draw.one()).query_async(&mut self.0).await;
        counted.map(|count| Answer::one(count > 0)).map_err(|error| error.to_string())
    }
}

#[derive(Clone)]
pub(super) struct Textbook {
    connection: MultiplexedConnection,
    hash: String,
}

impl Textbook {
    pub(super) async fn load(mut connection: MultiplexedConnection) -> Result<Textbook, String> {
        let loaded = redis::cmd("SCRIPT").arg("LOAD").arg(TEXTBOOK).query_async(&mut connection).await;
        let hash = loaded.map_err(|error| format!("loading the text-book script: {error}"))?;
        Ok(Textbook { connection, hash })
    }

    fn charge(&self, key: &str, cost: u64) -> Cmd {
        let mut cmd = redis::cmd("EVALSHA");
        cmd.arg(&self.hash).arg(1).arg(key).arg(BURST).arg(PER_SECOND).arg(1).arg(cost);
        cmd
    }

    /// Charges every key once.
    pub(super) async fn fill(&mut self, keys: &Keys, cost: u64) -> Result<(), String> {
        for some in keys.chunks(1_000) {
            let mut pipe = redis::pipe();
            for key in some {
                pipe.add_command(self.charge(key, cost)).ignore();
            }
            let filled = pipe.query_async::<()>(&mut self.connection).await;
            filled.map_err(|error| format!("filling the text-book script: {error}"))?;
        }
        Ok(())
    }
}

impl Caller for Textbook {
    async fn call(&mut self, draw: &mut Draw) -> Result<Answer, String> {
        let charge = self.charge(draw.one(), 1);
        let answered: Result<(i64, i64, i64, i64), _> = charge.query_async(&mut self.connection).await;
        answered.map(|(allowed, ..)| Answer::one(allowed == 1)).map_err(|error| error.to_string())
    }
}
