//! What the page is told: the server, its limits, and what became of the last seconds.
//!
//! Keys are hashes unless the config says `show_keys`. Everything is bounded: so many limits, so many keys of each.

use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

use super::super::json::{described, described_ad_hoc};
use crate::app::{App, State};
use crate::stats::offenders::Offender;
use crate::stats::ring::Series;
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
    /// How many keys are remembered, where that is known.
    keys: Option<usize>,
    needs_token: bool,
    shows_keys: bool,
    reloads: Vec<Value>,
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
    seconds: Series,
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
    let limit = |name: &str, described, ad_hoc| Limit {
        described,
        ad_hoc,
        seconds: app.stats.series(name, second, seconds),
        offenders: app.stats.offenders(name, OFFENDERS).into_iter().map(shown).collect(),
    };
    let named = rules.iter().take(LIMITS).map(|rule| limit(rule.name(), described(&state, rule), false));
    let ad_hoc = state.gate.ad_hoc_names().into_iter().filter(|name| app.stats.is_in_use(name));
    let ad_hoc = ad_hoc.map(|name| limit(name, described_ad_hoc(&state, name), true));
    let latency = app.stats.latency().map(|told| Latency {
        samples: told.samples,
        p50_ns: told.p50.as_nanos(),
        p95_ns: told.p95.as_nanos(),
        p99_ns: told.p99.as_nanos(),
    });
    let snapshot = Snapshot {
        second,
        version: env!("CARGO_PKG_VERSION"),
        draining: app.is_draining(),
        store: store(&state),
        latency,
        keys: is_here(&state).then(|| state.gate.keys()),
        needs_token: app.token.is_some(),
        shows_keys: app.stats.shows_keys(),
        reloads: app.history.to_json(),
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
        since: (!is_here(state)).then(|| health.since.get() / 1_000_000),
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
