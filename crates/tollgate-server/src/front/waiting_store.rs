//! For tests: a shared store that counts the calls in flight and answers when the test lets it, and a server's state over it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::sync::Semaphore;
use tokio::task::yield_now;
use tollgate::store::{Charged, EachFuture, Hold, Outcome, Store, StoreFuture, StoredCharge, StoredLimit};
use tollgate::telemetry::Telemetry;
use tollgate::{ChargeId, Settled, Settlement, Tollgate};

use crate::app::App;
use crate::config::Config;
use crate::stats::{Settings, Stats};

/// Admits everything, as soon as it may.
pub(super) struct WaitingStore {
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
    calls: AtomicUsize,
    charges_in_flight: AtomicUsize,
    may_answer: Semaphore,
}

impl WaitingStore {
    /// How many calls are in flight once everybody has done what can be done. One thread runs all tasks, in turn.
    pub(super) async fn settled_in_flight(&self) -> usize {
        for _ in 0..1_000 {
            yield_now().await;
        }
        self.in_flight()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// How many calls ever were in flight at once.
    pub(super) fn most_in_flight(&self) -> usize {
        self.most_in_flight.load(Ordering::Relaxed)
    }

    /// How many calls there were, and how many charges are in those in flight.
    pub(super) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    pub(super) fn charges_in_flight(&self) -> usize {
        self.charges_in_flight.load(Ordering::Relaxed)
    }

    /// Is in flight, with so many charges, until it may answer.
    async fn wait(&self, charges: usize) {
        let in_flight = 1 + self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.most_in_flight.fetch_max(in_flight, Ordering::Relaxed);
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.charges_in_flight.fetch_add(charges, Ordering::Relaxed);
        self.may_answer.acquire().await.expect("open").forget();
        self.charges_in_flight.fetch_sub(charges, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Answers so many calls, those that are to come included.
    pub(super) fn answer(&self, calls: usize) {
        self.may_answer.add_permits(calls);
    }
}

impl Store for WaitingStore {
    fn charge<'a>(
        &'a self,
        charges: &'a [StoredCharge<'a>],
        _hold: Option<Hold>,
    ) -> StoreFuture<'a, Charged> {
        Box::pin(async move {
            self.wait(charges.len()).await;
            let outcome = Outcome { allowed: true, ..Outcome::BLOCKED };
            Ok(Charged { allowed: true, outcomes: charges.iter().map(|_| outcome).collect() })
        })
    }

    fn charge_each<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> EachFuture<'a> {
        Box::pin(async move {
            self.wait(charges.len()).await;
            charges.iter().map(|_| Ok(Outcome { allowed: true, ..Outcome::BLOCKED })).collect()
        })
    }

    fn settle<'a>(&'a self, _id: ChargeId, _settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async { Ok(Settled::Unknown) })
    }

    fn peek<'a>(&'a self, charges: &'a [StoredCharge<'a>]) -> StoreFuture<'a, Charged> {
        self.charge(charges, None)
    }

    fn forget<'a>(&'a self, _limit: &'a StoredLimit, _key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

/// The state of a server with these settings, over such a store. Envoy's descriptors of the domain `edge` with a `user` meet its limit.
pub(super) fn app_over(settings: &str) -> (Arc<WaitingStore>, Arc<App>) {
    let text = format!(
        "[server]\n{settings}\n[store]\nmode = 'redis'\nredis = {{ url = 'redis://192.0.2.9:6379' }}\n\
         [limits.api]\nstrategy = 'fixed_window'\nlimit = 1000\nwindow = '1h'\n\
         [[envoy]]\ndomain = 'edge'\nentries = ['user']\nlimit = 'api'\n"
    );
    let config = Config::parse(&text).expect("a config");
    let store = Arc::new(WaitingStore {
        in_flight: AtomicUsize::new(0),
        most_in_flight: AtomicUsize::new(0),
        calls: AtomicUsize::new(0),
        charges_in_flight: AtomicUsize::new(0),
        may_answer: Semaphore::new(0),
    });
    let gate = Tollgate::builder().config(&config.gate).store(store.clone()).build().expect("a gate");
    let stats = Stats::new(Telemetry::new(), Settings::of(&config), 1_700_000_000);
    let metrics = PrometheusBuilder::new().build_recorder().handle();
    (store, Arc::new(App::new(gate, config, None, metrics, stats)))
}
