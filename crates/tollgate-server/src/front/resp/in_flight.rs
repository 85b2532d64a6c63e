//! Tests of how many calls are in flight to a shared store: of one connection, and of one peer. The store is a stand-in that counts
//! them and answers when the test lets it (`waiting_store.rs`), so nothing here depends on how fast anything is.

use std::net::IpAddr;

use tokio::io::DuplexStream;
use tokio::task::JoinHandle;

use super::*;
use crate::front::json::answer_gate;
use crate::front::waiting_store::{WaitingStore, app_over};

/// A server over that store.
struct Server {
    store: Arc<WaitingStore>,
    app: Arc<App>,
    face: Arc<Face>,
    closing: watch::Sender<bool>,
}

impl Server {
    fn new(settings: &str) -> Server {
        let (store, app) = app_over(settings);
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

    /// How many calls are in flight once everybody has done what can be done.
    async fn in_flight(&self) -> usize {
        self.store.settled_in_flight().await
    }

    /// Answers everything, and waits until each of these connections has as many answers.
    async fn answer(&self, connections: &mut [(DuplexStream, JoinHandle<()>)], checks: usize) {
        self.store.answer(1 << 20);
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
async fn one_connection_has_one_call_in_flight() {
    let server = Server::new("");
    let mut one = [server.connect("127.0.0.1", 200).await];
    assert_eq!(server.in_flight().await, 1, "of one connection that has sent two hundred");
    assert_eq!(server.store.charges_in_flight(), 64);
    // As soon as these are answered, the next go.
    server.store.answer(1);
    assert_eq!(server.in_flight().await, 1);
    server.answer(&mut one, 200).await;
    assert_eq!(server.in_flight().await, 0);
    assert!(server.store.calls() <= 8, "{} calls for 200 checks", server.store.calls());
}

#[tokio::test]
async fn one_peer_has_so_many_charges_in_flight_over_all_its_connections() {
    let server = Server::new("store_calls_per_peer = 20");
    let mut crowd = Vec::new();
    for _ in 0..25 {
        crowd.push(server.connect("192.0.2.1", 4).await);
    }
    server.in_flight().await;
    let charges = server.store.charges_in_flight();
    assert!((17..=20).contains(&charges), "{charges} of 25 connections that have sent four each");
    // No other call waits for that.
    let mut other = [server.connect("192.0.2.2", 1).await];
    server.in_flight().await;
    assert_eq!(server.store.charges_in_flight(), charges + 1);
    server.answer(&mut other, 1).await;
    server.answer(&mut crowd, 4).await;
    assert_eq!(server.in_flight().await, 0);
}

/// A batch goes whole, however small the share is: when nothing else of its peer is in flight.
#[tokio::test]
async fn a_batch_that_is_larger_than_the_share_goes_alone() {
    let server = Server::new("store_calls_per_peer = 20");
    let mut crowd = Vec::new();
    for _ in 0..5 {
        crowd.push(server.connect("192.0.2.1", 64).await);
    }
    for _ in 0..5 {
        assert_eq!(server.in_flight().await, 1, "of five connections that have sent sixty-four each");
        assert_eq!(server.store.charges_in_flight(), 64);
        server.store.answer(1);
    }
    server.answer(&mut crowd, 64).await;
    assert_eq!(server.store.calls(), 5);
}

#[tokio::test]
async fn a_peer_is_one_over_all_faces() {
    let server = Server::new("store_calls_per_peer = 20");
    let mut resp = Vec::new();
    for _ in 0..12 {
        resp.push(server.connect("192.0.2.1", 1).await);
    }
    assert_eq!(server.in_flight().await, 12);
    for number in 0..40 {
        let (app, peer) = (server.app.clone(), "192.0.2.1".parse().expect("an address"));
        tokio::spawn(async move {
            let (path, headers) = (format!("api/k:{number}"), http::HeaderMap::new());
            app.serve_peer(peer, answer_gate(&app, &path, None, &headers)).await.map(drop)
        });
    }
    assert_eq!(server.in_flight().await, 20, "twelve over RESP, and of forty over HTTP the rest");
}

#[tokio::test]
async fn a_trusted_peer_is_not_counted() {
    let server = Server::new("store_calls_per_peer = 20\ntrusted_peers = ['192.0.2.1']");
    let mut crowd = Vec::new();
    for _ in 0..25 {
        crowd.push(server.connect("192.0.2.1", 16).await);
    }
    assert_eq!(server.in_flight().await, 25);
}
