//! Bytes per key in Redis, for each strategy: what Redis says that a key takes, and what its memory grew by.

use std::sync::Arc;

use redis::aio::MultiplexedConnection;
use tokio::task::JoinSet;
use tollgate_store::{ChargeId, Cost, Hold, Limit, Micros, Store, StoredCharge, StoredLimit};
use tollgate_testkit::redis::RedisServer;

use super::{bucket, limit};
use crate::stores::callers::fill;
use crate::stores::load::{Keys, keys};
use crate::stores::rounds::Plan;

/// A row of which the hold is what a reservation takes.
pub(crate) const RESERVED: &str = "token bucket, reserved";
pub(crate) const LEASE: &str = "concurrency, 1 lease";
pub(crate) const LEASES_MANY: &str = "concurrency, 100 leases";

/// How many entries those keys have that have many.
pub(crate) const MANY_ENTRIES: u32 = 100;

/// How many times fewer keys are filled with a hundred entries each.
const FEWER: u32 = 10;

/// How many charges are held at once while filling.
const AT_ONCE: usize = 64;

/// What a key of one strategy takes.
pub(crate) struct Bytes {
    pub(crate) what: String,
    pub(crate) keys: usize,
    /// By `MEMORY USAGE`, on average: the key with its state.
    pub(crate) state: f64,
    /// The same for the holds of a key, all together.
    pub(crate) holds: f64,
    /// What the memory in use grew by, for each key: tables, expiries and holds are in it.
    pub(crate) grown: f64,
}

/// How keys are charged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Charging {
    Plain,
    Held,
}

pub(super) async fn measure(
    plan: &Plan,
    server: &RedisServer,
    store: &Arc<dyn Store>,
    mut connection: MultiplexedConnection,
) -> Result<Vec<Bytes>, String> {
    let hour = Micros::from_secs(3_600);
    let fixed = limit("bytes", Limit::fixed_window(100, hour))?;
    let log = limit("bytes", Limit::sliding_window(100, hour))?;
    let counter = limit("bytes", Limit::sliding_window_counter(100, hour))?;
    let leases = limit("bytes", Limit::concurrency(100, hour))?;
    let (many, few) = (keys("", plan.keys), keys("", plan.keys / FEWER));
    let mut found = Vec::new();
    for (what, limit, keys, entries, charging) in [
        ("token bucket, leaky bucket", bucket("bytes")?, &many, 1, Charging::Plain),
        (RESERVED, bucket("bytes")?, &many, 1, Charging::Held),
        ("fixed window", fixed, &many, 1, Charging::Plain),
        ("sliding counter", counter, &many, 1, Charging::Plain),
        ("sliding window, 1 entry", log.clone(), &many, 1, Charging::Plain),
        ("sliding window, 100 entries", log, &few, MANY_ENTRIES, Charging::Plain),
        (LEASE, leases.clone(), &many, 1, Charging::Held),
        (LEASES_MANY, leases, &few, MANY_ENTRIES, Charging::Held),
    ] {
        server.command(&["FLUSHALL"])?;
        let before = in_use(server)?;
        for _ in 0..entries {
            match charging {
                Charging::Plain => fill(&**store, &limit, keys, Cost::ONE).await?,
                Charging::Held => fill_held(store, &limit, keys).await?,
            }
        }
        let (state, holds) = usage(server, &mut connection).await?;
        let count = keys.len() as f64;
        let grown = in_use(server)?.saturating_sub(before) as f64 / count;
        let (state, holds) = (state as f64 / count, holds as f64 / count);
        found.push(Bytes { what: what.into(), keys: keys.len(), state, holds, grown });
    }
    Ok(found)
}

/// Reserves once for every key, some at a time.
async fn fill_held(store: &Arc<dyn Store>, limit: &StoredLimit, keys: &Keys) -> Result<(), String> {
    let mut tasks = JoinSet::new();
    for number in 0..AT_ONCE {
        let (store, limit, keys) = (store.clone(), limit.clone(), keys.clone());
        tasks.spawn(async move {
            for key in keys.iter().skip(number).step_by(AT_ONCE) {
                let item = StoredCharge { limit: &limit, key, cost: Cost::ONE, shadow: false };
                let hold = Hold { id: ChargeId::random(), ttl: Micros::from_secs(3_600) };
                store.charge(&[item], Some(hold)).await.map_err(|error| error.to_string())?;
            }
            Ok::<(), String>(())
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.map_err(|error| error.to_string())??;
    }
    Ok(())
}

/// The sum of `MEMORY USAGE` over states, and over holds.
async fn usage(server: &RedisServer, connection: &mut MultiplexedConnection) -> Result<(u64, u64), String> {
    let names = server.command(&["KEYS", "*"])?;
    let names: Vec<String> = names.items().iter().map(ToString::to_string).collect();
    let (mut state, mut holds) = (0, 0);
    for some in names.chunks(1_000) {
        let mut pipe = redis::pipe();
        for name in some {
            // Every entry is looked at, where a key has several.
            pipe.cmd("MEMORY").arg("USAGE").arg(name).arg("SAMPLES").arg(0);
        }
        let sizes: Vec<u64> = pipe.query_async(connection).await.map_err(|error| error.to_string())?;
        for (name, size) in some.iter().zip(sizes) {
            *(if name.contains("hold:") { &mut holds } else { &mut state }) += size;
        }
    }
    Ok((state, holds))
}

/// The memory that Redis uses, without the buffers of its clients.
fn in_use(server: &RedisServer) -> Result<u64, String> {
    let field = |name: &str| {
        let value = server.info("memory", name).and_then(|value| value.parse::<u64>().ok());
        value.ok_or_else(|| format!("Redis does not tell {name}"))
    };
    Ok(field("used_memory")?.saturating_sub(field("mem_clients_normal")?))
}
