//! What the page shows: the server, its limits, and what became of the last seconds.
//!
//! Keys are hashes unless the config says `show_keys`. Everything is bounded: so many limits, so many keys of each.

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use super::super::json::{described, described_ad_hoc};
use super::feed::Trouble;
use crate::app::{App, State};
use crate::fleet::Server;
use crate::stats::latency::OverTime;
use crate::stats::namespaces::OfNamespace;
use crate::stats::offenders::Offender;
use crate::stats::ring::{SECONDS, Series};
use tollgate::config::StoreMode;

/// How many limits are shown.
const LIMITS: usize = 200;

/// How many keys of each.
const OFFENDERS: usize = 10;

#[derive(Serialize)]
struct Snapshot {
    /// The second that is being counted; the series end before it.
    second: u64,
    version: &'static str,
    draining: bool,
    store: Store,
    latency: Option<Latency>,
    latency_over_time: OverTime,
    /// The servers on this store, and whether the store could not be asked for them.
    servers: Vec<Server>,
    fleet_stale: bool,
    /// What was decided for keys of each namespace in the last five minutes.
    namespaces: Vec<OfNamespace>,
    /// Where the dashboards are.
    grafana: Option<String>,
    /// How many keys are remembered, where that is known.
    keys: Option<usize>,
    needs_token: bool,
    shows_keys: bool,
    /// Whether there are background jobs to show, and language models.
    has_jobs: bool,
    has_models: bool,
    reloads: Vec<Value>,
    /// When the store was down or partly so, newest last.
    troubles: Vec<Trouble>,
    limits: Vec<Limit>,
    /// How many limits there are besides.
    more_limits: usize,
}

#[derive(Serialize)]
struct Store {
    mode: &'static str,
    state: &'static str,
    /// Since when, in seconds since 1970, where it can be otherwise.
    since: Option<u64>,
    last_failure: Option<&'static str>,
    outages: u64,
    fallen_back: u64,
    ambiguous: u64,
}

#[derive(Serialize)]
struct Latency {
    samples: u64,
    p50_ns: u128,
    p95_ns: u128,
    p99_ns: u128,
}

#[derive(Serialize)]
struct Limit {
    #[serde(flatten)]
    described: Value,
    /// Whether its numbers come with each call, so that the policy does not have it.
    ad_hoc: bool,
    /// How full its fullest key was in the last five minutes, from 0 to 1, where that is known.
    fullest: Option<f64>,
    /// How long 99 of 100 of its decisions took at most, of those that were timed in the last five minutes.
    p99_ns: Option<u64>,
    seconds: Series,
    /// The minutes of the last hour and the quarters of an hour of the last day, with the last five minutes alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    minutes: Option<Series>,
    #[serde(skip_serializing_if = "Option::is_none")]
    quarters: Option<Series>,
    offenders: Vec<Shown>,
}

#[derive(Serialize)]
struct Shown {
    hash: String,
    key: Option<String>,
    denials: u64,
    capacity: u64,
    remaining: u64,
    /// In seconds since 1970.
    last_denied: u64,
    reset_after_ms: u64,
}

/// What there is to say now, with so many of the last seconds.
pub(super) fn snapshot(app: &App, seconds: u64) -> Bytes {
    let state = app.state();
    let second = app.stats.second();
    let policy = state.gate.policy();
    let rules = policy.rules();
    let limit = |name: &str, described, ad_hoc| {
        let (minutes, quarters) = match seconds >= SECONDS {
            true => Some(app.stats.history(name, second)).unzip(),
            false => (None, None),
        };
        let (fullest, p99_ns) = app.stats.glance(name, second);
        Limit {
            described,
            ad_hoc,
            fullest,
            p99_ns,
            minutes,
            quarters,
            seconds: app.stats.series(name, second, seconds),
            offenders: app.stats.offenders(name, OFFENDERS).into_iter().map(shown).collect(),
        }
    };
    let named = rules.iter().take(LIMITS).map(|rule| limit(rule.name(), described(&state, rule), false));
    let ad_hoc = state.gate.ad_hoc_names().into_iter().filter(|name| app.stats.is_in_use(name));
    let ad_hoc = ad_hoc.map(|name| limit(name, described_ad_hoc(&state, name), true));
    let latency = app.stats.latency().map(|percentiles| Latency {
        samples: percentiles.samples,
        p50_ns: percentiles.p50.as_nanos(),
        p95_ns: percentiles.p95.as_nanos(),
        p99_ns: percentiles.p99.as_nanos(),
    });
    let (servers, fleet_stale) = app.fleet.servers(app);
    let snapshot = Snapshot {
        second,
        version: env!("CARGO_PKG_VERSION"),
        draining: app.is_draining(),
        store: store(&state),
        latency,
        latency_over_time: app.stats.latency_over_time(),
        servers,
        fleet_stale,
        namespaces: app.stats.namespaces(second),
        grafana: state.config.server.grafana.clone(),
        keys: is_here(&state).then(|| state.gate.keys()),
        needs_token: app.token.is_some(),
        shows_keys: app.stats.shows_keys(),
        has_jobs: !state.config.jobs.is_empty(),
        has_models: app.models().is_some(),
        reloads: app.history.to_json(),
        troubles: app.feed.troubles(),
        limits: named.chain(ad_hoc).collect(),
        more_limits: rules.len().saturating_sub(LIMITS),
    };
    // Nothing in it can fail to be written: names are text and numbers are numbers.
    serde_json::to_vec(&snapshot).unwrap_or_default().into()
}

fn is_here(state: &State) -> bool {
    state.config.gate.store.mode == StoreMode::Memory
}

fn store(state: &State) -> Store {
    let health = state.gate.store_health();
    Store {
        mode: state.config.gate.store.mode.name(),
        state: health.state.name(),
        since: (!is_here(state)).then_some(health.since.as_secs()),
        last_failure: health.last_failure.map(|failure| failure.name()),
        outages: health.outages,
        fallen_back: health.fallen_back,
        ambiguous: health.ambiguous,
    }
}

fn shown(offender: Offender) -> Shown {
    let Offender { who, denials, standing } = offender;
    Shown {
        hash: who.hash,
        key: who.key,
        denials,
        capacity: standing.capacity,
        remaining: standing.remaining,
        last_denied: standing.second,
        reset_after_ms: standing.reset_after.get().div_ceil(1_000),
    }
}
