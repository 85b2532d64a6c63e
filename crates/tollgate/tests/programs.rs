//! What users write: one short program for each task, run on the memory store, on Redis and on PostgreSQL with nothing changed but
//! the line that chooses the store.

#[path = "programs/cancel.rs"]
mod cancel;
#[path = "programs/contract.rs"]
mod contract;
#[path = "programs/permits.rs"]
mod permits;
#[path = "programs/tasks.rs"]
mod tasks;

use tollgate::{Error, Tollgate, TollgateBuilder};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;

/// The stores that a program is run on, with the server that each needs.
pub(crate) enum On {
    Memory,
    Redis(RedisServer),
    Postgres(PostgresServer),
}

impl On {
    pub(crate) fn all() -> [On; 3] {
        [On::Memory, On::Redis(RedisServer::start()), On::Postgres(PostgresServer::start())]
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            On::Memory => "memory",
            On::Redis(_) => "Redis",
            On::Postgres(_) => "PostgreSQL",
        }
    }

    /// The one line that differs.
    pub(crate) async fn connect(&self, builder: TollgateBuilder) -> Result<Tollgate, Error> {
        match self {
            On::Memory => builder.build(),
            On::Redis(server) => {
                builder.redis(format!("redis://127.0.0.1:{}", server.port())).connect().await
            }
            On::Postgres(server) => builder.postgres(server.url("postgres")).connect().await,
        }
    }
}
