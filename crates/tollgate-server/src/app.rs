//! The state that all APIs share: the gate, and the current config.
//!
//! The gate itself applies a new config (`reload.rs`), on the same store and with the same counters. This state keeps the config
//! beside it, so that an API reads both consistently.

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::RwLock;
use sha2::{Digest, Sha256};
use tokio::sync::watch;
use tollgate::config::StoreMode;
use tollgate::store::Micros;
use tollgate::telemetry::DroppedLines;
use tollgate::{Limit, Tollgate};

use crate::config::{Config, ServerConfig};
use crate::fleet::Fleet;
use crate::front::json::{GateRoutes, Looks};
use crate::front::models::Models;
use crate::front::page::{Feed, JobsView, ModelsView};
use crate::front::peer::Peers;
use crate::overrides::Overrides;
use crate::reload::History;
use crate::stats::Stats;
use crate::token::{Guesses, Token};

/// The state that the APIs of a server share.
pub(crate) struct App {
    state: RwLock<Arc<State>>,
    pub(crate) history: History,
    pub(crate) overrides: Overrides,
    pub(crate) fleet: Fleet,
    pub(crate) token: Option<Token>,
    pub(crate) guesses: Guesses,
    pub(crate) looks: Looks,
    pub(crate) bounds: Bounds,
    pub(crate) peers: Arc<Peers>,
    pub(crate) metrics: metrics_exporter_prometheus::PrometheusHandle,
    pub(crate) stats: Arc<Stats>,
    /// Lines of the log that were dropped, if there is a log.
    dropped_lines: Option<DroppedLines>,
    pub(crate) feed: Feed,
    pub(crate) jobs: JobsView,
    pub(crate) models_view: ModelsView,
    /// The gateway of language models, if the config has one.
    models: RwLock<Option<Arc<Models>>>,
    is_draining: watch::Sender<bool>,
}

/// The longest times that a caller may choose. Like all of `[server]` they are fixed at start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// The longest time to live of a reservation.
    pub(crate) max_ttl: Micros,
    /// The longest time in which an empty bucket of a limit that comes with a call fills.
    pub(crate) max_period: Micros,
    /// The longest window of a limit that comes with an Envoy descriptor, if it is bounded at all.
    max_override: Option<Micros>,
}

impl Bounds {
    pub(crate) fn of(config: &ServerConfig) -> Bounds {
        Bounds {
            max_ttl: config.max_ttl.unwrap_or(DAY),
            max_period: config.max_period.unwrap_or(Micros::new(7 * DAY.get())),
            max_override: config.max_period,
        }
    }

    /// Refuses a limit of a call whose keys would stay in the store for too long.
    pub(crate) fn check_period(&self, limit: &Limit) -> Result<(), String> {
        within(limit, self.max_period)
    }

    /// The same for a limit that comes with an Envoy descriptor. It is the proxy's configuration and not a caller's choice, and
    /// Envoy lets a call pass that is refused as invalid: so only a bound that was set is applied.
    pub(crate) fn check_override(&self, limit: &Limit) -> Result<(), String> {
        self.max_override.map_or(Ok(()), |most| within(limit, most))
    }
}

fn within(limit: &Limit, most: Micros) -> Result<(), String> {
    let lasts = limit.window_us();
    match lasts > most {
        true => Err(format!(
            "its keys would be kept for {lasts}, and a limit that comes with a call may last {most} (server.max_period)"
        )),
        false => Ok(()),
    }
}

const DAY: Micros = Micros::from_secs(24 * 3_600);

/// The gate, and the config that its limits are from.
pub(crate) struct State {
    pub(crate) gate: Tollgate,
    pub(crate) config: Config,
    /// The `[[routes]]` of the config, as the gate applies them.
    pub(crate) routes: GateRoutes,
    /// The first digits of a hash of its limits, by which servers compare theirs.
    pub(crate) revision: String,
}

impl State {
    pub(crate) fn new(gate: Tollgate, config: Config) -> State {
        let revision = revision(&config);
        State { routes: GateRoutes::new(&config.gate), gate, config, revision }
    }

    /// Whether the counters are in this process.
    pub(crate) fn is_local(&self) -> bool {
        self.config.gate.store.mode == StoreMode::Memory
    }
}

/// Servers of one version that have the same limits have the same revision.
fn revision(config: &Config) -> String {
    let text = format!("{:?}", config.gate.policy);
    Sha256::digest(text).iter().take(4).map(|byte| format!("{byte:02x}")).collect()
}

impl App {
    pub(crate) fn new(
        gate: Tollgate,
        config: Config,
        token: Option<Token>,
        metrics: metrics_exporter_prometheus::PrometheusHandle,
        stats: Arc<Stats>,
    ) -> App {
        stats.show_namespaces(config.namespaces());
        App {
            bounds: Bounds::of(&config.server),
            fleet: Fleet::new(&config),
            peers: Peers::of(&config.server),
            state: RwLock::new(Arc::new(State::new(gate, config))),
            history: History::default(),
            overrides: Overrides::default(),
            token,
            guesses: Guesses::new(),
            looks: Looks::new(),
            metrics,
            stats,
            dropped_lines: None,
            feed: Feed::default(),
            jobs: JobsView::default(),
            models_view: ModelsView::default(),
            models: RwLock::new(None),
            is_draining: watch::Sender::new(false),
        }
    }

    /// The same, with the count of what its log drops.
    pub(crate) fn with_log(self, dropped_lines: Option<DroppedLines>) -> App {
        App { dropped_lines, ..self }
    }

    /// Updates the metrics that are read at a scrape.
    pub(crate) async fn publish_metrics(&self) {
        let gate = self.state().gate.clone();
        gate.publish_metrics();
        if let Some(models) = self.models() {
            models.publish(&gate).await;
        }
        let dropped = self.dropped_lines.as_ref().map_or(0, DroppedLines::count);
        metrics::counter!("tollgate_log_lines_dropped_total").absolute(dropped);
        self.metrics.run_upkeep();
    }

    /// The current state. A reload during the call does not change it; the gate in it follows the reload.
    pub(crate) fn state(&self) -> Arc<State> {
        self.state.read().clone()
    }

    /// The gateway of language models, if there is one.
    pub(crate) fn models(&self) -> Option<Arc<Models>> {
        self.models.read().clone()
    }

    /// Sets or removes the gateway of language models.
    pub(crate) fn set_models(&self, models: Option<Arc<Models>>) {
        *self.models.write() = models;
    }

    /// Serves a connection of a peer, or a call of it, so that its calls to a shared store are counted as the peer's.
    pub(crate) async fn serve_peer<F: Future>(&self, peer: IpAddr, work: F) -> F::Output {
        let is_local = self.state.read().is_local();
        match is_local {
            true => work.await,
            false => self.peers.scope(peer, work).await,
        }
    }

    /// Replaces the state. Changes wait for each other.
    pub(crate) fn change<E>(&self, change: impl FnOnce(&State) -> Result<State, E>) -> Result<(), E> {
        let mut state = self.state.write();
        *state = Arc::new(change(&state)?);
        Ok(())
    }

    /// Runs `work`, which changes the limits of the state's gate, while nothing else changes the state.
    pub(crate) fn with_state_held<R>(&self, work: impl FnOnce(&State) -> R) -> R {
        let state = self.state.write();
        work(&state)
    }

    /// From now on the server reports that it is not ready. It still answers: a load balancer may take a while to notice.
    pub(crate) fn drain(&self) {
        self.is_draining.send_replace(true);
    }

    /// From now on it only finishes the requests in progress.
    pub(crate) fn end(&self) {
        self.drain();
        self.feed.close();
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.is_draining.borrow()
    }

    /// Waits until it is not ready.
    pub(crate) async fn until_draining(&self) {
        // The sender lives as long as this waits.
        let _ = self.is_draining.subscribe().wait_for(|is_draining| *is_draining).await;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;
    use tollgate::telemetry::Telemetry;

    use super::*;
    use crate::stats::Settings;

    /// The result of a future that is ready at its first poll, as all futures with local counters are.
    pub(crate) fn ready<T>(future: impl std::future::Future<Output = T>) -> T {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(future).poll(&mut context) {
            std::task::Poll::Ready(answer) => answer,
            std::task::Poll::Pending => panic!("it has to wait"),
        }
    }

    /// The shared state, with an example policy on the memory store.
    pub(crate) fn app() -> App {
        let policy = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 2\nwindow = '1h'";
        app_of(policy, tollgate::Clock::system())
    }

    pub(crate) fn app_of(policy: &str, clock: tollgate::Clock) -> App {
        let config = Config::parse(policy).expect("a policy");
        let stats = Stats::new(Telemetry::new(), Settings::of(&config), 1_700_000_000);
        let gate = Tollgate::builder().config(&config.gate).clock(clock).observer(stats.clone()).build();
        let metrics = PrometheusBuilder::new().build_recorder().handle();
        App::new(gate.expect("a gate"), config, None, metrics, stats)
    }
}
