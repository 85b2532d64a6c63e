//! All servers on one store in one view. Each says every two seconds what it does, in a record of the store that ends six seconds later, so that one
//! that is gone is gone from the view within seconds; one that stops in good order takes its record back. Who looks reads the records, at most once a second.
//!
//! What a server says is what anybody who reaches it may see (`/v1/server`, `/metrics`): numbers and names, and no key.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tollgate::ChargeId;
use tollgate::config::StoreMode;
use tollgate::store::{Micros, Record, RecordKind, StoreState};

use crate::app::App;
use crate::config::Config;

/// How often a server says that it is up, and how long that holds.
const EVERY: Duration = Duration::from_secs(2);
const HOLDS: Micros = Micros::from_secs(6);

/// How long what was read is shown again.
const FRESH: Duration = Duration::from_millis(900);

/// Over how many seconds rates are taken.
const AVERAGED: u64 = 5;

/// How many limits that fall back are named.
const NAMED: usize = 8;

/// Of how many limits a server says what it decides: the busiest.
const BUSIEST: usize = 64;

/// The longest name that a server is shown by.
const LONGEST_NAME: usize = 64;

/// What this server says of itself, and knows of the others.
pub(crate) struct Fleet {
    /// Tells this process from others, also from the one before a restart.
    id: String,
    name: Mutex<String>,
    since: u64,
    seen: Mutex<Seen>,
    /// One reads at a time. A lock, so that a reader whose caller leaves gives its place back.
    reading: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Seen {
    at: Option<Instant>,
    servers: Vec<Server>,
    is_stale: bool,
}

/// What a server says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Server {
    pub(crate) name: String,
    version: String,
    /// Since when it is up, in seconds since 1970.
    since: u64,
    /// Decisions a second of the last five.
    allowed: f64,
    denied: f64,
    would_deny: f64,
    fell_back: f64,
    /// The first three of these for each of the busiest limits, as many as fit into a record.
    #[serde(default)]
    by_limit: BTreeMap<String, [f64; 3]>,
    /// Of the last minutes; `None` while nothing was timed.
    p50_ns: Option<u64>,
    p99_ns: Option<u64>,
    /// The first digits of a hash of its limits: servers that have the same have the same limits.
    config: String,
    limits: usize,
    store: String,
    /// Limits that are decided without the store, the first few by name.
    fallback: Vec<String>,
    draining: bool,
    #[serde(default, skip_deserializing)]
    this: bool,
}

impl Fleet {
    pub(crate) fn new(config: &Config) -> Fleet {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Fleet {
            id: ChargeId::random().to_string(),
            name: Mutex::new(config.server.name.clone().unwrap_or_else(hostname)),
            since,
            seen: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
        }
    }

    /// Where it listens is part of its name, unless the config names it: several may run on one machine.
    pub(crate) fn listens_at(&self, config: &Config, port: u16) {
        if config.server.name.is_none() {
            let name = format!("{}:{port}", hostname());
            *self.name.lock() = name;
        }
    }

    /// This server.
    fn this(&self, app: &App) -> Server {
        let state = app.state();
        let second = app.stats.second();
        let [allowed, denied, would_deny, fell_back] = app.stats.rates(second, AVERAGED);
        let latency = app.stats.latency();
        let ns = |took: Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        Server {
            name: self.name.lock().clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            since: self.since,
            allowed,
            denied,
            would_deny,
            fell_back,
            by_limit: app.stats.rates_by_limit(second, AVERAGED, BUSIEST).into_iter().collect(),
            p50_ns: latency.map(|latency| ns(latency.p50)),
            p99_ns: latency.map(|latency| ns(latency.p99)),
            config: state.revision.clone(),
            limits: state.config.gate.policy.rules().len(),
            store: state.gate.store_health().state.name().to_owned(),
            fallback: app.stats.falling_back(second, AVERAGED, NAMED),
            draining: app.is_draining(),
            this: true,
        }
    }

    /// Says that this server is up.
    async fn announce(&self, app: &App) -> Result<(), tollgate::Error> {
        let gate = app.state().gate.clone();
        let now = gate.records(RecordKind::Server, Some(0)).await?.now;
        let payload = payload(self.this(app));
        let record = Record { id: self.id.clone(), payload, ends: Some(now.saturating_add(HOLDS)) };
        gate.put_record(RecordKind::Server, &record).await.map(drop)
    }

    /// Takes back that it is up, if the store answers.
    pub(crate) async fn leave(&self, app: &App) {
        let _ = app.state().gate.remove_record(RecordKind::Server, &self.id).await;
    }

    /// Reads who is up, unless that was done just now.
    pub(crate) async fn look(&self, app: &App) {
        let is_fresh = || self.seen.lock().at.is_some_and(|at| at.elapsed() < FRESH);
        if is_fresh() {
            return;
        }
        let Ok(_one) = self.reading.try_lock() else { return };
        let read = app.state().gate.records(RecordKind::Server, None).await;
        let mut seen = self.seen.lock();
        seen.at = Some(Instant::now());
        seen.is_stale = read.is_err();
        if let Ok(records) = read {
            let others = records.changed.unwrap_or_default();
            let others = others.iter().filter(|record| record.id != self.id);
            seen.servers = others.filter_map(|record| serde_json::from_str(&record.payload).ok()).collect();
        }
    }

    /// All servers by name, this one as it is now. Without the store only this one is known for certain.
    pub(crate) fn servers(&self, app: &App) -> (Vec<Server>, bool) {
        let (mut servers, is_stale) = {
            let seen = self.seen.lock();
            (if seen.is_stale { Vec::new() } else { seen.servers.clone() }, seen.is_stale)
        };
        servers.push(self.this(app));
        servers.sort_by(|one, other| one.name.cmp(&other.name).then(one.since.cmp(&other.since)));
        (servers, is_stale)
    }

    pub(crate) fn to_json(&self, app: &App) -> Value {
        let (servers, is_stale) = self.servers(app);
        let is_shared = app.state().config.gate.store.mode != StoreMode::Memory;
        json!({ "servers": servers, "shared": is_shared, "stale": is_stale })
    }
}

/// The text of a record. Where it would be too long, limits are left out, those first that decide least.
fn payload(mut server: Server) -> String {
    loop {
        let text = serde_json::to_string(&server).unwrap_or_default();
        let busy = |rates: &[f64; 3]| rates.iter().sum::<f64>();
        let least = server.by_limit.iter().min_by(|(_, one), (_, other)| busy(one).total_cmp(&busy(other)));
        match least.map(|(name, _)| name.clone()) {
            Some(name) if text.len() > Record::MOST_BYTES => server.by_limit.remove(&name),
            _ => return text,
        };
    }
}

/// The name of this machine.
fn hostname() -> String {
    let read = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .or_else(|_| std::fs::read_to_string("/etc/hostname"));
    let name: String = read.unwrap_or_default().trim().chars().take(LONGEST_NAME).collect();
    if name.is_empty() { "server".to_owned() } else { name }
}

/// Says that this server is up until it is not, and reads who else is while somebody looks.
pub(crate) async fn take_part(app: Arc<App>) {
    while app.feed.is_open() {
        // A store that is down is in the log already; the others see this server again when it answers.
        let _ = app.fleet.announce(&app).await;
        if app.feed.has_viewers() {
            app.fleet.look(&app).await;
        }
        tokio::time::sleep(EVERY / 2).await;
        if app.feed.has_viewers() {
            app.fleet.look(&app).await;
        }
        tokio::time::sleep(EVERY / 2).await;
    }
    if app.state().gate.store_health().state == StoreState::Up {
        app.fleet.leave(&app).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::tests::app;

    /// The longest names that there are, and more limits than are said of.
    #[tokio::test]
    async fn a_record_has_room_for_the_busiest_limits() {
        let app = app();
        let rates = |number: u32| [f64::from(number) + 0.2, 1.0, 0.0];
        let of = |name: &dyn Fn(u32) -> String| {
            let by_limit = (0..64).map(|number| (name(number), rates(number))).collect();
            let text = payload(Server { by_limit, ..app.fleet.this(&app) });
            assert!(text.len() <= Record::MOST_BYTES, "{}", text.len());
            serde_json::from_str::<Server>(&text).expect("JSON").by_limit
        };
        assert_eq!(of(&|number| format!("tenant-{number}.requests")).len(), 64);
        let long = |number: u32| format!("{number:02}{}", "x".repeat(62));
        let busiest = of(&long);
        assert!((20..64).contains(&busiest.len()), "{}", busiest.len());
        let names = (64 - busiest.len()..64).map(|number| long(u32::try_from(number).expect("few")));
        assert!(names.eq(busiest.into_keys()), "the busiest are left");
    }

    #[tokio::test]
    async fn a_server_says_that_it_is_up_and_sees_the_others() {
        let app = app();
        app.fleet.announce(&app).await.expect("a store");
        let other = Server { name: "a-other".into(), this: false, denied: 7.5, ..app.fleet.this(&app) };
        let payload = serde_json::to_string(&other).expect("JSON");
        let record = Record { id: "other".into(), payload: payload.clone(), ends: None };
        app.state().gate.put_record(RecordKind::Server, &record).await.expect("a store");
        let strange = Record { id: "strange".into(), payload: "{}".into(), ends: None };
        app.state().gate.put_record(RecordKind::Server, &strange).await.expect("a store");
        app.fleet.look(&app).await;
        let (servers, is_stale) = app.fleet.servers(&app);
        assert_eq!(servers.len(), 2, "itself once, and what cannot be read is left out: {servers:?}");
        assert_eq!((servers[0].name.as_str(), servers[0].this, servers[0].denied), ("a-other", false, 7.5));
        assert!(servers[1].this && !is_stale);
        assert_eq!(servers[0].config, servers[1].config);
        app.fleet.leave(&app).await;
        let left = app.state().gate.records(RecordKind::Server, None).await.expect("a store").changed;
        assert_eq!(left.map(|all| all.len()), Some(2), "only its own record");
    }
}
