//! The cells on Redis: one process on one core, against one Redis on another.
//!
//! Everything goes over one connection that many callers share, ours and what we are compared with. Keys are charged before the
//! clock starts and stay charged, so that a check finds a state and writes the next; nothing is denied but the hot key.

mod bytes;
pub(crate) mod ceilings;
pub(crate) mod cell;
mod denied;
mod full_logs;
mod raw;
pub(crate) mod users;

use std::sync::Arc;
use std::time::Duration;

use hdrhistogram::Histogram;
use redis::aio::MultiplexedConnection;
use tollgate::Rate;
use tollgate::store::LimitError;
use tollgate_store::{Cost, Limit, Micros, RedisOptions, RedisStore, Store, StoredLimit};
use tollgate_testkit::redis::RedisServer;

pub(crate) use self::bytes::{Bytes, LEASE, LEASES_MANY, MANY_ENTRIES, RESERVED};
use self::denied::{Cache, Denied};
use self::full_logs::FullLogs;
use self::raw::{Incr, Textbook};
use super::callers::{Charges, MANY, ManyCharges, Reserves, fill};
use super::cpu::Server;
use super::load::{Caller, Keys, Latencies, Paced, Tally, keys, no_latencies, steady_load};
use super::rounds::{self, Cell, Contestant, Plan};
use crate::machine::{Core, pin_process_to, pin_to};

pub(crate) const INCR: &str = "INCR";
pub(crate) const TEXTBOOK: &str = "text-book GCRA";
pub(crate) const SINGLE: &str = "token bucket";
pub(crate) const SIXTEEN: &str = "token bucket, 16 a call";
pub(crate) const FIXED: &str = "fixed window";
pub(crate) const LOG: &str = "sliding window (100 entries)";
pub(crate) const COUNTER: &str = "sliding counter";
pub(crate) const LEASES: &str = "concurrency";
pub(crate) const THREE: &str = "three limits";
pub(crate) const DENIED: &str = "denied, no cache";
pub(crate) const DENIED_CACHED: &str = "denied, cache";
pub(crate) const DENIED_ALONE: &str = "denied, no cache, 1 caller";
pub(crate) const DENIED_CACHED_ALONE: &str = "denied, cache, 1 caller";

/// How many callers at once.
const CALLERS: usize = 256;

/// The bucket of every cell that has one: full within ten minutes, and too deep to be emptied by a run.
const PER_SECOND: u64 = 4;
const BURST: u64 = 2_400;

/// What every bucket is charged beforehand: it takes 100 s to drain, so that no key runs out between two rounds.
const USED: u64 = 400;

/// No deadline is to pass because the machine is busy.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Calls a second in the cell of latencies.
pub(crate) const STEADY: u32 = 10_000;

/// All that a run on Redis found out.
pub(crate) struct Found {
    pub(crate) version: String,
    pub(crate) cells: Vec<Cell>,
    /// Charges that the store was asked for, for each check of the hot denied key with the cache.
    pub(crate) asked_share: f64,
    pub(crate) latencies: Vec<Steady>,
    pub(crate) bytes: Vec<Bytes>,
}

/// How long calls took under a steady load.
pub(crate) struct Steady {
    pub(crate) name: &'static str,
    pub(crate) tally: Tally,
    /// One for each round.
    pub(crate) rounds: Vec<Latencies>,
    pub(crate) all: Latencies,
    /// How late the calls were made: the machine's part.
    pub(crate) late: Latencies,
}

/// Starts a server and measures all cells, from a thread that is tied to a core of its own where there are two.
pub(crate) fn measure(plan: &Plan, cores: &[Core]) -> Result<Found, String> {
    let module = cell::module();
    let server = match &module {
        Ok(module) => RedisServer::builder().arguments(["--loadmodule", module]).start(),
        Err(why) => {
            println!("redis-cell takes no part: {why}\n");
            RedisServer::start()
        }
    };
    if let ([_, its_core, ..], Some(pid)) = (cores, server.pid()) {
        pin_process_to(pid, *its_core);
    }
    let work = || {
        if let [our_core, _, ..] = cores {
            pin_to(*our_core);
        }
        super::block_on(measure_here(plan, &server, module.is_ok()))
    };
    std::thread::scope(|scope| scope.spawn(work).join()).map_err(|_| "the bench of Redis panicked")?
}

async fn measure_here(plan: &Plan, server: &RedisServer, has_cell: bool) -> Result<Found, String> {
    let mut options = RedisOptions::new(server.url());
    options.timeout = TIMEOUT;
    let store: Arc<dyn Store> = Arc::new(RedisStore::new(options).map_err(|error| error.to_string())?);
    let connection = raw::connect(server).await?;
    let incr = Incr(connection.clone());
    let mut textbook = Textbook::load(connection.clone()).await?;

    let (plain_keys, textbook_keys) = (keys("", plan.keys), keys("gcra:", plan.keys));
    textbook.fill(&textbook_keys, USED).await?;
    let mut contestants = vec![
        contestant(INCR, "the command itself: the ceiling", &plain_keys, incr.clone()),
        contestant(TEXTBOOK, "one EVALSHA for each check", &textbook_keys, textbook),
    ];
    for script in &users::ALL {
        let user = users::User::load(connection.clone(), script).await?;
        let user = contestant(script.name, script.about, &plain_keys, user);
        contestants.push(match script.name {
            users::LOG => {
                let names = plain_keys.iter().map(|key| format!("{key}{}", users::LOG_ENDING)).collect();
                let logs = FullLogs::of_textbook(connection.clone(), names).await?;
                user.prepared(move || logs.clone().restore())
            }
            _ => user,
        });
    }
    for ceiling in &ceilings::ALL {
        let commands = ceilings::Commands::load(connection.clone(), ceiling, &plain_keys).await?;
        let make = move || commands.clone();
        contestants.push(Contestant::new(ceiling.name, ceiling.about, ceilings::CALLERS, &plain_keys, make));
    }
    if has_cell {
        let throttle = cell::Throttle(connection.clone());
        contestants.push(contestant(
            cell::NAME,
            &cell::about(server).await?,
            &keys("cell:", plan.keys),
            throttle,
        ));
    }
    contestants.extend(ours(&store, &plain_keys).await?);
    contestants.push(our_full_logs(server, connection.clone(), &plain_keys).await?);

    let mut gates = Vec::new();
    for (name, cache, callers) in [
        (DENIED, Cache::Off, CALLERS),
        (DENIED_CACHED, Cache::On, CALLERS),
        (DENIED_ALONE, Cache::Off, 1),
        (DENIED_CACHED_ALONE, Cache::On, 1),
    ] {
        let gate = Denied::new(store.clone(), cache)?;
        gate.empty().await?;
        gates.push((name, gate.clone()));
        let about = "one hot key through the gate";
        contestants.push(Contestant::new(name, about, callers, &plain_keys, move || gate.clone()));
    }

    let cells = rounds::run(plan, contestants, &Server::Redis(server)).await;
    let asked_share =
        gates.iter().find(|(name, _)| *name == DENIED_CACHED).map_or(f64::NAN, |(name, gate)| {
            let asked = rounds::find(&cells, name).map_or(0, |cell| cell.asked);
            gate.charges() as f64 / asked.max(1) as f64
        });
    let single = Charges { store: store.clone(), limits: [bucket("single")?].into() };
    let latencies = latencies(plan, &plain_keys, incr, single).await;
    let bytes = bytes::measure(plan, server, &store, connection).await?;
    let (major, minor, patch) = server.version();
    Ok(Found { version: format!("{major}.{minor}.{patch}"), cells, asked_share, latencies, bytes })
}

fn contestant<C: Caller + Clone>(name: &'static str, about: &str, keys: &Keys, caller: C) -> Contestant {
    Contestant::new(name, about, CALLERS, keys, move || caller.clone())
}

/// Our own cells in which nothing is denied.
async fn ours(store: &Arc<dyn Store>, keys: &Keys) -> Result<Vec<Contestant>, String> {
    let (single, many) = (bucket("single")?, bucket("many")?);
    let used = Cost::new(USED).unwrap_or(Cost::ONE);
    let charges = |limits: Vec<StoredLimit>| Charges { store: store.clone(), limits: limits.into() };
    let span = Micros::from_secs(600);
    let fixed = |name| limit(name, Limit::fixed_window(1_000_000, span));
    let counter = |name| limit(name, Limit::sliding_window_counter(1_000_000, span));
    let leases = limit("leases", Limit::concurrency(1_000, Micros::from_secs(10)))?;
    let three = vec![bucket("three-a")?, fixed("three-b")?, counter("three-c")?];

    for limit in [&single, &many, &three[0]] {
        fill(&**store, limit, keys, used).await?;
    }
    for limit in [&fixed("fixed")?, &counter("counter")?, &three[1], &three[2]] {
        fill(&**store, limit, keys, Cost::ONE).await?;
    }

    let sixteen = ManyCharges { store: store.clone(), limit: Arc::new(many) };
    let reserves = Reserves { store: store.clone(), limit: Arc::new(leases) };
    let about = format!("{MANY} keys in one call, each for itself");
    Ok(vec![
        contestant(SINGLE, "one check a call", keys, charges(vec![single])),
        contestant(SIXTEEN, &about, keys, sixteen),
        contestant(FIXED, "one check a call", keys, charges(vec![fixed("fixed")?])),
        contestant(COUNTER, "one check a call", keys, charges(vec![counter("counter")?])),
        contestant(LEASES, "reserve and release: two calls for one check", keys, reserves),
        contestant(THREE, "bucket, window and counter of one key in one charge", keys, charges(three)),
    ])
}

/// A sliding window whose keys have a hundred entries each, by a store of its own, so that its keys can be found.
async fn our_full_logs(
    server: &RedisServer,
    connection: MultiplexedConnection,
    keys: &Keys,
) -> Result<Contestant, String> {
    const PREFIX: &str = "logs:";
    let mut options = RedisOptions::new(server.url());
    (options.timeout, options.prefix) = (TIMEOUT, PREFIX.to_owned());
    let store: Arc<dyn Store> = Arc::new(RedisStore::new(options).map_err(|error| error.to_string())?);
    let window = Micros::from_secs(full_logs::WINDOW_SECONDS);
    let log = limit("log", Limit::sliding_window(full_logs::LIMIT, window))?;
    let logs = FullLogs::of_store(connection, &*store, PREFIX, &log, keys).await?;
    let charges = Charges { store, limits: [log].into() };
    let about = format!("{} in any hour, 100 used: an exact log", full_logs::LIMIT);
    Ok(contestant(LOG, &about, keys, charges).prepared(move || logs.clone().restore()))
}

/// A steady load, ours and INCR's by turns.
async fn latencies(plan: &Plan, keys: &Keys, incr: Incr, single: Charges) -> Vec<Steady> {
    let steady = |name| Steady {
        name,
        tally: Tally::default(),
        rounds: Vec::new(),
        all: no_latencies(),
        late: no_latencies(),
    };
    let (mut theirs, mut ours) = (steady(INCR), steady(SINGLE));
    for round in 0..plan.rounds {
        let turn = plan.turn * 2;
        for place in 0..2 {
            if (round + place) % 2 == 0 {
                theirs.add(steady_load(&|| incr.clone(), keys, STEADY, turn).await);
            } else {
                ours.add(steady_load(&|| single.clone(), keys, STEADY, turn).await);
            }
        }
    }
    vec![ours, theirs]
}

impl Steady {
    fn add(&mut self, paced: Paced) {
        self.tally.join(paced.tally);
        // All have the same bounds.
        let _: Result<(), _> = Histogram::add(&mut self.all, &paced.latencies);
        let _: Result<(), _> = Histogram::add(&mut self.late, &paced.late);
        self.rounds.push(paced.latencies);
    }
}

fn bucket(name: &str) -> Result<StoredLimit, String> {
    let rate = Rate::per_second(PER_SECOND).map_err(|error| error.to_string())?;
    limit(name, Limit::token_bucket(rate, BURST))
}

fn limit(name: &str, limit: Result<Limit, LimitError>) -> Result<StoredLimit, String> {
    limit.map(|limit| StoredLimit::new(name, limit)).map_err(|error| error.to_string())
}
