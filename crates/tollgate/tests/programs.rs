//! What users write: one short program for each task, run on the memory store, on Redis and on PostgreSQL with nothing changed but
//! the line that chooses the store.

#[path = "programs/cancel.rs"]
mod cancel;
#[path = "programs/contract.rs"]
mod contract;
#[path = "programs/failed_logins.rs"]
mod failed_logins;
#[path = "programs/from_config.rs"]
mod from_config;
#[path = "programs/per_ip.rs"]
mod per_ip;
#[path = "programs/per_plan.rs"]
mod per_plan;
#[path = "programs/permits.rs"]
mod permits;
#[path = "routes/service.rs"]
mod service;
#[path = "programs/tasks.rs"]
mod tasks;

use std::time::Duration;

use tollgate::store::{PostgresOptions, RedisOptions};
use tollgate::{Error, Tollgate, TollgateBuilder};
use tollgate_testkit::postgres::PostgresServer;
use tollgate_testkit::redis::RedisServer;

/// Time enough for whatever a loaded machine does: a call that took longer would be answered by the fallback.
const TIMEOUT: Duration = Duration::from_secs(20);

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
                let mut options = RedisOptions::new(server.url());
                options.timeout = TIMEOUT;
                builder.redis_with(options).connect().await
            }
            On::Postgres(server) => {
                let mut options = PostgresOptions::new(server.url("postgres"));
                options.timeout = TIMEOUT;
                builder.postgres_with(options).connect().await
            }
        }
    }
}
