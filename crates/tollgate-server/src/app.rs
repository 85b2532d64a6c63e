//! What all faces share: the gate, and the config as it is now.
//!
//! A config that is changed is put in place by the gate itself (`reload.rs`), over the same store and without losing what was
//! consumed. The state here keeps the config beside it, so that a face reads both together.

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::watch;
use tollgate::config::StoreMode;
use tollgate::store::Micros;
use tollgate::{Charge, ChargeId, Decision, Error, Limit, Tollgate};

use crate::config::{Config, ServerConfig};
use crate::front::json::GateRoutes;
use crate::front::models::Models;
use crate::front::page::Feed;
use crate::front::peer::{self, Peers};
use crate::reload::History;
use crate::stats::Stats;
use crate::token::{Guesses, Token};

/// What the faces of a server share.
pub(crate) struct App {
    state: RwLock<Arc<State>>,
    pub(crate) history: History,
    pub(crate) token: Option<Token>,
    pub(crate) guesses: Guesses,
    pub(crate) bounds: Bounds,
    pub(crate) peers: Arc<Peers>,
    pub(crate) metrics: metrics_exporter_prometheus::PrometheusHandle,
    pub(crate) stats: Arc<Stats>,
    pub(crate) feed: Feed,
    /// The gateway of language models, if the config has one.
    models: RwLock<Option<Arc<Models>>>,
    is_draining: watch::Sender<bool>,
}

/// How long what a caller chooses may last in the store. Like all of `[server]` it is settled at start.
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

    /// Refuses a limit that comes with a call and whose keys would be kept for too long.
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
    let lasts = limit.window();
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
}

/// What is done with charges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Charge,
    Peek,
    /// Held for so long.
    Reserve(Duration),
}

/// A decision, and the id of the reservation if it was asked for and made.
pub(crate) struct Decided {
    pub(crate) decision: Decision,
    pub(crate) reservation: Option<ChargeId>,
}

impl State {
    pub(crate) fn new(gate: Tollgate, config: Config) -> State {
        State { routes: GateRoutes::new(&config.gate), gate, config }
    }

    async fn act(&self, act: Act, charges: &[Charge<'_>]) -> Result<Decided, Error> {
        let decision = match act {
            Act::Charge => self.gate.charge(charges).await?,
            Act::Peek => self.gate.peek(charges).await?,
            Act::Reserve(ttl) => {
                return Ok(match self.gate.reserve(charges, ttl).await? {
                    Ok(held) => Decided { decision: held.decision().clone(), reservation: Some(held.id()) },
                    Err(denied) => Decided { decision: denied.into_decision(), reservation: None },
                });
            }
        };
        Ok(Decided { decision, reservation: None })
    }

    fn is_local(&self) -> bool {
        self.config.gate.store.mode == StoreMode::Memory
    }
}

impl App {
    pub(crate) fn new(
        gate: Tollgate,
        config: Config,
        token: Option<Token>,
        metrics: metrics_exporter_prometheus::PrometheusHandle,
        stats: Arc<Stats>,
    ) -> App {
        App {
            bounds: Bounds::of(&config.server),
            peers: Peers::of(&config.server),
            state: RwLock::new(Arc::new(State::new(gate, config))),
            history: History::default(),
            token,
            guesses: Guesses::new(),
            metrics,
            stats,
            feed: Feed::default(),
            models: RwLock::new(None),
            is_draining: watch::Sender::new(false),
        }
    }

    /// The state as it is now, for what need not be exact across a reload.
    pub(crate) fn state(&self) -> Arc<State> {
        self.state.read().clone()
    }

    /// The gateway of language models, if there is one.
    pub(crate) fn models(&self) -> Option<Arc<Models>> {
        self.models.read().clone()
    }

    /// Puts a gateway of language models in place, or none.
    pub(crate) fn set_models(&self, models: Option<Arc<Models>>) {
        *self.models.write() = models;
    }

    /// Decides, and hands the decision over.
    pub(crate) async fn decide<R>(
        &self,
        act: Act,
        charges: &[Charge<'_>],
        tell: impl FnOnce(&State, Result<Decided, Error>) -> R,
    ) -> R {
        let state = self.state();
        let _share = peer::share().await;
        let decided = state.act(act, charges).await;
        tell(&state, decided)
    }

    /// Works with the state while nothing changes: for many decisions in one go, where the counters are in this process.
    pub(crate) fn with_state<R>(&self, work: impl FnOnce(&State) -> R) -> Option<R> {
        let state = self.state.read();
        state.is_local().then(|| work(&state))
    }

    /// Serves a connection of a peer, or a call of it, so that its calls to a shared store are counted as the peer's.
    pub(crate) async fn serve_peer<F: Future>(&self, peer: IpAddr, work: F) -> F::Output {
        match self.with_state(|_| ()) {
            Some(()) => work.await,
            None => self.peers.scope(peer, work).await,
        }
    }

    /// Puts a new state in the place of the old one, which nobody uses meanwhile.
    pub(crate) fn change<E>(&self, change: impl FnOnce(&State) -> Result<State, E>) -> Result<(), E> {
        let mut state = self.state.write();
        *state = Arc::new(change(&state)?);
        Ok(())
    }

    /// From now on the server says that it is not ready. It answers all the same: whoever sends it requests may take a while to
    /// notice.
    pub(crate) fn drain(&self) {
        self.is_draining.send_replace(true);
    }

    /// From now on it only finishes what it has begun.
    pub(crate) fn end(&self) {
        self.drain();
        self.feed.close();
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.is_draining.borrow()
    }

    /// Waits until it is not ready any more.
    pub(crate) async fn until_draining(&self) {
        // There is a sender for as long as there is somebody who waits.
        let _ = self.is_draining.subscribe().wait_for(|is_draining| *is_draining).await;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use metrics_exporter_prometheus::PrometheusBuilder;
    use tollgate::telemetry::Telemetry;

    use super::*;
    use crate::stats::Settings;

    /// The answer of what is ready at its first poll, as everything is whose counters are in this process.
    pub(crate) fn ready<T>(future: impl std::future::Future<Output = T>) -> T {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::pin!(future).poll(&mut context) {
            std::task::Poll::Ready(answer) => answer,
            std::task::Poll::Pending => panic!("it has to wait"),
        }
    }

    /// What the faces share, over an example policy and the memory of this process.
    pub(crate) fn app() -> App {
        let policy = "[limits.api]\nstrategy = 'fixed_window'\nlimit = 2\nwindow = '1h'";
        app_of(policy, tollgate::Clock::system())
    }

    pub(crate) fn app_of(policy: &str, clock: tollgate::Clock) -> App {
        let config = Config::parse(policy).expect("a policy");
        let stats = Stats::new(Telemetry::new(), Settings::of(&config), 1_700_000_000);
        let gate = Tollgate::builder().config(&config.gate).clock(clock).observer(stats.clone()).build();
        let metrics = PrometheusBuilder::new().build_recorder().handle();
        App::new(gate.expect("a registry"), config, None, metrics, stats)
    }
}
