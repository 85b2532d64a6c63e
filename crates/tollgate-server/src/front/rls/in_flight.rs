//! Tests of how many calls of one Envoy are in flight to a shared store, over real connections. The store is a stand-in that counts
//! them and answers when the test lets it, so what is asserted does not depend on how fast anything is.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinSet, yield_now};
use tokio_util::task::TaskTracker;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::proto::common::RateLimitDescriptor;
use super::proto::common::rate_limit_descriptor::Entry;
use super::proto::service::rate_limit_response::Code;
use super::proto::service::{RateLimitRequest, RateLimitResponse};
use crate::front::waiting_store::{WaitingStore, app_over};
use crate::serve::listen::{ConnectionLimit, Room};

/// Two machines, as the server sees it.
const GREEDY: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const OTHER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));

const CONNECTIONS: usize = 5;
/// As many as a connection may have open, but for one that asks for health.
const CALLS: usize = 99;

struct Server {
    store: Arc<WaitingStore>,
    address: SocketAddr,
    _closing: watch::Sender<bool>,
}

impl Server {
    async fn start(settings: &str) -> Server {
        let (store, app) = app_over(settings);
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).await.expect("a port");
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, listener.local_addr().expect("bound").port()));
        let connections = ConnectionLimit::new("test", Room { connections: 100, of_one_peer: 100 });
        let (closing, until) = watch::channel(false);
        tokio::spawn(super::serve(listener, connections, app, TaskTracker::new(), until).expect("a service"));
        Server { store, address, _closing: closing }
    }

    async fn connect(&self, from: IpAddr) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.address)).expect("an address");
        endpoint.local_address(Some(from)).connect().await.expect("it listens")
    }

    /// Waits until so many calls are in flight.
    async fn until_in_flight(&self, calls: usize) {
        while self.store.in_flight() < calls {
            yield_now().await;
        }
    }
}

async fn ask(channel: Channel, user: String) -> Result<RateLimitResponse, Status> {
    let entry = Entry { key: "user".into(), value: user.into_bytes() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let request = RateLimitRequest { domain: "edge".into(), descriptors: vec![descriptor], hits_addend: 0 };
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await.expect("it is there");
    let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    let codec = tonic_prost::ProstCodec::default();
    client.unary(Request::new(request), path, codec).await.map(tonic::Response::into_inner)
}

/// A greedy peer sends all that its connections can carry. Answers what came of it, and how many calls it has in flight.
async fn crowd(server: &Server) -> (JoinSet<Result<RateLimitResponse, Status>>, usize) {
    let mut calls = JoinSet::new();
    for connection in 0..CONNECTIONS {
        let channel = server.connect(GREEDY).await;
        for number in 0..CALLS {
            calls.spawn(ask(channel.clone(), format!("{connection}-{number}")));
        }
        // A connection is read in order, so when these are answered its calls have come.
        for _ in 0..2 {
            let mut health = HealthClient::new(channel.clone());
            health.check(HealthCheckRequest::default()).await.expect("an answer");
        }
    }
    (calls, server.store.settled_in_flight().await)
}

#[tokio::test]
async fn one_envoy_has_so_many_calls_in_flight_over_all_its_connections() {
    // Of those on this machine only one is trusted.
    let server = Server::start("store_calls_per_peer = 20\ntrusted_peers = ['127.0.0.1']").await;
    let (mut calls, in_flight) = crowd(&server).await;
    assert!(in_flight <= 20, "{in_flight} of {} calls of one peer are in flight", CONNECTIONS * CALLS);
    server.until_in_flight(20).await;
    // No other call waits for that.
    let other = tokio::spawn(ask(server.connect(OTHER).await, "other".into()));
    server.until_in_flight(21).await;
    server.store.answer(1 << 20);
    assert_eq!(other.await.expect("no panic").expect("an answer").overall_code(), Code::Ok);
    while let Some(answered) = calls.join_next().await {
        assert_eq!(answered.expect("no panic").expect("an answer").overall_code(), Code::Ok);
    }
    assert_eq!(server.store.most_in_flight(), 21, "also while they were answered");
}

#[tokio::test]
async fn an_envoy_that_is_trusted_is_not_counted() {
    let server = Server::start("store_calls_per_peer = 20\ntrusted_peers = ['127.0.0.2']").await;
    let (_calls, _) = crowd(&server).await;
    server.until_in_flight(CONNECTIONS * CALLS).await;
}
