//! Tests of how many calls are in flight to a shared store: of one connection, and of one peer. The store is a stand-in that counts
//! them and answers when it is told to, so nothing here depends on how fast anything is.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::io::DuplexStream;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, yield_now};
use tollgate::config::Config;
use tollgate::store::{Charged, Hold, Item, Outcome, Store, StoreFuture, StoredLimit};
use tollgate::telemetry::Telemetry;
use tollgate::{ChargeId, Settled, Settlement};

use super::*;
use crate::app::Act;
use crate::stats::{Settings, Stats};

/// Admits everything, as soon as it may.
struct Waits {
    in_flight: AtomicUsize,
    may_answer: Semaphore,
}

impl Store for Waits {
    fn charge<'a>(&'a self, items: &'a [Item<'a>], _hold: Option<Hold>) -> StoreFuture<'a, Charged> {
        Box::pin(async move {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
            self.may_answer.acquire().await.expect("open").forget();
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            let outcome = Outcome { allowed: true, ..Outcome::BLOCKED };
            Ok(Charged { allowed: true, outcomes: items.iter().map(|_| outcome).collect() })
        })
    }

    fn settle<'a>(&'a self, _id: ChargeId, _settlement: &'a Settlement) -> StoreFuture<'a, Settled> {
        Box::pin(async { Ok(Settled::Unknown) })
    }

    fn peek<'a>(&'a self, items: &'a [Item<'a>]) -> StoreFuture<'a, Charged> {
        self.charge(items, None)
    }

    fn forget<'a>(&'a self, _limit: &'a StoredLimit, _key: &'a str) -> StoreFuture<'a, bool> {
        Box::pin(async { Ok(false) })
    }
}

/// A server over that store.
struct Server {
    store: Arc<Waits>,
    app: Arc<App>,
    face: Arc<Face>,
    closing: watch::Sender<bool>,
}

impl Server {
    fn new(settings: &str) -> Server {
        let text = format!(
            "[server]\n{settings}\n[store]\nmode = 'redis'\nredis = {{ url = 'redis://192.0.2.9:6379' }}\n\
             [limits.api]\nstrategy = 'fixed_window'\nlimit = 1000\nwindow = '1h'\n"
        );
        let config = Config::parse(&text).expect("a config");
        let store = Arc::new(Waits { in_flight: AtomicUsize::new(0), may_answer: Semaphore::new(0) });
        let gate = Tollgate::builder().config(&config).store(store.clone()).build().expect("a registry");
        let stats = Stats::new(Telemetry::new(), Settings::of(&config), 1_700_000_000);
        let metrics = PrometheusBuilder::new().build_recorder().handle();
        let app = Arc::new(App::new(gate, config, None, metrics, stats));
        let face = Face::new(app.clone(), None);
        Server { store, app, face, closing: watch::Sender::new(false) }
    }

    /// A connection of a peer over RESP that has sent so many checks at once, of as many keys.
    async fn connect(&self, peer: &str, checks: usize) -> (DuplexStream, JoinHandle<()>) {
        let (mut ours, theirs) = tokio::io::duplex(1 << 20);
        let peer: IpAddr = peer.parse().expect("an address");
        let (app, face, closing) = (self.app.clone(), self.face.clone(), self.closing.subscribe());
        let served = tokio::spawn(async move { app.serve_peer(peer, face.speak(theirs, closing)).await });
        for number in 0..checks {
            let check = format!("*3\r\n$14\r\nTOLLGATE.CHECK\r\n$3\r\napi\r\n$6\r\nk:{number:04}\r\n");
            ours.write_all(check.as_bytes()).await.expect("room");
        }
        (ours, served)
    }

    /// How many calls are in flight once everybody has done what can be done. One thread runs all tasks, in turn.
    async fn in_flight(&self) -> usize {
        for _ in 0..1_000 {
            yield_now().await;
        }
        self.store.in_flight.load(Ordering::Relaxed)
    }

    /// Answers everything, and waits until each of these connections has as many answers.
    async fn answer(&self, connections: &mut [(DuplexStream, JoinHandle<()>)], checks: usize) {
        self.store.may_answer.add_permits(1 << 20);
        for (stream, _) in connections {
            let (mut answers, mut bytes) = (0, [0; 4096]);
            while answers < checks {
                let size = stream.read(&mut bytes).await.expect("an answer");
                assert!(size > 0, "the connection has ended after {answers} answers");
                answers += bytes[..size].iter().filter(|byte| **byte == b'*').count();
            }
        }
    }
}

#[tokio::test]
async fn one_connection_has_sixteen_calls_in_flight() {
    let server = Server::new("");
    let mut one = [server.connect("127.0.0.1", 100).await];
    assert_eq!(server.in_flight().await, 16, "of one connection that has sent a hundred");
    // As soon as these are answered, the next go.
    server.store.may_answer.add_permits(16);
    assert_eq!(server.in_flight().await, 16);
    server.answer(&mut one, 100).await;
    assert_eq!(server.in_flight().await, 0);
}

#[tokio::test]
async fn one_peer_has_so_many_calls_in_flight_over_all_its_connections() {
    let server = Server::new("store_calls_per_peer = 20");
    let mut crowd = Vec::new();
    for _ in 0..5 {
        crowd.push(server.connect("192.0.2.1", 100).await);
    }
    assert_eq!(server.in_flight().await, 20, "of five connections that have sent a hundred each");
    // Nobody else waits for that.
    let mut other = [server.connect("192.0.2.2", 1).await];
    assert_eq!(server.in_flight().await, 21);
    server.store.may_answer.add_permits(21);
    let (stream, _) = &mut other[0];
    let mut first = [0; 1];
    stream.read_exact(&mut first).await.expect("an answer");
    assert_eq!(&first, b"*");
    server.answer(&mut crowd, 100).await;
    assert_eq!(server.in_flight().await, 0);
}

#[tokio::test]
async fn a_peer_is_one_over_all_faces() {
    let server = Server::new("store_calls_per_peer = 20");
    let _resp = server.connect("192.0.2.1", 12).await;
    for number in 0..40 {
        let (app, peer) = (server.app.clone(), "192.0.2.1".parse().expect("an address"));
        tokio::spawn(async move {
            let key = format!("k:{number}");
            let asks = [Charge::new("api", &key)];
            app.serve_peer(peer, app.decide(Act::Charge, &asks, |_, decided| decided.map(drop))).await
        });
    }
    assert_eq!(server.in_flight().await, 20, "twelve over RESP, and of forty over HTTP the rest");
}

#[tokio::test]
async fn a_trusted_peer_is_not_counted() {
    let server = Server::new("store_calls_per_peer = 20\ntrusted_peers = ['192.0.2.1']");
    let mut crowd = Vec::new();
    for _ in 0..5 {
        crowd.push(server.connect("192.0.2.1", 16).await);
    }
    assert_eq!(server.in_flight().await, 80);
}
